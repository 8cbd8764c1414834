package settle

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/secretstore"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/plugins/driver/binding"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

type signer struct{ key ed25519.PrivateKey }

func (signer) KeyID() string                         { return "key" }
func (s signer) Sign(message []byte) ([]byte, error) { return ed25519.Sign(s.key, message), nil }

const (
	ref = "secret://acme/bmc-1"
	old = `{"username":"ADMIN","password":"hunter2","note":"rack 3"}`
)

// bench is a gateway's parts, which can be stopped and started again on the
// same store file.
type bench struct {
	t       *testing.T
	path    string
	store   *store.Store
	secrets *secretstore.Service
	sends   *commands.Service
	*Service
	made   int
	stop   func()
	online bool
}

func newBench(t *testing.T) *bench {
	b := &bench{t: t, path: filepath.Join(t.TempDir(), "gateway.db"), online: true}
	b.start()
	t.Cleanup(func() { b.stop() })
	must(t, b.store.AddSite(t.Context(), store.Site{ID: "site_1", TenantID: "acme", Name: "s1", Created: time.Now()}))
	must(t, b.store.AddPool(t.Context(), store.Pool{ID: "pool_1", TenantID: "acme", Name: "p1", SiteID: "site_1", Created: time.Now()}))
	b.machine("node_1", "m1", ref)
	digest := sha256.Sum256([]byte("ag_1"))
	token := store.Token{Hash: digest, Role: agentv1.Role_ROLE_SITE, SiteID: "site_1", Expires: time.Now().Add(time.Hour)}
	must(t, b.store.AddToken(t.Context(), token))
	_, err := b.store.Enrol(t.Context(), store.Enrolment{
		Agent: store.Agent{ID: "ag_1", Role: agentv1.Role_ROLE_SITE, SiteID: "site_1"}, Token: &token,
		Certificate: store.Certificate{Fingerprint: digest, AgentID: "ag_1", CSRHash: digest, DER: []byte("x"), NotAfter: time.Now().Add(time.Hour), RenewAfter: time.Now()},
	})
	must(t, err)
	_, err = b.store.Greeted(t.Context(), "ag_1", &agentv1.Hello{AgentId: "ag_1", BootId: "b", JournalEpoch: "j", EventEpoch: "e"})
	must(t, err)
	_, err = b.secrets.Put(t.Context(), "acme", "bmc-1", secret.New([]byte(old)))
	must(t, err)
	return b
}

// start opens the store and makes the parts; run begins to settle.
func (b *bench) start() {
	st, err := store.Open(b.path, time.Now)
	must(b.t, err)
	key := bytes.Repeat([]byte{7}, 32)
	_, private, err := ed25519.GenerateKey(nil)
	must(b.t, err)
	mod, err := metal.Module(metal.Options{})
	must(b.t, err)
	set, err := module.Join(mod)
	must(b.t, err)
	log := slog.New(slog.DiscardHandler)
	b.store = st
	b.secrets, err = secretstore.New(st, key, log)
	must(b.t, err)
	b.sends = commands.New(st, signer{private}, set, log)
	b.Service = New(Config{
		Store: st, Commands: b.sends, Secrets: b.secrets, Online: func(string) bool { return b.online }, Log: log, Pause: time.Millisecond,
		Password: func() secret.Value { b.made++; return secret.New(fmt.Appendf(nil, "fresh-%d", b.made)) },
	})
	b.sends.Before(RotateKind, b.Begin)
	b.sends.OnFinished(b.Finished)
	b.stop = func() { must(b.t, st.Close()) }
}

func (b *bench) run() {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	service, closing := b.Service, b.stop
	go func() { defer close(done); service.Run(ctx) }()
	b.stop = func() { cancel(); <-done; closing() }
}

