package redfish

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
)

// quick is a timing for BMCs that answer at once.
var quick = timing{
	idle: time.Minute, most: 8, tick: 5 * time.Millisecond, settle: 15 * time.Second, media: 15 * time.Second, power: 15 * time.Second,
	retry: 5 * time.Millisecond, logout: 5 * time.Second,
}

// bench is the driver with one BMC to drive.
type bench struct {
	t        *testing.T
	pool     *pool
	driver   *driver.Definition
	config   map[string]any
	secrets  map[string]string
	progress []driver.Progress
}

func newBench(t *testing.T, address, pin, username, password string) *bench {
	t.Helper()
	p := newPool(Options{})
	p.timing = quick
	d, err := define(p)
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t, pool: p, driver: d, config: map[string]any{"address": address}, secrets: map[string]string{"username": username, "password": password}}
	if pin != "" {
		b.config["tlsSpkiSha256"] = pin
	}
	t.Cleanup(func() { p.close(context.Background()) })
	return b
}

// rig is a bench with a BMC of the rig.
func rig(t *testing.T, faults ...bmctest.Fault) (*bmctest.Redfish, *bench) {
	t.Helper()
	return rigWith(t, bmctest.WithFaults(slices.DeleteFunc(faults, func(f bmctest.Fault) bool { return f == "" })...))
}

func rigWith(t *testing.T, opts ...bmctest.Option) (*bmctest.Redfish, *bench) {
	t.Helper()
	r, err := bmctest.StartRedfish(t.Context(), "127.0.0.1:0", "admin", "pass word", bmctest.NewFake(), append(opts, bmctest.OffInterval(time.Millisecond))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return r, newBench(t, r.Addr(), r.SPKI(), "admin", "pass word")
}

// hurry is for calls that are to wait in vain.
func (b *bench) hurry() {
	for c := range b.pool.idleConns() {
		c.since = time.Time{}
		b.pool.expire(c)
	}
	b.pool.ending.Wait()
	b.pool.timing.settle, b.pool.timing.media, b.pool.timing.power = 300*time.Millisecond, 300*time.Millisecond, 300*time.Millisecond
}

// do calls an operation with at most one argument.
func (b *bench) do(kind, operation string, args ...any) (json.RawMessage, error) {
	b.t.Helper()
	return b.in(b.t.Context(), kind, operation, args...)
}

func (b *bench) in(ctx context.Context, kind, operation string, args ...any) (json.RawMessage, error) {
	b.t.Helper()
	config, err := json.Marshal(b.config)
	if err != nil {
		b.t.Fatal(err)
	}
	if args == nil {
		args = []any{}
	}
	raw, err := json.Marshal(args)
	if err != nil {
		b.t.Fatal(err)
	}
	c, recorder := drivertest.Context(b.t, ctx, b.secrets)
	result, err := b.driver.Invoke(c, kind, operation, config, raw)
	b.progress = recorder.Progress()
	return result, err
}

// within gives the call so long.
func (b *bench) within(d time.Duration, kind, operation string, args ...any) (json.RawMessage, error) {
	ctx, cancel := context.WithTimeout(b.t.Context(), d)
	defer cancel()
	return b.in(ctx, kind, operation, args...)
}

// power is getPower's answer.
func (b *bench) power() (string, error) {
	b.t.Helper()
	return text(b.do("power", "getPower"))
}

func text(raw json.RawMessage, err error) (string, error) {
	var s string
	_ = json.Unmarshal(raw, &s)
	return s, err
}

// device is a boot device as an argument or a result.
type device struct {
	Device     string `json:"device"`
	Persistent bool   `json:"persistent"`
	EFI        bool   `json:"efi"`
}

func (b *bench) bootDevice() (device, error) {
	b.t.Helper()
	raw, err := b.do("management", "getBootDevice")
	var d device
	_ = json.Unmarshal(raw, &d)
	return d, err
}

// fake is a small BMC whose answers a test replaces, by "METHOD path".
type fake struct {
	t      *testing.T
	mu     sync.Mutex
	change map[string]http.HandlerFunc
	seen   []string
	tokens int
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	key := r.Method + " " + r.URL.Path
	f.mu.Lock()
	f.seen = append(f.seen, key)
	h := f.change[key]
	f.mu.Unlock()
	if h != nil {
		h(w, r)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	switch key {
	case "GET /redfish/v1/":
		fmt.Fprint(w, `{"Systems":{"@odata.id":"/redfish/v1/Systems"}}`)
	case "POST /redfish/v1/SessionService/Sessions":
		f.mu.Lock()
		f.tokens++
		n := f.tokens
		f.mu.Unlock()
		w.Header().Set("X-Auth-Token", fmt.Sprintf("token-%d-of-this-bmc", n))
		w.Header().Set("Location", fmt.Sprintf("/redfish/v1/SessionService/Sessions/%d", n))
		w.WriteHeader(http.StatusCreated)
	case "GET /redfish/v1/Systems":
		fmt.Fprint(w, `{"Members":[{"@odata.id":"/redfish/v1/Systems/1"}]}`)
	case "GET /redfish/v1/Systems/1":
		fmt.Fprint(w, `{"PowerState":"On","Actions":{"#ComputerSystem.Reset":{"target":"/redfish/v1/Systems/1/Actions/ComputerSystem.Reset"}}}`)
	case "POST /redfish/v1/Systems/1/Actions/ComputerSystem.Reset":
		w.WriteHeader(http.StatusAccepted)
	default:
		if r.Method == http.MethodDelete {
			w.WriteHeader(http.StatusNoContent)
			return
		}
		w.WriteHeader(http.StatusNotFound)
	}
}

// count is how many requests began so.
func (f *fake) count(key string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, s := range f.seen {
		if s == key {
			n++
		}
	}
	return n
}

// serve starts a fake BMC.
func serve(t *testing.T, change map[string]http.HandlerFunc) (*fake, *bench) {
	t.Helper()
	f := &fake{t: t, change: change}
	s := httptest.NewTLSServer(f)
	t.Cleanup(s.Close)
	return f, newBench(t, s.Listener.Addr().String(), pinOf(s), "u", "p")
}

func pinOf(s *httptest.Server) string { return pinOfCertificate(s.Certificate()) }

func pinOfCertificate(c *x509.Certificate) string {
	sum := sha256.Sum256(c.RawSubjectPublicKeyInfo)
	return hex.EncodeToString(sum[:])
}

func say(body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, body) }
}

