package invoke_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/invoke"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/invocation"
	"github.com/better-compute/site-appliance/plugins/host"
)

// fake is a plugin host that remembers what it was asked.
type fake struct {
	drivers []driver.Manifest
	calls   []host.Call
	answer  string
	err     error
}

func (f *fake) Drivers() []driver.Manifest { return f.drivers }
func (f *fake) Invoke(_ context.Context, c host.Call) (json.RawMessage, error) {
	f.calls = append(f.calls, c)
	if c.Progress != nil {
		c.Progress("power", "setting", 1, 2)
	}
	return json.RawMessage(f.answer), f.err
}

// acme takes an address, a marked credential, a marked token and a level.
const acme = `{"$schema":"https://json-schema.org/draft/2020-12/schema","type":"object","additionalProperties":false,"required":["address"],
	"properties":{"address":{"type":"string"},"level":{"type":"string","enum":["low","high"]},"mirror":{"type":"string"},"tlsSpkiSha256":{"type":"string"},
	"credentials":{"type":"string","x-bc":{"kind":"secret"},"writeOnly":true},"token":{"type":"string","writeOnly":true},
	"nested":{"type":"object","properties":{"key":{"type":"string","writeOnly":true}}}}}`

func newFake() *fake {
	return &fake{answer: `"on"`, drivers: []driver.Manifest{
		{ID: "acme", Version: "1.0.0", Kinds: []string{"power", "bios", "console"}, RunsOn: "site", ConfigSchema: json.RawMessage(acme),
			RetrySafe: []string{"power.getPower"}, StreamOperations: []string{"console.open"}},
		{ID: "loose", Version: "1.0.0", Kinds: []string{"power"}, RunsOn: "site"},
	}}
}

// call is a signed command as a test changes it.
type call struct {
	request invocation.Request
	payload *agentv1.CommandPayload
	raw     []byte
	secrets map[string]string
}

func get() *call {
	return &call{
		request: invocation.Request{WorkflowID: "wf_1", StepID: "main.0", Attempt: 1, TargetNodeID: "node_1", Concern: "power", Operation: "getPower", Driver: "acme", Config: json.RawMessage(`{"address":"10.0.0.5"}`)},
		payload: &agentv1.CommandPayload{CommandId: "wf_1.main.0.1", WorkflowId: "wf_1", StepId: "main.0", Attempt: 1, TargetNodeId: "node_1", Traceparent: "00-trace"},
		secrets: map[string]string{"secret://t/bmc": `{"username":"root","password":"hunter22"}`, "secret://t/token": "tok-en", "secret://t/other": `{"username":"x","password":"y"}`},
	}
}

// run admits and runs the command as dispatch does.
func (c *call) run(t *testing.T, k dispatch.Kind) (string, error) {
	t.Helper()
	raw := c.raw
	if raw == nil {
		var err error
		if raw, err = invocation.Encode(c.request); err != nil {
			t.Fatal(err)
		}
	}
	op, err := k.Decode(raw)
	if err != nil {
		return "", err
	}
	if op, err = k.Check(c.payload, op); err != nil {
		return "", err
	}
	result, err := k.Run(t.Context(), dispatch.Call{
		Payload: c.payload, Operation: op, Deadline: time.Unix(1_900_000_000, 0), Progress: func(string, string, uint64, uint64) {},
		Secrets: func(_ context.Context, refs ...string) (map[string]secret.Value, error) {
			out := map[string]secret.Value{}
			for _, ref := range refs {
				if !slices.Contains(c.payload.SecretRefs, ref) {
					return nil, errs.New(errs.CredentialsUnavailable, "the command does not list %q", ref)
				}
				out[ref] = secret.New([]byte(c.secrets[ref]))
			}
			return out, nil
		},
	})
	return string(result), err
}

func names(m map[string]secret.Value) []string { return slices.Sorted(maps.Keys(m)) }

