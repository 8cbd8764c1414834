package schema_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver/schema"
)

// everything has a field of every sort.
func everything(t testing.TB) *schema.Schema {
	t.Helper()
	s, err := schema.New(schema.Fields{
		"address":     schema.URL().Describe("Where the BMC answers."),
		"credentials": schema.Secret(),
		"timeout":     schema.Duration().Default("30s"),
		"rack":        schema.String().Pattern(`^[a-z]+$`).Min(2).Max(5).Optional(),
		"retries":     schema.Int().Min(0).Max(9).Default(3),
		"slots":       schema.Int().Optional(),
		"verbose":     schema.Bool().Default(false),
		"mode":        schema.Enum("fast", "safe").Default("safe"),
		"fans":        schema.List(schema.Int().Min(1)).Max(3).Optional(),
		"zones":       schema.List(schema.Enum("a", "b")).Default([]string{"a"}),
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

const whole = `"address":"https://10.0.0.5","credentials":"secret://root/bmc"`

// cases are configurations of everything, and what their error must say; "" is none.
var cases = []struct{ in, says string }{
	{`{` + whole + `}`, ""},
	{` {` + whole + `} `, ""},
	{`{` + whole + `,"timeout":"1m30s","rack":"abc","retries":9,"slots":-4,"verbose":true,"mode":"fast","fans":[1,2],"zones":[]}`, ""},
	{`{` + whole + `,"retries":3.0,"slots":1e3}`, ""},
	{`{` + whole + `,"rack":"äöü"}`, "rack: want text that matches ^[a-z]+$"},
	{``, "address: is missing"},
	{`{}`, "credentials: is missing"},
	{`null`, "want an object"},
	{`[]`, "want an object"},
	{`{`, "not JSON"},
	{`{` + whole + `} {}`, "not JSON"},
	{`{` + whole + `,"adress":1}`, "adress: unknown key"},
	{`{` + whole + `,"Timeout":"1s"}`, "Timeout: unknown key"},
	{`{"address":"10.0.0.5","credentials":"x"}`, "address: want"},
	{`{"address":"https://","credentials":"x"}`, "address: want"},
	{`{"address":"https://a b","credentials":"x"}`, "address: want"},
	{`{"address":"https:\\\\a","credentials":"x"}`, "address: want"},
	{`{"address":7,"credentials":"x"}`, "address: want"},
	{`{"address":null,"credentials":"x"}`, "address: want"},
	{`{"address":"https://a","credentials":5}`, "credentials: want"},
	{`{` + whole + `,"timeout":"30"}`, "timeout: want"},
	{`{` + whole + `,"timeout":"PT30S"}`, "timeout: want"},
	{`{` + whole + `,"timeout":"-1s"}`, "timeout: want"},
	{`{` + whole + `,"timeout":30}`, "timeout: want"},
	{`{` + whole + `,"rack":"a"}`, "rack: want"},
	{`{` + whole + `,"rack":"abcdef"}`, "rack: want"},
	{`{` + whole + `,"retries":10}`, "retries: want"},
	{`{` + whole + `,"retries":1.5}`, "retries: want"},
	{`{` + whole + `,"retries":"3"}`, "retries: want"},
	{`{` + whole + `,"slots":9223372036854775808}`, "slots: want"},
	{`{` + whole + `,"verbose":"yes"}`, "verbose: want"},
	{`{` + whole + `,"mode":"slow"}`, "mode: want fast or safe"},
	{`{` + whole + `,"fans":[1,0]}`, "fans[1]: want"},
	{`{` + whole + `,"fans":[1,2,3,4]}`, "fans: want"},
	{`{` + whole + `,"fans":{}}`, "fans: want"},
	{`{` + whole + `,"zones":["a","c"]}`, "zones[1]: want a or b"},
}

func TestCheck(t *testing.T) {
	s := everything(t)
	again, err := schema.Read(s.JSONSchema())
	if err != nil {
		t.Fatal(err)
	}
	for name, s := range map[string]*schema.Schema{"built": s, "read": again} {
		for _, tt := range cases {
			err := s.Check(json.RawMessage(tt.in))
			if tt.says == "" && err != nil {
				t.Errorf("%s: Check(%s) = %v, want nil", name, tt.in, err)
			}
			if tt.says == "" {
				continue
			}
			if errs.CodeOf(err) != errs.InvalidConfig || !strings.Contains(fmt.Sprint(err), tt.says) {
				t.Errorf("%s: Check(%s) = %v, want invalid-config with %q", name, tt.in, err, tt.says)
			}
		}
	}
}

func TestJSONSchema(t *testing.T) {
	s, err := schema.New(schema.Fields{
		"address":     schema.URL(),
		"credentials": schema.Secret().Min(1),
		"timeout":     schema.Duration().Default(30 * time.Second),
		"suite":       schema.Enum("3", "17").Optional(),
	})
	if err != nil {
		t.Fatal(err)
	}
	var got, want any
	if err := json.Unmarshal(s.JSONSchema(), &got); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(`{
		"$schema": "https://json-schema.org/draft/2020-12/schema",
		"type": "object", "additionalProperties": false, "required": ["address", "credentials"],
		"properties": {
			"address": {"type": "string", "format": "uri", "pattern": "^[a-zA-Z][a-zA-Z0-9+.-]*://[^/?#\\\\ :@][^/?#\\\\ ]*([/?#].*)?$", "x-bc": {"kind": "url"}},
			"credentials": {"type": "string", "writeOnly": true, "minLength": 1, "x-bc": {"kind": "secret"}},
			"suite": {"type": "string", "enum": ["3", "17"]},
			"timeout": {"type": "string", "default": "30s", "x-bc": {"kind": "duration"},
				"pattern": "^([0-9]{1,9}(\\.[0-9]{1,9})?(ns|us|ms|s)|[0-9]{1,6}(\\.[0-9]{1,9})?m|[0-9]{1,5}(\\.[0-9]{1,9})?h){1,4}$"}
		}}`), &want); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("JSONSchema() = %s", s.JSONSchema())
	}
	// What was handed out is a copy.
	clear(s.JSONSchema())
	if !json.Valid(s.JSONSchema()) {
		t.Error("changing what JSONSchema answered changed the schema")
	}
}

func TestRoundTrip(t *testing.T) {
	a := everything(t)
	b, err := schema.Read(a.JSONSchema())
	if err != nil {
		t.Fatal(err)
	}
	if string(a.JSONSchema()) != string(b.JSONSchema()) {
		t.Errorf("JSONSchema() of what was read = %s, want %s", b.JSONSchema(), a.JSONSchema())
	}
	if got, want := b.SecretFields(), []string{"credentials"}; !slices.Equal(got, want) || !slices.Equal(a.SecretFields(), want) {
		t.Errorf("SecretFields() = %v and %v, want %v", a.SecretFields(), got, want)
	}
	config := json.RawMessage(`{` + whole + `,"fans":[4]}`)
	x, errX := a.Complete(config)
	y, errY := b.Complete(config)
	want := `{"address":"https://10.0.0.5","credentials":"secret://root/bmc","fans":[4],"mode":"safe","retries":3,"timeout":"30s","verbose":false,"zones":["a"]}`
	if errX != nil || errY != nil || string(x) != want || string(y) != want {
		t.Errorf("Complete() = %s, %v and %s, %v, want %s", x, errX, y, errY, want)
	}
}

func TestParse(t *testing.T) {
	type config struct {
		Address     string        `json:"address"`
		Credentials string        `json:"credentials"`
		Timeout     time.Duration `json:"timeout"`
		Rack        *string       `json:"rack"`
		Retries     int           `json:"retries"`
		Slots       int64         `json:"slots"`
		Verbose     bool          `json:"verbose"`
		Mode        string        `json:"mode"`
		Fans        []int         `json:"fans"`
		Zones       []string      `json:"zones"`
	}
	s := everything(t)
	for _, tt := range []struct {
		in   string
		want config
	}{
		{`{` + whole + `}`, config{"https://10.0.0.5", "secret://root/bmc", 30 * time.Second, nil, 3, 0, false, "safe", nil, []string{"a"}}},
		{
			`{` + whole + `,"timeout":"1m30s","retries":7.0,"slots":1e3,"verbose":true,"mode":"fast","fans":[2e0],"zones":["b"]}`,
			config{"https://10.0.0.5", "secret://root/bmc", 90 * time.Second, nil, 7, 1000, true, "fast", []int{2}, []string{"b"}},
		},
	} {
		var got config
		if err := s.Parse(json.RawMessage(tt.in), &got); err != nil || !reflect.DeepEqual(got, tt.want) {
			t.Errorf("Parse(%s) = %+v, %v, want %+v", tt.in, got, err, tt.want)
		}
	}
	var small struct {
		Slots int8 `json:"slots"`
	}
	if err := s.Parse(json.RawMessage(`{`+whole+`,"slots":1000}`), &small); errs.CodeOf(err) != errs.InvalidConfig || strings.Contains(err.Error(), "1000") {
		t.Errorf("Parse(slots that do not fit) = %v, want invalid-config without the value", err)
	}
	if err := s.Parse(json.RawMessage(`{}`), &config{}); errs.CodeOf(err) != errs.InvalidConfig {
		t.Errorf("Parse({}) = %v, want invalid-config", err)
	}
}

func TestNewRefuses(t *testing.T) {
	many := schema.Fields{}
	for i := range 257 {
		many[fmt.Sprintf("f%d", i)] = schema.Bool()
	}
	for name, tt := range map[string]struct {
		fields schema.Fields
		ok     bool
	}{
		"none":                 {schema.Fields{}, true},
		"name":                 {schema.Fields{"a b": schema.Bool()}, false},
		"too many":             {many, false},
		"zero field":           {schema.Fields{"a": {}}, false},
		"pattern":              {schema.Fields{"a": schema.String().Pattern("(")}, false},
		"pattern of a number":  {schema.Fields{"a": schema.Int().Pattern("a")}, false},
		"bounds":               {schema.Fields{"a": schema.Int().Min(2).Max(1)}, false},
		"bounds of a bool":     {schema.Fields{"a": schema.Bool().Min(2)}, false},
		"negative length":      {schema.Fields{"a": schema.String().Min(-1)}, false},
		"empty enum":           {schema.Fields{"a": schema.Enum()}, false},
		"value twice":          {schema.Fields{"a": schema.Enum("x", "x")}, false},
		"secret with default":  {schema.Fields{"a": schema.Secret().Default("secret://a/b")}, false},
		"secrets in a list":    {schema.Fields{"a": schema.List(schema.Secret())}, false},
		"default fits":         {schema.Fields{"a": schema.Int().Max(3).Default(3)}, true},
		"default does not fit": {schema.Fields{"a": schema.Int().Max(3).Default(4)}, false},
		"default of a type":    {schema.Fields{"a": schema.Duration().Default(30)}, false},
		"default is no JSON":   {schema.Fields{"a": schema.Int().Default(func() {})}, false},
		"item with default":    {schema.Fields{"a": schema.List(schema.Int().Default(1))}, false},
		"list of lists":        {schema.Fields{"a": schema.List(schema.List(schema.Int()))}, true},
	} {
		if _, err := schema.New(tt.fields); (err == nil) != tt.ok {
			t.Errorf("%s: New() = %v, want ok %v", name, err, tt.ok)
		}
	}
}

// TestImmutable changes all that went in.
func TestImmutable(t *testing.T) {
	values := []string{"x", "y"}
	fields := schema.Fields{"a": schema.Enum(values...)}
	s, err := schema.New(fields)
	if err != nil {
		t.Fatal(err)
	}
	values[0] = "z"
	fields["b"] = schema.Bool()
	delete(fields, "a")
	for in, ok := range map[string]bool{`{"a":"x"}`: true, `{"a":"z"}`: false, `{"b":true}`: false} {
		if err := s.Check(json.RawMessage(in)); (err == nil) != ok {
			t.Errorf("Check(%s) = %v, want ok %v", in, err, ok)
		}
	}
}

func TestRead(t *testing.T) {
	deep := strings.Repeat(`{"items":`, 40) + `{}` + strings.Repeat(`}`, 40)
	for name, tt := range map[string]struct {
		in string
		ok bool
	}{
		"empty":              {`{}`, true},
		"true":               {`true`, true},
		"dialect":            {`{"$schema":"https://json-schema.org/draft/2020-12/schema"}`, true},
		"other dialect":      {`{"$schema":"http://json-schema.org/draft-07/schema#"}`, false},
		"dialect of a part":  {`{"properties":{"a":{"$schema":"http://json-schema.org/draft-07/schema#"}}}`, false},
		"local reference":    {`{"$defs":{"a":{"type":"string"}},"properties":{"b":{"$ref":"#/$defs/a"}}}`, true},
		"itself":             {`{"properties":{"b":{"$ref":"#"}}}`, true},
		"remote reference":   {`{"properties":{"b":{"$ref":"https://example.com/a.json"}}}`, false},
		"file":               {`{"$ref":"file:///etc/passwd"}`, false},
		"relative":           {`{"$ref":"other.json"}`, false},
		"dynamic":            {`{"$dynamicRef":"https://example.com/a.json"}`, false},
		"reference nowhere":  {`{"$ref":"#/$defs/none"}`, false},
		"id":                 {`{"$id":"https://example.com/a"}`, false},
		"property called id": {`{"properties":{"$id":{"type":"string"},"$ref":{"type":"string"}}}`, true},
		"type":               {`{"type":"strange"}`, false},
		"pattern":            {`{"pattern":"("}`, false},
		"pattern of ECMA":    {`{"pattern":"^(?!a)"}`, false},
		"no JSON":            {`{`, false},
		"list":               {`[]`, false},
		"key twice":          {`{"type":"object","type":"string"}`, false},
		"deep":               {deep, false},
		"large":              {`{"description":"` + strings.Repeat("a", schema.MaxBytes) + `"}`, false},
		"number":             {`{"minimum":1e999999}`, false},
		"no way down":        {`{"$ref":"#"}`, false},
		"round about":        {`{"$defs":{"a":{"allOf":[{"$ref":"#/$defs/b"}]},"b":{"not":{"$ref":"#/$defs/a"}}},"$ref":"#/$defs/a"}`, false},
		"tree":               {`{"properties":{"left":{"$ref":"#"},"right":{"$ref":"#"}},"items":{"$ref":"#"}}`, true},
		"anchor":             {`{"$defs":{"a":{"$anchor":"x","type":"string"}},"$ref":"#x"}`, true},
		"no anchor":          {`{"$ref":"#x"}`, false},
		"anchor twice":       {`{"$defs":{"a":{"$anchor":"x"},"b":{"$anchor":"x"}}}`, false},
		"pointer to a list":  {`{"allOf":[{"type":"string"}],"properties":{"a":{"$ref":"#/allOf/0"}}}`, true},
		"pointer to nothing": {`{"allOf":[{}],"properties":{"a":{"$ref":"#/allOf/1"}}}`, false},
		"pointer to a word":  {`{"type":"string","properties":{"a":{"$ref":"#/type"}}}`, false},
		"pointer to a note":  {`{"x":{"type":"odd"},"properties":{"a":{"$ref":"#/x"}}}`, false},
		"unevaluated":        {`{"unevaluatedProperties":false}`, false},
		"unknown keyword":    {`{"x-note":{"type":5}}`, true},
	} {
		if _, err := schema.Read(json.RawMessage(tt.in)); (err == nil) != tt.ok {
			t.Errorf("%s: Read() = %v, want ok %v", name, err, tt.ok)
		}
	}
}

// TestBranches: a schema of which one place is judged 2^n times is given up.
func TestBranches(t *testing.T) {
	for _, keyword := range []string{`%s`, `"properties":{"a":{%s}}`, `"properties":{"a":{"not":{%s}}}`, `"patternProperties":{"^a":{%s}}`} {
		for _, tt := range []struct {
			n  int
			ok bool
		}{{8, true}, {60, false}} {
			defs := `"d0":{"minLength":0}`
			for i := range tt.n {
				defs += fmt.Sprintf(`,"d%d":{"allOf":[{"$ref":"#/$defs/d%d"},{"$ref":"#/$defs/d%d"}]}`, i+1, i, i)
			}
			last := fmt.Sprintf(`"$ref":"#/$defs/d%d"`, tt.n)
			if strings.Contains(keyword, "not") {
				last = `"not":{` + last + `}`
			}
			s, err := schema.Read(json.RawMessage(fmt.Sprintf(`{"$defs":{%s},%s}`, defs, fmt.Sprintf(keyword, last))))
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Check(json.RawMessage(`{"a":"x"}`)); (err == nil) != tt.ok {
				t.Errorf("Check() of %s with 2^%d ways = %v, want ok %v", keyword, tt.n, err, tt.ok)
			}
		}
	}
}

func TestReadCheck(t *testing.T) {
	s, err := schema.Read(json.RawMessage(`{
		"type":"object","required":["address"],"additionalProperties":false,
		"$defs":{"key":{"type":"string","writeOnly":true}},
		"properties":{
			"address":{"type":"string","minLength":1,"maxLength":20},
			"pin":{"type":"string","const":"abc"},
			"key":{"$ref":"#/$defs/key"},
			"all":{"allOf":[{"$ref":"#/$defs/key"},{"minLength":30}]},
			"vault":{"type":"object","x-bc":{"kind":"secret"},"additionalProperties":{"type":"integer"}},
			"options":{"type":"object","additionalProperties":false,"properties":{"cipherSuite":{"enum":[3,17]},"n":{"multipleOf":5,"exclusiveMaximum":20}}},
			"home":{"type":"string","format":"url"},
			"pause":{"type":"string","format":"duration"},
			"both":{"allOf":[{"$ref":"#/$defs/key"},{"additionalProperties":{"type":"integer"}}],"type":"object"},
			"either":{"anyOf":[{"type":"string"},{"type":"integer","minimum":5}]}
		}}`))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := s.SecretFields(), []string{"all", "both", "key", "vault"}; !slices.Equal(got, want) {
		t.Errorf("SecretFields() = %v, want %v", got, want)
	}
	for in, says := range map[string]string{
		`{"address":"a"}`: "",
		`{"address":"a","options":{"cipherSuite":17,"n":15}}`: "",
		`{"address":"a","either":7}`:                          "",
		`{"address":"a","pin":"abd"}`:                         "pin: want abc",
		`{}`:                                                  "address: is missing",
		`{"address":"a","home":"https://a/b","pause":"1m30s"}`: "",
		`{"address":"a","pause":"PT1M30S"}`:                    "",
		`{"address":"a","pause":"soon"}`:                       "pause: want text of the format duration",
		`{"address":"a","home":"a/b"}`:                         "home: want text of the format url",
		`{"address":"a","options":{"cipherSuite":4}}`:          "options.cipherSuite: want 3 or 17",
		`{"address":"a","options":{"n":3}}`:                    "options.n: want a multiple of 5",
		`{"address":"a","options":{"n":20}}`:                   "options.n: want less than 20",
		`{"address":"a","options":{"m":3}}`:                    "options.m: unknown key",
		`{"address":"a","either":3}`:                           "either: want a whole number of at least 5",
		`{"address":"a","key":3}`:                              "key: want text",
		`{"address":"a","vault":{"hunter2":"x"}}`:              "vault: want a whole number",
		`{"address":"a","both":{"hunter2":"x"}}`:               "both: want",
		`{"address":"a","address":"b"}`:                        `the key "address" stands twice`,
		`{"address":"a","options":{"n":1e400}}`:                "a number is too long",
	} {
		err := s.Check(json.RawMessage(in))
		if (says == "") != (err == nil) || says != "" && !strings.Contains(err.Error(), says) {
			t.Errorf("Check(%s) = %v, want %q", in, err, says)
		}
		if err != nil && strings.Contains(err.Error(), "hunter2") {
			t.Errorf("Check(%s) = %v names what a secret holds", in, err)
		}
	}
}

// TestSecretsStayOut gives every field the same odd value: no error may hold it.
func TestSecretsStayOut(t *testing.T) {
	s := everything(t)
	again, err := schema.Read(s.JSONSchema())
	if err != nil {
		t.Fatal(err)
	}
	const odd = "hunter2-\u00e4"
	for name, s := range map[string]*schema.Schema{"built": s, "read": again} {
		for _, field := range []string{"address", "credentials", "timeout", "rack", "retries", "slots", "verbose", "mode", "fans", "zones"} {
			for _, form := range []string{`"%s"`, `["%s"]`, `{"k":"%s"}`} {
				in := `{"` + field + `":` + fmt.Sprintf(form, odd) + `}`
				if err := s.Check(json.RawMessage(in)); err == nil || strings.Contains(err.Error(), "hunter2") {
					t.Errorf("%s: Check(%s) = %v, want an error without the value", name, in, err)
				}
			}
		}
	}
}

func TestSecretRefs(t *testing.T) {
	s, err := schema.New(schema.Fields{"a": schema.Secret(), "b": schema.Secret().Optional(), "c": schema.String().Optional()})
	if err != nil {
		t.Fatal(err)
	}
	for in, want := range map[string][]string{
		`{"a":"secret://root/bmc"}`:                               {"secret://root/bmc"},
		`{"a":"secret://root/bmc","b":"secret://root/api/token"}`: {"secret://root/api/token", "secret://root/bmc"},
		`{"a":"secret://root/bmc","b":"secret://root/bmc"}`:       {"secret://root/bmc"},
		`{"a":"hunter2","c":"secret://root/other"}`:               nil,
		`{"a":"secret://root"}`:                                   nil,
		`{"a":"secret:///bmc"}`:                                   nil,
		`{"a":"x secret://root/bmc"}`:                             nil,
		`{"a":["secret://root/bmc"]}`:                             nil,
		``:                                                        nil,
		`[`:                                                       nil,
	} {
		if got := s.SecretRefs(json.RawMessage(in)); !slices.Equal(got, want) {
			t.Errorf("SecretRefs(%s) = %v, want %v", in, got, want)
		}
	}
}

type nothing struct{}

func (nothing) Load(string) (any, error) { return nil, errors.New("nothing is loaded") }

// library compiles a JSON Schema with a well-known implementation.
func library(raw []byte, formats bool) (*jsonschema.Schema, error) {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		return nil, err
	}
	c := jsonschema.NewCompiler()
	c.DefaultDraft(jsonschema.Draft2020)
	c.UseLoader(nothing{})
	if formats {
		c.AssertFormat()
	}
	if err := c.AddResource("mem:schema", doc); err != nil {
		return nil, err
	}
	return c.Compile("mem:schema")
}

