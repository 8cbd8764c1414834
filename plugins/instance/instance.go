// Package instance declares the kind of drivers that run instances on a node: runtime.
package instance

import (
	"encoding/json"
	"regexp"
	"slices"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// Spec is an instance as it is wanted.
type Spec struct {
	ID   string `json:"id"`
	Name string `json:"name"`
	// Generation rises with every change of what is wanted.
	Generation uint64 `json:"generation"`
	// Config is the runtime's own.
	Config json.RawMessage `json:"config"`
}

// The states of an instance.
const (
	Running = "running"
	Stopped = "stopped"
	Failed  = "failed"
	Pending = "pending"
)

// Status is an instance as it is.
type Status struct {
	ID      string `json:"id"`
	State   string `json:"state"`
	Message string `json:"message,omitempty"`
	// Generation is the one that was applied last.
	Generation uint64 `json:"generation"`
}

// Runtime is the kind "runtime". A driver keeps an instance's id and generation
// with the instance, so that List tells them after a restart of anything.
type Runtime interface {
	List(*driver.Context) ([]Status, error)
	// Apply makes the instance what spec says; applying it again changes nothing.
	Apply(*driver.Context, Spec) error
	// Remove ends the instance and deletes what it left; one that is not there
	// is no error.
	Remove(ctx *driver.Context, id string) error
}

// RuntimeKind is runtime {list, apply, remove}.
func RuntimeKind() driver.Kind[Runtime] {
	return driver.Kind[Runtime]{
		Name: "runtime",
		Operations: map[string]driver.Operation[Runtime]{
			"list":   driver.Get(list),
			"apply":  driver.Set(ParseSpec, Runtime.Apply),
			"remove": driver.Set(ParseID, Runtime.Remove),
		},
		Proxy: func(i *driver.Implementation) Runtime { return proxy{i} },
	}
}

// RetrySafe lists the operations that do no harm when they run twice.
func RetrySafe() []string {
	return []string{"runtime.apply", "runtime.list", "runtime.remove"}
}

// list answers [] rather than null for none.
func list(r Runtime, ctx *driver.Context) ([]Status, error) {
	all, err := r.List(ctx)
	if all == nil {
		all = []Status{}
	}
	return all, err
}

var idForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$`)

// ParseID reads remove's argument; anything but 1 to 128 letters, digits, _, .
// and - is invalid-args.
func ParseID(raw json.RawMessage) (string, error) {
	var id string
	if json.Unmarshal(raw, &id) != nil || !idForm.MatchString(id) {
		return "", errs.New(errs.InvalidArgs, "instance id: want 1 to 128 letters, digits, _, . and -, a letter or digit first")
	}
	return id, nil
}

// ParseSpec reads apply's argument; an unknown field or a bad id is invalid-args.
func ParseSpec(raw json.RawMessage) (Spec, error) {
	var s Spec
	if err := driver.StrictJSON(raw, &s, "id", "name", "generation", "config"); err != nil {
		return s, errs.New(errs.InvalidArgs, "instance: %v", err)
	}
	switch {
	case !idForm.MatchString(s.ID):
		return s, errs.New(errs.InvalidArgs, "instance id: want 1 to 128 letters, digits, _, . and -, a letter or digit first")
	case len(s.Name) > 253:
		return s, errs.New(errs.InvalidArgs, "instance name: %d bytes, limit 253", len(s.Name))
	}
	return s, nil
}

// proxy is a runtime in another process. The call's context goes with each call.
type proxy struct{ i *driver.Implementation }

func (p proxy) List(ctx *driver.Context) ([]Status, error) {
	all, err := driver.Answer[[]Status](p.i.On(ctx).Call("list"))
	if err != nil {
		return nil, err
	}
	for _, s := range all {
		if !idForm.MatchString(s.ID) || !slices.Contains([]string{Running, Stopped, Failed, Pending}, s.State) {
			return nil, errs.New(errs.DriverError, "list: instance %.128q in state %.40q: want a valid id and running, stopped, failed or pending", s.ID, s.State)
		}
	}
	return all, nil
}

func (p proxy) Apply(ctx *driver.Context, s Spec) error {
	_, err := p.i.On(ctx).Call("apply", s).Await()
	return err
}

func (p proxy) Remove(ctx *driver.Context, id string) error {
	_, err := p.i.On(ctx).Call("remove", id).Await()
	return err
}
