package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/pxe/isoclass/isotest"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// seen is what the site did since the last look.
func (p *place) seen() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := p.log
	p.log = nil
	return out
}

func isoFile(t *testing.T, name string, o isotest.Options) (path, digest string) {
	t.Helper()
	data := isotest.Image(o)
	path = filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(data)
	return path, hex.EncodeToString(sum[:])
}

// TestNetbootOverTheLine: what people type to boot discs, kernels and wipes, through a
// gateway with real TLS, signatures and sessions to a site that is made up.
func TestNetbootOverTheLine(t *testing.T) {
	c := newCLI(t)
	defer func() { c.halt() }()
	p := newPlace(t, c)
	defer p.end()
	p.enroll(c, "m1", "ipmi")

	path, digest := isoFile(t, "Memtest 86.ISO", isotest.Options{Label: "MT86", BIOS: true, UEFI: true, Files: []string{"MEMTEST.BIN;1"}, Size: 3 << 20})
	if out := c.run("", "iso", "add", path); !strings.Contains(out, "memtest-86") || !strings.Contains(out, "self-contained") || !strings.Contains(out, digest) || !strings.Contains(out, "bios, uefi") {
		t.Errorf("iso add = %q", out)
	}
	c.fails("INVALID_INPUT: taken: there is a disc image memtest-86: remove it first, or give another name", "iso", "add", path)
	win, _ := isoFile(t, "win.iso", isotest.Options{Label: "WIN", BIOS: true, Files: []string{"BOOTMGR;1"}})
	c.run("", "iso", "add", win, "--name", "windows")
	c.fails("INVALID_INPUT: netboot_test.go: it is no ISO 9660 image", "iso", "add", "netboot_test.go")
	if out := c.run("", "iso", "list"); !strings.Contains(out, "memtest-86") || !strings.Contains(out, "needs-drive") || strings.Contains(out, "netboot") {
		t.Errorf("iso list = %q", out)
	}

	// What is known is told, and nothing is done.
	if out := c.run("", "metal", "boot-iso", "m1", "memtest-86", "--check"); !strings.Contains(out, "boots by pxe, under uefi") || !strings.Contains(out, "no virtual drive") || strings.Contains(out, "refused") {
		t.Errorf("metal boot-iso --check = %q", out)
	}
	if out := c.run("", "metal", "boot-iso", "m1", "windows", "--check"); !strings.Contains(out, "refused: ") || !strings.Contains(out, "looks for its disc") {
		t.Errorf("metal boot-iso --check of what needs a drive = %q", out)
	}
	c.fails("UNSUPPORTED: iso-limits", "metal", "boot-iso", "m1", "windows")
	if got := p.seen(); len(got) != 0 {
		t.Errorf("the site saw %q of boots that were only asked about", got)
	}

	out, notes, err := c.runAs(c.client, "", "metal", "boot-iso", "m1", "memtest-86", "--max-boots", "2", "--window", "1h", "--wait")
	if err != nil || !strings.Contains(out, "boot.wait") || !strings.Contains(notes, "boots by pxe") {
		t.Errorf("metal boot-iso --wait = %q, %q, %v", out, notes, err)
	}
	if got, want := p.seen(), []string{"fetch " + digest, "assign ACTION_ISO", "boot pxe", "power on"}; !slices.Equal(got, want) {
		t.Errorf("the site saw %q, want %q", got, want)
	}
	p.mu.Lock()
	if m := p.assigned.Machines[0]; m.Iso.GetSha256() != digest || m.Iso.GetName() != "memtest-86" || m.MaxBoots != 2 || m.Iso.GetClass() != pxev1.IsoClass_ISO_CLASS_SELF_CONTAINED {
		t.Errorf("the box was told %v", m)
	}
	p.mu.Unlock()
	c.fails("INVALID_INPUT: iso-assigned", "iso", "remove", "memtest-86")
	if out := c.run("", "iso", "show", "memtest-86"); !strings.Contains(out, "m1") {
		t.Errorf("iso show = %q, want the machine that may boot it", out)
	}
	if out := c.run("", "metal", "show", "m1"); !strings.Contains(out, "iso memtest-86 until 20") {
		t.Errorf("metal show = %q, want what it may boot", out)
	}
	c.run("", "metal", "boot-disk", "m1", "--wait")
	if out := c.run("", "metal", "show", "m1"); strings.Contains(out, "may boot") {
		t.Errorf("metal show = %q, want nothing that it may boot", out)
	}
	if got, want := p.seen(), []string{"assign ACTION_LOCAL_DISK", "power off", "boot disk", "power on"}; !slices.Equal(got, want) {
		t.Errorf("the site saw %q, want %q", got, want)
	}
	c.run("", "iso", "remove", "memtest-86")
	c.fails("NOT_FOUND: ", "iso", "show", "memtest-86")

	kernel := filepath.Join(t.TempDir(), "vmlinuz")
	if err := os.WriteFile(kernel, []byte("a kernel"), 0o600); err != nil {
		t.Fatal(err)
	}
	c.run("", "artifact", "import", kernel, "--name", "vmlinuz", "--arch", "amd64", "--format", "raw")
	c.run("", "metal", "boot-kernel", "m1", "--kernel", "vmlinuz", "--initrd", "vmlinuz", "--cmdline", "console=ttyS0 quiet", "--wait")
	p.mu.Lock()
	if m := p.assigned.Machines[0]; m.Kernel.GetCmdline() != "console=ttyS0 quiet" || m.Action != pxev1.Action_ACTION_KERNEL || m.Purpose != "boot" || m.MaxBoots != 1 {
		t.Errorf("the box was told %v", m)
	}
	p.mu.Unlock()
	c.run("", "metal", "boot-kernel", "m1", "--kernel", "vmlinuz", "--uki", "--wait")
	p.seen()

	out = c.run("", "metal", "wipe", "m1", "--disk-serial", "S1", "--disk-serial", "S2", "--wait")
	if !strings.Contains(out, "disk.wipe") {
		t.Errorf("metal wipe --wait = %q", out)
	}
	if got, want := p.seen(), []string{"assign ACTION_RAMDISK", "power off", "boot pxe", "power on", "wipe S1", "wipe S2", "assign ACTION_LOCAL_DISK", "power off"}; !slices.Equal(got, want) {
		t.Errorf("the site saw %q, want %q", got, want)
	}
	if out := c.run("", "metal", "list"); !strings.Contains(out, "wiped") {
		t.Errorf("metal list = %q, want the machine wiped", out)
	}
	var list struct {
		Items []struct{ Name, State string }
	}
	if err := json.Unmarshal([]byte(c.run("", "workflow", "list", "--json")), &list); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, w := range list.Items {
		names = append(names, w.Name+" "+w.State)
	}
	if want := []string{"boot-iso done", "boot-disk done", "boot-kernel done", "boot-kernel done", "wipe done"}; !slices.Equal(names, want) {
		t.Errorf("workflows = %q, want %q", names, want)
	}
}

