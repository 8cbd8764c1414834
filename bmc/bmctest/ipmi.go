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
	conn   *udp.Conn
	server *server.Server
	cancel context.CancelFunc
	stop   func() bool
	done   chan struct{}
}

// StartIPMI serves RMCP+ on listen (host:port over UDP, port 0 for any free
// one) until Close or the end of ctx. The password has at most 20 bytes.
func StartIPMI(ctx context.Context, listen, user, password string, m Machine, opts ...Option) (*IPMI, error) {
	o := newOptions(opts)
	if len(password) > bmc.MaxPasswordLen {
		return nil, fmt.Errorf("start IPMI BMC: the password has %d bytes, more than %d", len(password), bmc.MaxPasswordLen)
	}
	c := newChassis(m, o)
	hardware := newHardware(c)
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
	registry.Use(watchBootTimer(c))
	handlers.RegisterAllHandlers(registry)
	registry.RegisterFunc(types.CommandGetSystemGUID, func(context.Context, *handlers.HandlerContext, []byte) ([]byte, types.CompletionCode, error) {
		return guid[:], types.CodeOK, nil
	})
	ctx, cancel := context.WithCancel(ctx)
	i := &IPMI{
		chassis: c, conn: conn, cancel: cancel, done: make(chan struct{}),
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
