package driver_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
	"github.com/better-compute/site-appliance/plugins/driver/schema"
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
		"long id":          {func(m *driver.Manifest) { m.ID = strings.Repeat("a", 65) }, false},
		"no version":       {func(m *driver.Manifest) { m.Version = "" }, false},
		"no kind":          {func(m *driver.Manifest) { m.Kinds = nil }, false},
		"kind":             {func(m *driver.Manifest) { m.Kinds = []string{"power", "a.b"} }, false},
		"kind twice":       {func(m *driver.Manifest) { m.Kinds = []string{"power", "power"} }, false},
		"runsOn":           {func(m *driver.Manifest) { m.RunsOn = "moon" }, false},
		"operation":        {func(m *driver.Manifest) { m.RetrySafe = []string{"power"} }, false},
		"operation's kind": {func(m *driver.Manifest) { m.RetrySafe = []string{"bios.get"} }, false},
		"longest id":       {func(m *driver.Manifest) { m.ID = strings.Repeat("a", 64) }, true},
		"id with a digit":  {func(m *driver.Manifest) { m.ID = "a1-b2" }, true},
		"digit first":      {func(m *driver.Manifest) { m.ID = "1a" }, false},
		"version":          {func(m *driver.Manifest) { m.Version = "1.0.0-rc.1+build_5" }, true},
		"odd version":      {func(m *driver.Manifest) { m.Version = "1 0" }, false},
		"long version":     {func(m *driver.Manifest) { m.Version = strings.Repeat("1", 65) }, false},
		"many kinds":       {func(m *driver.Manifest) { m.Kinds = append(m.Kinds, names("k", 32)...) }, false},
		"32 kinds":         {func(m *driver.Manifest) { m.Kinds = append(m.Kinds, names("k", 31)...) }, true},
		"operation twice":  {func(m *driver.Manifest) { m.RetrySafe = []string{"power.a", "power.a"} }, false},
		"stream":           {func(m *driver.Manifest) { m.StreamOperations = []string{"power.watch"} }, true},
		"stream's kind":    {func(m *driver.Manifest) { m.StreamOperations = []string{"console.open"} }, false},
		"256 operations":   {func(m *driver.Manifest) { m.RetrySafe = names("power.o", 256) }, true},
		"257 operations":   {func(m *driver.Manifest) { m.RetrySafe = names("power.o", 257) }, false},
		"257 streams":      {func(m *driver.Manifest) { m.StreamOperations = names("power.o", 257) }, false},
		"capability":       {func(m *driver.Manifest) { m.Capabilities = []string{"instance.network-policy", "0x"} }, true},
		"odd capability":   {func(m *driver.Manifest) { m.Capabilities = []string{"Instance"} }, false},
		"long capability":  {func(m *driver.Manifest) { m.Capabilities = []string{strings.Repeat("a", 65)} }, false},
		"capability twice": {func(m *driver.Manifest) { m.Capabilities = []string{"a", "a"} }, false},
		"64 capabilities":  {func(m *driver.Manifest) { m.Capabilities = names("c", 64) }, true},
		"65 capabilities":  {func(m *driver.Manifest) { m.Capabilities = names("c", 65) }, false},
		"schema":           {func(m *driver.Manifest) { m.ConfigSchema = json.RawMessage(`{"type":"object"}`) }, true},
		"no JSON":          {func(m *driver.Manifest) { m.ConfigSchema = json.RawMessage("{") }, false},
		"no schema":        {func(m *driver.Manifest) { m.ConfigSchema = json.RawMessage(`{"type":5}`) }, false},
		"remote schema":    {func(m *driver.Manifest) { m.ConfigSchema = json.RawMessage(`{"$ref":"https://example.com/a"}`) }, false},
		"large schema": {func(m *driver.Manifest) {
			m.ConfigSchema = json.RawMessage(`{"description":"` + strings.Repeat("a", 64<<10) + `"}`)
		}, false},
	} {
		m := good()
		tt.change(&m)
		if err := m.Check(); (err == nil) != tt.ok {
			t.Errorf("%s: Check() = %v, want ok %v", name, err, tt.ok)
		}
	}
}

func names(prefix string, n int) []string {
	var list []string
	for i := range n {
		list = append(list, fmt.Sprint(prefix, i))
	}
	return list
}

