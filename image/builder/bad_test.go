package builder

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/image/customize"
	"github.com/better-compute/site-appliance/image/fat"
	"github.com/better-compute/site-appliance/image/gpt"
	"github.com/better-compute/site-appliance/image/layout"
	"github.com/better-compute/site-appliance/image/qemutest"
	"github.com/better-compute/site-appliance/image/uki"
)

// direct starts a box's kernel and initramfs without firmware: faster, and
// possible without a disk.
func direct(t *testing.T, out, words string, cfg qemutest.Config) *qemutest.VM {
	t.Helper()
	image, err := os.ReadFile(filepath.Join(out, SiteEFI))
	if err != nil {
		t.Fatal(err)
	}
	initrd, err := uki.Section(image, ".initrd")
	if err != nil {
		t.Fatal(err)
	}
	cfg.Dir = t.TempDir()
	cfg.Kernel, cfg.Initrd = filepath.Join(out, RamdiskKernel), filepath.Join(cfg.Dir, "initrd")
	if err := os.WriteFile(cfg.Initrd, initrd, 0o600); err != nil {
		t.Fatal(err)
	}
	cfg.Cmdline = "console=tty1 console=ttyS0,115200 panic=10 random.trust_cpu=on quiet loglevel=4 " + words
	cfg.NoReboot = true
	return machine(t, cfg)
}

// dataDisk is a box's disk whose data partition has a file system with what
// folder holds, as an earlier start would have left it.
func dataDisk(t *testing.T, out, config, folder string) (path string, start int64) {
	t.Helper()
	const size = 192 << 20
	path = disk(t, out, config, layout.Site().Size>>20+size>>20)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	tab, err := gpt.Read(f, uint64(st.Size()), layout.Sector)
	if err == nil {
		err = tab.Grow(uint64(st.Size()))
	}
	if err != nil {
		t.Fatal(err)
	}
	first, last, ok := tab.Free(0)
	if !ok {
		t.Fatal("no room")
	}
	if _, err := tab.Add(gpt.Partition{Type: layout.TypeLinux, ID: layout.Node().ID, First: first, Last: last, Name: layout.DataName}); err != nil {
		t.Fatal(err)
	}
	if err := tab.Write(f); err != nil {
		t.Fatal(err)
	}
	start = int64(first) * layout.Sector
	blocks := strconv.Itoa(int(last-first+1) * layout.Sector / 4096)
	// Two groups of blocks: the second holds a spare superblock.
	run(t, "/usr/sbin/mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", "-m", "1", "-L", layout.DataName, "-d", folder,
		"-E", fmt.Sprintf("offset=%d", start), path, blocks)
	return path, start
}

func run(t *testing.T, argv ...string) string {
	t.Helper()
	text, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(argv, " "), err, text)
	}
	return string(text)
}

// write overwrites bytes of a disk.
func write(t *testing.T, path string, at int64, data []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(data, at); err != nil {
		t.Fatal(err)
	}
}

// bare empties the configuration's partition.
func bare(t *testing.T, path string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	p, _ := layout.Site().Partition(layout.ConfigName)
	if err := fat.Wipe(f, p.Start, p.Size); err != nil {
		t.Fatal(err)
	}
	if err := fat.Create(f, fat.Spec{Start: p.Start, Size: p.Size, Label: layout.ConfigLabel, Time: time.Unix(1767225600, 0)}); err != nil {
		t.Fatal(err)
	}
}

// once checks that the console shows a line one time.
func once(t *testing.T, vm *qemutest.VM, part string) {
	t.Helper()
	n := 0
	for line := range strings.Lines(qemutest.Plain(vm.Serial())) {
		if strings.HasPrefix(line, "bc-init:") && strings.Contains(line, part) {
			n++
		}
	}
	if n != 1 {
		t.Errorf("the console shows %q %d times, want once\n%s", part, n, vm.Tail(80))
	}
}

