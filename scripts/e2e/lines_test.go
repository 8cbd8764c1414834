package e2e

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/scripts/lab"
)

// console is a person's console, typed into by the test.
type console struct {
	*lab.Process
	b    *bench
	keys *os.File
}

// console opens one as a program of its own, whose input is a pipe.
func (b *bench) console(name string, args ...string) *console {
	b.t.Helper()
	return b.consoleOf(lab.MachineName, name, args...)
}

func (b *bench) consoleOf(machine, name string, args ...string) *console {
	b.t.Helper()
	fifo := filepath.Join(b.Dir, name+".keys")
	b.must(unix.Mkfifo(fifo, 0o600))
	keys, err := os.OpenFile(fifo, os.O_RDWR, 0)
	b.must(err)
	b.t.Cleanup(func() { keys.Close() })
	argv := append([]string{"env", "BETTER_COMPUTE_CLIENT=" + filepath.Join(b.GatewayDir(), "client.toml"),
		"sh", "-c", `exec "$@" <"$0"`, fifo, filepath.Join(b.Out, "bin", "better-compute"), "metal", "console", machine}, args...)
	p, err := b.Spawn("gw", name, argv...)
	b.must(err)
	return &console{p, b, keys}
}

func (c *console) see(what string) {
	c.b.t.Helper()
	if err := c.WaitFor(c.b.ctx, what); err != nil {
		c.b.t.Fatalf("console %s: %v; it printed:\n%q", c.Name, err, c.Output())
	}
}

func (c *console) press(keys string) {
	c.b.t.Helper()
	_, err := c.keys.WriteString(keys)
	c.b.must(err)
}

// gone waits for its end.
func (c *console) gone() {
	c.b.t.Helper()
	select {
	case <-c.Exited():
	case <-c.b.ctx.Done():
		c.b.t.Fatalf("console %s goes on; it printed:\n%q", c.Name, c.Output())
	}
}

// heard waits until the machine was told text.
func (b *bench) heard(text string) {
	b.t.Helper()
	b.must(lab.Poll(b.ctx, "wait for what is typed", func() (bool, error) {
		return strings.Contains(string(b.IPMI.Console().Heard()), text), nil
	}))
}

// TestConsole: bytes go both ways, a console that is held is refused and taken over
// on request, a lost one comes back, by the program that a person uses, with the
// real ipmitool in its sandbox.
func TestConsole(t *testing.T) {
	b := ready(t, lab.SiteOptions{})
	serial := b.IPMI.Console()
	first := b.console("first")
	first.see("console of " + lab.MachineName + " is open")
	serial.Say([]byte("rig login: \x01\xfe"))
	first.see("rig login: \x01\xfe")
	first.press("root\r~x~~\x1f.\r\x1f\x1f?")
	b.heard("root\r~x~~\x1f.\r\x1f\x1f?")
	first.press("\r~?")
	first.see("ends the console")

	// Power goes on meanwhile: the console holds up nobody.
	b.cli("metal", "power", lab.MachineName, "on")

	// Another is refused, and says who has it.
	second := b.console("second")
	second.gone()
	if got := second.Output(); !strings.Contains(got, "operation-not-allowed") && !strings.Contains(got, "which only a takeover ends") {
		t.Errorf("a second console printed %q, want a refusal", got)
	}
	// Unless it takes over, and then the first ends and does not come back.
	third := b.console("third", "--takeover", "--history", "1000")
	third.see("console of " + lab.MachineName + " is open")
	third.see("rig login: ") // what was said before
	first.gone()
	if !strings.Contains(first.Output(), "taken over") {
		t.Errorf("the first console printed %q, want that it was taken over", first.Output())
	}
	if events := b.cli("events", "--limit", "1000"); !strings.Contains(events, "console.taken") || !strings.Contains(events, "console.opened") || !strings.Contains(events, "console.requested") {
		t.Errorf("events:\n%s", events)
	}

	// The session with the BMC is lost: the box opens it again, once the BMC lets it.
	tools := ipmitools(b.Site.PID())
	if len(tools) != 1 {
		t.Fatalf("%d ipmitools run, want the console's alone", len(tools))
	}
	b.must(unix.Kill(tools[0], unix.SIGKILL))
	third.see("the console was lost")
	b.IPMI.DropConsole()
	third.see("open again")
	serial.Say([]byte("back again "))
	third.see("back again ")
	third.press("after the loss ")
	b.heard("after the loss ")

	// The line to the gateway is lost: the person's program opens it again.
	b.Gateway.Kill()
	third.see("the line was lost")
	b.must(b.Serve(b.ctx))
	b.must(lab.Poll(b.ctx, "wait for the console", func() (bool, error) {
		return strings.Count(third.Output(), "console of "+lab.MachineName+" is open") == 2, nil
	}))
	serial.Say([]byte("third time "))
	third.see("third time ")
	third.press("\r~.")
	third.gone()
	if !strings.Contains(third.Output(), "console left") {
		t.Errorf("the third console printed %q", third.Output())
	}
	// The port is free for whoever comes next.
	fourth := b.console("fourth")
	fourth.see("console of " + lab.MachineName + " is open")
	fourth.press("\r~.")
	fourth.gone()
}

