package pid1

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/u-root/u-root/pkg/libinit"
	"github.com/u-root/u-root/pkg/watchdog"
	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/initramfs/console"
	"github.com/better-compute/site-appliance/initramfs/module"
	"github.com/better-compute/site-appliance/initramfs/survive"
)

// namespace is what a kernel hands over without: mounts, and the names in
// /dev that devtmpfs does not make.
var namespace = []libinit.Creator{
	libinit.Dir{Name: "/proc", Mode: 0o555},
	libinit.Mount{Source: "proc", Target: "/proc", FSType: "proc", Flags: unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC},
	libinit.Dir{Name: "/sys", Mode: 0o555},
	libinit.Mount{Source: "sysfs", Target: "/sys", FSType: "sysfs", Flags: unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC},
	libinit.Dir{Name: "/dev", Mode: 0o755},
	libinit.Mount{Source: "devtmpfs", Target: "/dev", FSType: "devtmpfs", Flags: unix.MS_NOSUID, Opts: "mode=0755"},
	libinit.Dir{Name: "/dev/pts", Mode: 0o755},
	libinit.Mount{Source: "devpts", Target: "/dev/pts", FSType: "devpts", Flags: unix.MS_NOSUID | unix.MS_NOEXEC, Opts: "newinstance,ptmxmode=666,gid=5,mode=620"},
	libinit.Dir{Name: "/dev/shm", Mode: 0o1777},
	libinit.Mount{Source: "tmpfs", Target: "/dev/shm", FSType: "tmpfs", Flags: unix.MS_NOSUID | unix.MS_NODEV, Opts: "size=16m,mode=1777"},
	libinit.Symlink{NewPath: "/dev/fd", Target: "/proc/self/fd"},
	libinit.Symlink{NewPath: "/dev/stdin", Target: "/proc/self/fd/0"},
	libinit.Symlink{NewPath: "/dev/stdout", Target: "/proc/self/fd/1"},
	libinit.Symlink{NewPath: "/dev/stderr", Target: "/proc/self/fd/2"},
	libinit.Dir{Name: "/run", Mode: 0o755},
	libinit.Mount{Source: "tmpfs", Target: "/run", FSType: "tmpfs", Flags: unix.MS_NOSUID | unix.MS_NODEV, Opts: "mode=0755"},
	libinit.Dir{Name: "/run/bc", Mode: 0o755},
	libinit.Mount{Source: "cgroup2", Target: "/sys/fs/cgroup", FSType: "cgroup2", Flags: unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, Opts: "nsdelegate"},
	libinit.Dir{Name: "/sys/fs/cgroup/bcx", Mode: 0o755},
}

// early makes the namespace and opens the consoles.
func (b *boot) early() error {
	var errs []error
	for _, c := range namespace {
		if err := c.Create(); err != nil && !errors.Is(err, os.ErrExist) && !errors.Is(err, unix.EBUSY) {
			errs = append(errs, fmt.Errorf("%v: %w", c, err))
		}
	}
	b.console = console.Open(console.Names(readTrim("/sys/class/tty/console/active")))
	b.cmdline = strings.Fields(readTrim("/proc/cmdline"))
	// Plugins' limits are set below bcx; bcd itself stays in the root group.
	for _, f := range []string{"/sys/fs/cgroup/cgroup.subtree_control", "/sys/fs/cgroup/bcx/cgroup.subtree_control"} {
		for _, c := range []string{"+memory", "+pids"} {
			if err := os.WriteFile(f, []byte(c), 0o644); err != nil {
				errs = append(errs, fmt.Errorf("enable cgroup controller %s: %w", c[1:], err))
			}
		}
	}
	// Ctrl-Alt-Del comes as SIGINT instead of restarting at once.
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_CAD_OFF); err != nil {
		errs = append(errs, fmt.Errorf("take over Ctrl-Alt-Del: %w", err))
	}
	role, err := ParseRole(readTrim(rolePath))
	if err != nil {
		errs = append(errs, err)
	}
	b.role = role
	b.hostname = "bc-" + string(role)
	if err := unix.Sethostname([]byte(b.hostname)); err != nil {
		errs = append(errs, fmt.Errorf("set host name: %w", err))
	}
	return errors.Join(errs...)
}

// clock sets a clock that stands before this build, as one with an empty
// battery does, to the build: certificates are judged against it.
func (b *boot) clock() error {
	if !time.Now().Before(b.Build) {
		return nil
	}
	tv := unix.NsecToTimeval(b.Build.UnixNano())
	if err := unix.Settimeofday(&tv); err != nil {
		return fmt.Errorf("set clock to the build's time: %w", err)
	}
	b.say("clock: stood before this build: set to %s", b.Build.UTC().Format(time.RFC3339))
	return nil
}