func FuzzManifestCheck(f *testing.F) {
	f.Add("acme-bmc", "1.0.0", "power", "site", "power.getPower", "virtual-media", []byte(`{"type":"object"}`))
	f.Add("redfish", "", "Power", "moon", "power", "", []byte(`{`))
	f.Add("a\x00", "1\n", "power\n", "node", "power.a\n", "a\xff", []byte(`{"$ref":"file:///etc/passwd"}`))
	f.Fuzz(func(t *testing.T, id, version, kind, runsOn, operation, capability string, config []byte) {
		m := driver.Manifest{
			ID: id, Version: version, Kinds: []string{kind}, RunsOn: runsOn, ConfigSchema: config,
			RetrySafe: []string{operation}, StreamOperations: []string{operation}, Capabilities: []string{capability},
		}
		err := m.Check()
		if err != nil && (!utf8.ValidString(err.Error()) || len(err.Error()) > 2000) {
			t.Errorf("Check() = %q: long or not text", err)
		}
		if err == nil && strings.ContainsAny(m.Key()+kind+operation+capability, " \n\x00=/") {
			t.Errorf("Check() accepted %+v", m)
		}
		if _, remote := driver.Remote(m, silent{}); (remote == nil) != (err == nil) {
			t.Errorf("Remote() = %v, Check() = %v", remote, err)
		}
	})
}