func TestInvoke(t *testing.T) {
	f := newFake()
	c := get()
	c.request.Args = json.RawMessage(`[{"a":1}]`)
	c.request.Config = json.RawMessage(`{"address":"10.0.0.5","level":"low"}`)
	if result, err := c.run(t, invoke.New(invoke.Options{Host: f})); err != nil || result != `"on"` {
		t.Fatalf("run = %s, %v, want \"on\"", result, err)
	}
	got := f.calls[0]
	if got.Driver != "acme" || got.Kind != "power" || got.Operation != "getPower" || string(got.Args) != `[{"a":1}]` || string(got.Config) != `{"address":"10.0.0.5","level":"low"}` ||
		got.IdempotencyKey != "wf_1.main.0.1" || got.Traceparent != "00-trace" || got.TargetNodeID != "node_1" || !got.Deadline.Equal(time.Unix(1_900_000_000, 0)) || got.Progress == nil || len(got.Secrets) != 0 {
		t.Errorf("call = %+v", got)
	}
}

func TestKind(t *testing.T) {
	k := invoke.New(invoke.Options{Host: newFake()})
	if k.Name != "driver.invoke" || k.Lane != "provision" || len(k.Roles) != 3 {
		t.Errorf("kind = %s in lane %s for %v", k.Name, k.Lane, k.Roles)
	}
	for name, tt := range map[string]struct {
		operation, args string
		driver          string
		counts, safe    bool
	}{
		"a query":                     {"power.getPower", "", "acme", false, true},
		"a query of an unknown one":   {"power.getPower", "", "other", false, false},
		"power on":                    {"power.setPower", `["on"]`, "acme", false, false},
		"power on, the single one":    {"power.setPower", `"on"`, "acme", false, false},
		"power off":                   {"power.setPower", `["off"]`, "acme", true, false},
		"power on and something more": {"power.setPower", `["on","off"]`, "acme", true, false},
		"power of what":               {"power.setPower", "", "acme", true, false},
		"a write":                     {"bios.applySettings", "{}", "acme", true, false},
		"nobody classified it":        {"fan.get", "", "acme", true, false},
	} {
		c := get()
		c.request.Concern, c.request.Operation, _ = strings.Cut(tt.operation, ".")
		c.request.Driver, c.request.Args = tt.driver, json.RawMessage(tt.args)
		raw, err := invocation.Encode(c.request)
		if err != nil {
			t.Fatal(err)
		}
		op, err := k.Decode(raw)
		if err != nil || !op.Destructive || op.Counts != tt.counts || op.RetrySafe != tt.safe || op.Name != tt.operation {
			t.Errorf("%s: Decode = %+v, %v, want destructive, counts %t, retry-safe %t", name, op, err, tt.counts, tt.safe)
		}
		verdict := k.Recover(t.Context(), dispatch.Call{Operation: op})
		if want := map[bool]dispatch.Verdict{true: dispatch.Rerun(), false: dispatch.Interrupted()}[tt.safe]; verdict.String() != want.String() {
			t.Errorf("%s: Recover = %s, want %s", name, verdict, want)
		}
	}
}

// TestInvokeEnvelope: what the invocation says of step and machine is what was signed.
func TestInvokeEnvelope(t *testing.T) {
	for name, tt := range map[string]struct {
		edit func(*call)
		ok   bool
	}{
		"the same":         {func(*call) {}, true},
		"no target":        {func(c *call) { c.request.TargetNodeID, c.payload.TargetNodeId = "", "" }, true},
		"workflow":         {func(c *call) { c.payload.WorkflowId = "wf_2" }, false},
		"step":             {func(c *call) { c.payload.StepId = "main.1" }, false},
		"attempt":          {func(c *call) { c.payload.Attempt = 0 }, false},
		"target":           {func(c *call) { c.payload.TargetNodeId = "node_2" }, false},
		"target left out":  {func(c *call) { c.request.TargetNodeID = "" }, false},
		"target added":     {func(c *call) { c.payload.TargetNodeId = "" }, false},
		"no invocation":    {func(c *call) { c.raw = []byte("{}") }, false},
		"an unknown field": {func(c *call) { c.raw = []byte(`{"x":1}`) }, false},
	} {
		f, c := newFake(), get()
		tt.edit(c)
		_, err := c.run(t, invoke.New(invoke.Options{Host: f}))
		if (err == nil) != tt.ok || err != nil && errs.CodeOf(err) != errs.InvalidPayload || tt.ok != (len(f.calls) == 1) {
			t.Errorf("%s: %v and %d calls, want ok %t", name, err, len(f.calls), tt.ok)
		}
	}
}

