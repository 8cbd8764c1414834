package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/bmc/bmctest"
)

func probeRun(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out, notes bytes.Buffer
	err := dispatch(t.Context(), "better-compute", commands(), append([]string{"bmc", "probe"}, args...), stdio{strings.NewReader(""), &out, &notes})
	return out.String(), err
}

// What the probe prints as the command to enrol is one that this program takes.
func TestBMCProbe(t *testing.T) {
	web, err := bmctest.StartRedfish(t.Context(), "127.0.0.1:0", "u", "p", bmctest.NewFake())
	if err != nil {
		t.Fatal(err)
	}
	defer web.Close()
	lan, err := bmctest.StartIPMI(t.Context(), "127.0.0.1:0", "u", "p", bmctest.NewFake())
	if err != nil {
		t.Fatal(err)
	}
	defer lan.Close()
	_, ipmiPort, _ := strings.Cut(lan.Addr(), ":")
	out, err := probeRun(t, web.Addr(), "--ipmi-port", ipmiPort)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{web.SPKI(), "2.0 (RMCP+)", "3 17", "trusted here       no", "TLS 1.3"} {
		if !strings.Contains(out, want) {
			t.Errorf("the probe's output lacks %q:\n%s", want, out)
		}
	}
	var enrol string
	for line := range strings.Lines(out) {
		if rest, ok := strings.CutPrefix(strings.TrimSpace(line), "better-compute "); ok {
			enrol = strings.ReplaceAll(rest, "'", "")
		}
	}
	args := append(strings.Fields(enrol), "--client", filepath.Join(t.TempDir(), "none.toml"))
	var sink bytes.Buffer
	if err := dispatch(t.Context(), "better-compute", commands(), args, stdio{strings.NewReader(""), &sink, &sink}); err == nil || !strings.Contains(err.Error(), "read client settings") {
		t.Errorf("better-compute %s = %v, want it to look for its settings", enrol, err)
	}

	out, err = probeRun(t, "--json", web.Addr(), "--ipmi-port", ipmiPort)
	var got struct {
		TLS struct {
			Pin string `json:"spki_sha256"`
		}
		Enroll string
	}
	if json.Unmarshal([]byte(out), &got) != nil || err != nil || got.TLS.Pin != web.SPKI() || !strings.Contains(got.Enroll, got.TLS.Pin) {
		t.Errorf("bmc probe --json printed %s, %v", out, err)
	}
}

func TestBMCProbeIsTerminalSafe(t *testing.T) {
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"Vendor":"A\u001b]0;owned\u0007\u009b2J\nrm","RedfishVersion":"1.0\r\n"}`)
	}))
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	defer s.Close()
	for _, args := range [][]string{{}, {"--json"}} {
		out, err := probeRun(t, append(args, s.Listener.Addr().String(), "--ipmi-port", "1")...)
		if err != nil || !strings.Contains(out, "owned") {
			t.Errorf("bmc probe %v = %q, %v", args, out, err)
		}
		if i := strings.IndexFunc(out, func(r rune) bool { return r < ' ' && r != '\n' || r >= 0x7f && r < 0xa0 }); i >= 0 {
			t.Errorf("bmc probe %v prints %q", args, out[i:])
		}
	}
	if out, err := probeRun(t, "127.0.0.1:1", "--ipmi-port", "1"); err == nil || !strings.Contains(err.Error(), "answers neither") {
		t.Errorf("nobody there: %q, %v, want an error", out, err)
	}
	for _, args := range [][]string{{}, {"a", "b"}, {"127.0.0.1", "--ipmi-port", "0"}, {"http://127.0.0.1"}} {
		if _, err := probeRun(t, args...); err == nil {
			t.Errorf("bmc probe %v succeeded", args)
		}
	}
}