// A BMC with a virtual drive gets the image there, unless the network is asked for.
func TestBootISOByVirtualDrive(t *testing.T) {
	c := newCLI(t)
	defer func() { c.halt() }()
	p := newPlace(t, c)
	defer p.end()
	p.enroll(c, "m1", "redfish")
	path, digest := isoFile(t, "win.iso", isotest.Options{Label: "WIN", BIOS: true, Files: []string{"BOOTMGR;1"}})
	c.run("", "iso", "add", path)
	out := c.run("", "metal", "boot-iso", "m1", "win", "--check")
	if !strings.Contains(out, "boots by virtual-media, under bios") || strings.Contains(out, "refused") {
		t.Errorf("metal boot-iso --check = %q", out)
	}
	c.run("", "metal", "boot-iso", "m1", "win", "--wait")
	if got, want := p.seen(), []string{"fetch " + digest, `insert ["artifact://` + digest + `"]`, "boot cdrom", "power on"}; !slices.Equal(got, want) {
		t.Errorf("the site saw %q, want %q", got, want)
	}
	c.fails("UNSUPPORTED: iso-limits", "metal", "boot-iso", "m1", "win", "--pxe")
}

// TestBootMistakes: what people type wrong is told with what is wanted, and begins nothing.
func TestBootMistakes(t *testing.T) {
	c := newCLI(t)
	defer func() { c.halt() }()
	p := newPlace(t, c)
	defer p.end()
	p.enroll(c, "m1", "ipmi")
	c.run("", "metal", "enroll", "m2", "--pool", "metal", "--driver", "wol", "--address", "52:54:00:00:00:02", "--mac", "52:54:00:00:00:02")
	path, _ := isoFile(t, "memtest.iso", isotest.Options{Label: "MT86", BIOS: true, UEFI: true, Files: []string{"MEMTEST.BIN;1"}})
	c.run("", "iso", "add", path)
	empty := filepath.Join(t.TempDir(), "empty.iso")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		want string
		args []string
	}{
		{"iso add: https://example.com/a.iso is a URL: want a file of this computer", []string{"iso", "add", "https://example.com/a.iso"}},
		{"iso add: open /nowhere.iso: no such file", []string{"iso", "add", "/nowhere.iso"}},
		{"iso add: read " + filepath.Dir(path) + ": is a directory", []string{"iso", "add", filepath.Dir(path)}},
		{"INVALID_INPUT: empty: the file is empty", []string{"iso", "add", empty}},
		{"usage: better-compute iso add FILE", []string{"iso", "add"}},
		{`INVALID_INPUT: name "Mem Test": want lower-case letters`, []string{"iso", "add", path, "--name", "Mem Test"}},
		{`INVALID_INPUT: class "live": want self-contained, refetches or needs-drive`, []string{"iso", "add", path, "--name", "x", "--class", "live"}},
		{`NOT_FOUND: disc image "none"`, []string{"iso", "show", "none"}},
		{`NOT_FOUND: disc image "none"`, []string{"iso", "remove", "none"}},
		{`NOT_FOUND: machine "nobody"`, []string{"metal", "boot-iso", "nobody", "memtest"}},
		{`NOT_FOUND: disc image "none"`, []string{"metal", "boot-iso", "m1", "none"}},
		{`INVALID_INPUT: firmware "efi": want bios or uefi`, []string{"metal", "boot-iso", "m1", "memtest", "--firmware", "efi"}},
		{"--window 1s: want 1m to 168h; usage: better-compute metal boot-iso", []string{"metal", "boot-iso", "m1", "memtest", "--window", "1s"}},
		{"--window 200h0m0s: want 1m to 168h; usage: better-compute metal boot-kernel", []string{"metal", "boot-kernel", "m1", "--kernel", "k", "--window", "200h"}},
		{"--max-boots 0: want 1 to 1000; usage: better-compute metal boot-iso", []string{"metal", "boot-iso", "m1", "memtest", "--max-boots", "0"}},
		{`NOT_FOUND: artifact "none"`, []string{"metal", "boot-kernel", "m1", "--kernel", "none"}},
		{"INVALID_INPUT: cmdline: the command line must not hold '$'", []string{"metal", "boot-kernel", "m1", "--kernel", "none", "--cmdline", "a=${b}"}},
		{"INVALID_INPUT: a unified kernel image has its initrd", []string{"metal", "boot-kernel", "m1", "--kernel", "k", "--uki", "--initrd", "i"}},
		{`NOT_FOUND: machine "nobody"`, []string{"metal", "boot-disk", "nobody"}},
		{`INVALID_INPUT: firmware "x": want bios or uefi`, []string{"metal", "boot-disk", "m1", "--firmware", "x"}},
		{"INVALID_INPUT: disk_serials: S1 is given twice", []string{"metal", "wipe", "m1", "--disk-serial", "S1", "--disk-serial", "S1"}},
		{`NOT_FOUND: machine "nobody"`, []string{"metal", "wipe", "nobody", "--disk-serial", "S1"}},
		{"UNSUPPORTED: bmc-driver-unsupported: wipe needs management.setBootDevice, which driver wol does not serve: it serves power.getPower, power.setPower", []string{"metal", "wipe", "m2", "--disk-serial", "S1"}},
		{`INVALID_INPUT: loader "grub": want ipxe, shim, snponly`, []string{"metal", "loader", "m1", "grub"}},
		{`NOT_FOUND: machine "nobody"`, []string{"metal", "loader", "nobody", "shim"}},
		{"usage: better-compute metal loader MACHINE snponly|ipxe|shim", []string{"metal", "loader", "m1"}},
	} {
		c.fails(tt.want, tt.args...)
	}
	c.run("", "metal", "loader", "m1", "shim")
	if _, _, err := c.runAs(c.client, "", "metal", "boot-iso", "m1", "memtest"); err == nil || !strings.Contains(err.Error(), "GRUB gives no drives out, which the loaders snponly and ipxe do; --anyway boots it in spite of that") {
		t.Errorf("boot-iso with shim = %v", err)
	}
	if got := p.seen(); len(got) != 0 {
		t.Errorf("the site saw %q of what was refused", got)
	}
}

func TestNameOf(t *testing.T) {
	for path, want := range map[string]string{
		"/tmp/Debian 12.ISO": "debian-12", "x.iso": "x", "../a/_b.iso": "b", "no-suffix.img": "no-suffix.img", "ÄÖ.iso": "",
	} {
		if got := nameOf(path); got != want {
			t.Errorf("nameOf(%q) = %q, want %q", path, got, want)
		}
	}
}
