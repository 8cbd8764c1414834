package ipmi

import (
	"context"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/plugins/host"
	"github.com/better-compute/site-appliance/plugins/host/hosttest"
)

func TestMain(m *testing.M) {
	hosttest.Shim()
	os.Exit(m.Run())
}

func needsIpmitool(t *testing.T) {
	t.Helper()
	if _, err := findTool(searchPath()); err != nil {
		t.Skip("needs ipmitool: " + err.Error())
	}
}

const (
	user     = "ADMIN"
	password = "twenty-bytes-pass-ok"
)

func startBMC(t *testing.T, opts ...bmctest.Option) (*bmctest.IPMI, *bmctest.Fake) {
	t.Helper()
	fake := bmctest.NewFake()
	bmc, err := bmctest.StartIPMI(context.Background(), "127.0.0.1:0", user, password, fake, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { bmc.Close() })
	return bmc, fake
}

func secrets(user, password string) map[string]secret.Value {
	return map[string]secret.Value{"username": secret.New([]byte(user)), "password": secret.New([]byte(password))}
}

// TestWholePath goes pins, shim, handshake, mutual TLS, Describe, Invoke,
// bcx-ipmi, ipmitool, BMC.
func TestWholePath(t *testing.T) {
	hosttest.NeedsRoot(t)
	needsIpmitool(t)
	bmc, fake := startBMC(t)
	dir := hosttest.NewDir(t)
	dir.Add("bcx-ipmi", hosttest.Build(t, "github.com/better-compute/site-appliance/plugins/cmd/bcx-ipmi"))
	h := hosttest.Start(t, dir.Config())
	if got := h.Drivers(); len(got) != 2 || got[0].ID != "ipmi" || !slices.Equal(got[0].Kinds, []string{"inspect", "management", "power"}) ||
		got[1].ID != "ipmi-sol" || !slices.Equal(got[1].Kinds, []string{"console"}) {
		t.Fatalf("Drivers() = %+v, want ipmi with inspect, management and power, and ipmi-sol with console", got)
	}
	config, _ := json.Marshal(map[string]any{"address": bmc.Addr(), "options": map[string]any{"cipherSuite": 17}})
	invoke := func(operation, args string) (string, error) {
		kind, op, _ := strings.Cut(operation, ".")
		ctx, cancel := context.WithTimeout(context.Background(), 40*time.Second)
		defer cancel()
		out, err := h.Invoke(ctx, host.Call{
			Driver: "ipmi", Kind: kind, Operation: op, Config: config, Args: json.RawMessage(args),
			Secrets: secrets(user, password), IdempotencyKey: "cmd_1", Deadline: time.Now().Add(35 * time.Second),
		})
		return string(out), err
	}
	for _, tt := range []struct{ operation, args, want string }{
		{"power.getPower", "", `"off"`},
		{"power.setPower", `["on"]`, "null"},
		{"power.getPower", "[]", `"on"`},
		{"management.setBootDevice", `[{"device":"pxe","efi":true}]`, "null"},
		{"management.getBootDevice", "", `{"device":"pxe","persistent":false,"efi":true}`},
		{"management.setBootDevice", `{"device":"disk","persistent":true}`, "null"},
		{"management.getBootDevice", "", `{"device":"disk","persistent":true,"efi":false}`},
		{"power.setPower", `"off"`, "null"},
		{"power.getPower", "", `"off"`},
	} {
		got, err := invoke(tt.operation, tt.args)
		if err != nil || got != tt.want {
			t.Errorf("%s(%s) = %s, %v, want %s", tt.operation, tt.args, got, err, tt.want)
		}
	}
	if calls := fake.Calls(); len(calls) != 2 || !strings.HasPrefix(calls[0], "PowerOn") || calls[1] != "PowerOff" {
		t.Errorf("the machine saw %v, want PowerOn and PowerOff", calls)
	}
	for _, tt := range []struct {
		operation, args string
		want            errs.Code
	}{
		{"power.setPower", `"explode"`, errs.InvalidArgs},
		{"power.setPower", "", errs.InvalidArgs},
		{"management.setBootDevice", `{"device":"floppy"}`, errs.InvalidArgs},
		{"management.resetBmc", "", errs.UnsupportedOperation},
		{"power.explode", "", errs.UnsupportedOperation},
		{"bios.getSettings", "", errs.UnsupportedDriver},
	} {
		if _, err := invoke(tt.operation, tt.args); errs.CodeOf(err) != tt.want {
			t.Errorf("%s(%s): %v, want %s", tt.operation, tt.args, err, tt.want)
		}
	}
	t.Run("wrong password", func(t *testing.T) {
		_, err := h.Invoke(context.Background(), host.Call{Driver: "ipmi", Kind: "power", Operation: "getPower",
			Config: config, Secrets: secrets(user, "wrong")})
		if e := errs.From(err); e == nil || e.Code != errs.BmcError || !e.Retryable || strings.Contains(e.Message, "wrong") {
			t.Errorf("with a wrong password: %v, want a retryable bmc-error", err)
		}
	})
	t.Run("inspect", func(t *testing.T) {
		out, err := invoke("inspect.inspect", "")
		t.Logf("inspect: %s, %v", out, err)
	})
}
