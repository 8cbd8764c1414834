package e2e

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/scripts/lab"
)

// forms are the ways in which a secret may stand in bytes: as it is, in hex, in
// base64 wherever it begins, and as URLs and JSON write it.
func forms(secret string) map[string][]byte {
	out := map[string][]byte{
		"as it is": []byte(secret), "in hex": []byte(hex.EncodeToString([]byte(secret))), "in HEX": []byte(strings.ToUpper(hex.EncodeToString([]byte(secret)))),
		"in a URL": []byte(url.QueryEscape(secret)), "in JSON": []byte(strings.Trim(strconv.QuoteToASCII(secret), `"`)),
	}
	for before := range 3 {
		text := append(make([]byte, before), secret...)
		for name, encoding := range map[string]*base64.Encoding{"base64": base64.RawStdEncoding, "base64url": base64.RawURLEncoding} {
			// What its neighbours decide of the first and last characters is left out.
			encoded := encoding.EncodeToString(text)
			from, to := (before*8+5)/6, len(text)*8/6
			out[fmt.Sprintf("in %s after %d", name, before)] = []byte(encoded[from:to])
		}
	}
	return out
}

// find says in which forms which secret stands in data.
func find(data []byte, secrets ...string) (found []string) {
	for i, s := range secrets {
		for form, bytesOf := range forms(s) {
			if bytes.Contains(data, bytesOf) {
				found = append(found, fmt.Sprintf("secret %d %s", i+1, form))
			}
		}
	}
	return found
}

func TestFind(t *testing.T) {
	const secret = "p/ss w+rd~16byte"
	for _, data := range []string{
		"x" + secret + "y", hex.EncodeToString([]byte("ab" + secret)), base64.StdEncoding.EncodeToString([]byte("ADMIN:" + secret)),
		base64.StdEncoding.EncodeToString([]byte("ADMI:" + secret + "tail")), base64.URLEncoding.EncodeToString([]byte("ADM:" + secret + "t")),
		"https://x/?p=" + url.QueryEscape(secret),
	} {
		if len(find([]byte(data), "another", secret)) == 0 {
			t.Errorf("find(%q) found nothing", data)
		}
	}
	for _, data := range []string{"", secret[1:], base64.StdEncoding.EncodeToString([]byte("ADMIN:another"))} {
		if got := find([]byte(data), secret); len(got) > 0 {
			t.Errorf("find(%q) = %q, want nothing", data, got)
		}
	}
}

// watcher keeps what the processes below this one show of themselves to others:
// command lines and environments, of those that live a moment too.
type watcher struct {
	stop chan struct{}
	done sync.WaitGroup
	mu   sync.Mutex
	seen map[string]string // content -> where
}

func watch() *watcher {
	w := &watcher{stop: make(chan struct{}), seen: map[string]string{}}
	w.done.Go(func() {
		for {
			w.look()
			select {
			case <-w.stop:
				return
			case <-time.After(2 * time.Millisecond):
			}
		}
	})
	return w
}

func (w *watcher) end() {
	close(w.stop)
	w.done.Wait()
	w.look()
}

func (w *watcher) look() {
	for _, pid := range below(os.Getpid()) {
		for _, name := range []string{"cmdline", "environ"} {
			path := fmt.Sprintf("/proc/%d/%s", pid, name)
			data, err := os.ReadFile(path)
			if err != nil || len(data) == 0 {
				continue // it ended
			}
			w.mu.Lock()
			w.seen[string(data)] = path
			w.mu.Unlock()
		}
	}
}

// below are a process, and all whose parent is one of them.
func below(root int) []int {
	children := map[int][]int{}
	dirs, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range dirs {
		data, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		// The name stands in parentheses, and may hold anything.
		end := bytes.LastIndexByte(data, ')')
		fields := strings.Fields(string(data[end+1:]))
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if len(fields) > 1 {
			parent, _ := strconv.Atoi(fields[1])
			children[parent] = append(children[parent], pid)
		}
	}
	out := []int{root}
	for i := 0; i < len(out); i++ {
		out = append(out, children[out[i]]...)
	}
	return out
}

