package boxtest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/image/builder"
	"github.com/better-compute/site-appliance/image/customize"
	"github.com/better-compute/site-appliance/image/qemutest"
	"github.com/better-compute/site-appliance/image/uki"
	"github.com/better-compute/site-appliance/initramfs/archive"
)

const (
	imageDir = "../../out/qemu-amd64"
	marker   = "boxtest: "
)

// build compiles a program as the image's are.
func build(t *testing.T, pkg, goarch string) []byte {
	t.Helper()
	out := filepath.Join(t.TempDir(), "program")
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", out, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+goarch)
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", pkg, err, text)
	}
	content, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

// boot starts the box's kernel and initramfs, taken from its UKI, with the probe
// in the agent's place and the box's disk behind it.
func boot(t *testing.T) *qemutest.VM {
	t.Helper()
	image, err := os.ReadFile(filepath.Join(imageDir, builder.SiteEFI))
	if err != nil {
		t.Skipf("needs the box's image (make image): %v", err)
	}
	qemutest.Need(t, false)
	dir := t.TempDir()
	extra := archive.New()
	extra.File("bin/bcd", build(t, "./probe", "amd64"), 0o755)
	extra.File("usr/lib/boxtest/foreign", build(t, "./foreign", "386"), 0o755)
	cpio, err := extra.Cpio()
	if err != nil {
		t.Fatal(err)
	}
	for section, file := range map[string]string{".linux": "vmlinuz", ".initrd": "initrd"} {
		data, err := uki.Section(image, section)
		if err != nil {
			t.Fatal(err)
		}
		if section == ".initrd" {
			// The kernel unpacks one archive after the other; the later file wins.
			data = append(append(data[:len(data):len(data)], make([]byte, (4-len(data)%4)%4)...), cpio...)
		}
		if err := os.WriteFile(filepath.Join(dir, file), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	disk := filepath.Join(dir, "box.img")
	if err := customize.Image(filepath.Join(imageDir, builder.SiteImage), disk, []byte("# a box that nobody has configured\n"), time.Unix(1767225600, 0)); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(disk, 2<<30); err != nil {
		t.Fatal(err)
	}
	vm, err := qemutest.Start(t.Context(), qemutest.Config{
		Dir: dir, MemoryMiB: 1536, NoReboot: true,
		Kernel: filepath.Join(dir, "vmlinuz"), Initrd: filepath.Join(dir, "initrd"), Cmdline: "console=ttyS0,115200 panic=10 quiet loglevel=4",
		Disks: []qemutest.Disk{{Path: disk, Serial: "BOX"}}, NICs: []qemutest.NIC{{Netdev: "user"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		vm.Kill()
		_ = vm.Close()
	})
	return vm
}

// TestSandboxInTheBox boots the image once; each check is a test of its own.
func TestSandboxInTheBox(t *testing.T) {
	vm := boot(t)
	if err := vm.WaitMarker(t.Context(), marker+"done", 60*time.Second); err != nil {
		t.Fatalf("%v\n%s", err, vm.Tail(80))
	}
	results := map[string]string{}
	for line := range strings.Lines(qemutest.Plain(vm.Serial())) {
		_, text, found := strings.Cut(strings.TrimSpace(line), marker)
		if !found {
			continue
		}
		t.Log(text)
		if name, ok := strings.CutPrefix(text, "ok "); ok {
			results[name] = ""
		} else if text, ok := strings.CutPrefix(text, "FAIL "); ok {
			name, why, _ := strings.Cut(text, ": ")
			results[name] = why
		}
	}
	for _, name := range []string{
		"the host starts",
		"the agent moves out of the plugins' way",
		"the confined plugin runs the verified file",
		"each denied call is EPERM, and not without the filter",
		"clone with a namespace is EPERM, and not without the filter",
		"clone3 is ENOSYS, and not without the filter",
		"a 386 binary is killed, and not without the filter",
		"data and config are walled off, and not without the wall",
		"ipmitool reads a password from its pipe, and from no other file",
		"memory_max is enforced and named",
		"pids_max is enforced and named",
		"nothing is left at the end",
	} {
		t.Run(name, func(t *testing.T) {
			if why, ran := results[name]; !ran || why != "" {
				t.Errorf("ran %v: %s", ran, why)
			}
		})
	}
	if t.Failed() {
		t.Logf("the console ends:\n%s", vm.Tail(60))
	}
}
