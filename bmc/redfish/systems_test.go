package redfish

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmctest"
)

// Beside the host, some BMCs list managers, boards and composed systems.
func TestWhichSystem(t *testing.T) {
	for _, tt := range []struct {
		fault bmctest.Fault
		want  string
		text  string
	}{
		{bmctest.ManagerAmongSystems, "off", ""},
		{bmctest.ManagerAsSystem, "", "lists no system"},
		{bmctest.SeveralSystems, "", "cannot be told"},
	} {
		r, b := rig(t, tt.fault)
		got, err := b.power()
		if got != tt.want || tt.want == "" && (errs.CodeOf(err) != errs.BmcError || !strings.Contains(err.Error(), tt.text)) {
			t.Errorf("%s: getPower() = %q, %v, want %q or bmc-error with %q", tt.fault, got, err, tt.want, tt.text)
		}
		if _, err := b.do("power", "setPower", "on"); (err == nil) != (tt.want != "") {
			t.Errorf("%s: setPower(on) = %v", tt.fault, err)
		}
		if got := len(r.Log()); got != len(tt.want)/3 {
			t.Errorf("%s: the BMC logged %q", tt.fault, r.Log())
		}
	}
	member := func(n int, body string) (string, http.HandlerFunc) {
		return fmt.Sprintf("GET /redfish/v1/Systems/%d", n), say(body)
	}
	const reset = `"Actions":{"#ComputerSystem.Reset":{"target":"/redfish/v1/x"}}`
	for name, tt := range map[string]struct{ one, two, want string }{
		"a board beside the host":    {`{"PowerState":"On","SystemType":"Physical"}`, `{"PowerState":"Off","SystemType":"Physical",` + reset + `}`, "off"},
		"a composed one beside it":   {`{"PowerState":"On","SystemType":"Composed",` + reset + `}`, `{"PowerState":"Off","SystemType":"Physical",` + reset + `}`, "off"},
		"two hosts":                  {`{"PowerState":"On",` + reset + `}`, `{"PowerState":"Off","SystemType":"Physical",` + reset + `}`, ""},
		"a manager without its type": {`{"@odata.type":"#Manager.v1_0_0.Manager","PowerState":"On",` + reset + `}`, `{"PowerState":"Off",` + reset + `}`, "off"},
	} {
		change := map[string]http.HandlerFunc{systemsGet: say(`{"Members":[{"@odata.id":"/redfish/v1/Systems/1"},{"@odata.id":"/redfish/v1/Systems/2"}]}`)}
		k1, h1 := member(1, tt.one)
		k2, h2 := member(2, tt.two)
		change[k1], change[k2] = h1, h2
		_, b := serve(t, change)
		if got, err := b.power(); got != tt.want || (err == nil) != (tt.want != "") {
			t.Errorf("%s: getPower() = %q, %v, want %q", name, got, err, tt.want)
		}
	}
}

// The place of a system that moved is found again.
func TestSystemMoves(t *testing.T) {
	moved := atomic.Bool{}
	_, b := serve(t, map[string]http.HandlerFunc{
		systemsGet: func(w http.ResponseWriter, _ *http.Request) {
			n := 1
			if moved.Load() {
				n = 2
			}
			fmt.Fprintf(w, `{"Members":[{"@odata.id":"/redfish/v1/Systems/%d"}]}`, n)
		},
		systemGet: func(w http.ResponseWriter, r *http.Request) {
			if moved.Load() {
				http.NotFound(w, r)
				return
			}
			fmt.Fprint(w, `{"PowerState":"On"}`)
		},
		"GET /redfish/v1/Systems/2": say(`{"PowerState":"Off"}`),
	})
	for i, want := range []string{"on", "off"} {
		if got, err := b.power(); got != want || err != nil {
			t.Errorf("getPower() = %q, %v, want %q", got, err, want)
		}
		moved.Store(i == 0)
	}
}
