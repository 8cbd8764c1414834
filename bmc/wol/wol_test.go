package wol

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
)

type sent struct {
	lan    string
	packet string
	at     time.Time
}

// invoke runs one operation with a sender that keeps what it is given.
func invoke(t *testing.T, ctx context.Context, fail error, address, operation, args string) (string, []sent, error) {
	t.Helper()
	var log []sent
	d, err := New(Options{Broadcast: func(_ context.Context, lan string, packet []byte) error {
		log = append(log, sent{lan, hex.EncodeToString(packet), time.Now()})
		return fail
	}})
	if err != nil {
		t.Fatal(err)
	}
	call, _ := drivertest.Context(t, ctx, nil)
	config, err := json.Marshal(map[string]string{"address": address})
	if err != nil {
		t.Fatal(err)
	}
	out, err := d.Invoke(call, "power", operation, config, json.RawMessage(args))
	return string(out), log, err
}

func TestPowerOnSendsMagicPacketsSpaced(t *testing.T) {
	for address, lan := range map[string]string{"52:54:00:AB:CD:EF": "", "52-54-00-ab-cd-ef@lan0": "lan0", "52:54:00:ab:cd:ef@10.1.0.255": "10.1.0.255"} {
		synctest.Test(t, func(t *testing.T) {
			out, log, err := invoke(t, t.Context(), nil, address, "setPower", `"on"`)
			if err != nil || out != "null" {
				t.Fatalf("setPower on of %s = %s, %v", address, out, err)
			}
			want := strings.Repeat("ff", 6) + strings.Repeat("525400abcdef", 16)
			if len(log) < 3 {
				t.Fatalf("%d packets were sent, want several", len(log))
			}
			for i, s := range log {
				if s.packet != want || s.lan != lan {
					t.Errorf("packet %d of %s = %s on LAN %q, want %s on %q", i, address, s.packet, s.lan, want, lan)
				}
				if i > 0 && s.at.Sub(log[i-1].at) < time.Second {
					t.Errorf("packet %d follows after %v, want a second at least", i, s.at.Sub(log[i-1].at))
				}
			}
		})
	}
}

// Whatever is not "on" sends nothing.
func TestOnlyOnIsSupported(t *testing.T) {
	for _, action := range []string{"off", "soft", "cycle", "reset", "nmi"} {
		if _, log, err := invoke(t, t.Context(), nil, "52:54:00:ab:cd:ef", "setPower", `"`+action+`"`); errs.CodeOf(err) != errs.UnsupportedOperation || len(log) != 0 {
			t.Errorf("setPower %s = %v with %d packets, want unsupported-operation and none", action, err, len(log))
		}
	}
	if out, log, err := invoke(t, t.Context(), nil, "52:54:00:ab:cd:ef", "getPower", ""); err != nil || out != `"unknown"` || len(log) != 0 {
		t.Errorf("getPower = %s, %v with %d packets, want unknown", out, err, len(log))
	}
}

func TestAFailureToSendIsTheCalls(t *testing.T) {
	gone := errs.New(errs.InvalidAddress, "there is no LAN lan9")
	if _, log, err := invoke(t, t.Context(), gone, "52:54:00:ab:cd:ef@lan9", "setPower", `"on"`); !errors.Is(err, gone) || len(log) != 1 {
		t.Errorf("setPower = %v after %d packets, want the sender's error after the first", err, len(log))
	}
}

func TestACancelledCallSendsNoMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
		defer cancel()
		_, log, err := invoke(t, ctx, nil, "52:54:00:ab:cd:ef", "setPower", `"on"`)
		if errs.CodeOf(err) != errs.Timeout || len(log) != 2 {
			t.Errorf("setPower = %v after %d packets, want timeout after 2", err, len(log))
		}
	})
}

func TestAddresses(t *testing.T) {
	for _, tt := range []struct {
		in, want string
	}{
		{"52:54:00:AB:CD:EF", "52:54:00:ab:cd:ef"}, {"5254.00ab.cdef@lan0", "52:54:00:ab:cd:ef@lan0"},
		{"52-54-00-ab-cd-ef@10.0.0.255", "52:54:00:ab:cd:ef@10.0.0.255"},
		{"", ""}, {"52:54:00:ab:cd", ""}, {"52:54:00:ab:cd:ef:01:02", ""}, {"01:00:5e:00:00:01", ""}, {"ff:ff:ff:ff:ff:ff", ""},
		{"00:00:00:00:00:00", ""}, {"52:54:00:ab:cd:ef@", ""}, {"52:54:00:ab:cd:ef@a b", ""}, {"52:54:00:ab:cd:ef@lan0@lan1", ""},
		{"52:54:00:ab:cd:ef@sixteen-letters-", ""}, {"10.0.0.5", ""}, {"52:54:00:ab:cd:ef\n", ""},
	} {
		got, err := Normalise(tt.in)
		if got != tt.want || (err == nil) != (tt.want != "") || err != nil && errs.CodeOf(err) != errs.InvalidAddress {
			t.Errorf("Normalise(%q) = %q, %v, want %q", tt.in, got, err, tt.want)
		}
	}
}

func TestConfiguration(t *testing.T) {
	for in, code := range map[string]errs.Code{
		`{"address":"52:54:00:ab:cd:ef"}`:                                 "",
		`{"address":"52:54:00:ab:cd:ef","credentials":"secret://root/x"}`: "",
		`{"address":"52:54:00:ab:cd:ef","tlsSpkiSha256":""}`:              "",
		`{"address":"52:54:00:ab:cd:ef","tlsSpkiSha256":"ab"}`:            errs.PinUnsupported,
		`{"address":"52:54:00:ab:cd:ef","options":{}}`:                    errs.InvalidConfig,
		`{}`: errs.InvalidConfig, `[]`: errs.InvalidConfig, `{"address":"bmc.example"}`: errs.InvalidAddress,
	} {
		if _, err := parseConfig(json.RawMessage(in)); errs.CodeOf(err) != code {
			t.Errorf("parseConfig(%s) = %v, want %q", in, err, code)
		}
	}
}

func TestManifest(t *testing.T) {
	d, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	if m := d.Manifest(); m.ID != "wol" || m.RunsOn != "site" || len(m.Kinds) != 1 || m.Kinds[0] != "power" || !m.IsRetrySafe("power", "setPower") {
		t.Errorf("manifest = %+v", m)
	}
	if err := d.CheckConfig(json.RawMessage(`{"address":"52:54:00:ab:cd:ef"}`)); err != nil {
		t.Errorf("the schema refuses what the driver takes: %v", err)
	}
	var _ *driver.Definition = d
}
