// Package e2e proves the product end to end: the main job on virtual machines,
// and around it, in network namespaces with the real programs, everything that
// must fail when a part is missing or a byte is wrong.
package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
	_ "modernc.org/sqlite"

	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/scripts/lab"
)

const out = "../../out"

// bench is a lab whose bare metal is a fake: the rig's BMCs are real.
type bench struct {
	*lab.Lab
	t       *testing.T
	ctx     context.Context
	machine *bmctest.Fake
	join    string
}

// begin makes the wires, the rig and the gateway, and adds a site. Nothing of
// the site runs yet. opts are the Redfish BMC's.
func begin(t *testing.T, opts ...bmctest.Option) *bench {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: network namespaces")
	}
	for _, name := range []string{"bcd", "better-compute", "bcx-ipmi"} {
		if _, err := os.Stat(filepath.Join(out, "bin", name)); err != nil {
			t.Fatalf("%v: run make build first", err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	t.Cleanup(cancel)
	fake := bmctest.NewFake()
	l, err := lab.Start(ctx, lab.Config{Dir: t.TempDir(), Out: out, Machine: fake, RedfishOptions: opts})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	b := &bench{Lab: l, t: t, ctx: ctx, machine: fake}
	t.Cleanup(func() {
		if t.Failed() {
			for _, p := range []*lab.Process{l.Gateway, l.Site} {
				if p != nil {
					t.Logf("%s printed:\n%s", p.Name, p.Output())
				}
			}
		}
	})
	b.must(l.Keys(ctx))
	b.must(l.Serve(ctx))
	if b.join, err = l.AddSite(ctx); err != nil {
		t.Fatal(err)
	}
	return b
}

// ready is begin with the site at home and the machine enrolled.
func ready(t *testing.T, opt lab.SiteOptions) *bench {
	t.Helper()
	b := begin(t)
	b.must(b.StartSite(b.ctx, b.join, opt))
	b.must(b.WaitSiteOnline(b.ctx))
	b.must(b.EnrollMachine(b.ctx))
	return b
}

// boots waits until network boot is served: the box looks for other DHCP servers first.
func (b *bench) boots() {
	b.t.Helper()
	b.must(b.Site.WaitFor(b.ctx, "network boot is served"))
}

func (b *bench) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

// cli runs a command that must succeed.
func (b *bench) cli(args ...string) string {
	b.t.Helper()
	got, err := b.CLI(b.ctx, nil, args...)
	if err != nil {
		b.t.Fatalf("better-compute %s: %v", strings.Join(args, " "), err)
	}
	return strings.TrimSpace(got)
}

// refused runs a command that must fail, naming one of the codes.
func (b *bench) refused(codes []string, args ...string) {
	b.t.Helper()
	got, err := b.CLI(b.ctx, nil, args...)
	if err == nil {
		b.t.Fatalf("better-compute %s = %q, want an error with %v", strings.Join(args, " "), got, codes)
	}
	if !slices.ContainsFunc(codes, func(c string) bool { return strings.Contains(err.Error(), c) }) {
		b.t.Errorf("better-compute %s: %v, want an error with %v", strings.Join(args, " "), err, codes)
	}
}

// powerRefused checks that power-on fails with one of the codes and reaches nothing.
func (b *bench) powerRefused(codes ...string) {
	b.t.Helper()
	b.refused(codes, "metal", "power", lab.MachineName, "on")
	if b.machine.Running() {
		b.t.Error("the machine runs all the same")
	}
}

func TestPower(t *testing.T) {
	b := ready(t, lab.SiteOptions{})
	if got := b.cli("metal", "power", lab.MachineName); got != "off" {
		t.Errorf("power = %q, want off", got)
	}
	b.cli("metal", "power", lab.MachineName, "on")
	if !b.machine.Running() {
		t.Error("the machine does not run")
	}
	if got := b.cli("metal", "power", lab.MachineName); got != "on" {
		t.Errorf("power = %q, want on", got)
	}
	b.cli("metal", "power", lab.MachineName, "cycle")
	b.cli("metal", "power", lab.MachineName, "off")
	want := []string{"on none", "cycle none", "off"}
	if got := b.IPMI.Log(); !slices.Equal(got, want) {
		t.Errorf("the BMC did %q, want %q", got, want)
	}
	b.must(b.EnrollRedfish(b.ctx))
	if got := b.cli("metal", "power", lab.MachineName+"-redfish"); got != "off" {
		t.Errorf("power over Redfish = %q, want off", got)
	}
	b.noSecrets()
}

// noSecrets looks for the BMC's password in everything that was written, and in
// every process's arguments and environment.
func (b *bench) noSecrets() {
	b.t.Helper()
	look := func(what string, data []byte) {
		if bytes.Contains(data, []byte(lab.BMCPassword)) {
			b.t.Errorf("%s holds the BMC's password", what)
		}
	}
	_ = filepath.WalkDir(b.Dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			data, _ := os.ReadFile(path)
			look(path, data)
		}
		return nil
	})
	for _, pattern := range []string{"/proc/[0-9]*/cmdline", "/proc/[0-9]*/environ"} {
		files, _ := filepath.Glob(pattern)
		for _, f := range files {
			if data, err := os.ReadFile(f); err == nil {
				look(f, data)
			}
		}
	}
}

