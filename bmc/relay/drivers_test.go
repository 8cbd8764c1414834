package relay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// board is a built-in driver's machine that writes down what it is asked.
type board struct {
	log  []string
	fail error
}

func (b *board) note(ctx *driver.Context, format string, args ...any) error {
	secrets := []string{}
	for _, name := range []driver.Ref{"username", "password", metal.NewPassword} {
		if v, err := ctx.Secrets.Resolve(ctx, name); err == nil {
			secrets = append(secrets, string(v.Reveal()))
		}
	}
	b.log = append(b.log, fmt.Sprintf(format, args...)+" by "+strings.Join(secrets, " "))
	if b.fail == errPanic {
		panic("boom")
	}
	return b.fail
}

var errPanic = errors.New("panic")

func (b *board) GetPower(ctx *driver.Context) (metal.PowerState, error) {
	return metal.PowerOn, b.note(ctx, "getPower %s", ctx.IdempotencyKey)
}
func (b *board) SetPower(ctx *driver.Context, a metal.PowerAction) error {
	ctx.Emit(driver.Progress{Phase: "switching", Message: string(a)})
	return b.note(ctx, "setPower %s", a)
}
func (b *board) Rotate(ctx *driver.Context, r metal.Rotation) error {
	return b.note(ctx, "rotate %q", r.Username)
}
func (b *board) Insert(ctx *driver.Context, iso string) error { return b.note(ctx, "insert %s", iso) }
func (b *board) Eject(ctx *driver.Context) error              { return b.note(ctx, "eject") }
func (b *board) ListFirmware(ctx *driver.Context) ([]metal.Firmware, error) {
	return nil, b.note(ctx, "list")
}
func (b *board) UpdateFirmware(ctx *driver.Context, u metal.FirmwareUpdate) (metal.Applied, error) {
	return metal.Applied{RebootNeeded: true}, b.note(ctx, "update %s %s %s", u.Component, u.URL, u.SHA256)
}

