package pid1

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/site/config"
	"github.com/better-compute/site-appliance/image/layout"
	"github.com/better-compute/site-appliance/initramfs/button"
	"github.com/better-compute/site-appliance/initramfs/console"
	"github.com/better-compute/site-appliance/initramfs/data"
	"github.com/better-compute/site-appliance/initramfs/disk"
	"github.com/better-compute/site-appliance/initramfs/network"
	"github.com/better-compute/site-appliance/initramfs/seed"
	"github.com/better-compute/site-appliance/initramfs/supervise"
	"github.com/better-compute/site-appliance/initramfs/survive"
)

// end is how the machine goes down.
type end int

const (
	restart end = iota
	powerOff
)

// run boots and then waits to be told to end.
func (b *boot) run() end {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	b.children = supervise.Reap(ctx, b.say)
	ends := make(chan end, 1)
	ask := func(e end) {
		select {
		case ends <- e:
		default:
		}
	}
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGUSR2, unix.SIGHUP, unix.SIGPIPE)
	survive.Go(ctx, "signals", b.say, func() {
		for s := range signals {
			switch s {
			case unix.SIGINT, unix.SIGTERM:
				ask(restart)
			case unix.SIGUSR2:
				ask(powerOff)
			}
		}
	})

	err := b.step("early", b.early)
	b.say("version %s, role %s, kernel %s", b.Version, b.role, readTrim("/proc/sys/kernel/osrelease"))
	if err != nil && b.role == "" {
		b.say("nothing can be started without a role")
	}
	b.step("clock", b.clock)
	b.step("modules", func() error { return b.loadModules(ctx) })
	b.step("hotplug", func() error { return b.hotplug(ctx) })
	b.step("watchdog", func() error { return b.watchdog(ctx) })
	b.step("entropy", func() error { return b.entropy(ctx) })
	survive.Go(ctx, "button", b.say, func() {
		button.Wait(ctx, "/sys/class/input", "/dev/input", b.say, func() {
			b.say("power button")
			ask(powerOff)
		})
	})

	var services sync.WaitGroup
	servicesCtx, stopServices := context.WithCancel(ctx)
	switch {
	case b.has("bc.rescue") && exists(rescuePath):
		services.Go(func() { b.guard(servicesCtx, "rescue", func() { b.rescue(servicesCtx) }) })
	case b.role != "":
		services.Go(func() { b.guard(servicesCtx, "boot", func() { b.bring(servicesCtx) }) })
	}

	tick := time.NewTicker(5 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			b.alive.Store(int64(b.uptime()))
		case e := <-ends:
			b.say("going down")
			stopServices()
			select {
			case <-survive.Go(ctx, "services", b.say, services.Wait):
			case <-time.After(20 * time.Second):
				b.say("some services did not end")
			}
			return e
		}
	}
}

// bring does the steps that can change when a disk turns up, and starts the
// services. When a missing disk is there at last, all of it is done again.
func (b *boot) bring(ctx context.Context) {
	for ctx.Err() == nil && b.bringOnce(ctx) {
		b.say("data: the disk is there now: starting over")
		b.setReady(false)
	}
}

// bringOnce reports whether all is to be done again. Its services have ended
// when it returns, also by a panic.
func (b *boot) bringOnce(ctx context.Context) bool {
	var found error
	if b.role != Ramdisk {
		found = b.step("data", func() error { return b.data(ctx) })
	}
	var site *config.Site
	if b.role == Site {
		b.step("config", func() (err error) { site, err = b.config(); return err })
	}
	if b.role == Node {
		b.step("seed", b.seed)
	}
	if b.role == Site {
		b.step("harden", func() error { return network.Harden("/proc/sys/net") })
	}
	var services sync.WaitGroup
	inner, stop := context.WithCancel(ctx)
	defer services.Wait()
	defer stop()
	b.step("network", func() error { return b.network(inner, &services, site) })
	b.bcd(inner, &services)
	return b.watchDisk(ctx, found)
}

