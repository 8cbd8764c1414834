// Package bmctest is the rig: an IPMI 2.0 BMC and a Redfish BMC over real
// sockets, in front of whatever Machine the test brings.
//
// What real BMCs do wrong is a Fault each, for StartRedfish (WithFaults) and for
// a running BMC (SetFaults). Log is what a BMC was made to do, for tests of what
// happens at most once. StartFleet is many BMCs that do nothing at rest.
//
// Clients by others keep the rig honest: ipmitool, DMTF's redfishtool and
// OpenStack's sushy, from PATH, from Debian's packages, or from folders in
// PEERS_PYTHONPATH:
//
//	PEERS_PYTHONPATH=/src/sushy:/src/Redfishtool go test -run Under ./bmc/bmctest
//
// Services by others keep the drivers honest: OpenIPMI's ipmi_sim in
// plugins/ipmi, and in bmc/redfish OpenStack's sushy-tools and DMTF's mockup
// server:
//
//	PEERS_PYTHONPATH=/src/sushy-tools REDFISH_MOCKUP_SERVER=/src/Redfish-Mockup-Server go test -v -run TestAgainst ./bmc/redfish
package bmctest

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"
)

// Machine is what a BMC of the rig controls. Running may be called at any
// time; the other calls come one after another.
type Machine interface {
	// PowerOn starts the machine from dev. It is called only when Running is
	// false. ctx bounds the start, not the machine's life.
	PowerOn(ctx context.Context, dev BootDevice) error
	// PowerOff takes the power away at once.
	PowerOff(ctx context.Context) error
	// Soft asks the operating system to shut down and does not wait for it.
	Soft(ctx context.Context) error
	// Reset restarts the machine from the device that it was started from.
	Reset(ctx context.Context) error
	Running() bool
}

// BootDevice is what a machine boots from: "none" (its own order), "pxe",
// "disk", "cdrom" or "bios". When Persistent is false, the device counts for
// one boot: a machine that restarts by itself goes back to its own order.
type BootDevice struct {
	Device          string
	EFI, Persistent bool
}

// String is for example "pxe efi once"; "none" says nothing more.
func (b BootDevice) String() string {
	words := []string{b.Device}
	if b.Device == "none" {
		return b.Device
	}
	if b.EFI {
		words = append(words, "efi")
	}
	if b.Persistent {
		return strings.Join(append(words, "persistent"), " ")
	}
	return strings.Join(append(words, "once"), " ")
}

// Option changes what a rig's BMC does.
type Option func(*options)

type options struct {
	delay       time.Duration
	offInterval time.Duration
	now         func() time.Time

	faults         []Fault
	late           time.Duration
	mediaRoots     *x509.CertPool
	dial           func(ctx context.Context, network, address string) (net.Conn, error)
	maxSessions    int
	sessionTimeout time.Duration
	foreign        string
	latency        func() time.Duration
	certificate    *tls.Certificate
	console        *WebConsole
}

func newOptions(opts []Option) options {
	o := options{
		offInterval: time.Second, now: time.Now,
		late: 40 * time.Second, maxSessions: 8, sessionTimeout: 30 * time.Minute, foreign: "https://127.0.0.2:9",
	}
	for _, opt := range opts {
		opt(&o)
	}
	return o
}

// Delay makes every power action answer late by d, after it was done: a slow BMC,
// at which a client that resends by itself does the same thing twice.
func Delay(d time.Duration) Option { return func(o *options) { o.delay = d } }

// OffInterval is how long a power cycle stays off; a second unless set.
func OffInterval(d time.Duration) Option { return func(o *options) { o.offInterval = d } }

// Clock is the time by which IPMI boot flags expire.
func Clock(now func() time.Time) Option { return func(o *options) { o.now = now } }

// WithFaults makes a Redfish BMC begin with these faults.
func WithFaults(f ...Fault) Option { return func(o *options) { o.faults = append(o.faults, f...) } }

// LateBy is how late AnswersLate makes an answer; 40 s unless set.
func LateBy(d time.Duration) Option { return func(o *options) { o.late = d } }

// MediaRoots are the CAs by which a Redfish BMC judges the servers that it
// fetches media and firmware from; none unless set, so that it fetches nothing.
func MediaRoots(pool *x509.CertPool) Option { return func(o *options) { o.mediaRoots = pool } }

// Dial is how a Redfish BMC reaches those servers, where its network is not the
// process's own.
func Dial(dial func(ctx context.Context, network, address string) (net.Conn, error)) Option {
	return func(o *options) { o.dial = dial }
}

