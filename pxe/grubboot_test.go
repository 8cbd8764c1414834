package pxe

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/pxe/assign"
	"github.com/better-compute/site-appliance/pxe/attempts"
	"github.com/better-compute/site-appliance/pxe/boots"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/grub/grubtest"
	"github.com/better-compute/site-appliance/pxe/httpboot"
	"github.com/better-compute/site-appliance/pxe/newc"
	"github.com/better-compute/site-appliance/pxe/pxetest"
	"github.com/better-compute/site-appliance/pxe/pxev1"
	"github.com/better-compute/site-appliance/pxe/syslog"
)

const macARM, macShim = "52:54:00:00:00:0d", "52:54:00:00:00:0e"

// grubHTTP is what an image with GRUB's HTTP client has in it.
const grubHTTP = "GET \x00 HTTP/1.1\r\nHost: \x00"

// grubFiles are the boot programs of GRUB and shim, and the ramdisk for arm64.
func grubFiles(t *testing.T, dir, client string) map[string][]byte {
	t.Helper()
	content := bootFiles(t, dir)
	for _, name := range []string{files.ARM64Loader, files.Shim, files.ShimSecond, files.ARM64Kernel, files.ARM64Initrd} {
		content[name] = append([]byte(name+client), make([]byte, 99_990)...)
		path := filepath.Join(dir, "netboot", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, content[name], 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return content
}

var (
	asARM64     = firmware("PXEClient:Arch:00011:UNDI:003000", 11)
	asARM64HTTP = firmware("HTTPClient:Arch:00019:UNDI:003001", 19)
)

// readTFTP asks as GRUB 2.06 to 2.14 (grub-core/net/tftp.c) or as EDK2 for shim
// (MdeModulePkg's PxeBcMtftp.c, by shim's netboot.c), and acknowledges block by block.
func readTFTP(h *pxetest.Host, name string, options ...string) ([]byte, error) {
	var conn *net.UDPConn
	if err := h.Try(func() (err error) { conn, err = net.ListenUDP("udp4", nil); return err }); err != nil {
		return nil, err
	}
	defer conn.Close()
	server := netip.MustParseAddrPort(boxAddr + ":69")
	request := append([]byte{0, 1}, strings.Join(append([]string{name, "octet"}, options...), "\x00")+"\x00"...)
	said, to := request, server
	say := func(p []byte, peer netip.AddrPort) error {
		said, to = p, peer
		_, err := conn.WriteToUDPAddrPort(p, peer)
		return err
	}
	if err := say(request, server); err != nil {
		return nil, err
	}
	var out bytes.Buffer
	size, blksize, window, next := -1, 512, 1, uint16(1)
	buf := make([]byte, 2048)
	for unacked, tries := 0, 0; ; {
		_ = conn.SetReadDeadline(time.Now().Add(2 * time.Second))
		n, from, err := conn.ReadFromUDPAddrPort(buf)
		if err != nil {
			if tries++; tries > 5 {
				return nil, err
			}
			if err := say(said, to); err != nil {
				return nil, err
			}
			continue
		}
		number := binary.BigEndian.Uint16(buf[2:])
		switch binary.BigEndian.Uint16(buf) {
		case 5:
			return nil, fmt.Errorf("error %d: %s", number, strings.TrimRight(string(buf[4:n]), "\x00"))
		case 6:
			words := strings.Split(string(buf[2:n-1]), "\x00")
			for i := 0; i+1 < len(words); i += 2 {
				v, err := strconv.Atoi(words[i+1])
				if err != nil {
					return nil, err
				}
				switch words[i] {
				case "tsize":
					size = v
				case "blksize":
					blksize = v
				case "windowsize":
					window = v
				}
			}
			number = 0
		case 3:
			if number != next {
				continue
			}
			next++
			out.Write(buf[4:n])
			if unacked++; unacked < window && n-4 == blksize {
				continue
			}
			unacked = 0
		}
		if err := say([]byte{0, 4, byte(number >> 8), byte(number)}, from); err != nil {
			return nil, err
		}
		if next > 1 && n-4 < blksize {
			break
		}
	}
	if slices.Contains(options, "tsize") && size != out.Len() {
		return nil, fmt.Errorf("tsize %d of %d bytes: GRUB reads as many as it was told", size, out.Len())
	}
	return out.Bytes(), nil
}

// readHTTP asks and reads as GRUB's own client does (grub-core/net/http.c): it knows
// "HTTP/1.1 ", "Content-Length: " and "Transfer-Encoding: chunked" in this spelling
// only, and takes the body of any answer for the file. Shim looks at the status.
func readHTTP(h *pxetest.Host, path, agent string) ([]byte, error) {
	var conn net.Conn
	if err := h.Try(func() (err error) { conn, err = net.Dial("tcp4", boxAddr+":80"); return err }); err != nil {
		return nil, err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: %s\r\nUser-Agent: %s\r\n\r\n", path, boxAddr, agent); err != nil {
		return nil, err
	}
	r := bufio.NewReader(conn)
	size := -1
	for first := true; ; first = false {
		line, err := r.ReadString('\n')
		if err != nil {
			return nil, err
		}
		line = strings.TrimRight(line, "\r\n")
		if line == "" {
			break
		}
		if first && line != "HTTP/1.1 200 OK" && !strings.HasPrefix(agent, "GRUB") {
			return nil, errors.New(line)
		}
		if text, ok := strings.CutPrefix(line, "Content-Length: "); ok {
			if size, err = strconv.Atoi(text); err != nil {
				return nil, err
			}
		}
		if strings.HasPrefix(line, "Transfer-Encoding") {
			return nil, errors.New(line)
		}
	}
	if size < 0 {
		return nil, errors.New("no Content-Length")
	}
	return io.ReadAll(io.LimitReader(r, int64(size)))
}

// grubRuns is GRUB's network image from its start on: what it asks for before its
// configuration, that, and what the configuration does. Debian's image looks for
// "/grub/grub.cfg" on the device that it came from (debian/build-efi-images; its test
// for the platform's own never finds a file on a server, net.c's grub_net_fs_dir).
func grubRuns(t *testing.T, h *pxetest.Host, cpu string, http, fromHTTP bool) grubtest.End {
	t.Helper()
	fetch := func(device, path string) ([]byte, error) {
		switch device {
		case "(tftp," + boxAddr + ")":
			return readTFTP(h, path, "blksize", "1024", "tsize", "0")
		case "(http," + boxAddr + ")":
			return readHTTP(h, path, "GRUB 2.12")
		}
		return nil, fmt.Errorf("device %s", device)
	}
	from := "(tftp," + boxAddr + ")"
	if fromHTTP {
		from = "(http," + boxAddr + ")"
	}
	for _, list := range []string{"command", "fs", "crypto", "terminal"} {
		if b, err := fetch(from, "/grub/"+cpu+"-efi/"+list+".lst"); err == nil && len(b) > 0 {
			t.Errorf("GRUB's %s.lst has something: %.40q", list, b)
		}
	}
	text, err := fetch(from, "/grub/grub.cfg")
	if err != nil {
		t.Fatalf("grub.cfg from %s: %v; GRUB would wait at its prompt", from, err)
	}
	m := grubtest.Machine{CPU: cpu, Fetch: fetch, HTTP: http}
	end, err := m.Run(string(text))
	if err != nil {
		t.Fatalf("GRUB: %v, in\n%s", err, text)
	}
	t.Logf("GRUB from %s said %q", from, end.Said)
	return end
}

// TestGRUB walks firmware, shim and GRUB through the whole chain, by TFTP and by
// HTTP, and TestGRUBOfDebian12 does so with a GRUB that has no HTTP.
func TestGRUB(t *testing.T) { grubChains(t, grubHTTP) }

func TestGRUBOfDebian12(t *testing.T) { grubChains(t, "") }

func grubChains(t *testing.T, client string) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	content := grubFiles(t, dir, client)
	m := pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), "m0", macARM)
	arm, shim := ramdisk(macARM), ramdisk(macShim)
	arm.MachineId, shim.MachineId, shim.Loader = "node_arm", "node_shim", "shim"
	reports := make(chan string, 100)
	var counts *boots.Store
	counted := map[string]int{}
	b := start(t, "box0", dir, func(c *Config) {
		counts = c.Counts
		c.ARM64Cmdline = "console=ttyAMA0"
		c.Boot = func(_ context.Context, booting httpboot.Booting) ([]byte, error) {
			reports <- booting.Base + " " + booting.Report
			return newc.BootArchive("/etc/bc/boot.json", []byte("voucher of "+booting.Machine.MachineId)), nil
		}
	}, arm, shim)

	for _, tt := range []struct {
		name, mac      string
		kind           dhcpKind
		cpu            string
		loader         string
		http           bool // by HTTP boot
		kernel, initrd string
		cmdline        string
	}{
		{"arm64 by PXE", macARM, asARM64, "arm64", files.ARM64Loader, false, files.ARM64Kernel, files.ARM64Initrd, "console=ttyAMA0"},
		{"arm64 by HTTP boot", macARM, asARM64HTTP, "arm64", files.ARM64Loader, true, files.ARM64Kernel, files.ARM64Initrd, "console=ttyAMA0"},
		{"x86-64 by PXE and shim", macShim, asUEFI, "x86_64", files.Shim, false, files.Kernel, files.Initrd, "console=ttyS0"},
		{"x86-64 by HTTP boot and shim", macShim, asHTTP, "x86_64", files.Shim, true, files.Kernel, files.Initrd, "console=ttyS0"},
	} {
		m.SetMAC(tt.mac)
		ack := mustDORA(t, m, tt.kind).ACK
		base := "http://" + boxAddr + "/boot/" + strings.ReplaceAll(tt.mac, ":", "-") + "/"
		want := filepath.Base(tt.loader)
		if tt.http {
			want = base + want
		}
		if tt.http && client == "" {
			if ack.BootFileName != "" {
				t.Errorf("%s: told to load %q, want nothing: its GRUB would find no configuration over HTTP", tt.name, ack.BootFileName)
			}
			continue
		}
		if ack.BootFileName != want || ack.ServerIPAddr.String() != boxAddr {
			t.Fatalf("%s: told to load %q from %s, want %q", tt.name, ack.BootFileName, ack.ServerIPAddr, want)
		}

		// Firmware, and shim where there is one: it asks for what stands beside it, first
		// for revocations and certificates that need not be there (shim.c of 15.8 and 16.1).
		get := func(name string) ([]byte, error) {
			if tt.http {
				return readHTTP(m, strings.TrimPrefix(base, "http://"+boxAddr)+name, "UefiHttpBoot/1.0")
			}
			return readTFTP(m, name, "windowsize", "4")
		}
		if got, err := get(filepath.Base(tt.loader)); err != nil || !bytes.Equal(got, content[tt.loader]) {
			t.Fatalf("%s: the loader is %d bytes, %v", tt.name, len(got), err)
		}
		if tt.loader == files.Shim {
			for _, name := range []string{"revocations.efi", "revocations_sku.efi", "revocations_sbat.efi", "shim_certificate_0.efi", "mmx64.efi"} {
				_, err := get(name)
				if err == nil || !strings.HasPrefix(err.Error(), "error 1: ") && !strings.Contains(err.Error(), " 404 ") {
					t.Errorf("%s: %s: %v, want that it is not found, on which shim goes on", tt.name, name, err)
				}
			}
			second := "grubx64.efi"
			if tt.http {
				second = "/grubx64.efi" // its own slash after the URL's (httpboot.c's generate_next_uri)
			}
			if got, err := get(second); err != nil || !bytes.Equal(got, content[files.ShimSecond]) {
				t.Fatalf("%s: shim's second stage is %d bytes, %v", tt.name, len(got), err)
			}
		}

		end := grubRuns(t, m, tt.cpu, client != "", tt.http)
		if end.How != "linux" || !bytes.Equal(end.Kernel, content[tt.kernel]) || !strings.HasSuffix(end.Cmdline, "vmlinuz "+tt.cmdline) {
			t.Fatalf("%s: GRUB ended by %q with %d bytes of kernel and %q", tt.name, end.How, len(end.Kernel), end.Cmdline)
		}
		if len(end.Initrds) != 2 || !bytes.HasPrefix(end.Initrds[0], content[tt.initrd]) || !bytes.Contains(end.Initrds[1], []byte("voucher of node_")) {
			t.Fatalf("%s: %d initrds, want the ramdisk's and the boot's own", tt.name, len(end.Initrds))
		}
		if report := <-reports; !strings.HasPrefix(report, "http://"+boxAddr+" "+base) {
			t.Errorf("%s: the ramdisk reports to %q, want the box by the address that it was booted from", tt.name, report)
		}
		machine := map[string]string{macARM: "node_arm", macShim: "node_shim"}[tt.mac]
		counted[machine]++
		if n, _ := counts.Of(machine, "w1"); n != counted[machine] {
			t.Errorf("%s: %d boots are counted, want %d", tt.name, n, counted[machine])
		}
		if over, want := end.From[1:5], map[bool]string{true: "http", false: "tftp"}[client != ""]; over != want {
			t.Errorf("%s: the kernel came over %s, want %s", tt.name, over, want)
		}
		b.wait(t, 5*time.Second, "pxe.stage telemetry "+tt.mac+" {MAC:"+tt.mac+" MachineID:"+machine+" Stage:boot ")
	}

	// A machine's files are its own, over TFTP as over HTTP.
	m.SetMAC(macARM)
	mustDORA(t, m, asARM64)
	end := grubRuns(t, m, "arm64", false, false)
	other := strings.TrimPrefix(end.From, "(tftp,"+boxAddr+")")
	other = strings.Replace(other, "vmlinuz", "boot.img", 1)
	if _, err := readTFTP(m, other, "blksize", "1024", "tsize", "0"); err != nil {
		t.Errorf("the boot's own archive: %v", err)
	}
	m.SetMAC(macShim)
	mustDORA(t, m, asUEFI)
	for _, path := range []string{other, strings.Replace(other, "00-0d", "00-0e", 1), "/boot/52-54-00-00-00-0d/grubnetaa64.efi", "/ramdisk/vmlinuz"} {
		if _, err := readTFTP(m, path, "blksize", "1024", "tsize", "0"); err == nil {
			t.Errorf("TFTP %s came to another machine", path)
		}
		if _, err := readHTTP(m, path, "GRUB 2.12"); err == nil {
			t.Errorf("HTTP %s came to another machine", path)
		}
	}
	end = grubRuns(t, m, "x86_64", false, false)
	own := strings.Replace(strings.TrimPrefix(end.From, "(tftp,"+boxAddr+")"), "00-0e", "00-0d", 1)
	if _, err := readTFTP(m, own, "blksize", "1024", "tsize", "0"); err == nil {
		t.Errorf("TFTP %s came: its token is the machine's, and its MAC another's", own)
	}
	text, err := readTFTP(m, "/grub/grub.cfg-01-52-54-00-00-00-0d", "blksize", "1024", "tsize", "0")
	if err != nil || strings.Contains(string(text), "00-0d/") || !strings.Contains(string(text), "00-0e/") {
		t.Errorf("by another machine's MAC: %v, %s\nwant its own", err, text)
	}
}