func TestPowerNeedsThePlugin(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "plugins")
	if err := os.Mkdir(empty, 0o755); err != nil {
		t.Fatal(err)
	}
	b := ready(t, lab.SiteOptions{Plugins: empty})
	b.powerRefused("unsupported-driver")
}

func TestPowerNeedsIpmitool(t *testing.T) {
	b := ready(t, lab.SiteOptions{Hide: []string{"/usr/bin/ipmitool"}})
	b.powerRefused("unavailable", "bmc-error", "driver-error")
}

func TestPowerNeedsTheBMC(t *testing.T) {
	b := ready(t, lab.SiteOptions{})
	b.must(b.IPMI.Close())
	b.powerRefused("unreachable", "bmc-error", "timeout")
}

func TestFlippedPinByte(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "plugins")
	b := begin(t)
	b.must(b.WritePlugins(dir))
	pins := filepath.Join(dir, "pins")
	data, err := os.ReadFile(pins)
	b.must(err)
	data[0] = flipHex(data[0])
	b.must(os.WriteFile(pins, data, 0o644))
	b.must(b.StartSite(b.ctx, b.join, lab.SiteOptions{Plugins: dir}))
	b.must(b.WaitSiteOnline(b.ctx))
	b.must(b.EnrollMachine(b.ctx))
	b.powerRefused("unsupported-driver")
	if !strings.Contains(b.Site.Output(), "bcx-ipmi") {
		t.Error("the site's log does not name the plugin that it skipped")
	}
}

func flipHex(c byte) byte {
	if c == '0' {
		return '1'
	}
	return '0'
}

func TestOtherCommandKey(t *testing.T) {
	b := ready(t, lab.SiteOptions{})
	b.Gateway.Stop()
	// Another deployment's command key, in the right place, with the right permissions.
	other := filepath.Join(t.TempDir(), "other")
	_, err := b.CLI(b.ctx, nil, "gateway", "init", "--dir", other, "--url", lab.GatewayURL)
	b.must(err)
	data, err := os.ReadFile(filepath.Join(other, "command.key"))
	b.must(err)
	b.must(os.WriteFile(filepath.Join(b.GatewayDir(), "command.key"), data, 0o600))
	if err := b.Serve(b.ctx); err == nil || !strings.Contains(err.Error(), "command.key") {
		t.Errorf("serving with another deployment's command key: %v, want a refusal that names it", err)
	}
}