// TestBadThings boots boxes on what goes wrong at a site. Each fault is one
// line on the console and in the list that bcd sends home, and the box serves.
func TestBadThings(t *testing.T) {
	out := images(t)
	qemutest.Need(t, false)
	user := []qemutest.NIC{{Netdev: user, MAC: "52:54:00:00:00:01", ROM: "none"}, {Netdev: user, MAC: "52:54:00:00:00:02", ROM: "none"}}

	// The data partition's first superblock is gone, site.toml too, the uplink's
	// cable is not in, and the agent crashes.
	t.Run("repaired data and no configuration", func(t *testing.T) {
		t.Parallel()
		folder := t.TempDir()
		if err := os.MkdirAll(filepath.Join(folder, "bcd"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(folder, "bcd", "count"), []byte("41"), 0o600); err != nil {
			t.Fatal(err)
		}
		path, start := dataDisk(t, out, boxConfig, folder)
		write(t, path, start+1024, make([]byte, 1024))
		bare(t, path)
		vm := direct(t, out, "test.crash", qemutest.Config{Disks: []qemutest.Disk{{Path: path}}, NICs: user[:1]})
		if _, err := vm.QMP(t.Context(), "set_link", map[string]any{"name": "nic0", "up": false}); err != nil {
			t.Fatal(err)
		}
		wait(t, vm, up, 60*time.Second)
		wants(t, vm, "start 42 on this disk: <nil>", "bc-init: ready")
		once(t, vm, "data: repaired /dev/vda4")
		once(t, vm, "config: failed: site.toml is missing: put it on the partition BCCONFIG of this box's disk, on any computer, and start the box again; going on with the defaults")
		once(t, vm, "network: eth0: no link")
		once(t, vm, "network: failed: no way out after 20s; going on, and still trying")
		if _, err := vm.QMP(t.Context(), "set_link", map[string]any{"name": "nic0", "up": true}); err != nil {
			t.Fatal(err)
		}
		wait(t, vm, "bc-init: network: eth0 has 10.0.2.15/24", 20*time.Second)
		wait(t, vm, "bc-init: bcd: failed: ended with exit code 7", 20*time.Second)
		vm.Mark()
		wait(t, vm, up, 20*time.Second)
		wants(t, vm, `bcd: ended with exit code 7\n`, `network: no way out after 20s`, `config: site.toml is missing`)
	})

	// site.toml is garbage and the last good one is used, which names a card that
	// is not there; not one more byte fits on the data partition.
	t.Run("full data and garbage", func(t *testing.T) {
		t.Parallel()
		folder := t.TempDir()
		for _, dir := range []string{"bcd", "bc-init"} {
			if err := os.MkdirAll(filepath.Join(folder, dir), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		last := boxConfig + "\n[[lan]]\nmac = \"52:54:00:00:00:77\"\naddress = \"10.78.0.1/24\"\n"
		if err := os.WriteFile(filepath.Join(folder, "bc-init", layout.ConfigFile), []byte(last), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(folder, "ballast"), bytes.Repeat([]byte{1}, freeBytes(t, out, folder)), 0o600); err != nil {
			t.Fatal(err)
		}
		path, _ := dataDisk(t, out, "\x00\xff\x1b[[lan", folder)
		vm := direct(t, out, "", qemutest.Config{Disks: []qemutest.Disk{{Path: path}}, NICs: user})
		wait(t, vm, up, 60*time.Second)
		wants(t, vm, "10.77.0.1/24", "10.0.2.15/24", "bc1.AAAA", "bc-init: network: ok", "bc-init: ready", `"--state" "/data/bcd"`)
		once(t, vm, "data: failed: the data partition is full: under 2 % of")
		once(t, vm, "config: failed: site.toml:1: ")
		once(t, vm, "going on with the last good configuration")
		once(t, vm, "network: lan 2: no interface has MAC 52:54:00:00:00:77")
		wants(t, vm, `/run/bc/problems: "data: the data partition is full`, `network: lan 2: no interface has MAC 52:54:00:00:00:77\n"`)
		if n := strings.Count(qemutest.Plain(vm.Serial()), ": failed:"); n != 2 {
			t.Errorf("%d steps failed, want data and config alone\n%s", n, vm.Tail(80))
		}
	})

	// The configuration's partition cannot be read, until somebody mends it.
	t.Run("unreadable configuration", func(t *testing.T) {
		t.Parallel()
		path, _ := dataDisk(t, out, boxConfig, t.TempDir())
		p, _ := layout.Site().Partition(layout.ConfigName)
		write(t, path, p.Start, bytes.Repeat([]byte{0xa5}, 1<<20))
		vm := direct(t, out, "", qemutest.Config{Disks: []qemutest.Disk{{Path: path}}, NICs: user[:1]})
		wait(t, vm, up, 60*time.Second)
		wants(t, vm, "bc-init: data: ok", "bc-init: network: ok", "bc-init: ready", `/run/bc/problems: "config: partition BCCONFIG (/dev/vda2) cannot be read`)
		once(t, vm, "config: failed: partition BCCONFIG (/dev/vda2) cannot be read (invalid argument): format it as FAT and put site.toml on it; going on with the defaults")
		vm.Kill()
		if err := vm.Wait(t.Context()); err != nil {
			t.Error(err)
		}
		mended := filepath.Join(t.TempDir(), "mended.img")
		if err := customize.Image(path, mended, []byte(boxConfig), time.Unix(1767225600, 0)); err != nil {
			t.Fatal(err)
		}
		vm = direct(t, out, "", qemutest.Config{Disks: []qemutest.Disk{{Path: mended}}, NICs: user})
		wait(t, vm, up, 60*time.Second)
		wants(t, vm, "bc-init: config: ok", "bc1.AAAA", "10.77.0.1/24")
	})

	// There is no disk, then there is one whose data is beyond repair.
	t.Run("late disk and ruined data", func(t *testing.T) {
		t.Parallel()
		path, start := dataDisk(t, out, boxConfig, t.TempDir())
		write(t, path, start, bytes.Repeat([]byte("ruined"), 22<<20))
		vm := direct(t, out, "", qemutest.Config{NICs: user, Extra: []string{
			"-device", "pcie-root-port,id=hotplug1,chassis=9", "-drive", "if=none,id=late,format=raw,file=" + path}})
		wait(t, vm, up, 90*time.Second)
		wants(t, vm, `"--state" ""`, "bc-init: network: ok", "bc-init: ready")
		once(t, vm, `data: failed: disk is missing: no disk has a partition "bcconfig"; disks: none; going on without a data partition`)
		once(t, vm, "config: failed: no disk to read site.toml from; going on with the defaults")
		vm.Mark()
		if _, err := vm.QMP(t.Context(), "device_add", map[string]any{"driver": "virtio-blk-pci", "drive": "late", "id": "disk0", "bus": "hotplug1"}); err != nil {
			t.Fatal(err)
		}
		wait(t, vm, "bc-init: data: the disk is there now: starting over", 30*time.Second)
		wait(t, vm, up, 30*time.Second)
		wants(t, vm, "stand-in: asked to end", "cannot be repaired and is left as it is", "going on without a data partition", "bc-init: config: ok", `"--state" ""`, `"--identity" "/dev/vda3"`, "10.77.0.1/24", "bc1.AAAA")
	})
}

// freeBytes is what fits into a data partition that holds folder already, up
// to one percent.
func freeBytes(t *testing.T, out, folder string) int {
	t.Helper()
	path, start := dataDisk(t, out, boxConfig, folder)
	part := filepath.Join(t.TempDir(), "data")
	in, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	to, err := os.Create(part)
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	if _, err := in.Seek(start, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := to.ReadFrom(in); err != nil {
		t.Fatal(err)
	}
	values := map[string]int{}
	for line := range strings.Lines(run(t, "/usr/sbin/dumpe2fs", "-h", part)) {
		k, v, _ := strings.Cut(line, ":")
		values[k], _ = strconv.Atoi(strings.TrimSpace(v))
	}
	free := values["Free blocks"] - values["Reserved block count"] - values["Block count"]/100
	if free <= 0 {
		t.Fatalf("dumpe2fs = %v", values)
	}
	return free * 4096
}
