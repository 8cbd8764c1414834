// Package qemutest boots disk images and kernels in QEMU, follows their serial
// line and owns their QMP connection, so that tests and people see the same machine.
package qemutest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Slack is how many times the quiet machine's time a wait is given: emulation on
// a shared machine is that much slower now and then.
const Slack = 5

// Where Debian keeps the programs and firmware; package names stand in errors.
const (
	qemuPath    = "/usr/bin/qemu-system-x86_64"
	qemuImgPath = "/usr/bin/qemu-img"
	nsenterPath = "/usr/bin/nsenter"
	codePath    = "/usr/share/OVMF/OVMF_CODE_4M.fd"
	varsPath    = "/usr/share/OVMF/OVMF_VARS_4M.fd"
	// The firmware for Secure Boot.
	secureCodePath = "/usr/share/OVMF/OVMF_CODE_4M.secboot.fd"
	// Those of arm64.
	qemuARM64Path = "/usr/bin/qemu-system-aarch64"
	codeARM64Path = "/usr/share/AAVMF/AAVMF_CODE.fd"
	varsARM64Path = "/usr/share/AAVMF/AAVMF_VARS.fd"
)

// secureVars are the variables with keys in them, by whose they are.
var secureVars = map[string]string{"microsoft": "/usr/share/OVMF/OVMF_VARS_4M.ms.fd", "snakeoil": "/usr/share/OVMF/OVMF_VARS_4M.snakeoil.fd"}

// Config is a machine. The zero value of a field means what its comment says.
type Config struct {
	// Name stands in errors and logs; "vm" when empty.
	Name string
	// Dir takes serial.log, qemu.log and vars.fd. It must exist.
	Dir string
	// UEFI starts OVMF, with Vars as its variables; otherwise SeaBIOS.
	UEFI bool
	// ARM64 is a machine of that architecture, with its own EDK2; it needs UEFI.
	ARM64 bool
	// SecureBoot turns it on, with the keys of PCs ("microsoft") or the one whose
	// private half is in package ovmf too ("snakeoil"); off when empty.
	SecureBoot string
	// Vars is the file of UEFI variables, made from the template when it is not there;
	// Dir/vars.fd when empty.
	Vars string

	MemoryMiB int // 1024
	CPUs      int // 2
	// UUID is the SMBIOS system UUID; all zeros when empty.
	UUID string
	// SMBIOSSerial is the system's serial number.
	SMBIOSSerial string

	// Kernel, Initrd and Cmdline boot directly, without a disk.
	Kernel, Initrd, Cmdline string

	Disks []Disk
	NICs  []NIC

	// Watchdog adds an i6300esb that resets the machine.
	Watchdog bool
	// VGA adds a display adapter, so that tty1 exists; see Screen.
	VGA bool
	// NoReboot makes a reset end QEMU.
	NoReboot bool

	// Netns is the path of a network namespace to start QEMU in; that needs root.
	Netns string
	// Accel is "tcg" or "kvm"; the ACCEL environment variable when empty, else tcg.
	Accel string
	// Extra goes to QEMU as it is.
	Extra []string

	// Console gets the serial line too, as it comes.
	Console io.Writer
	// Log tells starts and ends; nil is silent.
	Log *slog.Logger
}

// Disk is a drive; its QMP id is disk<n>, counted from 0.
type Disk struct {
	Path string
	// Format is "raw" (when empty) or "qcow2".
	Format string
	// Serial is at most 20 bytes on virtio.
	Serial string
	// Bus is "virtio" (when empty), "nvme", "sata" or "scsi".
	Bus string
	// BootIndex 1 is tried first; 0 leaves the disk out of the order.
	BootIndex int
	ReadOnly  bool
	// Snapshot throws writes away at the end.
	Snapshot bool
}

