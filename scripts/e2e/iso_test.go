package e2e

import (
	"bytes"
	"crypto/x509"
	"math/rand"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/pxe/isoclass/isotest"
	"github.com/better-compute/site-appliance/scripts/lab"
)

// A disc image goes from the catalog to the box before anything is switched, and from
// there to the machine, line or no line; after as many boots as were allowed the machine
// gets its disk, and it does when a person ends it.
func TestBootISO(t *testing.T) {
	b := ready(t, lab.SiteOptions{})
	iso := isotest.Image(isotest.Options{Label: "MT86", BIOS: true, UEFI: true, Files: []string{"MEMTEST.BIN;1"}, Size: 9 << 20})
	rand.New(rand.NewSource(1)).Read(iso[64<<10:])
	path := filepath.Join(b.Dir, "memtest.iso")
	b.must(os.WriteFile(path, iso, 0o600))
	b.cli("iso", "add", path)
	if out := b.cli("metal", "boot-iso", lab.MachineName, "memtest", "--check"); !strings.Contains(out, "boots by pxe, under uefi") || strings.Contains(out, "refused") {
		t.Errorf("what is told: %q", out)
	}
	id := b.cli("metal", "boot-iso", lab.MachineName, "memtest")
	b.workflow(id, "waiting for the machine to fetch")
	if got, want := b.IPMI.Log(), []string{"bootdev pxe efi once", "on pxe efi once"}; !slices.Equal(got, want) {
		t.Errorf("the BMC did %q, want %q", got, want)
	}
	b.refused([]string{"iso-assigned"}, "iso", "remove", "memtest")

	b.Gateway.Kill() // the box has all of it
	b.must(b.PlugMachine())
	b.lease()
	mac := strings.ReplaceAll(lab.MachineMAC, ":", "-")
	script := func() string {
		t.Helper()
		text, err := b.get("mach", "/boot/"+mac+"/script.ipxe")
		b.must(err)
		return string(text)
	}
	text := script()
	match := regexp.MustCompile(`sanhook \S.* http://[^/]+(/boot/\S+/memtest\.iso)`).FindStringSubmatch(text)
	if match == nil {
		t.Fatalf("the script gives out no drive:\n%s", text)
	}
	if got, err := b.get("mach", match[1]); err != nil || !bytes.Equal(got, iso) {
		t.Errorf("the machine gets %d bytes, %v, want the image's %d", len(got), err, len(iso))
	}
	if text := script(); !strings.Contains(text, "local disk") {
		t.Errorf("after its one boot the machine gets\n%s\nwant its disk", text)
	}

	b.must(b.Serve(b.ctx))
	b.must(b.Site.WaitFor(b.ctx, "session is up"))
	b.must(lab.Poll(b.ctx, "wait for the workflow's end", func() (bool, error) {
		out, err := b.CLI(b.ctx, nil, "workflow", "show", id)
		return strings.Contains(out, ": done"), err
	}))
	// It stays until somebody ends it.
	b.refused([]string{"iso-assigned"}, "iso", "remove", "memtest")
	b.cli("metal", "boot-disk", lab.MachineName, "--wait")
	if got, want := b.IPMI.Log(), []string{"bootdev pxe efi once", "on pxe efi once", "off", "bootdev disk efi once", "on disk efi once"}; !slices.Equal(got, want) {
		t.Errorf("the BMC did %q, want %q", got, want)
	}
	if _, err := b.get("mach", match[1]); err == nil {
		t.Error("the machine gets the image after that")
	}
	b.cli("iso", "remove", "memtest")
	if left, err := filepath.Glob(filepath.Join(b.GatewayDir(), "artifacts", strings.Repeat("?", 64))); err != nil || len(left) != 0 {
		t.Errorf("the gateway keeps %v, %v", left, err)
	}
}

// The same image goes into the virtual drive of a BMC that has one: fetched by the box
// first, and read by the BMC from there.
func TestBootISOByVirtualDrive(t *testing.T) {
	roots := x509.NewCertPool()
	b := begin(t, bmctest.MediaRoots(roots))
	b.must(b.StartSite(b.ctx, b.join, lab.SiteOptions{}))
	b.must(b.WaitSiteOnline(b.ctx))
	b.must(b.EnrollMachine(b.ctx))
	b.must(b.EnrollRedfish(b.ctx))
	const machine = lab.MachineName + "-redfish"
	if !roots.AppendCertsFromPEM([]byte(b.mediaCA())) {
		t.Fatal("the site's CA is no certificate")
	}
	iso := isotest.Image(isotest.Options{Label: "WIN", BIOS: true, Files: []string{"BOOTMGR;1"}, Size: 5 << 20})
	path := filepath.Join(b.Dir, "win.iso")
	b.must(os.WriteFile(path, iso, 0o600))
	b.cli("iso", "add", path)
	b.refused([]string{"iso-limits"}, "metal", "boot-iso", machine, "win", "--pxe")
	b.cli("metal", "boot-iso", machine, "win", "--wait")
	status, got, err := b.fetchMedia("bmc", b.Redfish.Media(), roots)
	if err != nil || status != http.StatusOK || !bytes.Equal(got, iso) {
		t.Errorf("the BMC gets %d and %d bytes, %v, want the image", status, len(got), err)
	}
	if got := b.Redfish.Log(); len(got) == 0 || !strings.HasPrefix(got[len(got)-1], "on cdrom") || strings.Contains(got[len(got)-1], "efi") {
		t.Errorf("the BMC did %q, want it to end with a start from the drive, under BIOS", got)
	}
	b.cli("metal", "media", machine, "eject")
	b.cli("iso", "remove", "win")
}
