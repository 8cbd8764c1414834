package lab

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/image/qemutest"
)

// What the machine's SMBIOS says.
const (
	MachineUUID   = "6f0c7a52-0001-4bc0-9d11-0000000000bc"
	MachineSerial = "BC-MACHINE-0001"
)

// DiskSerial names the machine's disk, DiskBytes is its size.
const (
	DiskSerial = "BC-DISK-0001"
	DiskBytes  = 2 << 30
)

// Machine is the bare metal: a virtual machine that the rig's BMC starts and
// stops. It implements bmctest.Machine.
type Machine struct {
	ctx  context.Context // the lab's: a machine outlives the request that starts it
	dir  string
	net  string // path of its namespace
	Disk string

	mu    sync.Mutex
	vm    *qemutest.VM
	boots int
}

var _ bmctest.Machine = (*Machine)(nil)

func newMachine(ctx context.Context, dir, netns string) (*Machine, error) {
	m := &Machine{ctx: ctx, dir: dir, net: netns, Disk: filepath.Join(dir, "machine.disk")}
	f, err := os.Create(m.Disk)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return m, f.Truncate(DiskBytes)
}

// PowerOn starts the machine. An empty disk falls through to the network, as
// real firmware does.
func (m *Machine) PowerOn(_ context.Context, dev bmctest.BootDevice) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.boots++
	dir := filepath.Join(m.dir, fmt.Sprintf("machine-boot%d", m.boots))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	disk, nic := 1, 2
	if dev.Device == "pxe" {
		disk, nic = 2, 1
	}
	vm, err := qemutest.Start(m.ctx, qemutest.Config{
		Name: "machine", Dir: dir, UEFI: true, Vars: filepath.Join(m.dir, "machine-vars.fd"),
		MemoryMiB: 1024, UUID: MachineUUID, SMBIOSSerial: MachineSerial,
		Disks: []qemutest.Disk{{Path: m.Disk, Serial: DiskSerial, BootIndex: disk}},
		// Without a ROM of its own the firmware's network boot is what runs.
		NICs:  []qemutest.NIC{{Netdev: "tap,ifname=machine0,script=no,downscript=no", MAC: MachineMAC, ROM: "none", BootIndex: nic}},
		Netns: m.net,
	})
	if err != nil {
		return err
	}
	m.vm = vm
	return nil
}

// PowerOff takes the power away.
func (m *Machine) PowerOff(context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.vm == nil {
		return nil
	}
	return m.vm.Close()
}

// Soft presses the power button.
func (m *Machine) Soft(ctx context.Context) error {
	if vm := m.VM(); vm != nil {
		return vm.PowerDown(ctx)
	}
	return nil
}

// Reset presses the reset button.
func (m *Machine) Reset(ctx context.Context) error {
	if vm := m.VM(); vm != nil {
		return vm.Reset(ctx)
	}
	return nil
}

// Running says whether the machine has power.
func (m *Machine) Running() bool {
	vm := m.VM()
	return vm != nil && vm.Running()
}

// VM is the newest start of the machine, nil before the first.
func (m *Machine) VM() *qemutest.VM {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.vm
}

// WaitMarker waits for text on the serial line of the newest start.
func (m *Machine) WaitMarker(ctx context.Context, text string, quiet time.Duration) error {
	vm := m.VM()
	if vm == nil {
		return fmt.Errorf("the machine was never started")
	}
	return vm.WaitMarker(ctx, text, quiet)
}