// definition makes a built-in driver of b.
func definition(t *testing.T, id string, b *board) *driver.Definition {
	t.Helper()
	d, err := driver.Define(driver.Spec[string]{
		ID: id, Version: "1.0.0", RunsOn: "site", Parse: func(raw json.RawMessage) (string, error) { return string(raw), nil },
		RetrySafe: []string{"power.getPower"},
	},
		driver.Implement(metal.PowerKind(), func(config string, _ *driver.Context) (metal.Power, error) {
			b.log = append(b.log, "config "+config)
			return b, nil
		}),
		driver.Implement(metal.CredentialsKind(), func(string, *driver.Context) (metal.Credentials, error) { return b, nil }),
		driver.Implement(metal.VirtualMediaKind(), func(string, *driver.Context) (metal.VirtualMedia, error) { return b, nil }),
		driver.Implement(metal.FirmwareKind(), func(string, *driver.Context) (metal.FirmwareManager, error) { return b, nil }))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func memoryBook(t *testing.T) *addressbook.Book {
	t.Helper()
	book, err := addressbook.Open("")
	if err != nil {
		t.Fatal(err)
	}
	return book
}

func ask(kind, operation, args string, change func(*bmcv1.BmcOperationRequest)) Request {
	return Request{Kind: kind, CommandID: "cmd_1", Secrets: login, Op: op(func(o *bmcv1.BmcOperationRequest) {
		o.Driver, o.Operation, o.ArgsJson = "board", operation, args
		if change != nil {
			change(o)
		}
	})}
}

// TestBuiltIn: a built-in driver gets what a plugin gets, and its arguments are
// parsed by what defines its kinds.
func TestBuiltIn(t *testing.T) {
	for _, tt := range []struct {
		kind, operation, args, want, log string
		code                             errs.Code
	}{
		{"bmc.query", "power.getPower", ``, `"on"`, `config {"address":"10.0.0.5"}; getPower cmd_1 by ADMIN hunter2`, ""},
		{"bmc.query", "power.getPower", `[null]`, `"on"`, `config {"address":"10.0.0.5"}; getPower cmd_1 by ADMIN hunter2`, ""},
		{"bmc.query", "power.getPower", `[1]`, ``, `config {"address":"10.0.0.5"}`, errs.InvalidArgs},
		{"bmc.power", "power.setPower", `["off",null]`, `null`, `config {"address":"10.0.0.5"}; setPower off by ADMIN hunter2`, ""},
		{"bmc.power", "power.setPower", `["sideways"]`, ``, `config {"address":"10.0.0.5"}`, errs.InvalidArgs},
		{"bmc.query", "inspect.inspect", ``, ``, ``, errs.UnsupportedDriver},
		{"bmc.power", "management.resetBmc", ``, ``, ``, errs.UnsupportedDriver},
		{"bmc.query", "virtual-media.status", ``, ``, ``, errs.UnsupportedOperation},
		{"bmc.console", "console.open", ``, ``, ``, errs.UnsupportedOperation},
	} {
		b := &board{}
		p := &plugins{result: `"plugin"`}
		r := New(Options{Book: memoryBook(t), BuiltIn: []*driver.Definition{definition(t, "board", b)}, Plugins: p})
		got, err := r.Do(t.Context(), ask(tt.kind, tt.operation, tt.args, nil))
		if got.GetResultJson() != tt.want || errs.CodeOf(err) != tt.code || strings.Join(b.log, "; ") != tt.log || len(p.calls) != 0 {
			t.Errorf("%s(%s) = %s, %v, log %q and %d plugin calls, want %s, code %q, log %q, none", tt.operation, tt.args, got.GetResultJson(), err, b.log, len(p.calls), tt.want, tt.code, tt.log)
		}
	}
}

// TestBuiltInFault: a driver's panic is its call's error, and says nothing that
// it knew.
func TestBuiltInFault(t *testing.T) {
	b := &board{fail: errPanic}
	r := New(Options{Book: memoryBook(t), BuiltIn: []*driver.Definition{definition(t, "board", b)}})
	if _, err := r.Do(t.Context(), ask("bmc.query", "power.getPower", "", nil)); errs.CodeOf(err) != errs.DriverError {
		t.Errorf("Do() of a driver that panics = %v, want driver-error", err)
	}
}

// TestCountsAsTheDriverReads: what decides whether an operation counts reads its
// arguments exactly as the driver will: whatever a driver takes for anything but
// "on" counts.
func TestCountsAsTheDriverReads(t *testing.T) {
	for _, args := range []string{
		`"on"`, `["on"]`, `["on",null]`, ` [ "on" , null , null ] `, `["\u006f\u006e"]`, "\t\"on\"\n",
		`"off"`, `["off"]`, `["off",null]`, `["reset"]`, `["nmi"]`, `"soft"`, `["cycle"]`,
		``, `[]`, `null`, `[null]`, `[null,"on"]`, `["on","off"]`, `[["on"]]`, `{"action":"on"}`, `["On"]`, `["on "]`, `"on" "off"`, `["on"]["off"]`, `["on",]`, `1`,
	} {
		b := &board{}
		r := New(Options{Book: memoryBook(t), BuiltIn: []*driver.Definition{definition(t, "board", b)}})
		req := ask("bmc.power", "power.setPower", args, nil)
		checked, checkErr := Check(req.Kind, req.Op)
		_, err := r.Do(t.Context(), req)
		did := ""
		for _, line := range b.log {
			if rest, ok := strings.CutPrefix(line, "setPower "); ok {
				did, _, _ = strings.Cut(rest, " ")
			}
		}
		switch {
		case checkErr != nil && did != "":
			t.Errorf("args %s: Check() = %v, but the driver did %q", args, checkErr, did)
		case checkErr == nil && did != checked.Action && (did != "" || err == nil):
			t.Errorf("args %s: Check() read action %q, the driver did %q (%v)", args, checked.Action, did, err)
		case checkErr == nil && did != "on" && !checked.Counts:
			t.Errorf("args %s do not count, and the driver did %q", args, did)
		case did == "on" && checked.Counts:
			t.Errorf("args %s count, and the driver did on", args)
		}
	}
}

// TestRotation: the new password's reference leaves the arguments, is fetched
// beside the credential, and goes to built-in and hosted drivers as the secret
// newPassword alone.
func TestRotation(t *testing.T) {
	const args = `[{"username":"ops","newPassword":"secret://root/next"}]`
	b := &board{}
	p := &plugins{result: "null"}
	r := New(Options{Book: memoryBook(t), BuiltIn: []*driver.Definition{definition(t, "board", b)}, Plugins: p})
	if _, err := r.Do(t.Context(), ask(Rotate, rotation, args, nil)); err != nil {
		t.Fatal(err)
	}
	if want := []string{`rotate "ops" by ADMIN hunter2 hunter3`}; !reflect.DeepEqual(b.log, want) {
		t.Errorf("the built-in driver saw %q, want %q", b.log, want)
	}
	for _, tt := range []struct{ args, want string }{
		{args, `[{"username":"ops"}]`}, {`{"newPassword":"secret://root/next"}`, `[]`}, {`[{"newPassword":"secret://root/next"},null]`, `[]`},
	} {
		p.calls = nil
		if _, err := r.Do(t.Context(), ask(Rotate, rotation, tt.args, func(o *bmcv1.BmcOperationRequest) { o.Driver, o.Address = "ipmi", "10.0.0.6" })); err != nil {
			t.Fatal(err)
		}
		c := p.calls[0]
		if string(c.Args) != tt.want || len(c.Secrets) != 3 || string(c.Secrets["newPassword"].Reveal()) != "hunter3" || string(c.Secrets["password"].Reveal()) != "hunter2" {
			t.Errorf("rotate(%s): the plugin got args %s and %d secrets, want %s and username, password and newPassword", tt.args, c.Args, len(c.Secrets), tt.want)
		}
	}
	// Any other operation gets no new password, whatever its arguments say.
	p.calls = nil
	if _, err := r.Do(t.Context(), ask("bmc.query", "power.getPower", `[{"newPassword":"secret://root/next"}]`, func(o *bmcv1.BmcOperationRequest) { o.Driver, o.Address = "ipmi", "10.0.0.6" })); err != nil {
		t.Fatal(err)
	}
	if got := len(p.calls[0].Secrets); got != 2 {
		t.Errorf("a query got %d secrets, want 2", got)
	}
}

// TestProtected: on a protected machine whatever counts always needs grants.
func TestProtected(t *testing.T) {
	book := memoryBook(t)
	r := New(Options{Book: book})
	for _, protected := range []bool{false, true, false} {
		if err := r.Bind(&bmcv1.BmcBindRequest{Driver: "ipmi", Address: "10.0.0.5", CredentialsRef: "secret://root/bmc-1", Protected: protected}); err != nil {
			t.Fatal(err)
		}
		for _, tt := range []struct {
			kind, operation, args string
			counts                bool
		}{
			{"bmc.power", "power.setPower", `["off"]`, true}, {"bmc.power", "power.setPower", `["on"]`, false},
			{"bmc.query", "power.getPower", ``, false}, {"bmc.bios", "bios.resetSettings", ``, true},
		} {
			got, err := r.Check(tt.kind, op(func(o *bmcv1.BmcOperationRequest) { o.Operation, o.ArgsJson = tt.operation, tt.args }))
			if err != nil || got.Counts != tt.counts || got.Always != (protected && tt.counts) {
				t.Errorf("protected %v: Check(%s%s) = %+v, %v, want counts %v, always %v", protected, tt.operation, tt.args, got, err, tt.counts, protected && tt.counts)
			}
		}
	}
}

// TestCheckBind: a rebinding is judged like an operation, counts, and needs
// grants always.
func TestCheckBind(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*bmcv1.BmcBindRequest)
		code   errs.Code
	}{
		{"good", func(*bmcv1.BmcBindRequest) {}, ""},
		{"pin", func(b *bmcv1.BmcBindRequest) { b.TlsSpkiSha256 = pin }, ""},
		{"by hand", func(b *bmcv1.BmcBindRequest) { b.Driver, b.Address, b.CredentialsRef = "manual", "rack-3", "" }, ""},
		{"no credential", func(b *bmcv1.BmcBindRequest) { b.CredentialsRef = "" }, errs.InvalidPayload},
		{"forget", func(b *bmcv1.BmcBindRequest) { b.Forget, b.CredentialsRef = true, "" }, ""},
		{"forget and protect", func(b *bmcv1.BmcBindRequest) { b.Forget, b.CredentialsRef, b.Protected = true, "", true }, errs.InvalidPayload},
		{"forget with a pin", func(b *bmcv1.BmcBindRequest) { b.Forget, b.CredentialsRef, b.TlsSpkiSha256 = true, "", pin }, errs.InvalidPayload},
		{"forget with a credential", func(b *bmcv1.BmcBindRequest) { b.Forget = true }, errs.InvalidPayload},
		{"forget no driver", func(b *bmcv1.BmcBindRequest) { b.Forget, b.CredentialsRef, b.Driver = true, "", "" }, errs.InvalidPayload},
		{"forget no address", func(b *bmcv1.BmcBindRequest) { b.Forget, b.CredentialsRef, b.Address = true, "", "10.0.0.5/x" }, errs.InvalidAddress},
		{"literal", func(b *bmcv1.BmcBindRequest) { b.CredentialsRef = "hunter2" }, errs.InvalidPayload},
		{"driver", func(b *bmcv1.BmcBindRequest) { b.Driver = "IPMI" }, errs.InvalidPayload},
		{"short pin", func(b *bmcv1.BmcBindRequest) { b.TlsSpkiSha256 = "ab" }, errs.InvalidConfig},
		{"address", func(b *bmcv1.BmcBindRequest) { b.Address = "10.0.0.5/x" }, errs.InvalidAddress},
	} {
		req := &bmcv1.BmcBindRequest{Driver: "ipmi", Address: "10.0.0.5", CredentialsRef: "secret://root/bmc-1"}
		tt.change(req)
		got, err := CheckBind(req)
		if errs.CodeOf(err) != tt.code || err == nil && (!got.Counts || !got.Always || !got.Destructive || got.Key == "") {
			t.Errorf("%s: CheckBind() = %+v, %v, want code %q, and that it counts", tt.name, got, err, tt.code)
		}
		if err := New(Options{Book: memoryBook(t)}).Bind(req); errs.CodeOf(err) != tt.code {
			t.Errorf("%s: Bind() = %v, want code %q", tt.name, err, tt.code)
		}
	}
}

