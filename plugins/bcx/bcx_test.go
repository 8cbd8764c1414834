package bcx

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1/driverv1connect"
)

func identity(t testing.TB) *Identity {
	t.Helper()
	id, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestHandshakeRoundTrip(t *testing.T) {
	want := Handshake{Socket: "/run/bcx/p1/plugin.sock", Certificate: identity(t).DER()}
	line, err := want.Line()
	if err != nil || !strings.HasPrefix(line, "bcx|1|unix|/run/bcx/p1/plugin.sock|grpc|") || !strings.HasSuffix(line, "\n") {
		t.Fatalf("Line() = %q, %v", line, err)
	}
	got, err := ParseHandshake([]byte(line), "/run/bcx/p1")
	if err != nil || got.Socket != want.Socket || !bytes.Equal(got.Certificate, want.Certificate) {
		t.Errorf("ParseHandshake = %+v, %v, want %+v", got, err, want)
	}
}

func TestParseHandshakeRefuses(t *testing.T) {
	cert := base64.RawStdEncoding.EncodeToString(identity(t).DER())
	good := "bcx|1|unix|/d/plugin.sock|grpc|" + cert
	if _, err := ParseHandshake([]byte(good), "/d"); err != nil {
		t.Fatalf("the good line is refused: %v", err)
	}
	for _, tt := range []struct{ name, line string }{
		{"empty", ""},
		{"another program", "listening on :80"},
		{"protocol 2", strings.Replace(good, "|1|", "|2|", 1)},
		{"tcp", strings.Replace(good, "unix", "tcp", 1)},
		{"netrpc", strings.Replace(good, "grpc", "netrpc", 1)},
		{"five fields", good[:strings.LastIndex(good, "|")]},
		{"seven fields", good + "|x"},
		{"another folder", strings.Replace(good, "/d/", "/e/", 1)},
		{"a deeper folder", strings.Replace(good, "/d/", "/d/e/", 1)},
		{"a detour", strings.Replace(good, "/d/", "/d/../d/", 1)},
		{"a relative path", strings.Replace(good, "/d/", "d/", 1)},
		{"a long path", strings.Replace(good, "plugin.sock", strings.Repeat("s", 120), 1)},
		{"padded base64", good + "="},
		{"no certificate", "bcx|1|unix|/d/plugin.sock|grpc|"},
		{"bytes after the certificate", "bcx|1|unix|/d/plugin.sock|grpc|" + base64.RawStdEncoding.EncodeToString(append(identity(t).DER(), 0))},
		{"too long", good + strings.Repeat("A", MaxHandshake)},
	} {
		if h, err := ParseHandshake([]byte(tt.line), "/d"); err == nil {
			t.Errorf("%s: ParseHandshake = %+v, want an error", tt.name, h)
		}
	}
}

func FuzzParseHandshake(f *testing.F) {
	line, err := Handshake{Socket: "/d/plugin.sock", Certificate: identity(f).DER()}.Line()
	if err != nil {
		f.Fatal(err)
	}
	f.Add([]byte(line))
	f.Add([]byte("bcx|1|unix|/d/plugin.sock|grpc|AAAA"))
	f.Add([]byte("bcx|1||||\n"))
	f.Fuzz(func(t *testing.T, line []byte) {
		h, err := ParseHandshake(line, "/d")
		if err != nil {
			return
		}
		if filepath.Dir(h.Socket) != "/d" || len(h.Socket) > MaxSocketPath {
			t.Errorf("ParseHandshake(%q) accepts socket %q", line, h.Socket)
		}
		again, err := h.Line()
		if err != nil || strings.TrimSuffix(again, "\n") != strings.TrimSuffix(string(line), "\n") {
			t.Errorf("ParseHandshake(%q).Line() = %q, %v", line, again, err)
		}
	})
}

func TestIdentityIgnoresClocks(t *testing.T) {
	cert, err := x509.ParseCertificate(identity(t).DER())
	if err != nil {
		t.Fatal(err)
	}
	if cert.NotBefore.Year() != 1970 || cert.NotAfter.Year() != 9999 {
		t.Errorf("valid %v to %v, want 1970 to 9999", cert.NotBefore, cert.NotAfter)
	}
}

type describer struct {
	driverv1connect.UnimplementedDriverPluginHandler
}

func (describer) Describe(context.Context, *connect.Request[driverv1.DescribeRequest]) (*connect.Response[driverv1.DescribeResponse], error) {
	return connect.NewResponse(&driverv1.DescribeResponse{Protocol: Protocol}), nil
}

// serving starts a plugin for the host whose certificate is given.
func serving(t *testing.T, clientPEM string) (Handshake, func() error) {
	t.Helper()
	return servingImpl(t, describer{}, clientPEM)
}

func servingImpl(t *testing.T, impl driverv1connect.DriverPluginHandler, clientPEM string) (Handshake, func() error) {
	t.Helper()
	dir, err := os.MkdirTemp("", "bcx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	ctx, cancel := context.WithCancel(context.Background())
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := serve(ctx, impl, w, dir, clientPEM)
		w.CloseWithError(io.EOF)
		done <- err
	}()
	stop := func() error {
		cancel()
		return <-done
	}
	buf := make([]byte, MaxHandshake)
	n, err := r.Read(buf)
	if err != nil {
		t.Fatalf("no handshake line: %v, %v", err, stop())
	}
	h, err := ParseHandshake(buf[:n], dir)
	if err != nil {
		t.Fatal(err)
	}
	return h, stop
}

// reissued is another certificate over the same key.
func reissued(t *testing.T, id *Identity) *Identity {
	t.Helper()
	cert, err := x509.ParseCertificate(id.DER())
	if err != nil {
		t.Fatal(err)
	}
	cert.SerialNumber = big.NewInt(7)
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, cert.PublicKey, id.cert.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	return &Identity{tls.Certificate{Certificate: [][]byte{der}, PrivateKey: id.cert.PrivateKey}}
}

func TestMutualTLS(t *testing.T) {
	host := identity(t)
	h, stop := serving(t, host.PEM())
	for _, tt := range []struct {
		name string
		self *Identity
		peer []byte
		ok   bool
	}{
		{"both right", host, h.Certificate, true},
		{"another client certificate", identity(t), h.Certificate, false},
		{"another certificate of the host's key", reissued(t, host), h.Certificate, false},
		{"no client certificate", &Identity{}, h.Certificate, false},
		{"another plugin certificate", host, identity(t).DER(), false},
	} {
		c := Dial(tt.self, Handshake{Socket: h.Socket, Certificate: tt.peer})
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		_, err := c.Describe(ctx, connect.NewRequest(&driverv1.DescribeRequest{}))
		cancel()
		c.Close()
		if (err == nil) != tt.ok {
			t.Errorf("%s: Describe: %v, want ok %v", tt.name, err, tt.ok)
		}
	}
	if err := stop(); err != nil {
		t.Errorf("serve: %v", err)
	}
}

func TestServeRefuses(t *testing.T) {
	t.Setenv(CookieVariable, "")
	if err := Serve(context.Background(), describer{}, io.Discard); !errors.Is(err, ErrNotStartedByHost) {
		t.Errorf("Serve without a cookie: %v", err)
	}
	good := identity(t).PEM()
	for name, text := range map[string]string{"none": "", "not PEM": "x", "two": good + good, "no certificate": strings.ReplaceAll(good, "CERTIFICATE", "PRIVATE KEY")} {
		if err := serve(context.Background(), describer{}, io.Discard, t.TempDir(), text); err == nil {
			t.Errorf("%s: serve succeeded", name)
		}
	}
	long := filepath.Join(t.TempDir(), strings.Repeat("d", 100))
	if err := serve(context.Background(), describer{}, io.Discard, long, good); err == nil || !strings.Contains(err.Error(), "limit 107") {
		t.Errorf("serve in a long folder: %v, want the limit", err)
	}
}

func TestErrorsOnTheWire(t *testing.T) {
	for _, tt := range []struct {
		in        error
		retrySafe bool
		code      string
		retryable bool
	}{
		{errs.Retry(errs.BmcError, "x"), true, "bmc-error", true},
		{errs.Retry(errs.BmcError, "x"), false, "bmc-error", false},
		{errs.New("fan-stuck", "x"), true, "fan-stuck", false},
		{fmt.Errorf("read: %w", errs.Retry("fan-stuck", "x")), true, "fan-stuck", true},
		{errs.New("Not Kebab", "x"), true, "driver-error", false},
		{errors.New("x"), true, "driver-error", false},
		{context.DeadlineExceeded, true, "timeout", true},
		{context.Canceled, true, "cancelled", false},
	} {
		if got := ErrorOf(tt.in, tt.retrySafe); got.GetCode() != tt.code || got.GetRetryable() != tt.retryable {
			t.Errorf("ErrorOf(%v, %v) = %v, want %s %v", tt.in, tt.retrySafe, got, tt.code, tt.retryable)
		}
	}
}

// TestErrorMessageIsText: what a tool printed can be no UTF-8 at all.
func TestErrorMessageIsText(t *testing.T) {
	for in, want := range map[string]string{"fan \xff stuck": "fan \uFFFD stuck", "läuft nicht": "läuft nicht"} {
		got := ErrorOf(errs.New("fan-stuck", "%s", in), false)
		if _, err := proto.Marshal(got); err != nil || got.GetMessage() != want {
			t.Errorf("ErrorOf(%q) = %q, %v, want %q", in, got.GetMessage(), err, want)
		}
	}
}

// TestSocketPathLimit: 107 bytes are a unix socket's, and no more.
func TestSocketPathLimit(t *testing.T) {
	for n, ok := range map[int]bool{MaxSocketPath - 1: true, MaxSocketPath: true, MaxSocketPath + 1: false} {
		path := "/" + strings.Repeat("s", n-1)
		err := CheckSocketPath(path)
		if (err == nil) != ok || err != nil && (!strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "limit 107")) {
			t.Errorf("CheckSocketPath of %d bytes = %v, want ok %v", n, err, ok)
		}
	}
}
