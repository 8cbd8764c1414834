package instances

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/image/qemutest"
	"github.com/better-compute/site-appliance/initramfs/archive"
	"github.com/better-compute/site-appliance/plugins/host/hosttest"
)

const (
	imageDir = "../../../out/qemu-amd64"
	marker   = "instances: "
)

// Limits are the kernel's to enforce, and the image's kernel is one that does: it
// boots with a probe in the agent's place.
func TestLimitsInTheBox(t *testing.T) {
	// The machines' initramfs waits for no disk.
	initrd, err := os.ReadFile(filepath.Join(imageDir, "ramdisk/initrd"))
	if err != nil {
		t.Skipf("needs the box's image (make image): %v", err)
	}
	qemutest.Need(t, false)
	extra := archive.New()
	extra.File("bin/bcd", hosttest.Build(t, "./probe"), 0o755)
	cpio, err := extra.Cpio()
	if err != nil {
		t.Fatal(err)
	}
	// Archives lie one behind the other, each at a multiple of four.
	both := make([]byte, (len(initrd)+3)/4*4)
	copy(both, initrd)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "initrd"), append(both, cpio...), 0o600); err != nil {
		t.Fatal(err)
	}
	vm, err := qemutest.Start(t.Context(), qemutest.Config{
		Dir: dir, MemoryMiB: 1536, NoReboot: true, Kernel: filepath.Join(imageDir, "ramdisk/vmlinuz"), Initrd: filepath.Join(dir, "initrd"),
		Cmdline: "console=ttyS0,115200 panic=10 quiet loglevel=4", NICs: []qemutest.NIC{{Netdev: "user"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		vm.Kill()
		_ = vm.Close()
	})
	if err := vm.WaitMarker(t.Context(), marker+"done", 3*time.Minute); err != nil {
		t.Fatalf("%v\n%s", err, vm.Tail(80))
	}
	said := map[string]bool{}
	for line := range strings.Lines(qemutest.Plain(vm.Serial())) {
		if _, text, found := strings.Cut(strings.TrimSpace(line), marker); found {
			t.Log(text)
			said[text] = true
		}
	}
	for _, want := range []string{"memory_max_bytes is enforced and named", "pids_max is enforced", "cpu_max is set", "nothing is left"} {
		if !said["ok "+want] {
			t.Errorf("the probe does not say: %s", want)
		}
	}
}