// TestInvokeQueues: one command per machine at a time.
func TestInvokeQueues(t *testing.T) {
	k := invoke.New(invoke.Options{Host: newFake()})
	keys := map[string]string{}
	for _, node := range []string{"node_1", "node_2", ""} {
		c := get()
		c.request.TargetNodeID, c.payload.TargetNodeId = node, node
		raw, _ := invocation.Encode(c.request)
		op, err := k.Decode(raw)
		if err == nil {
			op, err = k.Check(c.payload, op)
		}
		if err != nil || op.Key == "" {
			t.Fatalf("Check = %+v, %v", op, err)
		}
		if other, taken := keys[op.Key]; taken {
			t.Errorf("%q and %q share the queue %q", node, other, op.Key)
		}
		keys[op.Key] = node
	}
}

func TestInvokeUnsupportedDriver(t *testing.T) {
	for name, tt := range map[string]struct {
		edit func(*call)
		none bool
		code errs.Code
		text string
	}{
		"hosted":          {func(*call) {}, false, "", ""},
		"another driver":  {func(c *call) { c.request.Driver = "ipmi" }, false, errs.UnsupportedDriver, "no hosted driver ipmi implements power"},
		"another concern": {func(c *call) { c.request.Concern, c.request.Operation = "raid", "getLayout" }, false, errs.UnsupportedDriver, "no hosted driver acme implements raid"},
		"no host at all":  {func(*call) {}, true, errs.UnsupportedDriver, "no hosted driver acme implements power"},
		"a stream":        {func(c *call) { c.request.Concern, c.request.Operation = "console", "open" }, false, errs.UnsupportedOperation, "is a stream"},
	} {
		f, c := newFake(), get()
		tt.edit(c)
		o := invoke.Options{Host: f}
		if tt.none {
			o.Host = nil
		}
		_, err := c.run(t, invoke.New(o))
		if errs.CodeOf(err) != tt.code || err != nil && !strings.Contains(err.Error(), tt.text) || len(f.calls) != map[bool]int{true: 1}[tt.code == ""] {
			t.Errorf("%s: %v and %d calls, want %q with %q", name, err, len(f.calls), tt.code, tt.text)
		}
	}
}

func TestInvokeChecksConfiguration(t *testing.T) {
	for config, ok := range map[string]bool{
		`{"address":"10.0.0.5"}`: true, `{ "level": "low", "address": "10.0.0.5" }`: true,
		"": false, `{}`: false, `{"address":5}`: false, `{"address":"10.0.0.5","level":"middle"}`: false, `{"address":"10.0.0.5","more":1}`: false,
	} {
		f, c := newFake(), get()
		c.request.Config = json.RawMessage(config)
		_, err := c.run(t, invoke.New(invoke.Options{Host: f}))
		if (err == nil) != ok || err != nil && errs.CodeOf(err) != errs.InvalidConfig || ok != (len(f.calls) == 1) {
			t.Errorf("config %s: %v and %d calls, want ok %t", config, err, len(f.calls), ok)
		}
		// The host passes on what it got, without defaults and in its own order.
		var compact strings.Builder
		if ok {
			compact.WriteString(strings.ReplaceAll(config, " ", ""))
			if got := string(f.calls[0].Config); got != compact.String() {
				t.Errorf("config %s arrives as %s", config, got)
			}
		}
	}
	// Without a schema the driver alone judges.
	f, c := newFake(), get()
	c.request.Driver, c.request.Config = "loose", nil
	if _, err := c.run(t, invoke.New(invoke.Options{Host: f})); err != nil || string(f.calls[0].Config) != "{}" {
		t.Errorf("no schema: %v", err)
	}
}

func TestInvokeUnreadableSchema(t *testing.T) {
	f := newFake()
	f.drivers[0].ConfigSchema = json.RawMessage(`{"$ref":"https://elsewhere.example/schema"}`)
	if _, err := get().run(t, invoke.New(invoke.Options{Host: f, Log: slog.New(slog.DiscardHandler)})); errs.CodeOf(err) != errs.UnsupportedDriver {
		t.Errorf("driver with an unreadable schema: %v, want unsupported-driver", err)
	}
	c := get()
	c.request.Driver = "loose"
	if _, err := c.run(t, invoke.New(invoke.Options{Host: f, Log: slog.New(slog.DiscardHandler)})); err != nil {
		t.Errorf("another driver beside it: %v", err)
	}
}

