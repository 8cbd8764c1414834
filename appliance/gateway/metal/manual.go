package metal

import (
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
)

// Manual is the driver of machines that people switch.
const Manual = "manual"

// manualTimeout is how long a person has: as long as a command may live.
const manualTimeout = 24 * time.Hour

// secretRefs are the secrets that commands to the BMC list: a machine without a
// BMC has none.
func secretRefs(b store.BMC) []string {
	if b.CredentialsRef == "" {
		return nil
	}
	return []string{b.CredentialsRef}
}

// ManualKey is the spelling under which a box knows a machine of driver manual.
func ManualKey(address string) string { return strings.ToLower(address) }

// ManualActions are what a person may be asked.
func ManualActions() []string { return []string{"on", "off", "soft", "cycle", "reset"} }

// ConfirmCommand carries a person's word, "on" or "off", to the machine's box.
func ConfirmCommand(b store.BMC, power string) (Command, error) {
	switch {
	case b.Driver != Manual:
		return Command{}, apierr.Cannot(unsupported, "the machine's driver is %s: only a machine of driver %s is switched by people", b.Driver, Manual)
	case power != "on" && power != "off":
		return Command{}, apierr.Invalid("power %.40q: want on or off", power)
	}
	c := CommandOf(cmdkind.Confirm)
	c.Args = &bmcv1.BmcConfirmRequest{Address: b.Address, Power: power}
	return c, nil
}