// TestGRUBAgrees: over TFTP and HTTP GRUB is told the same, and never left at its prompt.
func TestGRUBAgrees(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	grubFiles(t, dir, grubHTTP)
	m := pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), "m0", macARM)
	b := start(t, "box0", dir, nil)
	mustDORA(t, m, asARM64)
	action := func(a pxev1.Action, edit ...func(*pxev1.Machine)) *pxev1.Machine {
		n := ramdisk(macARM)
		n.Action, n.Artifacts = a, nil
		switch a {
		case pxev1.Action_ACTION_LOCAL_DISK:
			n = localDisk(macARM)
		case pxev1.Action_ACTION_KERNEL, pxev1.Action_ACTION_UKI:
			n.Purpose, n.Kernel = "boot", &pxev1.Kernel{Sha256: digest}
		case pxev1.Action_ACTION_ISO:
			n.Purpose, n.Iso = "iso", &pxev1.Iso{Sha256: digest, Size: 1 << 20, Name: "rescue"}
		}
		for _, f := range edit {
			f(n)
		}
		return n
	}
	for _, tt := range []struct {
		name    string
		machine *pxev1.Machine
		how     string
		said    string
		booted  string
		cmdline string
		initrds int
	}{
		{"unknown", nil, "exit", "Nothing to boot: the machine is unknown", "", "", 0},
		{"local disk", action(pxev1.Action_ACTION_LOCAL_DISK), "exit", "Booting from the local disk: assigned to its local disk", "", "", 0},
		{"window ended", action(pxev1.Action_ACTION_RAMDISK, func(n *pxev1.Machine) { n.WindowUntilMs = 1 }), "exit", "Booting from the local disk: the boot window w1 has ended", "", "", 0},
		{"a disc image", action(pxev1.Action_ACTION_ISO), "exit", "Nothing to boot: a disc image boots", "", "", 0},
		{"a kernel", action(pxev1.Action_ACTION_KERNEL, func(n *pxev1.Machine) { n.Kernel.Cmdline = "quiet root=/dev/x,{y};z" }), "linux", "", "artifact", "kernel quiet root=/dev/x,{y};z", 0},
		{"a kernel and its initrd", action(pxev1.Action_ACTION_KERNEL, func(n *pxev1.Machine) { n.Kernel.InitrdSha256 = digest }), "linux", "", "artifact", "kernel", 1},
		{"a unified kernel image", action(pxev1.Action_ACTION_UKI), "chainloader", "", "artifact", "", 0},
		{"one boot, which these were", action(pxev1.Action_ACTION_RAMDISK, func(n *pxev1.Machine) { n.MaxBoots = 1 }), "exit", "Booting from the local disk: it has booted", "", "", 0},
	} {
		req := &pxev1.AssignRequest{Version: b.store.Version() + 1}
		if tt.machine != nil {
			req.Machines = []*pxev1.Machine{tt.machine}
		}
		if _, err := b.store.Apply(req); err != nil {
			t.Fatalf("%s: %v", tt.name, err)
		}
		for _, over := range []string{"tftp", "http"} {
			end := grubRuns(t, m, "arm64", over == "http", over == "http")
			if end.How != tt.how || string(end.Kernel) != tt.booted || len(end.Initrds) != tt.initrds || !strings.HasSuffix(end.Cmdline, tt.cmdline) {
				t.Errorf("%s over %s: %q with %q, %q and %d initrds, want %q, %q, %q, %d; it said %q", tt.name, over, end.How, end.Kernel, end.Cmdline, len(end.Initrds), tt.how, tt.booted, tt.cmdline, tt.initrds, end.Said)
			}
			if tt.said != "" && (len(end.Said) == 0 || !strings.HasPrefix(end.Said[0], tt.said)) {
				t.Errorf("%s over %s: GRUB said %q, want %q", tt.name, over, end.Said, tt.said)
			}
			if tt.how != "exit" && end.From[1:5] != over {
				t.Errorf("%s: what boots came from %s, want %s", tt.name, end.From, over)
			}
		}
	}
}

