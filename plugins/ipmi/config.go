package ipmi

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// schema says what parseConfig accepts, as far as a schema can.
const schema = `{
  "$schema": "https://json-schema.org/draft/2020-12/schema",
  "type": "object",
  "required": ["address"],
  "additionalProperties": false,
  "properties": {
    "address": {"type": "string", "minLength": 1, "maxLength": 300,
      "description": "Host name or IP address with an optional port (623)."},
    "credentials": {"type": "string", "writeOnly": true, "x-bc": {"kind": "secret"}},
    "tlsSpkiSha256": {"type": "string", "maxLength": 0,
      "description": "IPMI has no TLS: a pin is refused."},
    "options": {"type": "object", "additionalProperties": false, "properties": {
      "cipherSuite": {"type": "integer", "enum": [3, 8, 12, 17], "default": 17}}}
  }
}`

const (
	defaultPort  = 623
	defaultSuite = 17
	// maxPassword is IPMI 2.0's.
	maxPassword = 20
)

// config is a parsed configuration.
type config struct {
	host  string
	port  int
	suite int
}

// parseConfig reads { address, options { cipherSuite } } strictly. A pin is
// pin-unsupported, since nothing could check it.
func parseConfig(raw json.RawMessage) (config, error) {
	c := config{suite: defaultSuite}
	t, err := metal.TargetForm{
		Unpinned: "IPMI has no TLS, so the key pin cannot be checked: use a Redfish driver, or remove the pin",
		Options: func(raw json.RawMessage) (err error) {
			c.suite, err = parseOptions(raw)
			return err
		},
	}.Parse(raw)
	if err != nil {
		return config{}, err
	}
	if c.host, c.port, err = parseAddress(t.Address); err != nil {
		return config{}, errs.New(errs.InvalidAddress, "address %.80q: %v", t.Address, err)
	}
	return c, nil
}

// parseOptions answers the cipher suite: only those with an integrity HMAC and
// AES. Suite 0 needs no password at all, and 1 and 2 do not encrypt.
func parseOptions(raw json.RawMessage) (int, error) {
	var in struct {
		CipherSuite *int `json:"cipherSuite"`
	}
	if err := driver.StrictJSON(raw, &in, "cipherSuite"); err != nil {
		return 0, err
	}
	if in.CipherSuite == nil {
		return defaultSuite, nil
	}
	if !slices.Contains([]int{3, 8, 12, 17}, *in.CipherSuite) {
		return 0, fmt.Errorf("cipherSuite %d: want 17, 12, 8 or 3", *in.CipherSuite)
	}
	return *in.CipherSuite, nil
}

var (
	schemeForm = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9+.-]*://`)
	userForm   = regexp.MustCompile(`^[A-Za-z0-9._@-]{1,64}$`)
)

// parseAddress reads [scheme://]host[:port].
func parseAddress(text string) (host string, port int, err error) {
	return metal.ParseHostPort(text[len(schemeForm.FindString(text)):], defaultPort)
}

// credentials of one call.
type credentials struct {
	username string
	password secret.Value
}

func readCredentials(ctx *driver.Context) (credentials, error) {
	username, err := ctx.Secrets.Resolve(ctx, "username")
	if err != nil {
		return credentials{}, err
	}
	password, err := ctx.Secrets.Resolve(ctx, "password")
	if err != nil {
		return credentials{}, err
	}
	c := credentials{string(username.Reveal()), password}
	// A leading hyphen would still be ipmitool's -U argument, never an option.
	if !userForm.MatchString(c.username) {
		return credentials{}, errs.New(errs.CredentialsUnavailable, "user name is not 1 to 64 of A-Z a-z 0-9 . _ @ -")
	}
	p := password.Reveal()
	switch {
	case len(p) == 0:
		return credentials{}, errs.New(errs.CredentialsUnavailable, "password is empty")
	case len(p) > maxPassword:
		return credentials{}, errs.New(errs.CredentialsUnavailable, "password is longer than IPMI's %d bytes", maxPassword)
	case strings.ContainsFunc(string(p), func(r rune) bool { return unicode.IsSpace(r) || unicode.IsControl(r) }):
		return credentials{}, errs.New(errs.CredentialsUnavailable, "password holds white space or a control character, of which ipmitool reads only what comes before")
	}
	return c, nil
}
