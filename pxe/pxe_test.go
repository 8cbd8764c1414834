package pxe

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"github.com/insomniacslk/dhcp/iana"
	"github.com/pin/tftp/v3"

	"github.com/better-compute/site-appliance/pxe/assign"
	"github.com/better-compute/site-appliance/pxe/boots"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/httpboot"
	"github.com/better-compute/site-appliance/pxe/newc"
	"github.com/better-compute/site-appliance/pxe/pxetest"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

const (
	macRAM, macDisk, macStranger = "52:54:00:00:00:0a", "52:54:00:00:00:0b", "52:54:00:00:00:0c"
	boxAddr                      = "10.77.0.1"
)

var digest = strings.Repeat("ab", 32)

type memory struct{ *bytes.Reader }

func (memory) Close() error { return nil }

// box is pxe.Run with what it needs, and what it told.
type box struct {
	store *assign.Store
	stop  func() error

	mu     sync.Mutex
	events []string
	boots  int
}

func (b *box) told() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.Join(b.events, "\n")
}

// wait is for what is told a moment later.
func (b *box) wait(t *testing.T, within time.Duration, want string) {
	t.Helper()
	for end := time.Now().Add(within); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if strings.Contains(b.told(), want) {
			return
		}
	}
	t.Fatalf("events:\n%s\nwant %q among them", b.told(), want)
}

func ramdisk(mac string) *pxev1.Machine {
	return &pxev1.Machine{MachineId: "node_a", Macs: []string{mac}, Action: pxev1.Action_ACTION_RAMDISK, Purpose: "inspect",
		WindowId: "w1", WindowUntilMs: time.Now().Add(time.Hour).UnixMilli(), Artifacts: []string{digest}}
}

func localDisk(mac string) *pxev1.Machine {
	return &pxev1.Machine{MachineId: "node_b", Macs: []string{mac}, Action: pxev1.Action_ACTION_LOCAL_DISK}
}