// MaxSessions is how many Redfish sessions can be open; 8 unless set.
func MaxSessions(n int) Option { return func(o *options) { o.maxSessions = n } }

// SessionTimeout is how long a Redfish session lives without a request, by
// Clock; 30 minutes unless set.
func SessionTimeout(d time.Duration) Option { return func(o *options) { o.sessionTimeout = d } }

// Foreign is the scheme, host and port of the faults that lead to another host.
func Foreign(origin string) Option { return func(o *options) { o.foreign = origin } }

// Latency is how long a Redfish BMC takes for a request, asked for each.
func Latency(f func() time.Duration) Option { return func(o *options) { o.latency = f } }

// Certificate is what a Redfish BMC shows instead of a self-signed one.
func Certificate(c tls.Certificate) Option { return func(o *options) { o.certificate = &c } }

// flagLife is how long boot flags wait for the power command that uses them
// (IPMI 2.0, table 28-14, parameter 3).
const flagLife = 60 * time.Second

// errNotRunning is an action that a machine without power cannot do.
var errNotRunning = errors.New("the machine is off")

// chassis is the part that both BMCs share: the machine, the boot override
// and the log.
type chassis struct {
	machine Machine
	options options

	// booting, if set, is called at every boot that the BMC causes.
	booting func()

	action sync.Mutex // one power action at a time

	mu       sync.Mutex
	log      []string
	override *BootDevice
	expires  time.Time  // zero: never
	keep     bool       // flags set from now on do not expire by time
	standing BootDevice // the firmware's own setting
	booted   BootDevice
}

func newChassis(m Machine, o options) *chassis {
	none := BootDevice{Device: "none"}
	return &chassis{machine: m, options: o, standing: none, booted: none}
}

// Log holds a line for each command that the BMC has taken, oldest first:
// "bootdev pxe efi once", "on pxe efi once", "off", "soft", "cycle none",
// "reset none", "graceful restart none", "nmi"; "failed: …" after one that the
// machine did not do. A Redfish BMC has these too: "manager reset", "media
// insert URL", "media eject", "bios set NAME=VALUE,…", "bios reset", "volume
// create RAID1 NAME drives 1,2", "volume delete NAME", "firmware BIOS 2.0",
// "password changed", "secure boot on", "secure boot keys DeletePK", "log
// cleared"; an IPMI BMC also "sdr cleared", "lan changed" and the like. A command that changes nothing, such as On of a machine that is
// on, has no line, and neither has a refused one.
func (c *chassis) Log() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]string(nil), c.log...)
}

func (c *chassis) note(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.log = append(c.log, fmt.Sprintf(format, args...))
}

// setOverride keeps dev for the next boot. With expiring it is dropped when no
// boot follows within flagLife, unless keepFlags was asked for.
func (c *chassis) setOverride(dev BootDevice, expiring bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.override, c.expires = &dev, time.Time{}
	if expiring && !c.keep {
		c.expires = c.options.now().Add(flagLife)
	}
	c.log = append(c.log, "bootdev "+dev.String())
}

// clearOverride forgets what was set, the persistent setting too.
func (c *chassis) clearOverride() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.override, c.standing = nil, BootDevice{Device: "none"}
	c.log = append(c.log, "bootdev none")
}

// keepFlags stops the timer of flags set later.
func (c *chassis) keepFlags(keep bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.keep = keep
}

// current is the override in force.
func (c *chassis) current() (BootDevice, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.expire()
	if c.override == nil {
		return c.standing, c.standing.Device != "none"
	}
	return *c.override, true
}

// expire drops flags whose time is over; the caller holds mu.
func (c *chassis) expire() {
	if c.override != nil && !c.expires.IsZero() && !c.options.now().Before(c.expires) {
		c.override = nil
	}
}

// nextBoot takes the device of the boot that begins: an override counts once,
// a persistent one becomes the firmware's setting.
func (c *chassis) nextBoot() BootDevice {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.expire()
	dev := c.standing
	if c.override != nil {
		dev = *c.override
		c.override = nil
		if dev.Persistent {
			c.standing = dev
		}
	}
	return dev
}

// begin waits for the action before; nothing begins once ctx is over. The
// caller unlocks action in any case.
func (c *chassis) begin(ctx context.Context) error {
	c.action.Lock()
	return ctx.Err()
}

