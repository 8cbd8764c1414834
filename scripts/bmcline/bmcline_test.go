package bmcline

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/bmc/manual"
	"github.com/better-compute/site-appliance/bmc/redfish"
	"github.com/better-compute/site-appliance/bmc/wol"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// TestEveryOperation asks a BMC of the rig for everything that the API serves, and
// looks at what the machine saw.
func TestEveryOperation(t *testing.T) {
	b := newBench(t)
	b.online()
	for _, tt := range []struct {
		operation, args string
		want            string // a part of the answer
		code            string
	}{
		{"power.getPower", ``, `"off"`, ""},
		{"management.setBootDevice", `[{"device":"pxe","efi":true}]`, `null`, ""},
		{"management.getBootDevice", ``, `"pxe"`, ""},
		{"power.setPower", `"on"`, `null`, ""},
		{"power.getPower", `[]`, `"on"`, ""},
		{"power.setPower", `["nmi"]`, `null`, ""},
		{"inspect.inspect", ``, `"manufacturer"`, ""},
		{"management.getEventLog", ``, `[`, ""},
		{"management.getSecureBoot", ``, `"enabled"`, ""},
		{"management.setSecureBoot", `{"enabled":true}`, `null`, ""},
		{"virtual-media.status", ``, `"inserted":false`, ""},
		{"virtual-media.eject", ``, `null`, ""},
		{"bios.getSettings", ``, `{`, ""},
		{"firmware.list", ``, `"component"`, ""},
		{"raid.getLayout", ``, `"volumes"`, ""},
		{"management.resetBmc", ``, `null`, ""},
		{"power.setPower", `"off"`, `null`, ""},
		{"power.setPower", `["sideways"]`, ``, "INVALID_INPUT"},
		{"power.setPower", ``, ``, "INVALID_INPUT"},
		{"raid.applyLayout", `[{}]`, ``, "INVALID_INPUT"},
		{"bios.applySettings", `[{}]`, ``, "INVALID_INPUT"},
		{"firmware.update", `[{"component":"BIOS"}]`, ``, "INVALID_INPUT"},
		{"credentials.rotate", `[{"newPassword":"secret://acme/x"}]`, ``, "INVALID_INPUT"},
		{"console.open", ``, ``, "INVALID_INPUT"},
		{"power.explode", ``, ``, "INVALID_INPUT"},
	} {
		got, code := b.operate(tt.operation, tt.args)
		if !strings.Contains(got, tt.want) || (code == "") != (tt.code == "") || !strings.Contains(code, tt.code) {
			t.Errorf("%s(%s) = %s, %q, want %s, code %q", tt.operation, tt.args, got, code, tt.want, tt.code)
		}
	}
	if log := strings.Join(b.bmc.Log(), "; "); !strings.Contains(log, "on pxe") || !strings.Contains(log, "off") || strings.Contains(log, password) {
		t.Errorf("the machine saw %q", log)
	}
	// A token that may only read asks, and changes nothing.
	reader := b.as("reader")
	if _, err := reader.Operate(t.Context(), connect.NewRequest(&computev1.OperateRequest{TenantId: "acme", Machine: "m1", Operation: "power.getPower"})); err != nil {
		t.Errorf("a reader's query = %v", err)
	}
	before := len(b.bmc.Log())
	for _, operation := range []string{"power.setPower", "virtual-media.eject", "no.such"} {
		_, err := reader.Operate(t.Context(), connect.NewRequest(&computev1.OperateRequest{TenantId: "acme", Machine: "m1", Operation: operation, ArgsJson: `"on"`}))
		if connect.CodeOf(err) != connect.CodePermissionDenied {
			t.Errorf("a reader's %s = %v, want permission denied", operation, err)
		}
	}
	if len(b.bmc.Log()) != before {
		t.Error("a reader changed the machine")
	}
}

