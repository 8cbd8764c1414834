package pxe

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"

	"github.com/better-compute/site-appliance/pxe/dhcp"
	"github.com/better-compute/site-appliance/pxe/dhcp6"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/httpboot"
	"github.com/better-compute/site-appliance/pxe/pxetest"
	"github.com/better-compute/site-appliance/pxe/tftp/tftptest"
)

const boxAddr6 = "fd00:77::1"

var boxNet6 = netip.MustParsePrefix(boxAddr6 + "/64")

// sarr asks for an address over IPv6 inside of the host, as what the options say,
// and gives the host that address.
func sarr(t *testing.T, h *pxetest.Host, options ...dhcpv6.Option) (netip.Addr, string) {
	t.Helper()
	h.WaitLinkLocal()
	var conn *net.UDPConn
	h.Do(func() (err error) {
		conn, err = net.ListenUDP("udp6", &net.UDPAddr{Port: 546})
		return err
	})
	defer conn.Close()
	ask := func(kind dhcpv6.MessageType, more ...dhcpv6.Option) *dhcpv6.Message {
		t.Helper()
		m := &dhcpv6.Message{MessageType: kind}
		if id, err := dhcpv6.GenerateTransactionID(); err == nil {
			m.TransactionID = id
		}
		m.AddOption(dhcpv6.OptClientID(&dhcpv6.DUIDUUID{UUID: [16]byte{4, 3, 2, 1, 6, 5, 8, 7, 9, 10, 11, 12, 13, 14, 15, 16}}))
		for _, o := range append(more, options...) {
			m.AddOption(o)
		}
		buf := make([]byte, 2048)
		for range 20 {
			if _, err := conn.WriteToUDP(m.ToBytes(), &net.UDPAddr{IP: net.ParseIP("ff02::1:2"), Port: 547, Zone: h.Iface}); err != nil {
				t.Fatal(err)
			}
			_ = conn.SetReadDeadline(time.Now().Add(time.Second))
			n, err := conn.Read(buf)
			if err != nil {
				continue
			}
			if reply, err := dhcpv6.MessageFromBytes(buf[:n]); err == nil && reply.TransactionID == m.TransactionID {
				return reply
			}
		}
		t.Fatalf("no answer to %s", kind)
		return nil
	}
	adv := ask(dhcpv6.MessageTypeSolicit, &dhcpv6.OptIANA{IaId: [4]byte{1}})
	reply := ask(dhcpv6.MessageTypeRequest, adv.GetOneOption(dhcpv6.OptionServerID), adv.Options.OneIANA())
	if a, b := adv.Options.BootFileURL(), reply.Options.BootFileURL(); a != b {
		t.Errorf("ADVERTISE says %q, and REPLY %q", a, b)
	}
	ip, ok := netip.AddrFromSlice(reply.Options.OneIANA().Options.OneAddress().IPv6Addr)
	if !ok {
		t.Fatal("no address")
	}
	h.AddAddress(netip.PrefixFrom(ip, 64))
	return ip, reply.Options.BootFileURL()
}

func vendor(class string, arch iana.Arch, more ...dhcpv6.Option) []dhcpv6.Option {
	return append(more, &dhcpv6.OptVendorClass{EnterpriseNumber: 343, Data: [][]byte{[]byte(class)}}, dhcpv6.OptClientArchType(arch))
}

var (
	asUEFI6 = vendor("PXEClient:Arch:00007:UNDI:003000", 7)
	asHTTP6 = vendor("HTTPClient:Arch:00016:UNDI:003000", 16)
	asIPXE6 = vendor("PXEClient:Arch:00007:UNDI:003010", 7, &dhcpv6.OptUserClass{UserClasses: [][]byte{[]byte("iPXE")}})
)

func fetchTFTP6(h *pxetest.Host, name string, window int) ([]byte, error) {
	var b bytes.Buffer
	var conn *net.UDPConn
	if err := h.Try(func() (err error) {
		conn, err = net.ListenUDP("udp6", &net.UDPAddr{})
		return err
	}); err != nil {
		return nil, err
	}
	defer conn.Close()
	_, err := tftptest.FetchOn(conn, netip.MustParseAddrPort("["+boxAddr6+"]:69"), name, 1428, window, &b)
	return b.Bytes(), err
}

