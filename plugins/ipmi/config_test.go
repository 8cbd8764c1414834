package ipmi

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
)

func TestParseConfig(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want config
		code errs.Code
	}{
		{`{"address":"10.0.0.5"}`, config{"10.0.0.5", 623, 17}, ""},
		{`{"address":"10.0.0.5:6230","options":{"cipherSuite":3}}`, config{"10.0.0.5", 6230, 3}, ""},
		{`{"address":"10.0.0.5","options":{"cipherSuite":8},"tlsSpkiSha256":""}`, config{"10.0.0.5", 623, 8}, ""},
		{`{"address":"10.0.0.5","options":{"cipherSuite":12}}`, config{"10.0.0.5", 623, 12}, ""},
		{`{"address":"https://bmc-7.example","options":{}}`, config{"bmc-7.example", 623, 17}, ""},
		{`{"address":"10.0.0.5","credentials":"secret://root/bmc"}`, config{"10.0.0.5", 623, 17}, ""},
		{`{"address":"10.0.0.5","options":{"cipherSuite":0}}`, config{}, errs.InvalidConfig},
		{`{"address":"10.0.0.5","options":{"cipherSuite":1}}`, config{}, errs.InvalidConfig},
		{`{"address":"10.0.0.5","options":{"cipherSuite":2}}`, config{}, errs.InvalidConfig},
		{`{"address":"10.0.0.5","options":{"cipherSuite":-1}}`, config{}, errs.InvalidConfig},
		{`{"address":"10.0.0.5","options":{"cipherSuite":"17"}}`, config{}, errs.InvalidConfig},
		{`{"address":"10.0.0.5","options":{"cipherSuite":17.5}}`, config{}, errs.InvalidConfig},
		{`{"address":"10.0.0.5","options":{"CipherSuite":17}}`, config{}, errs.InvalidConfig},
		{`{"address":"10.0.0.5","options":{"cipherSuite":17,"address":"10.0.0.6"}}`, config{}, errs.InvalidConfig},
		{`{"address":"10.0.0.5","options":[]}`, config{}, errs.InvalidConfig},
		{`{"address":"10.0.0.5","user":"x"}`, config{}, errs.InvalidConfig},
		{`{"address":5}`, config{}, errs.InvalidConfig},
		{`{}`, config{}, errs.InvalidConfig},
		{`null`, config{}, errs.InvalidConfig},
		{`[]`, config{}, errs.InvalidConfig},
		{``, config{}, errs.InvalidConfig},
		{`{"address":"10.0.0.5","tlsSpkiSha256":"` + strings.Repeat("a", 64) + `"}`, config{}, errs.PinUnsupported},
		{`{"address":""}`, config{}, errs.InvalidAddress},
		{`{"address":"10.0.0.5/x"}`, config{}, errs.InvalidAddress},
	} {
		got, err := parseConfig(json.RawMessage(tt.in))
		if errs.CodeOf(err) != tt.code || err == nil && got != tt.want {
			t.Errorf("parseConfig(%s) = %+v, %v, want %+v %s", tt.in, got, err, tt.want, tt.code)
		}
	}
}