// tamper makes the gateway's database change every command after it was signed.
func (b *bench) tamper(set string) {
	b.t.Helper()
	db, err := sql.Open("sqlite", filepath.Join(b.GatewayDir(), "gateway.db")+"?_pragma=busy_timeout(10000)")
	b.must(err)
	defer db.Close()
	_, err = db.ExecContext(b.ctx, "CREATE TRIGGER tamper AFTER INSERT ON commands BEGIN UPDATE commands SET "+set+" WHERE id = NEW.id; END")
	b.must(err)
}

func TestFlippedSignatureByte(t *testing.T) {
	for name, tt := range map[string]struct{ set, code string }{
		// The last bit of the signature, and the last bit of what was signed.
		"signature": {"signature = CAST(substr(signature, 1, 63) || (CASE WHEN substr(signature, 64) = x'00' THEN x'01' ELSE x'00' END) AS BLOB)", "signature-invalid"},
		"payload":   {"payload = CAST(substr(payload, 1, length(payload) - 1) || (CASE WHEN substr(payload, length(payload)) = x'00' THEN x'01' ELSE x'00' END) AS BLOB)", "signature-invalid"},
		"key":       {"key_id = 'ff' || substr(key_id, 3)", "key-unknown"},
		"none":      {"signature = zeroblob(0)", "signature-required"},
	} {
		t.Run(name, func(t *testing.T) {
			b := ready(t, lab.SiteOptions{})
			b.tamper(tt.set)
			b.powerRefused(tt.code)
		})
	}
}

func TestOtherCredentialForOneBMC(t *testing.T) {
	b := ready(t, lab.SiteOptions{})
	b.cli("metal", "power", lab.MachineName)
	_, err := b.CLI(b.ctx, []byte(`{"username":"x","password":"y"}`), "secret", "put", "other")
	b.must(err)
	b.cli("metal", "enroll", "twin", "--pool", lab.PoolName, "--driver", "ipmi", "--address", lab.BMCAddr, "--credentials", "secret://default/other", "--mac", "52:54:00:12:34:57")
	b.refused([]string{"binding-mismatch"}, "metal", "power", "twin", "on")
	if b.machine.Running() {
		t.Error("the machine runs all the same")
	}
}

func TestGatewayDown(t *testing.T) {
	b := begin(t)
	b.Gateway.Stop()
	b.must(b.StartSite(b.ctx, b.join, lab.SiteOptions{}))
	b.must(b.Site.WaitFor(b.ctx, "refused"))
	select {
	case <-b.Site.Exited():
		t.Fatal("bcd site ended")
	case <-time.After(2 * time.Second):
	}
	b.must(b.Serve(b.ctx))
	b.must(b.WaitSiteOnline(b.ctx))
	b.must(b.EnrollMachine(b.ctx))
	b.cli("metal", "power", lab.MachineName, "on")
}

func TestRestarts(t *testing.T) {
	b := ready(t, lab.SiteOptions{})
	b.cli("metal", "power", lab.MachineName, "on")
	b.Site.Kill()
	b.must(b.StartSite(b.ctx, "", lab.SiteOptions{})) // its identity is kept: the spent token is not needed
	b.must(b.Site.WaitFor(b.ctx, "session is up"))
	b.cli("metal", "power", lab.MachineName, "cycle")
	b.Gateway.Kill()
	b.must(b.Serve(b.ctx))
	b.must(b.WaitSiteOnline(b.ctx))
	b.cli("metal", "power", lab.MachineName, "off")
	want := []string{"on none", "cycle none", "off"}
	if got := b.IPMI.Log(); !slices.Equal(got, want) {
		t.Errorf("the BMC did %q, want each action once: %q", got, want)
	}
}

