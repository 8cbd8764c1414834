package builder

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/u-root/mkuimage/cpio"

	"github.com/better-compute/site-appliance/image/customize"
	"github.com/better-compute/site-appliance/image/fat"
	"github.com/better-compute/site-appliance/image/gpt"
	"github.com/better-compute/site-appliance/image/layout"
	"github.com/better-compute/site-appliance/image/manifest"
	"github.com/better-compute/site-appliance/image/qemutest"
	"github.com/better-compute/site-appliance/image/uki"
	"github.com/better-compute/site-appliance/initramfs/archive"
)

const (
	standIn = "./image/builder/testdata/bcd"
	// up is what the stand-in for the agent says when it has looked around.
	up = "stand-in: up"
)

// made is one build with the stand-in, shared by the tests.
var made struct {
	once sync.Once
	out  string
	m    *manifest.Manifest
	err  error
}

func TestMain(m *testing.M) {
	code := m.Run()
	if made.out != "" {
		os.RemoveAll(made.out)
	}
	os.Exit(code)
}

func options(out string) Options {
	return Options{
		Root: "../..", Board: "qemu-amd64", Out: out, Cache: DefaultCache("../.."), Version: "0.0.1-test", Built: time.Unix(1767225600, 0),
		Agent: standIn, Plugins: []string{standIn}, Quick: true, Log: silent(),
	}
}

// images builds once and gives the folder with the files.
func images(t *testing.T) string {
	t.Helper()
	for _, p := range []string{"apt-get", "dpkg-deb", "go"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("needs %s", p)
		}
	}
	made.once.Do(func() {
		if made.out, made.err = os.MkdirTemp("", "bc-images-"); made.err != nil {
			return
		}
		o := options(made.out)
		if o.Root, made.err = filepath.Abs(o.Root); made.err != nil {
			return
		}
		made.m, made.err = Build(context.Background(), o)
	})
	if made.err != nil {
		t.Fatal(made.err)
	}
	return made.out
}

