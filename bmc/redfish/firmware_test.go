package redfish

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/bmc/release"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// depot serves an image over https under an authority of its own.
type depot struct {
	*httptest.Server
	pool    *x509.CertPool
	content []byte
	gets    atomic.Int32
}

func newDepot(t *testing.T, content []byte) *depot {
	t.Helper()
	d := &depot{content: content}
	d.Server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		d.gets.Add(1)
		switch r.URL.Path {
		case "/away.bin":
			http.Redirect(w, r, "/bios.bin", http.StatusFound)
		case "/plain.bin":
			http.Redirect(w, r, "http://"+r.Host+"/bios.bin", http.StatusFound)
		default:
			_, _ = w.Write(d.content)
		}
	}))
	t.Cleanup(d.Close)
	d.pool = x509.NewCertPool()
	d.pool.AddCert(d.Certificate())
	return d
}

func (d *depot) update(component, version string) metal.FirmwareUpdate {
	sum := sha256.Sum256(d.content)
	return metal.FirmwareUpdate{Component: component, URL: d.URL + "/bios.bin", SHA256: hex.EncodeToString(sum[:]), Version: version}
}

// firmwareRig is a rig and a bench that trust the depot.
func firmwareRig(t *testing.T, d *depot, faults ...bmctest.Fault) (*bmctest.Redfish, *bench) {
	t.Helper()
	r, b := rigWith(t, bmctest.WithFaults(faults...), bmctest.MediaRoots(d.pool))
	b.pool.options.Roots, b.pool.options.Spool = d.pool, t.TempDir()
	b.pool.timing.settle = 200 * time.Millisecond
	return r, b
}

func (b *bench) versions() map[string]string {
	b.t.Helper()
	raw, err := b.do("firmware", "list")
	if err != nil {
		b.t.Fatal(err)
	}
	out := map[string]string{}
	for _, f := range into[[]metal.Firmware](b.t, raw) {
		out[f.Component] = f.Version
	}
	return out
}

func TestFirmwareUpdate(t *testing.T) {
	for _, faults := range [][]bmctest.Fault{
		nil, {bmctest.NoSimpleUpdate}, {bmctest.NoFirmwarePush}, {bmctest.TaskInLocation}, {bmctest.TaskMonitorOnly}, {bmctest.TaskVanishes}, {bmctest.TaskUnnamed},
		{bmctest.ForeignLocation}, {bmctest.MembersPaged}, {bmctest.SlashNeeded}, {bmctest.AbsoluteLinks}, {bmctest.EtagOnActions, bmctest.NoFirmwarePush}, {bmctest.SessionsExpire},
		{bmctest.FailsAfter.Times(1)}, {bmctest.DropsAfter.Times(1)}, {bmctest.ResetsAfter.Times(1)}, {bmctest.NoFirmwarePush, bmctest.ResetsAfter.Times(1)},
	} {
		t.Run(fmt.Sprint(faults), func(t *testing.T) {
			d := newDepot(t, bmctest.FirmwareImage("BIOS", "2.0"))
			r, b := firmwareRig(t, d, faults...)
			if got := b.versions(); got["BIOS"] != "1.0" || got["BMC"] != "1.2" {
				t.Fatalf("list = %v", got)
			}
			if got, err := b.applied("firmware", "update", d.update("BIOS", "2.0")); err != nil || got.RebootNeeded {
				t.Fatalf("update = %+v, %v; the BMC saw %q", got, err, r.Log())
			}
			if got := logged(r, "firmware"); !slices.Equal(got, []string{"firmware BIOS 2.0"}) {
				t.Errorf("the BMC saw %q, want one update", got)
			}
			if got := b.versions(); got["BIOS"] != "2.0" || got["BMC"] != "1.2" {
				t.Errorf("list after the update = %v", got)
			}
			// What is there already is not written again.
			if again, err := b.applied("firmware", "update", d.update("BIOS", "2.0")); err != nil || !again.AlreadyInstalled || len(logged(r, "firmware")) != 1 {
				t.Errorf("update to what is there = %+v, %v, %q, want that it says so", again, err, r.Log())
			}
			left, err := os.ReadDir(b.pool.options.Spool)
			if err != nil || len(left) > 0 {
				t.Errorf("%d files are left behind, %v", len(left), err)
			}
		})
	}
}

// Nothing is sent before the image is what it should be.
func TestFirmwareDigestFirst(t *testing.T) {
	for _, fault := range []bmctest.Fault{bmctest.NoSimpleUpdate, bmctest.NoFirmwarePush} {
		d := newDepot(t, bmctest.FirmwareImage("BIOS", "2.0"))
		r, b := firmwareRig(t, d, fault)
		u := d.update("BIOS", "2.0")
		d.content[len(d.content)-2] ^= 1
		_, err := b.do("firmware", "update", u)
		if errs.CodeOf(err) != errs.DigestMismatch || d.gets.Load() != 1 {
			t.Errorf("%s: update with another image = %v, want digest-mismatch", fault, err)
		}
		for _, request := range r.Requests() {
			if strings.HasPrefix(request, "POST ") && request != sessionsPost {
				t.Errorf("%s: the BMC was sent %s", fault, request)
			}
		}
	}
}