// TestBindEndsAMismatch: a rebinding is the way out of binding-mismatch.
func TestBindEndsAMismatch(t *testing.T) {
	p := &plugins{result: `"on"`}
	r := New(Options{Book: memoryBook(t), Plugins: p})
	query := func(ref string) error {
		_, err := r.Do(t.Context(), Request{Kind: Query, Secrets: login, Op: op(func(o *bmcv1.BmcOperationRequest) { o.CredentialsRef = ref })})
		return err
	}
	if err := query("secret://root/bmc-1"); err != nil {
		t.Fatal(err)
	}
	if err := query("secret://root/bmc-2"); errs.CodeOf(err) != errs.BindingMismatch {
		t.Errorf("another credential = %v, want binding-mismatch", err)
	}
	if err := r.Bind(&bmcv1.BmcBindRequest{Driver: "ipmi", Address: "10.0.0.5", CredentialsRef: "secret://root/bmc-2"}); err != nil {
		t.Fatal(err)
	}
	if err := query("secret://root/bmc-2"); err != nil {
		t.Errorf("the credential that it is bound to now = %v", err)
	}
	if err := query("secret://root/bmc-1"); errs.CodeOf(err) != errs.BindingMismatch {
		t.Errorf("the credential that it was bound to = %v, want binding-mismatch", err)
	}
}

