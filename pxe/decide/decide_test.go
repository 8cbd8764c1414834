package decide

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/pxe/pxev1"
)

const mac = "52:54:00:00:00:01"

var now = time.UnixMilli(1_000_000)

func machine(a pxev1.Action, edit ...func(*pxev1.Machine)) *pxev1.Machine {
	m := &pxev1.Machine{MachineId: "n", Action: a, Purpose: "deploy", WindowId: "w1", WindowUntilMs: 1_000_001}
	for _, f := range edit {
		f(m)
	}
	return m
}

var (
	pxeBIOS, pxeX64, httpX64 = Client{Program: Firmware, Arch: BIOS}, Client{Program: Firmware, Arch: X64}, Client{Program: HTTPBoot, Arch: X64}
	ipxeBIOS, ipxeX64        = Client{Program: IPXE, Arch: BIOS}, Client{Program: IPXE, Arch: X64}
	foreign, looping         = Client{Program: IPXE, Arch: X64, Foreign: true}, Client{Program: Firmware, Arch: X64, Looping: true}
	pxeARM, httpARM          = Client{Program: Firmware, Arch: ARM64}, Client{Program: HTTPBoot, Arch: ARM64}
	agent                    = Client{Program: Agent}
	grubARM, grubX64         = Client{Program: GRUB, Arch: ARM64}, Client{Program: GRUB, Arch: X64}
)

func shim(a pxev1.Action) *pxev1.Machine {
	return machine(a, func(m *pxev1.Machine) {
		m.Loader, m.RamBytes, m.Iso = "shim", 8<<30, &pxev1.Iso{Name: "rescue", Size: 700 << 20}
	})
}