func TestBuild(t *testing.T) {
	out := images(t)
	m, err := manifest.Load(filepath.Join(out, ManifestFile))
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Verify(out); err != nil {
		t.Errorf("Verify = %v", err)
	}
	if len(m.Files) != 5 || m.Kernel == "" || m.Parts["bcd"] == 0 {
		t.Errorf("manifest = %+v", m)
	}
	names := map[string]bool{}
	for _, p := range m.Packages {
		names[p.Name] = true
	}
	for _, want := range []string{"ipmitool", "e2fsprogs", "ipxe", "systemd-boot-efi"} {
		if !names[want] {
			t.Errorf("the manifest does not name package %s", want)
		}
	}

	f, err := os.Open(filepath.Join(out, SiteImage))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	l := layout.Site()
	tab, err := gpt.Read(f, uint64(l.Size), layout.Sector)
	if err != nil || tab.FromBackup {
		t.Fatalf("partition table: %v", err)
	}
	for i, p := range l.Partitions {
		if got := tab.Partitions()[i]; got.Name != p.Name || got.ID != p.ID || got.Type != p.Type || got.First*layout.Sector != uint64(p.Start) || (got.Last+1)*layout.Sector != uint64(p.Start+p.Size) {
			t.Errorf("partition %d = %+v, want %+v", i+1, got, p)
		}
	}
	esp, _ := l.Partition(layout.ESPName)
	want, err := os.ReadFile(filepath.Join(out, SiteEFI))
	if err != nil {
		t.Fatal(err)
	}
	got, err := fat.ReadFile(f, esp.Start, esp.Size, "EFI/Linux/bcsite_0.0.1-test.efi")
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("the disk's UKI differs from %s (%v)", SiteEFI, err)
	}
	if cmdline, err := uki.Section(want, ".cmdline"); err != nil || strings.Contains(string(cmdline), "bc.rescue") || !strings.Contains(string(cmdline), "console=") {
		t.Errorf("command line = %q, %v", cmdline, err)
	}
	if st, err := f.Stat(); err != nil || st.Size() != l.Size {
		t.Errorf("size of the image = %d, want %d", st.Size(), l.Size)
	}
	for _, tool := range [][]string{{"sgdisk", "-v"}, {"fsck.vfat", "-n"}} {
		path, err := exec.LookPath(tool[0])
		if err != nil {
			continue
		}
		target := f.Name()
		if tool[0] == "fsck.vfat" {
			target = filepath.Join(t.TempDir(), "esp")
			b := make([]byte, esp.Size)
			if _, err := f.ReadAt(b, esp.Start); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(target, b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if msg, err := exec.Command(path, tool[1], target).CombinedOutput(); err != nil || strings.Contains(string(msg), "Problem") {
			t.Errorf("%s: %v\n%s", tool[0], err, msg)
		}
	}
}

// TestBuildTwice proves that two builds of one source give the same bytes, and
// that a release image has no rescue entry while the other has.
func TestBuildTwice(t *testing.T) {
	out := images(t)
	again := t.TempDir()
	o := options(again)
	var err error
	if o.Root, err = filepath.Abs(o.Root); err != nil {
		t.Fatal(err)
	}
	m, err := Build(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	for i, f := range m.Files {
		if f != made.m.Files[i] {
			t.Errorf("second build: %+v, first: %+v", f, made.m.Files[i])
		}
	}
	o.Release, o.Out = true, t.TempDir()
	if _, err := Build(context.Background(), o); err != nil {
		t.Fatal(err)
	}
	for dir, want := range map[string]bool{out: true, o.Out: false} {
		if got := holds(t, filepath.Join(dir, RamdiskInitrd), "etc/bc/rescue"); got != want {
			t.Errorf("init may give a rescue shell: %v, want %v", got, want)
		}
	}
	esp, _ := layout.Site().Partition(layout.ESPName)
	for dir, want := range map[string]bool{out: true, o.Out: false} {
		f, err := os.Open(filepath.Join(dir, SiteImage))
		if err != nil {
			t.Fatal(err)
		}
		_, err = fat.ReadFile(f, esp.Start, esp.Size, layout.RescuePath)
		f.Close()
		if (err == nil) != want {
			t.Errorf("rescue entry is there: %v, want %v", err == nil, want)
		}
	}
}

// holds looks for a file in a packed initramfs.
func holds(t *testing.T, initrd, name string) bool {
	t.Helper()
	packed, err := os.ReadFile(initrd)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range contents(t, packed) {
		if r.Name == name {
			return true
		}
	}
	return false
}

// contents are the files of a compressed initramfs.
func contents(t *testing.T, packed []byte) []cpio.Record {
	t.Helper()
	dec, err := zstd.NewReader(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer dec.Close()
	var data []byte
	for cut := range 4 { // up to three bytes of padding follow the frame
		if data, err = dec.DecodeAll(packed[:len(packed)-cut], nil); err == nil {
			break
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	records, err := cpio.ReadAllRecords(cpio.Newc.Reader(bytes.NewReader(data)))
	if err != nil {
		t.Fatal(err)
	}
	return records
}

// machine is a VM of one test.
func machine(t *testing.T, cfg qemutest.Config) *qemutest.VM {
	t.Helper()
	if cfg.Dir == "" {
		cfg.Dir = t.TempDir()
	}
	vm, err := qemutest.Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { vm.Close() })
	return vm
}

func wait(t *testing.T, vm *qemutest.VM, marker string, quiet time.Duration) {
	t.Helper()
	if err := vm.WaitMarker(t.Context(), marker, quiet); err != nil {
		t.Fatalf("%v\n%s", err, vm.Tail(60))
	}
}

func wants(t *testing.T, vm *qemutest.VM, markers ...string) {
	t.Helper()
	text := qemutest.Plain(vm.Serial())
	for _, m := range markers {
		if !strings.Contains(text, m) {
			t.Errorf("the console does not show %q\n%s", m, vm.Tail(80))
		}
	}
}

const user = "user"

func TestBootRamdisk(t *testing.T) {
	out := images(t)
	qemutest.Need(t, false)
	// What a box appends for one machine.
	boot := filepath.Join(t.TempDir(), "initrd")
	base, err := os.ReadFile(filepath.Join(out, RamdiskInitrd))
	if err != nil {
		t.Fatal(err)
	}
	tree := archive.New()
	tree.File("etc/bc/boot.json", []byte(`{"machine_id":"node_x"}`), 0o600)
	extra, err := tree.Cpio()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(boot, append(base, extra...), 0o600); err != nil {
		t.Fatal(err)
	}
	vm := machine(t, qemutest.Config{
		Kernel: filepath.Join(out, RamdiskKernel), Initrd: boot, Cmdline: "console=ttyS0,115200 panic=10 quiet loglevel=4 test.crash",
		NICs: []qemutest.NIC{{Netdev: user}}, Watchdog: true, NoReboot: true,
	})
	wait(t, vm, up, 15*time.Second)
	wants(t, vm, "role ramdisk", "bc-init: early: ok", "bc-init: modules: ok", "bc-init: watchdog: ok", "bc-init: network: ok", "bc-init: ready",
		`args ["ramdisk" "--boot" "/etc/bc/boot.json"`, "root folder drwxr-xr-x", `10.0.2.15/24`, `/etc/bc/boot.json: "{\"machine_id\":\"node_x\"}"`)
	// A service that ends is named, and started again.
	vm.Mark()
	wait(t, vm, "bc-init: bcd: failed: ended with exit code 7", 10*time.Second)
	vm.Mark()
	wait(t, vm, up, 15*time.Second)
	if strings.Contains(vm.Serial(), "failed: load module") {
		t.Errorf("a module failed:\n%s", vm.Tail(80))
	}
}

// TestRescue gets a shell by the word of the rescue entry, and no agent with it.
// From there PID 1 is frozen: the watchdog restarts the machine.
func TestRescue(t *testing.T) {
	t.Parallel()
	out := images(t)
	qemutest.Need(t, false)
	vm := machine(t, qemutest.Config{
		Kernel: filepath.Join(out, RamdiskKernel), Initrd: filepath.Join(out, RamdiskInitrd),
		Cmdline: "console=ttyS0,115200 panic=10 quiet loglevel=4 bc.rescue", NICs: []qemutest.NIC{{Netdev: user}}, Watchdog: true, NoReboot: true,
	})
	wait(t, vm, "bc-init: rescue: shell on the consoles", 15*time.Second)
	vm.Mark()
	if err := vm.Send("echo shell-$((40+2))-$(cat /etc/bc/role)\n"); err != nil {
		t.Fatal(err)
	}
	wait(t, vm, "shell-42-ramdisk", 15*time.Second)
	if strings.Contains(vm.Serial(), "stand-in:") {
		t.Error("the agent was started too")
	}
	const hang = "/sys/fs/cgroup/hang"
	if err := vm.Send("mkdir " + hang + "\necho 1 > " + hang + "/cgroup.procs\necho 1 > " + hang + "/cgroup.freeze\n"); err != nil {
		t.Fatal(err)
	}
	if _, err := vm.WaitEvent(t.Context(), "WATCHDOG", 90*time.Second); err != nil {
		t.Errorf("%v\n%s", err, vm.Tail(20))
	}
}

// disk makes a box's disk of the image with configuration, of size MiB.
func disk(t *testing.T, out, config string, mib int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "box.img")
	if err := customize.Image(filepath.Join(out, SiteImage), path, []byte(config), time.Unix(1767225600, 0)); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, mib<<20); err != nil {
		t.Fatal(err)
	}
	return path
}

func box(t *testing.T, path, vars string, extra ...string) *qemutest.VM {
	return machine(t, qemutest.Config{
		UEFI: true, Vars: vars, Disks: []qemutest.Disk{{Path: path, Serial: "BOX", BootIndex: 1}},
		NICs: []qemutest.NIC{{Netdev: user, MAC: "52:54:00:00:00:01", ROM: "none"}, {Netdev: user, MAC: "52:54:00:00:00:02", ROM: "none"}}, Watchdog: true, VGA: true, Extra: extra,
	})
}

const boxConfig = `join = "bc1.AAAAAAAAAAAAAAAAAAAAAAAA"

[uplink]
mac = "52:54:00:00:00:01"

[[lan]]
mac = "52:54:00:00:00:02"
address = "10.77.0.1/24"
`

// TestBootBox boots the box's disk three times under UEFI: data is made at the
// first start and kept; a bad configuration is named and the last good one is
// used; a data partition whose making was cut off is made again.
func TestBootBox(t *testing.T) {
	out := images(t)
	qemutest.Need(t, true)
	path := disk(t, out, boxConfig, 2048)
	vars := filepath.Join(t.TempDir(), "vars.fd")

	vm := box(t, path, vars)
	wait(t, vm, up, 60*time.Second)
	wants(t, vm, "role site", "bc-init: data: making partition 4", "bc-init: data: ok", "bc-init: config: ok", "bc-init: network: ok", "bc-init: ready",
		`args ["site" "--config" "/run/bc/site.toml" "--state" "/data/bcd"`, `"--plugins" "/usr/lib/bcx"`, `"--identity" "/dev/vda3"]`, "start 1 on this disk: <nil>",
		"10.77.0.1/24", "10.0.2.15/24", "bc1.AAAA", "ipmitool version 1.8", "ipxe/snponly.efi", "ramdisk/vmlinuz", "the screen shows the boot: true")
	powerOff(t, vm)
	if !strings.Contains(vm.Serial(), "stand-in: asked to end") {
		t.Errorf("the agent was not asked to end:\n%s", vm.Tail(30))
	}

	// Somebody edits the file and makes a mistake.
	bad := filepath.Join(t.TempDir(), "bad.img")
	if err := customize.Image(path, bad, []byte(strings.Replace(boxConfig, "address", "adress", 1)), time.Unix(1767225600, 0)); err != nil {
		t.Fatal(err)
	}
	vm = box(t, bad, vars)
	wait(t, vm, up, 60*time.Second)
	wants(t, vm, `bc-init: config: failed: site.toml:8: unknown key "lan.adress"; going on with the last good configuration`, "start 2 on this disk: <nil>", "bc1.AAAA", "bc-init: ready")
	if strings.Contains(vm.Serial(), "making partition") {
		t.Error("data was made twice")
	}
	powerOff(t, vm)
}

func powerOff(t *testing.T, vm *qemutest.VM) {
	t.Helper()
	if err := vm.PowerDown(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	if err := vm.Wait(ctx); err != nil {
		t.Errorf("the power button did not turn the machine off: %v\n%s", err, vm.Tail(30))
	}
}

// TestBootTwin boots a box beside a second disk of the same image: it must not
// guess whose data it is to take, says so in one line, and serves on.
func TestBootTwin(t *testing.T) {
	out := images(t)
	qemutest.Need(t, true)
	path := disk(t, out, boxConfig, 2048)
	twin := filepath.Join(t.TempDir(), "twin.img")
	if err := customize.Image(path, twin, []byte(boxConfig), time.Unix(1767225600, 0)); err != nil {
		t.Fatal(err)
	}
	vm := machine(t, qemutest.Config{UEFI: true, Disks: []qemutest.Disk{{Path: path, BootIndex: 1}, {Path: twin}}, NICs: []qemutest.NIC{{Netdev: user, ROM: "none"}}})
	wait(t, vm, up, 90*time.Second)
	once(t, vm, "data: failed: disk is ambiguous: vda and vdb")
	wants(t, vm, `/run/bc/problems: "data: disk is ambiguous: vda and vdb`, `"--state" ""`, "bc-init: network: ok", "bc-init: ready")
}

// TestBootNode boots the node's image as a deployment leaves it, with a seed.
func TestBootNode(t *testing.T) {
	out := images(t)
	qemutest.Need(t, true)
	path := filepath.Join(t.TempDir(), "node.img")
	unpack(t, filepath.Join(out, NodeImage), path)
	if err := os.Truncate(path, 1<<30); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	tab, err := gpt.Read(f, 1<<30, layout.Sector)
	if err == nil {
		err = tab.Grow(1 << 30)
	}
	if err != nil {
		t.Fatal(err)
	}
	first, _, _ := tab.Free(0)
	size := int64(64 << 20)
	if _, err := tab.Add(gpt.Partition{Type: layout.TypeBasic, ID: layout.Site().ID, First: first, Last: first + uint64(size)/layout.Sector - 1, Name: layout.SeedLabel}); err != nil {
		t.Fatal(err)
	}
	if err := tab.Write(f); err != nil {
		t.Fatal(err)
	}
	user := `{"hostname":"rack1-m7","ssh_authorized_keys":["ssh-ed25519 AAAA x"],"write_files":[{"path":"/etc/bcd/join","permissions":"0600","content":"bc1.node"},{"path":"/etc/bcd/config.toml","content":"join_file = \"/etc/bcd/join\"\n"}]}`
	err = fat.Create(f, fat.Spec{Start: int64(first) * layout.Sector, Size: size, Label: layout.SeedLabel, Time: time.Unix(1767225600, 0), Files: []fat.File{
		{Path: "meta-data", Content: []byte("instance-id: i1\n")}, {Path: "user-data", Content: []byte("#cloud-config\n" + user)},
	}})
	if err != nil {
		t.Fatal(err)
	}
	vm := machine(t, qemutest.Config{UEFI: true, Disks: []qemutest.Disk{{Path: path, Bus: "sata", BootIndex: 1}}, NICs: []qemutest.NIC{{Netdev: "user", ROM: "none"}}})
	wait(t, vm, up, 60*time.Second)
	wants(t, vm, "role node", "bc-init: data: ok", "bc-init: seed: ok", "bc-init: ready", "host name rack1-m7", `/etc/bcd/join: "bc1.node"`,
		`args ["node" "--config" "/etc/bcd/config.toml" "--state" "/data/bcd"]`, "start 1 on this disk: <nil>")
}

func unpack(t *testing.T, from, to string) {
	t.Helper()
	in, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	dec, err := zstd.NewReader(in)
	if err != nil {
		t.Fatal(err)
	}
	defer dec.Close()
	out, err := os.Create(to)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	if _, err := dec.WriteTo(out); err != nil {
		t.Fatal(fmt.Errorf("unpack %s: %w", from, err))
	}
}