// NIC is a network card; its QMP id is nic<n>, counted from 0.
type NIC struct {
	// Netdev is a -netdev option without its id: "user", "tap,ifname=tap0,script=no,downscript=no",
	// "stream,server=off,addr.type=unix,addr.path=…".
	Netdev string
	MAC    string
	// Model is "virtio-net-pci" when empty.
	Model string
	// ROM is "" for QEMU's own (iPXE), "none" for the firmware's own network boot, or a path.
	ROM string
	// BootIndex 1 is tried first; 0 leaves the card out of the order.
	BootIndex int
}

// VM is a started machine. Its methods may be called from several goroutines.
type VM struct {
	name   string
	dir    string
	log    *slog.Logger
	proc   *os.Process
	serial *serialLog
	stdin  io.WriteCloser

	exited chan struct{} // closed once QEMU has ended and its output is read
	ended  chan struct{} // closed after that, when nothing of the machine is left

	mu  sync.Mutex
	qmp *qmp
	err error
}

// Skipper is the part of a testing.TB that Need uses: this package is also part
// of a command, which must not carry the testing package.
type Skipper interface {
	Helper()
	Skipf(format string, args ...any)
}

// Need skips a test, loudly, where a machine cannot be started.
func Need(t Skipper, uefi bool) {
	t.Helper()
	if err := Available(uefi); err != nil {
		t.Skipf("needs QEMU: %v", err)
	}
}

// Available says what is missing for a machine, if anything.
func Available(uefi bool) error {
	need := [][2]string{{qemuPath, "qemu-system-x86"}}
	if uefi {
		need = append(need, [2]string{codePath, "ovmf"}, [2]string{varsPath, "ovmf"})
	}
	return there(need...)
}

// AvailableARM64 is Available for an arm64 machine.
func AvailableARM64() error {
	return there([2]string{qemuARM64Path, "qemu-system-arm"}, [2]string{codeARM64Path, "qemu-efi-aarch64"}, [2]string{varsARM64Path, "qemu-efi-aarch64"})
}

func there(need ...[2]string) error {
	for _, n := range need {
		if _, err := os.Stat(n[0]); err != nil {
			return fmt.Errorf("%s is not there: install package %s", n[0], n[1])
		}
	}
	return nil
}

// program is the QEMU of the machine.
func (cfg Config) program() string {
	if cfg.ARM64 {
		return qemuARM64Path
	}
	return qemuPath
}

// template is what the machine's UEFI variables begin as.
func (cfg Config) template() string {
	switch {
	case cfg.ARM64:
		return varsARM64Path
	case cfg.SecureBoot != "":
		return secureVars[cfg.SecureBoot]
	}
	return varsPath
}

func (cfg Config) available() error {
	if cfg.ARM64 {
		return AvailableARM64()
	}
	return Available(cfg.UEFI)
}

// Overlay makes a qcow2 file at dst that reads from the raw image base and
// keeps writes for itself. size enlarges the disk; 0 keeps base's size.
func Overlay(ctx context.Context, dst, base string, size int64) error {
	base, err := filepath.Abs(base)
	if err != nil {
		return fmt.Errorf("overlay of %s: %w", base, err)
	}
	args := []string{"create", "-q", "-f", "qcow2", "-F", "raw", "-b", base, dst}
	if size > 0 {
		args = append(args, strconv.FormatInt(size, 10))
	}
	out, err := exec.CommandContext(ctx, qemuImgPath, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("overlay of %s: %w: %s", base, err, strings.TrimSpace(string(out)))
	}
	return nil
}

