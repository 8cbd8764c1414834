package dhcp

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/better-compute/site-appliance/appliance/base/printable"
	"github.com/better-compute/site-appliance/pxe/decide"
)

// Who is what a request says about its sender. Nothing of it is proven.
type Who struct {
	MAC string
	// Client is what the request says, with what the box remembers: whether an iPXE
	// is Foreign, and whether firmware is Looping.
	Client decide.Client
	// Arch is the architecture of RFC 4578 that counted, -1 if none was told.
	Arch int
	// Class is option 60 and Hostname option 12, cut and printable.
	Class, Hostname string
	// UUID is the product UUID of option 97, empty for none, all zeros or all ones.
	UUID string
}

const optionIPXE = 175

// classify reads who asks, from what real firmware sends.
func classify(req *dhcpv4.DHCPv4) Who {
	w := Who{MAC: req.ClientHWAddr.String(), UUID: uuid(req), Class: printable.ASCII(req.ClassIdentifier(), 64), Hostname: printable.ASCII(req.HostName(), 64)}
	var archs []uint16
	for _, a := range req.ClientArch() {
		archs = append(archs, uint16(a))
	}
	w.Client = decide.ClientOf(w.Class, string(req.Options.Get(dhcpv4.OptionUserClassInformation)), archs, req.Options.Get(dhcpv4.GenericOptionCode(optionIPXE)))
	_, w.Arch = decide.ArchOf(w.Class, archs)
	return w
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