func TestFirmwareImageIsFetchedSafely(t *testing.T) {
	d := newDepot(t, bmctest.FirmwareImage("BIOS", "2.0"))
	r, b := firmwareRig(t, d)
	u := d.update("BIOS", "2.0")
	u.URL = d.URL + "/plain.bin"
	if _, err := b.do("firmware", "update", u); errs.CodeOf(err) != errs.Unreachable {
		t.Errorf("update over a redirect to http = %v, want unreachable", err)
	}
	b.pool.options.Roots = x509.NewCertPool()
	u.URL = d.URL + "/bios.bin"
	if _, err := b.do("firmware", "update", u); errs.CodeOf(err) != errs.Unreachable {
		t.Errorf("update from a server that nobody vouches for = %v, want unreachable", err)
	}
	b.pool.options.Roots = d.pool
	for component, code := range map[string]errs.Code{"NIC": errs.InvalidArgs} {
		if _, err := b.do("firmware", "update", d.update(component, "2.0")); errs.CodeOf(err) != code {
			t.Errorf("update of %s = %v, want %s", component, err, code)
		}
	}
	if got := logged(r, "firmware"); len(got) > 0 {
		t.Errorf("the BMC saw %q, want nothing", got)
	}
	u.URL = d.URL + "/away.bin"
	if _, err := b.do("firmware", "update", u); err != nil {
		t.Errorf("update over a redirect within https = %v", err)
	}
}

func TestFirmwareFaultsAreErrors(t *testing.T) {
	for _, tt := range []struct {
		faults []bmctest.Fault
		code   errs.Code
		says   string
		sent   int
	}{
		{[]bmctest.Fault{bmctest.TaskCritical}, errs.BmcError, "Completed but critical", 1},
		{[]bmctest.Fault{bmctest.TaskException}, errs.BmcError, "Exception", 1},
		{[]bmctest.Fault{bmctest.TaskException, bmctest.TaskMonitorOnly}, errs.BmcError, "may go on", 1},
		{[]bmctest.Fault{bmctest.FirmwareUnchanged}, errs.BmcError, `shows version "1.0", not "2.0"`, 1},
		{[]bmctest.Fault{bmctest.FirmwareUnchanged, bmctest.TaskVanishes}, errs.BmcError, "lost sight", 1},
		{[]bmctest.Fault{bmctest.DropsBefore}, errs.Interrupted, "nothing was sent again", 0},
		{[]bmctest.Fault{bmctest.DropsAfter, bmctest.FirmwareUnchanged}, errs.Interrupted, "nothing was sent again", 1},
		{[]bmctest.Fault{bmctest.Bare}, errs.UnsupportedOperation, "update service", 0},
		{[]bmctest.Fault{bmctest.NoFirmwarePush, bmctest.NoSimpleUpdate}, errs.UnsupportedOperation, "neither", 0},
	} {
		d := newDepot(t, bmctest.FirmwareImage("BIOS", "2.0"))
		r, b := firmwareRig(t, d, tt.faults...)
		b.pool.timing.settle = 10 * time.Millisecond
		_, err := b.do("firmware", "update", d.update("BIOS", "2.0"))
		if errs.CodeOf(err) != tt.code || !strings.Contains(err.Error(), tt.says) || len(logged(r, "firmware")) != tt.sent {
			t.Errorf("%v: update = %v with %q, want %s with %q and %d sent", tt.faults, err, logged(r, "firmware"), tt.code, tt.says, tt.sent)
		}
		uploads := 0
		for _, request := range r.Requests() {
			if strings.HasPrefix(request, "POST ") && request != sessionsPost {
				uploads++
			}
		}
		if uploads > 1 {
			t.Errorf("%v: the update was asked for %d times", tt.faults, uploads)
		}
	}
}

func TestFirmwareAtBoot(t *testing.T) {
	d := newDepot(t, bmctest.FirmwareImage("BIOS", "2.0"))
	_, b := firmwareRig(t, d, bmctest.FirmwareAtBoot)
	if got, err := b.applied("firmware", "update", d.update("BIOS", "2.0")); err != nil || !got.RebootNeeded {
		t.Fatalf("update = %+v, %v, want a reboot", got, err)
	}
	if _, err := b.do("power", "setPower", "on"); err != nil {
		t.Fatal(err)
	}
	if got := b.versions()["BIOS"]; got != "2.0" {
		t.Errorf("version after the boot = %q, want 2.0", got)
	}
}

// A task that does not end ends with the operation, which says that it goes on.
func TestFirmwareEndlessTask(t *testing.T) {
	d := newDepot(t, bmctest.FirmwareImage("BIOS", "2.0"))
	r, b := firmwareRig(t, d, bmctest.TaskNeverEnds)
	_, err := b.within(2*time.Second, "firmware", "update", d.update("BIOS", "2.0"))
	if errs.CodeOf(err) != errs.Timeout || !strings.Contains(err.Error(), "goes on") || len(logged(r, "firmware")) != 1 {
		t.Errorf("update with an endless task = %v, want timeout", err)
	}
}

