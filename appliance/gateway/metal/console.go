package metal

import (
	"encoding/json"
	"net"
	"slices"
	"strings"

	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// maxHistory bounds what a console shows of what the machine said before, in bytes.
const maxHistory = 256 << 10

// consoleOf are the drivers that serve the console of machines by the driver of
// their BMC, where nobody bound another. Whether a Redfish BMC has one, its box finds
// out.
var consoleOf = map[string]string{"ipmi": "ipmi-sol", "redfish": "redfish"}

// ConsoleCommand opens the machine's serial console: by the driver that its
// binding of kind console names, else by the one that goes with its BMC's driver,
// else by that itself where kinds, which the site's agent names for it, say so.
func ConsoleCommand(m store.Machine, kinds []string, takeover bool, history uint32) (Command, error) {
	if history > maxHistory {
		return Command{}, apierr.Invalid("history_bytes %d: want at most %d", history, maxHistory)
	}
	b := m.BMC
	switch bound, ok := m.Drivers["console"]; {
	case ok:
		var err error
		if b, err = consoleBinding(b, bound.Driver, bound.Config); err != nil {
			return Command{}, err
		}
	case consoleOf[b.Driver] != "":
		b.Driver = consoleOf[b.Driver]
	case !slices.Contains(kinds, "console"):
		return Command{}, apierr.Cannot(unsupported, "driver %s has no serial console: where the BMC serves IPMI's, enroll the machine with --driver console=ipmi-sol", b.Driver)
	}
	args, err := json.Marshal([]any{struct {
		Takeover bool   `json:"takeover,omitempty"`
		History  uint32 `json:"historyBytes,omitempty"`
	}{takeover, history}})
	if err != nil {
		return Command{}, err
	}
	return toBMC(b, "console.open", string(args)), nil
}

// consoleBinding is where a console's own driver finds it: what the binding does
// not say is the BMC's, without its port, which is another protocol's.
func consoleBinding(bmc store.BMC, id string, config json.RawMessage) (store.BMC, error) {
	out := store.BMC{Driver: id, Address: hostOf(bmc.Address), CredentialsRef: bmc.CredentialsRef}
	if len(config) == 0 {
		return out, nil
	}
	var in struct {
		Address     string          `json:"address"`
		Credentials string          `json:"credentials"`
		Pin         string          `json:"tlsSpkiSha256"`
		Options     json.RawMessage `json:"options"`
	}
	if err := driver.StrictJSON(config, &in, "address", "credentials", "tlsSpkiSha256", "options"); err != nil {
		return store.BMC{}, apierr.Cannot(unsupported, "the machine's console binding: %v", err)
	}
	if in.Address != "" {
		out.Address = in.Address
	}
	if in.Credentials != "" {
		out.CredentialsRef = in.Credentials
	}
	out.TLSSPKISHA256, out.DriverOptions = strings.ToLower(in.Pin), string(in.Options)
	return out, nil
}

// hostOf is an address without scheme and port.
func hostOf(address string) string {
	if _, rest, ok := strings.Cut(address, "://"); ok {
		address = rest
	}
	if host, _, err := net.SplitHostPort(address); err == nil {
		return host
	}
	return strings.TrimSuffix(strings.TrimPrefix(address, "["), "]")
}
