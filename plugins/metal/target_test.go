package metal

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

func TestTargetForms(t *testing.T) {
	pin := strings.Repeat("0A", 32)
	picky := func(raw json.RawMessage) error {
		if string(raw) == `{"x":1}` || string(raw) == "{}" {
			return nil
		}
		return errors.New("no")
	}
	plain, unpinned, optional := TargetForm{}, TargetForm{Unpinned: "there is no TLS"}, TargetForm{Options: picky}
	for _, tt := range []struct {
		form TargetForm
		in   string
		want Target
		err  string
	}{
		{plain, `{"address":"bmc"}`, Target{"bmc", ""}, ""},
		{plain, `{"address":"bmc","credentials":"secret://root/bmc","tlsSpkiSha256":""}`, Target{"bmc", ""}, ""},
		{plain, `{"address":"bmc","tlsSpkiSha256":"` + pin + `"}`, Target{"bmc", strings.ToLower(pin)}, ""},
		{plain, `{"address":""}`, Target{}, ""},
		{plain, `{"address":"bmc","tlsSpkiSha256":"` + pin + `00"}`, Target{}, "invalid-config: tlsSpkiSha256: want a SHA-256 of 64 hex digits"},
		{plain, `{"address":"bmc","tlsSpkiSha256":"` + strings.Repeat("x", 64) + `"}`, Target{}, "invalid-config: tlsSpkiSha256: want a SHA-256 of 64 hex digits"},
		{plain, `{"address":"bmc","options":{}}`, Target{}, `invalid-config: configuration: `},
		{plain, `{"address":"bmc","options":null}`, Target{}, `invalid-config: configuration: `},
		{plain, `{}`, Target{}, "invalid-config: configuration: address is missing"},
		{plain, `{"address":null}`, Target{}, "invalid-config: configuration: address is missing"},
		{plain, `{"address":5}`, Target{}, "invalid-config: configuration: "},
		{plain, `{"Address":"bmc"}`, Target{}, "invalid-config: configuration: "},
		{plain, `null`, Target{}, "invalid-config: configuration: "},
		{plain, ``, Target{}, "invalid-config: configuration: "},
		{unpinned, `{"address":"bmc","tlsSpkiSha256":""}`, Target{"bmc", ""}, ""},
		{unpinned, `{"address":"bmc","tlsSpkiSha256":"` + pin + `"}`, Target{}, "pin-unsupported: there is no TLS"},
		{unpinned, `{"address":"bmc","tlsSpkiSha256":"x"}`, Target{}, "pin-unsupported: there is no TLS"},
		{optional, `{"address":"bmc"}`, Target{"bmc", ""}, ""},
		{optional, `{"address":"bmc","options":null}`, Target{"bmc", ""}, ""},
		{optional, `{"address":"bmc","options":{"x":1}}`, Target{"bmc", ""}, ""},
		{optional, `{"address":"bmc","options":{"x":2}}`, Target{}, "invalid-config: options: no"},
	} {
		got, err := tt.form.Parse(json.RawMessage(tt.in))
		if got != tt.want || (err == nil) != (tt.err == "") || err != nil && !strings.HasPrefix(err.Error(), tt.err) {
			t.Errorf("Parse(%s) with %q = %+v, %v, want %+v, %q", tt.in, tt.form.Unpinned, got, err, tt.want, tt.err)
		}
	}
}

// What is wrong is a fault of the configuration, never one that goes away.
func FuzzTargetForm(f *testing.F) {
	f.Add(`{"address":"bmc","options":{}}`)
	f.Add(`{"address":"bmc","tlsSpkiSha256":"` + strings.Repeat("0a", 32) + `"}`)
	f.Fuzz(func(t *testing.T, in string) {
		got, err := TargetForm{}.Parse(json.RawMessage(in))
		switch {
		case err != nil && errs.CodeOf(err) != errs.InvalidConfig:
			t.Errorf("Parse(%q) = %v, want invalid-config", in, err)
		case err == nil && got.Pin != "" && (len(got.Pin) != 64 || got.Pin != strings.ToLower(got.Pin)):
			t.Errorf("Parse(%q) = %+v", in, got)
		}
	})
}

func TestParseHostPort(t *testing.T) {
	for _, tt := range []struct {
		in, host string
		port     int
	}{
		{"bmc", "bmc", 9}, {"bmc.rack-1.example:1", "bmc.rack-1.example", 1}, {"10.0.0.5:65535", "10.0.0.5", 65535},
		{"2001:DB8::1", "2001:db8::1", 9}, {"[2001:db8::1]:6230", "2001:db8::1", 6230}, {"[::1]", "::1", 9},
		{"", "", 0}, {"-oProxy", "", 0}, {"a b", "", 0}, {"bmc:", "", 0}, {"bmc:0", "", 0}, {"bmc:65536", "", 0}, {"bmc:+1", "", 0},
		{"bmc:x", "", 0}, {"bmc/", "", 0}, {"user@bmc", "", 0}, {"bmc;reboot", "", 0}, {"[bmc]:1", "", 0}, {"[::1", "", 0},
		{"[::1]x", "", 0}, {"[::1]:", "", 0}, {"[10.0.0.5]", "", 0}, {"fe80::1%eth0", "", 0}, {"[fe80::1%eth0]:1", "", 0}, {"https://bmc", "", 0}, {"bmc..example", "", 0},
		{"bmc\n", "", 0}, {strings.Repeat("a.", 130) + "a", "", 0}, {strings.Repeat("a", 64), "", 0},
	} {
		host, port, err := ParseHostPort(tt.in, 9)
		if (err == nil) != (tt.host != "") || host != tt.host || port != tt.port {
			t.Errorf("ParseHostPort(%q, 9) = %q, %d, %v, want %q, %d", tt.in, host, port, err, tt.host, tt.port)
		}
	}
}