// Progress has a percentage that grows, while pushing and while the task runs.
func TestFirmwareProgress(t *testing.T) {
	d := newDepot(t, bmctest.FirmwareImage("BIOS", "2.0"))
	_, b := firmwareRig(t, d)
	if _, err := b.do("firmware", "update", d.update("BIOS", "2.0")); err != nil {
		t.Fatal(err)
	}
	var phases []string
	last := map[string]uint64{}
	for _, p := range b.progress {
		if p.Total > 0 {
			if p.Done < last[p.Phase] || p.Done > p.Total {
				t.Errorf("progress went from %d to %d of %d", last[p.Phase], p.Done, p.Total)
			}
			last[p.Phase] = p.Done
		}
		phases = append(phases, p.Phase)
	}
	if got, want := slices.Compact(phases), []string{"fetch", "update", "upload", "task"}; !slices.Equal(got, want) || last["task"] != 100 {
		t.Errorf("phases = %q at %v, want %q", got, last, want)
	}
}

// While a BMC writes firmware the call's place is free: questions are answered,
// and nothing that would disturb it is done.
func TestFirmwareGivesUpItsPlace(t *testing.T) {
	d := newDepot(t, bmctest.FirmwareImage("BIOS", "2.0"))
	r, b := firmwareRig(t, d, bmctest.TaskNeverEnds)
	if _, err := b.do("power", "setPower", "on"); err != nil {
		t.Fatal(err)
	}
	free := make(chan struct{})
	ended := make(chan error, 1)
	ctx, cancel := context.WithCancel(release.With(t.Context(), func() { close(free) }))
	defer cancel()
	update := *b // its progress is its own
	go func() {
		_, err := update.in(ctx, "firmware", "update", d.update("BIOS", "2.0"))
		ended <- err
	}()
	select {
	case <-free:
	case err := <-ended:
		t.Fatalf("update = %v before its place was free", err)
	}
	if len(logged(r, "firmware")) != 1 {
		t.Errorf("the place is free before the BMC has the image")
	}
	if got, err := b.power(); err != nil || got != "on" {
		t.Errorf("getPower during an update = %q, %v", got, err)
	}
	for _, op := range []struct {
		kind, operation string
		args            []any
	}{{"power", "setPower", []any{"off"}}, {"power", "setPower", []any{"cycle"}}, {"management", "resetBmc", nil}, {"firmware", "update", []any{d.update("BIOS", "2.0")}}} {
		if _, err := b.do(op.kind, op.operation, op.args...); errs.CodeOf(err) != errs.BmcError || !errs.From(err).Retryable {
			t.Errorf("%s.%s during an update = %v, want a retryable bmc-error", op.kind, op.operation, err)
		}
	}
	cancel()
	if err := <-ended; errs.CodeOf(err) != errs.Cancelled {
		t.Errorf("the cancelled update = %v", err)
	}
	if _, err := b.do("power", "setPower", "off"); err != nil {
		t.Errorf("setPower after it = %v", err)
	}
	if got := r.Log(); len(logged(r, "firmware")) != 1 || !slices.Contains(got, "off") || slices.Contains(got, "manager reset") {
		t.Errorf("the BMC saw %q", got)
	}
}

func TestFirmwareComponents(t *testing.T) {
	all := components(&conn{}, []object{
		{"Id": []byte(`"Installed-159-2.19.1__BIOS.Setup.1-1"`), "Name": []byte(`"BIOS"`), "Version": []byte(`"2.19.1"`)},
		{"Id": []byte(`"Previous-159-2.18__BIOS.Setup.1-1"`), "Name": []byte(`"BIOS"`), "Version": []byte(`"2.18"`)},
		{"Id": []byte(`"1"`), "Name": []byte(`"iLO 5"`), "Version": []byte(`"2.72"`), "Updateable": []byte(`false`)},
		{"Id": []byte(`"2"`), "Name": []byte(`"NIC"`), "Version": []byte(`"7.1"`)}, {"Id": []byte(`"3"`), "Name": []byte(`"NIC"`), "Version": []byte(`"7.2"`)},
		{"Id": []byte(`"BMC"`), "Name": []byte(`"Contoso BMC Firmware"`)}, {"Id": []byte(`7`)},
	})
	if got, want := fmt.Sprint(told(all)), "[{BIOS.Setup.1-1 2.19.1} {iLO 5 2.72} {2 7.1} {3 7.2}]"; got != want {
		t.Errorf("components = %s, want %s", got, want)
	}
	for name, want := range map[string]string{"BIOS.Setup.1-1": "2.19.1", "bios": "2.19.1", "iLO 5": "2.72", "1": "2.72", "3": "7.2", "NIC": "", "PSU": ""} {
		if got, err := findComponent(all, name); got.version != want || (err == nil) != (want != "") {
			t.Errorf("findComponent(%q) = %+v, %v, want version %q", name, got, err, want)
		}
	}
}