// watchDisk waits for ctx, or, where the disk was missing or ambiguous, for
// the disk; then it is true.
func (b *boot) watchDisk(ctx context.Context, found error) bool {
	if !errors.Is(found, disk.ErrMissing) && !errors.Is(found, disk.ErrAmbiguous) {
		<-ctx.Done()
		return false
	}
	for {
		sleep(ctx, 15*time.Second)
		if ctx.Err() != nil {
			return false
		}
		if _, err := b.findDisk(); err == nil {
			return true
		}
	}
}

// room is an error where the data partition has next to none left. bcd watches
// that while it runs.
func room(dir string) error {
	free, total, err := data.Space(dir)
	if err != nil {
		return err
	}
	if free < total/50 {
		return fmt.Errorf("the data partition is full: under 2 %% of %d MiB are free", total>>20)
	}
	return nil
}

func (b *boot) findDisk() (disk.Disk, error) {
	disks, err := disk.List("/sys/block", "/dev")
	if err != nil {
		return disk.Disk{}, err
	}
	typ, name := layout.TypeBasic, layout.ConfigName
	if b.role == Node {
		typ, name = layout.TypeESP, layout.ESPName
	}
	return disk.Boot(disks, disk.Loader("/sys/firmware/efi/efivars"), typ, name)
}

// diskWait is how long a disk may take to show up: USB and RAID are slow.
const diskWait = 30 * time.Second

// data finds the disk and mounts the data partition.
func (b *boot) data(ctx context.Context) error {
	b.hasDisk, b.hasData, b.ident = false, false, ""
	deadline := time.Now().Add(diskWait)
	var d disk.Disk
	var err error
	for {
		if d, err = b.findDisk(); err == nil {
			break
		}
		if !errors.Is(err, disk.ErrMissing) || time.Now().After(deadline) || ctx.Err() != nil {
			return fmt.Errorf("%w; going on without a data partition", err)
		}
		sleep(ctx, 200*time.Millisecond)
	}
	b.disk, b.hasDisk = d, true
	if p, ok := d.Table.Find(layout.TypeIdent, layout.IdentName); ok {
		b.ident = d.Partition(p.Number)
	}
	setup := data.Setup{
		Runner: b.children,
		Say:    func(format string, args ...any) { b.say("data: "+format, args...) },
		NewID:  uuid.New,
	}
	if err := setup.Prepare(ctx, d, dataDir); err != nil {
		return fmt.Errorf("%w; going on without a data partition", err)
	}
	full := room(dataDir)
	for _, dir := range []string{ownDir, stateDir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return errors.Join(full, fmt.Errorf("make %s: %w; going on without a data partition", dir, err))
		}
	}
	b.hasData = true
	// On a full partition the rest fails for that one reason, which is said once.
	if err := b.stirEntropy(); err != nil && full == nil {
		return err
	}
	return full
}

// stirEntropy mixes in what the last boot left and leaves something for the next.
func (b *boot) stirEntropy() error {
	path := filepath.Join(ownDir, "random-seed")
	if old, err := os.ReadFile(path); err == nil && len(old) <= 4096 {
		if err := os.WriteFile("/dev/urandom", old, 0o600); err != nil {
			return fmt.Errorf("stir random numbers: %w", err)
		}
	}
	next := make([]byte, 512)
	rand.Read(next)
	if err := atomicfile.Write(path, next, 0o600); err != nil {
		return fmt.Errorf("keep random numbers: %w", err)
	}
	return nil
}

// config reads site.toml, and goes on with the last good one where it is bad.
func (b *boot) config() (*config.Site, error) {
	raw, err := b.readConfig()
	kept := ""
	if b.hasData {
		kept = filepath.Join(ownDir, layout.ConfigFile)
	}
	use, site, err := choose(raw, err, kept)
	return site, errors.Join(err, atomicfile.Write(sitePath, use, 0o600))
}

