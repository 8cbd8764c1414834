package bmctest

import (
	"context"
	"errors"
	"fmt"

	"github.com/bougou/go-ipmi/pkg/bmc"
	"github.com/bougou/go-ipmi/pkg/hal"
	"github.com/bougou/go-ipmi/pkg/hal/mock"
	"github.com/bougou/go-ipmi/pkg/handlers"
	"github.com/bougou/go-ipmi/pkg/server"
	"github.com/bougou/go-ipmi/pkg/transport/udp"
	"github.com/bougou/go-ipmi/pkg/types"
)

// IPMI is a running IPMI 2.0 BMC.
type IPMI struct {
	*chassis
	commands *commandLog
	console  *Console
	bmc      *bmc.BMC
	conn     *udp.Conn
	server   *server.Server
	cancel   context.CancelFunc
	stop     func() bool
	done     chan struct{}
}

// StartIPMI serves RMCP+ on listen (host:port over UDP, port 0 for any free
// one) until Close or the end of ctx. The password has at most 20 bytes.
func StartIPMI(ctx context.Context, listen, user, password string, m Machine, opts ...Option) (*IPMI, error) {
	o := newOptions(opts)
	if len(password) > bmc.MaxPasswordLen {
		return nil, fmt.Errorf("start IPMI BMC: the password has %d bytes, more than %d", len(password), bmc.MaxPasswordLen)
	}
	c := newChassis(m, o)
	hardware, console := newHardware(c), newConsole()
	hardware.SetConsole(console)
	if line, has := m.(SerialLine); has {
		hardware.SetConsole(lineConsole{line})
	}
	if err := hardware.Storage().FRU().Write(ctx, 0, fru()); err != nil {
		return nil, fmt.Errorf("start IPMI BMC: %w", err)
	}
	lan := &hal.IPConfig{MAC: [6]byte{0x52, 0x54, 0, 0xb3, 0xc0, 1}, IP: [4]byte{192, 0, 2, 10}, Mask: [4]byte{255, 255, 255, 0}}
	if err := hardware.Network().SetConfig(ctx, lan); err != nil {
		return nil, fmt.Errorf("start IPMI BMC: %w", err)
	}
	info := bmc.DeviceInfo{DeviceID: 32, DeviceRevision: 1, FirmwareMajor: 1, FirmwareMinor: 2, IPMIVersion: 0x02, ManufacturerID: 343, ProductID: 1}
	b := bmc.New(info, guid, hardware, bmc.WithV15Disabled(), bmc.WithCipherSuites([]types.CipherSuiteID{3, 17}))
	u, err := b.Users.Add(2, user)
	if err != nil {
		return nil, fmt.Errorf("start IPMI BMC: add user: %w", err)
	}
	u.SetPassword([]byte(password))
	u.Enabled = true
	u.ChannelAccess[1] = bmc.UserChannelAccess{MaxPrivilege: bmc.PrivilegeLevelAdministrator, Enabled: true}

	conn, err := udp.Listen(listen)
	if err != nil {
		return nil, fmt.Errorf("start IPMI BMC: %w", err)
	}
	registry := handlers.NewRegistry()
	registry.Use(logWrites(c))
	registry.Use(watchBootTimer(c))
	registry.Use(interrupt(c))
	commands := &commandLog{}
	registry.Use(commands.watch)
	handlers.RegisterAllHandlers(registry)
	registry.RegisterFunc(types.CommandGetSystemGUID, func(context.Context, *handlers.HandlerContext, []byte) ([]byte, types.CompletionCode, error) {
		return guid[:], types.CodeOK, nil
	})
	// The embedded BMC would reset the machine.
	restart := func(context.Context, *handlers.HandlerContext, []byte) ([]byte, types.CompletionCode, error) {
		b.SOL.CloseAll()
		return nil, types.CodeOK, nil
	}
	registry.RegisterFunc(types.CommandColdReset, restart)
	registry.RegisterFunc(types.CommandWarmReset, restart)
	cleared := func(context.Context, *handlers.HandlerContext, []byte) ([]byte, types.CompletionCode, error) {
		return []byte{1}, types.CodeOK, nil // the erasure is over
	}
	registry.RegisterFunc(types.CommandClearSDRRepo, cleared)
	registry.RegisterFunc(types.CommandClearSEL, cleared)
	ctx, cancel := context.WithCancel(ctx)
	i := &IPMI{
		chassis: c, commands: commands, console: console, bmc: b, conn: conn, cancel: cancel, done: make(chan struct{}),
		server: server.NewServer(b, conn, server.WithHandlerRegistry(registry)),
	}
	go func() {
		defer close(i.done)
		_ = i.server.Serve(ctx) // ends with Close's error only
	}()
	i.stop = context.AfterFunc(ctx, func() { _ = i.server.Close() })
	return i, nil
}