// Start runs the machine until it ends by itself, Kill or the end of ctx. The
// caller waits with Wait or Close.
func Start(ctx context.Context, cfg Config) (*VM, error) {
	if cfg.Name == "" {
		cfg.Name = "vm"
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Accel == "" && !cfg.ARM64 {
		cfg.Accel = os.Getenv("ACCEL")
	}
	if cfg.Vars == "" {
		cfg.Vars = filepath.Join(cfg.Dir, "vars.fd")
	}
	vm, err := start(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", cfg.Name, err)
	}
	return vm, nil
}

func start(ctx context.Context, cfg Config) (*VM, error) {
	if err := cfg.available(); err != nil {
		return nil, err
	}
	if cfg.UEFI {
		if err := seedVars(cfg.Vars, cfg.template()); err != nil {
			return nil, err
		}
	}
	args, err := Args(cfg)
	if err != nil {
		return nil, err
	}
	// QMP over a socket pair: no path to grow too long, to clash or to be left behind.
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, fmt.Errorf("make the QMP socket: %w", err)
	}
	defer theirs.Close()

	path := cfg.program()
	if cfg.Netns != "" {
		args = append([]string{"--net=" + cfg.Netns, "--", path}, args...)
		path = nsenterPath
	}
	serialFile, err := os.Create(filepath.Join(cfg.Dir, "serial.log"))
	if err != nil {
		ours.Close()
		return nil, err
	}
	errFile, err := os.Create(filepath.Join(cfg.Dir, "qemu.log"))
	if err != nil {
		ours.Close()
		serialFile.Close()
		return nil, err
	}
	defer errFile.Close()

	cmd := exec.Command(path, args...)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "TMPDIR=" + os.TempDir()}
	cmd.Stderr = errFile
	cmd.ExtraFiles = []*os.File{theirs} // descriptor 3
	// An own process group keeps a terminal's Ctrl-C away; the death signal ends
	// QEMU should this process be killed.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	var stdin io.WriteCloser
	var stdout io.ReadCloser
	if stdin, err = cmd.StdinPipe(); err == nil {
		stdout, err = cmd.StdoutPipe()
	}
	if err != nil {
		ours.Close()
		serialFile.Close()
		return nil, err
	}

	vm := &VM{name: cfg.Name, dir: cfg.Dir, log: cfg.Log, stdin: stdin, exited: make(chan struct{}), ended: make(chan struct{})}
	vm.serial = newSerialLog(serialFile, cfg.Console)
	started := make(chan error, 1)
	// The death signal follows the thread that started QEMU, so that thread stays
	// with it until the end.
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		if err := cmd.Start(); err != nil {
			serialFile.Close()
			started <- err
			return
		}
		vm.proc = cmd.Process
		started <- nil
		vm.serial.drain(stdout)
		err := cmd.Wait()
		serialFile.Close()
		vm.mu.Lock()
		vm.err = err
		vm.mu.Unlock()
		close(vm.exited)
	}()
	if err := <-started; err != nil {
		ours.Close()
		return nil, err
	}
	theirs.Close() // a copy kept here would hide QEMU's end
	go func() {
		defer close(vm.ended)
		select {
		case <-ctx.Done():
			vm.Kill()
		case <-vm.exited:
		}
		<-vm.exited
		vm.qmpClose()
	}()

	greet, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	q, err := dialQMP(greet, ours)
	if err != nil {
		vm.Kill()
		<-vm.ended
		return nil, fmt.Errorf("%w%s", err, vm.complaint())
	}
	vm.mu.Lock()
	vm.qmp = q
	vm.mu.Unlock()
	if !vm.Running() {
		vm.qmpClose() // it ended before there was something to close
	}
	vm.log.Info("machine started", "name", vm.name, "pid", vm.PID())
	return vm, nil
}

// seedVars makes the file of UEFI variables from the template, unless it is there.
func seedVars(path, template string) error {
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	data, err := os.ReadFile(template)
	if err != nil {
		return fmt.Errorf("read the UEFI variables' template: %w", err)
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		return fmt.Errorf("make the UEFI variables: %w", err)
	}
	return nil
}

func socketPair() (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	return os.NewFile(uintptr(fds[0]), "qmp"), os.NewFile(uintptr(fds[1]), "qmp"), nil
}

// PID is QEMU's process.
func (vm *VM) PID() int { return vm.proc.Pid }

// Running reports whether QEMU lives.
func (vm *VM) Running() bool {
	select {
	case <-vm.exited:
		return false
	default:
		return true
	}
}