func TestParseAddress(t *testing.T) {
	for _, tt := range []struct {
		in, host string
		port     int
	}{
		{"bmc", "bmc", 623}, {"bmc.rack-1.example:1", "bmc.rack-1.example", 1}, {"ipmi://10.0.0.5:65535", "10.0.0.5", 65535},
		{"2001:db8::1", "2001:db8::1", 623}, {"[2001:db8::1]:6230", "2001:db8::1", 6230}, {"[::1]", "::1", 623},
		{"", "", 0}, {"-oProxy", "", 0}, {"a b", "", 0}, {"bmc:", "", 0}, {"bmc:0", "", 0}, {"bmc:65536", "", 0}, {"bmc:+1", "", 0},
		{"bmc:x", "", 0}, {"bmc/", "", 0}, {"user@bmc", "", 0}, {"bmc;reboot", "", 0}, {"[bmc]:1", "", 0}, {"[::1", "", 0},
		{"[::1]x", "", 0}, {"[10.0.0.5]", "", 0}, {"fe80::1%eth0", "", 0}, {"://bmc", "", 0}, {"bmc..example", "", 0},
		{"bmc\n", "", 0}, {strings.Repeat("a.", 130) + "a", "", 0},
	} {
		host, port, err := parseAddress(tt.in)
		if (err == nil) != (tt.host != "") || err == nil && (host != tt.host || port != tt.port) {
			t.Errorf("parseAddress(%q) = %q, %d, %v, want %q, %d", tt.in, host, port, err, tt.host, tt.port)
		}
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add(`{"address":"10.0.0.5:623","options":{"cipherSuite":3}}`)
	f.Add(`{"address":"ipmi://[::1]:1"}`)
	f.Add(`{"address":"x","options":null}`)
	f.Fuzz(func(t *testing.T, in string) {
		c, err := parseConfig(json.RawMessage(in))
		if err != nil {
			return
		}
		if c.host == "" || c.host[0] == '-' || strings.ContainsAny(c.host, " \t\n\x00/@;%") || c.port < 1 || c.port > 65535 || c.suite < 3 {
			t.Errorf("parseConfig(%q) = %+v", in, c)
		}
	})
}

func TestReadCredentials(t *testing.T) {
	for _, tt := range []struct {
		user, password string
		ok             bool
	}{
		{"ADMIN", "secret", true}, {"a.b_c@d-e", "twenty-bytes-pass-ok", true}, {strings.Repeat("u", 64), "x", true},
		{"", "secret", false}, {"a b", "secret", false}, {"a;b", "secret", false}, {strings.Repeat("u", 65), "secret", false},
		{"ADMIN\n", "secret", false}, {"ADMIN", "", false}, {"ADMIN", "twenty-one-bytes-pass", false},
		{"ADMIN", "two words", false}, {"ADMIN", "tab\tbed", false}, {"ADMIN", "new\nline", false}, {"ADMIN", "no\u00a0break", false}, {"ADMIN", "nul\x00", false}, {"ADMIN", "\x01control", false}, {"ADMIN", "del\x7f", false}, {"ADMIN", "esc\x1b[2J", false},
	} {
		ctx, _ := drivertest.Context(t, context.Background(), map[string]string{"username": tt.user, "password": tt.password})
		_, err := readCredentials(ctx)
		if (err == nil) != tt.ok || err != nil && errs.CodeOf(err) != errs.CredentialsUnavailable {
			t.Errorf("readCredentials(%q, %q): %v, want ok %v", tt.user, tt.password, err, tt.ok)
		}
		if err != nil && len(tt.password) > 5 && strings.Contains(err.Error(), tt.password) {
			t.Errorf("the error of %q shows the password", tt.user)
		}
	}
	for _, missing := range []map[string]string{{"username": "ADMIN"}, {"password": "secret"}, nil} {
		ctx, _ := drivertest.Context(t, context.Background(), missing)
		if _, err := readCredentials(ctx); errs.CodeOf(err) != errs.CredentialsUnavailable {
			t.Errorf("readCredentials of %v: %v, want credentials-unavailable", missing, err)
		}
	}
}

// The published schema and the parser agree on what is structure.
func TestSchemaAgrees(t *testing.T) {
	doc, err := jsonschema.UnmarshalJSON(strings.NewReader(schema))
	if err != nil {
		t.Fatal(err)
	}
	compiler := jsonschema.NewCompiler()
	if err := compiler.AddResource("config.json", doc); err != nil {
		t.Fatal(err)
	}
	compiled, err := compiler.Compile("config.json")
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		in string
		ok bool
	}{
		{`{"address":"10.0.0.5"}`, true}, {`{"address":"10.0.0.5","credentials":"secret://root/bmc","options":{"cipherSuite":12}}`, true},
		{`{"address":"10.0.0.5","tlsSpkiSha256":""}`, true}, {`{"address":"10.0.0.5","tlsSpkiSha256":"ab"}`, false},
		{`{"address":"10.0.0.5","options":{"cipherSuite":0}}`, false}, {`{"address":"10.0.0.5","options":{"x":1}}`, false},
		{`{"address":"10.0.0.5","x":1}`, false}, {`{"address":""}`, false}, {`{}`, false}, {`[]`, false},
	} {
		value, err := jsonschema.UnmarshalJSON(strings.NewReader(tt.in))
		if err != nil {
			t.Fatal(err)
		}
		_, perr := parseConfig(json.RawMessage(tt.in))
		if serr := compiled.Validate(value); (serr == nil) != tt.ok || (perr == nil) != tt.ok {
			t.Errorf("%s: schema %v, parser %v, want ok %v", tt.in, serr, perr, tt.ok)
		}
	}
}