// TestWhoseCommand: a command is told to its machine's tenant alone.
func TestWhoseCommand(t *testing.T) {
	b := newBench(t)
	b.online()
	res, err := b.calls.Operate(t.Context(), connect.NewRequest(&computev1.OperateRequest{TenantId: "acme", Machine: "m1", Operation: "power.setPower", ArgsJson: `"on"`}))
	must(t, err)
	id := res.Msg.CommandId
	if out := b.ended(id); out.ErrorCode != "" || out.ResultJson != "null" {
		t.Errorf("the command ended with %v", out)
	}
	for tenant, id := range map[string]string{"other": id, "acme": "cmd_none"} {
		_, err := b.calls.GetCommand(t.Context(), connect.NewRequest(&computev1.GetCommandRequest{TenantId: tenant, CommandId: id}))
		if connect.CodeOf(err) != connect.CodeNotFound {
			t.Errorf("GetCommand(%s, %s) = %v, want not found", tenant, id, err)
		}
	}
}

func (b *bench) rotate() (string, error) {
	res, err := b.calls.RotateCredentials(b.t.Context(), connect.NewRequest(&computev1.RotateCredentialsRequest{TenantId: "acme", Machine: "m1"}))
	if err != nil {
		return "", err
	}
	return res.Msg.CommandId, nil
}

// onePassword waits until no password is pending, and wants the gateway's to be
// the BMC's, another than before, and good for a query.
func (b *bench) onePassword() {
	b.t.Helper()
	b.eventually("the proof", func() bool {
		open, err := b.Store.Rotations(b.t.Context())
		return err == nil && len(open) == 0
	})
	if got := b.stored(); got != b.bmc.Password() || got == password {
		b.t.Errorf("the gateway keeps %q, the BMC takes %q, and before it was %q", got, b.bmc.Password(), password)
	}
	if got, code := b.operate("power.getPower", ""); code != "" {
		b.t.Errorf("a query with the new password = %s, %s", got, code)
	}
}

func passwordChange(r *http.Request) bool {
	return r.Method == http.MethodPatch && strings.Contains(r.URL.Path, "/AccountService/Accounts/")
}

// TestRotation: the BMC's password changes, and with it the gateway's.
func TestRotation(t *testing.T) {
	b := newBench(t)
	b.online()
	if got, code := b.operate("power.getPower", ""); code != "" {
		t.Fatalf("a query before = %s, %s", got, code)
	}
	id, err := b.rotate()
	must(t, err)
	if out := b.ended(id); out.ErrorCode != "" {
		t.Fatalf("the rotation ended with %s: %s", out.ErrorCode, out.ErrorMessage)
	}
	b.onePassword()
}

// TestRotationKilled cuts box or gateway off at every point of a rotation. In the
// end there is one password, which both sides know.
func TestRotationKilled(t *testing.T) {
	type point struct {
		// before and after say of a request whether this is the point.
		before, after bool
		nth           int // of the requests after the change; 0: the change itself
	}
	for name, p := range map[string]point{
		"before the change reaches the BMC":         {before: true},
		"the change is made, its answer is lost":    {after: true},
		"before the log-in that proves it":          {before: true, nth: 1},
		"the log-in that proves it, answer is lost": {after: true, nth: 1},
	} {
		for _, victim := range []string{"box", "gateway", "both", "box, for longer than the command lives"} {
			t.Run(name+"; "+victim, func(t *testing.T) {
				t.Parallel() // each mostly waits for the line
				b := newBench(t)
				b.online()
				hit := make(chan struct{})
				struck, changed, since := false, false, 0
				at := func(r *http.Request, when bool) bool {
					if struck || !when {
						return false
					}
					if passwordChange(r) {
						return p.nth == 0
					}
					return changed && p.nth > 0 && since == p.nth
				}
				strike := func() {
					struck = true
					if victim != "gateway" {
						b.killBox()
					}
					close(hit)
				}
				b.hook(func(r *http.Request) bool {
					b.mu.Lock()
					defer b.mu.Unlock()
					if changed && !passwordChange(r) {
						since++
					}
					if at(r, p.before) {
						strike()
						return victim == "gateway" // the box lives, and so does its request
					}
					return true
				}, func(r *http.Request) bool {
					b.mu.Lock()
					defer b.mu.Unlock()
					if at(r, p.after) {
						changed = changed || passwordChange(r)
						strike()
						return victim == "gateway"
					}
					changed = changed || passwordChange(r)
					return true
				})
				_, err := b.rotate()
				must(t, err)
				<-hit
				switch victim {
				case "gateway":
					b.Stop()
					b.Start()
				case "box":
					b.stopBox()
					b.startBox()
				case "both":
					b.stopBox()
					b.Stop()
					b.Start()
					b.startBox()
				default:
					b.stopBox()
					b.Stop()
					b.Clock.Add(10 * time.Minute)
					b.Start()
					b.eventually("the gateway's own end", func() bool {
						open, err := b.Store.Rotations(t.Context())
						return err == nil && len(open) == 1 && !open[0].Flying && open[0].Unclear
					})
					b.startBox()
					b.online()
					b.Clock.Add(time.Minute) // and by itself, in a while; a person need not wait
					if _, err := b.rotate(); err != nil && connect.CodeOf(err) != connect.CodeFailedPrecondition {
						t.Fatal(err)
					}
				}
				b.online()
				b.onePassword()
			})
		}
	}
}

