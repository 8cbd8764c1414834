package tftp

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/pxe/limit"
)

// captured is a packet of testdata.
func captured(t testing.TB, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name+".hex"))
	if err != nil {
		t.Fatal(err)
	}
	raw, err := hex.DecodeString(strings.Join(strings.Fields(string(text)), ""))
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// TestFirmware reads as each firmware does, from its own first packet. Those that
// are not captured are built from what is reported of the firmware named.
func TestFirmware(t *testing.T) {
	whole := len(content)
	for _, tt := range []struct {
		name string
		rrq  []byte
		want []byte // the answer to the request; nil: the first block
		size int    // of a block
	}{
		{"EDK2, OVMF 2022.11 (captured)", captured(t, "edk2-read"), packetOf(opOptions, "blksize", "1468", "windowsize", "4"), 1468},
		{"EDK2 before 2018, no window (built)", packetOf(1, "snponly.efi", "octet", "blksize", "1468"), packetOf(opOptions, "blksize", "1468"), 1468},
		{"an Intel BIOS ROM (built)", packetOf(1, "snponly.efi", "octet", "blksize", "1456"), packetOf(opOptions, "blksize", "1456"), 1456},
		{"a ROM of PXE 2.0, no options (built)", packetOf(1, "snponly.efi", "octet"), nil, 512},
		{"iPXE 1.0 (built)", packetOf(1, "/snponly.efi", "octet", "blksize", "1432", "tsize", "0"), packetOf(opOptions, "tsize", "200000", "blksize", "1432"), 1432},
		{"GRUB 2.06 (built)", packetOf(1, "/snponly.efi", "octet", "blksize", "1024", "tsize", "0"),
			packetOf(opOptions, "tsize", "200000", "blksize", "1024"), 1024},
		{"shim 15, which puts a slash of its own before the folder's (built)", packetOf(1, "//snponly.efi", "octet", "blksize", "1468", "windowsize", "4"),
			packetOf(opOptions, "blksize", "1468", "windowsize", "4"), 1468},
		{"WDS's way of naming (built)", packetOf(1, `\snponly.efi`, "octet", "blksize", "1456"), packetOf(opOptions, "blksize", "1456"), 1456},
		{"a BIOS ROM that reads option 67 past its end (built)", packetOf(1, "snponly.efi\xff", "octet", "blksize", "1456"), packetOf(opOptions, "blksize", "1456"), 1456},
		{"U-Boot 2022 (built)", packetOf(1, "snponly.efi", "octet", "timeout", "5", "blksize", "1468", "windowsize", "1"),
			packetOf(opOptions, "blksize", "1468", "timeout", "5", "windowsize", "1"), 1468},
	} {
		s := start(t, 10, 10)
		conn := client(t)
		got, from := exchange(t, conn, s.addr, tt.rrq)
		block := 0
		if tt.want != nil {
			if !sameOptions(got, tt.want) {
				t.Errorf("%s: answer %q, want %q", tt.name, got, tt.want)
				continue
			}
			got, _ = exchange(t, conn, from.String(), captured(t, "edk2-ack"))
		}
		window := uint16(1)
		if i := bytes.Index(tt.want, []byte("windowsize\x004")); i >= 0 {
			window = 4
		}
		var read []byte
		for {
			block++
			if n := binary.BigEndian.Uint16(got[2:]); binary.BigEndian.Uint16(got) != opData || int(n) != block || len(got)-4 > tt.size {
				t.Errorf("%s: packet %d begins %x with %d bytes", tt.name, block, got[:4], len(got)-4)
				break
			}
			read = append(read, got[4:]...)
			last := len(got)-4 < tt.size
			ack := []byte{0, opAck, byte(block >> 8), byte(block)}
			if last {
				_, _ = conn.WriteToUDP(ack, from)
				break
			}
			if uint16(block)%window == 0 {
				got, _ = exchange(t, conn, from.String(), ack)
				continue
			}
			got = receive(t, conn)
		}
		if !bytes.Equal(read, content) {
			t.Errorf("%s: read %d bytes of %d", tt.name, len(read), whole)
		}
	}
}

// sameOptions compares option acknowledgements whatever their order.
func sameOptions(a, b []byte) bool {
	read := func(p []byte) map[string]string {
		if len(p) < 3 || binary.BigEndian.Uint16(p) != opOptions {
			return nil
		}
		parts := strings.Split(strings.TrimSuffix(string(p[2:]), "\x00"), "\x00")
		m := map[string]string{}
		for i := 0; i+1 < len(parts); i += 2 {
			m[parts[i]] = parts[i+1]
		}
		return m
	}
	x, y := read(a), read(b)
	if x == nil || len(x) != len(y) {
		return false
	}
	for k, v := range x {
		if y[k] != v {
			return false
		}
	}
	return true
}

func receive(t *testing.T, conn *net.UDPConn) []byte {
	t.Helper()
	b := make([]byte, 9000)
	_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	n, _, err := conn.ReadFromUDP(b)
	if err != nil {
		t.Fatal(err)
	}
	return b[:n]
}

