// Package invocation is the payload of driver.invoke: one operation of a driver
// as a workflow's step asks for it.
package invocation

import (
	"bytes"
	"encoding/json"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// Kind is the command kind that carries a Request.
const Kind = "driver.invoke"

// MaxBytes bounds an encoded request.
const MaxBytes = 1 << 20

const maxID = 128

// Request is what driver.invoke asks for. An agent takes it only where
// WorkflowID, StepID, Attempt and TargetNodeID are the signed envelope's.
type Request struct {
	WorkflowID string
	StepID     string
	Attempt    uint32
	// TargetNodeID is the machine's, for a site's agent; an agent that is the
	// machine itself gets none.
	TargetNodeID string
	// Concern is a driver kind, such as power, and Operation one of its operations.
	Concern, Operation string
	// Args is what the step says: an array holds the positional arguments, any
	// other value is the single argument, and nothing is none.
	Args json.RawMessage
	// Driver is the id of the driver that the profile binds to the concern.
	Driver string
	// Config is the binding's, a JSON object, or empty.
	Config json.RawMessage
}

// wire is a Request as it travels.
type wire struct {
	WorkflowID   string `json:"workflowId"`
	StepID       string `json:"stepId"`
	Attempt      uint32 `json:"attempt"`
	TargetNodeID string `json:"targetNodeId,omitempty"`
	Args         call   `json:"args"`
}

type call struct {
	Concern   string          `json:"concern"`
	Operation string          `json:"operation"`
	Args      json.RawMessage `json:"args,omitempty"`
	Driver    string          `json:"driver"`
	Config    json.RawMessage `json:"config,omitempty"`
}

var (
	operation = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9]{0,63}$`)
	id        = regexp.MustCompile(`^[A-Za-z0-9._-]+$`)
)

// Split takes "<concern>.<operation>" apart; ok is false for anything else.
func Split(name string) (concern, op string, ok bool) {
	concern, op, _ = strings.Cut(name, ".")
	return concern, op, driver.ValidKind(concern) && operation.MatchString(op)
}

// Name is "<concern>.<operation>".
func (r Request) Name() string { return r.Concern + "." + r.Operation }

// Check says what is wrong with a request, as invalid-payload. It never repeats
// arguments or configuration.
func (r Request) Check() error {
	bad := func(format string, args ...any) error { return errs.New(errs.InvalidPayload, format, args...) }
	for _, f := range []struct {
		name, value string
		optional    bool
	}{{"workflowId", r.WorkflowID, false}, {"stepId", r.StepID, false}, {"targetNodeId", r.TargetNodeID, true}} {
		if f.optional && f.value == "" {
			continue
		}
		if len(f.value) > maxID || !id.MatchString(f.value) {
			return bad("%s: want at most %d letters, digits, dots, hyphens and underscores", f.name, maxID)
		}
	}
	switch {
	case !driver.ValidKind(r.Concern):
		return bad("args.concern: want lower-case letters, digits and hyphens, a letter first")
	case !operation.MatchString(r.Operation):
		return bad("args.operation: want letters and digits, a letter first")
	case !driver.ValidID(r.Driver):
		return bad("args.driver: want lower-case letters, digits and hyphens, a letter first")
	case r.Concern+"."+r.Operation == "credentials.rotate":
		// Its new password would be signed and stored with the arguments.
		return bad("credentials.rotate does not travel as driver.invoke: a new password is a reference that bmc.rotate carries")
	case len(r.Args) > 0 && !json.Valid(r.Args):
		return bad("args.args is not JSON")
	case len(r.Config) > 0 && (!json.Valid(r.Config) || bytes.TrimSpace(r.Config)[0] != '{'):
		return bad("args.config is not a JSON object")
	case !unique(r.Args):
		return bad("args.args has an object with one name twice, or is too deep")
	case !unique(r.Config):
		return bad("args.config has an object with one name twice, or is too deep")
	}
	return nil
}

// maxDepth bounds how deep arguments and configuration are nested.
const maxDepth = 64

// unique reports whether no object of a valid JSON value has a name twice:
// readers differ in which of the two they take.
func unique(raw json.RawMessage) bool {
	dec := json.NewDecoder(bytes.NewReader(raw))
	var names []map[string]bool // of the objects that are open; nil for a list
	key := false                // the next token is a name
	for {
		token, err := dec.Token()
		if err != nil {
			return err == io.EOF
		}
		if name, ok := token.(string); ok && key {
			open := names[len(names)-1]
			if open[name] {
				return false
			}
			open[name] = true
			key = false
			continue
		}
		switch token {
		case json.Delim('{'):
			names = append(names, map[string]bool{})
		case json.Delim('['):
			names = append(names, nil)
		case json.Delim('}'), json.Delim(']'):
			names = names[:len(names)-1]
		}
		if len(names) > maxDepth {
			return false
		}
		key = len(names) > 0 && names[len(names)-1] != nil
	}
}

// Encode is the request's bytes: the same for the same request.
func Encode(r Request) ([]byte, error) {
	if err := r.Check(); err != nil {
		return nil, err
	}
	// Marshal would write < and & of arguments and configuration as escapes, which
	// means the same, but they are to arrive unchanged.
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	err := enc.Encode(wire{
		WorkflowID: r.WorkflowID, StepID: r.StepID, Attempt: r.Attempt, TargetNodeID: r.TargetNodeID,
		Args: call{Concern: r.Concern, Operation: r.Operation, Args: r.Args, Driver: r.Driver, Config: r.Config},
	})
	if err != nil {
		return nil, errs.New(errs.InvalidPayload, "encode the invocation: %v", err)
	}
	data := bytes.TrimSuffix(out.Bytes(), []byte("\n"))
	if len(data) > MaxBytes {
		return nil, errs.New(errs.InvalidPayload, "the invocation has %d bytes, more than %d", len(data), MaxBytes)
	}
	return data, nil
}

// Parse reads a request strictly: unknown, doubled and wrongly cased names are
// refused, since what was signed must mean one thing to everybody. The code is
// invalid-payload.
func Parse(data []byte) (Request, error) {
	if len(data) > MaxBytes {
		return Request{}, errs.New(errs.InvalidPayload, "the invocation has %d bytes, more than %d", len(data), MaxBytes)
	}
	top, err := fields(data, "the invocation", "workflowId", "stepId", "attempt", "targetNodeId", "args")
	if err != nil {
		return Request{}, err
	}
	args, err := fields(top["args"], "args", "concern", "operation", "args", "driver", "config")
	if err != nil {
		return Request{}, err
	}
	var r Request
	for _, f := range []struct {
		name string
		raw  json.RawMessage
		into any
	}{
		{"workflowId", top["workflowId"], &r.WorkflowID}, {"stepId", top["stepId"], &r.StepID},
		{"attempt", top["attempt"], &r.Attempt}, {"targetNodeId", top["targetNodeId"], &r.TargetNodeID},
		{"args.concern", args["concern"], &r.Concern}, {"args.operation", args["operation"], &r.Operation}, {"args.driver", args["driver"], &r.Driver},
	} {
		switch {
		case f.raw == nil && f.name == "targetNodeId":
		case f.raw == nil:
			return Request{}, errs.New(errs.InvalidPayload, "%s is missing", f.name)
		case string(f.raw) == "null" || json.Unmarshal(f.raw, f.into) != nil:
			return Request{}, errs.New(errs.InvalidPayload, "%s has the wrong type", f.name)
		}
	}
	if raw, given := top["targetNodeId"]; given && string(raw) == `""` {
		return Request{}, errs.New(errs.InvalidPayload, "targetNodeId is empty: it is left out instead")
	}
	r.Args, r.Config = args["args"], args["config"]
	if err := r.Check(); err != nil {
		return Request{}, err
	}
	return r, nil
}

// fields reads an object whose names are all known and stand once.
func fields(data []byte, what string, known ...string) (map[string]json.RawMessage, error) {
	if len(data) == 0 {
		return nil, errs.New(errs.InvalidPayload, "%s is missing", what)
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	open, err := dec.Token()
	if err != nil || open != json.Delim('{') {
		return nil, errs.New(errs.InvalidPayload, "%s is not a JSON object", what)
	}
	out := map[string]json.RawMessage{}
	for dec.More() {
		name, err := dec.Token()
		if err != nil {
			return nil, errs.New(errs.InvalidPayload, "%s is not JSON", what)
		}
		key, _ := name.(string)
		if !slices.Contains(known, key) {
			return nil, errs.New(errs.InvalidPayload, "%s has an unknown field: there are %s", what, strings.Join(known, ", "))
		}
		if _, twice := out[key]; twice {
			return nil, errs.New(errs.InvalidPayload, "%s has the field %s twice", what, key)
		}
		var value json.RawMessage
		if err := dec.Decode(&value); err != nil {
			return nil, errs.New(errs.InvalidPayload, "%s is not JSON", what)
		}
		out[key] = value
	}
	if _, err := dec.Token(); err != nil {
		return nil, errs.New(errs.InvalidPayload, "%s is not JSON", what)
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, errs.New(errs.InvalidPayload, "%s is followed by something else", what)
	}
	return out, nil
}

// SecretPrefix begins every reference to a secret.
const SecretPrefix = "secret://"

// SecretRefs are the references that a configuration's own fields hold, sorted,
// each once: an agent can resolve no others of it.
func SecretRefs(config json.RawMessage) []string {
	var top map[string]json.RawMessage
	if json.Unmarshal(config, &top) != nil {
		return nil
	}
	refs := map[string]bool{}
	for _, raw := range top {
		var text string
		if json.Unmarshal(raw, &text) == nil && strings.HasPrefix(text, SecretPrefix) {
			refs[text] = true
		}
	}
	return slices.Sorted(maps.Keys(refs))
}