func judge(t testing.TB, raw json.RawMessage) *jsonschema.Schema {
	t.Helper()
	compiled, err := library(raw, true)
	if err != nil {
		t.Fatalf("%v\n%s", err, raw)
	}
	return compiled
}

// TestCheckAgrees generates manifests and configurations: the built schema, the
// schema that was read, and the library alone must judge alike.
func TestCheckAgrees(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	pick := func(list ...string) string { return list[r.IntN(len(list))] }
	var field func(depth int) schema.Field
	field = func(depth int) schema.Field {
		var f schema.Field
		switch r.IntN(8) {
		case 0:
			f = schema.URL()
		case 1:
			f = schema.Secret()
			if depth > 0 {
				f = schema.Bool()
			}
		case 2:
			f = schema.Duration()
		case 3:
			f = schema.String().Pattern(pick("a", "^[a-z]*$", `\d`, "^$")).Min(r.Int64N(2)).Max(r.Int64N(6) + 1)
		case 4:
			f = schema.Int()
			if r.IntN(2) == 0 {
				f = f.Min(r.Int64N(10) - 5).Max(r.Int64N(10) + 5)
			}
		case 5:
			f = schema.Bool()
		case 6:
			f = schema.Enum("a", "b1", "")
		default:
			if depth > 2 {
				return schema.String()
			}
			f = schema.List(field(depth + 1)).Max(r.Int64N(3) + 1)
		}
		if depth == 0 && r.IntN(2) == 0 {
			f = f.Optional()
		}
		return f
	}
	var value func(depth int) string
	value = func(depth int) string {
		switch n := r.IntN(14); {
		case n == 0 && depth < 3:
			var items []string
			for range r.IntN(4) {
				items = append(items, value(depth+1))
			}
			return "[" + strings.Join(items, ",") + "]"
		case n == 1:
			return pick("null", "{}", `{"a":1}`, "true", "false")
		case n < 5:
			return pick("0", "1", "-0", "7", "1.0", "1.5", "1e1", "-3", "9223372036854775807", "9223372036854775808", "-9223372036854775809", "1e-1", "10e-1", "1e300")
		case n < 8:
			return pick(`"30s"`, `"1h2m"`, `"1.5h"`, `"5"`, `"s"`, `"999999999s"`, `"99999h"`, `"100000h"`, `"1ms1us1ns1s"`, `"1s1s1s1s1s"`, `"1s\n"`)
		case n < 11:
			return pick(`"https://a"`, `"https://a/b?c#d"`, `"http://[::1]:8"`, `"http://[::1"`, `"http://::1"`, `"a://b c"`, `"http://a/b c"`, `"//a"`, `"mailto:a@b"`,
				`"http://%zz"`, `"http://a/%zz"`, `"http://:80"`, `"http://u:p@h"`, `"http://h:x"`, `"http:\\\\a"`, `"http://a\u0000"`, `"http://1.2.3.4:99999"`, `"http://ä"`)
		default:
			return pick(`"a"`, `"b1"`, `""`, `"abc"`, `"abcdefgh"`, `"ä"`, `"😀😀"`, `"\ud800"`, `"secret://a/b"`, `"12345"`)
		}
	}
	fits := 0
	for range 300 {
		fields := schema.Fields{}
		for _, name := range []string{"a", "b", "c"}[:r.IntN(4)] {
			fields[name] = field(0)
		}
		built, err := schema.New(fields)
		if err != nil {
			t.Fatal(err)
		}
		read, err := schema.Read(built.JSONSchema())
		if err != nil {
			t.Fatal(err)
		}
		other := judge(t, built.JSONSchema())
		for range 60 {
			var members []string
			for _, name := range []string{"a", "b", "c", "d"} {
				if _, known := fields[name]; known && r.IntN(4) > 0 || r.IntN(20) == 0 {
					members = append(members, `"`+name+`":`+value(0))
				}
			}
			in := "{" + strings.Join(members, ",") + "}"
			doc, err := jsonschema.UnmarshalJSON(strings.NewReader(in))
			if err != nil {
				t.Fatalf("%s: %v", in, err)
			}
			want := other.Validate(doc)
			a, b := built.Check(json.RawMessage(in)), read.Check(json.RawMessage(in))
			if (a == nil) != (want == nil) || (b == nil) != (want == nil) {
				t.Fatalf("Check(%s) = %v, read %v, library %v\n%s", in, a, b, want, built.JSONSchema())
			}
			if want == nil {
				fits++
			}
		}
	}
	if fits < 500 {
		t.Errorf("only %d of the configurations fit: the comparison says little", fits)
	}
}