// TestFirmwareProbes: EDK2 asks for the size and breaks off (captured), and then
// reads. That is no failed transfer.
func TestFirmwareProbes(t *testing.T) {
	s := start(t, 10, 10)
	conn := client(t)
	oack, from := exchange(t, conn, s.addr, captured(t, "edk2-probe"))
	if want := packetOf(opOptions, "blksize", "1468", "tsize", "200000", "windowsize", "4"); !sameOptions(oack, want) {
		t.Errorf("answer to the probe = %q, want %q", oack, want)
	}
	if _, err := conn.WriteToUDP(captured(t, "edk2-abort"), from); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); len(s.transfers()) == 0 && time.Now().Before(end); {
		time.Sleep(5 * time.Millisecond)
	}
	if got := s.transfers(); len(got) != 1 || got[0].Outcome != Probed || got[0].Err != nil {
		t.Errorf("transfers = %+v, want one probe", got)
	}
}

// TestAutoexec: an iPXE of 1.21.1 and later asks for autoexec.ipxe where its own
// file came from, and goes on at once if it is told that there is none. Built, as
// its UEFI builds ask through EDK2's client, and by iPXE's own.
func TestAutoexec(t *testing.T) {
	s := start(t, 10, 10)
	for _, rrq := range [][]byte{
		packetOf(1, "autoexec.ipxe", "octet", "tsize", "0", "blksize", "1468", "windowsize", "4"),
		packetOf(1, "/autoexec.ipxe", "octet", "blksize", "1432", "tsize", "0"),
		packetOf(1, "//autoexec.ipxe", "octet"),
	} {
		got, _ := exchange(t, client(t), s.addr, rrq)
		if binary.BigEndian.Uint16(got) != opError || binary.BigEndian.Uint16(got[2:]) != codeNotFound {
			t.Errorf("answer to %q = %q, want error %d", rrq, got, codeNotFound)
		}
	}
	if got := s.transfers(); len(got) != 0 {
		t.Errorf("counted as transfers: %+v", got)
	}
}

// TestCaptures answers each read request of the captures: what their server did
// not say to EDK2, ours says.
func TestCaptures(t *testing.T) {
	dir := os.Getenv("CAPTURES")
	if dir == "" {
		t.Skip("needs captures of real firmware: set CAPTURES to their folder")
	}
	requests := 0
	names, _ := filepath.Glob(filepath.Join(dir, "*.pcap"))
	for _, name := range names {
		s := start(t, 10, 10)
		for _, p := range readRequests(t, name) {
			requests++
			r, err := parse(p)
			if err != nil || r.name != "snponly.efi" || r.blksize != "1468" || r.windowsize != "4" {
				t.Errorf("%s: parse(%q) = %+v, %v", name, p, r, err)
				continue
			}
			want := packetOf(opOptions, "blksize", "1468", "windowsize", "4")
			if r.tsize != "" {
				want = packetOf(opOptions, "blksize", "1468", "tsize", "200000", "windowsize", "4")
			}
			conn := client(t)
			got, from := exchange(t, conn, s.addr, p)
			if !sameOptions(got, want) {
				t.Errorf("%s: answer to %q = %q, want %q", name, p, got, want)
			}
			_, _ = conn.WriteToUDP(errorPacket(8, "User aborted the transfer"), from)
		}
	}
	if requests == 0 {
		t.Error("no capture has a read request")
	}
}

// readRequests are those of a pcap file: little-endian, Ethernet.
func readRequests(t *testing.T, path string) (all [][]byte) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	const header, ethernet = 24, 14
	if len(b) < header || binary.LittleEndian.Uint32(b) != 0xa1b2c3d4 || binary.LittleEndian.Uint32(b[20:]) != 1 {
		t.Fatalf("%s is no little-endian pcap of Ethernet", path)
	}
	for b = b[header:]; len(b) >= 16; {
		n := int(binary.LittleEndian.Uint32(b[8:]))
		if len(b) < 16+n {
			t.Fatalf("%s is torn", path)
		}
		frame := b[16 : 16+n]
		b = b[16+n:]
		if n < ethernet+20+8 || binary.BigEndian.Uint16(frame[12:]) != 0x0800 || frame[ethernet+9] != 17 {
			continue
		}
		udp := frame[ethernet+int(frame[ethernet]&0xf)*4:]
		if binary.BigEndian.Uint16(udp[2:]) == Port {
			all = append(all, udp[8:binary.BigEndian.Uint16(udp[4:])])
		}
	}
	return all
}

