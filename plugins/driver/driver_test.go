package driver_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
)

func TestParseArgs(t *testing.T) {
	for _, tt := range []struct {
		in, want string
		ok       bool
	}{
		{"", "null", true}, {" ", "null", true}, {"[]", "[]", true}, {"null", "[]", true}, {"[1,null,null]", "[1]", true},
		{"[null,1]", "[null,1]", true}, {`{"a":1}`, `[{"a":1}]`, true}, {"false", "[false]", true}, {" [ 1 ] ", "[1]", true},
		{"[", "", false}, {"1 2", "", false}, {"undefined", "", false},
	} {
		got, err := driver.ParseArgs([]byte(tt.in))
		text, _ := json.Marshal(got)
		if (err == nil) != tt.ok || err == nil && string(text) != tt.want || err != nil && errs.CodeOf(err) != errs.InvalidArgs {
			t.Errorf("ParseArgs(%q) = %s, %v, want %s", tt.in, text, err, tt.want)
		}
	}
}

func FuzzParseArgs(f *testing.F) {
	f.Add([]byte(`["a",{"b":1},null]`))
	f.Add([]byte(`[[[]]]`))
	f.Fuzz(func(t *testing.T, in []byte) {
		args, err := driver.ParseArgs(in)
		for _, a := range args {
			if err != nil || !json.Valid(a) {
				t.Errorf("ParseArgs(%q) = %q, %v", in, args, err)
			}
		}
	})
}

func TestStrictJSON(t *testing.T) {
	for in, ok := range map[string]bool{
		`{"a":1}`: true, `{}`: true, `{"A":1}`: false, `{"b":1}`: false, `{"a":"x"}`: false,
		`{"a":1}{}`: false, `{"a":1} x`: false, `[]`: false, `null`: false, ``: false,
	} {
		var v struct {
			A int `json:"a"`
		}
		if err := driver.StrictJSON([]byte(in), &v, "a"); (err == nil) != ok {
			t.Errorf("StrictJSON(%s) = %v, want ok %v", in, err, ok)
		}
	}
}

func TestCompareVersions(t *testing.T) {
	for _, tt := range []struct {
		a, b string
		want int
	}{
		{"1.0.0", "1.0.0", 0}, {"1.9.0", "1.10.0", -1}, {"v2", "1.99", 1}, {"1.0.0-rc1", "1.0.0", -1},
		{"1.0.0-rc.2", "1.0.0-rc.10", -1}, {"1.0.0+a", "1.0.0+b", 0}, {"1.0", "1.0.0", -1}, {"dev", "1", 1},
	} {
		if got := driver.CompareVersions(tt.a, tt.b); got != tt.want {
			t.Errorf("CompareVersions(%s, %s) = %d, want %d", tt.a, tt.b, got, tt.want)
		}
		if got := driver.CompareVersions(tt.b, tt.a); got != -tt.want {
			t.Errorf("CompareVersions(%s, %s) = %d, want %d", tt.b, tt.a, got, -tt.want)
		}
	}
}

func TestManifestCheck(t *testing.T) {
	good := func() driver.Manifest {
		return driver.Manifest{ID: "acme-bmc", Version: "1.0.0", Kinds: []string{"power"}, RunsOn: "site", RetrySafe: []string{"power.getPower"}}
	}
	for name, tt := range map[string]struct {
		change func(*driver.Manifest)
		ok     bool
	}{
		"good":             {func(*driver.Manifest) {}, true},
		"id":               {func(m *driver.Manifest) { m.ID = "Acme" }, false},
		"long id":          {func(m *driver.Manifest) { m.ID = strings.Repeat("a", 64) }, false},
		"no version":       {func(m *driver.Manifest) { m.Version = "" }, false},
		"no kind":          {func(m *driver.Manifest) { m.Kinds = nil }, false},
		"kind":             {func(m *driver.Manifest) { m.Kinds = []string{"power", "a.b"} }, false},
		"kind twice":       {func(m *driver.Manifest) { m.Kinds = []string{"power", "power"} }, false},
		"runsOn":           {func(m *driver.Manifest) { m.RunsOn = "moon" }, false},
		"operation":        {func(m *driver.Manifest) { m.RetrySafe = []string{"power"} }, false},
		"operation's kind": {func(m *driver.Manifest) { m.RetrySafe = []string{"bios.get"} }, false},
		"schema":           {func(m *driver.Manifest) { m.ConfigSchema = json.RawMessage("{") }, false},
	} {
		m := good()
		tt.change(&m)
		if err := m.Check(); (err == nil) != tt.ok {
			t.Errorf("%s: Check() = %v, want ok %v", name, err, tt.ok)
		}
	}
}