// While a console is open, a BMC's password is rotated, refused and lost on the
// way: neither the old one nor a new one stands in any command line, environment,
// log, journal, outbox, address book, printed line, or byte of the gateway's database.
func TestPasswordsAreNowhere(t *testing.T) {
	w := watch()
	stopped := false
	defer func() {
		if !stopped {
			w.end()
		}
	}()
	b := ready(t, lab.SiteOptions{})
	var printed bytes.Buffer
	say := func(args ...string) {
		t.Helper()
		out, err := b.CLI(b.ctx, nil, args...)
		fmt.Fprintln(&printed, out, err)
		if err != nil {
			t.Fatalf("better-compute %s: %v", strings.Join(args, " "), err)
		}
	}

	console, err := b.Spawn("gw", "console", "env", "BETTER_COMPUTE_CLIENT="+filepath.Join(b.GatewayDir(), "client.toml"),
		"sh", "-c", `sleep 120 | exec "$@"`, "sh", filepath.Join(b.Out, "bin", "better-compute"), "metal", "console", lab.MachineName)
	b.must(err)
	b.must(lab.Poll(b.ctx, "wait for the console", func() (bool, error) { return b.IPMI.Console().Opened() > 0, nil }))
	b.IPMI.Console().Say([]byte("rig login: "))
	b.must(console.WaitFor(b.ctx, "rig login: "))

	const machine = "rotating"
	credential := fmt.Sprintf(`{"username":%q,"password":%q}`, lab.BMCUser, lab.BMCPassword)
	_, err = b.CLI(b.ctx, []byte(credential), "secret", "put", machine)
	b.must(err)
	say("metal", "enroll", machine, "--pool", lab.PoolName, "--driver", "redfish", "--address", lab.BMCAddr, "--credentials", machine, "--pin", b.Redfish.SPKI())
	say("metal", "power", machine)
	secrets := []string{lab.BMCPassword}
	for range 2 {
		before := b.Redfish.Password()
		say("metal", "rotate", machine)
		fresh := b.Redfish.Password()
		if fresh == before || len(fresh) < 12 {
			t.Fatal("the rotation changed nothing")
		}
		secrets = append(secrets, fresh)
		say("metal", "power", machine)
	}
	say("metal", "show", machine)
	say("events", "--limit", "1000")
	b.IPMI.Console().Say([]byte("still here "))
	b.must(console.WaitFor(b.ctx, "still here "))

	// What is looked for can be found: the same in a place where it may be seen.
	const planted = "planted-passphrase"
	control := exec.Command("sleep", "5")
	control.Env = []string{"CONTROL=" + planted}
	b.must(control.Start())
	b.must(lab.Poll(b.ctx, "find what was planted", func() (bool, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		for data := range w.seen {
			if len(find([]byte(data), planted)) > 0 {
				return true, nil
			}
		}
		return false, nil
	}))
	b.must(control.Process.Kill())
	_ = control.Wait()

	// Once while the database is open, with what its log holds, and once after.
	scan := func(when string) {
		files := map[string]bool{}
		b.must(filepath.WalkDir(b.Dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return nil // it went away, or holds nothing
			}
			data, err := os.ReadFile(path)
			if err != nil {
				return nil
			}
			files[filepath.Base(path)] = true
			for _, f := range find(data, secrets...) {
				t.Errorf("%s: %s holds %s", when, path, f)
			}
			return nil
		}))
		for _, name := range []string{"gateway.db", "addressbook.json", "site-1.log", "gateway-1.log", "console-1.log"} {
			if !files[name] {
				t.Errorf("%s: %s was not looked at: %d files were", when, name, len(files))
			}
		}
		if when == "running" && !files["gateway.db-wal"] {
			t.Error("the database's log was not looked at")
		}
	}
	scan("running")
	console.Stop()
	b.Site.Stop()
	b.Gateway.Stop()
	scan("stopped")
	stopped = true
	w.end()
	for data, where := range w.seen {
		for _, f := range find([]byte(data), secrets...) {
			t.Errorf("%s of a process of the test holds %s", filepath.Base(where), f)
		}
	}
	if len(w.seen) < 20 {
		t.Errorf("only %d command lines and environments were seen", len(w.seen))
	}
	for _, f := range find(printed.Bytes(), secrets...) {
		t.Errorf("better-compute printed %s", f)
	}
}