// TestRotationShared: a password that several machines share is not changed on
// one of them.
func TestRotationShared(t *testing.T) {
	b := newBench(t)
	b.online()
	must(t, b.enroll("m2", "redfish", "10.0.0.9", ref, ""))
	if _, err := b.rotate(); connect.CodeOf(err) != connect.CodeFailedPrecondition || !strings.Contains(err.Error(), "credential-shared") {
		t.Errorf("rotation of a shared credential = %v, want credential-shared", err)
	}
	if b.bmc.Password() != password || b.stored() != password {
		t.Error("a password changed")
	}
}

// TestRotationRefused: a BMC that does not take the new password keeps the old
// one, nothing stays pending, and the next rotation has another password.
func TestRotationRefused(t *testing.T) {
	b := newBench(t)
	b.online()
	for _, fault := range []bmctest.Fault{bmctest.PasswordIgnored} {
		b.bmc.SetFaults(fault)
		id, err := b.rotate()
		must(t, err)
		if out := b.ended(id); out.ErrorCode != string(errs.CredentialsUnchanged) {
			t.Errorf("%s: the rotation ended with %s: %s, want credentials-unchanged", fault, out.ErrorCode, out.ErrorMessage)
		}
		b.eventually("the end", func() bool { open, err := b.Store.Rotations(t.Context()); return err == nil && len(open) == 0 })
		if b.stored() != password || b.bmc.Password() != password {
			t.Errorf("%s: the gateway keeps %q, the BMC takes %q, want the old one", fault, b.stored(), b.bmc.Password())
		}
	}
	b.bmc.SetFaults()
	id, err := b.rotate()
	must(t, err)
	if out := b.ended(id); out.ErrorCode != "" {
		t.Errorf("the next rotation ended with %s: %s", out.ErrorCode, out.ErrorMessage)
	}
	b.onePassword()
}

// TestKnownDrivers: what the gateway says of the built-in drivers is what they are.
func TestKnownDrivers(t *testing.T) {
	mod, err := metal.Module(metal.Options{})
	must(t, err)
	overRedfish, _, err := redfish.New(redfish.Options{})
	must(t, err)
	wake, err := wol.New(wol.Options{})
	must(t, err)
	byHand, _, err := manual.New(manual.Options{})
	must(t, err)
	for _, is := range []*driver.Definition{overRedfish, wake, byHand} {
		i := slices.IndexFunc(mod.Drivers, func(d *driver.Definition) bool { return d.ID() == is.ID() })
		if i < 0 {
			t.Errorf("the gateway does not know driver %s", is.ID())
			continue
		}
		said, m := mod.Drivers[i].Manifest(), is.Manifest()
		if said.Version != m.Version || said.RunsOn != m.RunsOn || !slices.Equal(said.Kinds, m.Kinds) || !slices.Equal(said.RetrySafe, m.RetrySafe) || !slices.Equal(said.StreamOperations, m.StreamOperations) {
			t.Errorf("the gateway says of driver %s\n%+v, and it is\n%+v", is.ID(), said, m)
		}
		for _, operation := range metal.Serves(is.ID()) {
			concern, _, _ := strings.Cut(operation, ".")
			if !slices.Contains(m.Kinds, concern) {
				t.Errorf("the gateway says that driver %s serves %s", is.ID(), operation)
			}
		}
	}
}