// start runs the box on iface; dir keeps its state.
func start(t *testing.T, iface, dir string, edit func(*Config), machines ...*pxev1.Machine) *box {
	t.Helper()
	store, err := assign.Open(filepath.Join(dir, "assign"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.Apply(&pxev1.AssignRequest{Version: store.Version() + 1, Machines: machines}); err != nil {
		t.Fatal(err)
	}
	counts, err := boots.Open(filepath.Join(dir, "boots"), store.Window)
	if err != nil {
		t.Fatal(err)
	}
	b := &box{store: store}
	cfg := Config{
		Interface: iface, Address: netip.MustParsePrefix(boxAddr + "/24"),
		RangeStart: netip.MustParseAddr("10.77.0.100"), RangeEnd: netip.MustParseAddr("10.77.0.199"),
		Takeover: true, StateDir: dir, Assign: store, Files: files.Dir(filepath.Join(dir, "netboot")), Cmdline: "console=ttyS0",
		Counts: counts,
		Boot: func(_ context.Context, booting httpboot.Booting) ([]byte, error) {
			m := booting.Machine
			b.mu.Lock()
			defer b.mu.Unlock()
			b.boots++
			return newc.BootArchive("/etc/bc/boot.json", fmt.Appendf(nil, "voucher %d of %s", b.boots, m.MachineId)), nil
		},
		Artifacts: func(_ context.Context, sha256 string) (io.ReadSeekCloser, int64, error) {
			return memory{bytes.NewReader([]byte("artifact"))}, 8, nil
		},
		Event: func(name, class, key string, body any) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.events = append(b.events, fmt.Sprintf("%s %s %s %+v", name, class, key, body))
		},
		Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
	if edit != nil {
		edit(&cfg)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Run(ctx, cfg); close(done) }()
	b.stop = sync.OnceValue(func() error { cancel(); return <-done })
	t.Cleanup(func() {
		if err := b.stop(); err != nil {
			t.Errorf("Run = %v, want nil", err)
		}
	})
	waitListening(t, done)
	return b
}

// waitListening waits for the HTTP socket, which machines reach once DHCP names it.
func waitListening(t *testing.T, done chan error) {
	t.Helper()
	for range 200 {
		select {
		case err := <-done:
			t.Fatalf("Run = %v", err)
		case <-time.After(10 * time.Millisecond):
		}
		// 0x43: the DHCP socket, which is opened last.
		if b, _ := os.ReadFile("/proc/thread-self/net/udp"); bytes.Contains(b, []byte(":0043 ")) {
			return
		}
	}
	t.Fatal("the box does not start")
}

func bootFiles(t *testing.T, dir string) map[string][]byte {
	t.Helper()
	content := make(map[string][]byte)
	for _, name := range []string{files.UEFILoader, files.BIOSLoader, files.Kernel, files.Initrd} {
		b := make([]byte, 150_001)
		_, _ = rand.Read(b)
		content[name] = b
		path := filepath.Join(dir, "netboot", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return content
}

type dhcpKind []dhcpv4.Modifier

func firmware(class string, arch iana.Arch) dhcpKind {
	return dhcpKind{dhcpv4.WithOption(dhcpv4.OptClassIdentifier(class)), dhcpv4.WithOption(dhcpv4.OptClientArch(arch))}
}

var (
	asUEFI = firmware("PXEClient:Arch:00007:UNDI:003000", 7)
	asBIOS = firmware("PXEClient:Arch:00000:UNDI:002001", 0)
	asHTTP = firmware("HTTPClient:Arch:00016:UNDI:003001", 16)
	asIPXE = append(firmware("PXEClient:Arch:00007:UNDI:003010", 7), dhcpv4.WithGeneric(dhcpv4.OptionUserClassInformation, []byte("iPXE")))
)

// dora asks for an address inside of the host, as kind.
func dora(h *pxetest.Host, kind dhcpKind, opts ...dhcpv4.Modifier) (*nclient4.Lease, error) {
	var got *nclient4.Lease
	err := h.Try(func() error {
		c, err := nclient4.New(h.Iface, nclient4.WithTimeout(time.Second), nclient4.WithRetry(2))
		if err != nil {
			return err
		}
		defer c.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		got, err = c.Request(ctx, append(kind[:len(kind):len(kind)], opts...)...)
		return err
	})
	return got, err
}

func mustDORA(t *testing.T, h *pxetest.Host, kind dhcpKind, opts ...dhcpv4.Modifier) *nclient4.Lease {
	t.Helper()
	l, err := dora(h, kind, opts...)
	if err != nil {
		t.Fatalf("DHCP: %v", err)
	}
	ip, _ := netip.AddrFromSlice(l.ACK.YourIPAddr.To4())
	h.SetAddress(netip.PrefixFrom(ip, 24), netip.Addr{})
	return l
}

func get(h *pxetest.Host, url string) (int, []byte, error) {
	dial := func(ctx context.Context, _, addr string) (net.Conn, error) {
		var conn net.Conn
		err := h.Try(func() (err error) {
			conn, err = (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", addr)
			return err
		})
		return conn, err
	}
	tr := &http.Transport{DialContext: dial}
	defer tr.CloseIdleConnections()
	c := &http.Client{Transport: tr, Timeout: 10 * time.Second,
		CheckRedirect: func(*http.Request, []*http.Request) error { return errors.New("redirected") }}
	resp, err := c.Get(url)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return resp.StatusCode, body, err
}

func mustGet(t *testing.T, h *pxetest.Host, url string) []byte {
	t.Helper()
	code, body, err := get(h, url)
	if err != nil || code != 200 {
		t.Fatalf("GET %s = %d %q, %v", url, code, body, err)
	}
	return body
}

func fetchTFTP(h *pxetest.Host, name string) ([]byte, error) {
	var b bytes.Buffer
	err := h.Try(func() error {
		c, err := tftp.NewClient(boxAddr + ":69")
		if err != nil {
			return err
		}
		c.SetBlockSize(1468)
		c.SetTimeout(time.Second)
		c.SetRetries(1)
		wt, err := c.Receive(name, "octet")
		if err != nil {
			return err
		}
		_, err = wt.WriteTo(&b)
		return err
	})
	return b.Bytes(), err
}

func TestRun(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	content := bootFiles(t, dir)
	m := pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), "m0", macRAM)
	b := start(t, "box0", dir, nil, ramdisk(macRAM), localDisk(macDisk))

	// Firmware: the loader's name by DHCP, its bytes by TFTP.
	const script = "http://10.77.0.1/boot/52-54-00-00-00-0a/script.ipxe"
	var first net.IP
	for _, tt := range []struct {
		name string
		kind dhcpKind
		opts []dhcpv4.Modifier
		want string
	}{
		{"UEFI", asUEFI, []dhcpv4.Modifier{dhcpv4.WithBroadcast(true)}, "snponly.efi"},
		{"BIOS, answered by a frame", asBIOS, []dhcpv4.Modifier{dhcpv4.WithBroadcast(false)}, "undionly.kpxe"},
		{"UEFI HTTP", asHTTP, nil, "http://10.77.0.1/boot/52-54-00-00-00-0a/snponly.efi"},
		{"an iPXE that was not given ours", asIPXE, nil, "snponly.efi"},
		{"iPXE", asIPXE, nil, script},
		{"iPXE with another client id", asIPXE, []dhcpv4.Modifier{dhcpv4.WithGeneric(dhcpv4.OptionClientIdentifier, []byte("\x00other"))}, script},
		{"a system", nil, nil, ""},
	} {
		ack := mustDORA(t, m, tt.kind, tt.opts...).ACK
		if ack.BootFileName != tt.want {
			t.Errorf("%s: file = %q, want %q", tt.name, ack.BootFileName, tt.want)
		}
		if first == nil {
			first = ack.YourIPAddr
		}
		if !ack.YourIPAddr.Equal(first) {
			t.Errorf("%s: address = %s, want %s as before", tt.name, ack.YourIPAddr, first)
		}
	}
	for name, file := range map[string]string{"snponly.efi": files.UEFILoader, "//undionly.kpxe": files.BIOSLoader} {
		if got, err := fetchTFTP(m, name); err != nil || !bytes.Equal(got, content[file]) {
			t.Errorf("TFTP %s = %d bytes, %v, want the file", name, len(got), err)
		}
	}
	if _, err := fetchTFTP(m, "ramdisk/vmlinuz"); err == nil || !strings.Contains(err.Error(), "file not found") {
		t.Errorf("TFTP of a file that is not listed = %v, want file not found", err)
	}
	if got := mustGet(t, m, "http://10.77.0.1/boot/52-54-00-00-00-0a/snponly.efi"); !bytes.Equal(got, content[files.UEFILoader]) {
		t.Errorf("HTTP loader = %d bytes, want the file", len(got))
	}

	// iPXE: its script, and what that names.
	text := string(mustGet(t, m, script))
	var urls []string
	for _, word := range strings.Fields(text) {
		if strings.HasPrefix(word, "http://") {
			urls = append(urls, word)
		}
	}
	if len(urls) != 5 || urls[3] != "http://10.77.0.1/boot/${netX/mac:hexhyp}/script.ipxe" {
		t.Fatalf("script = %q, want five URLs, the fourth its own by the port that boots", text)
	}
	if got := mustGet(t, m, urls[0]); !bytes.Equal(got, content[files.Kernel]) {
		t.Errorf("kernel = %d bytes, want the file", len(got))
	}
	if got := mustGet(t, m, urls[1]); len(got) != 150_004 || !bytes.HasPrefix(got, content[files.Initrd]) {
		t.Errorf("initrd = %d bytes, want the file, padded to 150004", len(got))
	}
	if got := mustGet(t, m, urls[2]); !bytes.Contains(got, []byte("voucher 1 of node_a")) {
		t.Errorf("boot archive = %q, want the voucher", got)
	}
	if got := mustGet(t, m, "http://10.77.0.1/artifacts/"+digest); string(got) != "artifact" {
		t.Errorf("artifact = %q", got)
	}
	for _, stage := range []string{"dhcp", "tftp", "http-loader", "script", "kernel", "initrd", "boot"} {
		b.wait(t, time.Second, "pxe.stage telemetry "+macRAM+" {MAC:"+macRAM+" MachineID:node_a Stage:"+stage+" ")
	}

	// Another machine on the wire, assigned to its disk: nothing of the first one's.
	m.SetMAC(macDisk)
	if ack := mustDORA(t, m, asUEFI).ACK; ack.BootFileName != "" || !ack.ServerIPAddr.IsUnspecified() || ack.YourIPAddr.Equal(first) {
		t.Errorf("local disk: file %q, siaddr %s, address %s, want none, none and its own", ack.BootFileName, ack.ServerIPAddr, ack.YourIPAddr)
	}
	if _, err := fetchTFTP(m, "snponly.efi"); err == nil {
		t.Error("TFTP for local disk: the loader came, want a refusal")
	}
	if got := string(mustGet(t, m, "http://10.77.0.1/boot/52-54-00-00-00-0b/script.ipxe")); !strings.Contains(got, "exit") || strings.Contains(got, "kernel") {
		t.Errorf("script for local disk = %q, want one that exits", got)
	}
	for _, url := range []string{script, urls[2], "http://10.77.0.1/artifacts/" + digest} {
		if code, _, err := get(m, url); err != nil || code != 403 {
			t.Errorf("GET %s by another machine = %d, %v, want 403", url, code, err)
		}
	}

	// A stranger: an address, no boot, one event.
	m.SetMAC(macStranger)
	for range 2 {
		if ack := mustDORA(t, m, asUEFI).ACK; ack.BootFileName != "" {
			t.Errorf("stranger: file = %q, want none", ack.BootFileName)
		}
	}
	b.wait(t, time.Second, "pxe.discovered state "+macStranger)
	if n := strings.Count(b.told(), "pxe.discovered"); n != 1 {
		t.Errorf("%d pxe.discovered events within a minute, want 1", n)
	}
	if _, err := fetchTFTP(m, "snponly.efi"); err == nil {
		t.Error("TFTP for a stranger: the loader came, want a refusal")
	}

	// After a restart the first machine has its address, and the assignment holds.
	if err := b.stop(); err != nil {
		t.Fatalf("Run = %v, want nil", err)
	}
	start(t, "box0", dir, nil, localDisk(macRAM))
	m.SetMAC(macRAM)
	if ack := mustDORA(t, m, asIPXE).ACK; !ack.YourIPAddr.Equal(first) || ack.BootFileName != script {
		t.Errorf("after a restart: %s, %q, want %s and the script's URL", ack.YourIPAddr, ack.BootFileName, first)
	}
	if code, _, err := get(m, urls[2]); err != nil || code == 200 {
		t.Errorf("the old boot's voucher after a new assignment = %d, %v, want a refusal", code, err)
	}
}

// TestUplinkIsClosed tries each service from a wire that is not the machines',
// and the same from theirs.
func TestUplinkIsClosed(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir)
	m := pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), "m0", macRAM)
	up := pxetest.Join(t, "up0", netip.MustParsePrefix("192.0.2.1/24"), "n0", macStranger)
	b := start(t, "box0", dir, nil, ramdisk(macRAM))
	mustDORA(t, m, asUEFI)
	up.SetAddress(netip.MustParsePrefix("192.0.2.9/24"), netip.MustParseAddr("192.0.2.1"))
	const script = "http://10.77.0.1/boot/52-54-00-00-00-0a/script.ipxe"

	if code, _, err := get(m, script); err != nil || code != 200 {
		t.Errorf("HTTP on the machines' wire = %d, %v, want 200", code, err)
	}
	if code, _, err := get(up, script); err == nil {
		t.Errorf("HTTP answers on the uplink: %d", code)
	}
	if err := tftpAnswers(m); err != nil {
		t.Errorf("TFTP on the machines' wire: %v", err)
	}
	if tftpAnswers(up) == nil {
		t.Error("TFTP answers on the uplink")
	}
	if _, err := dora(up, asUEFI); err == nil || strings.Contains(b.told(), macStranger) {
		t.Errorf("DHCP on the uplink: %v, told:\n%s\nwant that it is not even heard", err, b.told())
	}
	m.SetMAC(macStranger)
	mustDORA(t, m, asUEFI)
	b.wait(t, time.Second, "pxe.discovered state "+macStranger)
}