func TestDecide(t *testing.T) {
	ram := machine(pxev1.Action_ACTION_RAMDISK)
	local := machine(pxev1.Action_ACTION_LOCAL_DISK)
	iso := func(class pxev1.IsoClass, size uint64) *pxev1.Machine {
		return machine(pxev1.Action_ACTION_ISO, func(m *pxev1.Machine) { m.Iso = &pxev1.Iso{Name: "rescue", Size: size, Class: class} })
	}
	has := func(m *pxev1.Machine, ram uint64) *pxev1.Machine {
		m = proto.CloneOf(m)
		m.RamBytes = ram
		return m
	}
	small := iso(pxev1.IsoClass_ISO_CLASS_SELF_CONTAINED, 700<<20)
	large := iso(pxev1.IsoClass_ISO_CLASS_SELF_CONTAINED, 5<<30)
	seeks := iso(pxev1.IsoClass_ISO_CLASS_NEEDS_DRIVE, 700<<20)
	uki, kernel := machine(pxev1.Action_ACTION_UKI), machine(pxev1.Action_ACTION_KERNEL)
	drivers := machine(pxev1.Action_ACTION_RAMDISK, func(m *pxev1.Machine) { m.Loader = "ipxe" })
	twice := machine(pxev1.Action_ACTION_RAMDISK, func(m *pxev1.Machine) { m.MaxBoots = 2 })
	later := now.Add(time.Hour)
	for _, tt := range []struct {
		name   string
		r      Request
		action Action
		file   string
		http   bool
		exit   Exit
		reason string
	}{
		{"system", Request{Machine: ram}, None, "", false, 0, "not a boot request"},
		{"BIOS", Request{Machine: ram, Client: pxeBIOS}, RunAgent, "undionly.kpxe", false, 0, "ramdisk for deploy"},
		{"UEFI", Request{Machine: ram, Client: pxeX64}, RunAgent, "snponly.efi", false, 0, "ramdisk for deploy"},
		{"UEFI, own drivers", Request{Machine: drivers, Client: pxeX64}, RunAgent, "ipxe.efi", false, 0, ""},
		{"BIOS, own drivers", Request{Machine: drivers, Client: pxeBIOS}, RunAgent, "undionly.kpxe", false, 0, ""},
		{"UEFI HTTP", Request{Machine: ram, Client: httpX64}, RunAgent, "snponly.efi", true, 0, ""},
		{"BIOS HTTP", Request{Machine: ram, Client: Client{Program: HTTPBoot, Arch: BIOS}}, Deny, "", false, 0, "no boot program for HTTP boot of a BIOS"},
		{"iPXE", Request{Machine: ram, Client: ipxeX64}, RunAgent, "", true, 0, ""},
		{"a foreign iPXE", Request{Machine: ram, Client: foreign}, RunAgent, "snponly.efi", false, 0, ""},
		{"a foreign iPXE, local disk", Request{Machine: local, Client: foreign}, LocalDisk, "", true, ExitCode, ""},
		{"one that loops", Request{Machine: ram, Client: looping}, RunAgent, "", true, 0, "it does not start"},
		{"one that loops, local disk", Request{Machine: local, Client: looping}, LocalDisk, "", true, ExitCode, ""},
		{"arm64", Request{Machine: ram, Client: pxeARM}, RunAgent, "grubnetaa64.efi", false, 0, ""},
		{"arm64 HTTP", Request{Machine: ram, Client: httpARM}, RunAgent, "grubnetaa64.efi", true, 0, ""},
		{"arm64 iPXE", Request{Machine: ram, Client: Client{Program: IPXE, Arch: ARM64}}, RunAgent, "", true, 0, "for deploy"},
		{"arm64 iPXE, not ours: there is none", Request{Machine: ram, Client: Client{Program: IPXE, Arch: ARM64, Foreign: true}}, RunAgent, "", true, 0, ""},
		{"arm64 that asks again and again", Request{Machine: ram, Client: Client{Program: Firmware, Arch: ARM64, Looping: true}}, RunAgent, "grubnetaa64.efi", false, 0, ""},
		{"arm64 that asks again, local disk", Request{Machine: local, Client: Client{Program: Firmware, Arch: ARM64, Looping: true}}, LocalDisk, "", false, NoAnswer, ""},
		{"arm64 GRUB", Request{Machine: ram, Client: grubARM}, RunAgent, "", true, 0, "for deploy"},
		{"arm64 GRUB, local disk", Request{Machine: local, Client: grubARM}, LocalDisk, "", true, ExitCode, ""},
		{"arm64 GRUB, window ended", Request{Machine: ram, Client: grubARM, Now: later}, LocalDisk, "", true, ExitCode, "has ended"},
		{"arm64 GRUB, unknown", Request{MAC: mac, Client: grubARM}, Deny, "", false, 0, "unknown"},
		{"shim", Request{Machine: shim(pxev1.Action_ACTION_RAMDISK), Client: pxeX64}, RunAgent, "shimx64.efi", false, 0, "for deploy"},
		{"shim by HTTP", Request{Machine: shim(pxev1.Action_ACTION_RAMDISK), Client: httpX64}, RunAgent, "shimx64.efi", true, 0, ""},
		{"shim, asking again and again", Request{Machine: shim(pxev1.Action_ACTION_RAMDISK), Client: looping}, RunAgent, "shimx64.efi", false, 0, ""},
		{"shim, asking again, local disk", Request{Machine: shim(pxev1.Action_ACTION_LOCAL_DISK), Client: looping}, LocalDisk, "", false, NoAnswer, ""},
		{"shim, an iPXE of the card", Request{Machine: shim(pxev1.Action_ACTION_RAMDISK), Client: ipxeX64}, RunAgent, "shimx64.efi", false, 0, ""},
		{"shim, its GRUB", Request{Machine: shim(pxev1.Action_ACTION_RAMDISK), Client: grubX64}, RunAgent, "", true, 0, ""},
		{"shim is of x86-64", Request{Machine: shim(pxev1.Action_ACTION_RAMDISK), Client: pxeARM}, RunAgent, "grubnetaa64.efi", false, 0, ""},
		{"shim in BIOS", Request{Machine: shim(pxev1.Action_ACTION_RAMDISK), Client: pxeBIOS}, RunAgent, "undionly.kpxe", false, 0, ""},
		{"shim, kernel", Request{Machine: shim(pxev1.Action_ACTION_KERNEL), Client: pxeX64}, Kernel, "shimx64.efi", false, 0, ""},
		{"shim, UKI", Request{Machine: shim(pxev1.Action_ACTION_UKI), Client: pxeX64}, UKI, "shimx64.efi", false, 0, ""},
		{"shim, UKI by HTTP", Request{Machine: shim(pxev1.Action_ACTION_UKI), Client: httpX64}, UKI, "", true, 0, ""},
		{"shim, iso by PXE", Request{Machine: shim(pxev1.Action_ACTION_ISO), Client: pxeX64}, Deny, "", false, 0, "GRUB gives no drives out"},
		{"shim, iso by GRUB", Request{Machine: shim(pxev1.Action_ACTION_ISO), Client: grubX64}, Deny, "", false, 0, "GRUB gives no drives out"},
		{"shim, iso into memory", Request{Machine: shim(pxev1.Action_ACTION_ISO), Client: httpX64}, HTTPISO, "", true, 0, ""},
		{"arm64 iPXE, an own kernel", Request{Machine: kernel, Client: Client{Program: IPXE, Arch: ARM64}}, Kernel, "", true, 0, ""},
		{"ia32", Request{Machine: ram, Client: Client{Program: Firmware, Arch: X86UEFI}}, Deny, "", false, 0, "no boot program for uefi-ia32"},
		{"RISC-V", Request{Machine: ram, Client: Client{Program: HTTPBoot, Arch: RISCV64}}, Deny, "", false, 0, "no boot program for uefi-riscv64"},
		{"Raspberry Pi", Request{Machine: ram, Client: Client{Program: Firmware, Arch: RPi}}, Deny, "", false, 0, "no boot program for raspberry-pi"},
		{"an architecture of nobody", Request{Machine: ram, Client: Client{Program: Firmware}}, Deny, "", false, 0, "no boot program"},
		{"local disk, PXE", Request{Machine: local, Client: pxeX64}, LocalDisk, "", false, NoAnswer, "assigned to its local disk"},
		{"local disk, HTTP", Request{Machine: local, Client: httpX64}, LocalDisk, "", true, NotFound, ""},
		{"local disk, iPXE", Request{Machine: local, Client: ipxeBIOS, Returned: 1}, LocalDisk, "", true, ExitCode, ""},
		{"local disk, iPXE whose exit reboots", Request{Machine: local, Client: ipxeBIOS, Returned: 2}, LocalDisk, "", true, Sanboot, "came back"},
		{"local disk, UEFI iPXE that comes back", Request{Machine: local, Client: ipxeX64, Returned: 9}, LocalDisk, "", true, ExitCode, ""},
		{"window ended", Request{Machine: ram, Client: pxeX64, Now: later}, LocalDisk, "", false, NoAnswer, "has ended"},
		{"window ended, agent", Request{Machine: ram, Client: agent, Now: later}, RunAgent, "", true, 0, ""},
		{"done", Request{Machine: ram, Client: pxeX64, Done: true}, LocalDisk, "", false, NoAnswer, "is done"},
		{"done, agent", Request{Machine: ram, Client: agent, Done: true}, RunAgent, "", true, 0, ""},
		{"boots left", Request{Machine: twice, Client: pxeX64, Boots: 1}, RunAgent, "snponly.efi", false, 0, ""},
		{"no boots left", Request{Machine: twice, Client: pxeX64, Boots: 2}, LocalDisk, "", false, NoAnswer, "booted 2 times"},
		{"the box's own bound", Request{Machine: ram, Client: ipxeX64, Boots: MaxBoots}, LocalDisk, "", true, ExitCode, "booted 8 times"},
		{"kernel", Request{Machine: kernel, Client: ipxeBIOS}, Kernel, "", true, 0, ""},
		{"kernel, firmware", Request{Machine: kernel, Client: pxeBIOS}, Kernel, "undionly.kpxe", false, 0, ""},
		{"kernel, agent", Request{Machine: kernel, Client: agent}, Deny, "", false, 0, "no ramdisk"},
		{"UKI in BIOS", Request{Machine: uki, Client: ipxeBIOS}, Deny, "", false, 0, "needs UEFI"},
		{"UKI by HTTP", Request{Machine: uki, Client: httpX64}, UKI, "", true, 0, ""},
		{"UKI by PXE", Request{Machine: uki, Client: pxeX64}, UKI, "snponly.efi", false, 0, ""},
		{"iso, BIOS", Request{Machine: small, Client: ipxeBIOS}, SanbootISO, "", true, 0, "rescue"},
		{"iso, UEFI iPXE", Request{Machine: small, Client: ipxeX64}, SanbootISO, "", true, 0, ""},
		{"iso, PXE", Request{Machine: small, Client: pxeX64}, SanbootISO, "snponly.efi", false, 0, ""},
		{"iso, HTTP, memory not known", Request{Machine: small, Client: httpX64}, SanbootISO, "snponly.efi", true, 0, "memory is not known, so that it is given as a drive"},
		{"iso, HTTP, fits", Request{Machine: has(small, 2<<30), Client: httpX64}, HTTPISO, "", true, 0, "700 of 2048 MiB"},
		{"iso, HTTP, leaves too little", Request{Machine: has(small, 1600<<20), Client: httpX64}, SanbootISO, "snponly.efi", true, 0, "with 1024 MiB left"},
		{"iso, HTTP, nothing would be left", Request{Machine: has(small, 700<<20), Client: httpX64}, SanbootISO, "snponly.efi", true, 0, "do not fit"},
		{"iso, HTTP, fits above 4 GiB", Request{Machine: has(large, 16<<30), Client: httpX64}, HTTPISO, "", true, 0, "5120 of 16384 MiB"},
		{"iso, HTTP, not in one piece", Request{Machine: has(large, 8<<30), Client: httpX64}, SanbootISO, "snponly.efi", true, 0, "4096 MiB are sure to lie together"},
		{"iso, arm64, memory not known", Request{Machine: small, Client: httpARM}, HTTPISO, "", true, 0, "memory is not known"},
		{"iso, arm64, too large for the unknown", Request{Machine: large, Client: httpARM}, Deny, "", false, 0, "unknown size"},
		{"iso, arm64, too large", Request{Machine: has(large, 1<<20), Client: httpARM}, Deny, "", false, 0, "do not fit"},
		{"iso, BIOS, as large as it may be", Request{Machine: iso(0, 4<<30), Client: ipxeBIOS}, SanbootISO, "", true, 0, "not known whether"},
		{"iso, BIOS, too large", Request{Machine: large, Client: ipxeBIOS}, Deny, "", false, 0, "4096 MiB that iPXE can read"},
		{"iso, BIOS firmware, too large", Request{Machine: large, Client: pxeBIOS}, Deny, "", false, 0, "4096 MiB that iPXE can read"},
		{"iso, UEFI iPXE, any size", Request{Machine: large, Client: ipxeX64}, SanbootISO, "", true, 0, ""},
		{"iso, arm64", Request{Machine: small, Client: pxeARM}, Deny, "", false, 0, "by HTTP boot only"},
		{"iso that seeks its disc, BIOS", Request{Machine: seeks, Client: ipxeBIOS}, SanbootISO, "", true, 0, "leaves the BIOS"},
		{"iso that seeks its disc, UEFI", Request{Machine: seeks, Client: ipxeX64}, SanbootISO, "", true, 0, "leaves the firmware"},
		{"iso that seeks its disc, memory", Request{Machine: has(seeks, 4<<30), Client: httpX64}, HTTPISO, "", true, 0, "pmem"},
		{"later action", Request{Machine: machine(99), Client: pxeX64}, Deny, "", false, 0, "action 99"},
		{"unknown", Request{MAC: mac, Client: pxeX64}, Deny, "", false, 0, "the machine is unknown"},
		{"unknown, left alone", Request{MAC: mac, Unknown: &pxev1.Unknown{}, Client: pxeX64}, Deny, "", false, 0, "unknown"},
		{"unknown, inspected", Request{MAC: mac, Unknown: &pxev1.Unknown{Inspect: true, WindowId: "u", WindowUntilMs: 1_000_001}, Client: pxeX64}, RunAgent, "snponly.efi", false, 0, "for inspect"},
		{"unknown, window ended", Request{MAC: mac, Unknown: &pxev1.Unknown{Inspect: true, WindowId: "u", WindowUntilMs: 1}, Client: pxeX64}, LocalDisk, "", false, NoAnswer, "has ended"},
		{"unknown, not expected", Request{MAC: mac, Unknown: &pxev1.Unknown{Inspect: true, WindowUntilMs: 1_000_001, Expected: []*pxev1.Expected{{Mac: "52:54:00:00:00:02"}, {ProductUuid: "x"}}}, Client: pxeX64}, Deny, "", false, 0, "not one of those"},
		{"unknown, expected", Request{MAC: mac, Unknown: &pxev1.Unknown{Inspect: true, WindowUntilMs: 1_000_001, Expected: []*pxev1.Expected{{Mac: mac}}}, Client: pxeX64}, RunAgent, "snponly.efi", false, 0, ""},
		{"unknown, expected by its UUID", Request{MAC: mac, UUID: "4C4C4544-0042-3010-8056-B4C04F303232", Unknown: &pxev1.Unknown{Inspect: true, WindowUntilMs: 1_000_001, Expected: []*pxev1.Expected{{ProductUuid: "4c4c4544-0042-3010-8056-b4c04f303232"}}}, Client: pxeX64}, RunAgent, "snponly.efi", false, 0, ""},
		{"unknown, expected by its UUID in the other byte order", Request{MAC: mac, UUID: "44454c4c-4200-1030-8056-b4c04f303232", Unknown: &pxev1.Unknown{Inspect: true, WindowUntilMs: 1_000_001, Expected: []*pxev1.Expected{{ProductUuid: "4c4c4544-0042-3010-8056-b4c04f303232"}}}, Client: pxeX64}, RunAgent, "snponly.efi", false, 0, ""},
		{"unknown, with a UUID of many", Request{MAC: mac, UUID: "03000200-0400-0500-0006-000700080009", Unknown: &pxev1.Unknown{Inspect: true, WindowUntilMs: 1_000_001, Expected: []*pxev1.Expected{{ProductUuid: "03000200-0400-0500-0006-000700080009"}}}, Client: pxeX64}, Deny, "", false, 0, "not one of those"},
	} {
		if tt.r.Now.IsZero() {
			tt.r.Now = now
		}
		got := Decide(tt.r)
		if got.Action != tt.action || got.File() != tt.file || got.HTTP != tt.http || got.Exit != tt.exit || !strings.Contains(got.Reason, tt.reason) || got.Reason == "" {
			t.Errorf("%s: Decide = %+v, want %v %q http %v exit %v, because %q", tt.name, got, tt.action, tt.file, tt.http, tt.exit, tt.reason)
		}
	}
}

