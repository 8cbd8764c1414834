package binding_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/plugins/driver/binding"
)

func TestParse(t *testing.T) {
	for _, tt := range []struct {
		in, driver, config, out string
		ok                      bool
	}{
		{`"redfish"`, "redfish", "", `"redfish"`, true},
		{` {"driver":"redfish"} `, "redfish", "", `"redfish"`, true},
		{`{"driver":"redfish","config":null}`, "redfish", "", `"redfish"`, true},
		{`{"driver":"acme-bmc","config":{ "b": 1 , "a": [null] }}`, "acme-bmc", `{"b":1,"a":[null]}`, `{"driver":"acme-bmc","config":{"b":1,"a":[null]}}`, true},
		{`{"driver":"acme-bmc","config":{}}`, "acme-bmc", `{}`, `{"driver":"acme-bmc","config":{}}`, true},
		{``, "", "", "", false},
		{`null`, "", "", "", false},
		{`""`, "", "", "", false},
		{`7`, "", "", "", false},
		{`[]`, "", "", "", false},
		{`{}`, "", "", "", false},
		{`"Redfish"`, "", "", "", false},
		{`"../x"`, "", "", "", false},
		{`{"driver":"x","config":[]}`, "", "", "", false},
		{`{"driver":"x","config":"y"}`, "", "", "", false},
		{`{"driver":"x","confg":{}}`, "", "", "", false},
		{`{"Driver":"x"}`, "", "", "", false},
		{`{"driver":"x"}{}`, "", "", "", false},
		{`{"driver":"x","config":{"a":"` + strings.Repeat("a", binding.MaxConfigBytes) + `"}}`, "", "", "", false},
	} {
		got, err := binding.Parse([]byte(tt.in))
		if (err == nil) != tt.ok || got.Driver != tt.driver || string(got.Config) != tt.config {
			t.Errorf("Parse(%.60s) = %+v, %v, want %s %s", tt.in, got, err, tt.driver, tt.config)
		}
		if !tt.ok {
			continue
		}
		if out, err := json.Marshal(got); err != nil || string(out) != tt.out {
			t.Errorf("Marshal(Parse(%s)) = %s, %v, want %s", tt.in, out, err, tt.out)
		}
	}
}

func TestUnmarshalTOML(t *testing.T) {
	for name, tt := range map[string]struct {
		in   any
		want string // JSON; empty: refused
	}{
		"id":               {"redfish", `"redfish"`},
		"table":            {map[string]any{"driver": "a", "config": map[string]any{"n": int64(1), "l": []any{"x", map[string]any{"y": 1.5}}}}, `{"driver":"a","config":{"l":["x",{"y":1.5}],"n":1}}`},
		"without config":   {map[string]any{"driver": "a"}, `"a"`},
		"no driver":        {map[string]any{"config": map[string]any{}}, ""},
		"unknown key":      {map[string]any{"driver": "a", "cfg": map[string]any{}}, ""},
		"config is a list": {map[string]any{"driver": "a", "config": []any{}}, ""},
		"a date":           {map[string]any{"driver": "a", "config": map[string]any{"d": time.Now()}}, ""},
		"not a number":     {map[string]any{"driver": "a", "config": map[string]any{"l": []map[string]any{{"d": nan()}}}}, ""},
		"number":           {int64(7), ""},
		"bad id":           {"A B", ""},
	} {
		var b binding.Binding
		err := b.UnmarshalTOML(tt.in)
		if (err == nil) != (tt.want != "") {
			t.Errorf("%s: UnmarshalTOML(%v) = %v", name, tt.in, err)
		}
		if out, _ := json.Marshal(b); err == nil && string(out) != tt.want {
			t.Errorf("%s: UnmarshalTOML(%v) made %s, want %s", name, tt.in, out, tt.want)
		}
	}
}

func nan() float64 { z := 0.0; return z / z }

func layer(t *testing.T, text string) map[string]binding.Binding {
	t.Helper()
	var l map[string]binding.Binding
	if err := json.Unmarshal([]byte(text), &l); err != nil {
		t.Fatal(err)
	}
	return l
}

