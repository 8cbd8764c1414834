package metal

import (
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
)

// A person has as long as a command may live; a BMC has two minutes.
func TestPeopleHaveTime(t *testing.T) {
	for driver, want := range map[string]time.Duration{"manual": envelope.MaxLife, "redfish": 2 * time.Minute, "wol": 2 * time.Minute, "acme-bmc": 2 * time.Minute} {
		c, err := PowerCommand(store.BMC{Driver: driver, Address: "x"}, "on")
		if err != nil || c.Timeout != want || len(c.SecretRefs) != 0 {
			t.Errorf("PowerCommand of driver %s = %+v, %v, want %v and no secret", driver, c, err, want)
		}
	}
	for _, step := range Steps() {
		if step.ID != "power.setPower" {
			continue
		}
		c, err := step.Command(store.Machine{BMC: store.BMC{Driver: Manual, Address: "x"}}, []byte(`"on"`))
		if err != nil || c.Timeout != envelope.MaxLife || len(c.SecretRefs) != 0 {
			t.Errorf("the step power.setPower = %+v, %v, want %v and no secret", c, err, envelope.MaxLife)
		}
	}
}

func TestConfirmCommand(t *testing.T) {
	c, err := ConfirmCommand(store.BMC{Driver: "manual", Address: "Rack3"}, "off")
	req, ok := c.Args.(*bmcv1.BmcConfirmRequest)
	if err != nil || c.Kind != "bmc.confirm" || !ok || req.Address != "Rack3" || req.Power != "off" || len(c.SecretRefs) != 0 {
		t.Errorf("ConfirmCommand = %+v, %v", c, err)
	}
	for _, tt := range []struct{ driver, power string }{{"manual", "cycle"}, {"manual", ""}, {"manual", "unknown"}, {"redfish", "on"}, {"wol", "on"}} {
		if c, err := ConfirmCommand(store.BMC{Driver: tt.driver, Address: "x"}, tt.power); err == nil {
			t.Errorf("ConfirmCommand(%s, %q) = %+v, want an error", tt.driver, tt.power, c)
		}
	}
}