func (b *bench) restart() {
	b.stop()
	b.start()
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (b *bench) machine(id, name, ref string) {
	bmc := store.BMC{Driver: "redfish", Address: "10.0.0.5", CredentialsRef: ref}
	drivers := binding.BMC(bmc.Driver, bmc.Address, ref)
	drivers["boot"] = binding.Binding{Driver: "ipxe"}
	drivers["management"] = binding.Binding{Driver: "acme", Config: json.RawMessage(`{"own":true}`)}
	must(b.t, b.store.AddMachine(b.t.Context(), store.Machine{ID: id, TenantID: "acme", Name: name, PoolID: "pool_1", SiteID: "site_1", BMC: bmc, MACs: []string{"52:54:00:00:00:0" + id[len(id)-1:]}, State: metal.Enrolled, Created: time.Now(), Drivers: drivers}))
}

// rotate sends a rotation as the API does.
func (b *bench) rotate() (string, error) {
	m, err := b.store.MachineByID(b.t.Context(), "node_1")
	must(b.t, err)
	c, err := metal.RotateCommand(m.BMC)
	must(b.t, err)
	return b.sends.Submit(b.t.Context(), commands.Spec{AgentID: "ag_1", TargetNodeID: m.ID, Kind: c.Kind, Args: c.Args, SecretRefs: c.SecretRefs})
}

// end gives a command its outcome as a session does.
func (b *bench) end(id string, e *errs.Error) {
	b.t.Helper()
	must(b.t, b.sends.Finish(b.t.Context(), "ag_1", id, nil, e))
}

func (b *bench) secret(ref string) string {
	v, err := b.secrets.Get(b.t.Context(), ref)
	if errors.Is(err, store.ErrNotFound) {
		return ""
	}
	must(b.t, err)
	return string(v.Reveal())
}

func (b *bench) pending() string {
	p, err := secretstore.PendingRef(ref)
	must(b.t, err)
	return b.secret(p)
}

// kept reports whether a command is there already.
func (b *bench) kept(id string) bool {
	_, err := b.store.Command(b.t.Context(), id)
	return err == nil
}

// eventually waits until f is true.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for !f() {
		if time.Now().After(deadline) {
			t.Fatalf("%s did not come", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func (b *bench) rotation() (store.Rotation, bool) {
	r, err := b.store.Rotation(b.t.Context(), ref)
	if errors.Is(err, store.ErrNotFound) {
		return r, false
	}
	must(b.t, err)
	return r, true
}

const fresh = `{"note":"rack 3","password":"fresh-1","username":"ADMIN"}`

// TestRotationEnds: a rotation that is proved makes the new password the
// credential's; one that changed nothing forgets it; and after an unclear end
// both are kept. All three hold too where the gateway was down at that moment.
func TestRotationEnds(t *testing.T) {
	for name, tt := range map[string]struct {
		end  *errs.Error
		want string // proved, dropped or kept
	}{
		"done":                        {nil, "proved"},
		"no grant":                    {errs.New(errs.QuorumRequired, "x"), "dropped"},
		"expired in the queue":        {errs.New(errs.Expired, "x"), "dropped"},
		"driver without rotation":     {errs.New(errs.UnsupportedOperation, "x"), "dropped"},
		"another binding":             {errs.New(errs.BindingMismatch, "x"), "dropped"},
		"password against its policy": {errs.New(errs.InvalidArgs, "x"), "dropped"},
		"refused by the BMC":          {errs.New(errs.CredentialsUnchanged, "x"), "dropped"},
		"interrupted":                 {errs.New(errs.Interrupted, "x"), "kept"},
		"time is over":                {errs.Retry(errs.Timeout, "x"), "kept"},
		"no answer":                   {errs.Retry(errs.Unreachable, "x"), "kept"},
		"the BMC's error":             {errs.New(errs.BmcError, "x"), "kept"},
		"another key":                 {errs.New(errs.PinMismatch, "x"), "kept"},
		"cancelled":                   {errs.New(errs.Cancelled, "x"), "kept"},
		"a driver's own code":         {errs.New("fan-stuck", "x"), "kept"},
	} {
		for _, down := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, gateway down %v", name, down), func(t *testing.T) {
				b := newBench(t)
				b.online = false // no attempt of its own
				id, err := b.rotate()
				must(t, err)
				if got := b.pending(); got != "fresh-1" || b.secret(ref) != old {
					t.Fatalf("before the end: pending %q, credential %s", got, b.secret(ref))
				}
				if down {
					b.end(id, tt.end)
					b.restart()
					b.run()
				} else {
					b.run()
					b.end(id, tt.end)
				}
				eventually(t, "the end", func() bool { r, open := b.rotation(); return !open || !r.Flying })
				r, open := b.rotation()
				got := map[string]string{"credential": b.secret(ref), "pending": b.pending()}
				want := map[string]map[string]string{
					"proved":  {"credential": fresh, "pending": ""},
					"dropped": {"credential": old, "pending": ""},
					"kept":    {"credential": old, "pending": "fresh-1"},
				}[tt.want]
				if got["credential"] != want["credential"] || got["pending"] != want["pending"] || open != (tt.want == "kept") || open && (!r.Unclear || r.ErrorCode != string(tt.end.Code)) {
					t.Errorf("after %v: %v, rotation %+v (open %v), want %v", tt.end, got, r, open, want)
				}
			})
		}
	}
}

