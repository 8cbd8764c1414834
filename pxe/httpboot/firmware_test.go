package httpboot

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/pxe/script"
)

// wired serves the rig on a real connection; every client is machine A.
func wired(t *testing.T, r *rig) net.Addr {
	t.Helper()
	r.h.cfg.Holder = func(netip.Addr) (string, bool) { return macA, true }
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, ln, r.h, slog.New(slog.DiscardHandler)) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Serve = %v, want nil", err)
		}
	})
	return ln.Addr()
}

// say sends bytes as they are and reads the answer to a request of that method.
func say(t *testing.T, conn net.Conn, in *bufio.Reader, text, method string) (*http.Response, []byte) {
	t.Helper()
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := io.WriteString(conn, text); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(in, &http.Request{Method: method})
	if err != nil {
		t.Fatalf("answer to %q: %v", text, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("answer to %q: %v", text, err)
	}
	return resp, body
}

// TestFirmwareRequests are bytes as firmware sends them; none is captured, each is
// built from what is reported of the firmware named. Nothing is ever redirected:
// EDK2 breaks there, and a Raspberry Pi does not follow.
func TestFirmwareRequests(t *testing.T) {
	const loader, mac = "the loader", "/boot/52-54-00-00-00-0a"
	edk2 := "Host: 10.0.0.1\r\nAccept: */*\r\nUser-Agent: UefiHttpBoot/1.0\r\n\r\n"
	ipxe := "Connection: keep-alive\r\nUser-Agent: iPXE/1.21.1\r\nHost: 10.0.0.1\r\n"
	for _, tt := range []struct {
		name, method, text string
		code               int
		want               string
	}{
		{"EDK2 of 2019 on", "GET", "GET " + mac + "/snponly.efi HTTP/1.1\r\n" + edk2, 200, loader},
		{"EDK2, the size first", "HEAD", "HEAD " + mac + "/snponly.efi HTTP/1.1\r\n" + edk2, 200, ""},
		{"EDK2 with a folder that ends in a slash", "GET", "GET " + mac + "//snponly.efi HTTP/1.1\r\n" + edk2, 200, loader},
		{"EDK2 with a slash before the path", "GET", "GET /" + mac + "/snponly.efi HTTP/1.1\r\n" + edk2, 200, loader},
		{"EDK2, the size of a doubled path", "HEAD", "HEAD //boot//52-54-00-00-00-0a//snponly.efi HTTP/1.1\r\n" + edk2, 200, ""},
		{"a ROM that puts the MAC in capitals", "GET", "GET /boot/52-54-00-00-00-0A/snponly.efi HTTP/1.1\r\n" + edk2, 200, loader},
		{"a ROM that puts the MAC in capitals and colons", "GET", "GET /boot/52:54:00:00:00:0A/snponly.efi HTTP/1.1\r\n" + edk2, 200, loader},
		{"a ROM that escapes colons", "GET", "GET /boot/52%3A54%3A00%3A00%3A00%3A0A/snponly.efi HTTP/1.1\r\n" + edk2, 200, loader},
		{"a loader that names the host in the path", "GET", "GET http://10.0.0.1//boot/52-54-00-00-00-0a/snponly.efi HTTP/1.1\r\n" + edk2, 200, loader},
		{"GRUB 2.06", "GET", "GET " + mac + "/snponly.efi HTTP/1.1\r\nHost: 10.0.0.1\r\nUser-Agent: GRUB 2.06\r\n\r\n", 200, loader},
		{"U-Boot's wget", "GET", "GET " + mac + "/snponly.efi HTTP/1.0\r\n\r\n", 200, loader},
		{"iPXE", "GET", "GET " + mac + "/snponly.efi HTTP/1.1\r\n" + ipxe + "\r\n", 200, loader},
		{"iPXE, a part of a drive", "GET", "GET " + mac + "/snponly.efi HTTP/1.1\r\n" + ipxe + "Range: bytes=4-9\r\n\r\n", 206, "loader"},
		{"a loader whose range ends before it begins", "GET", "GET " + mac + "/snponly.efi HTTP/1.1\r\n" + ipxe + "Range: bytes=9-4\r\n\r\n", 416, ""},
		{"a loader whose range ends where no number goes", "GET", "GET " + mac + "/snponly.efi HTTP/1.1\r\n" + ipxe + "Range: bytes=0-4294967296000000000000\r\n\r\n", 206, loader},
		{"iPXE of 1.21.1 on asks for autoexec.ipxe beside its file", "GET", "GET " + mac + "/autoexec.ipxe HTTP/1.1\r\n" + ipxe + "\r\n", 404, ""},
		{"a Raspberry Pi 4 asks for its signature", "GET", "GET //boot.sig HTTP/1.1\r\nHost: 10.0.0.1\r\n\r\n", 404, ""},
	} {
		r := newRig(t)
		conn, err := net.Dial("tcp4", wired(t, r).String())
		if err != nil {
			t.Fatal(err)
		}
		resp, body := say(t, conn, bufio.NewReader(conn), tt.text, tt.method)
		conn.Close()
		if resp.StatusCode != tt.code || resp.Header.Get("Location") != "" || tt.code < 300 && string(body) != tt.want {
			t.Errorf("%s: %d %q, Location %q, want %d %q", tt.name, resp.StatusCode, body, resp.Header.Get("Location"), tt.code, tt.want)
		}
		if tt.method == "HEAD" && resp.ContentLength != int64(len(loader)) {
			t.Errorf("%s: Content-Length %d, want %d", tt.name, resp.ContentLength, len(loader))
		}
		if stages := strings.Join(r.stages, ","); tt.code == 404 && stages != "" {
			t.Errorf("%s: counts as %s", tt.name, stages)
		}
	}
}

// TestOneConnection: EDK2 asks for the size and then for the file on one
// connection, and does not close it before it has both.
func TestOneConnection(t *testing.T) {
	conn, err := net.Dial("tcp4", wired(t, newRig(t)).String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	in := bufio.NewReader(conn)
	const rest = " /boot/52-54-00-00-00-0a/snponly.efi HTTP/1.1\r\nHost: 10.0.0.1\r\nAccept: */*\r\nUser-Agent: UefiHttpBoot/1.0\r\n\r\n"
	if resp, _ := say(t, conn, in, "HEAD"+rest, "HEAD"); resp.StatusCode != 200 || resp.ContentLength != 10 || resp.Close {
		t.Errorf("HEAD = %d, length %d, close %v, want 200, 10 and a connection that stays", resp.StatusCode, resp.ContentLength, resp.Close)
	}
	if resp, body := say(t, conn, in, "GET"+rest, "GET"); resp.StatusCode != 200 || string(body) != "the loader" || resp.Close {
		t.Errorf("GET on the same connection = %d %q", resp.StatusCode, body)
	}
}

// TestScriptNamesTheAddressUsed: behind a relay or a router that translates
// addresses, the box's own address leads nowhere.
func TestScriptNamesTheAddressUsed(t *testing.T) {
	for _, host := range []string{"192.0.2.80", "192.0.2.80:8080", "10.0.0.1"} {
		r := newRig(t)
		conn, err := net.Dial("tcp4", wired(t, r).String())
		if err != nil {
			t.Fatal(err)
		}
		_, body := say(t, conn, bufio.NewReader(conn), fmt.Sprintf("GET /boot/52-54-00-00-00-0a/script.ipxe HTTP/1.1\r\nHost: %s\r\nUser-Agent: iPXE/1.21.1\r\n\r\n", host), "GET")
		conn.Close()
		urls := 0
		for _, word := range bytes.Fields(body) {
			if bytes.HasPrefix(word, []byte("http://")) {
				if urls++; !bytes.HasPrefix(word, []byte("http://"+host+"/boot/")) {
					t.Errorf("asked at %s, the script names %s", host, word)
				}
			}
		}
		if urls != 5 {
			t.Errorf("the script has %d URLs, want 5:\n%s", urls, body)
		}
	}
}

// FuzzRequest: whatever comes over the wire, nothing is redirected, no voucher is
// made for who asks for none, and the server answers the next one.
func FuzzRequest(f *testing.F) {
	for _, text := range []string{
		"GET //boot//52-54-00-00-00-0a//snponly.efi HTTP/1.1\r\nHost: 10.0.0.1\r\n\r\n",
		"HEAD /boot/52:54:00:00:00:0A/script.ipxe HTTP/1.0\r\n\r\n",
		"GET /artifacts/" + digest + " HTTP/1.1\r\nHost: x\r\nRange: bytes=4294967296-\r\n\r\n",
		"POST /boot/52-54-00-00-00-0a/abc/progress HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf done",
		"GET http://10.0.0.1/boot/%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: 10.0.0.1:x\r\n\r\n",
		"POST /boot/a/b/done HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffff\r\n",
	} {
		f.Add([]byte(text))
	}
	r := newRig(f)
	f.Fuzz(func(t *testing.T, raw []byte) {
		req, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(raw)))
		if err != nil {
			return
		}
		req.RemoteAddr = addrA + ":1024"
		w := httptest.NewRecorder()
		r.h.ServeHTTP(w, req)
		if w.Code >= 300 && w.Code < 400 || w.Header().Get("Location") != "" || r.minted != 0 {
			t.Errorf("%q = %d, Location %q, minted %d", raw, w.Code, w.Header().Get("Location"), r.minted)
		}
		if strings.HasPrefix(w.Body.String(), "#!ipxe") {
			checkScript(t, raw, w.Body.String())
		}
	})
}

// checkScript: a script that a request was answered with has the lines that the
// package of scripts writes, and no others, whatever the request named as the host.
func checkScript(t *testing.T, raw []byte, text string) {
	t.Helper()
	around := script.Around{AgainBefore: "http://h/boot/", AgainAfter: "/" + scriptName}
	want, err := script.Ramdisk{Around: around, Kernel: "http://h/k", Initrd: "http://h/i", Boot: "http://h/b", Cmdline: "console=ttyS0"}.Script()
	if err != nil {
		t.Fatal(err)
	}
	if strings.Count(text, "\n") != strings.Count(want, "\n") || strings.Count(text, "$") != strings.Count(want, "$") {
		t.Errorf("%q is answered with the script\n%s", raw, text)
	}
}