// TestResolveLayers: each layer overrides the one before per kind, driver and
// configuration together; what a layer does not name stays.
func TestResolveLayers(t *testing.T) {
	bmc := binding.BMC("acme-bmc", "10.0.0.5", "secret://acme/bmc")
	const fromBMC = `{"driver":"acme-bmc","config":{"address":"10.0.0.5","credentials":"secret://acme/bmc"}}`
	for _, tt := range []struct {
		name    string
		layers  []map[string]binding.Binding
		kind    string
		want    string
		present bool
	}{
		{"bmc alone", []map[string]binding.Binding{bmc}, "power", fromBMC, true},
		{"bmc alone", []map[string]binding.Binding{bmc}, "management", fromBMC, true},
		{"bmc alone", []map[string]binding.Binding{bmc}, "virtual-media", fromBMC, true},
		{"bmc binds no more", []map[string]binding.Binding{bmc}, "inspect", "", false},
		{"profile over bmc drops the bmc's configuration", []map[string]binding.Binding{bmc, layer(t, `{"power":"redfish"}`)}, "power", `"redfish"`, true},
		{"profile leaves other kinds", []map[string]binding.Binding{bmc, layer(t, `{"power":"redfish"}`)}, "management", fromBMC, true},
		{"profile adds", []map[string]binding.Binding{bmc, layer(t, `{"boot":"ipxe"}`)}, "boot", `"ipxe"`, true},
		{"override over profile", []map[string]binding.Binding{bmc, layer(t, `{"power":"redfish"}`), layer(t, `{"power":{"driver":"x","config":{"a":1}}}`)}, "power", `{"driver":"x","config":{"a":1}}`, true},
		{"override over bmc", []map[string]binding.Binding{bmc, nil, layer(t, `{"virtual-media":"y"}`)}, "virtual-media", `"y"`, true},
	} {
		got := binding.Resolve(tt.layers...)
		b, ok := got[tt.kind]
		out, _ := json.Marshal(b)
		if ok != tt.present || ok && string(out) != tt.want {
			t.Errorf("%s: Resolve()[%s] = %s (there %v), want %s", tt.name, tt.kind, out, ok, tt.want)
		}
	}
	if got := slices.Sorted(maps.Keys(bmc)); !slices.Equal(got, []string{"management", "power", "virtual-media"}) {
		t.Errorf("BMC binds %v", got)
	}
}

// TestResolveCopies: what a caller does to the result changes no layer.
func TestResolveCopies(t *testing.T) {
	profile := layer(t, `{"power":{"driver":"a","config":{"n":1}}}`)
	got := binding.Resolve(profile)
	got["power"].Config[2] = 'X'
	got["boot"] = binding.Binding{Driver: "b"}
	if want := layer(t, `{"power":{"driver":"a","config":{"n":1}}}`); !reflect.DeepEqual(profile, want) {
		t.Errorf("the layer became %v", profile)
	}
}

func TestCheck(t *testing.T) {
	many := map[string]binding.Binding{}
	for i := range binding.MaxKinds + 1 {
		many[fmt.Sprintf("k%d", i)] = binding.Binding{Driver: "a"}
	}
	for name, tt := range map[string]struct {
		in map[string]binding.Binding
		ok bool
	}{
		"nothing":     {nil, true},
		"right":       {map[string]binding.Binding{"virtual-media": {Driver: "a", Config: json.RawMessage(`{}`)}}, true},
		"kind":        {map[string]binding.Binding{"Power": {Driver: "a"}}, false},
		"long kind":   {map[string]binding.Binding{strings.Repeat("a", 33): {Driver: "a"}}, false},
		"digit first": {map[string]binding.Binding{"1a": {Driver: "a"}}, false},
		"driver":      {map[string]binding.Binding{"power": {}}, false},
		"config":      {map[string]binding.Binding{"power": {Driver: "a", Config: json.RawMessage(`[]`)}}, false},
		"too many":    {many, false},
		"reference":   {map[string]binding.Binding{"power": {Driver: "a", Config: json.RawMessage(`{"credentials":"secret://t/n"}`)}}, true},
		"a secret":    {map[string]binding.Binding{"power": {Driver: "a", Config: json.RawMessage(`{"credentials":"hunter22"}`)}}, false},
		"an object":   {map[string]binding.Binding{"power": {Driver: "a", Config: json.RawMessage(`{"credentials":{"password":"hunter22"}}`)}}, false},
	} {
		if err := binding.Check(tt.in); (err == nil) != tt.ok {
			t.Errorf("%s: Check() = %v, want ok %v", name, err, tt.ok)
		}
	}
}

func TestReferences(t *testing.T) {
	got := binding.References(layer(t, `{"power":{"driver":"a","config":{"credentials":"secret://a/b","deep":[{"x":"secret://c/d"},"text"]}},"boot":"ipxe"}`))
	if want := []string{"secret://a/b", "secret://c/d"}; !slices.Equal(got, want) {
		t.Errorf("References() = %q, want %q", got, want)
	}
}

// FuzzParse: what is accepted is written and read again as the same binding.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{`"redfish"`, `{"driver":"a","config":{"credentials":"secret://t/n"}}`, `{"driver":"a","config":null}`, `{"driver":1}`, `[`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		b, err := binding.Parse(in)
		if err != nil {
			return
		}
		out, err := json.Marshal(b)
		if err != nil {
			t.Fatalf("Marshal(Parse(%q)) = %v", in, err)
		}
		again, err := binding.Parse(out)
		if err != nil || again.Driver != b.Driver {
			t.Errorf("Parse(%s) = %+v, %v, want %+v", out, again, err, b)
		}
		binding.References(map[string]binding.Binding{"power": b})
	})
}