// configs are what schemas of any form are tried on.
var configs = []string{
	`{}`, `null`, `true`, `7`, `-1.50`, `1e2`, `""`, `"abc"`, `"äöü"`, `[]`, `[1,1.0]`, `[1,"a",null,{"a":1}]`, `[[1],[1]]`, `{"a":1}`, `{"a":"x","b":2}`,
	`{"b":[1,{"c":null}],"a":{"a":{"a":5}}}`, `{"abc":false,"ab":0}`, `{"a":null}`, `{"a":[],"b":"secret://t/n","c":3.5}`,
}

// schemas are seeds, and what TestAgainstLibrary compares on all configs.
var schemas = []string{
	`{}`, `true`, `false`, `{"type":"object"}`, `{"type":["integer","null"]}`, `{"type":"number","minimum":0,"exclusiveMaximum":100}`, `{"multipleOf":0.5,"exclusiveMinimum":-2,"maximum":7}`,
	`{"minLength":2,"maxLength":3}`, `{"pattern":"^[a-b]"}`, `{"enum":[1,"abc",[1,1],{"a":1},null]}`, `{"const":{"a":1.0}}`, `{"const":[1,1]}`, `{"enum":[]}`,
	`{"properties":{"a":{"type":"integer"},"b":false}}`, `{"properties":{"a":true},"additionalProperties":false}`, `{"additionalProperties":{"type":"integer"}}`,
	`{"patternProperties":{"^a":{"type":"integer"},"b$":{"type":"boolean"}},"additionalProperties":{"type":"null"}}`, `{"propertyNames":{"maxLength":2}}`,
	`{"required":["a","b"]}`, `{"dependentRequired":{"a":["b"]}}`, `{"dependentSchemas":{"a":{"required":["b"]}}}`, `{"minProperties":1,"maxProperties":1}`,
	`{"items":{"type":"integer"}}`, `{"prefixItems":[{"type":"integer"},{"type":"string"}],"items":false}`, `{"uniqueItems":true}`, `{"minItems":1,"maxItems":2}`,
	`{"contains":{"type":"integer"}}`, `{"contains":{"const":1},"minContains":0,"maxContains":1}`, `{"contains":{"const":1},"minContains":2}`, `{"minContains":3}`,
	`{"allOf":[{"type":"object"},{"required":["a"]}]}`, `{"anyOf":[{"type":"string"},{"minimum":5}]}`, `{"oneOf":[{"type":"integer"},{"minimum":5}]}`, `{"not":{"type":"object"}}`,
	`{"if":{"required":["a"]},"then":{"required":["b"]},"else":{"minProperties":1}}`, `{"if":false}`, `{"then":false}`,
	`{"$defs":{"n":{"type":["integer","object"],"properties":{"a":{"$ref":"#/$defs/n"}}}},"properties":{"a":{"$ref":"#/$defs/n"}}}`, `{"properties":{"a":{"$ref":"#"}},"type":["object","integer"]}`,
	`{"$defs":{"a":{"$anchor":"x","type":"object"}},"$ref":"#x","maxProperties":1}`, `{"$defs":{"a b%":{"type":"null"}},"properties":{"a":{"$ref":"#/$defs/a%20b%25"}}}`,
	`{"definitions":{"a/b":{"type":"integer"}},"additionalProperties":{"$ref":"#/definitions/a~1b"}}`, `{"properties":{"a":{"writeOnly":true,"default":1}}}`,
	`{"allOf":[{"$ref":"#/allOf/1"},{"type":"object"}]}`, `{"minLength":2.0,"title":"x","$comment":"y","deprecated":false,"examples":[1]}`, `{"$ref":"#/properties/b","properties":{"b":{"type":"object"}}}`,
}

