package qemutest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

const greeting = "hello from the boot sector"

// bootSector is a BIOS boot sector that writes greeting to the first serial port and halts.
func bootSector() []byte {
	code := []byte{
		0xfa,       // cli
		0x31, 0xc0, // xor ax, ax
		0x8e, 0xd8, // mov ds, ax
		0xbe, 0x20, 0x7c, // mov si, 0x7c20
		0xba, 0xf8, 0x03, // mov dx, 0x3f8
		0xac,       // next: lodsb
		0x84, 0xc0, // test al, al
		0x74, 0x03, // jz halt
		0xee,       // out dx, al
		0xeb, 0xf8, // jmp next
		0xf4,       // halt: hlt
		0xeb, 0xfd, // jmp halt
	}
	sector := make([]byte, 1<<20)
	copy(sector, code)
	copy(sector[0x20:], greeting+"\r\n\x00")
	sector[510], sector[511] = 0x55, 0xaa
	return sector
}

func bootDisk(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "boot,disk.img")
	if err := os.WriteFile(path, bootSector(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestDiskBootResetAndEnd(t *testing.T) {
	Need(t, false)
	ctx := t.Context()
	var console bytes.Buffer
	vm, err := Start(ctx, Config{
		Name: "sector", Dir: t.TempDir(), MemoryMiB: 128, UUID: "5c1f3c5e-0001-4000-8000-00000000000a",
		Disks:   []Disk{{Path: bootDisk(t), Serial: "BOOT0001", BootIndex: 1}},
		NICs:    []NIC{{Netdev: "user", MAC: "52:54:00:00:00:01", ROM: "none"}},
		Console: &console, VGA: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer vm.Close()
	if err := vm.WaitMarker(ctx, greeting, 5*time.Second); err != nil {
		t.Fatal(err)
	}

	vm.Mark()
	if _, found := vm.serial.find(greeting); found {
		t.Error("the marker of the first boot is seen after Mark")
	}
	if err := vm.Reset(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := vm.WaitEvent(ctx, "RESET", time.Second); err != nil {
		t.Error(err)
	}
	if err := vm.WaitMarker(ctx, greeting, 5*time.Second); err != nil {
		t.Fatal("after the reset:", err)
	}
	if got := strings.Count(vm.Serial(), greeting); got != 2 {
		t.Errorf("the serial line has %d greetings, want 2", got)
	}

	out, err := vm.QMP(ctx, "query-uuid", nil)
	var uuid struct{ UUID string }
	if err != nil || json.Unmarshal(out, &uuid) != nil || uuid.UUID != "5c1f3c5e-0001-4000-8000-00000000000a" {
		t.Errorf("query-uuid = %s, %v", out, err)
	}
	out, err = vm.QMP(ctx, "qom-get", map[string]any{"path": "/machine/peripheral/disk0", "property": "serial"})
	if err != nil || string(out) != `"BOOT0001"` {
		t.Errorf("disk0's serial = %s, %v, want BOOT0001", out, err)
	}
	if _, err := vm.QMP(ctx, "no-such-command", nil); err == nil || !strings.Contains(err.Error(), "CommandNotFound") {
		t.Errorf("no-such-command = %v, want CommandNotFound", err)
	}
	screen := filepath.Join(t.TempDir(), "screen.png")
	if err := vm.Screen(ctx, screen); err != nil {
		t.Error(err)
	} else if png, err := os.ReadFile(screen); err != nil || !bytes.HasPrefix(png, []byte("\x89PNG")) {
		t.Errorf("the screen is no PNG: %v", err)
	}

	if err := vm.PowerDown(ctx); err != nil {
		t.Error(err)
	}
	if _, err := vm.WaitEvent(ctx, "POWERDOWN", time.Second); err != nil {
		t.Error(err)
	}
	if !vm.Running() {
		t.Error("Running() = false before Close")
	}
	if err := vm.Close(); err != nil {
		t.Errorf("Close() = %v", err)
	}
	if vm.Running() {
		t.Error("Running() = true after Close")
	}
	if _, err := vm.QMP(ctx, "query-status", nil); err == nil {
		t.Error("QMP works after the end")
	}
	if !bytes.Contains(console.Bytes(), []byte(greeting)) {
		t.Error("the console lacks the greeting")
	}
	if log, err := os.ReadFile(filepath.Join(vm.dir, "serial.log")); err != nil || !bytes.Contains(log, []byte(greeting)) {
		t.Errorf("serial.log lacks the greeting: %v", err)
	}
}

func TestWaitMarkerFails(t *testing.T) {
	Need(t, false)
	vm, err := Start(t.Context(), Config{Dir: t.TempDir(), MemoryMiB: 128, Disks: []Disk{{Path: bootDisk(t), BootIndex: 1, Snapshot: true}}})
	if err != nil {
		t.Fatal(err)
	}
	defer vm.Close()
	if err := vm.WaitMarker(t.Context(), greeting, 5*time.Second); err != nil {
		t.Fatal(err)
	}
	err = vm.WaitMarker(t.Context(), "never said", 20*time.Millisecond)
	if err == nil || !strings.Contains(err.Error(), "100ms") || !strings.Contains(err.Error(), greeting) {
		t.Errorf("WaitMarker(never said) = %v, want the limit and the last lines", err)
	}
	time.AfterFunc(50*time.Millisecond, vm.Kill)
	if err := vm.WaitMarker(t.Context(), "never said", time.Minute); err == nil || !strings.Contains(err.Error(), "ended before") {
		t.Errorf("WaitMarker of a killed machine = %v, want that it ended", err)
	}
	if err := vm.Wait(t.Context()); err != nil {
		t.Errorf("Wait after Kill = %v", err)
	}
}

func TestContextEndsMachine(t *testing.T) {
	Need(t, false)
	ctx, cancel := context.WithCancel(t.Context())
	vm, err := Start(ctx, Config{Dir: t.TempDir(), MemoryMiB: 128})
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := vm.Wait(t.Context()); err != nil {
		t.Errorf("Wait() = %v", err)
	}
}

func TestNetns(t *testing.T) {
	Need(t, false)
	if os.Getuid() != 0 {
		t.Skip("needs root: makes a network namespace")
	}
	name := fmt.Sprintf("qemutest%d", os.Getpid())
	if out, err := exec.Command("/usr/sbin/ip", "netns", "add", name).CombinedOutput(); err != nil {
		t.Skipf("needs root: ip netns add: %v: %s", err, out)
	}
	defer exec.Command("/usr/sbin/ip", "netns", "delete", name).Run()
	path := "/run/netns/" + name
	vm, err := Start(t.Context(), Config{Dir: t.TempDir(), MemoryMiB: 64, Netns: path})
	if err != nil {
		t.Fatal(err)
	}
	defer vm.Close()
	want, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	got, err := os.Stat(fmt.Sprintf("/proc/%d/ns/net", vm.PID()))
	if err != nil || !os.SameFile(got, want) {
		t.Errorf("QEMU is not in %s: %v", path, err)
	}
	if comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", vm.PID())); err != nil || !bytes.HasPrefix(comm, []byte("qemu")) {
		t.Errorf("PID() is %q, %v, want QEMU itself", comm, err)
	}
}

func TestUEFI(t *testing.T) {
	Need(t, true)
	dir := t.TempDir()
	vm, err := Start(t.Context(), Config{Dir: dir, UEFI: true, MemoryMiB: 256})
	if err != nil {
		t.Fatal(err)
	}
	defer vm.Close()
	if err := vm.WaitMarker(t.Context(), "BdsDxe", 12*time.Second); err != nil {
		t.Fatal(err)
	}
	if err := vm.Close(); err != nil {
		t.Error(err)
	}
	if st, err := os.Stat(filepath.Join(dir, "vars.fd")); err != nil || st.Size() == 0 {
		t.Errorf("vars.fd: %v", err)
	}
}

func TestStartRefusals(t *testing.T) {
	Need(t, false)
	for name, tt := range map[string]struct {
		cfg  Config
		want string
	}{
		"missing disk":  {Config{Disks: []Disk{{Path: "/no/such.img"}}}, "QEMU says"},
		"bad bus":       {Config{Disks: []Disk{{Path: "x", Bus: "floppy"}}}, "want virtio, nvme"},
		"long serial":   {Config{Disks: []Disk{{Path: "x", Serial: strings.Repeat("s", 21)}}}, "over 20 bytes"},
		"no netdev":     {Config{NICs: []NIC{{}}}, "netdev is missing"},
		"accelerator":   {Config{Accel: "magic"}, "want tcg or kvm"},
		"folder absent": {Config{Dir: "/no/such/dir"}, "serial.log"},
	} {
		if tt.cfg.Dir == "" {
			tt.cfg.Dir = t.TempDir()
		}
		vm, err := Start(t.Context(), tt.cfg)
		if err == nil {
			vm.Close()
		}
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: Start() = %v, want %q", name, err, tt.want)
		}
	}
}

func TestArgs(t *testing.T) {
	args, err := Args(Config{
		Kernel: "k", Initrd: "i", Cmdline: "console=ttyS0", Watchdog: true, NoReboot: true, SMBIOSSerial: "a,b",
		Disks: []Disk{{Path: "a,b"}, {Path: "c", Bus: "nvme", Serial: "N"}, {Path: "d", Bus: "sata"}, {Path: "e", Bus: "sata"}, {Path: "f", Bus: "scsi", BootIndex: 2}},
		NICs:  []NIC{{Netdev: "tap,ifname=t0,script=no", MAC: "52:54:00:00:00:02", ROM: "/r.rom", BootIndex: 1}, {Netdev: "user", Model: "e1000", ROM: "none"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"type=1,serial=a,,b",
		"if=none,id=drive0,format=raw,discard=unmap,file=a,,b",
		"virtio-blk-pci,id=disk0,drive=drive0",
		"nvme,id=disk1,drive=drive1,serial=N",
		"ide-hd,bus=ide.0,id=disk2,drive=drive2",
		"ide-hd,bus=ide.1,id=disk3,drive=drive3",
		"scsi-hd,bus=scsi0.0,id=disk4,drive=drive4,bootindex=2",
		"tap,id=net0,ifname=t0,script=no",
		"virtio-net-pci,id=nic0,netdev=net0,mac=52:54:00:00:00:02,romfile=/r.rom,bootindex=1",
		"user,id=net1",
		"e1000,id=nic1,netdev=net1,romfile=",
		"-no-reboot", "i6300esb", "console=ttyS0",
	} {
		if !slices.Contains(args, want) {
			t.Errorf("Args() lacks %q: %q", want, args)
		}
	}
}

func TestArgsSecureBoot(t *testing.T) {
	args, err := Args(Config{UEFI: true, SecureBoot: "microsoft", Vars: "v"})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"q35,graphics=off,smm=on", "driver=cfi.pflash01,property=secure,value=on", "if=pflash,format=raw,unit=0,readonly=on,file=" + secureCodePath} {
		if !slices.Contains(args, want) {
			t.Errorf("Args() lacks %q: %q", want, args)
		}
	}
	if got := (Config{SecureBoot: "snakeoil"}).template(); got != secureVars["snakeoil"] {
		t.Errorf("template() = %q, want %q", got, secureVars["snakeoil"])
	}
	for _, cfg := range []Config{{SecureBoot: "microsoft"}, {UEFI: true, SecureBoot: "mine"}} {
		if _, err := Args(cfg); err == nil {
			t.Errorf("Args(%+v) is no error", cfg)
		}
	}
}

func TestArgsARM64(t *testing.T) {
	args, err := Args(Config{ARM64: true, UEFI: true, Vars: "v", NICs: []NIC{{Netdev: "user", ROM: "none"}}})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"virt", "max,pauth-impdef=on", "if=pflash,format=raw,unit=0,readonly=on,file=" + codeARM64Path, "virtio-net-pci,id=nic0,netdev=net0,romfile="} {
		if !slices.Contains(args, want) {
			t.Errorf("Args() lacks %q: %q", want, args)
		}
	}
	for _, cfg := range []Config{{}, {UEFI: true, VGA: true}, {UEFI: true, SecureBoot: "microsoft"}, {UEFI: true, Disks: []Disk{{Path: "d", Bus: "sata"}}}} {
		cfg.ARM64 = true
		if _, err := Args(cfg); err == nil {
			t.Errorf("Args(%+v) is no error", cfg)
		}
	}
}

func TestOverlay(t *testing.T) {
	if _, err := os.Stat(qemuImgPath); err != nil {
		t.Skip("needs QEMU: package qemu-utils is not there")
	}
	base := bootDisk(t)
	dst := filepath.Join(t.TempDir(), "over.qcow2")
	if err := Overlay(t.Context(), dst, base, 8<<20); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(qemuImgPath, "info", "--output=json", dst).Output()
	if err != nil || !bytes.Contains(out, []byte(`"virtual-size": 8388608`)) {
		t.Errorf("qemu-img info = %s, %v", out, err)
	}
	if err := Overlay(t.Context(), dst, "/no/such.img", 0); err == nil {
		t.Error("an overlay of nothing was made")
	}
}

func TestPlain(t *testing.T) {
	in := "\x1b[2J\x1b[01;01Hone\r\n\x1b[=3htwo\x07\n\x1b[0m"
	if got, want := Plain(in), "one\ntwo\n"; got != want {
		t.Errorf("Plain(%q) = %q, want %q", in, got, want)
	}
}

func TestSerialLogKeepsTheEnd(t *testing.T) {
	file, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	s := newSerialLog(file, nil)
	s.drain(io.MultiReader(strings.NewReader(strings.Repeat("x", keepSerial)), strings.NewReader("first end")))
	if got := s.text(); len(got) > keepSerial || !strings.HasSuffix(got, "first end") {
		t.Errorf("%d bytes are kept, want at most %d and the newest", len(got), keepSerial)
	}
	s.mark()
	s.drain(strings.NewReader("second end"))
	if _, found := s.find("first end"); found {
		t.Error("find sees what came before mark")
	}
	if _, found := s.find("second end"); !found {
		t.Error("find misses what came after mark")
	}
}

// A killed owner must not leave its machine behind.
func TestMachineDiesWithItsOwner(t *testing.T) {
	Need(t, false)
	cmd := exec.Command(os.Args[0], "-test.run=^TestHelperOwner$")
	cmd.Env = append(os.Environ(), "QEMUTEST_OWNER="+t.TempDir())
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var word string
	var pid int
	if _, err := fmt.Fscan(out, &word, &pid); err != nil || word != "pid" {
		cmd.Process.Kill()
		t.Fatalf("the owner said %q %d, %v", word, pid, err)
	}
	if err := syscall.Kill(pid, 0); err != nil {
		t.Errorf("the machine does not run: %v", err)
	}
	cmd.Process.Kill()
	cmd.Wait()
	for range 100 {
		stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
		if err != nil || bytes.Contains(stat, []byte(") Z ")) {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Errorf("process %d outlives its owner", pid)
}

func TestHelperOwner(t *testing.T) {
	dir := os.Getenv("QEMUTEST_OWNER")
	if dir == "" {
		return // only a part of TestMachineDiesWithItsOwner
	}
	vm, err := Start(context.Background(), Config{Dir: dir, MemoryMiB: 64})
	if err != nil {
		t.Fatal(err)
	}
	fmt.Printf("pid %d\n", vm.PID())
	select {}
}