// guid is the system's UUID, in the byte order of Get System GUID.
var guid = [16]byte{0x42, 0x43, 0x52, 0x49, 0x47, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1}

// Addr is the BMC's host:port.
func (i *IPMI) Addr() string { return i.conn.LocalAddr().String() }

// Close ends the BMC, not the machine, and waits for what it is doing.
func (i *IPMI) Close() error {
	i.stop()
	i.cancel()
	err := i.server.Close()
	<-i.done
	i.quiesce()
	return err
}

// writes are the lines of commands that change something and that no machine
// sees.
var writes = map[uint16]string{
	commandKey(types.CommandColdReset): "manager reset", commandKey(types.CommandWarmReset): "manager reset",
	commandKey(types.CommandClearSDRRepo): "sdr cleared", commandKey(types.CommandClearSEL): "log cleared",
	commandKey(types.CommandSetUserPassword): "password changed", commandKey(types.CommandSetUsername): "user renamed",
	commandKey(types.CommandSetUserAccess): "user access changed", commandKey(types.CommandSetLanConfigParam): "lan changed",
	commandKey(types.CommandWriteFRUData): "fru written", commandKey(types.CommandAddSDR): "sdr written", commandKey(types.CommandDeleteSDR): "sdr written",
}

func commandKey(c types.Command) uint16 { return uint16(c.NetFn)<<8 | uint16(c.ID) }

// logWrites logs what the BMC has taken of these.
func logWrites(c *chassis) handlers.Middleware {
	return func(next handlers.Handler) handlers.Handler {
		return handlers.HandlerFunc(func(ctx context.Context, h *handlers.HandlerContext, data []byte) ([]byte, types.CompletionCode, error) {
			answer, code, err := next.Handle(ctx, h, data)
			line, write := writes[commandKey(h.Command)]
			test := line == "password changed" && len(data) > 1 && data[1]&3 == 3 // compares only
			if write && !test && err == nil && code == types.CodeOK {
				c.note("%s", line)
			}
			return answer, code, err
		})
	}
}

// watchBootTimer sees parameter 3 of Set System Boot Options, which the
// embedded BMC accepts without keeping it: bit 3 stops the 60 second timer.
func watchBootTimer(c *chassis) handlers.Middleware {
	return func(next handlers.Handler) handlers.Handler {
		return handlers.HandlerFunc(func(ctx context.Context, h *handlers.HandlerContext, data []byte) ([]byte, types.CompletionCode, error) {
			answer, code, err := next.Handle(ctx, h, data)
			timer := h.Command.NetFn == types.CommandSetSystemBootOptions.NetFn && h.Command.ID == types.CommandSetSystemBootOptions.ID &&
				len(data) >= 2 && data[0]&0x7f == byte(types.BootOptionParamSelector_BMCBootFlagValidBitClear)
			if timer && err == nil && code == types.CodeOK {
				c.keepFlags(data[1]&0x08 != 0)
			}
			return answer, code, err
		})
	}
}

// interrupt is chassis control 4, which the embedded BMC has no hardware for.
func interrupt(c *chassis) handlers.Middleware {
	return func(next handlers.Handler) handlers.Handler {
		return handlers.HandlerFunc(func(ctx context.Context, h *handlers.HandlerContext, data []byte) ([]byte, types.CompletionCode, error) {
			control := h.Command.NetFn == types.CommandChassisControl.NetFn && h.Command.ID == types.CommandChassisControl.ID
			if !control || len(data) == 0 || data[0]&0x0f != 4 {
				return next.Handle(ctx, h, data)
			}
			switch err := c.nmi(ctx); {
			case errors.Is(err, errNotRunning):
				return nil, types.CodeNotSupported, nil
			case err != nil:
				return nil, types.CodeUnspecifiedError, nil
			}
			return nil, types.CodeOK, nil
		})
	}
}