// TestConsoleOverRedfish: a person reaches an OpenBMC's console by nothing but the
// machine's name; one that the BMC dropped comes back.
func TestConsoleOverRedfish(t *testing.T) {
	b := overRedfish(t, bmctest.WithWebConsole(bmctest.WebConsole{Path: "/console0", OpenBMC: true}))
	serial := b.Redfish.Console()
	c := b.consoleOf(redfishMachine, "web")
	c.see("console of " + redfishMachine + " is open")
	serial.Say([]byte("obmc login: "))
	c.see("obmc login: ")
	c.press("root\r")
	b.must(lab.Poll(b.ctx, "wait for what is typed", func() (bool, error) { return strings.Contains(string(serial.Heard()), "root\r"), nil }))
	b.Redfish.DropWebConsoles()
	c.see("open again")
	serial.Say([]byte("and again "))
	c.see("and again ")
	c.press("\r~.")
	c.gone()
	if !strings.Contains(c.Output(), "console left") {
		t.Errorf("the console printed %q", c.Output())
	}
}

// ipmitools are the processes below root that carry a console.
func ipmitools(root int) (out []int) {
	for _, pid := range below(root) {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err == nil && strings.HasPrefix(string(data), "/usr/bin/ipmitool\x00") && strings.Contains(string(data), "sol\x00activate") {
			out = append(out, pid)
		}
	}
	return out
}

// TestSiteHTTP: a host of the LAN answers through the box; BMCs, the box, and what
// lies beyond the LAN do not, by any way that leads there.
func TestSiteHTTP(t *testing.T) {
	b := ready(t, lab.SiteOptions{})
	const web = "10.77.0.60"
	_, err := b.Exec(b.ctx, "bmc", "ip", "addr", "add", web+"/24", "dev", "eth0")
	b.must(err)
	body := strings.Repeat("0123456789abcdef", 1<<16) // 1 MiB
	var mu sync.Mutex
	var seen []string
	b.must(b.InNetns("bmc", func() error {
		l, err := net.Listen("tcp", web+":8080")
		if err != nil {
			return err
		}
		s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			mu.Lock()
			seen = append(seen, r.Method+" "+r.URL.Path+" "+r.Header.Get("Authorization"))
			mu.Unlock()
			if to := r.URL.Query().Get("to"); to != "" {
				http.Redirect(w, r, to, http.StatusFound)
				return
			}
			if r.Method == http.MethodPost {
				_, _ = io.Copy(w, r.Body)
				return
			}
			_, _ = io.WriteString(w, body)
		})}
		t.Cleanup(func() { s.Close() })
		go s.Serve(l)
		return nil
	}))
	// The box knows the BMC from now on.
	b.cli("metal", "power", lab.MachineName)

	got := b.cli("site", "http", lab.SiteName, "http://"+web+":8080/big")
	if sum, want := sha256.Sum256([]byte(got)), sha256.Sum256([]byte(body)); sum != want {
		t.Errorf("the body of %d bytes has digest %s, want %d bytes of %s", len(got), hex.EncodeToString(sum[:]), len(body), hex.EncodeToString(want[:]))
	}
	if _, err := b.CLI(b.ctx, []byte("Bearer s3cret"), "secret", "put", "web"); err != nil {
		t.Fatal(err)
	}
	echo, err := b.CLI(b.ctx, []byte("payload"), "site", "http", lab.SiteName, "http://"+web+":8080/echo", "--body", "-", "--header", "Authorization: secret://default/web", "--include")
	if err != nil || !strings.HasPrefix(echo, "HTTP 200\n") || !strings.HasSuffix(echo, "\npayload") {
		t.Errorf("POST = %q, %v", echo, err)
	}
	mu.Lock()
	if !slices.Contains(seen, "POST /echo Bearer s3cret") {
		t.Errorf("the server saw %q, want the secret", seen)
	}
	mu.Unlock()
	for _, url := range []string{
		"https://" + lab.BMCAddr + "/redfish/v1", "http://" + lab.BMCAddr + ":8080/", "http://[::ffff:" + lab.BMCAddr + "]/", "http://" + lab.SiteLAN + "/", "http://127.0.0.1/", "http://169.254.169.254/",
		"https://" + lab.GatewayAddr + ":7443/", "http://" + lab.SiteUplink + "/",
		"http://" + web + ":8080/?to=https://" + lab.BMCAddr + "/redfish/v1", "http://" + web + ":8080/?to=http://127.0.0.1:7443/",
	} {
		b.refused([]string{"operation-not-allowed"}, "site", "http", lab.SiteName, url, "--redirects", "5")
	}
	b.refused([]string{"invalid-args"}, "site", "http", lab.SiteName, "ftp://"+web+"/")
	b.refused([]string{"want a reference"}, "site", "http", lab.SiteName, "http://"+web+":8080/", "--header", "Authorization: Bearer abc")
	if requests := b.Redfish.Requests(); slices.ContainsFunc(requests, func(r string) bool { return strings.Contains(r, "GET /redfish/v1") }) {
		t.Errorf("the BMC was asked: %q", requests)
	}
	b.noSecrets()
}