// TestRetrySafeNeedsBoth: a kind's operation is repeated after a restart only
// where its driver lists it too; a query always; and what wakes machines, or asks
// people, by the driver's word alone.
func TestRetrySafeNeedsBoth(t *testing.T) {
	listed := New(Options{Book: memoryBook(t), Plugins: &plugins{}, BuiltIn: []*driver.Definition{definition(t, "board", &board{})}})
	unlisted := New(Options{Book: memoryBook(t), Plugins: &plugins{unsafe: true}})
	for _, tt := range []struct {
		r                             *Relay
		driver, kind, operation, args string
		want                          bool
	}{
		{listed, "ipmi", "bmc.boot", "management.setBootDevice", `{"device":"pxe"}`, true},
		{unlisted, "ipmi", "bmc.boot", "management.setBootDevice", `{"device":"pxe"}`, false},
		{unlisted, "ipmi", "bmc.query", "power.getPower", ``, true},
		{listed, "ipmi", "bmc.power", "power.setPower", `["on"]`, false},
		{listed, "board", "bmc.media", "virtual-media.eject", ``, false}, // it lists getPower alone
		{unlisted, "unheard-of", "bmc.media", "virtual-media.eject", ``, true},
	} {
		got, err := tt.r.Check(tt.kind, op(func(o *bmcv1.BmcOperationRequest) {
			o.Driver, o.Operation, o.ArgsJson = tt.driver, tt.operation, tt.args
		}))
		if err != nil || got.RetrySafe != tt.want {
			t.Errorf("Check(%s of %s) = %+v, %v, want retry-safe %v", tt.operation, tt.driver, got, err, tt.want)
		}
	}
}