// TestRotationGoesOnWithItsPassword: there is never a second pending password:
// a rotation in flight keeps another one off, and after an unclear end the next
// takes the same password, until it is proved or the BMC has refused it for good.
func TestRotationGoesOnWithItsPassword(t *testing.T) {
	b := newBench(t)
	b.online = false
	b.run()
	first, err := b.rotate()
	must(t, err)
	if _, err := b.rotate(); errs.CodeOf(err) != InProgress {
		t.Errorf("a second rotation beside the first = %v, want %s", err, InProgress)
	}
	for n, end := range []*errs.Error{errs.New(errs.Interrupted, "x"), errs.New(errs.QuorumRequired, "x"), errs.Retry(errs.Unreachable, "x")} {
		id := first
		if n > 0 {
			if id, err = b.rotate(); err != nil {
				t.Fatal(err)
			}
		}
		if got := b.pending(); got != "fresh-1" {
			t.Fatalf("attempt %d has the password %q, want the first's", n, got)
		}
		b.end(id, end)
		eventually(t, "the end", func() bool { r, open := b.rotation(); return open && !r.Flying })
	}
	id, err := b.rotate()
	must(t, err)
	b.end(id, nil)
	eventually(t, "the proof", func() bool { _, open := b.rotation(); return !open })
	if b.secret(ref) != fresh || b.pending() != "" {
		t.Errorf("credential %s, pending %q, want the first's password and nothing pending", b.secret(ref), b.pending())
	}
	// The next rotation is a new one.
	id, err = b.rotate()
	must(t, err)
	if got := b.pending(); got == "fresh-1" || got == "" {
		t.Errorf("the next rotation's password is %q, want another", got)
	}
	b.end(id, errs.New(errs.Interrupted, "x"))
	eventually(t, "the end", func() bool { r, open := b.rotation(); return open && !r.Flying })
	id, err = b.rotate()
	must(t, err)
	b.end(id, errs.New(errs.CredentialsUnchanged, "the old one holds"))
	eventually(t, "the refusal", func() bool { _, open := b.rotation(); return !open })
	if b.secret(ref) != fresh || b.pending() != "" {
		t.Errorf("credential %s, pending %q, want what held before and nothing pending", b.secret(ref), b.pending())
	}
}