// loadModules loads what the image lists and what the hardware asks for.
func (b *boot) loadModules(ctx context.Context) error {
	loader, err := module.Kernel()
	if err != nil {
		return err
	}
	b.modulesMu.Lock()
	defer b.modulesMu.Unlock()
	b.modules = loader
	var errs []error
	devices := os.DirFS("/sys/devices")
	settle := func() { sleep(ctx, 50*time.Millisecond) }
	for _, m := range words(loadPath) {
		if err := loader.Load(m); err != nil {
			errs = append(errs, err)
		}
	}
	// A driver that does not fit this machine after all is no fault of the boot.
	if err := loader.Coldplug(devices, settle); err != nil {
		for line := range strings.SplitSeq(err.Error(), "\n") {
			b.say("modules: %s", line)
		}
	}
	// Without the firmware's variables there is no loader to ask: older machines boot too.
	if exists("/sys/firmware/efi") {
		if err := loader.Load("efivarfs"); err != nil {
			errs = append(errs, err)
		}
		if err := unix.Mount("efivarfs", "/sys/firmware/efi/efivars", "efivarfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC|unix.MS_RDONLY, ""); err != nil {
			errs = append(errs, fmt.Errorf("mount efivarfs: %w", err))
		}
	}
	return errors.Join(errs...)
}

// hotplug loads modules for hardware that comes later.
func (b *boot) hotplug(ctx context.Context) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return fmt.Errorf("open uevent socket: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1}); err != nil {
		unix.Close(fd)
		return fmt.Errorf("bind uevent socket: %w", err)
	}
	events := os.NewFile(uintptr(fd), "uevents")
	context.AfterFunc(ctx, func() { _ = survive.Once(func() { events.Close() }) })
	survive.Go(ctx, "hotplug", b.say, func() {
		buf := make([]byte, 64<<10)
		for ctx.Err() == nil {
			event, err := kernelEvent(events, buf)
			switch {
			case ctx.Err() != nil:
				return
			case errors.Is(err, unix.EINTR) || errors.Is(err, unix.ENOBUFS):
				continue
			case err != nil:
				b.say("hotplug: ended: %v", err)
				return
			}
			if a := modalias(event); a != "" {
				b.plugged(a)
			}
		}
	})
	return nil
}

// kernelEvent waits for one message; it is empty where it is not the kernel's,
// which alone is believed.
func kernelEvent(events *os.File, buf []byte) (event []byte, err error) {
	conn, err := events.SyscallConn()
	if err != nil {
		return nil, err
	}
	waited := conn.Read(func(fd uintptr) bool {
		var n int
		var from unix.Sockaddr
		n, from, err = unix.Recvfrom(int(fd), buf, 0)
		if errors.Is(err, unix.EAGAIN) {
			return false
		}
		if sa, ok := from.(*unix.SockaddrNetlink); err == nil && ok && sa.Pid == 0 {
			event = buf[:n]
		}
		return true
	})
	if waited != nil {
		return nil, waited
	}
	return event, err
}

// plugged loads what a device that came later asks for.
func (b *boot) plugged(alias string) {
	b.modulesMu.Lock()
	defer b.modulesMu.Unlock()
	if b.modules == nil {
		return
	}
	if err := b.modules.Alias(alias); err != nil {
		b.say("modules: %v", err)
	}
}

// modalias takes the alias out of an event that adds a device.
func modalias(event []byte) string {
	add, alias := false, ""
	for field := range strings.SplitSeq(string(event), "\x00") {
		switch k, v, _ := strings.Cut(field, "="); k {
		case "ACTION":
			add = v == "add"
		case "MODALIAS":
			alias = v
		}
	}
	if !add {
		return ""
	}
	return alias
}

// Watchdog times: how long without a sign of life until the hardware restarts
// the machine, and how long a step may take.
const (
	watchdogTimeout = 60 * time.Second
	watchdogKick    = 10 * time.Second
	stepLimit       = 15 * time.Minute
)

// watchdog keeps the hardware's timer from running out while PID 1 gets on.
func (b *boot) watchdog(ctx context.Context) error {
	w, err := watchdog.Open("/dev/watchdog")
	if errors.Is(err, os.ErrNotExist) {
		b.say("watchdog: this machine has none")
		return nil
	}
	if err != nil {
		return fmt.Errorf("open watchdog: %w", err)
	}
	// The library's own SetTimeout hands the driver nanoseconds.
	if err := unix.IoctlSetPointerInt(int(w.Fd()), unix.WDIOC_SETTIMEOUT, int(watchdogTimeout/time.Second)); err != nil {
		b.say("watchdog: keeps its own time-out: %v", err)
	}
	kick := func() {
		if err := w.KeepAlive(); err != nil {
			b.say("watchdog: %v", err)
		}
	}
	kick()
	survive.Go(ctx, "watchdog", b.say, func() {
		for {
			sleep(ctx, watchdogKick)
			if late := b.uptime() - time.Duration(b.alive.Load()); late < stepLimit {
				kick()
			}
			if ctx.Err() != nil { // shutting down: the timer guards that too
				return
			}
		}
	})
	return nil
}

// entropy waits until the kernel's random numbers are good.
func (b *boot) entropy(ctx context.Context) error {
	one := make([]byte, 1)
	if _, err := unix.Getrandom(one, unix.GRND_NONBLOCK); err == nil {
		return nil
	}
	b.say("entropy: waiting")
	done := make(chan error, 1)
	survive.Go(ctx, "entropy", b.say, func() {
		_, err := unix.Getrandom(one, 0)
		done <- err
	})
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return errors.New("no good random numbers after a minute: keys wait for them")
	}
}