// tftpAnswers asks what the port itself answers, with an error, from its own address.
func tftpAnswers(h *pxetest.Host) error {
	return h.Try(func() error {
		conn, err := net.Dial("udp4", boxAddr+":69")
		if err != nil {
			return err
		}
		defer conn.Close()
		if _, err := conn.Write([]byte("\x00\x02file\x00octet\x00")); err != nil {
			return err
		}
		_ = conn.SetReadDeadline(time.Now().Add(time.Second))
		_, err = conn.Read(make([]byte, 100))
		return err
	})
}

func TestRunRefuses(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir)
	pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), "m0", macRAM)
	var running Config
	start(t, "box0", dir, func(c *Config) { running = *c }, ramdisk(macRAM))
	for _, tt := range []struct {
		name string
		edit func(*Config)
	}{
		{"a second server", func(*Config) {}},
		{"no interface", func(c *Config) { c.Interface = "" }},
		{"a missing interface", func(c *Config) { c.Interface = "nope0" }},
		{"an address that is not ours", func(c *Config) { c.Address = netip.MustParsePrefix("10.77.0.2/24"); c.HTTPPort = 8080 }},
		{"a range outside", func(c *Config) { c.RangeEnd = netip.MustParseAddr("10.78.0.1") }},
		{"no files", func(c *Config) { c.Files = nil }},
	} {
		cfg := running
		cfg.StateDir = t.TempDir()
		tt.edit(&cfg)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		err := Run(ctx, cfg)
		cancel()
		if err == nil {
			t.Errorf("Run(%s) = nil, want an error", tt.name)
		}
	}
}