// compare reads a schema both ways. What is read here the library takes too,
// and then both judge alike.
func compare(t *testing.T, raw string) (read bool) {
	t.Helper()
	s, err := schema.Read([]byte(raw))
	if err != nil {
		return false
	}
	other, err := library([]byte(raw), false)
	if err != nil {
		t.Errorf("Read(%s) = nil, the library %v", raw, err)
		return true
	}
	for _, config := range configs {
		doc, err := jsonschema.UnmarshalJSON(strings.NewReader(config))
		if err != nil {
			t.Fatal(err)
		}
		got, want := s.Check(json.RawMessage(config)), other.Validate(doc)
		if (got == nil) != (want == nil) && !strings.Contains(fmt.Sprint(got), "too often") {
			t.Errorf("Check(%s) by %s = %v, the library %v", config, raw, got, want)
		}
	}
	return true
}

func TestAgainstLibrary(t *testing.T) {
	for _, raw := range schemas {
		if !compare(t, raw) {
			_, err := schema.Read([]byte(raw))
			t.Errorf("Read(%s) = %v", raw, err)
		}
	}
}

// TestGenerated puts schemas together at random, keyword by keyword.
func TestGenerated(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	var generate func(depth int) string
	generate = func(depth int) string {
		if depth > 3 || r.IntN(12) == 0 {
			return []string{"true", "false", `{"type":"integer"}`, `{"$ref":"#"}`, `{"$ref":"#/$defs/d"}`}[r.IntN(5)]
		}
		sub := func() string { return generate(depth + 1) }
		n := func() int { return r.IntN(4) }
		keywords := map[string]func() string{
			"type": func() string {
				return []string{`"object"`, `"array"`, `["string","integer"]`, `"number"`, `["null","object"]`}[r.IntN(5)]
			},
			"enum":       func() string { return []string{`[1,"abc"]`, `[{},[]]`, `[null,{"a":1},7]`}[r.IntN(3)] },
			"const":      func() string { return []string{`7.0`, `{"a":1}`, `"abc"`}[r.IntN(3)] },
			"minLength":  func() string { return fmt.Sprint(n()) },
			"maxItems":   func() string { return fmt.Sprint(n()) },
			"minItems":   func() string { return fmt.Sprint(n()) },
			"minimum":    func() string { return fmt.Sprint(n()) },
			"multipleOf": func() string { return fmt.Sprint(n()+1, "e-1") },
			"properties": func() string { return fmt.Sprintf(`{"a":%s,"b":%s}`, sub(), sub()) },
			"patternProperties": func() string {
				return fmt.Sprintf(`{"^a":%s,"c":%s}`, sub(), sub())
			},
			"additionalProperties": sub, "propertyNames": sub, "items": sub, "contains": sub, "not": sub, "if": sub, "then": sub, "else": sub,
			"prefixItems":      func() string { return "[" + sub() + "," + sub() + "]" },
			"allOf":            func() string { return "[" + sub() + "," + sub() + "]" },
			"anyOf":            func() string { return "[" + sub() + "," + sub() + "]" },
			"oneOf":            func() string { return "[" + sub() + "," + sub() + "]" },
			"required":         func() string { return []string{`["a"]`, `["a","b"]`, `[]`}[r.IntN(3)] },
			"uniqueItems":      func() string { return "true" },
			"minContains":      func() string { return fmt.Sprint(n()) },
			"dependentSchemas": func() string { return fmt.Sprintf(`{"a":%s}`, sub()) },
		}
		names := slices.Sorted(maps.Keys(keywords))
		r.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
		var members []string
		for _, name := range names[:1+r.IntN(4)] {
			members = append(members, fmt.Sprintf(`%q:%s`, name, strings.ReplaceAll(keywords[name](), " e", "e")))
		}
		if depth == 0 {
			members = append(members, `"$defs":{"d":`+generate(2)+`}`)
		}
		return "{" + strings.Join(members, ",") + "}"
	}
	read := 0
	for range 600 {
		if compare(t, generate(0)) {
			read++
		}
	}
	if read < 200 {
		t.Errorf("only %d schemas could be read: the comparison says little", read)
	}
}

