package invocation

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

func request() Request {
	return Request{WorkflowID: "wf_1", StepID: "main.3", TargetNodeID: "node_1", Concern: "bios", Operation: "applySettings",
		Args: json.RawMessage(`{"a":"<b>"}`), Driver: "acme-bmc"}
}

func TestEncode(t *testing.T) {
	for name, tt := range map[string]struct {
		edit func(*Request)
		want string
	}{
		"towards a site": {func(*Request) {}, `{"workflowId":"wf_1","stepId":"main.3","attempt":0,"targetNodeId":"node_1","args":{"concern":"bios","operation":"applySettings","args":{"a":"<b>"},"driver":"acme-bmc"}}`},
		"to the machine": {func(r *Request) { r.TargetNodeID, r.Attempt = "", 2 }, `{"workflowId":"wf_1","stepId":"main.3","attempt":2,"args":{"concern":"bios","operation":"applySettings","args":{"a":"<b>"},"driver":"acme-bmc"}}`},
		"no arguments, a configuration": {func(r *Request) { r.Args, r.Config = nil, json.RawMessage(`{"x":1}`) },
			`{"workflowId":"wf_1","stepId":"main.3","attempt":0,"targetNodeId":"node_1","args":{"concern":"bios","operation":"applySettings","driver":"acme-bmc","config":{"x":1}}}`},
	} {
		r := request()
		tt.edit(&r)
		data, err := Encode(r)
		if err != nil || string(data) != tt.want {
			t.Errorf("%s: Encode(%+v) = %s, %v, want %s", name, r, data, err, tt.want)
		}
		if got, err := Parse(data); err != nil || !reflect.DeepEqual(got, r) {
			t.Errorf("%s: Parse(Encode(%+v)) = %+v, %v", name, r, got, err)
		}
	}
}

func TestCheck(t *testing.T) {
	for name, tt := range map[string]struct {
		edit func(*Request)
		ok   bool
	}{
		"good":                    {func(*Request) {}, true},
		"no target":               {func(r *Request) { r.TargetNodeID = "" }, true},
		"no workflow":             {func(r *Request) { r.WorkflowID = "" }, false},
		"no step":                 {func(r *Request) { r.StepID = "" }, false},
		"odd target":              {func(r *Request) { r.TargetNodeID = "../x" }, false},
		"long step":               {func(r *Request) { r.StepID = strings.Repeat("a", 129) }, false},
		"no concern":              {func(r *Request) { r.Concern = "" }, false},
		"concern with a dot":      {func(r *Request) { r.Concern = "a.b" }, false},
		"operation with a dot":    {func(r *Request) { r.Operation = "a.b" }, false},
		"no driver":               {func(r *Request) { r.Driver = "" }, false},
		"the longest driver id":   {func(r *Request) { r.Driver = "a" + strings.Repeat("b", 63) }, true},
		"a longer one":            {func(r *Request) { r.Driver = "a" + strings.Repeat("b", 64) }, false},
		"driver of a digit first": {func(r *Request) { r.Driver = "9acme" }, false},
		"driver with a slash":     {func(r *Request) { r.Driver = "../x" }, false},
		"arguments":               {func(r *Request) { r.Args = json.RawMessage(`[1,null]`) }, true},
		"arguments that are none": {func(r *Request) { r.Args = json.RawMessage(`[1`) }, false},
		"a name twice":            {func(r *Request) { r.Args = json.RawMessage(`[{"a":1,"a":2}]`) }, false},
		"a name in two objects":   {func(r *Request) { r.Args = json.RawMessage(`[{"a":1},{"a":{"a":2}}]`) }, true},
		"a value like a name":     {func(r *Request) { r.Args = json.RawMessage(`{"a":"a","b":["a","a"],"c":"a"}`) }, true},
		"an empty configuration":  {func(r *Request) { r.Config = json.RawMessage(` {} `) }, true},
		"null for an object":      {func(r *Request) { r.Config = json.RawMessage(`null`) }, false},
		"a list for an object":    {func(r *Request) { r.Config = json.RawMessage(`[]`) }, false},
		"an address twice":        {func(r *Request) { r.Config = json.RawMessage(`{"address":"a","address":"b"}`) }, false},
		"deep":                    {func(r *Request) { r.Args = json.RawMessage(strings.Repeat("[", 64) + strings.Repeat("]", 64)) }, true},
		"a rotation":              {func(r *Request) { r.Concern, r.Operation = "credentials", "rotate" }, false},
		"a word of its own":       {func(r *Request) { r.Concern, r.Operation = "credentials", "list" }, true},
		"too deep":                {func(r *Request) { r.Args = json.RawMessage(strings.Repeat("[", 65) + strings.Repeat("]", 65)) }, false},
	} {
		r := request()
		tt.edit(&r)
		if err := r.Check(); (err == nil) != tt.ok || err != nil && errs.CodeOf(err) != errs.InvalidPayload {
			t.Errorf("%s: Check() = %v, want ok %t", name, err, tt.ok)
		}
		if _, err := Encode(r); (err == nil) != tt.ok {
			t.Errorf("%s: Encode() = %v, want ok %t", name, err, tt.ok)
		}
	}
}