// TestQueryAfterAnUnclearRotation: a query that fails with the old password has
// the rotation settled first, and answers.
func TestQueryAfterAnUnclearRotation(t *testing.T) {
	b := newBench(t)
	b.online()
	hit := make(chan struct{})
	b.hook(nil, func(r *http.Request) bool {
		if !passwordChange(r) {
			return true
		}
		b.killBox()
		close(hit)
		return false
	})
	_, err := b.rotate()
	must(t, err)
	<-hit
	b.hook(nil, nil)
	b.stopBox()
	b.Stop()
	b.Clock.Add(10 * time.Minute)
	b.Start()
	b.eventually("the unclear end", func() bool {
		open, err := b.Store.Rotations(t.Context())
		return err == nil && len(open) == 1 && !open[0].Flying
	})
	b.startBox()
	b.online()
	if b.stored() != password || b.bmc.Password() == password {
		t.Fatalf("the gateway keeps %q and the BMC takes %q: want the old and the new", b.stored(), b.bmc.Password())
	}
	if got, code := b.operate("power.getPower", ""); code != "" || got != `"off"` {
		t.Errorf("a query = %s, %s, want off", got, code)
	}
	b.onePassword()
}

// TestRebind: what the site learned at first use is no prison: a rebinding that
// the box has done is the machine's from then on.
func TestRebind(t *testing.T) {
	b := newBench(t)
	b.online()
	if _, code := b.operate("power.getPower", ""); code != "" {
		t.Fatal(code)
	}
	// The machine gets another credential of its own.
	must(t, func() error {
		v, err := b.Secrets.Get(t.Context(), ref)
		if err == nil {
			_, err = b.Secrets.Put(t.Context(), "acme", "bmc-2", v)
		}
		return err
	}())
	rebind := func(bmc *computev1.Bmc, protected bool) *computev1.GetCommandResponse {
		t.Helper()
		res, err := b.calls.RebindBmc(t.Context(), connect.NewRequest(&computev1.RebindBmcRequest{TenantId: "acme", Machine: "m1", Bmc: bmc, Protected: protected}))
		must(t, err)
		out := b.ended(res.Msg.CommandId)
		b.eventually("the rebinding", func() bool { open, err := b.Store.Rebinds(t.Context()); return err == nil && len(open) == 0 })
		return out
	}
	get := func() *computev1.Machine {
		res, err := b.calls.Get(t.Context(), connect.NewRequest(&computev1.GetMachineRequest{TenantId: "acme", Machine: "m1"}))
		must(t, err)
		return res.Msg.Machine
	}
	if out := rebind(&computev1.Bmc{Driver: "redfish", Address: b.address(), CredentialsRef: "secret://acme/bmc-2", TlsSpkiSha256: b.pin()}, false); out.ErrorCode != "" {
		t.Fatalf("the rebinding ended with %s: %s", out.ErrorCode, out.ErrorMessage)
	}
	m := get()
	if m.Bmc.CredentialsRef != "secret://acme/bmc-2" || m.Protected || !strings.Contains(m.Drivers["power"].ConfigJson, "bmc-2") {
		t.Errorf("the machine is %v", m)
	}
	if got, code := b.operate("power.getPower", ""); code != "" {
		t.Errorf("a query by the new binding = %s, %s", got, code)
	}
	if out := rebind(nil, true); out.ErrorCode != "" {
		t.Errorf("protecting ended with %s: %s", out.ErrorCode, out.ErrorMessage)
	}
	if m := get(); !m.Protected || m.Bmc.CredentialsRef != "secret://acme/bmc-2" {
		t.Errorf("the machine is %v, want it protected and otherwise as it was", m)
	}
	for name, bmc := range map[string]*computev1.Bmc{
		"no such secret": {Driver: "redfish", Address: b.address(), CredentialsRef: "secret://acme/none"},
		"another tenant": {Driver: "redfish", Address: b.address(), CredentialsRef: "secret://other/bmc"},
		"no address":     {Driver: "redfish", CredentialsRef: ref},
	} {
		if _, err := b.calls.RebindBmc(t.Context(), connect.NewRequest(&computev1.RebindBmcRequest{TenantId: "acme", Machine: "m1", Bmc: bmc})); err == nil {
			t.Errorf("%s: RebindBmc() succeeded", name)
		}
	}
}