func TestInvokeSecrets(t *testing.T) {
	const bmc, token = "secret://t/bmc", "secret://t/token"
	for name, tt := range map[string]struct {
		driver, config string
		refs           []string
		want           []string
		code           errs.Code
	}{
		"none":                           {"acme", `{"address":"10.0.0.5"}`, nil, nil, ""},
		"marked":                         {"acme", `{"address":"10.0.0.5","token":"secret://t/token"}`, []string{token}, []string{token}, ""},
		"a credential":                   {"acme", `{"address":"10.0.0.5","credentials":"secret://t/bmc"}`, []string{bmc}, []string{"password", bmc, "username"}, ""},
		"a credential that is a token":   {"acme", `{"address":"10.0.0.5","credentials":"secret://t/token"}`, []string{token}, []string{token}, ""},
		"a credential of no schema":      {"loose", `{"credentials":"secret://t/bmc"}`, []string{bmc}, []string{"password", "username"}, ""},
		"such a one that is a token":     {"loose", `{"credentials":"secret://t/token"}`, []string{token}, nil, errs.CredentialsUnavailable},
		"not listed":                     {"acme", `{"address":"10.0.0.5","token":"secret://t/token"}`, []string{bmc}, nil, errs.CredentialsUnavailable},
		"no reference":                   {"acme", `{"address":"10.0.0.5","token":"plain"}`, nil, nil, ""},
		"a field that nobody marked":     {"acme", `{"address":"10.0.0.5","mirror":"secret://t/token"}`, []string{token}, nil, ""},
		"marked, but not at the top":     {"acme", `{"address":"10.0.0.5","nested":{"key":"secret://t/token"}}`, []string{token}, nil, ""},
		"listed, but not in its fields":  {"acme", `{"address":"10.0.0.5"}`, []string{bmc, token}, nil, ""},
		"both, and each for what it is":  {"acme", `{"address":"10.0.0.5","credentials":"secret://t/bmc","token":"secret://t/token"}`, []string{bmc, token}, []string{"password", bmc, token, "username"}, ""},
		"both in one, listed once":       {"acme", `{"address":"10.0.0.5","credentials":"secret://t/bmc","token":"secret://t/bmc"}`, []string{bmc}, []string{"password", bmc, "username"}, ""},
		"a driver without a schema's of": {"loose", `{"token":"secret://t/token"}`, []string{token}, nil, ""},
	} {
		f, c := newFake(), get()
		c.request.Driver, c.request.Config, c.payload.SecretRefs = tt.driver, json.RawMessage(tt.config), tt.refs
		_, err := c.run(t, invoke.New(invoke.Options{Host: f}))
		if errs.CodeOf(err) != tt.code {
			t.Errorf("%s: %v, want code %q", name, err, tt.code)
			continue
		}
		if tt.code != "" {
			if len(f.calls) != 0 {
				t.Errorf("%s: the driver was invoked", name)
			}
			continue
		}
		if got := names(f.calls[0].Secrets); !slices.Equal(got, tt.want) {
			t.Errorf("%s: delivered %v, want %v", name, got, tt.want)
		}
		for name, v := range f.calls[0].Secrets {
			if strings.Contains(string(f.calls[0].Config)+string(f.calls[0].Args), string(v.Reveal())) {
				t.Errorf("the secret %s stands in the configuration or the arguments", name)
			}
		}
		if p := f.calls[0].Secrets["password"]; !p.Empty() && string(p.Reveal()) != "hunter22" {
			t.Errorf("%s: another password", name)
		}
	}
}