// TestBuiltInRetryableIsGated: that a repeat may help is believed only of what
// the driver lists.
func TestBuiltInRetryableIsGated(t *testing.T) {
	b := &board{fail: errs.Retry(errs.BmcError, "busy")}
	r := New(Options{Book: memoryBook(t), BuiltIn: []*driver.Definition{definition(t, "board", b)}})
	for operation, want := range map[string]bool{"power.getPower": true, "firmware.list": false} {
		_, err := r.Do(t.Context(), ask(Query, operation, "", nil))
		if errs.CodeOf(err) != errs.BmcError || errs.From(err).Retryable != want {
			t.Errorf("%s = %v, want bmc-error, retryable %v", operation, err, want)
		}
	}
}

// TestDeadBMC: after three calls that found nobody a fourth costs nothing, not
// even a credential, until its time has come; other BMCs do not notice.
func TestDeadBMC(t *testing.T) {
	now := time.Unix(1e9, 0)
	p := &plugins{err: errs.Retry(errs.Unreachable, "no answer")}
	fetched := 0
	r := New(Options{Book: memoryBook(t), Plugins: p, Now: func() time.Time { return now }})
	query := func(address string) error {
		_, err := r.Do(t.Context(), Request{Kind: Query, Op: op(func(o *bmcv1.BmcOperationRequest) { o.Address = address }), Secrets: func(ctx context.Context, refs ...string) (map[string]secret.Value, error) {
			fetched++
			return login(ctx, refs...)
		}})
		return err
	}
	for range 5 {
		if err := query("10.0.0.5"); errs.CodeOf(err) != errs.Unreachable || !errs.From(err).Retryable {
			t.Errorf("a dead BMC = %v, want unreachable, retryable", err)
		}
	}
	if len(p.calls) != 3 || fetched != 3 {
		t.Errorf("%d calls went out and %d credentials were fetched, want 3 and 3", len(p.calls), fetched)
	}
	p.err, p.result = nil, `"on"`
	if err := query("10.0.0.6"); err != nil {
		t.Errorf("another BMC = %v", err)
	}
	if err := query("10.0.0.5"); err == nil || !strings.Contains(err.Error(), "not asked") {
		t.Errorf("the dead one before its time = %v, want not asked", err)
	}
	now = now.Add(30 * time.Second)
	for range 4 {
		if err := query("10.0.0.5"); err != nil {
			t.Errorf("the BMC that is back = %v", err)
		}
	}
}

// shelf is a Media that counts what is offered.
type shelf struct {
	offered  []string
	released []string
}

func (s *shelf) Forget(string) {}