// choose gives the configuration to go on with: raw, unless it was not read
// (rerr) or is bad; then the one kept in the file at kept; then none. It keeps a good one
// there. kept is empty where nothing can be kept.
func choose(raw []byte, rerr error, kept string) (use []byte, site *config.Site, err error) {
	var last []byte
	if kept != "" {
		last, _ = os.ReadFile(kept) // there is none at the first start
	}
	if err = rerr; err == nil {
		if site, err = config.ParseSite(layout.ConfigFile, raw); err == nil {
			if kept == "" || bytes.Equal(raw, last) {
				return raw, site, nil
			}
			err = atomicfile.Write(kept, raw, 0o600)
			if errors.Is(err, unix.ENOSPC) {
				err = nil // the data partition's own line says it
			}
			return raw, site, err
		}
	}
	if len(last) > 0 {
		if site, perr := config.ParseSite(layout.ConfigFile, last); perr == nil {
			return last, site, fmt.Errorf("%w; going on with the last good configuration", err)
		}
	}
	return nil, &config.Site{}, fmt.Errorf("%w; going on with the defaults, and without a join string", err)
}

// mend says where the configuration belongs, for the person at the console.
const mend = "put it on the partition " + layout.ConfigLabel + " of this box's disk, on any computer, and start the box again"

// readConfig reads site.toml from its partition.
func (b *boot) readConfig() ([]byte, error) {
	if !b.hasDisk {
		return nil, errors.New("no disk to read site.toml from")
	}
	p, ok := b.disk.Table.Find(layout.TypeBasic, layout.ConfigName)
	if !ok {
		return nil, fmt.Errorf("disk %s has no partition %q", b.disk.Name, layout.ConfigName)
	}
	if err := os.MkdirAll(configDir, 0o700); err != nil {
		return nil, fmt.Errorf("make %s: %w", configDir, err)
	}
	dev := b.disk.Partition(p.Number)
	err := unix.Mount(dev, configDir, "vfat", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "umask=0077")
	if err != nil && !errors.Is(err, unix.EBUSY) {
		return nil, fmt.Errorf("partition %s (%s) cannot be read (%w): format it as FAT and put %s on it", layout.ConfigLabel, dev, err, layout.ConfigFile)
	}
	f, err := os.Open(filepath.Join(configDir, layout.ConfigFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%s is missing: %s", layout.ConfigFile, mend)
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", layout.ConfigFile, err)
	}
	defer f.Close()
	// One byte over the limit has the parser refuse it.
	raw, err := io.ReadAll(io.LimitReader(f, config.MaxBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", layout.ConfigFile, err)
	}
	return raw, nil
}

// seed applies what the deployment left on the disk.
func (b *boot) seed() error {
	if !b.hasDisk {
		return errors.New("no disk to read the seed from")
	}
	if t, err := disk.ReadTable(b.disk); err == nil {
		b.disk.Table = t
	}
	dev := disk.ByLabel(b.disk, layout.SeedLabel)
	if dev == "" {
		return fmt.Errorf("disk %s has no partition labelled %s", b.disk.Name, layout.SeedLabel)
	}
	dir := filepath.Join(runDir, "seed")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make %s: %w", dir, err)
	}
	if err := unix.Mount(dev, dir, "vfat", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "umask=0077"); err != nil {
		return fmt.Errorf("mount %s: %w", dev, err)
	}
	defer unix.Unmount(dir, 0)
	s, err := seed.Read(dir)
	if err != nil {
		return err
	}
	if s.Hostname != "" {
		b.hostname = s.Hostname
		if err := unix.Sethostname([]byte(s.Hostname)); err != nil {
			return fmt.Errorf("set host name: %w", err)
		}
	}
	return s.Apply("/")
}

// networkWait is how long the boot waits for a way out before it goes on.
const networkWait = 20 * time.Second

// network starts the network's own process and waits a while for a way out.
func (b *boot) network(ctx context.Context, services *sync.WaitGroup, site *config.Site) error {
	if err := os.Remove(networkPath); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("forget networks: %w", err)
	}
	s := b.service("network", []string{"/bin/bc-net", string(b.role)})
	services.Go(func() { b.guard(ctx, "network", func() { s.Run(ctx, b.children) }) })
	deadline := time.Now().Add(networkWait)
	var state network.State
	for time.Now().Before(deadline) && ctx.Err() == nil {
		if data, err := os.ReadFile(networkPath); err == nil && json.Unmarshal(data, &state) == nil && state.Uplink != "" {
			break
		}
		sleep(ctx, 100*time.Millisecond)
	}
	for _, m := range state.Missing {
		b.note("network", m) // bc-net has said it
	}
	if state.Uplink == "" {
		return fmt.Errorf("no way out after %s; going on, and still trying", networkWait)
	}
	return nil
}