func TestWrongJoinString(t *testing.T) {
	b := begin(t)
	b.must(b.StartSite(b.ctx, b.join[:len(b.join)-4], lab.SiteOptions{}))
	b.must(b.Site.WaitFor(b.ctx, "join string"))
	b.Site.Stop()

	// A well-formed one whose token nobody gave out: refused, and tried again.
	spent := b.join
	b.must(b.StartSite(b.ctx, spent, lab.SiteOptions{}))
	b.must(b.WaitSiteOnline(b.ctx))
	b.Site.Stop()
	b.must(os.RemoveAll(filepath.Join(b.Dir, "site", "state")))
	b.must(b.StartSite(b.ctx, spent, lab.SiteOptions{}))
	b.must(b.Site.WaitFor(b.ctx, "token-used"))
	select {
	case <-b.Site.Exited():
		t.Error("bcd site ended instead of trying on")
	case <-time.After(2 * time.Second):
	}
}

func TestUnknownKey(t *testing.T) {
	b := begin(t)
	b.must(b.StartSite(b.ctx, b.join, lab.SiteOptions{Extra: "[upl1nk]\nx = 1\n"}))
	b.must(b.Site.WaitFor(b.ctx, `unknown key "upl1nk"`))
	if !strings.Contains(b.Site.Output(), "site.toml:") {
		t.Errorf("no file and line in %q", b.Site.Output())
	}
}

func TestNothingListensOnTheUplink(t *testing.T) {
	b := ready(t, lab.SiteOptions{})
	b.boots()
	// What a LAN's machine reaches, so that the test can fail.
	for _, port := range []string{"80", "7443", "7444"} {
		if err := b.Dial("bmc", lab.SiteLAN+":"+port); err != nil {
			t.Errorf("from the LAN, port %s: %v", port, err)
		}
	}
	_, err := b.Exec(b.ctx, "nb", "ip", "route", "add", "10.77.0.0/24", "via", lab.SiteUplink)
	b.must(err)
	err = b.Silent("nb", []string{lab.SiteUplink, lab.SiteLAN, lab.BMCAddr}, []string{"22", "53", "69", "80", "443", "623", "7443", "7444", "8080"})
	if err != nil {
		t.Error(err)
	}
}

func TestPassthroughLeadsToTheGateway(t *testing.T) {
	b := ready(t, lab.SiteOptions{})
	var issuer string
	b.must(b.InNetns("bmc", func() error {
		// Only the certificate is looked at: who answers is the question here.
		conn, err := tls.Dial("tcp", lab.SiteLAN+":7443", &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
		if err != nil {
			return err
		}
		defer conn.Close()
		leaf := conn.ConnectionState().PeerCertificates[0]
		issuer = leaf.Issuer.CommonName
		return leaf.VerifyHostname(lab.GatewayAddr)
	}))
	if issuer == "" {
		t.Error("no issuer")
	}
}

// lease gets the machine's namespace an address from the box, as firmware would.
func (b *bench) lease() {
	b.t.Helper()
	b.must(b.InNetns("mach", func() error {
		client, err := nclient4.New("eth0")
		if err != nil {
			return err
		}
		defer client.Close()
		lease, err := client.Request(b.ctx)
		if err != nil {
			return err
		}
		size, _ := lease.ACK.SubnetMask().Size()
		_, err = b.Exec(b.ctx, "mach", "ip", "addr", "add", fmt.Sprintf("%s/%d", lease.ACK.YourIPAddr, size), "dev", "eth0")
		return err
	}))
}

// fetch gets an artifact from the box and compares it; it says how much came.
func (b *bench) fetch(netns, sha string, want []byte) (int64, error) {
	got, err := b.get(netns, "/artifacts/"+sha)
	if err == nil && !bytes.Equal(got, want) {
		err = errors.New("other bytes")
	}
	return int64(len(got)), err
}

// get reads a path from the box's HTTP server on the LAN.
func (b *bench) get(netns, path string) (got []byte, err error) {
	err = b.InNetns(netns, func() error {
		var dialer net.Dialer
		conn, err := dialer.DialContext(b.ctx, "tcp", lab.SiteLAN+":80")
		if err != nil {
			return err
		}
		defer conn.Close()
		// The connection was made here, in the namespace; the client only uses it.
		client := &http.Client{Timeout: time.Minute, Transport: &http.Transport{
			DialContext: func(context.Context, string, string) (net.Conn, error) { return conn, nil }, DisableKeepAlives: true,
		}}
		resp, err := client.Get("http://" + lab.SiteLAN + path)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return errors.New(resp.Status)
		}
		got, err = io.ReadAll(resp.Body)
		return err
	})
	return got, err
}

