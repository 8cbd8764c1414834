package tftp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/pxe/tftp/tftptest"
)

func TestAgree(t *testing.T) {
	for _, tt := range []struct {
		name string
		r    request
		mtu  int
		want []byte
	}{
		{"nothing", request{}, 1500, nil},
		{"EDK2", request{tsize: "0", blksize: "1468", windowsize: "4"}, 1500, packetOf(6, "blksize", "1468", "tsize", "77", "windowsize", "4")},
		{"U-Boot", request{tsize: "0", timeout: "5", blksize: "1468", windowsize: "64"}, 1500, packetOf(6, "blksize", "1468", "tsize", "77", "timeout", "5", "windowsize", "64")},
		{"above the MTU", request{blksize: "8192"}, 1500, packetOf(6, "blksize", "1468")},
		{"least", request{blksize: "8"}, 1500, packetOf(6, "blksize", "8")},
		{"under the least", request{blksize: "7"}, 1500, nil},
		{"above the most", request{blksize: "65465", windowsize: "65536", timeout: "256"}, 1500, nil},
		{"zeros", request{blksize: "0", windowsize: "0", timeout: "0"}, 1500, nil},
		{"a huge window", request{windowsize: "65535"}, 1500, packetOf(6, "windowsize", "64")},
		{"a window of jumbo frames is bounded in bytes", request{blksize: "8968", windowsize: "64"}, 9000, packetOf(6, "blksize", "8968", "windowsize", "14")},
	} {
		if got := agree(tt.r, tt.mtu, maxWindowBytes, 77, time.Second); !bytes.Equal(got.oack, tt.want) {
			t.Errorf("agree(%s) = %q, want %q", tt.name, got.oack, tt.want)
		}
	}
}

func fetch(t *testing.T, at netip.AddrPort, blksize, window int) {
	t.Helper()
	var got bytes.Buffer
	if n, err := tftptest.Fetch(at, "snponly.efi", blksize, window, &got); err != nil || !bytes.Equal(got.Bytes(), content) {
		t.Errorf("Fetch(blksize %d, window %d) = %d bytes, %v, want the file", blksize, window, n, err)
	}
}

func TestWindowedTransfer(t *testing.T) {
	s := start(t, 10, 10)
	for _, tt := range []struct{ blksize, window int }{
		{512, 1}, {1468, 4}, {1468, 16}, {1468, 64}, {1000, 4}, {8000, 4},
		{100, 0}, // under the library's least
		{8, 64},  // 25,000 blocks
		{1, 4},   // not taken: 512
	} {
		fetch(t, netip.MustParseAddrPort(s.addr), tt.blksize, tt.window)
	}
}

func TestLossReorderAndDuplicates(t *testing.T) {
	s := start(t, 10, 10)
	for _, window := range []int{1, 4, 16, 64} {
		random := rand.New(rand.NewPCG(1, uint64(window)))
		f, err := tftptest.Forward(netip.MustParseAddrPort(s.addr), 0, func() []time.Duration {
			switch random.IntN(60) {
			case 0:
				return nil
			case 1:
				return []time.Duration{0, 0}
			case 2:
				return []time.Duration{2 * time.Millisecond}
			}
			return []time.Duration{0}
		})
		if err != nil {
			t.Fatal(err)
		}
		fetch(t, f.Addr, 1468, window)
		f.Close()
	}
}

func TestStrangersTIDIsToldAndChangesNothing(t *testing.T) {
	s := start(t, 10, 10)
	conn, stranger := client(t), client(t)
	_, from := exchange(t, conn, s.addr, packetOf(1, "snponly.efi", "octet", "windowsize", "2"))
	got, _ := exchange(t, stranger, from.String(), []byte{0, opAck, 0, 0})
	if binary.BigEndian.Uint16(got) != opError || binary.BigEndian.Uint16(got[2:]) != codeTID {
		t.Errorf("answer to a stranger = %q, want error %d", got, codeTID)
	}
	if got, _ := exchange(t, conn, from.String(), []byte{0, opAck, 0, 0}); binary.BigEndian.Uint16(got) != opData {
		t.Errorf("answer to the client = %q, want data", got)
	}
}