// get6 is get by an address that was just changed: what is lost until both ends
// know is asked for again.
func get6(h *pxetest.Host, url string) (code int, body []byte, err error) {
	for range 20 {
		if code, body, err = get(h, url); err == nil {
			break
		}
	}
	return code, body, err
}

func mustGet6(t *testing.T, h *pxetest.Host, url string) []byte {
	t.Helper()
	code, body, err := get6(h, url)
	if err != nil || code != 200 {
		t.Fatalf("GET %s = %d %q, %v", url, code, body, err)
	}
	return body
}

// blockSize6 is what the server makes of the largest block.
func blockSize6(t *testing.T, h *pxetest.Host, name string) int {
	t.Helper()
	var conn *net.UDPConn
	h.Do(func() (err error) {
		conn, err = net.ListenUDP("udp6", &net.UDPAddr{})
		return err
	})
	defer conn.Close()
	if _, err := conn.WriteToUDPAddrPort(tftptest.Request(1, name, "octet", "blksize", "65464"), netip.MustParseAddrPort("["+boxAddr6+"]:69")); err != nil {
		t.Fatal(err)
	}
	_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	buf := make([]byte, 100)
	n, from, err := conn.ReadFromUDPAddrPort(buf)
	if err != nil {
		t.Fatal(err)
	}
	if from.Addr().String() != boxAddr6 {
		t.Errorf("TFTP answers from %s, want %s", from.Addr(), boxAddr6)
	}
	_, _ = conn.WriteToUDPAddrPort([]byte("\x00\x05\x00\x08\x00"), from)
	parts := strings.Split(string(buf[:n]), "\x00")
	size, err := strconv.Atoi(parts[len(parts)-2])
	if err != nil {
		t.Fatalf("option acknowledgement %q", buf[:n])
	}
	return size
}

