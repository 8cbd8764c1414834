package decide

import (
	"fmt"
	"strings"
)

// Program is what asks.
type Program int

const (
	// System is an operating system or anything else that does not boot: it gets an address and no more.
	System Program = iota
	// Firmware is a PXE ROM: it takes a file name for TFTP.
	Firmware
	// HTTPBoot is firmware that takes a URL and gives HTTPClient as its class.
	HTTPBoot
	// IPXE is an iPXE that speaks HTTP and runs scripts.
	IPXE
	// Agent is a booted ramdisk that fetches its artifacts.
	Agent
	// GRUB is one that the box handed out, and that fetches its configuration.
	GRUB
)

var programs = [...]string{System: "system", Firmware: "pxe", HTTPBoot: "http-boot", IPXE: "ipxe", Agent: "agent", GRUB: "grub"}

func (p Program) String() string { return named(programs[:], int(p), "program") }

// Arch is what the program runs on.
type Arch int

const (
	// OtherArch is none of the following: nothing that the box has runs there.
	OtherArch Arch = iota
	BIOS
	X86UEFI
	X64
	ARM32
	ARM64
	RPi
	UBootARM32
	UBootARM64
	RISCV32
	RISCV64
	LoongArch64
)

var archNames = [...]string{OtherArch: "other-arch", BIOS: "bios", X86UEFI: "uefi-ia32", X64: "uefi-x64", ARM32: "uefi-arm32", ARM64: "uefi-arm64",
	RPi: "raspberry-pi", UBootARM32: "u-boot-arm32", UBootARM64: "u-boot-arm64", RISCV32: "uefi-riscv32", RISCV64: "uefi-riscv64", LoongArch64: "uefi-loongarch64"}

func (a Arch) String() string { return named(archNames[:], int(a), "arch") }

func (a Arch) uefi() bool {
	switch a {
	case X86UEFI, X64, ARM32, ARM64, RISCV32, RISCV64, LoongArch64:
		return true
	}
	return false
}

func named(names []string, i int, what string) string {
	if i >= 0 && i < len(names) {
		return names[i]
	}
	return fmt.Sprintf("%s-%d", what, i)
}

// Client is who asks. It is comparable.
type Client struct {
	Program Program
	Arch    Arch
	// Looping: this client was given our iPXE before and came back as the same, as
	// an iPXE of a network card's maker does that hides its user class.
	Looping bool
	// Foreign is an iPXE that is not ours, as far as the box knows.
	Foreign bool
}

func (c Client) String() string {
	if c.Program == System || c.Program == Agent {
		return c.Program.String()
	}
	s := c.Program.String() + " " + c.Arch.String()
	if c.Looping {
		s += " looping"
	}
	if c.Foreign {
		s += " foreign"
	}
	return s
}

// registered are the processor architecture types of IANA's registry (RFC 5970
// took it over from RFC 4578), and whether one means boot by URL.
var registered = map[uint16]struct {
	arch Arch
	http bool
}{
	0: {BIOS, false}, 20: {BIOS, true},
	6: {X86UEFI, false}, 15: {X86UEFI, true},
	// EDK2 says 7 for x86-64; 9, "EFI byte code", is what RFC 4578 called it and others send.
	7: {X64, false}, 9: {X64, false}, 16: {X64, true}, 17: {X64, true},
	10: {ARM32, false}, 18: {ARM32, true},
	11: {ARM64, false}, 19: {ARM64, true},
	21: {UBootARM32, false}, 23: {UBootARM32, true},
	22: {UBootARM64, false}, 24: {UBootARM64, true},
	25: {RISCV32, false}, 26: {RISCV32, true},
	27: {RISCV64, false}, 28: {RISCV64, true},
	39: {LoongArch64, false}, 40: {LoongArch64, true},
	0x29: {RPi, false},
}

// ArchOf is the architecture that counts of those that a request names, and its
// number; -1 if none is told. Old ROMs tell it in the class only; the oldest tell
// nothing and are BIOS. Of several, the first that the box has a program for.
func ArchOf(vendorClass string, archs []uint16) (arch Arch, number int) {
	if rest, ok := cutAny(vendorClass, "PXEClient", "HTTPClient"); ok && len(archs) == 0 {
		n := uint16(0)
		if _, err := fmt.Sscanf(rest, ":Arch:%05d", &n); err != nil && strings.HasPrefix(vendorClass, "HTTPClient") {
			n = 16
		}
		archs = []uint16{n}
	}
	number = -1
	for _, n := range archs {
		a := registered[n].arch
		if number < 0 || !bootable(arch) && bootable(a) {
			arch, number = a, int(n)
		}
	}
	return arch, number
}

// bootable says whether the box can have a program for the architecture.
func bootable(a Arch) bool { return loaders[a] != "" }

// cutAny is what follows the first prefix that s has.
func cutAny(s string, prefixes ...string) (rest string, ok bool) {
	for _, p := range prefixes {
		if rest, ok := strings.CutPrefix(s, p); ok {
			return rest, true
		}
	}
	return s, false
}

// ClientOf reads who asks from options 60, 77, 93 and 175. Nothing of it is proven.
func ClientOf(vendorClass, userClass string, archs []uint16, ipxeFeatures []byte) Client {
	arch, number := ArchOf(vendorClass, archs)
	c := Client{Arch: arch}
	switch {
	case speaksIPXE(userClass, ipxeFeatures):
		c.Program = IPXE
		if number < 0 {
			c.Arch = BIOS // only the oldest tell no architecture
		}
	case strings.HasPrefix(vendorClass, "HTTPClient"):
		c.Program = HTTPBoot
	case strings.HasPrefix(vendorClass, "PXEClient"):
		c.Program = Firmware
	case strings.HasPrefix(vendorClass, "U-Boot") && number >= 0:
		c.Program = Firmware
		if registered[uint16(number)].http {
			c.Program = HTTPBoot
		}
	}
	return c
}

// featureHTTP is the sub-option of option 175 by which an iPXE says that it speaks HTTP.
const featureHTTP = 0x13

// speaksIPXE says whether the sender is an iPXE that can fetch our script. One
// that says it has no HTTP is firmware like any other: it chains to ours.
func speaksIPXE(userClass string, features []byte) bool {
	// iPXE sends the bare word; RFC 3004 wants a length before it.
	if userClass != "iPXE" && userClass != "\x04iPXE" {
		return false
	}
	if len(features) == 0 {
		return true
	}
	has := false
	for len(features) >= 2 {
		code, n := features[0], int(features[1])
		if len(features) < 2+n {
			break
		}
		if code == featureHTTP && n >= 1 && features[2] != 0 {
			has = true
		}
		features = features[2+n:]
	}
	return has
}
