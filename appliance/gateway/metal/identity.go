package metal

import "github.com/better-compute/site-appliance/appliance/gateway/api/apierr"

// ipmi is the driver of BMCs that cannot say which MACs their machine has.
const ipmi = "ipmi"

// CheckIdentity refuses to enrol what could never be network-booted: a machine
// behind driver ipmi is known by the MACs that it boots by, or by the product UUID
// that its site's box meets when it boots. The driver itself runs on that box.
func CheckIdentity(driver, pool string, agent bool, macs []string, uuid string) error {
	switch {
	case driver != ipmi:
		return nil
	case len(macs) == 0 && uuid == "":
		e := apierr.Invalid("driver %s does not find a machine's MACs: name those that it network-boots by, or its product UUID", driver)
		e.Reason = "boot-identity-missing"
		return e
	case !agent:
		return apierr.Busy("pool-without-agent", "driver %s runs on a site's box, and the one of pool %s has not enrolled yet", driver, pool)
	}
	return nil
}
