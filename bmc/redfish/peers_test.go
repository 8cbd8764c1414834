package redfish

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// peer starts a Redfish service by others with a certificate of ours, and is a
// bench with it. command gets the address's host and port, and the certificate's
// and the key's file.
func peer(t *testing.T, dir string, command func(host, port, cert, key string) []string) *bench {
	t.Helper()
	s := httptest.NewTLSServer(http.NotFoundHandler())
	shown := s.TLS.Certificates[0]
	s.Close()
	key, err := x509.MarshalPKCS8PrivateKey(shown.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(shown.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	files := t.TempDir()
	certFile, keyFile := filepath.Join(files, "cert.pem"), filepath.Join(files, "key.pem")
	for name, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: leaf.Raw}, keyFile: {Type: "PRIVATE KEY", Bytes: key}} {
		if err := os.WriteFile(name, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	probe, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := probe.Addr().String()
	_ = probe.Close()
	host, port, _ := net.SplitHostPort(address)
	args := command(host, port, certFile, keyFile)
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Dir, cmd.Env = dir, peerEnv(files)
	out, err := os.Create(filepath.Join(files, "output"))
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
		_ = out.Close()
		if text, _ := os.ReadFile(out.Name()); t.Failed() {
			t.Logf("%v: %s", args, text[max(0, len(text)-8192):])
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	roots := x509.NewCertPool()
	roots.AddCert(leaf)
	dialer := &tls.Dialer{Config: &tls.Config{RootCAs: roots, ServerName: "example.com"}}
	for {
		conn, err := dialer.DialContext(ctx, "tcp", address)
		if err == nil {
			_ = conn.Close()
			break
		}
		select {
		case <-ended:
			t.Fatalf("%v ended", args)
		case <-ctx.Done():
			t.Fatalf("%v does not answer: %v", args, err)
		case <-time.After(50 * time.Millisecond):
		}
	}
	sum := sha256.Sum256(leaf.RawSubjectPublicKeyInfo)
	return newBench(t, address, hex.EncodeToString(sum[:]), "admin", "password")
}

func peerEnv(home string) []string {
	return []string{"PATH=" + os.Getenv("PATH"), "HOME=" + home, "TMPDIR=" + home, "PYTHONDONTWRITEBYTECODE=1", "PYTHONPATH=" + os.Getenv("PEERS_PYTHONPATH")}
}

// peerPython is an interpreter that can import module, "" without one.
func peerPython(t *testing.T, module string) string {
	t.Helper()
	for _, name := range []string{"/usr/bin/python3", "python3"} {
		check := exec.CommandContext(t.Context(), name, "-c", "import "+module)
		check.Env = peerEnv(t.TempDir())
		if check.Run() == nil {
			return name
		}
	}
	return ""
}

// TestAgainstSushyTools drives OpenStack's emulator with its fake machine.
func TestAgainstSushyTools(t *testing.T) {
	python := peerPython(t, "sushy_tools.emulator.main")
	if python == "" {
		t.Skip("needs the Python package sushy-tools, or its folder in PEERS_PYTHONPATH")
	}
	b := peer(t, "", func(host, port, cert, key string) []string {
		const run = "import sys; from sushy_tools.emulator.main import main; sys.exit(main())"
		return []string{python, "-c", run, "--fake", "-i", host, "-p", port, "--ssl-certificate", cert, "--ssl-key", key}
	})
	// The fake machine takes seconds for what it is told.
	b.pool.timing.power, b.pool.timing.settle, b.pool.timing.tick = time.Minute, 20*time.Second, 200*time.Millisecond
	for _, tt := range []struct{ action, want string }{
		{"on", "on"}, {"reset", "on"}, {"off", "off"}, {"on", "on"}, {"soft", "off"},
	} {
		if _, err := b.within(2*time.Minute, "power", "setPower", tt.action); err != nil {
			t.Errorf("setPower(%s): %v", tt.action, err)
		}
		if got, err := b.power(); err != nil || got != tt.want {
			t.Errorf("after %s: getPower() = %s, %v, want %s", tt.action, got, err, tt.want)
		}
	}
	// It shows every override as one for every boot, so that once cannot be verified.
	for _, want := range []device{{Device: "pxe", EFI: true}, {Device: "disk", Persistent: true, EFI: true}, {Device: "cdrom", EFI: true}} {
		_, err := b.do("management", "setBootDevice", want)
		if (err == nil) != want.Persistent || err != nil && errs.CodeOf(err) != errs.BmcError {
			t.Errorf("setBootDevice(%v): %v, want success only when it is for every boot", want, err)
		}
		want.Persistent = true
		if got, err := b.bootDevice(); err != nil || got != want {
			t.Errorf("getBootDevice() = %v, %v, want %v", got, err, want)
		}
	}
	raw, err := b.do("inspect", "inspect")
	if err != nil || len(raw) < 10 {
		t.Errorf("inspect() = %s, %v", raw, err)
	}
	t.Logf("inspect: %s", raw)
}

// TestAgainstMockupServer reads DMTF's mockup of a rack-mounted server.
func TestAgainstMockupServer(t *testing.T) {
	dir := os.Getenv("REDFISH_MOCKUP_SERVER")
	python := peerPython(t, "requests")
	if dir == "" || python == "" {
		t.Skip("needs the folder of DMTF's Redfish-Mockup-Server in REDFISH_MOCKUP_SERVER, and Debian's python3-requests")
	}
	b := peer(t, dir, func(host, port, cert, key string) []string {
		return []string{python, "redfishMockupServer.py", "-S", "-D", "public-rackmount1", "-H", host, "-p", port, "-s", "--cert", cert, "--key", key}
	})
	if got, err := b.power(); err != nil || got != "on" {
		t.Errorf("getPower() = %s, %v, want on", got, err)
	}
	want := device{Device: "pxe", EFI: true}
	if _, err := b.do("management", "setBootDevice", want); err != nil {
		t.Errorf("setBootDevice: %v", err)
	}
	if got, err := b.bootDevice(); err != nil || got != want {
		t.Errorf("getBootDevice() = %v, %v, want %v", got, err, want)
	}
	for _, tt := range []struct {
		kind, operation string
		want            []string
	}{
		{"inspect", "inspect", []string{"437XR1138R2", "Contoso"}},
		{"bios", "getSettings", []string{"ProcTurboMode"}},
		{"firmware", "list", nil},
		{"raid", "getLayout", nil},
		{"virtual-media", "status", nil},
	} {
		raw, err := b.do(tt.kind, tt.operation)
		if err != nil || !json.Valid(raw) {
			t.Errorf("%s.%s = %s, %v", tt.kind, tt.operation, raw, err)
		}
		for _, text := range tt.want {
			if !strings.Contains(string(raw), text) {
				t.Errorf("%s.%s = %s, want %s in it", tt.kind, tt.operation, raw, text)
			}
		}
		t.Log(fmt.Sprintf("%s.%s:", tt.kind, tt.operation), string(raw))
	}
}
