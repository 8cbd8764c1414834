package dhcp

import (
	"encoding/binary"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/better-compute/site-appliance/pxe/limit"
)

// sniffed is one DHCP message of a capture.
type sniffed struct {
	from, to netip.AddrPort
	data     []byte
}

// readCapture reads the DHCP messages of a pcap file: little-endian, Ethernet.
func readCapture(t testing.TB, path string) []sniffed {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	const header = 24
	if len(b) < header || binary.LittleEndian.Uint32(b) != 0xa1b2c3d4 || binary.LittleEndian.Uint32(b[20:]) != 1 {
		t.Fatalf("%s is no little-endian pcap of Ethernet", path)
	}
	var out []sniffed
	for b = b[header:]; len(b) >= 16; {
		n := int(binary.LittleEndian.Uint32(b[8:]))
		if len(b) < 16+n {
			t.Fatalf("%s is torn", path)
		}
		frame := b[16 : 16+n]
		b = b[16+n:]
		if n < 14+20+8 || binary.BigEndian.Uint16(frame[12:]) != 0x0800 || frame[14+9] != 17 {
			continue
		}
		ip := frame[14:]
		udp := ip[int(ip[0]&0xf)*4:]
		port := func(at int) uint16 { return binary.BigEndian.Uint16(udp[at:]) }
		m := sniffed{netip.AddrPortFrom(netip.AddrFrom4([4]byte(ip[12:])), port(0)), netip.AddrPortFrom(netip.AddrFrom4([4]byte(ip[16:])), port(2)), payload(ip)}
		switch m.to.Port() {
		case dhcpv4.ServerPort, dhcpv4.ClientPort, proxyPort:
			out = append(out, m)
		}
	}
	return out
}

func captures(t testing.TB) string {
	t.Helper()
	dir := os.Getenv("CAPTURES")
	if dir == "" {
		t.Skip("needs captures of real firmware: set CAPTURES to their folder")
	}
	return dir
}

// TestCaptures gives the server what real firmware sent to another one, and
// compares the answers' kinds with what that firmware booted from.
func TestCaptures(t *testing.T) {
	dir := captures(t)
	const script = "http://10.77.0.1/boot/script.ipxe"
	for _, tt := range []struct {
		file string
		mode Mode
		// want is what each message of a client is answered with: its kind and file; "-" for silence.
		want []string
	}{
		// The first is an iPXE ROM in BIOS, with another server that leases.
		{"proxy-bios.pcap", Proxy, []string{"OFFER " + script, "-", "ACK " + script, "ACK " + script, "ACK " + script, "ACK " + script}},
		// EDK2 asks on port 4011, from that port; then our iPXE, and a system.
		{"proxy-uefi.pcap", Proxy, []string{"OFFER " + script, "-", "OFFER snponly.efi", "-", "ACK snponly.efi", "OFFER " + script, "-", "-", "-"}},
		{"pxe-mp.pcap", Authoritative, []string{"OFFER snponly.efi", "ACK snponly.efi", "OFFER " + script, "OFFER " + script, "ACK " + script, "OFFER ", "ACK ",
			"OFFER " + script, "OFFER " + script, "ACK " + script, "OFFER snponly.efi", "ACK snponly.efi"}},
		{"pxe-sp.pcap", Authoritative, []string{"OFFER " + script, "OFFER " + script, "ACK " + script, "OFFER snponly.efi", "ACK snponly.efi", "OFFER ", "ACK "}},
	} {
		s := testServer(t, bootFile, func(c *Config) { c.Mode = tt.mode })
		var got []string
		addresses := map[string]string{}
		for _, m := range readCapture(t, filepath.Join(dir, tt.file)) {
			if m.to.Port() == dhcpv4.ClientPort || m.from.Addr() == netip.MustParseAddr("10.77.0.1") {
				continue
			}
			if req, err := dhcpv4.FromBytes(m.data); err == nil && tt.mode == Authoritative && req.Options.Has(dhcpv4.OptionRequestedIPAddress) {
				wants(addresses[req.ClientHWAddr.String()])(req) // the other server had offered another
				m.data = req.ToBytes()
			}
			a, b, ok := s.respond(packetIn{m.data, source{addr: m.from, proxy: m.to.Port() == proxyPort}})
			if !ok {
				got = append(got, "-")
				continue
			}
			d, err := dhcpv4.FromBytes(b)
			if err != nil {
				t.Fatalf("%s: an answer does not parse: %v", tt.file, err)
			}
			got = append(got, d.MessageType().String()+" "+d.BootFileName)
			if d.BootFileName != strings.TrimSuffix(d.BootFileNameOption(), "\x00") || (d.BootFileName != "") == d.ServerIPAddr.IsUnspecified() {
				t.Errorf("%s: file %q, option 67 %q, siaddr %s", tt.file, d.BootFileName, d.BootFileNameOption(), d.ServerIPAddr)
			}
			if m.to.Port() == proxyPort && a.to.addr != m.from {
				t.Errorf("%s: the answer to %s goes to %s", tt.file, m.from, a.to.addr)
			}
			// One address through firmware, iPXE and system.
			mac, ip := d.ClientHWAddr.String(), d.YourIPAddr.String()
			if was, ok := addresses[mac]; ok && was != ip {
				t.Errorf("%s: %s has %s, and had %s", tt.file, mac, ip, was)
			}
			addresses[mac] = ip
		}
		if strings.Join(got, "\n") != strings.Join(tt.want, "\n") {
			t.Errorf("%s: answers\n%s\nwant\n%s", tt.file, strings.Join(got, "\n"), strings.Join(tt.want, "\n"))
		}
	}
}

