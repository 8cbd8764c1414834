package peer

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1/driverv1connect"
)

// wireBytes answers every call with the same bytes, as the body of a response
// that ends with a status.
type wireBytes struct {
	body   []byte
	status string
}

func (w wireBytes) Do(r *http.Request) (*http.Response, error) {
	go func() {
		_, _ = io.Copy(io.Discard, r.Body)
		r.Body.Close()
	}()
	h := http.Header{"Content-Type": {"application/grpc"}}
	trailer := http.Header{}
	if w.status != "" {
		trailer.Set("Grpc-Status", w.status)
	}
	return &http.Response{
		Status: "200 OK", StatusCode: http.StatusOK, Proto: "HTTP/2.0", ProtoMajor: 2, Header: h, Trailer: trailer,
		Body: io.NopCloser(bytes.NewReader(w.body)), ContentLength: -1, Request: r,
	}, nil
}

// answering is a peer whose plugin answers with these bytes only.
func answering(w wireBytes) *Peer {
	client := driverv1connect.NewDriverPluginClient(w, "http://plugin", connect.WithGRPC(), connect.WithReadMaxBytes(bcx.MaxMessage))
	return &Peer{client: client, o: Options{Name: "acme", Redact: NewRedactor(), MaxResultBytes: 1 << 16}}
}

// framed is messages as gRPC carries them.
func framed(messages ...proto.Message) []byte {
	var out []byte
	for _, m := range messages {
		b, err := proto.Marshal(m)
		if err != nil {
			panic(err)
		}
		out = append(out, 0)
		out = binary.BigEndian.AppendUint32(out, uint32(len(b)))
		out = append(out, b...)
	}
	return out
}

// coded refuses an error without a code of the wire's form.
func coded(t *testing.T, err error) {
	t.Helper()
	e := new(errs.Error)
	if err != nil && (!errors.As(err, &e) || e.Code == "" || !utf8.ValidString(e.Message)) {
		t.Errorf("error without a code, or no text: %v", err)
	}
	if err != nil && len(e.Message) > maxText+1024 {
		t.Errorf("message of %d bytes", len(e.Message))
	}
}

func FuzzInvokeResponses(f *testing.F) {
	f.Add(framed(progress("a", "b", 1, 2), result("1")), "0")
	f.Add(framed(failure("fan-stuck", "oh", true), result("1")), "0")
	f.Add(framed(&driverv1.InvokeResponse{}), "")
	f.Add([]byte{0, 0xff, 0xff, 0xff, 0xff}, "0")
	f.Add([]byte{1, 0, 0, 0, 1, 0}, "1")
	f.Fuzz(func(t *testing.T, body []byte, status string) {
		p := answering(wireBytes{body, status})
		c := fan
		c.Secrets = map[string]secret.Value{"password": secret.New([]byte("hunter2"))}
		c.Progress = func(phase, message string, _, _ uint64) {
			if strings.Contains(phase+" "+message, "hunter2") {
				t.Errorf("progress shows the secret: %q %q", phase, message)
			}
		}
		raw, err := p.Invoke(t.Context(), c)
		if err == nil && len(raw) > 1<<16 || err != nil && raw != nil {
			t.Errorf("Invoke = %d bytes, %v", len(raw), err)
		}
		if errs.CodeOf(err) == errs.Cancelled && !bytes.Contains(body, []byte("cancelled")) && !strings.Contains(status, "1") {
			t.Errorf("nobody cancelled: %v", err)
		}
		coded(t, err)
	})
}

