package redfish

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
)

// TestSoak asks BMCs that do everything wrong at random for everything that they
// can do, BC_SOAK_OPERATIONS (300) times with seed BC_SOAK_SEED (1, and a new one
// where the operations are counted): each operation ends right or in an error with
// a code, and none is executed twice.
func TestSoak(t *testing.T) {
	operations, seed := 300, uint64(1)
	if os.Getenv("BC_SOAK_OPERATIONS") != "" {
		seed = uint64(time.Now().UnixNano())
	}
	for name, into := range map[string]func(uint64){
		"BC_SOAK_OPERATIONS": func(n uint64) { operations = int(n) }, "BC_SOAK_SEED": func(n uint64) { seed = n },
	} {
		if text := os.Getenv(name); text != "" {
			n, err := strconv.ParseUint(text, 10, 63)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			into(n)
		}
	}
	t.Logf("seed %d, %d operations: BC_SOAK_SEED=%d repeats what each BMC is asked, and what it does wrong", seed, operations, seed)
	w := newSoakWorld(t)
	var left, done, right, plain atomic.Int64
	left.Store(int64(operations))
	var wg sync.WaitGroup
	for n := range uint64(soakWorkers) {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, n))
			for left.Load() > 0 {
				b := w.newBMC(r)
				for range 1 + r.IntN(8) {
					if left.Add(-1) < 0 {
						break
					}
					s := b.step(r)
					done.Add(1)
					if s.err == nil {
						right.Add(1)
					}
					if len(s.faults) == 0 {
						plain.Add(1)
					}
					for _, wrong := range judge(s) {
						t.Errorf("seed %d: %s\n%s", seed, wrong, s)
					}
				}
				b.close()
			}
		})
	}
	wg.Wait()
	if n := w.foreign.Load(); n != 0 {
		t.Errorf("another host than the BMC got %d requests", n)
	}
	t.Logf("%d operations, %d of them successes, %d without a fault", done.Load(), right.Load(), plain.Load())
	// A driver that refuses everything would pass the rest.
	if done.Load() != int64(operations) || right.Load()*3 < done.Load() {
		t.Errorf("%d of %d operations were done, and %d succeeded: want all, and a third", done.Load(), operations, right.Load())
	}
}

const (
	soakWorkers = 16
	// soakPatience is one operation's time; what does not end within it is a typed error.
	soakPatience = 3 * time.Second
)

// soakWorld is what the BMCs share.
type soakWorld struct {
	t       *testing.T
	roots   *x509.CertPool
	files   *httptest.Server
	foreign atomic.Int64
	other   *httptest.Server
	serial  atomic.Int64
}

func newSoakWorld(t *testing.T) *soakWorld {
	w := &soakWorld{t: t, roots: x509.NewCertPool()}
	w.files = httptest.NewTLSServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		// /firmware/BIOS/2.0 is firmware, and everything else a disc.
		if parts := strings.Split(r.URL.Path, "/"); len(parts) == 4 && parts[1] == "firmware" {
			_, _ = rw.Write(bmctest.FirmwareImage(parts[2], parts[3]))
			return
		}
		http.ServeContent(rw, r, "", time.Time{}, bytes.NewReader(make([]byte, 4096)))
	}))
	w.roots.AddCert(w.files.Certificate())
	w.other = httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { w.foreign.Add(1) }))
	w.other.Config.ErrorLog = log.New(io.Discard, "", 0)
	w.other.StartTLS()
	t.Cleanup(w.files.Close)
	t.Cleanup(w.other.Close)
	return w
}

// soakBMC is one BMC and the driver that drives it.
type soakBMC struct {
	w        *soakWorld
	rig      *bmctest.Redfish
	machine  *bmctest.Fake
	pool     *pool
	driver   *driver.Definition
	password string
	stop     context.CancelFunc
	clean    bool // nothing was ever wrong with it
}

const soakUser = "admin"