// TestInvokeKeepsToTheAddressBook: driver.invoke is no way to send a BMC another
// credential than its own.
func TestInvokeKeepsToTheAddressBook(t *testing.T) {
	const bmc, other = `"secret://t/bmc"`, `"secret://t/other"`
	for name, tt := range map[string]struct {
		driver, config, args string
		code                 errs.Code
	}{
		"its own":                       {"acme", `{"address":"10.0.0.5","credentials":` + bmc + `}`, "", ""},
		"its own, as a URL":             {"acme", `{"address":"https://10.0.0.5/redfish/v1","credentials":` + bmc + `}`, "", ""},
		"another":                       {"acme", `{"address":"10.0.0.5","credentials":` + other + `}`, "", errs.BindingMismatch},
		"another, as a URL":             {"acme", `{"address":"https://10.0.0.5/x","credentials":` + other + `}`, "", errs.BindingMismatch},
		"its own and one more":          {"acme", `{"address":"10.0.0.5","credentials":` + bmc + `,"token":"secret://t/token"}`, "", errs.BindingMismatch},
		"another secret":                {"acme", `{"address":"10.0.0.5","token":"secret://t/token"}`, "", errs.BindingMismatch},
		"no secret":                     {"acme", `{"address":"10.0.0.5"}`, "", ""},
		"another driver":                {"loose", `{"address":"10.0.0.5","credentials":` + bmc + `}`, "", errs.BindingMismatch},
		"a pin":                         {"acme", `{"address":"10.0.0.5","credentials":` + bmc + `,"tlsSpkiSha256":"aa"}`, "", errs.BindingMismatch},
		"under another name":            {"acme", `{"address":"10.9.9.9","mirror":"https://x@10.0.0.5:443/y","credentials":` + other + `}`, "", errs.BindingMismatch},
		"under another name, its own":   {"acme", `{"address":"10.9.9.9","mirror":"https://10.0.0.5/y","credentials":` + bmc + `}`, "", ""},
		"in the arguments":              {"acme", `{"address":"10.9.9.9","credentials":` + other + `}`, `[{"to":["10.0.0.5"]}]`, errs.BindingMismatch},
		"in a list under no schema":     {"loose", `{"hosts":["10.0.0.5"],"credentials":` + other + `}`, "", errs.BindingMismatch},
		"an address in a list":          {"loose", `{"address":["10.0.0.5"],"credentials":` + other + `}`, "", errs.BindingMismatch},
		"as the name of a field":        {"loose", `{"hosts":{"10.0.0.5":{}},"credentials":` + other + `}`, "", errs.BindingMismatch},
		"written otherwise":             {"acme", `{"address":"10.9.9.9","mirror":"https://0xa.5/","credentials":` + other + `}`, "", errs.BindingMismatch},
		"its own, without its pin":      {"acme", `{"address":"10.9.9.9","mirror":"https://10.0.0.7/","credentials":` + bmc + `}`, "", errs.BindingMismatch},
		"its own, with its pin":         {"acme", `{"address":"10.9.9.9","tlsSpkiSha256":"AA","mirror":"https://10.0.0.7/","credentials":` + bmc + `}`, "", ""},
		"a port that nobody tells":      {"acme", `{"address":"10.0.0.8","credentials":` + other + `}`, "", errs.BindingMismatch},
		"an Address in another case":    {"loose", `{"Address":"10.0.0.5","credentials":` + other + `}`, "", errs.BindingMismatch},
		"a new address":                 {"acme", `{"address":"10.0.0.6","credentials":` + other + `}`, "", ""},
		"another port of the same host": {"acme", `{"address":"10.0.0.5:8443","credentials":` + other + `}`, "", ""},
		"no address at all":             {"acme", `{"address":"???","credentials":` + other + `}`, "", errs.InvalidAddress},
	} {
		book, err := addressbook.Open("")
		if err != nil {
			t.Fatal(err)
		}
		for _, known := range []struct{ address, pin, driver string }{{"10.0.0.5", "", "acme"}, {"10.0.0.7", "aa", "acme"}, {"10.0.0.8", "", "ipmi"}} {
			if _, err := book.Bind(known.address, known.pin, "secret://t/bmc", known.driver); err != nil {
				t.Fatal(err)
			}
		}
		f, c := newFake(), get()
		c.request.Driver, c.request.Config, c.request.Args = tt.driver, json.RawMessage(tt.config), json.RawMessage(tt.args)
		c.payload.SecretRefs = []string{"secret://t/bmc", "secret://t/other", "secret://t/token"}
		_, err = c.run(t, invoke.New(invoke.Options{Host: f, Book: book}))
		if errs.CodeOf(err) != tt.code || len(f.calls) != map[bool]int{true: 1}[tt.code == ""] {
			t.Errorf("%s: %v and %d calls, want code %q", name, err, len(f.calls), tt.code)
		}
	}
}