// TestFull: firmware that finds no place asks again, and so is told nothing; when a
// place is free it is served. Built: EDK2 ends its boot on an error, and asks six
// times, four seconds apart, where it hears nothing.
func TestFull(t *testing.T) {
	s := start(t, 1, 1)
	first := client(t)
	_, from := exchange(t, first, s.addr, captured(t, "edk2-read"))
	exchange(t, first, from.String(), captured(t, "edk2-ack")) // answered, so that it keeps its place
	to, err := net.ResolveUDPAddr("udp4", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	// From another address: one of the same may be told, as it has had its share.
	second, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 7, 7)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { second.Close() })
	if _, err := second.WriteToUDP(captured(t, "edk2-read"), to); err != nil {
		t.Fatal(err)
	}
	// The refused request of a third comes after it, and is answered.
	third := client(t)
	if got, _ := exchange(t, third, s.addr, packetOf(1, "autoexec.ipxe", "octet")); binary.BigEndian.Uint16(got) != opError {
		t.Errorf("answer to a third = %q", got)
	}
	_ = second.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	if n, _, err := second.ReadFromUDP(make([]byte, 100)); err == nil {
		t.Errorf("without a place: an answer of %d bytes, want none", n)
	}
	_, _ = first.WriteToUDP(errorPacket(0, "enough"), from)
	for end := time.Now().Add(20 * time.Second); ; {
		if _, err := second.WriteToUDP(captured(t, "edk2-read"), to); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 2000)
		_ = second.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
		if n, _, err := second.ReadFromUDP(buf); err == nil {
			if binary.BigEndian.Uint16(buf[:n]) != opOptions {
				t.Errorf("with a place: %q", buf[:n])
			}
			return
		}
		if time.Now().After(end) {
			t.Fatal("with a place there is no answer")
		}
	}
}

// FuzzRequests sends whatever to the port itself: nothing that comes back tells a
// path, and the next request is answered.
func FuzzRequests(f *testing.F) {
	for _, name := range []string{"edk2-probe", "edk2-read", "edk2-abort", "edk2-ack"} {
		f.Add(captured(f, name))
	}
	for _, p := range [][]byte{
		packetOf(1, "//snponly.efi", "OCTET", "BLKSIZE", "65464", "windowsize", "65535", "timeout", "255", "tsize", "0"),
		packetOf(1, "../../etc/passwd", "netascii"), packetOf(2, "a", "octet"), packetOf(1, "a", "octet", "blksize"), {0, 6, 0}, {},
	} {
		f.Add(p)
	}
	s := start(f, 10, 10)
	to, err := net.ResolveUDPAddr("udp4", s.addr)
	if err != nil {
		f.Fatal(err)
	}
	said := map[string]bool{}
	for _, text := range []string{"file not found", "read error", "server stops", "writing is not served", "malformed request", "too many transfers, try again", "unknown transfer ID"} {
		said[text] = true
	}
	var turn uint32
	f.Fuzz(func(t *testing.T, p []byte) {
		// Each from an address of its own: of one so many are not read.
		turn++
		conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 1+byte(turn>>16)%200, byte(turn>>8), byte(turn))})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		last := packetOf(1, "autoexec.ipxe", "octet")
		for _, packet := range [][]byte{p, last} {
			if _, err := conn.WriteToUDP(packet, to); err != nil && len(packet) < 60_000 {
				t.Fatal(err)
			}
		}
		buf := make([]byte, 66_000)
		for tries := 0; ; {
			_ = conn.SetReadDeadline(time.Now().Add(2 * time.Second))
			n, _, err := conn.ReadFromUDP(buf)
			if err != nil {
				if tries++; tries > 5 {
					t.Fatalf("after %q nothing is answered", p)
				}
				_, _ = conn.WriteToUDP(last, to)
				continue
			}
			if n < 4 || buf[0] != 0 || buf[1] < opData || buf[1] > opOptions {
				t.Fatalf("%q is answered with %q", p, buf[:n])
			}
			if buf[1] != opError {
				continue
			}
			text := string(bytes.TrimSuffix(buf[4:n], []byte{0}))
			if !said[text] {
				t.Fatalf("%q is answered with %q", p, text)
			}
			if text == "file not found" {
				return
			}
		}
	})
}

// TestFloodIsNotRead: of what one port sends without end most is dropped unread,
// and another address is answered.
func TestFloodIsNotRead(t *testing.T) {
	s := start(t, 10, 10)
	to, err := net.ResolveUDPAddr("udp4", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	flood := client(t)
	const sent = 100
	for range sent { // few enough for the queues of both
		if _, err := flood.WriteToUDP(packetOf(1, "autoexec.ipxe", "octet"), to); err != nil {
			t.Fatal(err)
		}
	}
	other, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 7, 8)})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if got, _ := exchange(t, other, s.addr, packetOf(1, "autoexec.ipxe", "octet")); binary.BigEndian.Uint16(got) != opError {
		t.Errorf("another address is answered with %q", got)
	}
	// All that the flood gets was sent before that.
	answers := 0
	_ = flood.SetReadDeadline(time.Now().Add(time.Second))
	for {
		if _, _, err := flood.ReadFromUDP(make([]byte, 100)); err != nil {
			break
		}
		answers++
	}
	if answers < limit.PerBurst || answers > sent/2 {
		t.Errorf("%d of %d requests are answered, want %d or a few more", answers, sent, limit.PerBurst)
	}
}