// TestUnclearIsTriedAgain: without a person's word, while the box is there, and
// not for ever.
func TestUnclearIsTriedAgain(t *testing.T) {
	b := newBench(t)
	b.run()
	id, err := b.rotate()
	must(t, err)
	seen := map[string]bool{}
	for n := 1; n < maxAttempts; n++ {
		seen[id] = true
		b.end(id, errs.Retry(errs.Unreachable, "x"))
		eventually(t, fmt.Sprintf("attempt %d", n+1), func() bool {
			r, open := b.rotation()
			id = r.CommandID
			return open && r.Flying && !seen[id] && b.kept(id)
		})
		c, err := b.store.Command(t.Context(), id)
		must(t, err)
		p := &agentv1.CommandPayload{}
		must(t, proto.Unmarshal(c.Signed.Payload, p))
		req := &bmcv1.BmcOperationRequest{}
		must(t, proto.Unmarshal(p.Args, req))
		if req.CredentialsRef != ref || len(p.SecretRefs) != 2 || !strings.Contains(req.ArgsJson, p.SecretRefs[1]) || b.pending() != "fresh-1" {
			t.Errorf("attempt %d asks %v with %q", n+1, req, p.SecretRefs)
		}
	}
	b.end(id, errs.Retry(errs.Unreachable, "x"))
	eventually(t, "the last end", func() bool { r, open := b.rotation(); return open && !r.Flying })
	if r, _ := b.rotation(); r.Attempts != maxAttempts || !r.Next.IsZero() {
		t.Errorf("rotation = %+v, want %d attempts and none to come", r, maxAttempts)
	}
	if !b.Doubtful(t.Context(), ref) {
		t.Error("Doubtful() = false after an unclear end")
	}
	// A query that fails has it tried once more, and waits for the end.
	settled := make(chan bool)
	go func() { settled <- b.Settle(t.Context(), ref) }()
	eventually(t, "the attempt for a query", func() bool { r, _ := b.rotation(); id = r.CommandID; return r.Flying && b.kept(id) })
	b.end(id, nil)
	if !<-settled || b.secret(ref) != fresh || b.Doubtful(t.Context(), ref) {
		t.Errorf("Settle() is not true, or the credential is %s", b.secret(ref))
	}
}

// TestCancelledIsNotTriedAgain: but what it may have changed is not forgotten.
func TestCancelledIsNotTriedAgain(t *testing.T) {
	b := newBench(t)
	b.run()
	id, err := b.rotate()
	must(t, err)
	b.end(id, errs.New(errs.Cancelled, "x"))
	eventually(t, "the end", func() bool { r, open := b.rotation(); return open && !r.Flying })
	if r, _ := b.rotation(); !r.Next.IsZero() || b.pending() != "fresh-1" || b.Doubtful(t.Context(), ref) {
		t.Errorf("rotation = %+v, pending %q, want it kept and no attempt to come", r, b.pending())
	}
}

// TestSettleEnds: whoever waits is told that an attempt ended unclear again, and
// that none could be made.
func TestSettleEnds(t *testing.T) {
	b := newBench(t)
	b.online = false
	b.run()
	id, err := b.rotate()
	must(t, err)
	b.end(id, errs.New(errs.Interrupted, "x"))
	eventually(t, "the end", func() bool { r, open := b.rotation(); return open && !r.Flying })
	if b.Settle(t.Context(), ref) {
		t.Error("Settle() = true with the box away")
	}
	b.online = true
	settled := make(chan bool)
	go func() { settled <- b.Settle(t.Context(), ref) }()
	eventually(t, "the attempt", func() bool { r, _ := b.rotation(); id = r.CommandID; return r.Flying && b.kept(id) })
	b.online = false
	b.end(id, errs.New(errs.Interrupted, "x"))
	if <-settled {
		t.Error("Settle() = true after another unclear end")
	}
	if !b.Settle(t.Context(), "secret://acme/other") {
		t.Error("Settle() = false for a credential that nobody rotates")
	}
}

