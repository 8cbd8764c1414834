package dhcp

import (
	"net"
	"testing"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

// TestHTTPBootWithAReservation: firmware that boots over HTTP is answered as such, reserved
// or not: its class comes back, and the URL is in the header and in option 67. (Built, as
// EDK2 asks.)
func TestHTTPBootWithAReservation(t *testing.T) {
	const url = "http://10.77.0.1/boot/snponly.efi"
	const discover, request = dhcpv4.MessageTypeDiscover, dhcpv4.MessageTypeRequest
	for _, tt := range []struct {
		name     string
		mode     Mode
		last     byte // of its MAC
		firmware dhcpv4.Modifier
		address  string // empty: silence
		class    string
		file     string
		siaddr   string
	}{
		{"reserved", Authoritative, 0x50, fromHTTP, "10.77.0.50", "HTTPClient", url, "10.77.0.1"},
		{"not reserved", Authoritative, 0x51, fromHTTP, "of the pool", "HTTPClient", url, "10.77.0.1"},
		{"reserved, beside another server", Reservations, 0x50, fromHTTP, "10.77.0.50", "HTTPClient", url, "10.77.0.1"},
		{"not reserved, beside another server", Reservations, 0x51, fromHTTP, "", "", "", ""},
		{"reserved, arm64", Authoritative, 0x50, as("HTTPClient:Arch:00019:UNDI:003001", 19), "10.77.0.50", "HTTPClient", url, "10.77.0.1"},
		{"reserved, by its class alone", Authoritative, 0x50, dhcpv4.WithOption(dhcpv4.OptClassIdentifier("HTTPClient")), "10.77.0.50", "HTTPClient", url, "10.77.0.1"},
		{"reserved, PXE", Authoritative, 0x50, fromUEFI, "10.77.0.50", "", "snponly.efi", "10.77.0.1"},
		{"reserved, a system", Authoritative, 0x50, emptyClass, "10.77.0.50", "", "", "0.0.0.0"},
	} {
		s := testServer(t, bootFile, func(c *Config) { c.Mode = tt.mode })
		offered := ""
		mac := dhcpv4.WithHwAddr(net.HardwareAddr{0x52, 0x54, 0, 0, 0, tt.last})
		for _, step := range []struct {
			req  *dhcpv4.DHCPv4
			want dhcpv4.MessageType
		}{
			{message(t, discover, tt.firmware, mac), dhcpv4.MessageTypeOffer},
			{message(t, request, tt.firmware, mac, names("10.77.0.1"), wants("10.77.0.50")), dhcpv4.MessageTypeAck},
		} {
			if offered != "" {
				wants(offered)(step.req)
			}
			reply := ask(t, s, step.req)
			if reply == nil {
				if tt.address != "" {
					t.Errorf("%s: silence, want %s", tt.name, step.want)
				}
				continue
			}
			offered = reply.YourIPAddr.String()
			if isReserved := offered == "10.77.0.50"; reply.MessageType() != step.want || isReserved != (tt.address == "10.77.0.50") || reply.ClassIdentifier() != tt.class ||
				reply.BootFileName != tt.file || reply.BootFileNameOption() != tt.file || reply.ServerIPAddr.String() != tt.siaddr {
				t.Errorf("%s: %s of %s, option 60 %q, file %q, option 67 %q, siaddr %s, want %s of %s, %q, %q in both, %s", tt.name,
					reply.MessageType(), reply.YourIPAddr, reply.ClassIdentifier(), reply.BootFileName, reply.BootFileNameOption(), reply.ServerIPAddr,
					step.want, tt.address, tt.class, tt.file, tt.siaddr)
			}
		}
	}
}