// bcd starts the agent and says ready when it runs.
func (b *boot) bcd(ctx context.Context, services *sync.WaitGroup) {
	s := b.service("bcd", serviceArgs(b.role, b.hasData, b.ident))
	started := make(chan struct{}, 1)
	s.Started = func() {
		select {
		case started <- struct{}{}:
		default:
		}
	}
	services.Go(func() { b.guard(ctx, "bcd", func() { s.Run(ctx, b.children) }) })
	select {
	case <-ctx.Done():
	case <-started:
		b.say("bcd: ok (t=%.1fs)", b.uptime().Seconds())
		b.setReady(true)
	case <-time.After(10 * time.Second):
		b.problem("bcd", errors.New("did not start; still trying"))
	}
}

func (b *boot) setReady(ready bool) {
	b.readyMu.Lock()
	defer b.readyMu.Unlock()
	if ready && !b.ready {
		b.say("ready (t=%.1fs)", b.uptime().Seconds())
	}
	b.ready = ready
}

func (b *boot) service(name string, argv []string) supervise.Service {
	return supervise.Service{
		Name: name, Argv: argv, Console: b.console, Say: b.say, Failed: func(reason string) { b.note(name, reason) },
		Backoff: backoff.Policy{Min: time.Second, Max: time.Minute}, Steady: time.Minute, Grace: 10 * time.Second,
	}
}

// rescue gives a shell on every console, and nothing else.
func (b *boot) rescue(ctx context.Context) {
	var wg sync.WaitGroup
	for _, name := range console.Names(readTrim("/sys/class/tty/console/active")) {
		tty, err := os.OpenFile("/dev/"+name, os.O_RDWR|unix.O_NOCTTY, 0)
		if err != nil {
			b.problem("rescue", fmt.Errorf("open console: %w", err))
			continue
		}
		s := b.service("rescue", []string{"/bin/gosh"})
		s.Terminal = tty
		s.Attr = &syscall.SysProcAttr{Setsid: true, Setctty: true, Ctty: 0}
		s.Grace = time.Second
		defer tty.Close()
		wg.Go(func() { b.guard(ctx, "rescue", func() { s.Run(ctx, b.children) }) })
	}
	b.say("rescue: shell on the consoles; nothing else is started")
	wg.Wait() // before the consoles are closed
}

// shutdown ends every process, makes the disks whole, and goes.
func (b *boot) shutdown(e end) {
	if unix.Getpid() == 1 {
		unix.Kill(-1, unix.SIGTERM)
		time.Sleep(500 * time.Millisecond)
		unix.Kill(-1, unix.SIGKILL)
	}
	unix.Sync()
	for _, dir := range []string{dataDir, configDir} {
		if err := unix.Unmount(dir, 0); err != nil && exists(dir) && !errors.Is(err, unix.EINVAL) {
			b.say("unmount %s: %v", dir, err)
			unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, "")
		}
	}
	unix.Sync()
	how, what := unix.LINUX_REBOOT_CMD_RESTART, "restart"
	if e == powerOff {
		how, what = unix.LINUX_REBOOT_CMD_POWER_OFF, "power off"
	}
	b.say("%s", what)
	if b.console != nil {
		b.console.Drain(2 * time.Second)
	}
	if err := unix.Reboot(how); err != nil {
		fmt.Println("bc-init:", what, err)
	}
}