// TestRotationThatWasNeverSent: a gateway that died between noting an attempt and
// keeping its command sent nothing.
func TestRotationThatWasNeverSent(t *testing.T) {
	b := newBench(t)
	pending, err := secretstore.PendingRef(ref)
	must(t, err)
	must(t, b.store.BeginRotation(t.Context(), store.Rotation{CredentialsRef: ref, PendingRef: pending, TenantID: "acme", MachineID: "node_1", CommandID: "cmd_gone"}, b.secrets.Seal(pending, secret.New([]byte("x")))))
	b.run()
	eventually(t, "the end", func() bool { _, open := b.rotation(); return !open })
	if b.pending() != "" || b.secret(ref) != old {
		t.Errorf("pending %q, credential %s", b.pending(), b.secret(ref))
	}
}

// TestSharedCredential: one password cannot be changed on one of several BMCs.
func TestSharedCredential(t *testing.T) {
	b := newBench(t)
	b.machine("node_2", "m2", ref)
	if _, err := b.rotate(); errs.CodeOf(err) != Shared || !strings.Contains(err.Error(), "m1, m2") {
		t.Errorf("rotation of a shared credential = %v, want %s and both machines", err, Shared)
	}
	if b.pending() != "" {
		t.Error("a password is pending for a rotation that was refused")
	}
}

// TestBeginWantsItsOwnReference: nobody else says where the new password comes from.
func TestBeginWantsItsOwnReference(t *testing.T) {
	b := newBench(t)
	for _, args := range []string{``, `[]`, `[{"newPassword":"secret://acme/mine"}]`, `[{"newPassword":"literal"}]`} {
		_, err := b.sends.Submit(t.Context(), commands.Spec{AgentID: "ag_1", TargetNodeID: "node_1", Kind: RotateKind,
			Args: &bmcv1.BmcOperationRequest{Driver: "redfish", Address: "10.0.0.5", CredentialsRef: ref, Operation: "credentials.rotate", ArgsJson: args}})
		if errs.CodeOf(err) != errs.InvalidArgs || strings.Contains(err.Error(), "literal") {
			t.Errorf("rotate(%s) = %v, want invalid-args", args, err)
		}
	}
}

// TestProofAndAnotherCredential: what a person puts in between keeps its other
// fields; what is no credential any more keeps the pending password.
func TestProofAndAnotherCredential(t *testing.T) {
	b := newBench(t)
	b.online = false
	id, err := b.rotate()
	must(t, err)
	_, err = b.secrets.Put(t.Context(), "acme", "bmc-1", secret.New([]byte(`{"username":"root","password":"typed"}`)))
	must(t, err)
	b.run()
	b.end(id, nil)
	eventually(t, "the proof", func() bool { _, open := b.rotation(); return !open })
	if got, want := b.secret(ref), `{"password":"fresh-1","username":"root"}`; got != want {
		t.Errorf("credential = %s, want %s", got, want)
	}
	id, err = b.rotate()
	must(t, err)
	_, err = b.secrets.Put(t.Context(), "acme", "bmc-1", secret.New([]byte(`no JSON`)))
	must(t, err)
	b.end(id, nil)
	eventually(t, "the end", func() bool { r, open := b.rotation(); return open && !r.Flying })
	if b.pending() == "" || b.secret(ref) != "no JSON" {
		t.Errorf("pending %q, credential %q, want both kept", b.pending(), b.secret(ref))
	}
}

// TestNothingPlainOnDisk: neither password stands in the store's files, nor in
// what is written of a rotation.
func TestNothingPlainOnDisk(t *testing.T) {
	b := newBench(t)
	b.run()
	id, err := b.rotate()
	must(t, err)
	b.end(id, nil)
	eventually(t, "the proof", func() bool { _, open := b.rotation(); return !open })
	b.stop()
	b.stop = func() {}
	files, err := filepath.Glob(b.path + "*")
	must(t, err)
	for _, f := range files {
		data, err := os.ReadFile(f)
		must(t, err)
		if !bytes.Contains(data, []byte("credentials.rotated")) && f == b.path {
			t.Error("the store's file does not hold what was written: the search proves nothing")
		}
		for _, password := range []string{"fresh-1", "hunter2"} {
			if bytes.Contains(data, []byte(password)) {
				t.Errorf("%s holds a password", filepath.Base(f))
			}
		}
	}
}