func TestParse(t *testing.T) {
	good := `{"workflowId":"wf_1","stepId":"main.0","attempt":0,"args":{"concern":"power","operation":"getPower","driver":"acme"}}`
	for name, tt := range map[string]struct {
		in string
		ok bool
	}{
		"good":               {good, true},
		"nothing":            {"", false},
		"no object":          {"[]", false},
		"an unknown field":   {strings.Replace(good, `"attempt"`, `"x":1,"attempt"`, 1), false},
		"an unknown one in":  {strings.Replace(good, `"driver"`, `"x":1,"driver"`, 1), false},
		"another case":       {strings.Replace(good, "workflowId", "WorkflowId", 1), false},
		"a field twice":      {strings.Replace(good, `"attempt":0`, `"attempt":0,"attempt":0`, 1), false},
		"one twice within":   {strings.Replace(good, `"driver"`, `"driver":"x","driver"`, 1), false},
		"a field missing":    {strings.Replace(good, `"attempt":0,`, "", 1), false},
		"a null":             {strings.Replace(good, `"attempt":0`, `"attempt":null`, 1), false},
		"a wrong type":       {strings.Replace(good, `"attempt":0`, `"attempt":"0"`, 1), false},
		"a negative attempt": {strings.Replace(good, `"attempt":0`, `"attempt":-1`, 1), false},
		"an empty target":    {strings.Replace(good, `"args"`, `"targetNodeId":"","args"`, 1), false},
		"a target":           {strings.Replace(good, `"args"`, `"targetNodeId":"node_1","args"`, 1), true},
		"no args":            {`{"workflowId":"wf_1","stepId":"main.0","attempt":0}`, false},
		"something after":    {good + "{}", false},
		"space after":        {good + " \n", true},
		"cut":                {good[:len(good)-1], false},
		"too large":          {strings.Replace(good, `"driver"`, `"args":"`+strings.Repeat("x", MaxBytes)+`","driver"`, 1), false},
	} {
		if _, err := Parse([]byte(tt.in)); (err == nil) != tt.ok || err != nil && errs.CodeOf(err) != errs.InvalidPayload {
			t.Errorf("%s: Parse = %v, want ok %t", name, err, tt.ok)
		}
	}
}

func TestEncodeBounds(t *testing.T) {
	r := request()
	r.Args = json.RawMessage(`"` + strings.Repeat("x", MaxBytes) + `"`)
	if _, err := Encode(r); errs.CodeOf(err) != errs.InvalidPayload {
		t.Errorf("Encode(over 1 MiB) = %v, want invalid-payload", err)
	}
}

func TestSplit(t *testing.T) {
	for in, want := range map[string]bool{"power.getPower": true, "virtual-media.insert": true, "power": false, ".x": false, "power.": false, "a.b.c": false, "Power.on": false, "": false} {
		if _, _, ok := Split(in); ok != want {
			t.Errorf("Split(%q) = %t, want %t", in, ok, want)
		}
	}
}

func TestSecretRefs(t *testing.T) {
	for in, want := range map[string][]string{
		"": nil, "{}": nil, "[]": nil, `{"a":"x","b":1}`: nil,
		`{"b":"secret://t/b","a":"secret://t/a","c":"secret://t/a"}`: {"secret://t/a", "secret://t/b"},
		`{"options":{"a":"secret://t/a"},"list":["secret://t/b"]}`:   nil,
	} {
		if got := SecretRefs(json.RawMessage(in)); !slices.Equal(got, want) {
			t.Errorf("SecretRefs(%s) = %v, want %v", in, got, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		`{"workflowId":"wf_1","stepId":"main.3","attempt":0,"targetNodeId":"node_1","args":{"concern":"bios","operation":"applySettings","args":{"a":1},"driver":"acme-bmc"}}`,
		`{"workflowId":"w","stepId":"s","attempt":4294967295,"args":{"concern":"power","operation":"setPower","args":["off",null],"driver":"a","config":{"address":"10.0.0.5","credentials":"secret://t/n"}}}`,
		`{"args":{"args":{"args":[]}}}`, `{`, `null`, `{"attempt":1e3}`, `{"args":{"config":{"a":1,"a":2}}}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := Parse(data)
		if err != nil {
			if errs.CodeOf(err) != errs.InvalidPayload {
				t.Errorf("Parse(%q) = %v, want invalid-payload", data, err)
			}
			return
		}
		out, err := Encode(r)
		if err != nil {
			if len(data) < MaxBytes/2 {
				t.Errorf("Encode(Parse(%q)) = %v", data, err)
			}
			return
		}
		again, err := Parse(out)
		if err != nil || again.Name() != r.Name() || again.TargetNodeID != r.TargetNodeID || again.Attempt != r.Attempt {
			t.Errorf("Parse(Encode(%+v)) = %+v, %v", r, again, err)
		}
	})
}