// Firmware acknowledges the options and ends then, with ERROR 0, or ends at once, with ERROR 8.
func TestAbortsOnPurposeAreProbes(t *testing.T) {
	for _, options := range [][]string{{"tsize", "0"}, {"tsize", "0", "windowsize", "4"}} {
		s := start(t, 10, 10)
		conn := client(t)
		_, from := exchange(t, conn, s.addr, packetOf(1, append([]string{"snponly.efi", "octet"}, options...)...))
		exchange(t, conn, from.String(), []byte{0, opAck, 0, 0})
		_, _ = conn.WriteToUDP(errorPacket(0, "no"), from)
		deadline := time.Now().Add(10 * time.Second)
		for len(s.transfers()) == 0 && time.Now().Before(deadline) {
			time.Sleep(5 * time.Millisecond)
		}
		if got := s.transfers(); len(got) != 1 || got[0].Outcome != Probed {
			t.Errorf("%v: transfers = %+v, want one probe", options, got)
		}
	}
}

// TestClosedIsNoFailure: GRUB's ERROR ends what it does not read to its end, in the
// middle of the file, and another ERROR there is a failure.
func TestClosedIsNoFailure(t *testing.T) {
	for _, options := range [][]string{{"blksize", "1024", "tsize", "0"}, {"blksize", "1024", "windowsize", "1"}} {
		for _, tt := range []struct {
			code byte
			text string
			want Outcome
		}{{0, "closed", Probed}, {3, "closed", Failed}, {0, "disk full", Failed}} {
			s := start(t, 10, 10)
			conn := client(t)
			_, from := exchange(t, conn, s.addr, packetOf(1, append([]string{"snponly.efi", "octet"}, options...)...))
			for block := range byte(3) {
				exchange(t, conn, from.String(), []byte{0, opAck, 0, block})
			}
			_, _ = conn.WriteToUDP(errorPacket(tt.code, tt.text), from)
			deadline := time.Now().Add(10 * time.Second)
			for len(s.transfers()) == 0 && time.Now().Before(deadline) {
				time.Sleep(5 * time.Millisecond)
			}
			if got := s.transfers(); len(got) != 1 || got[0].Outcome != tt.want || (got[0].Err != nil) != (tt.want == Failed) {
				t.Errorf("%v, ERROR %d %q: transfers = %+v, want one %s", options, tt.code, tt.text, got, tt.want)
			}
		}
	}
}

// A flood of requests that nobody answers keeps no one out who does.
func TestFloodKeepsNobodyOut(t *testing.T) {
	s := start(t, 8, 4)
	to, err := net.ResolveUDPAddr("udp4", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var flood sync.WaitGroup
	defer flood.Wait()
	defer close(stop)
	for i := range 60 {
		conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 1, byte(i+1))})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		rrq := packetOf(1, "snponly.efi", "octet", "blksize", "1468", "windowsize", "65535")
		if i%2 == 0 {
			rrq = packetOf(1, "snponly.efi", "octet")
		}
		_, _ = conn.WriteToUDP(rrq, to)
		flood.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(50 * time.Millisecond):
					_, _ = conn.WriteToUDP(rrq, to)
				}
			}
		})
	}
	for _, window := range []int{0, 4} {
		fetch(t, netip.MustParseAddrPort(s.addr), 1468, window)
	}
}

func TestCurl(t *testing.T) {
	curl, err := exec.LookPath("curl")
	if err != nil {
		t.Skip("needs curl: ", err)
	}
	s := start(t, 10, 10)
	for _, blksize := range []int{8, 512, 1468} {
		if blksize == 8 && len(content)/8 > 65535 {
			t.Fatal("curl's block numbers would wrap")
		}
		got, err := exec.CommandContext(t.Context(), curl, "-sS", "--noproxy", "*", "--tftp-blksize", fmt.Sprint(blksize), "tftp://"+s.addr+"/snponly.efi").Output()
		if err != nil || !bytes.Equal(got, content) {
			t.Errorf("curl at blksize %d: %d bytes, %v, want the file", blksize, len(got), err)
		}
	}
}

// What the library knows nothing of is taken all the same.
func TestOptionsBeyondTheLibrary(t *testing.T) {
	s := start(t, 10, 10)
	for _, option := range [][]string{{"blksize", "100"}, {"timeout", "5"}, {"windowsize", "4"}} {
		got, _ := exchange(t, client(t), s.addr, packetOf(1, append([]string{"snponly.efi", "octet"}, option...)...))
		if want := packetOf(opOptions, option...); !bytes.Equal(got, want) {
			t.Errorf("answer to %q = %q, want %q", option, got, want)
		}
	}
}
