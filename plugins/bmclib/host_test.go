package bmclib

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/plugins/host"
	"github.com/better-compute/site-appliance/plugins/host/hosttest"
)

func TestMain(m *testing.M) {
	hosttest.Shim()
	os.Exit(m.Run())
}

// TestEveryVendorThroughThePluginHost is why a vendor is registered: pins file,
// shim, handshake, mutual TLS, Invoke, bcx-bmclib, bmclib's provider and a BMC,
// for every operation. A driver without a case here fails it.
func TestEveryVendorThroughThePluginHost(t *testing.T) {
	hosttest.NeedsRoot(t)
	dir := hosttest.NewDir(t)
	dir.Add("bcx-bmclib", hosttest.Build(t, "github.com/better-compute/site-appliance/plugins/cmd/bcx-bmclib"))
	h := hosttest.Start(t, dir.Config())
	redfish := map[string]string{"on": "On", "off": "ForceOff", "soft": "GracefulShutdown", "cycle": "PowerCycle", "reset": "ForceRestart", "nmi": "Nmi"}
	cases := map[string]struct {
		kinds []string
		words map[string]string // what the BMC is told, by action; the rest is unsupported-operation
	}{
		"dell":       {[]string{"inspect", "power"}, redfish},
		"openbmc":    {[]string{"inspect", "power"}, redfish},
		"supermicro": {[]string{"inspect", "power"}, redfish},
		"asrockrack": {[]string{"inspect", "power"}, map[string]string{"on": "power_command 1", "off": "power_command 0", "soft": "power_command 5", "cycle": "power_command 2", "reset": "power_command 3"}},
		"intel-amt":  {[]string{"power"}, map[string]string{"on": "state 2", "off": "state 8", "soft": "state 12", "cycle": "state 5"}},
	}
	if got := h.Drivers(); len(got) != len(cases) {
		t.Errorf("the plugin has %d drivers, want %d", len(got), len(cases))
	}
	for _, d := range h.Drivers() {
		c, known := cases[d.ID]
		if !known || !slices.Equal(d.Kinds, c.kinds) {
			t.Errorf("driver %s serves %v: want a case for it, and %v", d.ID, d.Kinds, c.kinds)
			continue
		}
		b := newBMC(t, d.ID)
		invoke := func(operation, args string) (string, error) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			config, _ := json.Marshal(pinned(b))
			kind, name, _ := strings.Cut(operation, ".")
			out, err := h.Invoke(ctx, host.Call{
				Driver: d.ID, Kind: kind, Operation: name, Config: config, Args: json.RawMessage(args), IdempotencyKey: "cmd_1", Deadline: time.Now().Add(time.Minute),
				Secrets: map[string]secret.Value{"username": secret.New([]byte(user)), "password": secret.New([]byte(password))},
			})
			return string(out), err
		}
		for _, action := range []string{"on", "cycle", "reset", "nmi", "off", "on", "soft"} {
			before := b.did()
			if action == "soft" {
				b.set(func(b *bmc) { b.states = []string{"12", "2", "5"} })
			}
			_, err := invoke("power.setPower", `"`+action+`"`)
			word, served := c.words[action]
			if !served {
				if errs.CodeOf(err) != errs.UnsupportedOperation {
					t.Errorf("%s: setPower %s = %v, want unsupported-operation", d.ID, action, err)
				}
				continue
			}
			if did := b.did(); err != nil || !slices.Equal(did, append(before, word)) {
				t.Errorf("%s: setPower %s = %v, the machine was told %q, want %s", d.ID, action, err, did[len(before):], word)
			}
			want := `"on"`
			if action == "off" || action == "soft" {
				want = `"off"`
			}
			if out, err := invoke("power.getPower", ""); err != nil || out != want {
				t.Errorf("%s: getPower after %s = %s, %v, want %s", d.ID, action, out, err, want)
			}
		}
		if slices.Contains(c.kinds, "inspect") {
			if out, err := invoke("inspect.inspect", ""); err != nil || !strings.Contains(out, `"serial":"SN?[2J-1"`) {
				t.Errorf("%s: inspect = %s, %v", d.ID, out, err)
			}
		}
		if b.open() != 0 {
			t.Errorf("%s: %d sessions are left", d.ID, b.open())
		}
		if d.ID != "supermicro" {
			continue
		}
		// A panic in bmclib is the call's error, and the plugin goes on.
		b.set(func(b *bmc) {
			b.fault = func(w http.ResponseWriter, r *http.Request) bool {
				if r.URL.Path != "/cgi/ipmi.cgi" {
					return false
				}
				fmt.Fprint(w, `<?xml version="1.0"?><IPMI></IPMI>`)
				return true
			}
		})
		if _, err := invoke("power.getPower", ""); errs.CodeOf(err) != errs.BmcError {
			t.Errorf("a panic in the plugin = %v, want bmc-error", err)
		}
		b.set(func(b *bmc) { b.fault = nil })
		if out, err := invoke("power.getPower", ""); err != nil || out != `"off"` {
			t.Errorf("getPower after a panic = %s, %v", out, err)
		}
	}
}
