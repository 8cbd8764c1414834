package dhcp

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/iana"

	"github.com/better-compute/site-appliance/pxe/decide"
)

// Who is what a request says about its sender. Nothing of it is proven.
type Who struct {
	MAC    string
	Client decide.Client
	// Arch is the architecture of RFC 4578 that counted, -1 if none was told.
	Arch int
	// Class is option 60, cut and printable.
	Class string
	// UUID is the product UUID of option 97, empty for none, all zeros or all ones.
	UUID string
}

const (
	optionIPXE = 175
	// featureHTTP is the sub-option of 175 by which an iPXE says that it speaks HTTP.
	featureHTTP = 0x13
)

// classify reads who asks, from what real firmware sends.
func classify(req *dhcpv4.DHCPv4) Who {
	w := Who{MAC: req.ClientHWAddr.String(), Arch: -1, Class: printable(req.ClassIdentifier(), 64), UUID: uuid(req)}
	pxe, http := strings.HasPrefix(w.Class, "PXEClient"), strings.HasPrefix(w.Class, "HTTPClient")
	archs := req.ClientArch()
	if len(archs) == 0 && (pxe || http) {
		// Old ROMs say it in the class only; the oldest say nothing and are BIOS.
		n := 0
		_, _ = fmt.Sscanf(strings.TrimPrefix(strings.TrimPrefix(w.Class, "PXEClient"), "HTTPClient"), ":Arch:%05d", &n)
		archs = []iana.Arch{iana.Arch(n)}
	}
	ipxe := isIPXE(req)
	w.Client = decide.System
	for _, a := range archs {
		c := decide.OtherArch
		switch {
		case ipxe && (a == iana.INTEL_X86PC || a == iana.EFI_X86_64 || a == iana.EFI_BC):
			c = decide.IPXE
		case http && a == iana.EFI_X86_64_HTTP:
			c = decide.UEFIHTTP
		case pxe && a == iana.INTEL_X86PC:
			c = decide.BIOS
		// EDK2 says 7 for x86-64; 9, "EFI byte code", is what the registry called it for a while.
		case pxe && (a == iana.EFI_X86_64 || a == iana.EFI_BC):
			c = decide.UEFI
		case !pxe && !http && !ipxe:
			c = decide.System
		}
		if w.Arch < 0 || c != decide.OtherArch {
			w.Client, w.Arch = c, int(a)
		}
		if c != decide.OtherArch {
			break
		}
	}
	if ipxe && len(archs) == 0 {
		w.Client = decide.IPXE
	}
	return w
}

// isIPXE says whether the sender is an iPXE that can fetch our script. One
// that says it has no HTTP is firmware like any other: it chains to ours.
func isIPXE(req *dhcpv4.DHCPv4) bool {
	// iPXE sends the bare word; RFC 3004 wants a length before it.
	class := string(req.Options.Get(dhcpv4.OptionUserClassInformation))
	if class != "iPXE" && class != "\x04iPXE" {
		return false
	}
	features := req.Options.Get(dhcpv4.GenericOptionCode(optionIPXE))
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

// uuid renders option 97 as tools print it: the first three fields little-endian.
func uuid(req *dhcpv4.DHCPv4) string {
	b := req.Options.Get(dhcpv4.OptionClientMachineIdentifier)
	if len(b) != 17 || b[0] != 0 {
		return ""
	}
	b = b[1:]
	all := func(v byte) bool { return !slices.ContainsFunc(b, func(x byte) bool { return x != v }) }
	if all(0) || all(0xff) {
		return ""
	}
	return fmt.Sprintf("%08x-%04x-%04x-%x-%x", binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint16(b[4:]),
		binary.LittleEndian.Uint16(b[6:]), b[8:10], b[10:16])
}

func printable(s string, most int) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return -1
		}
		return r
	}, s)
	return s[:min(len(s), most)]
}