// TestFetchable: TFTP and HTTP give exactly what DHCP could name.
func TestFetchable(t *testing.T) {
	ram := machine(pxev1.Action_ACTION_RAMDISK)
	for _, tt := range []struct {
		name string
		r    Request
		file string
		want bool
	}{
		{"UEFI", Request{Machine: ram}, "snponly.efi", true},
		{"BIOS", Request{Machine: ram}, "undionly.kpxe", true},
		{"arm64", Request{Machine: ram}, "grubnetaa64.efi", true},
		{"another loader", Request{Machine: ram}, "ipxe.efi", false},
		{"shim", Request{Machine: shim(pxev1.Action_ACTION_RAMDISK)}, "shimx64.efi", true},
		{"what shim fetches", Request{Machine: shim(pxev1.Action_ACTION_RAMDISK)}, "grubx64.efi", true},
		{"what shim asks for beside it", Request{Machine: shim(pxev1.Action_ACTION_RAMDISK)}, "revocations.efi", false},
		{"shim's GRUB without shim", Request{Machine: ram}, "grubx64.efi", false},
		{"shim, local disk", Request{Machine: shim(pxev1.Action_ACTION_LOCAL_DISK)}, "grubx64.efi", false},
		{"no name", Request{Machine: ram}, "", false},
		{"a path", Request{Machine: ram}, "ipxe/snponly.efi", false},
		{"autoexec", Request{Machine: ram}, "autoexec.ipxe", false},
		{"local disk", Request{Machine: machine(pxev1.Action_ACTION_LOCAL_DISK)}, "snponly.efi", false},
		{"done", Request{Machine: ram, Done: true}, "undionly.kpxe", false},
		{"unknown", Request{MAC: mac}, "snponly.efi", false},
	} {
		tt.r.Now = now
		d, ok := Fetchable(tt.r, tt.file)
		if ok != tt.want || ok && d.File() != tt.file || !ok && d.Reason == "" {
			t.Errorf("%s: Fetchable(%q) = %+v, %v, want %v", tt.name, tt.file, d, ok, tt.want)
		}
	}
}

