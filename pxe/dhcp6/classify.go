package dhcp6

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/insomniacslk/dhcp/dhcpv6"

	"github.com/better-compute/site-appliance/appliance/base/printable"
	"github.com/better-compute/site-appliance/pxe/decide"
)

// Who is what a request says about its sender. Nothing of it is proven.
type Who struct {
	MAC string
	// Client is what the request says, with what the box remembers.
	Client decide.Client
	// Arch is the architecture of RFC 5970 that counted, -1 if none was told.
	Arch int
	// Class is option 16's first text, cut and printable.
	Class string
	// UUID is the product UUID, empty for none.
	UUID string
}

// classify reads who asks, from what real firmware sends.
func classify(m *dhcpv6.Message, mac string) (w Who, enterprise uint32) {
	w.MAC = mac
	for _, c := range m.Options.VendorClasses() {
		if len(c.Data) > 0 {
			w.Class, enterprise = printable.ASCII(string(c.Data[0]), 64), c.EnterpriseNumber
			break
		}
	}
	user := ""
	if c := m.Options.UserClasses(); len(c) > 0 {
		user = string(c[0])
	}
	var archs []uint16
	for _, a := range m.Options.ArchTypes() {
		archs = append(archs, uint16(a))
	}
	w.Client = decide.ClientOf(w.Class, user, archs, nil)
	if _, w.Arch = decide.ArchOf(w.Class, archs); w.Arch < 0 && w.Client.Program == decide.IPXE {
		w.Client.Arch = decide.OtherArch // older ones tell none, and a BIOS is the least likely to come by IPv6
	}
	if id, ok := m.Options.ClientID().(*dhcpv6.DUIDUUID); ok {
		w.UUID = uuid(id.UUID, w.Client.Program)
	}
	return w, enterprise
}

// uuid renders a DUID-UUID (RFC 6355) as tools print it. EDK2 sends the bytes as
// SMBIOS has them, the first three fields little-endian; iPXE as they are printed.
// That of a system is its own, and not the product's.
func uuid(b [16]byte, p decide.Program) string {
	switch {
	case p == decide.System, !slices.ContainsFunc(b[:], func(x byte) bool { return x != b[0] }):
		return ""
	case p == decide.Firmware, p == decide.HTTPBoot:
		for _, field := range [][]byte{b[0:4], b[4:6], b[6:8]} {
			slices.Reverse(field)
		}
	}
	return fmt.Sprintf("%08x-%04x-%04x-%x-%x", binary.BigEndian.Uint32(b[:]), binary.BigEndian.Uint16(b[4:]), binary.BigEndian.Uint16(b[6:]), b[8:10], b[10:])
}