func (w *soakWorld) newBMC(r *rand.Rand) *soakBMC {
	ctx, stop := context.WithCancel(context.Background())
	b := &soakBMC{w: w, machine: bmctest.NewFake(), password: "first-passphrase", stop: stop, clean: true}
	if r.IntN(2) == 0 {
		_ = b.machine.PowerOn(ctx, bmctest.BootDevice{Device: "none"})
	}
	var err error
	b.rig, err = bmctest.StartRedfish(ctx, "127.0.0.1:0", soakUser, b.password, b.machine,
		bmctest.OffInterval(time.Millisecond), bmctest.LateBy(50*time.Millisecond), bmctest.MediaRoots(w.roots), bmctest.Foreign(w.other.URL))
	if err != nil {
		panic(err)
	}
	b.pool = newPool(Options{Roots: w.roots, Log: slog.New(slog.DiscardHandler)})
	b.pool.timing = quick
	if b.driver, err = define(b.pool); err != nil {
		panic(err)
	}
	return b
}

func (b *soakBMC) close() {
	b.rig.SetFaults()
	b.pool.close(context.Background())
	_ = b.rig.Close()
	b.stop()
}

// truth is what the rig really is.
type truth struct {
	on       bool
	media    string
	password string
	boot     device
	enabled  string // BootSourceOverrideEnabled, as it is
}

// soakStep is one operation, and all that is known of it.
type soakStep struct {
	operation string // kind.operation
	args      []any
	fresh     string // a rotation's new password
	mark      string // what is this step's alone in the rig's log: a URL, a name, a version
	faults    []bmctest.Fault
	clean     bool // nothing was ever wrong with the BMC
	before    truth
	after     truth
	effects   []string // lines that the rig's log has more
	whole     []string // all of the rig's log
	result    json.RawMessage
	err       error
	told      []string // progress
}

func (s soakStep) String() string {
	args, _ := json.Marshal(s.args)
	return fmt.Sprintf("  %s %s with %v\n  before %+v\n  after  %+v\n  log    %q\n  result %.300s, error %v\n  told   %q", s.operation, args, s.faults, s.before, s.after, s.effects, s.result, s.err, s.told)
}

func (s soakStep) has(faults ...bmctest.Fault) bool {
	return slices.ContainsFunc(s.faults, func(f bmctest.Fault) bool {
		name, _, _ := strings.Cut(string(f), "*")
		return slices.Contains(faults, bmctest.Fault(name))
	})
}

// someFaults are none to four, some of them for a while only.
func someFaults(r *rand.Rand) []bmctest.Fault {
	all := bmctest.Faults()
	var out []bmctest.Fault
	for range r.IntN(5) {
		f := all[r.IntN(len(all))]
		if f == bmctest.ManagerAsSystem && slices.Contains(out, bmctest.SeveralSystems) || f == bmctest.SeveralSystems && slices.Contains(out, bmctest.ManagerAsSystem) {
			continue // together they show the second system alone: nobody could tell
		}
		if r.IntN(3) == 0 && f != bmctest.ManagerAsSystem && f != bmctest.SeveralSystems {
			f = f.Times(1 + r.IntN(3))
		}
		out = append(out, f)
	}
	return out
}