func FuzzRead(f *testing.F) {
	f.Add([]byte(everything(f).JSONSchema()))
	for _, seed := range schemas {
		f.Add([]byte(seed))
	}
	for _, seed := range []string{
		`{"$ref":"#"}`, `{"allOf":[{"$ref":"#/allOf/0"}]}`, `{"$ref":"file:///etc/passwd"}`, `{"$dynamicRef":"#a","$dynamicAnchor":"a"}`,
		`{"unevaluatedProperties":false}`, `{"multipleOf":0}`, `{"minimum":1e308,"$schema":"x"}`, `{"a":1,"a":2}`, `{"type":[]}`, `{"$anchor":"1"}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		s, err := schema.Read(in)
		if err != nil {
			return
		}
		if string(s.JSONSchema()) != string(in) {
			t.Errorf("JSONSchema() = %s, want what was read, %s", s.JSONSchema(), in)
		}
		compare(t, string(in))
		for _, config := range configs {
			if err := s.Check(json.RawMessage(config)); err != nil && errs.CodeOf(err) != errs.InvalidConfig {
				t.Errorf("Check(%s) by %s = %v, want invalid-config", config, in, err)
			}
			s.SecretRefs(json.RawMessage(config))
		}
	})
}

func FuzzCheck(f *testing.F) {
	for _, tt := range cases {
		f.Add([]byte(tt.in))
	}
	f.Add([]byte(`{"address":"https://a","credentials":"s","retries":1e-1,"retries":2}`))
	built := everything(f)
	read, err := schema.Read(built.JSONSchema())
	if err != nil {
		f.Fatal(err)
	}
	other := judge(f, built.JSONSchema())
	f.Fuzz(func(t *testing.T, in []byte) {
		a, b := built.Check(in), read.Check(in)
		if (a == nil) != (b == nil) {
			t.Fatalf("Check(%q) = %v, of the schema that was read %v", in, a, b)
		}
		if a != nil && errs.CodeOf(a) != errs.InvalidConfig {
			t.Errorf("Check(%q) = %v, want invalid-config", in, a)
		}
		if doc, err := jsonschema.UnmarshalJSON(strings.NewReader(string(in))); err == nil && a == nil && other.Validate(doc) != nil {
			t.Errorf("Check(%q) = nil, the library %v", in, other.Validate(doc))
		}
		full, err := built.Complete(in)
		if (err == nil) != (a == nil) {
			t.Fatalf("Complete(%q) = %v, Check %v", in, err, a)
		}
		if err == nil {
			if err := built.Check(full); err != nil {
				t.Errorf("Check(%s), completed from %q, = %v", full, in, err)
			}
			var into struct {
				Timeout time.Duration `json:"timeout"`
				Slots   int64         `json:"slots"`
				Fans    []int64       `json:"fans"`
			}
			if err := built.Parse(in, &into); err != nil {
				t.Errorf("Parse(%q) = %v", in, err)
			}
		}
	})
}
