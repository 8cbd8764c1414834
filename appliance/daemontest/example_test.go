package daemontest_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/daemontest"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/host"
)

// A test of a control plane starts a daemon with the join string that the
// gateway minted, and the drivers that it is to host. From then on the gateway's
// driver.invoke commands run in them. Drivers of plugin processes come from
// external.StartAll; those of the test itself do as well.
func ExampleFakeDaemon() {
	_ = func(t *testing.T, join string, drivers []*driver.Definition) {
		daemon := daemontest.FakeDaemon(t, daemontest.Options{
			Role: agentv1.Role_ROLE_NODE, Join: join, GPU: true,
			Host: daemontest.FakeDriverInvoke(drivers),
		})
		t.Logf("agent %s of machine %s is at home", daemon.AgentID(), daemon.MachineID())
	}
}

func ExampleFakeDriverInvoke() {
	d, err := acme()
	if err != nil {
		fmt.Println(err)
		return
	}
	hosted := daemontest.FakeDriverInvoke([]*driver.Definition{d})
	answer, err := hosted.Invoke(context.Background(), host.Call{
		Driver: "acme-bmc", Kind: "power", Operation: "getPower", Config: json.RawMessage(`{"address":"10.0.0.5"}`),
	})
	fmt.Println(string(answer), err)
	_, err = hosted.Invoke(context.Background(), host.Call{Driver: "ipmi", Kind: "power", Operation: "getPower"})
	fmt.Println(err)
	// Output:
	// "off" <nil>
	// unsupported-driver: no hosted driver ipmi implements power
}