// quiesce waits for the action that runs.
func (c *chassis) quiesce() {
	c.action.Lock()
	defer c.action.Unlock()
}

func (c *chassis) powerOn(ctx context.Context) error {
	defer c.action.Unlock()
	if err := c.begin(ctx); err != nil {
		return err
	}
	if !c.machine.Running() {
		if err := c.boot(ctx, "on"); err != nil {
			return err
		}
	}
	return c.late(ctx)
}

// boot starts the machine from the next device and logs verb.
func (c *chassis) boot(ctx context.Context, verb string) error {
	dev := c.nextBoot()
	c.mu.Lock()
	c.booted = dev
	c.log = append(c.log, verb+" "+dev.String())
	c.mu.Unlock()
	c.boots()
	if err := c.machine.PowerOn(ctx, dev); err != nil {
		c.note("failed: %v", err)
		return fmt.Errorf("start the machine: %w", err)
	}
	return nil
}

func (c *chassis) powerOff(ctx context.Context) error {
	defer c.action.Unlock()
	if err := c.begin(ctx); err != nil {
		return err
	}
	if c.machine.Running() {
		c.note("off")
		if err := c.stop(ctx); err != nil {
			return err
		}
	}
	return c.late(ctx)
}

func (c *chassis) stop(ctx context.Context) error {
	if err := c.machine.PowerOff(ctx); err != nil {
		c.note("failed: %v", err)
		return fmt.Errorf("stop the machine: %w", err)
	}
	return nil
}

func (c *chassis) cycle(ctx context.Context) error {
	defer c.action.Unlock()
	if err := c.begin(ctx); err != nil {
		return err
	}
	if !c.machine.Running() {
		return errNotRunning
	}
	if err := c.stop(ctx); err != nil {
		return err
	}
	if err := wait(ctx, c.options.offInterval); err != nil {
		return err
	}
	if err := c.boot(ctx, "cycle"); err != nil {
		return err
	}
	return c.late(ctx)
}

// reset keeps the power on, unless the next boot is from another device: a
// Machine learns its device only when it is started.
func (c *chassis) reset(ctx context.Context) error { return c.restart(ctx, "reset") }

// graceful is the operating system's own restart.
func (c *chassis) graceful(ctx context.Context) error { return c.restart(ctx, "graceful restart") }

func (c *chassis) restart(ctx context.Context, verb string) error {
	defer c.action.Unlock()
	if err := c.begin(ctx); err != nil {
		return err
	}
	if !c.machine.Running() {
		return errNotRunning
	}
	dev := c.nextBoot()
	c.mu.Lock()
	same := dev == c.booted
	c.booted = dev
	c.log = append(c.log, verb+" "+dev.String())
	c.mu.Unlock()
	c.boots()
	var err error
	if same {
		err = c.machine.Reset(ctx)
	} else if err = c.stop(ctx); err == nil {
		err = c.machine.PowerOn(ctx, dev)
	}
	if err != nil {
		c.note("failed: %v", err)
		return fmt.Errorf("reset the machine: %w", err)
	}
	return c.late(ctx)
}

func (c *chassis) soft(ctx context.Context) error {
	defer c.action.Unlock()
	if err := c.begin(ctx); err != nil {
		return err
	}
	if !c.machine.Running() {
		return errNotRunning
	}
	c.note("soft")
	if err := c.machine.Soft(ctx); err != nil {
		c.note("failed: %v", err)
		return fmt.Errorf("shut the machine down: %w", err)
	}
	return c.late(ctx)
}

// Interrupter is a Machine that takes a diagnostic interrupt.
type Interrupter interface {
	NMI(ctx context.Context) error
}

// errNoNMI is a machine that is no Interrupter.
var errNoNMI = errors.New("the machine takes no diagnostic interrupt")

func (c *chassis) nmi(ctx context.Context) error {
	defer c.action.Unlock()
	if err := c.begin(ctx); err != nil {
		return err
	}
	m, able := c.machine.(Interrupter)
	if !able {
		return errNoNMI
	}
	if !c.machine.Running() {
		return errNotRunning
	}
	c.note("nmi")
	if err := m.NMI(ctx); err != nil {
		c.note("failed: %v", err)
		return fmt.Errorf("interrupt the machine: %w", err)
	}
	return c.late(ctx)
}

func (c *chassis) boots() {
	if c.booting != nil {
		c.booting()
	}
}

// late is the slow BMC's pause.
func (c *chassis) late(ctx context.Context) error { return wait(ctx, c.options.delay) }

func wait(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