// TestNewPassword: what IPMI and BMC policies take.
func TestNewPassword(t *testing.T) {
	seen := map[string]bool{}
	for range 2000 {
		p := string(NewPassword().Reveal())
		if len(p) != 16 || !fits(p) || strings.ContainsAny(p, " \t'\"\\$`&<>%#@:/?0O1lI") || seen[p] {
			t.Fatalf("password %q", p)
		}
		seen[p] = true
	}
}

// TestRebindEnds: the machine follows its box, and only its box; bindings that
// were its BMC's follow, and others stay.
func TestRebindEnds(t *testing.T) {
	to := store.BMC{Driver: "ipmi", Address: "10.0.0.9", CredentialsRef: "secret://acme/bmc-9", DriverOptions: `{"cipherSuite":3}`}
	for name, end := range map[string]*errs.Error{"done": nil, "refused": errs.New(errs.QuorumRequired, "x"), "unclear": errs.New(errs.Interrupted, "x")} {
		for _, down := range []bool{false, true} {
			b := newBench(t)
			if !down {
				b.run()
			}
			c := metal.BindCommand(to, true)
			id, err := b.Rebind(t.Context(), store.Rebind{MachineID: "node_1", BMC: to, Protected: true}, commands.Spec{AgentID: "ag_1", TargetNodeID: "node_1", Kind: c.Kind, Args: c.Args})
			must(t, err)
			m, err := b.store.MachineByID(t.Context(), "node_1")
			must(t, err)
			if m.BMC.Driver != "redfish" || m.Protected {
				t.Errorf("%s: the machine changed before its box did", name)
			}
			b.end(id, end)
			if down {
				b.restart()
				b.run()
			}
			eventually(t, "the end", func() bool {
				rebinds, err := b.store.Rebinds(t.Context())
				must(t, err)
				open, err := b.store.OpenCommands(t.Context(), "ag_1")
				return err == nil && len(rebinds) == 0 && (end != nil || len(open) > 0)
			})
			m, err = b.store.MachineByID(t.Context(), "node_1")
			must(t, err)
			want, own := "redfish 10.0.0.5 false", `{"address":"10.0.0.5","credentials":"secret://acme/bmc-1"}`
			if end == nil {
				want, own = "ipmi 10.0.0.9 true", `{"address":"10.0.0.9","credentials":"secret://acme/bmc-9"}`
			}
			var told []string
			open, err := b.store.OpenCommands(t.Context(), "ag_1")
			must(t, err)
			for _, c := range open {
				p, req := &agentv1.CommandPayload{}, &pxev1.AssignRequest{}
				must(t, proto.Unmarshal(c.Signed.Payload, p))
				must(t, proto.Unmarshal(p.Args, req))
				told = append(told, fmt.Sprint(c.Kind, " ", len(req.Machines), " ", req.Machines[0].Protected))
			}
			if got := strings.Join(told, "; "); got != map[bool]string{true: "pxe.assign 1 true"}[end == nil] {
				t.Errorf("%s, down %v: the box is told %q", name, down, got)
			}
			if got := fmt.Sprint(m.BMC.Driver, " ", m.BMC.Address, " ", m.Protected); got != want || string(m.Drivers["power"].Config) != own || m.Drivers["management"].Driver != "acme" || m.Drivers["boot"].Driver != "ipxe" {
				t.Errorf("%s, down %v: machine %s with %v, want %s with power by %s", name, down, got, m.Drivers, want, own)
			}
			b.stop()
			b.stop = func() {}
		}
	}
}