const (
	sessionsPost = "POST /redfish/v1/SessionService/Sessions"
	systemGet    = "GET /redfish/v1/Systems/1"
	systemsGet   = "GET /redfish/v1/Systems"
	systemPatch  = "PATCH /redfish/v1/Systems/1"
	resetPost    = "POST /redfish/v1/Systems/1/Actions/ComputerSystem.Reset"
)

// hang answers nothing for as long as the client waits.
func hang(_ http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body) // a server notices that the client is gone only then
	<-r.Context().Done()
}

func secretOf(s string) secret.Value { return secret.New([]byte(s)) }

// told are the messages of the last call's progress.
func (b *bench) told() []string {
	var all []string
	for _, p := range b.progress {
		all = append(all, p.Message)
	}
	return all
}

// idleConns are the connections that no call uses.
func (l *pool) idleConns() map[*conn]bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := map[*conn]bool{}
	for _, c := range l.conns {
		if c.users == 0 {
			out[c] = true
		}
	}
	return out
}

// raw is the configuration.
func (b *bench) raw() json.RawMessage {
	b.t.Helper()
	config, err := json.Marshal(b.config)
	if err != nil {
		b.t.Fatal(err)
	}
	return config
}

func decodeBody(r *http.Request, into any) {
	body, _ := io.ReadAll(r.Body)
	_ = json.Unmarshal(body, into)
}