// TestRunIPv6: the whole way over IPv6, each step by the same decisions as over
// IPv4, and the URLs of each by the address that the machine came to.
func TestRunIPv6(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	content := bootFiles(t, dir)
	for _, name := range []string{files.ARM64Loader, files.ARM64Kernel, files.ARM64Initrd} {
		path := filepath.Join(dir, "netboot", name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(name), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	m := pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), "m0", macRAM)
	up := pxetest.Join(t, "up0", netip.MustParsePrefix("192.0.2.1/24"), "n0", macStranger)
	pxetest.AddAddress(t, "box0", boxNet6)
	pxetest.WaitLinkLocal(t, "box0")
	var mu sync.Mutex
	var booting []httpboot.Booting
	b := start(t, "box0", dir, func(c *Config) {
		c.IPv6.Address = boxNet6
		inner := c.Boot
		c.Boot = func(ctx context.Context, b httpboot.Booting) ([]byte, error) {
			mu.Lock()
			booting = append(booting, b)
			mu.Unlock()
			return inner(ctx, b)
		}
	}, ramdisk(macRAM), localDisk(macDisk))

	const script = "http://[fd00:77::1]/boot/52-54-00-00-00-0a/script.ipxe"
	want := netip.MustParseAddr("fd00:77::5254:0:0:a")
	for _, tt := range []struct {
		name    string
		options []dhcpv6.Option
		want    string
	}{
		{"UEFI", asUEFI6, "tftp://[fd00:77::1]/snponly.efi"},
		{"UEFI HTTP", asHTTP6, "http://[fd00:77::1]/boot/52-54-00-00-00-0a/snponly.efi"},
		{"an iPXE that was not given ours", asIPXE6, "tftp://[fd00:77::1]/snponly.efi"},
		{"iPXE", asIPXE6, script},
		{"a system", nil, ""},
	} {
		if ip, url := sarr(t, m, tt.options...); ip != want || url != tt.want {
			t.Errorf("%s: %s, %q, want %s, %q", tt.name, ip, url, want, tt.want)
		}
	}
	// GRUB, which arm64 has, is for IPv4.
	asARM64, asARM646 := firmware("PXEClient:Arch:00011:UNDI:003000", 11), vendor("PXEClient:Arch:00011:UNDI:003000", 11)
	if ack := mustDORA(t, m, asARM64).ACK; ack.BootFileName != "grubnetaa64.efi" {
		t.Errorf("arm64 over IPv4: %q, want GRUB", ack.BootFileName)
	}
	if _, url := sarr(t, m, asARM646...); url != "" {
		t.Errorf("arm64: %q, want nothing", url)
	}
	sarr(t, m, asUEFI6...)
	// A block is what one packet of IPv6 carries.
	if got := blockSize6(t, m, "snponly.efi"); got != 1500-40-8-4 {
		t.Errorf("TFTP blocks of %d bytes, want 1448", got)
	}
	for _, window := range []int{0, 4} {
		if got, err := fetchTFTP6(m, "snponly.efi", window); err != nil || !bytes.Equal(got, content[files.UEFILoader]) {
			t.Errorf("TFTP with window %d = %d bytes, %v, want the file", window, len(got), err)
		}
	}
	// What it fetched by IPv6 is ours over IPv4 as well.
	if ack := mustDORA(t, m, asIPXE).ACK; ack.BootFileName != "http://10.77.0.1/boot/52-54-00-00-00-0a/script.ipxe" {
		t.Errorf("iPXE over IPv4: %q, want its script by IPv4", ack.BootFileName)
	}
	if got := mustGet6(t, m, "http://[fd00:77::1]/boot/52-54-00-00-00-0a/snponly.efi"); !bytes.Equal(got, content[files.UEFILoader]) {
		t.Errorf("HTTP loader = %d bytes, want the file", len(got))
	}
	text := string(mustGet6(t, m, script))
	var urls []string
	for _, word := range strings.Fields(text) {
		if strings.HasPrefix(word, "http://") {
			urls = append(urls, word)
		}
	}
	if len(urls) != 5 || urls[3] != "http://[fd00:77::1]/boot/${netX/mac:hexhyp}/script.ipxe" || !strings.Contains(text, "set syslog6 fd00:77::1 ||\n") {
		t.Fatalf("script = %q, want five URLs and a syslog server by IPv6", text)
	}
	if got := mustGet6(t, m, urls[0]); !bytes.Equal(got, content[files.Kernel]) {
		t.Errorf("kernel = %d bytes, want the file", len(got))
	}
	// The ramdisk speaks IPv4 only: what it is told is by IPv4.
	if got := mustGet6(t, m, urls[2]); !bytes.Contains(got, []byte("voucher 1 of node_a")) {
		t.Errorf("boot archive = %q, want the voucher", got)
	}
	mu.Lock()
	if len(booting) != 1 || booting[0].Base != "http://10.77.0.1" || !strings.HasPrefix(booting[0].Report, "http://10.77.0.1/boot/52-54-00-00-00-0a/") {
		t.Errorf("the ramdisk is told of the box by %+v, want 10.77.0.1", booting)
	}
	mu.Unlock()
	for _, stage := range []string{"dhcp Client:pxe uefi-x64 IP:" + want.String(), "tftp Client: IP:" + want.String(), "http-loader", "script", "kernel", "boot"} {
		b.wait(t, 5*time.Second, "pxe.stage telemetry "+macRAM+" {MAC:"+macRAM+" MachineID:node_a Stage:"+stage+" ")
	}

	// Another machine on the wire, and a stranger: nothing of the first one's.
	m.SetMAC(macDisk)
	if ip, url := sarr(t, m, asUEFI6...); ip != netip.MustParseAddr("fd00:77::5254:0:0:b") || url != "" {
		t.Errorf("local disk: %s, %q, want its own and nothing to boot", ip, url)
	}
	// Its address is the newer one, and the older is not its any more.
	m.DropAddress(netip.PrefixFrom(want, 64))
	if got, err := fetchTFTP6(m, "snponly.efi", 0); err == nil {
		t.Errorf("TFTP for local disk: %d bytes, want a refusal", len(got))
	}
	for _, url := range []string{script, urls[2]} {
		if code, _, err := get6(m, url); err != nil || code != 403 {
			t.Errorf("GET %s by another machine = %d, %v, want 403", url, code, err)
		}
	}
	m.DropAddress(netip.MustParsePrefix("fd00:77::5254:0:0:b/64"))
	const nobodys = "fd00:77::5254:0:ff00:b/64"
	m.AddAddress(netip.MustParsePrefix(nobodys))
	if code, body, err := get6(m, script); err != nil || code != 403 || !strings.Contains(string(body), "holds no lease") {
		t.Errorf("GET by an address that the box gives nobody = %d %q, %v, want 403", code, body, err)
	}
	m.DropAddress(netip.MustParsePrefix(nobodys))
	m.SetMAC(macStranger)
	if ip, url := sarr(t, m, asUEFI6...); ip != netip.MustParseAddr("fd00:77::5254:0:0:c") || url != "" {
		t.Errorf("stranger: %s, %q, want its own and nothing to boot", ip, url)
	}
	b.wait(t, 5*time.Second, "pxe.discovered state "+macStranger+" {MAC:"+macStranger+" Interface:box0 Client:pxe uefi-x64 Arch:7 ProductUUID:01020304-0506-0708-090a-0b0c0d0e0f10 ")

	// The other wire hears and reaches nothing.
	up.AddAddress(netip.MustParsePrefix("fd00:77::9/64"))
	if code, _, err := get(up, script); err == nil {
		t.Errorf("HTTP answers on the uplink: %d", code)
	}
}