// hardware is the embedded BMC's view of the machine: its chassis is ours,
// the rest is in memory.
type hardware struct {
	*mock.HAL
	hal.ChassisHAL // identify light, intrusion, boot acknowledge
	chassis        *chassis
}

func newHardware(c *chassis) *hardware {
	m := mock.New()
	return &hardware{HAL: m, ChassisHAL: m.Chassis(), chassis: c}
}

func (h *hardware) Chassis() hal.ChassisHAL { return h }

func (h *hardware) PowerState(context.Context) (bool, error) { return h.chassis.machine.Running(), nil }

func (h *hardware) SetPower(ctx context.Context, on bool) error {
	if on {
		return h.run(ctx, h.chassis.powerOn)
	}
	return h.run(ctx, h.chassis.powerOff)
}

func (h *hardware) PowerCycle(ctx context.Context) error { return h.run(ctx, h.chassis.cycle) }

// ColdReset is IPMI's hard reset.
func (h *hardware) ColdReset(ctx context.Context) error { return h.run(ctx, h.chassis.reset) }

// WarmReset is IPMI's soft shutdown: the embedded BMC calls it for chassis control 5.
func (h *hardware) WarmReset(ctx context.Context) error { return h.run(ctx, h.chassis.soft) }

// run makes an action that the machine's state forbids completion code D5h.
func (h *hardware) run(ctx context.Context, action func(context.Context) error) error {
	err := action(ctx)
	if errors.Is(err, errNotRunning) {
		return types.CodeNotSupported
	}
	return err
}

// selectors are the boot devices of IPMI 2.0, table 28-14, that the rig has.
var selectors = map[types.BootDeviceSelector]string{
	types.BootDeviceSelectorNoOverride:     "none",
	types.BootDeviceSelectorForcePXE:       "pxe",
	types.BootDeviceSelectorForceHardDrive: "disk",
	types.BootDeviceSelectorForceCDROM:     "cdrom",
	types.BootDeviceSelectorForceBIOSSetup: "bios",
}

func (h *hardware) SetBootFlags(_ context.Context, flags *types.BootOptionParam_BootFlags) error {
	device, known := selectors[flags.BootDeviceSelector]
	switch {
	case !known:
		return types.CodeParameterOutOfRange
	case !flags.BootFlagsValid || device == "none" && flags.Persist:
		h.chassis.clearOverride()
	default:
		h.chassis.setOverride(BootDevice{Device: device, EFI: bool(flags.BIOSBootType), Persistent: flags.Persist}, true)
	}
	return nil
}

func (h *hardware) GetBootFlags(context.Context) (*types.BootOptionParam_BootFlags, error) {
	dev, valid := h.chassis.current()
	flags := &types.BootOptionParam_BootFlags{BootFlagsValid: valid}
	for selector, device := range selectors {
		if valid && device == dev.Device {
			flags.BootDeviceSelector = selector
			flags.Persist = dev.Persistent
			flags.BIOSBootType = types.BIOSBootType(dev.EFI)
		}
	}
	return flags, nil
}

// fru is the inventory of device 0: a board and a product area after the
// common header (IPMI Platform Management FRU Information Storage 1.0).
func fru() []byte {
	board := area([]byte{1, 0, 0, 0, 0, 0}, "Better Compute", "Rig Board", "RIG-BOARD-1", "RB-1", "")
	product := area([]byte{1, 0, 0}, "Better Compute", "Rig Machine", "RM-1", "1.0", "RIG-0001", "RIG-ASSET-1", "")
	header := []byte{1, 0, 0, 1, byte(1 + len(board)/8), 0, 0}
	out := append(header, checksum(header))
	return append(append(out, board...), product...)
}

// area is a FRU area in eight-byte units: fixed bytes, fields of type and
// length, end mark, checksum.
func area(fixed []byte, fields ...string) []byte {
	out := append([]byte(nil), fixed...)
	for _, f := range fields {
		out = append(out, 0xc0|byte(len(f)))
		out = append(out, f...)
	}
	out = append(out, 0xc1)
	for (len(out)+1)%8 != 0 {
		out = append(out, 0)
	}
	out[1] = byte((len(out) + 1) / 8)
	return append(out, checksum(out))
}

// checksum brings the sum of all bytes to zero.
func checksum(b []byte) byte {
	var sum byte
	for _, x := range b {
		sum += x
	}
	return -sum
}
