// Package manual is the driver "manual": for a machine without a BMC a person
// is asked to switch it, and says when it is done.
package manual

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/release"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// ID is the driver's id.
const ID = "manual"

// maxMachines bounds what is remembered: more than a site has.
const maxMachines = 8192

// Asked is what a person is asked to do; without Action nothing is asked.
type Asked struct {
	// Address names the machine as people know it.
	Address string `json:"address"`
	// Machine is the machine's id, where the command says it.
	Machine string            `json:"machine,omitempty"`
	Action  metal.PowerAction `json:"action,omitempty"`
	// Until is when the asking ends by itself; zero: it does not.
	Until time.Time `json:"until,omitzero"`
}

// Options are what a site lends the driver.
type Options struct {
	// File keeps what people confirmed; empty: memory does.
	File string
	// Tell passes on what is asked of a person now; nil: nobody hears of it.
	Tell func(Asked)
	Log  *slog.Logger
}

// Desk is where people are asked and answer. It is safe for concurrent use.
type Desk struct {
	file string
	tell func(Asked)

	mu     sync.Mutex
	states map[string]metal.PowerState
	asking map[string]*asking
}

// asking is one machine's open question.
type asking struct {
	want      metal.PowerState
	confirmed bool
	done      chan struct{} // closed with confirmed
}

type file struct {
	Version int                         `json:"version"`
	States  map[string]metal.PowerState `json:"states"`
}

// New makes the driver and its desk. A file that cannot be read is complained
// about, and all states are unknown then.
func New(o Options) (*driver.Definition, *Desk, error) {
	d := &Desk{file: o.File, tell: o.Tell, states: map[string]metal.PowerState{}, asking: map[string]*asking{}}
	if d.tell == nil {
		d.tell = func(Asked) {}
	}
	if err := d.load(); err != nil && o.Log != nil {
		o.Log.Error("what people confirmed of machines without a BMC is lost: their power is unknown", "err", err)
	}
	definition, err := driver.Define(driver.Spec[string]{
		ID: ID, Version: "1.0.0", RunsOn: "site", Schema: json.RawMessage(schema), Parse: parseConfig,
		// Asking twice does no harm: a person sees what has been done.
		RetrySafe: []string{"power.getPower", "power.setPower"},
	}, driver.Implement(metal.PowerKind(), func(address string, _ *driver.Context) (metal.Power, error) { return machine{d, address}, nil }))
	return definition, d, err
}

const schema = `{
  "$schema": "https://json-schema.org/draft/2020-12/schema",
  "type": "object",
  "required": ["address"],
  "additionalProperties": false,
  "properties": {
    "address": {"type": "string", "minLength": 1, "maxLength": 64,
      "description": "The machine's name on its label: letters, digits, dots, underscores and hyphens."},
    "credentials": {"type": "string", "writeOnly": true, "x-bc": {"kind": "secret"}},
    "tlsSpkiSha256": {"type": "string", "maxLength": 0}
  }
}`

// form is what the configuration is.
var form = metal.TargetForm{Unpinned: "a person has no TLS, so the key pin cannot be checked: remove the pin"}

func parseConfig(raw json.RawMessage) (string, error) {
	t, err := form.Parse(raw)
	if err != nil {
		return "", err
	}
	return Normalise(t.Address)
}

var addressForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$`)

// Normalise is the one spelling of an address: the machine's name in lower
// case. Errors have code invalid-address.
func Normalise(address string) (string, error) {
	lower := strings.ToLower(address)
	if !addressForm.MatchString(lower) {
		return "", errs.New(errs.InvalidAddress, "address %.80q: want the machine's name, at most 64 letters, digits, dots, underscores and hyphens", address)
	}
	return lower, nil
}

// load reads the file, if there is one.
func (d *Desk) load() error {
	if d.file == "" {
		return nil
	}
	data, err := os.ReadFile(d.file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var in file
	if err == nil {
		err = json.Unmarshal(data, &in)
	}
	if err == nil && in.Version != 1 {
		err = fmt.Errorf("version %d is unknown", in.Version)
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", d.file, err)
	}
	for address, state := range in.States {
		if state == metal.PowerOn || state == metal.PowerOff {
			d.states[address] = state
		}
	}
	return nil
}

// Confirm takes a person's word for a machine's power, "on" or "off", whether
// or not it was asked for. It is kept before an asking ends by it.
func (d *Desk) Confirm(address, power string) error {
	address, err := Normalise(address)
	if err != nil {
		return err
	}
	state := metal.PowerState(power)
	if state != metal.PowerOn && state != metal.PowerOff {
		return errs.New(errs.InvalidArgs, "power %.40q: want on or off", power)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	before, known := d.states[address]
	if !known && len(d.states) >= maxMachines {
		return errs.New(errs.NoSpace, "%d machines are remembered already", maxMachines)
	}
	d.states[address] = state
	if err := d.save(); err != nil {
		if delete(d.states, address); known {
			d.states[address] = before
		}
		return err
	}
	if a := d.asking[address]; a != nil && a.want == state && !a.confirmed {
		a.confirmed = true
		close(a.done)
	}
	return nil
}

func (d *Desk) save() error {
	if d.file == "" {
		return nil
	}
	data, err := json.Marshal(file{Version: 1, States: d.states})
	if err != nil {
		return err
	}
	return atomicfile.Write(d.file, data, 0o600)
}

// machine is one machine's implementation.
type machine struct {
	desk    *Desk
	address string
}

// GetPower is what a person confirmed last.
func (m machine) GetPower(*driver.Context) (metal.PowerState, error) {
	m.desk.mu.Lock()
	defer m.desk.mu.Unlock()
	if state, known := m.desk.states[m.address]; known {
		return state, nil
	}
	return metal.PowerUnknown, nil
}

// ends is the state that a person confirms when an action is done.
var ends = map[metal.PowerAction]metal.PowerState{
	metal.ActionOn: metal.PowerOn, metal.ActionOff: metal.PowerOff, metal.ActionSoft: metal.PowerOff,
	metal.ActionCycle: metal.PowerOn, metal.ActionReset: metal.PowerOn,
}

// SetPower asks a person and waits for the confirmation. What was confirmed
// before counts for nothing: a machine can lose its power unseen.
func (m machine) SetPower(ctx *driver.Context, action metal.PowerAction) error {
	want, known := ends[action]
	if !known {
		return errs.New(errs.UnsupportedOperation, "a person is not asked for %s", action)
	}
	d, a := m.desk, &asking{want: want, done: make(chan struct{})}
	d.mu.Lock()
	if d.asking[m.address] != nil {
		d.mu.Unlock()
		return errs.Retry(errs.Unavailable, "somebody is asked to switch %s already: confirm that first", m.address)
	}
	d.asking[m.address] = a
	d.mu.Unlock()
	release.Place(ctx)
	until, _ := ctx.Deadline()
	d.tell(Asked{Address: m.address, Machine: ctx.TargetNodeID, Action: action, Until: until})
	ctx.Emit(driver.Progress{Phase: "asked", Message: fmt.Sprintf("a person is asked to switch %s: %s", m.address, action)})
	select {
	case <-a.done:
	case <-ctx.Done():
	}
	// The next asking begins only after the end of this one was told.
	d.tell(Asked{Address: m.address, Machine: ctx.TargetNodeID})
	d.mu.Lock()
	delete(d.asking, m.address)
	confirmed := a.confirmed
	d.mu.Unlock()
	if confirmed {
		return nil
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return errs.Retry(errs.Timeout, "nobody confirmed %s of %s in time", action, m.address)
	}
	return ctx.Err()
}