// Serial is what the serial line has said so far; the last 16 MiB of it.
func (vm *VM) Serial() string { return vm.serial.text() }

// Send types text into the serial line.
func (vm *VM) Send(text string) error {
	_, err := io.WriteString(vm.stdin, text)
	return err
}

// Mark makes later WaitMarkers see only what comes from now on: for a second boot.
func (vm *VM) Mark() { vm.serial.mark() }

// WaitMarker waits until the serial line has said marker since the start or the
// last Mark. quiet is what it takes on a quiet machine; Slack times that is given.
func (vm *VM) WaitMarker(ctx context.Context, marker string, quiet time.Duration) error {
	limit := time.NewTimer(Slack * quiet)
	defer limit.Stop()
	for {
		changed, found := vm.serial.find(marker)
		if found {
			return nil
		}
		select {
		case <-changed:
			continue
		case <-vm.exited:
			// The last bytes come before the end is told.
			if _, found := vm.serial.find(marker); found {
				return nil
			}
			return fmt.Errorf("%s ended before %q%s; its last lines:\n%s", vm.name, marker, vm.complaint(), vm.Tail(25))
		case <-limit.C:
			return fmt.Errorf("%s did not say %q within %v; its last lines:\n%s", vm.name, marker, Slack*quiet, vm.Tail(25))
		case <-ctx.Done():
			return fmt.Errorf("wait for %q of %s: %w", marker, vm.name, ctx.Err())
		}
	}
}

// Tail is the last n lines of the serial line, without terminal control sequences.
func (vm *VM) Tail(n int) string {
	lines := strings.Split(strings.TrimRight(Plain(vm.Serial()), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// complaint is what QEMU itself said, for errors.
func (vm *VM) complaint() string {
	text, err := os.ReadFile(filepath.Join(vm.dir, "qemu.log"))
	if err != nil || len(text) == 0 {
		return ""
	}
	if len(text) > 2000 {
		text = text[len(text)-2000:]
	}
	return ": QEMU says: " + strings.TrimSpace(string(text))
}

// PowerDown presses the power button.
func (vm *VM) PowerDown(ctx context.Context) error {
	_, err := vm.QMP(ctx, "system_powerdown", nil)
	return err
}

// Reset is the reset button.
func (vm *VM) Reset(ctx context.Context) error {
	_, err := vm.QMP(ctx, "system_reset", nil)
	return err
}

// Screen writes the display as a PNG file; the machine needs VGA.
func (vm *VM) Screen(ctx context.Context, path string) error {
	_, err := vm.QMP(ctx, "screendump", map[string]any{"filename": path, "format": "png"})
	return err
}

// Kill pulls the plug: QEMU gets no chance to flush anything.
func (vm *VM) Kill() {
	vm.proc.Kill() // an error says that it has ended already
}

// Wait returns nil when QEMU has ended by itself or by Kill, else what went wrong.
func (vm *VM) Wait(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return fmt.Errorf("wait for the end of %s: %w", vm.name, ctx.Err())
	case <-vm.ended:
	}
	vm.mu.Lock()
	defer vm.mu.Unlock()
	var exit *exec.ExitError
	if errors.As(vm.err, &exit) {
		if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() && status.Signal() == syscall.SIGKILL {
			return nil
		}
	}
	if vm.err != nil {
		return fmt.Errorf("%s: %w%s", vm.name, vm.err, vm.complaint())
	}
	return nil
}

// Close ends the machine: QEMU flushes its files and quits, or is killed after 10 seconds.
func (vm *VM) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if vm.Running() {
		if _, err := vm.QMP(ctx, "quit", nil); err != nil && vm.Running() {
			vm.log.Debug("quit was not answered", "name", vm.name, "err", err)
		}
	}
	if err := vm.Wait(ctx); ctx.Err() == nil {
		return err
	}
	vm.Kill()
	return vm.Wait(context.Background())
}