// TestInvokeTeachesTheAddressBook: a first use binds, and one that sent nothing
// is forgotten.
func TestInvokeTeachesTheAddressBook(t *testing.T) {
	for name, tt := range map[string]struct {
		err   error
		bound bool
	}{
		"it worked":          {nil, true},
		"the BMC refused":    {errs.New(errs.BmcError, "x"), true},
		"no answer":          {errs.Retry(errs.Unreachable, "x"), true},
		"wrong arguments":    {errs.New(errs.InvalidArgs, "x"), false},
		"the plugin was off": {errs.Retry(errs.Unavailable, "x"), false},
	} {
		book, err := addressbook.Open("")
		if err != nil {
			t.Fatal(err)
		}
		f, c := newFake(), get()
		f.err = tt.err
		c.request.Config, c.payload.SecretRefs = json.RawMessage(`{"address":"10.0.0.5","credentials":"secret://t/bmc"}`), []string{"secret://t/bmc"}
		if _, err := c.run(t, invoke.New(invoke.Options{Host: f, Book: book})); errs.CodeOf(err) != errs.CodeOf(tt.err) {
			t.Errorf("%s: %v, want %v", name, err, tt.err)
		}
		if got := book.Has("10.0.0.5"); got != tt.bound {
			t.Errorf("%s: bound %t, want %t", name, got, tt.bound)
		}
		if tt.bound {
			if err := book.Check("10.0.0.5", "", "secret://t/other", "acme"); errs.CodeOf(err) != errs.BindingMismatch {
				t.Errorf("%s: another credential afterwards: %v, want binding-mismatch", name, err)
			}
		}
	}
}

func TestInvokeErrors(t *testing.T) {
	for name, tt := range map[string]struct {
		answer    string
		err       error
		code      errs.Code
		retryable bool
	}{
		"a value":                   {`{"a":1}`, nil, "", false},
		"nothing":                   {"null", nil, "", false},
		"not JSON":                  {"on", nil, errs.DriverError, false},
		"not UTF-8":                 {"\"\xff\"", nil, errs.DriverError, false},
		"empty":                     {"", nil, errs.DriverError, false},
		"a code of its own":         {"", errs.New("fan-broken", "x"), "fan-broken", false},
		"and a flag of its own":     {"", errs.Retry("fan-slow", "x"), "fan-slow", true},
		"an error without any code": {"", errors.New("x"), errs.Internal, false},
	} {
		f := newFake()
		f.answer, f.err = tt.answer, tt.err
		_, err := get().run(t, invoke.New(invoke.Options{Host: f}))
		e := errs.From(err)
		if errs.CodeOf(err) != tt.code || e != nil && e.Retryable != tt.retryable {
			t.Errorf("%s: %v, want code %q, retryable %t", name, err, tt.code, tt.retryable)
		}
	}
}