type fan struct{ speed int }

type light interface {
	Light(*driver.Context) (string, error)
}

func (f *fan) get(*driver.Context) (int, error) { return f.speed, nil }

func kind() driver.Kind[*fan] {
	return driver.Kind[*fan]{Name: "fan", Operations: map[string]driver.Operation[*fan]{
		"get": driver.Get((*fan).get),
		"set": driver.Set(func(raw json.RawMessage) (n int, err error) {
			if json.Unmarshal(raw, &n) != nil {
				err = errs.New(errs.InvalidArgs, "want a number")
			}
			return n, err
		}, func(f *fan, _ *driver.Context, n int) error {
			if n > 100 {
				return errs.New("fan-broken", "too fast")
			}
			return nil
		}),
		"light": driver.Optional[*fan](driver.Get(light.Light)),
	}}
}

func spec() driver.Spec[int] {
	return driver.Spec[int]{ID: "acme", Version: "1.0.0", RunsOn: "site", RetrySafe: []string{"fan.get"},
		Parse: func(raw json.RawMessage) (n int, err error) {
			if json.Unmarshal(raw, &n) != nil {
				err = errors.New("want a number")
			}
			return n, err
		}}
}

func TestDefine(t *testing.T) {
	part := driver.Implement(kind(), func(n int, _ *driver.Context) (*fan, error) { return &fan{n}, nil })
	d, err := driver.Define(spec(), part)
	if err != nil {
		t.Fatal(err)
	}
	ctx, _ := drivertest.Context(t, context.Background(), nil)
	for _, tt := range []struct {
		kind, operation, config, args, want string
		code                                errs.Code
	}{
		{"fan", "get", "7", "", "7", ""},
		{"fan", "set", "7", "[50]", "null", ""},
		{"fan", "set", "7", "101", "", "fan-broken"},
		{"fan", "set", "7", `"x"`, "", errs.InvalidArgs},
		{"fan", "set", "7", "[1,2]", "", errs.InvalidArgs},
		{"fan", "set", "7", "", "", errs.InvalidArgs},
		{"fan", "get", "7", "[1]", "", errs.InvalidArgs},
		{"fan", "get", "x", "", "", errs.InvalidConfig},
		{"fan", "light", "7", "", "", errs.UnsupportedOperation},
		{"fan", "none", "7", "", "", errs.UnsupportedOperation},
		{"lamp", "get", "7", "", "", errs.UnsupportedDriver},
	} {
		got, err := d.Invoke(ctx, tt.kind, tt.operation, json.RawMessage(tt.config), json.RawMessage(tt.args))
		if string(got) != tt.want || errs.CodeOf(err) != tt.code {
			t.Errorf("Invoke(%s.%s, %s, %s) = %s, %v, want %s %s", tt.kind, tt.operation, tt.config, tt.args, got, err, tt.want, tt.code)
		}
	}
	if err := d.Validate(ctx, json.RawMessage("x")); errs.CodeOf(err) != errs.InvalidConfig {
		t.Errorf("Validate(x) = %v, want invalid-config", err)
	}
	if _, err := driver.Define(spec(), part, part); err == nil {
		t.Error("a kind implemented twice was accepted")
	}
	s := spec()
	s.RetrySafe = []string{"fan.none"}
	if _, err := driver.Define(s, part); err == nil {
		t.Error("a retry-safe operation that does not exist was accepted")
	}
}
