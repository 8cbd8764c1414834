package e2e

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/scripts/lab"
)

// TestStopsPromptly ends bcd site while its session is up, a plugin has run, and
// a machine holds connections through it: a box goes down within seconds.
func TestStopsPromptly(t *testing.T) {
	b := ready(t, lab.SiteOptions{})
	b.cli("metal", "power", lab.MachineName)
	b.boots()
	for _, port := range []string{"80", "7443", "7444"} {
		b.must(b.InNetns("bmc", func() error {
			c, err := net.DialTimeout("tcp", lab.SiteLAN+":"+port, 5*time.Second)
			if err == nil {
				t.Cleanup(func() { c.Close() })
			}
			return err
		}))
	}
	began := time.Now()
	b.Site.Stop()
	// Stop kills what does not end within 10 s.
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("bcd site took %s to end, want 5 s at the most", took.Round(100*time.Millisecond))
	}
}

// TestStopsPromptlyWhenTheLineIsDead is the same with an uplink that swallows
// everything: nobody is left to answer a good-bye.
func TestStopsPromptlyWhenTheLineIsDead(t *testing.T) {
	b := ready(t, lab.SiteOptions{})
	_, err := b.Exec(b.ctx, "site", "ip", "link", "set", "up0", "down")
	b.must(err)
	began := time.Now()
	b.Site.Stop()
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("bcd site took %s to end, want 5 s at the most", took.Round(100*time.Millisecond))
	}
}

// TestPortComesAndGoes names a port that is missing, serves everything else, and
// serves that port when it is there, also the second time.
func TestPortComesAndGoes(t *testing.T) {
	const missing = `lan 2: no interface is named \"usb0\"`
	b := ready(t, lab.SiteOptions{Extra: "[[lan]]\ninterface = \"usb0\"\naddress = \"10.78.0.1/24\"\n"})
	b.must(b.Site.WaitFor(b.ctx, missing))
	if err := b.Dial("bmc", lab.SiteLAN+":7443"); err != nil {
		t.Errorf("the LAN that is there: %v", err)
	}
	far := fmt.Sprint(b.Gateway.PID()) // its namespace gets the cable's other end
	for round := range 2 {
		for _, step := range []struct{ netns, args string }{
			{"site", "link add usb0 type veth peer name far0 netns " + far},
			{"site", "link set usb0 up"},
			{"gw", "addr add 10.78.0.2/24 dev far0"},
			{"gw", "link set far0 up"},
		} {
			_, err := b.Exec(b.ctx, step.netns, append([]string{"ip"}, strings.Fields(step.args)...)...)
			b.must(err)
		}
		if err := b.Dial("gw", "10.78.0.1:7443"); err == nil {
			t.Error("a LAN without its address is served")
		}
		_, err := b.Exec(b.ctx, "site", "ip", "addr", "add", "10.78.0.1/24", "dev", "usb0")
		b.must(err)
		b.must(lab.Poll(b.ctx, "reach the LAN that came late", func() (bool, error) {
			return b.Dial("gw", "10.78.0.1:7443") == nil, nil
		}))
		_, err = b.Exec(b.ctx, "site", "ip", "link", "del", "usb0")
		b.must(err)
		b.must(lab.Poll(b.ctx, "have bcd see it gone", func() (bool, error) {
			return strings.Count(b.Site.Output(), "a LAN went away") > round, nil
		}))
	}
	if got := strings.Count(b.Site.Output(), missing); got != 3 {
		t.Errorf("the missing port was named %d times, want 3: once at each time it was missing", got)
	}
	b.cli("metal", "power", lab.MachineName)
}

// TestNothingButABox starts a box that nobody has configured: it says what to do.
func TestNothingButABox(t *testing.T) {
	b := begin(t)
	b.must(b.StartSite(b.ctx, "", lab.SiteOptions{}))
	b.must(b.Site.WaitFor(b.ctx, "better-compute site add"))
	if err := b.Dial("bmc", lab.SiteLAN+":7443"); err != nil {
		t.Errorf("its LAN is not served: %v", err)
	}
	b.Site.Stop()
	b.must(b.StartSite(b.ctx, b.join, lab.SiteOptions{}))
	b.must(b.WaitSiteOnline(b.ctx))
	// Enrolled, it is not brought down by a join string that somebody spoilt.
	b.Site.Stop()
	b.must(b.StartSite(b.ctx, "bc1.nonsense", lab.SiteOptions{}))
	b.must(b.Site.WaitFor(b.ctx, "session is up"))
}

// TestFullFromTheStart starts an enrolled box on a disk that takes not one byte
// more, and without the journal that it had.
func TestFullFromTheStart(t *testing.T) {
	b := begin(t)
	state := filepath.Join(b.Dir, "site", "state")
	b.must(os.MkdirAll(state, 0o700))
	b.must(unix.Mount("tmpfs", state, "tmpfs", 0, "size=256k"))
	t.Cleanup(func() { _ = unix.Unmount(state, unix.MNT_DETACH) })
	b.must(b.StartSite(b.ctx, b.join, lab.SiteOptions{}))
	b.must(b.WaitSiteOnline(b.ctx))
	b.must(b.EnrollMachine(b.ctx))
	b.cli("metal", "power", lab.MachineName) // the BMC is known from here on
	b.Site.Stop()
	for _, lost := range []string{"agent/journal", "agent/events", "artifacts"} {
		b.must(os.RemoveAll(filepath.Join(state, lost)))
	}
	ballast, err := os.Create(filepath.Join(state, "ballast"))
	b.must(err)
	for err == nil {
		_, err = ballast.Write(make([]byte, 4096))
	}
	b.must(ballast.Close())
	b.must(b.StartSite(b.ctx, "", lab.SiteOptions{}))
	b.must(b.Site.WaitFor(b.ctx, "session is up"))
	if !strings.Contains(b.Site.Output(), "no space left on device") {
		t.Error("the log does not say that the disk is full")
	}
	if got := b.cli("metal", "power", lab.MachineName); got != "off" {
		t.Errorf("power = %q, want off", got)
	}
	b.refused([]string{"operation-not-allowed"}, "metal", "power", lab.MachineName, "cycle")
	if b.machine.Running() {
		t.Error("the machine runs all the same")
	}
}