// workflow waits until a workflow's listing holds text.
func (b *bench) workflow(id, text string) {
	b.t.Helper()
	var last string
	err := lab.Poll(b.ctx, "wait for "+text, func() (bool, error) {
		var err error
		last, err = b.CLI(b.ctx, nil, "workflow", "show", id)
		return strings.Contains(last, text), err
	})
	if err != nil {
		b.t.Fatalf("%v\n%s", err, last)
	}
}

// An inspection goes on after the gateway and then the box were killed in its
// middle, repeats nothing, and ends when the machine's ramdisk, played here by
// the real agent in a namespace, has reported its hardware.
func TestWorkflowSurvivesRestarts(t *testing.T) {
	b := ready(t, lab.SiteOptions{})
	id := b.cli("metal", "inspect", lab.MachineName)
	b.workflow(id, "waiting for the machine's ramdisk")
	b.Gateway.Kill()
	b.must(b.Serve(b.ctx))
	b.Site.Kill()
	b.must(b.StartSite(b.ctx, "", lab.SiteOptions{}))
	b.must(b.Site.WaitFor(b.ctx, "session is up"))

	b.must(b.PlugMachine())
	b.lease()
	mac := strings.ReplaceAll(lab.MachineMAC, ":", "-")
	script, err := b.get("mach", "/boot/"+mac+"/script.ipxe")
	b.must(err)
	match := regexp.MustCompile(`http://[^/]+(/boot/\S+/boot\.img)`).FindSubmatch(script)
	if match == nil {
		t.Fatalf("the script names no boot.img:\n%s", script)
	}
	archive, err := b.get("mach", string(match[1]))
	b.must(err)
	info := regexp.MustCompile(`\{"machine_id".*\}`).Find(archive)
	if info == nil {
		t.Fatal("boot.img holds no boot.json")
	}
	boot := filepath.Join(b.Dir, "boot.json")
	b.must(os.WriteFile(boot, info, 0o600))
	ramdisk, err := b.Spawn("mach", "ramdisk", filepath.Join(b.Out, "bin", "bcd"), "ramdisk", "--boot", boot)
	b.must(err)
	b.must(ramdisk.WaitFor(b.ctx, "session is up"))
	b.workflow(id, "done  ") // of any step; the end follows
	b.must(lab.Poll(b.ctx, "wait for the workflow's end", func() (bool, error) {
		out, err := b.CLI(b.ctx, nil, "workflow", "list")
		return strings.Contains(out, "done") && !strings.Contains(out, "running"), err
	}))
	if out := b.cli("metal", "show", lab.MachineName); !strings.Contains(out, `"source":"ramdisk"`) {
		t.Errorf("no hardware was recorded:\n%s", out)
	}
	want := []string{"bootdev pxe efi once", "on pxe efi once", "off"}
	if got := b.IPMI.Log(); !slices.Equal(got, want) {
		t.Errorf("the BMC did %q, want each once: %q", got, want)
	}

	// The window has closed with the workflow: who read the voucher off the wire gets nothing.
	thief, err := b.Spawn("mach", "thief", filepath.Join(b.Out, "bin", "bcd"), "ramdisk", "--boot", boot)
	b.must(err)
	b.must(thief.WaitFor(b.ctx, "boot window"))
}

