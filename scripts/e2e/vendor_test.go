package e2e

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/better-compute/site-appliance/scripts/lab"
)

// asrock is the interface of an ASRockRack board, as far as power goes.
type asrock struct {
	mu  sync.Mutex
	on  int
	log []int
}

func (a *asrock) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	path := strings.TrimLeft(r.URL.Path, "/")
	if r.Method == http.MethodPost && path == "api/session" {
		_ = r.ParseForm()
		if r.PostForm.Get("username") != lab.BMCUser || r.PostForm.Get("password") != lab.BMCPassword {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		http.SetCookie(w, &http.Cookie{Name: "QSESSIONID", Value: "session", Path: "/"})
		fmt.Fprint(w, `{"ok":0,"CSRFToken":"csrf"}`)
		return
	}
	if c, err := r.Cookie("QSESSIONID"); err != nil || c.Value != "session" || r.Header.Get("X-Csrftoken") != "csrf" {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	switch r.Method + " " + path {
	case "GET api/fru":
		fmt.Fprint(w, `[{"board":{"manufacturer":"ASRockRack","product_name":"E3C246D4I-NL","serial_number":"1"}}]`)
	case "GET api/chassis-status":
		fmt.Fprintf(w, `{"power_status":%d}`, a.on)
	case "POST api/actions/power":
		var in struct {
			Command int `json:"power_command"`
		}
		body, _ := io.ReadAll(r.Body)
		_ = json.Unmarshal(body, &in)
		a.log = append(a.log, in.Command)
		if in.Command < 2 {
			a.on = in.Command
		}
	}
}

// TestVendorDriverThroughTheBox: a machine of a vendor's own interface, enrolled
// with its key, is switched by the sandboxed bcx-bmclib of a real bcd site.
func TestVendorDriverThroughTheBox(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "plugins")
	b := begin(t)
	b.must(b.WritePlugins(dir))
	plugin, err := os.ReadFile(filepath.Join(out, "bin", "bcx-bmclib"))
	b.must(err)
	b.must(os.WriteFile(filepath.Join(dir, "bcx-bmclib"), plugin, 0o755))
	pins, err := os.ReadFile(filepath.Join(dir, "pins"))
	b.must(err)
	digest := sha256.Sum256(plugin)
	b.must(os.WriteFile(filepath.Join(dir, "pins"), append(pins, hex.EncodeToString(digest[:])+"  bcx-bmclib\n"...), 0o644))

	board := &asrock{}
	server := httptest.NewUnstartedServer(board)
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.Listener.Close()
	b.must(b.InNetns("bmc", func() (err error) {
		server.Listener, err = net.Listen("tcp", lab.BMCAddr+":8443")
		return err
	}))
	server.StartTLS()
	t.Cleanup(server.Close)
	spki := sha256.Sum256(server.Certificate().RawSubjectPublicKeyInfo)

	b.must(b.StartSite(b.ctx, b.join, lab.SiteOptions{Plugins: dir}))
	b.must(b.WaitSiteOnline(b.ctx))
	b.must(b.EnrollMachine(b.ctx))
	enroll := func(name, address, pin string) {
		b.cli("metal", "enroll", name, "--pool", lab.PoolName, "--driver", "asrockrack", "--address", address, "--credentials", "rig-bmc", "--pin", pin)
	}
	enroll("board", lab.BMCAddr+":8443", hex.EncodeToString(spki[:]))
	if got := b.cli("metal", "power", "board"); got != "off" {
		t.Errorf("power = %q, want off", got)
	}
	for _, action := range []string{"on", "reset", "cycle", "off"} {
		b.cli("metal", "power", "board", action)
	}
	if want := []int{1, 3, 2, 0}; !slices.Equal(board.log, want) {
		t.Errorf("the board was told %v, want %v", board.log, want)
	}
	b.noSecrets()
	b.refused([]string{"bmc-driver-unsupported"}, "metal", "boot", "board", "pxe")
	b.refused([]string{"unsupported-operation"}, "metal", "power", "board", "nmi")

	// Another key is another BMC.
	other := httptest.NewUnstartedServer(board)
	other.Config.ErrorLog = log.New(io.Discard, "", 0)
	other.Listener.Close()
	b.must(b.InNetns("bmc", func() (err error) {
		other.Listener, err = net.Listen("tcp", lab.BMCAddr+":8444")
		return err
	}))
	other.StartTLS()
	t.Cleanup(other.Close)
	enroll("impostor", lab.BMCAddr+":8444", strings.Repeat("ab", 32))
	b.refused([]string{"pin-mismatch"}, "metal", "power", "impostor", "on")
	if len(board.log) != 4 {
		t.Errorf("the board was told %v behind another key", board.log)
	}
}