func TestClientOf(t *testing.T) {
	for _, tt := range []struct {
		class, user string
		archs       []uint16
		features    []byte
		want        Client
	}{
		{"PXEClient:Arch:00000:UNDI:002001", "", []uint16{0}, nil, pxeBIOS},
		{"PXEClient:Arch:00007:UNDI:003016", "", []uint16{7}, nil, pxeX64},
		{"PXEClient:Arch:00009:UNDI:003016", "", []uint16{9}, nil, pxeX64},
		{"PXEClient:Arch:00006:UNDI:003016", "", []uint16{6}, nil, Client{Program: Firmware, Arch: X86UEFI}},
		{"PXEClient:Arch:00010", "", []uint16{10}, nil, Client{Program: Firmware, Arch: ARM32}},
		{"PXEClient:Arch:00011", "", []uint16{11}, nil, pxeARM},
		{"HTTPClient:Arch:00015", "", []uint16{15}, nil, Client{Program: HTTPBoot, Arch: X86UEFI}},
		{"HTTPClient:Arch:00016", "", []uint16{16}, nil, httpX64},
		{"HTTPClient:Arch:00017", "", []uint16{17}, nil, httpX64},
		{"HTTPClient:Arch:00018", "", []uint16{18}, nil, Client{Program: HTTPBoot, Arch: ARM32}},
		{"HTTPClient:Arch:00019", "", []uint16{19}, nil, httpARM},
		{"HTTPClient:Arch:00020", "", []uint16{20}, nil, Client{Program: HTTPBoot, Arch: BIOS}},
		{"HTTPClient", "", nil, nil, httpX64},
		{"PXEClient", "", nil, nil, pxeBIOS},
		{"U-Boot.armv8", "", []uint16{22}, nil, Client{Program: Firmware, Arch: UBootARM64}},
		{"U-Boot.armv7", "", []uint16{23}, nil, Client{Program: HTTPBoot, Arch: UBootARM32}},
		{"PXEClient:Arch:00041", "", []uint16{0x29}, nil, Client{Program: Firmware, Arch: RPi}},
		{"PXEClient:Arch:00027", "", []uint16{27}, nil, Client{Program: Firmware, Arch: RISCV64}},
		{"PXEClient:Arch:65535", "", []uint16{65535}, nil, Client{Program: Firmware}},
		{"PXEClient", "", []uint16{6, 7}, nil, pxeX64},
		{"", "iPXE", []uint16{7}, nil, ipxeX64},
		{"", "iPXE", nil, nil, ipxeBIOS},
		{"PXEClient", "iPXE", []uint16{0}, []byte{0x13, 1, 1}, ipxeBIOS},
		{"PXEClient", "iPXE", []uint16{0}, []byte{0x21, 1, 1}, pxeBIOS},
		{"", "", []uint16{7}, nil, Client{Arch: X64}},
		{"udhcp 1.36", "", nil, nil, Client{}},
	} {
		if got := ClientOf(tt.class, tt.user, tt.archs, tt.features); got != tt.want {
			t.Errorf("ClientOf(%q, %q, %v, %x) = %v, want %v", tt.class, tt.user, tt.archs, tt.features, got, tt.want)
		}
	}
}