func TestFlippedArtifactByte(t *testing.T) {
	b := ready(t, lab.SiteOptions{})
	// Noise stays as long as it is: several chunks of the cache.
	noise := make([]byte, 10<<20)
	rand.New(rand.NewSource(1)).Read(noise)
	enc, err := zstd.NewWriter(nil)
	b.must(err)
	zst := enc.EncodeAll(noise, nil)
	path := filepath.Join(b.Dir, "image.raw.zst")
	b.must(os.WriteFile(path, zst, 0o644))
	b.cli("artifact", "import", path, "--name", lab.ImageName)
	stored, err := filepath.Glob(filepath.Join(b.GatewayDir(), "artifacts", strings.Repeat("?", 64)))
	b.must(err)
	if len(stored) != 1 {
		t.Fatalf("the gateway stores %d artifacts, want 1", len(stored))
	}
	sha := filepath.Base(stored[0])
	// The assignment of a deployment is what lets the machine's LAN fetch it.
	b.cli("metal", "deploy", lab.MachineName, "--image", lab.ImageName, "--disk-serial", lab.DiskSerial, "--hostname", "node-1")
	b.must(b.PlugMachine())
	// Whoever has no lease is no machine.
	if n, err := b.fetch("bmc", sha, zst); err == nil {
		t.Errorf("a stranger on the LAN fetched %d bytes", n)
	}
	b.lease()
	fetch := func() (int64, error) { return b.fetch("mach", sha, zst) }
	b.must(lab.Poll(b.ctx, "fetch the artifact", func() (bool, error) {
		n, err := fetch()
		return err == nil && n == int64(len(zst)), nil
	}))

	// A box with an empty cache, and one byte flipped at the gateway.
	b.Site.Stop()
	b.must(os.RemoveAll(filepath.Join(b.Dir, "site", "state", "artifacts")))
	flipped := bytes.Clone(zst)
	flipped[len(flipped)/2] ^= 1
	b.must(os.WriteFile(stored[0], flipped, 0o600))
	b.must(b.StartSite(b.ctx, "", lab.SiteOptions{}))
	b.must(b.Site.WaitFor(b.ctx, "session is up"))
	if n, err := fetch(); err == nil {
		t.Errorf("fetched %d bytes of a damaged artifact without an error", n)
	} else if n > int64(len(zst)/2) {
		t.Errorf("%d bytes were served, past the damaged one at %d", n, len(zst)/2)
	}
}

// A full data partition is told in one clear line and an event; the box goes on
// serving from the room that its journal set aside, and does each thing once.
func TestFullDataPartition(t *testing.T) {
	b := begin(t)
	state := filepath.Join(b.Dir, "site", "state")
	b.must(os.MkdirAll(state, 0o700))
	b.must(unix.Mount("tmpfs", state, "tmpfs", 0, "size=16m"))
	t.Cleanup(func() { _ = unix.Unmount(state, unix.MNT_DETACH) })
	b.must(b.StartSite(b.ctx, b.join, lab.SiteOptions{}))
	b.must(b.WaitSiteOnline(b.ctx))
	b.must(b.EnrollMachine(b.ctx))
	b.cli("metal", "power", lab.MachineName, "on")

	filler := filepath.Join(state, "filler")
	f, err := os.Create(filler)
	b.must(err)
	for size := 1 << 20; size > 0; size /= 2 {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, size))
		}
	}
	b.must(f.Close())
	b.must(b.Site.WaitFor(b.ctx, "data is full"))
	before := len(b.machine.Calls())
	for range 10 {
		b.cli("metal", "power", lab.MachineName, "reset")
	}
	if got := len(b.machine.Calls()) - before; got != 10 {
		t.Errorf("the machine was reset %d times, want 10", got)
	}
	if got := b.cli("metal", "power", lab.MachineName); got != "on" {
		t.Errorf("power = %q, want on", got)
	}
	b.must(lab.Poll(b.ctx, "wait for the event", func() (bool, error) {
		out, err := b.CLI(b.ctx, nil, "events")
		return strings.Contains(out, "data.full"), err
	}))
	b.must(os.Remove(filler))
	b.must(b.Site.WaitFor(b.ctx, "data has room again"))
	b.cli("metal", "power", lab.MachineName, "off")
}
