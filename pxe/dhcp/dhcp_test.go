package dhcp

import (
	"bytes"
	"encoding/hex"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/iana"

	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/inet"
	"github.com/better-compute/site-appliance/pxe/lease"
)

var t0 = time.Unix(1_800_000_000, 0)

// captured is a packet of testdata.
func captured(t testing.TB, name string) *dhcpv4.DHCPv4 {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name+".hex"))
	if err != nil {
		t.Fatal(err)
	}
	raw, err := hex.DecodeString(strings.Join(strings.Fields(string(text)), ""))
	if err != nil {
		t.Fatal(err)
	}
	d, err := dhcpv4.FromBytes(raw)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// testServer is one without sockets, at 10.77.0.1/24 with a pool from .150 to
// .199, and one behind a relay: 10.5.0.0/24 with 10.5.0.1.
func testServer(t testing.TB, boot func(Who) string, edits ...func(*Config)) *Server {
	t.Helper()
	at := netip.MustParseAddr
	cfg := Config{
		Local:   Subnet{Pool: "lan", Network: netip.MustParsePrefix("10.77.0.0/24"), Server: at("10.77.0.1")},
		Relayed: []Subnet{{Pool: "far", Network: netip.MustParsePrefix("10.5.0.0/24"), Server: at("10.77.0.1"), Giaddr: at("10.5.0.1"), Router: at("10.5.0.1")}},
		Boot:    func(a Ask) string { return boot(a.Who) },
		Now:     func() time.Time { return t0 }, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
	for _, edit := range edits {
		edit(&cfg)
	}
	if cfg.Mode != Proxy {
		pools := []lease.Pool{
			{Name: "lan", Subnet: cfg.Local.Network, First: at("10.77.0.150"), Last: at("10.77.0.199"), Exclude: []netip.Addr{at("10.77.0.1")}},
		}
		for _, n := range cfg.Relayed {
			at := n.Network.Addr().As4()
			end := func(last byte) netip.Addr { return netip.AddrFrom4([4]byte{at[0], at[1], at[2], last}) }
			pools = append(pools, lease.Pool{Name: n.Pool, Subnet: n.Network, First: end(100), Last: end(109)})
		}
		if cfg.Mode == Reservations {
			pools[0].First, pools[0].Last = netip.Addr{}, netip.Addr{}
		}
		db, err := lease.OpenDatabase(lease.Config{Path: filepath.Join(t.TempDir(), "leases"), Pools: pools, Log: cfg.Log,
			Reservations: []lease.Reservation{{MAC: reservedMAC, Address: at("10.77.0.50")}}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { db.Close() })
		cfg.Leases = db
	}
	return newServer(cfg)
}

const reservedMAC = "52:54:00:00:00:50"

// ask is one request from the wire and what goes back, read as the client does; nil for silence.
func ask(t testing.TB, s *Server, req *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
	t.Helper()
	reply, _ := askFrom(t, s, req, source{})
	return reply
}

func askFrom(t testing.TB, s *Server, req *dhcpv4.DHCPv4, from source) (*dhcpv4.DHCPv4, answer) {
	t.Helper()
	req, err := dhcpv4.FromBytes(req.ToBytes())
	if err != nil {
		t.Fatal(err)
	}
	a, ok := s.handle(req, from)
	if !ok {
		return nil, a
	}
	reply, err := dhcpv4.FromBytes(encode(a.reply, a.most))
	if err != nil {
		t.Fatalf("the answer does not parse: %v", err)
	}
	return reply, a
}

var (
	pxeBIOS  = decide.Client{Program: decide.Firmware, Arch: decide.BIOS}
	pxeX64   = decide.Client{Program: decide.Firmware, Arch: decide.X64}
	httpX64  = decide.Client{Program: decide.HTTPBoot, Arch: decide.X64}
	ipxeBIOS = decide.Client{Program: decide.IPXE, Arch: decide.BIOS}
	ipxeX64  = decide.Client{Program: decide.IPXE, Arch: decide.X64}
)

func nothing(Who) string { return "" }

func TestClassifyCaptures(t *testing.T) {
	for _, tt := range []struct {
		file string
		want decide.Client
		arch int
	}{
		{"edk2-uefi-discover", pxeX64, 7},
		{"edk2-uefi-request", pxeX64, 7},
		{"ipxe-uefi-discover", ipxeX64, 7},
		{"ipxe-uefi-request", ipxeX64, 7},
		{"ipxe-bios-discover", ipxeBIOS, 0},
		{"ipxe-bios-request", ipxeBIOS, 0},
		{"linux-discover", decide.Client{}, -1},
		{"linux-request", decide.Client{}, -1},
	} {
		got := classify(captured(t, tt.file))
		if got.Client != tt.want || got.Arch != tt.arch || got.UUID != "" {
			t.Errorf("classify(%s) = %+v, want %v, %d and no UUID", tt.file, got, tt.want, tt.arch)
		}
	}
}

// built is a request made from what reports say of the firmware that a test
// names, not captured.
func built(t testing.TB, class string, archs []iana.Arch, user string, features []byte) *dhcpv4.DHCPv4 {
	t.Helper()
	mods := []dhcpv4.Modifier{}
	if class != "" {
		mods = append(mods, dhcpv4.WithOption(dhcpv4.OptClassIdentifier(class)))
	}
	if archs != nil {
		mods = append(mods, dhcpv4.WithOption(dhcpv4.OptClientArch(archs...)))
	}
	if user != "" {
		mods = append(mods, dhcpv4.WithGeneric(dhcpv4.OptionUserClassInformation, []byte(user)))
	}
	if features != nil {
		mods = append(mods, dhcpv4.WithGeneric(dhcpv4.GenericOptionCode(optionIPXE), features))
	}
	d, err := dhcpv4.NewDiscovery(net.HardwareAddr{0x52, 0x54, 0, 0, 0, 1}, mods...)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestClassifyBuilt(t *testing.T) {
	type archs = []iana.Arch
	for _, tt := range []struct {
		name, class string
		archs       archs
		user        string
		features    []byte
		want        decide.Client
		arch        int
	}{
		{"BIOS ROM", "PXEClient:Arch:00000:UNDI:002001", archs{0}, "", nil, pxeBIOS, 0},
		{"UEFI as 9", "PXEClient:Arch:00009:UNDI:003016", archs{9}, "", nil, pxeX64, 9},
		{"HTTP boot", "HTTPClient:Arch:00016:UNDI:003001", archs{16}, "", nil, httpX64, 16},
		{"HTTP boot, arm64", "HTTPClient:Arch:00019:UNDI:003001", archs{19}, "", nil, decide.Client{Program: decide.HTTPBoot, Arch: decide.ARM64}, 19},
		{"arm64", "PXEClient:Arch:00011:UNDI:003000", archs{11}, "", nil, decide.Client{Program: decide.Firmware, Arch: decide.ARM64}, 11},
		{"IA32", "PXEClient:Arch:00006:UNDI:003000", archs{6}, "", nil, decide.Client{Program: decide.Firmware, Arch: decide.X86UEFI}, 6},
		{"the second of two", "PXEClient:Arch:00006:UNDI:003000", archs{6, 7}, "", nil, pxeX64, 7},
		{"no option 93", "PXEClient:Arch:00007:UNDI:003000", nil, "", nil, pxeX64, 7},
		{"no architecture at all", "PXEClient", nil, "", nil, pxeBIOS, 0},
		{"iPXE with RFC 3004's length", "PXEClient:Arch:00007:UNDI:003010", archs{7}, "\x04iPXE", nil, ipxeX64, 7},
		{"iPXE with HTTP", "PXEClient:Arch:00000:UNDI:002001", archs{0}, "iPXE", []byte{0x21, 1, 1, 0x13, 1, 1}, ipxeBIOS, 0},
		{"iPXE without HTTP", "PXEClient:Arch:00000:UNDI:002001", archs{0}, "iPXE", []byte{0x21, 1, 1}, pxeBIOS, 0},
		{"iPXE, torn features", "PXEClient:Arch:00000:UNDI:002001", archs{0}, "iPXE", []byte{0x13, 9, 1}, pxeBIOS, 0},
		{"iPXE on arm64", "PXEClient:Arch:00011:UNDI:003010", archs{11}, "iPXE", nil, decide.Client{Program: decide.IPXE, Arch: decide.ARM64}, 11},
		{"a system that tells an architecture", "", archs{7}, "", nil, decide.Client{Arch: decide.X64}, 7},
		{"nothing", "", nil, "", nil, decide.Client{}, -1},
	} {
		if got := classify(built(t, tt.class, tt.archs, tt.user, tt.features)); got.Client != tt.want || got.Arch != tt.arch {
			t.Errorf("classify(%s) = %v, %d, want %v, %d", tt.name, got.Client, got.Arch, tt.want, tt.arch)
		}
	}
}

func TestUUID(t *testing.T) {
	id := func(b ...byte) []byte { return append([]byte{0}, b...) }
	for _, tt := range []struct {
		in   []byte
		want string
	}{
		{id(0x33, 0x22, 0x11, 0, 0x55, 0x44, 0x77, 0x66, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff), "00112233-4455-6677-8899-aabbccddeeff"},
		{id(make([]byte, 16)...), ""},
		{id([]byte(strings.Repeat("\xff", 16))...), ""},
		{id(1, 2, 3), ""},
	} {
		d := built(t, "", nil, "", nil)
		d.UpdateOption(dhcpv4.OptGeneric(dhcpv4.OptionClientMachineIdentifier, tt.in))
		if got := uuid(d); got != tt.want {
			t.Errorf("uuid(%x) = %q, want %q", tt.in, got, tt.want)
		}
	}
}

// TestChain is a machine's way through firmware, iPXE and system, from captures.
func TestChain(t *testing.T) {
	const script = "http://10.77.0.1/boot/52-54-00-00-00-07/script.ipxe"
	s := testServer(t, func(w Who) string {
		switch w.Client {
		case pxeX64:
			return "snponly.efi"
		case ipxeX64:
			return script
		}
		return ""
	})
	var first net.IP
	for _, tt := range []struct {
		file string
		kind dhcpv4.MessageType
		boot string
	}{
		{"edk2-uefi-discover", dhcpv4.MessageTypeOffer, "snponly.efi"},
		{"edk2-uefi-request", dhcpv4.MessageTypeAck, "snponly.efi"},
		{"ipxe-uefi-discover", dhcpv4.MessageTypeOffer, script},
		{"ipxe-uefi-request", dhcpv4.MessageTypeAck, script},
		{"linux-discover", dhcpv4.MessageTypeOffer, ""},
		{"linux-request", dhcpv4.MessageTypeAck, ""},
	} {
		req := captured(t, tt.file)
		if first != nil && req.MessageType() == dhcpv4.MessageTypeRequest {
			req.UpdateOption(dhcpv4.OptRequestedIPAddress(first))
		}
		reply := ask(t, s, req)
		if reply == nil {
			t.Fatalf("handle(%s) = nil", tt.file)
		}
		if first == nil {
			first = reply.YourIPAddr
		}
		siaddr := "0.0.0.0"
		if tt.boot != "" {
			siaddr = "10.77.0.1"
		}
		if reply.MessageType() != tt.kind || !reply.YourIPAddr.Equal(first) || reply.TransactionID != req.TransactionID {
			t.Errorf("handle(%s) = %s for %s, want %s for %s", tt.file, reply.MessageType(), reply.YourIPAddr, tt.kind, first)
		}
		option := strings.TrimSuffix(reply.BootFileNameOption(), "\x00")
		if reply.BootFileName != tt.boot || option != tt.boot || reply.ServerIPAddr.String() != siaddr {
			t.Errorf("handle(%s): file %q, option 67 %q, siaddr %s, want %q, the same and %s", tt.file, reply.BootFileName, option, reply.ServerIPAddr, tt.boot, siaddr)
		}
		if got := reply.ClassIdentifier(); got != "" {
			t.Errorf("handle(%s): option 60 = %q, want none", tt.file, got)
		}
		if got := reply.ServerIdentifier().String(); got != "10.77.0.1" {
			t.Errorf("handle(%s): server = %s", tt.file, got)
		}
		if got := reply.SubnetMask().String(); got != "ffffff00" {
			t.Errorf("handle(%s): mask = %s", tt.file, got)
		}
		if got := reply.IPAddressLeaseTime(0); got != leaseTime {
			t.Errorf("handle(%s): lease = %v, want %v", tt.file, got, leaseTime)
		}
	}
}

func TestHTTPBootGetsItsClassBack(t *testing.T) {
	const url = "http://10.77.0.1/boot/52-54-00-00-00-01/snponly.efi"
	s := testServer(t, func(Who) string { return url })
	reply := ask(t, s, built(t, "HTTPClient:Arch:00016:UNDI:003001", []iana.Arch{16}, "", nil))
	if reply == nil || reply.ClassIdentifier() != "HTTPClient" || reply.BootFileName != url {
		t.Errorf("handle(HTTP boot) = %v, want option 60 HTTPClient and the URL", reply)
	}
}

// TestIPXEListensForNoProxy: where the box leases and names what boots, no iPXE
// waits for a proxy; where it does not, another may still come.
func TestIPXEListensForNoProxy(t *testing.T) {
	proxy := func(c *Config) { c.Mode = Proxy }
	for _, tt := range []struct {
		name, packet, file string
		edits              []func(*Config)
		want               []byte
	}{
		{"iPXE", "ipxe-bios-discover", "undionly.kpxe", nil, []byte{0xb0, 1, 1}},
		{"iPXE, acknowledged", "ipxe-uefi-request", "http://10.77.0.1/script", nil, []byte{0xb0, 1, 1}},
		{"iPXE without an assignment", "ipxe-bios-discover", "", nil, nil},
		{"firmware", "edk2-uefi-discover", "snponly.efi", nil, nil},
		{"iPXE of a proxy", "ipxe-bios-discover", "undionly.kpxe", []func(*Config){proxy}, nil},
	} {
		s := testServer(t, func(Who) string { return tt.file }, tt.edits...)
		req := captured(t, tt.packet)
		req.UpdateOption(dhcpv4.OptRequestedIPAddress(net.IPv4(10, 77, 0, 150)))
		reply := ask(t, s, req)
		if reply == nil && tt.file != "" {
			t.Errorf("handle(%s) = nil", tt.name)
			continue
		}
		if got := reply.Options.Get(dhcpv4.GenericOptionCode(optionIPXE)); !bytes.Equal(got, tt.want) {
			t.Errorf("handle(%s): option 175 = %x, want %x", tt.name, got, tt.want)
		}
	}
}

func TestRequestStates(t *testing.T) {
	mac := net.HardwareAddr{0x52, 0x54, 0, 0, 0, 1}
	ip := func(s string) net.IP { return net.ParseIP(s).To4() }
	for _, tt := range []struct {
		name                      string
		server, requested, ciaddr string
		want                      dhcpv4.MessageType // None for silence
	}{
		{"selecting", "10.77.0.1", "10.77.0.160", "", dhcpv4.MessageTypeAck},
		{"selecting another server", "10.77.0.2", "10.77.0.160", "", dhcpv4.MessageTypeNone},
		{"selecting what another has", "10.77.0.1", "10.77.0.170", "", dhcpv4.MessageTypeNak},
		{"init-reboot", "", "10.77.0.160", "", dhcpv4.MessageTypeAck},
		{"init-reboot from another net", "", "192.0.2.9", "", dhcpv4.MessageTypeNak},
		{"renewing", "", "", "10.77.0.160", dhcpv4.MessageTypeAck},
		{"renewing what another has", "", "", "10.77.0.170", dhcpv4.MessageTypeNak},
		{"nothing asked", "", "", "", dhcpv4.MessageTypeNone},
	} {
		s := testServer(t, nothing)
		if _, err := s.cfg.Leases.Bind("lan", "52:54:00:00:00:99", netip.MustParseAddr("10.77.0.170"), time.Hour); err != nil {
			t.Fatal(err)
		}
		req, err := dhcpv4.New(dhcpv4.WithHwAddr(mac), dhcpv4.WithMessageType(dhcpv4.MessageTypeRequest))
		if err != nil {
			t.Fatal(err)
		}
		if tt.server != "" {
			req.UpdateOption(dhcpv4.OptServerIdentifier(ip(tt.server)))
		}
		if tt.requested != "" {
			req.UpdateOption(dhcpv4.OptRequestedIPAddress(ip(tt.requested)))
		}
		if tt.ciaddr != "" {
			req.ClientIPAddr = ip(tt.ciaddr)
		}
		got := dhcpv4.MessageTypeNone
		if reply := ask(t, s, req); reply != nil {
			got = reply.MessageType()
		}
		if got != tt.want {
			t.Errorf("handle(%s) = %s, want %s", tt.name, got, tt.want)
		}
	}
}

func TestDropped(t *testing.T) {
	for name, edit := range map[string]func(*dhcpv4.DHCPv4){
		"a reply":       func(d *dhcpv4.DHCPv4) { d.OpCode = dhcpv4.OpcodeBootReply },
		"relayed":       func(d *dhcpv4.DHCPv4) { d.GatewayIPAddr = net.IPv4(10, 9, 9, 9) },
		"no ethernet":   func(d *dhcpv4.DHCPv4) { d.HWType = iana.HWTypeInfiniband },
		"short MAC":     func(d *dhcpv4.DHCPv4) { d.ClientHWAddr = d.ClientHWAddr[:4] },
		"multicast MAC": func(d *dhcpv4.DHCPv4) { d.ClientHWAddr = net.HardwareAddr{1, 0, 0, 0, 0, 1} },
		"BOOTP":         func(d *dhcpv4.DHCPv4) { d.DeleteOption(dhcpv4.OptionDHCPMessageType) },
		"server's kind": func(d *dhcpv4.DHCPv4) { d.UpdateOption(dhcpv4.OptMessageType(dhcpv4.MessageTypeOffer)) },
	} {
		s := testServer(t, nothing)
		req := built(t, "", nil, "", nil)
		if ask(t, s, req) == nil {
			t.Fatal("handle(plain discover) = nil, want an offer")
		}
		edit(req)
		if got := ask(t, s, req); got != nil {
			t.Errorf("handle(%s) = %s, want silence", name, got.MessageType())
		}
	}
}

func TestFullPoolIsSilent(t *testing.T) {
	s := testServer(t, nothing)
	for i := range 51 {
		req := built(t, "", nil, "", nil)
		req.ClientHWAddr = net.HardwareAddr{0x52, 0x54, 0, 0, 1, byte(i)}
		if got, want := ask(t, s, req) != nil, i < 50; got != want {
			t.Errorf("machine %d is offered an address: %v, want %v", i+1, got, want)
		}
	}
}

func TestRoute(t *testing.T) {
	s := testServer(t, nothing)
	plain := built(t, "", nil, "", nil)
	flagged := built(t, "", nil, "", nil)
	flagged.SetBroadcast()
	plain.SetUnicast()
	renew, _ := dhcpv4.New(dhcpv4.WithHwAddr(plain.ClientHWAddr), dhcpv4.WithMessageType(dhcpv4.MessageTypeRequest), dhcpv4.WithClientIP(net.IPv4(10, 77, 0, 160)))
	foreign, _ := dhcpv4.New(dhcpv4.WithHwAddr(plain.ClientHWAddr), dhcpv4.WithMessageType(dhcpv4.MessageTypeRequest), dhcpv4.WithClientIP(net.IPv4(192, 0, 2, 1)))
	inform := message(t, dhcpv4.MessageTypeInform, dhcpv4.WithClientIP(ip4("10.77.0.161")))
	lies := message(t, dhcpv4.MessageTypeDiscover, dhcpv4.WithClientIP(ip4("10.77.0.162")))
	for _, tt := range []struct {
		name    string
		req     *dhcpv4.DHCPv4
		mac, ip string
	}{
		{"no flag: a frame to the MAC", plain, "52:54:00:00:00:01", "yiaddr"},
		{"broadcast flag", flagged, "ff:ff:ff:ff:ff:ff", "255.255.255.255"},
		{"renewal: by the kernel", renew, "", "10.77.0.160"},
		{"INFORM: by the kernel", inform, "", "10.77.0.161"},
		{"another address than it has: a frame to the MAC", lies, "52:54:00:00:00:01", "yiaddr"},
		{"NAK: to all", foreign, "ff:ff:ff:ff:ff:ff", "255.255.255.255"},
	} {
		reply, got := askFrom(t, s, tt.req, source{})
		if reply == nil {
			t.Fatalf("%s: no reply", tt.name)
		}
		want := tt.ip
		if want == "yiaddr" {
			want = reply.YourIPAddr.String()
		}
		if got.to.mac.String() != tt.mac || got.to.addr.String() != want+":68" {
			t.Errorf("route(%s) = %s, %s, want %s, %s:68", tt.name, got.to.mac, got.to.addr, tt.mac, want)
		}
	}
}

func TestPacketChecksums(t *testing.T) {
	for _, n := range []int{0, 1, 300, 301} {
		src, dst := netip.MustParseAddrPort("10.77.0.1:67"), netip.MustParseAddrPort("10.77.0.160:68")
		p := packet(src, dst, make([]byte, n))
		if got := inet.Sum(0, p[:20]); got != 0xffff {
			t.Errorf("IP checksum over %d bytes does not fit: %x", n, got)
		}
		if got := inet.Sum(uint32(inet.Sum(17+uint32(len(p)-20), p[12:20])), p[20:]); got != 0xffff {
			t.Errorf("UDP checksum over %d bytes does not fit: %x", n, got)
		}
	}
}