func (s *shelf) Offer(_ context.Context, address, ref string) (string, func(), error) {
	if ref == "artifact://missing" {
		return "", nil, errs.New(errs.InvalidArgs, "no such artifact")
	}
	s.offered = append(s.offered, address+" "+ref)
	return "https://box/" + strings.TrimPrefix(ref, "artifact://"), func() { s.released = append(s.released, ref) }, nil
}

// TestArtifacts: a reference to an artifact becomes a URL for this BMC; an image
// is offered until it is ejected or replaced, firmware until its update ends.
func TestArtifacts(t *testing.T) {
	const update = `[{"component":"BIOS","url":"artifact://bios","sha256":"` + digest + `"}]`
	b, s := &board{}, &shelf{}
	r := New(Options{Book: memoryBook(t), BuiltIn: []*driver.Definition{definition(t, "board", b)}, Media: s})
	for i, tt := range []struct {
		kind, operation, args, log, released string
		fail                                 error
	}{
		{"bmc.media", insertMedia, `["artifact://a"]`, "insert https://box/a", "", nil},
		{"bmc.media", insertMedia, `"artifact://b"`, "insert https://box/b", "artifact://a", nil},
		{"bmc.media", insertMedia, `["artifact://c",null]`, "insert https://box/c", "artifact://a artifact://c", errs.New(errs.BmcError, "no")},
		{"bmc.media", ejectMedia, ``, "eject", "artifact://a artifact://c", errs.New(errs.BmcError, "no")},
		{"bmc.media", ejectMedia, ``, "eject", "artifact://a artifact://c artifact://b", nil},
		{"bmc.media", insertMedia, `["https://x/d.iso"]`, "insert https://x/d.iso", "artifact://a artifact://c artifact://b", nil},
		{"bmc.firmware", firmwareUpdate, update, "update BIOS https://box/bios " + digest, "artifact://a artifact://c artifact://b artifact://bios", nil},
	} {
		b.log, b.fail = nil, tt.fail
		_, err := r.Do(t.Context(), ask(tt.kind, tt.operation, tt.args, nil))
		if (err != nil) != (tt.fail != nil) || len(b.log) != 1 || b.log[0] != tt.log+" by ADMIN hunter2" || strings.Join(s.released, " ") != tt.released {
			t.Errorf("%d: %s(%s) = %v, saw %q, released %q, want %q and %q", i, tt.operation, tt.args, err, b.log, s.released, tt.log, tt.released)
		}
	}
	if want := "10.0.0.5:443 artifact://a"; s.offered[0] != want {
		t.Errorf("offered %q, want %q", s.offered[0], want)
	}
	b.log = nil
	if _, err := r.Do(t.Context(), ask("bmc.media", insertMedia, `["artifact://missing"]`, nil)); errs.CodeOf(err) != errs.InvalidArgs || len(b.log) != 0 {
		t.Errorf("an artifact that is missing = %v, and the driver saw %q", err, b.log)
	}
	r = New(Options{Book: memoryBook(t), BuiltIn: []*driver.Definition{definition(t, "board", b)}})
	if _, err := r.Do(t.Context(), ask("bmc.media", insertMedia, `["artifact://a"]`, nil)); errs.CodeOf(err) != errs.InvalidArgs || len(b.log) != 0 {
		t.Errorf("a site without media = %v, and the driver saw %q", err, b.log)
	}
}

// An image's server that is away locks no BMC out that lives.
func TestImageServerAway(t *testing.T) {
	p := &plugins{err: errs.Retry(errs.Unreachable, "fetch the firmware image: connection refused")}
	r, _ := relayWith(t, p)
	update := op(func(o *bmcv1.BmcOperationRequest) {
		o.Operation, o.ArgsJson = "firmware.update", `{"component":"BIOS","url":"https://away/a","sha256":"`+strings.Repeat("a", 64)+`"}`
	})
	for range 5 {
		if _, err := r.Do(t.Context(), Request{Kind: "bmc.firmware", Op: update, Secrets: login}); errs.CodeOf(err) != errs.Unreachable {
			t.Fatalf("Do(firmware.update) = %v, want unreachable", err)
		}
	}
	p.err, p.result = nil, `"on"`
	if _, err := r.Do(t.Context(), Request{Kind: Query, Op: op(nil), Secrets: login}); err != nil {
		t.Errorf("Do(getPower) = %v, want it asked", err)
	}
	if len(p.calls) != 6 {
		t.Errorf("%d calls, want 6", len(p.calls))
	}
}

