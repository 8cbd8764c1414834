package pxe

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/pxe/pxetest"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

const (
	qemuProgram  = "/usr/bin/qemu-system-x86_64"
	ovmfCode     = "/usr/share/OVMF/OVMF_CODE_4M.fd"
	ovmfVars     = "/usr/share/OVMF/OVMF_VARS_4M.fd"
	snponlyFile  = "/usr/lib/ipxe/snponly.efi"
	undionlyFile = "/usr/lib/ipxe/undionly.kpxe"
	// quiet is how long the slowest step takes on an idle machine without KVM.
	quiet = 60 * time.Second
)

// TestQEMUFirmware lets EDK2's own PXE and a BIOS option ROM boot from the box:
// the loader, the script, what it names; then a new assignment sends the
// machine, by its script, on to the firmware's next boot entry.
func TestQEMUFirmware(t *testing.T) {
	for _, name := range []string{qemuProgram, ovmfCode, ovmfVars, snponlyFile, undionlyFile, "/dev/net/tun"} {
		if _, err := os.Stat(name); err != nil {
			t.Skipf("needs QEMU: %v", err)
		}
	}
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir) // the kernel is noise: what counts is that it is asked for
	for name, from := range map[string]string{"ipxe/snponly.efi": snponlyFile, "ipxe/undionly.kpxe": undionlyFile} {
		copyFile(t, from, filepath.Join(dir, "netboot", name))
	}
	pxetest.Bridge(t, "br0", netip.MustParsePrefix(boxAddr+"/24"), "tap0")
	b := start(t, "br0", dir, func(c *Config) {
		// BIOS iPXE runs any noise as a boot sector: its boot is made to fail one step on.
		c.Boot = func(context.Context, *pxev1.Machine) ([]byte, error) { return nil, errors.New("refused by the test") }
	})

	vars := filepath.Join(dir, "vars.fd")
	copyFile(t, ovmfVars, vars)
	for _, tt := range []struct {
		name, mac string
		args      []string
		loader    string // the stage by which the loader came, empty for a ROM that is iPXE itself
		next      string // what the console says when the firmware goes on; EDK2 has its HTTP boot before the disk
	}{
		{"UEFI by EDK2 PXE", "52:54:00:00:01:01", []string{
			"-machine", "q35",
			"-drive", "if=pflash,format=raw,unit=0,readonly=on,file=" + ovmfCode,
			"-drive", "if=pflash,format=raw,unit=1,file=" + vars,
			"-fw_cfg", "name=opt/org.tianocore/IPv6PXESupport,string=n", // saves a minute of waiting for nobody
			// Without a ROM file the firmware's own PXE is used, not QEMU's iPXE.
			"-device", "virtio-net-pci,netdev=n0,mac=52:54:00:00:01:01,bootindex=1,romfile=",
		}, "Stage:tftp Client: IP:10.77.0.", ">>Start HTTP Boot over IPv4"},
		{"BIOS by QEMU's option ROM", "52:54:00:00:01:02", []string{
			"-machine", "q35,graphics=off",
			"-device", "virtio-net-pci,netdev=n0,mac=52:54:00:00:01:02,bootindex=1",
		}, "", "Booting from Hard Disk"},
	} {
		version := b.store.Version() + 1
		if _, err := b.store.Apply(&pxev1.AssignRequest{Version: version, Machines: []*pxev1.Machine{ramdisk(tt.mac)}}); err != nil {
			t.Fatal(err)
		}
		m := runQEMU(t, dir, tt.args)
		stage := func(what string) {
			t.Helper()
			b.wait(t, 5*quiet, "pxe.stage telemetry "+tt.mac+" {MAC:"+tt.mac+" MachineID:node_a "+what)
		}
		began := time.Now()
		stage("Stage:dhcp ")
		if tt.loader != "" {
			stage(tt.loader)
		}
		stage("Stage:script Client: IP: Detail:ramdisk")
		stage("Stage:kernel")
		t.Logf("%s: kernel asked for after %.0f s", tt.name, time.Since(began).Seconds())
		// The boot fails, and iPXE asks again: by then it has other orders.
		local := localDisk(tt.mac)
		local.MachineId = "node_a"
		if _, err := b.store.Apply(&pxev1.AssignRequest{Version: version + 1, Machines: []*pxev1.Machine{local}}); err != nil {
			t.Fatal(err)
		}
		stage("Stage:script Client: IP: Detail:local-disk")
		m.waitConsole(t, tt.next)
		m.stop()
	}
}

type machine struct {
	console string
	stop    func()
}

// runQEMU starts a machine on tap0 with a small disk behind the NIC in boot order.
func runQEMU(t *testing.T, dir string, args []string) *machine {
	t.Helper()
	esp := filepath.Join(t.TempDir(), "disk")
	if err := os.MkdirAll(filepath.Join(esp, "EFI/BOOT"), 0o755); err != nil {
		t.Fatal(err)
	}
	copyFile(t, snponlyFile, filepath.Join(esp, "EFI/BOOT/BOOTX64.EFI"))
	m := &machine{console: filepath.Join(t.TempDir(), "console")}
	cmd := exec.Command(qemuProgram, append([]string{
		"-accel", cmp.Or(os.Getenv("ACCEL"), "tcg"), "-m", "512", "-nodefaults", "-no-user-config", "-display", "none",
		"-serial", "file:" + m.console,
		"-netdev", "tap,id=n0,ifname=tap0,script=no,downscript=no",
		"-drive", "if=none,id=d0,format=raw,readonly=on,file=fat:" + esp,
		"-device", "virtio-blk-pci,drive=d0,bootindex=2",
		"-device", "virtio-rng-pci",
	}, args...)...)
	cmd.Dir = dir
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started, ended := make(chan error), make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // the death signal follows the thread
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	m.stop = func() { _ = cmd.Process.Kill(); <-ended }
	t.Cleanup(func() {
		m.stop()
		if t.Failed() {
			console, _ := os.ReadFile(m.console)
			t.Logf("QEMU said: %s\nconsole: %.20000q", out.String(), console)
		}
	})
	return m
}

func (m *machine) waitConsole(t *testing.T, want string) {
	t.Helper()
	for end := time.Now().Add(5 * quiet); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if b, _ := os.ReadFile(m.console); bytes.Contains(b, []byte(want)) {
			return
		}
	}
	t.Fatalf("the console does not say %q", want)
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, b, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}