// TestRunIPv6Later: without its IPv6 address the box serves IPv4, and IPv6 as
// soon as the address is there.
func TestRunIPv6Later(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir)
	m := pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), "m0", macRAM)
	start(t, "box0", dir, func(c *Config) { c.IPv6.Address = boxNet6 }, ramdisk(macRAM))
	if ack := mustDORA(t, m, asUEFI).ACK; ack.BootFileName != "snponly.efi" {
		t.Errorf("over IPv4: %q, want snponly.efi", ack.BootFileName)
	}
	pxetest.AddAddress(t, "box0", boxNet6)
	pxetest.WaitLinkLocal(t, "box0")
	if _, url := sarr(t, m, asUEFI6...); url != "tftp://[fd00:77::1]/snponly.efi" {
		t.Errorf("over IPv6: %q", url)
	}
}

func TestCheck6(t *testing.T) {
	for _, tt := range []struct {
		address string
		mode    dhcp.Mode
		bmc     bool
		ok      bool
	}{
		{"", dhcp.Proxy, false, true},
		{"fd00:77::1/64", dhcp.Authoritative, false, true},
		{"2001:db8::1/64", dhcp.Authoritative, false, true},
		{"fd00:77::1/48", dhcp.Authoritative, false, false},
		{"fe80::1/64", dhcp.Authoritative, false, false},
		{"10.77.0.1/24", dhcp.Authoritative, false, false},
		{"fd00:77::1/64", dhcp.Proxy, false, false},
		{"fd00:77::1/64", dhcp.Reservations, false, false},
		{"fd00:77::1/64", dhcp.Authoritative, true, false},
	} {
		c := Config{Interface: "box0", Mode: tt.mode, BMC: tt.bmc}
		if tt.address != "" {
			c.IPv6.Address = netip.MustParsePrefix(tt.address)
		}
		if err := c.check6(); (err == nil) != tt.ok {
			t.Errorf("check6(%s, mode %d, bmc %v) = %v, want ok %v", tt.address, tt.mode, tt.bmc, err, tt.ok)
		}
	}
}

// TestBindingsOutlastRun: a machine that has its address is known by it when Run ended
// and is called again.
func TestBindingsOutlastRun(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir)
	m := pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), "m0", macRAM)
	pxetest.AddAddress(t, "box0", boxNet6)
	pxetest.WaitLinkLocal(t, "box0")
	bindings := new(dhcp6.Bindings)
	for i := range 2 {
		b := start(t, "box0", dir, func(c *Config) { c.IPv6.Address, c.Bindings = boxNet6, bindings }, ramdisk(macRAM))
		if i == 0 {
			sarr(t, m, asIPXE6...)
		}
		const script = "http://[fd00:77::1]/boot/52-54-00-00-00-0a/script.ipxe"
		code, err := 0, errors.New("not asked")
		for end := time.Now().Add(30 * time.Second); err != nil && time.Now().Before(end); { // IPv6 comes after IPv4
			code, _, err = get6(m, script)
		}
		if err != nil || code != 200 {
			t.Errorf("run %d: script = %d, %v, want 200", i+1, code, err)
		}
		if err := b.stop(); err != nil {
			t.Errorf("Run = %v", err)
		}
	}
}