// TestUnclearInsertKeepsItsOffer: an image that the BMC may have taken stays offered
// beside the one before it, until a later insert or eject says what is in the drive.
func TestUnclearInsertKeepsItsOffer(t *testing.T) {
	insert := func(name string) string { return `["artifact://` + name + `"]` }
	for _, tt := range []struct {
		fail error
		kept bool
	}{
		{errs.New(errs.Interrupted, "the answer was lost"), true}, {errs.Retry(errs.Timeout, "late"), true}, {errs.New(errs.Timeout, "late"), true},
		{errs.Retry(errs.Unreachable, "the plugin ended"), true}, {errs.Retry(errs.BmcError, "busy"), true}, {context.DeadlineExceeded, true},
		{errs.New(errs.BmcError, "refused"), false}, {errs.New(errs.MediaUntrusted, "refused"), false}, {errs.New(errs.InvalidArgs, "refused"), false},
	} {
		b, s := &board{}, &shelf{}
		r := New(Options{Book: memoryBook(t), BuiltIn: []*driver.Definition{definition(t, "board", b)}, Media: s})
		do := func(operation, args string, fail error, released string) {
			t.Helper()
			b.fail = fail
			_, err := r.Do(t.Context(), ask("bmc.media", operation, args, nil))
			if (err != nil) != (fail != nil) || strings.Join(s.released, " ") != released {
				t.Errorf("%v: %s(%s) = %v, released %q, want %q", tt.fail, operation, args, err, s.released, released)
			}
		}
		do(insertMedia, insert("a"), nil, "")
		if !tt.kept {
			do(insertMedia, insert("b"), tt.fail, "artifact://b")
			do(ejectMedia, "", nil, "artifact://b artifact://a")
			continue
		}
		do(insertMedia, insert("b"), tt.fail, "")
		do(insertMedia, insert("c"), nil, "artifact://a artifact://b")
		do(insertMedia, insert("d"), tt.fail, "artifact://a artifact://b")
		do(ejectMedia, "", tt.fail, "artifact://a artifact://b")
		do(ejectMedia, "", nil, "artifact://a artifact://b artifact://c artifact://d")
	}
	s := &shelf{}
	m := newMounts(s)
	for i := range maxKept + 2 {
		_, release, _ := s.Offer(t.Context(), "b", fmt.Sprint("artifact://", i))
		m.keep("b", release)
	}
	if got := strings.Join(s.released, " "); got != "artifact://1 artifact://2" {
		t.Errorf("released %q of %d unclear inserts, want the oldest but the first", got, maxKept+2)
	}
	m.replace("b", nil)
	if len(s.released) != maxKept+2 {
		t.Errorf("released %q at the end, want all", s.released)
	}
}

// ofPlugin is the error of a plugin that ended.
type ofPlugin struct{ error }

func (ofPlugin) OfPlugin()       {}
func (o ofPlugin) Unwrap() error { return o.error }

// TestPluginThatEndsIsNotTheBMC: a BMC that answers is not left alone because
// its plugin does not.
func TestPluginThatEndsIsNotTheBMC(t *testing.T) {
	p := &plugins{err: ofPlugin{errs.Retry(errs.Unreachable, "plugin ipmi ended during the call: killed")}}
	r, _ := relayWith(t, p)
	for range 3 {
		if _, err := r.Do(t.Context(), Request{Kind: Query, Op: op(nil), Secrets: login}); errs.CodeOf(err) != errs.Unreachable {
			t.Fatalf("Do() = %v, want unreachable", err)
		}
	}
	p.err, p.result = nil, `"on"`
	if _, err := r.Do(t.Context(), Request{Kind: Query, Op: op(nil), Secrets: login}); err != nil {
		t.Errorf("Do() after the plugin's restart = %v", err)
	}
}