func FuzzStreamResponses(f *testing.F) {
	f.Add(framed(data(""), data("abc"), closing(), data("late")), "0")
	f.Add(framed(data(""), broken("fan-stuck")), "0")
	f.Add(framed(data("x")), "")
	f.Add(framed(closing()), "0")
	f.Fuzz(func(t *testing.T, body []byte, status string) {
		p := answering(wireBytes{body, status})
		s, err := p.Stream(t.Context(), fan)
		coded(t, err)
		if err != nil {
			return
		}
		_, err = io.Copy(io.Discard, s)
		coded(t, err)
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
}

func FuzzDescribeResponse(f *testing.F) {
	f.Add(framed(acme()), "0")
	two := acme()
	two.Drivers = append(two.Drivers, two.Drivers[0])
	f.Add(framed(two), "0")
	f.Add(framed(&driverv1.DescribeResponse{Protocol: 2}), "0")
	f.Fuzz(func(t *testing.T, body []byte, status string) {
		w := wireBytes{body, status}
		p, err := New(t.Context(), answering(w).client, nil, Options{Name: "acme"})
		if err != nil {
			return
		}
		seen := map[string]bool{}
		for _, m := range p.Manifests() {
			if err := m.Check(); err != nil || seen[m.ID] {
				t.Errorf("manifest %+v: %v, twice %v", m, err, seen[m.ID])
			}
			seen[m.ID] = true
		}
		if len(seen) == 0 || len(p.PluginVersion()) > 64 {
			t.Errorf("%d drivers, version %q", len(seen), p.PluginVersion())
		}
	})
}

func FuzzHealthAndValidateResponse(f *testing.F) {
	f.Add(framed(&driverv1.HealthResponse{Status: driverv1.HealthResponse_STATUS_SERVING, Message: "a"}), "0")
	f.Add(framed(&driverv1.ValidateResponse{Error: &driverv1.Error{Code: "invalid-config", Message: "no"}}), "0")
	f.Add(framed(&driverv1.ValidateResponse{}), "")
	f.Fuzz(func(t *testing.T, body []byte, status string) {
		p := answering(wireBytes{body, status})
		serving, message, err := p.Health(t.Context())
		coded(t, err)
		if err != nil && serving || !utf8.ValidString(message) {
			t.Errorf("Health = %v, %q, %v", serving, message, err)
		}
		coded(t, p.Validate(t.Context(), "acme", json.RawMessage("{}"), nil, time.Time{}))
	})
}

// FuzzOutput: whatever a plugin prints, each logged line is bounded, and the
// first is a handshake or refused.
func FuzzOutput(f *testing.F) {
	id, err := bcx.NewIdentity()
	if err != nil {
		f.Fatal(err)
	}
	line, err := bcx.Handshake{Socket: "/run/bcx/p/plugin.sock", Certificate: id.DER()}.Line()
	if err != nil {
		f.Fatal(err)
	}
	f.Add([]byte(line+"a stray print\n"), []byte("log\n"))
	f.Add([]byte(""), []byte(strings.Repeat("x", maxLine+margin+1)))
	f.Add([]byte("bcx|2|\n"), []byte("\xff\n\n"))
	f.Fuzz(func(t *testing.T, stdout, stderr []byte) {
		o := Watch(bytes.NewReader(stdout), bytes.NewReader(stderr), slog.New(slog.DiscardHandler), nil)
		h, err := o.Handshake(context.Background(), "/run/bcx/p")
		o.Wait()
		if err == nil && (len(h.Certificate) == 0 || !strings.HasPrefix(h.Socket, "/run/bcx/p/")) {
			t.Errorf("Handshake = %+v", h)
		}
		r := bufio.NewReaderSize(bytes.NewReader(stderr), 16)
		for range len(stderr) + 1 {
			text, cut, err := readLine(r, 100)
			if len(text) > 100 || cut && len(text) != 100 || strings.Contains(text, "\n") {
				t.Errorf("readLine = %d bytes, %v", len(text), cut)
			}
			if err != nil {
				return
			}
		}
		t.Error("it never ends")
	})
}

func FuzzRedactor(f *testing.F) {
	f.Add("hunter2", "the password is ", "!")
	f.Add("a\"b\\c<d>", "{\"p\":\"", "\"}")
	f.Add("two\nlines of it", "", "")
	f.Fuzz(func(t *testing.T, value, before, after string) {
		if len(value) < 8 || strings.Contains("[redacted]", value) {
			return
		}
		r := NewRedactor()
		defer r.Add(secret.New([]byte(value)))()
		if got := r.Scrub(before + value + after); strings.Contains(got, value) && !strings.Contains(before+redacted+after, value) && !strings.Contains(value, redacted[:4]) {
			t.Errorf("Scrub(%q) = %q", before+value+after, got)
		}
	})
}
