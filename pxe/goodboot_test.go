package pxe

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/pxe/attempts"
	"github.com/better-compute/site-appliance/pxe/pxetest"
	"github.com/better-compute/site-appliance/pxe/syslog"
)

// record is a log that is read while it is written.
type record struct {
	mu  sync.Mutex
	all bytes.Buffer
}

func (r *record) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.all.Write(b)
}

func (r *record) lines() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Split(strings.TrimSpace(r.all.String()), "\n")
}

// sent is one of the packets that package tftp has of real firmware.
func sent(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile("tftp/testdata/" + name + ".hex")
	if err != nil {
		t.Fatal(err)
	}
	b, err := hex.DecodeString(strings.Join(strings.Fields(string(text)), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// asks sends a read request, waits for the answer, which begins with opcode, and sends
// what follows it, if anything.
func asks(t *testing.T, h *pxetest.Host, request []byte, opcode byte, then []byte) {
	t.Helper()
	h.Do(func() error {
		conn, err := net.ListenUDP("udp4", nil)
		if err != nil {
			return err
		}
		defer conn.Close()
		buf := make([]byte, 2048)
		for range 20 {
			if _, err := conn.WriteToUDPAddrPort(request, netip.MustParseAddrPort(boxAddr+":69")); err != nil {
				return err
			}
			_ = conn.SetReadDeadline(time.Now().Add(time.Second))
			n, from, err := conn.ReadFromUDPAddrPort(buf)
			if err != nil {
				continue
			}
			if n < 2 || buf[1] != opcode {
				return fmt.Errorf("%q is answered with %q, want opcode %d", request, buf[:n], opcode)
			}
			if then != nil {
				_, err = conn.WriteToUDPAddrPort(then, from)
			}
			return err
		}
		return fmt.Errorf("%q is not answered", request)
	})
}

// TestGoodBootIsOneLineAStage: a whole good boot leaves one line in the log for each
// stage, TFTP's one among them, and nothing else: neither what firmware asks for and
// breaks off (EDK2's with error 8 captured; without a window, and with error 0, built)
// nor the autoexec.ipxe that a newer iPXE looks for (built) is a failure, in the log or
// where the boot is explained.
func TestGoodBootIsOneLineAStage(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir)
	m := pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), "m0", macRAM)
	var cfg Config
	log := &record{}
	b := start(t, "box0", dir, func(c *Config) {
		c.Heard, c.Attempts, c.Syslog, c.Now, c.Log = new(Heard), new(attempts.Log), new(syslog.Store), time.Now, slog.New(slog.NewTextHandler(log, nil))
		cfg = *c
	}, ramdisk(macRAM))

	const oack, refusal = 6, 5
	mustDORA(t, m, asUEFI)
	for _, probe := range [][]byte{sent(t, "edk2-probe"), []byte("\x00\x01snponly.efi\x00octet\x00tsize\x000\x00")} {
		for _, abort := range [][]byte{sent(t, "edk2-abort"), []byte("\x00\x05\x00\x00TFTP Aborted\x00")} {
			asks(t, m, probe, oack, abort)
		}
	}
	if _, err := fetchTFTP(m, "snponly.efi"); err != nil {
		t.Fatal(err)
	}
	b.wait(t, 10*time.Second, "Stage:tftp ")
	asks(t, m, []byte("\x00\x01/autoexec.ipxe\x00octet\x00blksize\x001432\x00tsize\x000\x00"), refusal, nil)
	// The first three that a script names are kernel, initrd and boot archive.
	script, fetched := mustDORA(t, m, asIPXE).ACK.BootFileName, 0
	asksHTTP := strings.TrimSuffix(script, "script.ipxe") + "autoexec.ipxe"
	if code, _, err := get(m, asksHTTP); err != nil || code != 404 {
		t.Errorf("GET %s = %d, %v, want 404", asksHTTP, code, err)
	}
	for word := range strings.FieldsSeq(string(mustGet(t, m, script))) {
		if strings.HasPrefix(word, "http://") && fetched < 3 {
			mustGet(t, m, word)
			fetched++
		}
	}
	b.wait(t, 10*time.Second, "Stage:boot ")
	if err := b.stop(); err != nil {
		t.Fatalf("Run = %v, want nil", err)
	}

	want := []string{"dhcp", "tftp", "dhcp", "script", "kernel", "initrd", "boot"}
	var got []string
	for _, line := range log.lines() {
		if strings.Contains(line, `msg="network boot is served"`) {
			continue
		}
		_, stage, _ := strings.Cut(line, `msg="boot stage" interface=box0 mac=`+macRAM+" machine=node_a stage=")
		stage, _, _ = strings.Cut(stage, " ")
		if got = append(got, stage); stage == "" {
			t.Errorf("a line that is no stage's: %s", line)
		}
	}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("the log has the stages %q, want each once: %q:\n%s", got, want, strings.Join(log.lines(), "\n"))
	}

	explained := cfg.Explain(macRAM)
	if n := len(explained.Attempts); n != 1 {
		t.Fatalf("%d attempts, want one: %v", n, explained.Attempts)
	}
	var steps []string
	for _, s := range explained.Attempts[0].Steps {
		if n := len(steps); n == 0 || steps[n-1] != s.Stage {
			steps = append(steps, s.Stage)
		}
		for _, word := range []string{"fail", "abort", "refuse", "deny", "error"} {
			if strings.Contains(strings.ToLower(s.Detail), word) {
				t.Errorf("explained as %s: %s", s.Stage, s.Detail)
			}
		}
	}
	if strings.Join(steps, " ") != strings.Join(want, " ") {
		t.Errorf("explained stages are %q, want %q", steps, want)
	}
	if !strings.HasPrefix(explained.WaitsFor, "after boot: the ramdisk starts") {
		t.Errorf("it waits for %q", explained.WaitsFor)
	}
}