// TestSuspectBook: any field of a configuration may name a BMC whose protection was lost.
func TestSuspectBook(t *testing.T) {
	for _, damaged := range []bool{false, true} {
		path := filepath.Join(t.TempDir(), "book")
		if damaged {
			if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		book, _, err := addressbook.OpenOrSetAside(path)
		if err != nil {
			t.Fatal(err)
		}
		c, k := get(), invoke.New(invoke.Options{Host: newFake(), Book: book})
		c.request.Config, c.request.Operation, c.request.Args = json.RawMessage(`{"to":"rack 4"}`), "setPower", json.RawMessage(`["off"]`)
		raw, err := invocation.Encode(c.request)
		if err != nil {
			t.Fatal(err)
		}
		op, err := k.Decode(raw)
		if err == nil {
			op, err = k.Check(c.payload, op)
		}
		if err != nil || op.Always != damaged {
			t.Errorf("damaged %v: always needs a grant: %v, %v", damaged, op.Always, err)
		}
	}
}

// TestTargets: an invocation counts for the machine that it says and for every BMC
// that it can reach, or for its configuration where it names none.
func TestTargets(t *testing.T) {
	book, err := addressbook.Open("")
	if err != nil {
		t.Fatal(err)
	}
	for _, one := range []struct{ address, driver string }{{"10.0.0.7", "ipmi"}, {"10.0.0.8", "redfish"}} {
		if err := book.Rebind(one.address, "", "secret://t/bmc", one.driver, one.driver == "redfish"); err != nil {
			t.Fatal(err)
		}
	}
	options := invoke.Options{Host: newFake(), Book: book, Protected: func(id string) bool { return id == "node_p" }}
	site := invoke.New(options)
	options.MachineID = func() string { return "node_self" }
	node := invoke.New(options)
	digest := strings.Repeat("ab", 32)
	for name, tt := range map[string]struct {
		edit      func(r *invocation.Request)
		want      []string
		always    bool
		artifacts []string
		node      bool // the agent is a machine
	}{
		"another machine than itself": {edit: func(r *invocation.Request) {}, want: []string{"machine:node_1", "machine:node_self", "bmc:10.0.0.5:443"}, node: true},
		"address":                     {edit: func(r *invocation.Request) {}, want: []string{"machine:node_1", "bmc:10.0.0.5:443"}},
		"address as a URL": {edit: func(r *invocation.Request) { r.Config = json.RawMessage(`{"address":"https://10.0.0.5/redfish/v1?x"}`) },
			want: []string{"machine:node_1", "bmc:10.0.0.5:443"}},
		"the machine itself": {edit: func(r *invocation.Request) { r.TargetNodeID = "" }, want: []string{"machine:node_self", "bmc:10.0.0.5:443"}, node: true},
		"itself by its name": {edit: func(r *invocation.Request) { r.TargetNodeID = "node_self" }, want: []string{"machine:node_self", "bmc:10.0.0.5:443"}, node: true},
		"a known BMC elsewhere": {edit: func(r *invocation.Request) {
			r.Config = json.RawMessage(`{"address":"10.0.0.5","mirror":"https://10.0.0.7:623/x"}`)
		},
			want: []string{"machine:node_1", "bmc:10.0.0.5:443", "bmc:10.0.0.7:623"}},
		"a known BMC in the arguments": {edit: func(r *invocation.Request) { r.Args = json.RawMessage(`["off",{"to":["10.0.0.8"]}]`) },
			want: []string{"machine:node_1", "bmc:10.0.0.5:443", "bmc:10.0.0.8:443"}, always: true},
		"a known host at its driver's port": {edit: func(r *invocation.Request) { r.Config = json.RawMessage(`{"address":"10.0.0.7"}`) },
			want: []string{"machine:node_1", "bmc:10.0.0.7:443"}},
		"no address": {edit: func(r *invocation.Request) { r.Config = json.RawMessage(`{"host":"ten"}`) },
			want: []string{"machine:node_1", "config:1c4ae800a183f12a"}},
		"no configuration":    {edit: func(r *invocation.Request) { r.Config = nil }, want: []string{"machine:node_1"}},
		"a protected machine": {edit: func(r *invocation.Request) { r.TargetNodeID = "node_p" }, want: []string{"machine:node_p", "bmc:10.0.0.5:443"}, always: true},
		"firmware": {edit: func(r *invocation.Request) {
			r.Concern, r.Operation, r.Args = "firmware", "update", json.RawMessage(`[{"sha256":"`+digest+`"}]`)
		}, want: []string{"machine:node_1", "bmc:10.0.0.5:443"}, always: true, artifacts: []string{digest}},
		"a layout": {edit: func(r *invocation.Request) { r.Concern, r.Operation = "raid", "applyLayout" }, want: []string{"machine:node_1", "bmc:10.0.0.5:443"}, always: true},
	} {
		c, k := get(), site
		if tt.node {
			k = node
		}
		c.request.Operation, c.request.Args = "setPower", json.RawMessage(`["off"]`)
		tt.edit(&c.request)
		c.payload.TargetNodeId = c.request.TargetNodeID
		raw, err := invocation.Encode(c.request)
		if err != nil {
			t.Fatal(err)
		}
		op, err := k.Decode(raw)
		if err == nil {
			op, err = k.Check(c.payload, op)
		}
		wantAction := ""
		if c.request.Name() == "power.setPower" && string(c.request.Args) == `["off"]` {
			wantAction = "off"
		}
		if err != nil || !slices.Equal(op.Targets, tt.want) || op.Always != tt.always || !slices.Equal(op.Artifacts, tt.artifacts) || op.Action != wantAction {
			t.Errorf("%s: targets %v, always %v, artifacts %v, action %q, %v; want %v, %v, %v, %q", name, op.Targets, op.Always, op.Artifacts, op.Action, err, tt.want, tt.always, tt.artifacts, wantAction)
		}
	}
}