// TestRefusedUpFront: what the machine's driver does not serve is no command, nor
// is anything while the box is away.
func TestRefusedUpFront(t *testing.T) {
	b := newBench(t)
	b.online()
	_, err := b.Secrets.Put(t.Context(), "acme", "other", secret.New([]byte(`{"username":"u","password":"p"}`)))
	must(t, err)
	must(t, b.enroll("m2", "ipmi", "10.0.0.9", "secret://acme/other", ""))
	must(t, b.enroll("m3", "wol", "52:54:00:12:34:56", "", ""))
	must(t, b.enroll("m4", "manual", "rack-3", "", ""))
	ask := func(machine, operation, args string) error {
		_, err := b.calls.Operate(t.Context(), connect.NewRequest(&computev1.OperateRequest{TenantId: "acme", Machine: machine, Operation: operation, ArgsJson: args}))
		return err
	}
	for _, tt := range []struct{ machine, operation, args string }{
		{"m2", "bios.getSettings", ""}, {"m2", "firmware.list", ""}, {"m3", "management.setBootDevice", `{"device":"pxe"}`}, {"m4", "inspect.inspect", ""},
	} {
		if err := ask(tt.machine, tt.operation, tt.args); err == nil || !strings.Contains(err.Error(), "UNSUPPORTED: bmc-driver-unsupported") {
			t.Errorf("%s of %s = %v, want bmc-driver-unsupported", tt.operation, tt.machine, err)
		}
	}
	for _, machine := range []string{"m2", "m3", "m4"} {
		_, err := b.calls.RotateCredentials(t.Context(), connect.NewRequest(&computev1.RotateCredentialsRequest{TenantId: "acme", Machine: machine}))
		if err == nil || !strings.Contains(err.Error(), "bmc-driver-unsupported") {
			t.Errorf("rotation of %s = %v, want bmc-driver-unsupported", machine, err)
		}
	}
	if err := ask("none", "power.getPower", ""); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("a machine that is not there = %v, want not found", err)
	}
	b.stopBox()
	b.eventually("the end of the session", func() bool { return !b.boxOnline() })
	if err := ask("m1", "power.getPower", ""); connect.CodeOf(err) != connect.CodeUnavailable {
		t.Errorf("a query while the box is away = %v, want unavailable", err)
	}
	if err := ask("m1", "power.setPower", `"on"`); connect.CodeOf(err) != connect.CodeUnavailable {
		t.Errorf("a box that is away = %v, want unavailable", err)
	}
	if _, err := b.rotate(); connect.CodeOf(err) != connect.CodeUnavailable {
		t.Errorf("a rotation while the box is away = %v, want unavailable", err)
	}
	if open, err := b.Store.Rotations(t.Context()); err != nil || len(open) != 0 {
		t.Errorf("%d rotations are open, %v, want none", len(open), err)
	}
	b.startBox()
}

// TestRotationStep: a workflow rotates as a person does.
func TestRotationStep(t *testing.T) {
	b := newBench(t)
	b.online()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- b.engine.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("engine: %v", err)
		}
	}()
	m, err := b.Store.Machine(t.Context(), "acme", "m1")
	must(t, err)
	id, err := b.engine.StartProfile(t.Context(), "rotate", m, "")
	must(t, err)
	b.eventually("the workflow's end", func() bool {
		w, err := b.Store.Workflow(t.Context(), "acme", id)
		must(t, err)
		if w.State == store.StateFailed {
			t.Fatalf("the workflow failed: %s %s", w.ErrorCode, w.ErrorMessage)
		}
		return w.State == store.StateDone
	})
	b.onePassword()
}