// TestGRUBNeeds: without one of the files that a chain needs, no machine is sent into it.
func TestGRUBNeeds(t *testing.T) {
	dir := t.TempDir()
	grubFiles(t, dir, "")
	arm, shim := ramdisk(macARM), ramdisk(macShim)
	shim.MachineId, shim.Loader = "node_shim", "shim"
	for _, missing := range []string{"", files.ARM64Loader, files.ARM64Kernel, files.ARM64Initrd, files.Shim, files.ShimSecond} {
		c := explainer(t, files.Source(without{files.Dir(filepath.Join(dir, "netboot")), missing}), arm, shim)
		for _, tt := range []struct {
			mac, client string
			needs       []string
		}{
			{macARM, "pxe uefi-arm64", []string{files.ARM64Loader, files.ARM64Kernel, files.ARM64Initrd}},
			{macShim, "pxe uefi-x64", []string{files.Shim, files.ShimSecond}},
		} {
			for _, a := range c.Explain(tt.mac).Answers {
				if a.Client != tt.client {
					continue
				}
				want := "agent"
				if slices.Contains(tt.needs, missing) {
					want = "deny"
				}
				if a.Action != want || want == "deny" && !strings.Contains(a.Reason, "the box has no "+missing) {
					t.Errorf("without %q, %s gets %v, want %s", missing, tt.client, a, want)
				}
			}
		}
	}
	for _, a := range explainer(t, files.Dir(filepath.Join(dir, "netboot")), arm, shim).Explain(macShim).Answers {
		if a.Client == "http-boot uefi-x64" && (a.Action != "deny" || !strings.Contains(a.Reason, "fetches nothing over HTTP")) {
			t.Errorf("HTTP boot with Debian 12's GRUB gets %v, want a denial that names PXE", a)
		}
		if a.Client == "grub uefi-x64" && (a.Protocol != "tftp" || a.File != "grub/grub.cfg" || a.Action != "agent") {
			t.Errorf("shim's GRUB gets %v", a)
		}
	}
}

// without is a source that lacks one file.
type without struct {
	files.Source
	name string
}

func (w without) Open(name string) (files.File, error) {
	if name == w.name {
		return nil, os.ErrNotExist
	}
	return w.Source.Open(name)
}

// explainer is a box that does not run, but answers what it would.
func explainer(t *testing.T, source files.Source, machines ...*pxev1.Machine) *Config {
	t.Helper()
	dir := t.TempDir()
	store, err := assign.Open(filepath.Join(dir, "assign"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.Apply(&pxev1.AssignRequest{Version: 1, Machines: machines}); err != nil {
		t.Fatal(err)
	}
	counts, err := boots.Open(filepath.Join(dir, "boots"), store.Window)
	if err != nil {
		t.Fatal(err)
	}
	return &Config{Assign: store, Counts: counts, Heard: new(Heard), Attempts: new(attempts.Log), Syslog: new(syslog.Store), Files: source, Now: time.Now}
}