// FuzzDHCPv4 is the whole way from the wire's bytes to the reply's, in every mode.
func FuzzDHCPv4(f *testing.F) {
	names, _ := filepath.Glob("testdata/*.hex")
	for _, name := range names {
		f.Add(captured(f, strings.TrimSuffix(filepath.Base(name), ".hex")).ToBytes(), false)
	}
	if dir := os.Getenv("CAPTURES"); dir != "" {
		files, _ := filepath.Glob(filepath.Join(dir, "*.pcap"))
		for _, file := range files {
			for _, m := range readCapture(f, file) {
				f.Add(m.data, m.to.Port() == proxyPort)
			}
		}
	}
	relayed := message(f, dhcpv4.MessageTypeDiscover, fromUEFI, dhcpv4.WithGatewayIP(ip4("10.5.0.1")),
		dhcpv4.WithGeneric(dhcpv4.OptionRelayAgentInformation, []byte{1, 2, 3, 4, 5, 4, 10, 5, 0, 0, 11, 4, 10, 5, 0, 1}))
	f.Add(relayed.ToBytes(), false)
	var servers []*Server
	for _, mode := range []Mode{Authoritative, Reservations, Proxy, Relay} {
		servers = append(servers, testServer(f, bootFile, told, func(c *Config) {
			c.Mode = mode
			c.Known = func(string) bool { return true }
		}))
	}
	f.Fuzz(func(t *testing.T, raw []byte, proxy bool) {
		limits := limit.NewApart()
		for _, s := range servers {
			if !s.sort(limits, raw, source{addr: netip.MustParseAddrPort("10.77.0.9:68"), proxy: proxy}, t0) {
				continue
			}
			p, _ := s.in.Next(t.Context())
			a, b, ok := s.respond(p)
			if !ok {
				continue
			}
			if len(b) > max(a.most, bootpLeast)+2+255 || len(b) < bootpLeast {
				t.Errorf("the answer to %x has %d bytes", raw, len(b))
			}
			d, err := dhcpv4.FromBytes(b)
			if err != nil {
				t.Fatalf("the answer to %x does not parse: %v", raw, err)
			}
			if d.OpCode != dhcpv4.OpcodeBootReply || d.ServerHostName != "" || d.ServerIdentifier() == nil {
				t.Errorf("the answer to %x is %s", raw, d.Summary())
			}
			if s.cfg.Mode == Proxy && (!d.YourIPAddr.IsUnspecified() || d.MessageType() == dhcpv4.MessageTypeNak) {
				t.Errorf("the proxy's answer to %x is %s", raw, d.Summary())
			}
		}
	})
}
