package invocation

import (
	"encoding/json"
	"regexp"
	"strings"

	"github.com/better-compute/site-appliance/plugins/driver"
)

var actionForm = regexp.MustCompile(`^[a-z]{1,32}$`)

// Action is what power.setPower is to do, where the arguments say it in one word.
func (r Request) Action() string {
	if r.Name() != "power.setPower" {
		return ""
	}
	args, err := driver.ParseArgs(r.Args)
	var action string
	if err != nil || len(args) != 1 || json.Unmarshal(args[0], &action) != nil || !actionForm.MatchString(action) {
		return ""
	}
	return action
}

// Address is the configuration's own "address", without what lies behind the host
// and port of a URL; empty where there is none.
func (r Request) Address() string {
	var fields map[string]json.RawMessage
	var address string
	if json.Unmarshal(r.Config, &fields) != nil || json.Unmarshal(fields["address"], &address) != nil {
		return ""
	}
	if scheme, rest, ok := strings.Cut(address, "://"); ok {
		if end := strings.IndexAny(rest, "/?#"); end >= 0 {
			address = scheme + "://" + rest[:end]
		}
	}
	return address
}