// ask picks an operation.
func (b *soakBMC) ask(r *rand.Rand) (s soakStep) {
	pick := func(list ...string) string { return list[r.IntN(len(list))] }
	n := b.w.serial.Add(1)
	switch r.IntN(22) {
	case 0, 1, 2:
		s.operation = "power.getPower"
	case 3, 4, 5, 6:
		s.operation, s.args = "power.setPower", []any{pick("on", "off", "soft", "cycle", "reset", "nmi")}
	case 7, 8:
		s.operation, s.args = "management.setBootDevice", []any{device{pick("none", "pxe", "disk", "cdrom", "bios"), r.IntN(2) == 0, r.IntN(2) == 0}}
	case 9:
		s.operation = "management.getBootDevice"
	case 10, 11:
		s.mark = fmt.Sprintf("%s/disc-%d.iso", b.w.files.URL, n)
		s.operation, s.args = "virtual-media.insert", []any{s.mark}
	case 12:
		s.operation = pick("virtual-media.eject", "virtual-media.status")
	case 13:
		s.operation = "inspect.inspect"
	case 14:
		s.mark = fmt.Sprint("+", n)
		s.operation, s.args = "bios.applySettings", []any{map[string]any{"AdminPhone": s.mark}}
	case 15:
		s.operation = pick("bios.getSettings", "bios.resetSettings")
	case 16:
		s.mark = fmt.Sprint("vol", n)
		s.operation, s.args = "raid.applyLayout", []any{map[string]any{"volumes": []any{map[string]any{"name": s.mark, "level": "1", "drives": []string{"RIG-DISK-0001", "RIG-DISK-0002"}}}}}
	case 17:
		s.operation = pick("raid.getLayout", "firmware.list")
	case 18:
		s.mark = fmt.Sprint("2.", n)
		sum := sha256.Sum256(bmctest.FirmwareImage("BIOS", s.mark))
		s.operation, s.args = "firmware.update", []any{map[string]any{"component": "BIOS", "url": b.w.files.URL + "/firmware/BIOS/" + s.mark, "sha256": hex.EncodeToString(sum[:]), "version": s.mark}}
	case 19:
		s.fresh = fmt.Sprint("fresh-", n, strings.Repeat("x", r.IntN(14)))
		s.operation, s.args = "credentials.rotate", []any{map[string]any{}}
	case 20:
		s.operation = pick("management.getEventLog", "management.getSecureBoot", "management.resetBmc")
	default:
		s.operation, s.args = "management.setSecureBoot", []any{map[string]any{"enabled": r.IntN(2) == 0}}
	}
	return s
}

// step does one operation under some faults.
func (b *soakBMC) step(r *rand.Rand) soakStep {
	s := b.ask(r)
	s.faults, s.clean = someFaults(r), b.clean
	b.clean = b.clean && len(s.faults) == 0
	s.before = b.truth()
	began := len(b.rig.Log())
	b.rig.SetFaults(s.faults...)
	config, _ := json.Marshal(map[string]any{"address": b.rig.Addr(), "tlsSpkiSha256": b.rig.SPKI()})
	if s.args == nil {
		s.args = []any{}
	}
	args, _ := json.Marshal(s.args)
	ctx, cancel := context.WithTimeout(context.Background(), soakPatience)
	defer cancel()
	c, recorder := drivertest.Context(nil, ctx, map[string]string{"username": soakUser, "password": b.password, "newPassword": s.fresh})
	kind, operation, _ := strings.Cut(s.operation, ".")
	s.result, s.err = b.driver.Invoke(c, kind, operation, config, args)
	for _, p := range recorder.Progress() {
		s.told = append(s.told, p.Message)
	}
	b.rig.SetFaults()
	s.after = b.truth()
	s.whole = b.rig.Log()
	s.effects = s.whole[began:]
	b.password = s.after.password
	return s
}

// truth asks the rig itself, while nothing is wrong with it.
func (b *soakBMC) truth() truth {
	out := truth{on: b.machine.Running(), media: b.rig.Media(), password: b.rig.Password()}
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}}
	last := ""
	for range 20 { // a BMC that restarts refuses the first connections
		out.password = b.rig.Password() // a change that nobody waits for can still come
		req, err := http.NewRequest(http.MethodGet, "https://"+b.rig.Addr()+"/redfish/v1/Systems/1", nil)
		if err != nil {
			panic(err)
		}
		req.SetBasicAuth(soakUser, out.password)
		resp, err := client.Do(req)
		if err != nil {
			continue
		}
		var system struct {
			Boot struct {
				Enabled string `json:"BootSourceOverrideEnabled"`
				Target  string `json:"BootSourceOverrideTarget"`
				Mode    string `json:"BootSourceOverrideMode"`
			}
		}
		err = json.NewDecoder(resp.Body).Decode(&system)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusOK {
			last = fmt.Sprintf("%s, %v", resp.Status, err)
			continue
		}
		out.enabled = system.Boot.Enabled
		out.boot = device{Persistent: out.enabled == "Continuous", EFI: system.Boot.Mode == "UEFI"}
		for name, word := range map[string]string{"none": "None", "pxe": "Pxe", "disk": "Hdd", "cdrom": "Cd", "bios": "BiosSetup"} {
			if word == system.Boot.Target {
				out.boot.Device = name
			}
		}
		return out
	}
	panic(fmt.Sprintf("the rig does not answer its owner: %s; it did %q", last, b.rig.Log()))
}