func TestValidID(t *testing.T) {
	for id, want := range map[string]bool{
		"a": true, "acme-bmc": true, "a1": true, strings.Repeat("a", 64): true, "a-": true,
		"": false, "1a": false, "-a": false, "A": false, "a_b": false, "a.b": false, "a\n": false, strings.Repeat("a", 65): false,
	} {
		if got := driver.ValidID(id); got != want {
			t.Errorf("ValidID(%q) = %v, want %v", id, got, want)
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
	}, Streams: map[string]driver.StreamOperation[*fan]{
		"watch": func(ctx *driver.Context, f *fan, args driver.Args, stream io.ReadWriter) error {
			if err := args.Expect(1); err != nil {
				return err
			}
			_, err := fmt.Fprintf(stream, "%d %s", f.speed, args)
			return err
		},
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
}

func TestDefineRefuses(t *testing.T) {
	factory := func(n int, _ *driver.Context) (*fan, error) { return &fan{n}, nil }
	part := driver.Implement(kind(), factory)
	changed := func(change func(*driver.Kind[*fan])) driver.Part[int] {
		k := kind()
		change(&k)
		return driver.Implement(k, factory)
	}
	manifest, err := schema.New(schema.Fields{})
	if err != nil {
		t.Fatal(err)
	}
	stream := func(*driver.Context, *fan, driver.Args, io.ReadWriter) error { return nil }
	for name, tt := range map[string]struct {
		change func(*driver.Spec[int])
		parts  []driver.Part[int]
		ok     bool
	}{
		"good":             {nil, []driver.Part[int]{part}, true},
		"id":               {func(s *driver.Spec[int]) { s.ID = "Acme" }, []driver.Part[int]{part}, false},
		"version":          {func(s *driver.Spec[int]) { s.Version = "" }, []driver.Part[int]{part}, false},
		"runs on":          {func(s *driver.Spec[int]) { s.RunsOn = "moon" }, []driver.Part[int]{part}, false},
		"capability":       {func(s *driver.Spec[int]) { s.Capabilities = []string{"A"} }, []driver.Part[int]{part}, false},
		"capability twice": {func(s *driver.Spec[int]) { s.Capabilities = []string{"a", "a"} }, []driver.Part[int]{part}, false},
		"no parse":         {func(s *driver.Spec[int]) { s.Parse = nil }, []driver.Part[int]{part}, false},
		"two schemas":      {func(s *driver.Spec[int]) { s.Config, s.Schema = manifest, json.RawMessage(`{}`) }, []driver.Part[int]{part}, false},
		"schema":           {func(s *driver.Spec[int]) { s.Schema = json.RawMessage(`{"type":1}`) }, []driver.Part[int]{part}, false},
		"no kind":          {nil, nil, false},
		"kind twice":       {nil, []driver.Part[int]{part, part}, false},
		"kind twice, no streams": {nil, []driver.Part[int]{
			changed(func(k *driver.Kind[*fan]) { k.Streams = nil }), changed(func(k *driver.Kind[*fan]) { k.Streams = nil }),
		}, false},
		"kind's name":             {nil, []driver.Part[int]{changed(func(k *driver.Kind[*fan]) { k.Name = "Fan" })}, false},
		"kind without operations": {nil, []driver.Part[int]{changed(func(k *driver.Kind[*fan]) { k.Operations = nil })}, false},
		"operation's name":        {nil, []driver.Part[int]{changed(func(k *driver.Kind[*fan]) { k.Operations["a.b"] = k.Operations["get"] })}, false},
		"no function":             {nil, []driver.Part[int]{changed(func(k *driver.Kind[*fan]) { k.Operations["none"] = nil })}, false},
		"no stream function":      {nil, []driver.Part[int]{changed(func(k *driver.Kind[*fan]) { k.Streams = map[string]driver.StreamOperation[*fan]{"a": nil} })}, false},
		"stream's name": {nil, []driver.Part[int]{changed(func(k *driver.Kind[*fan]) {
			k.Streams = map[string]driver.StreamOperation[*fan]{"a.b": stream}
		})}, false},
		"operation and stream": {nil, []driver.Part[int]{changed(func(k *driver.Kind[*fan]) {
			k.Streams = map[string]driver.StreamOperation[*fan]{"get": stream}
		})}, false},
		"no factory":          {nil, []driver.Part[int]{driver.Implement[int](kind(), nil)}, false},
		"zero part":           {nil, []driver.Part[int]{{}}, false},
		"retry-safe":          {func(s *driver.Spec[int]) { s.RetrySafe = []string{"fan.get", "fan.light"} }, []driver.Part[int]{part}, true},
		"retry-safe nothing":  {func(s *driver.Spec[int]) { s.RetrySafe = []string{"fan.none"} }, []driver.Part[int]{part}, false},
		"retry-safe kind":     {func(s *driver.Spec[int]) { s.RetrySafe = []string{"lamp.get"} }, []driver.Part[int]{part}, false},
		"retry-safe no kind":  {func(s *driver.Spec[int]) { s.RetrySafe = []string{"get"} }, []driver.Part[int]{part}, false},
		"retry-safe twice":    {func(s *driver.Spec[int]) { s.RetrySafe = []string{"fan.get", "fan.get"} }, []driver.Part[int]{part}, false},
		"retry-safe a stream": {func(s *driver.Spec[int]) { s.RetrySafe = []string{"fan.watch"} }, []driver.Part[int]{part}, false},
	} {
		s := spec()
		if tt.change != nil {
			tt.change(&s)
		}
		if _, err := driver.Define(s, tt.parts...); (err == nil) != tt.ok {
			t.Errorf("%s: Define() = %v, want ok %v", name, err, tt.ok)
		}
	}
}

// TestImmutable changes whatever went into a definition and whatever came out.
func TestImmutable(t *testing.T) {
	k, s := kind(), spec()
	s.Schema = json.RawMessage(`{"type":"integer"}`)
	s.Capabilities = []string{"b", "a"}
	parts := []driver.Part[int]{driver.Implement(k, func(n int, _ *driver.Context) (*fan, error) { return &fan{n}, nil })}
	d, err := driver.Define(s, parts...)
	if err != nil {
		t.Fatal(err)
	}
	want, err := json.Marshal(d.Manifest())
	if err != nil {
		t.Fatal(err)
	}
	s.RetrySafe[0], s.Capabilities[0], s.Schema[0] = "fan.set", "z", 'x'
	delete(k.Operations, "get")
	k.Operations["new"], k.Streams["new"] = nil, nil
	parts[0] = driver.Part[int]{}
	m := d.Manifest()
	for _, list := range [][]string{m.Kinds, m.Capabilities, m.RetrySafe, m.StreamOperations} {
		for i := range list {
			list[i] = "changed"
		}
	}
	m.ID = "other"
	m.ConfigSchema[0] = 'x'
	got, err := json.Marshal(d.Manifest())
	if err != nil || string(got) != string(want) {
		t.Errorf("Manifest() = %s, %v after the changes, want %s", got, err, want)
	}
	ctx, _ := drivertest.Context(t, t.Context(), nil)
	if raw, err := d.Invoke(ctx, "fan", "get", json.RawMessage("7"), nil); err != nil || string(raw) != "7" {
		t.Errorf("Invoke(fan.get) = %s, %v after the changes, want 7", raw, err)
	}
	if err := d.CheckConfig(json.RawMessage(`"x"`)); errs.CodeOf(err) != errs.InvalidConfig {
		t.Errorf("CheckConfig() = %v after the changes, want invalid-config", err)
	}
	if d.Extension() != "driver" || d.Key() != "driver:acme@1.0.0" || d.ID() != "acme" {
		t.Errorf("Extension(), Key(), ID() = %q, %q, %q, want driver, driver:acme@1.0.0, acme", d.Extension(), d.Key(), d.ID())
	}

	// The manifest that made a remote definition is a copy too.
	wire := d.Manifest()
	r, err := driver.Remote(wire, silent{})
	if err != nil {
		t.Fatal(err)
	}
	wire.Kinds[0], wire.ConfigSchema[0] = "changed", 'x'
	if got, err := json.Marshal(r.Manifest()); err != nil || string(got) != string(want) {
		t.Errorf("Remote().Manifest() = %s, %v after the changes, want %s", got, err, want)
	}
}

// TestConfig is a driver whose configuration a manifest describes.
func TestConfig(t *testing.T) {
	type config struct {
		Speed int           `json:"speed"`
		Every time.Duration `json:"every"`
		Key   driver.Ref    `json:"key"`
	}
	manifest, err := schema.New(schema.Fields{
		"speed": schema.Int().Max(100), "every": schema.Duration().Default("5s"), "key": schema.Secret().Optional(),
	})
	if err != nil {
		t.Fatal(err)
	}
	type made struct {
		config
		key string
	}
	declare := func(parse func(json.RawMessage) (config, error)) *driver.Definition {
		d, err := driver.Define(driver.Spec[config]{ID: "acme", Version: "1", RunsOn: "node", Config: manifest, Parse: parse},
			driver.Implement(driver.Kind[made]{Name: "fan", Operations: map[string]driver.Operation[made]{
				"get": driver.Get(func(m made, ctx *driver.Context) (string, error) {
					return fmt.Sprint(m.Speed, " ", m.Every, " ", m.key, " ", ctx.TargetNodeID), nil
				}),
			}}, func(c config, ctx *driver.Context) (made, error) {
				if c.Key == "" {
					return made{c, "none"}, nil
				}
				v, err := ctx.Secrets.Resolve(ctx, c.Key)
				return made{c, string(v.Reveal())}, err
			}))
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	plain := declare(nil)
	own := declare(func(raw json.RawMessage) (c config, err error) {
		var in struct {
			Speed int    `json:"speed"`
			Every string `json:"every"`
		}
		if err := json.Unmarshal(raw, &in); err != nil {
			return c, err
		}
		if in.Speed == 13 {
			return c, errors.New("speed 13 brings bad luck")
		}
		d, err := time.ParseDuration(in.Every)
		return config{Speed: in.Speed, Every: d}, err
	})
	ctx, _ := drivertest.Context(t, t.Context(), map[string]string{"secret://t/key": "swordfish"})
	ctx.TargetNodeID = "node_7"
	for _, tt := range []struct {
		d            *driver.Definition
		config, want string
		code         errs.Code
	}{
		{plain, `{"speed":7}`, `"7 5s none node_7"`, ""},
		{plain, `{"speed":7,"every":"2m","key":"secret://t/key"}`, `"7 2m0s swordfish node_7"`, ""},
		{plain, `{"speed":7,"key":"secret://t/other"}`, "", errs.CredentialsUnavailable},
		{plain, `{"speed":101}`, "", errs.InvalidConfig},
		{plain, ``, "", errs.InvalidConfig},
		{own, `{"speed":7}`, `"7 5s none node_7"`, ""},
		{own, `{"speed":101}`, "", errs.InvalidConfig},
		{own, `{"speed":13}`, "", errs.InvalidConfig},
	} {
		got, err := tt.d.Invoke(ctx, "fan", "get", json.RawMessage(tt.config), nil)
		if string(got) != tt.want || errs.CodeOf(err) != tt.code {
			t.Errorf("Invoke(fan.get, %s) = %s, %v, want %s %s", tt.config, got, err, tt.want, tt.code)
		}
	}
	if got := plain.SecretRefs(json.RawMessage(`{"speed":1,"key":"secret://t/key"}`)); len(got) != 1 || got[0] != "secret://t/key" {
		t.Errorf("SecretRefs() = %v, want secret://t/key", got)
	}
	if string(plain.Manifest().ConfigSchema) != string(manifest.JSONSchema()) {
		t.Errorf("Manifest().ConfigSchema = %s, want the manifest's JSON Schema", plain.Manifest().ConfigSchema)
	}
}

// TestParseKeepsCodes: only an error without a code becomes invalid-config.
func TestParseKeepsCodes(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want errs.Code
	}{
		{errors.New("no"), errs.InvalidConfig},
		{errs.New(errs.InvalidAddress, "no"), errs.InvalidAddress},
		{fmt.Errorf("options: %w", errs.New(errs.PinUnsupported, "no")), errs.PinUnsupported},
	} {
		s := spec()
		s.Parse = func(json.RawMessage) (int, error) { return 0, tt.err }
		d, err := driver.Define(s, driver.Implement(kind(), func(int, *driver.Context) (*fan, error) { return &fan{}, nil }))
		if err != nil {
			t.Fatal(err)
		}
		ctx, _ := drivertest.Context(t, t.Context(), nil)
		if err := d.Validate(ctx, nil); errs.CodeOf(err) != tt.want {
			t.Errorf("Validate() with Parse failing by %v = %v, want %s", tt.err, err, tt.want)
		}
	}
}
