// Package module is how parts join a control plane: the drivers, command kinds,
// steps and profiles that they bring, checked together.
package module

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/binding"
	"github.com/better-compute/site-appliance/plugins/driver/invocation"
	"github.com/better-compute/site-appliance/plugins/driver/schema"
)

// Module is what one part brings. Leaving it out leaves out all of it.
type Module struct {
	// Name is lower-case letters, digits and hyphens.
	Name     string
	Drivers  []*driver.Definition
	Kinds    []Kind
	Steps    []Step
	Profiles []Profile
}

// Kind is a command kind that the control plane may send.
type Kind struct {
	// Name is noun.verb.
	Name string
	Lane string
	// Timeout is a command's life unless its sender says otherwise.
	Timeout time.Duration
	// RetrySafe says that every operation of the kind may run twice.
	RetrySafe bool
	// Destructive kinds are refused by a box that cannot keep a journal.
	Destructive bool
	// Roles are the agents that serve it.
	Roles []agentv1.Role
}

// Command is what one command says, whoever sends it.
type Command struct {
	Kind string
	// Lane and Timeout: empty and zero stand for the kind's own.
	Lane       string
	Args       proto.Message
	SecretRefs []string
	Timeout    time.Duration
	// RetrySafe says that running it twice does no harm.
	RetrySafe bool
}

// Step is a step that a part serves itself, by a typed command, instead of by
// driver.invoke.
type Step struct {
	// ID is what a profile's step names: <concern>.<operation>.
	ID string
	// Kind is the command kind that it sends.
	Kind string
	// On is whose agent gets the command: site, node or ramdisk.
	On string
	// Timeout is the step's unless the profile says otherwise; 0: the kind's.
	Timeout time.Duration
	// Check judges a profile's "with" when the workflow starts; nil: Command does.
	Check func(with json.RawMessage) error
	// Command decides what is sent. It is asked once for each attempt, and has no effects.
	Command func(m store.Machine, with json.RawMessage) (Command, error)
	// Result turns the command's result into JSON; nil: the step answers nothing.
	Result func(result []byte) (json.RawMessage, error)
}

// The agents that a step goes to.
const (
	OnSite    = "site"
	OnNode    = "node"
	OnRamdisk = "ramdisk"
)

// Role is the agent's role that "on" names.
func Role(on string) (role agentv1.Role, ok bool) {
	switch on {
	case OnSite:
		return agentv1.Role_ROLE_SITE, true
	case OnNode:
		return agentv1.Role_ROLE_NODE, true
	case OnRamdisk:
		return agentv1.Role_ROLE_RAMDISK, true
	}
	return agentv1.Role_ROLE_UNSPECIFIED, false
}

// Profile is a procedure as data: steps in order, and the drivers that serve
// those steps which nobody registered.
type Profile struct {
	Name        string
	Description string
	// Drivers bind kinds for this profile alone: a machine's own bindings are not
	// looked at. Secrets in a configuration are secret:// references.
	Drivers map[string]binding.Binding
	Steps   []ProfileStep
}

// ProfileStep is one step of a profile.
type ProfileStep struct {
	// Uses is a registered step's id, or <concern>.<operation> of a driver.
	Uses string `json:"uses"`
	// On is site, node or ramdisk: the agent that runs the driver. A registered
	// step knows its own and needs none.
	On string `json:"on,omitempty"`
	// With is the arguments: an array holds the positional ones, any other value
	// is the single one, and nothing is none.
	With json.RawMessage `json:"with,omitempty"`
	// Timeout bounds the step and sets not_after; 0: the kind's.
	Timeout time.Duration `json:"timeout_ns,omitempty"`
}

// Bounds of a profile.
const (
	MaxSteps     = 64
	MaxWithBytes = 256 << 10
	// MaxBytes bounds the arguments and configurations of all steps together: a
	// workflow keeps them.
	MaxBytes = 1 << 20
)

// reserved are the workflows that the engine has of its own.
var reserved = []string{"inspect", "deploy"}

// Set is modules that fit together. It does not change any more.
type Set struct {
	registry *driver.Registry
	kinds    map[string]Kind
	steps    map[string]Step
	profiles map[string]Profile
	names    []string // of profiles, sorted
}

var (
	nameForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	kindForm = regexp.MustCompile(`^[a-z][a-z0-9-]*\.[A-Za-z][A-Za-z0-9]*$`)
)

// Join checks modules against each other; what is wrong is invalid-config, and
// names the module.
func Join(modules ...Module) (*Set, error) {
	s := &Set{registry: &driver.Registry{}, kinds: map[string]Kind{}, steps: map[string]Step{}, profiles: map[string]Profile{}}
	seen := map[string]bool{}
	for _, m := range modules {
		if !nameForm.MatchString(m.Name) {
			return nil, errs.New(errs.InvalidConfig, "module %q: want a name of lower-case letters, digits and inner hyphens", m.Name)
		}
		if seen[m.Name] {
			return nil, errs.New(errs.InvalidConfig, "module %s is there twice", m.Name)
		}
		seen[m.Name] = true
		if err := s.add(m); err != nil {
			return nil, fmt.Errorf("module %s: %w", m.Name, err)
		}
	}
	for _, st := range s.steps {
		kind, known := s.kinds[st.Kind]
		if !known {
			return nil, errs.New(errs.InvalidConfig, "step %s sends %q, which no module brings", st.ID, st.Kind)
		}
		if role, _ := Role(st.On); !slices.Contains(kind.Roles, role) {
			return nil, errs.New(errs.InvalidConfig, "step %s is on the %s, which takes no %s", st.ID, st.On, st.Kind)
		}
	}
	// A profile may use what a later module brings, so profiles are judged last.
	for _, m := range modules {
		for _, p := range m.Profiles {
			if err := s.addProfile(p); err != nil {
				return nil, fmt.Errorf("module %s: %w", m.Name, err)
			}
		}
	}
	slices.Sort(s.names)
	return s, nil
}

func (s *Set) add(m Module) error {
	for _, d := range m.Drivers {
		if err := s.registry.Register(d); err != nil {
			return err
		}
	}
	for _, k := range m.Kinds {
		switch {
		case !kindForm.MatchString(k.Name):
			return errs.New(errs.InvalidConfig, "kind %q: want noun.verb", k.Name)
		case s.kinds[k.Name].Name != "":
			return errs.New(errs.InvalidConfig, "kind %s is registered twice", k.Name)
		case k.Lane == "" || len(k.Roles) == 0:
			return errs.New(errs.InvalidConfig, "kind %s lacks a lane or roles", k.Name)
		case k.Timeout <= 0 || k.Timeout > envelope.MaxLife:
			return errs.New(errs.InvalidConfig, "kind %s: time-out %s: want more than nothing and at most %s", k.Name, k.Timeout, envelope.MaxLife)
		}
		k.Roles = slices.Clone(k.Roles)
		s.kinds[k.Name] = k
	}
	for _, st := range m.Steps {
		_, _, ok := invocation.Split(st.ID)
		_, role := Role(st.On)
		switch {
		case !ok:
			return errs.New(errs.InvalidConfig, "step %q: want <concern>.<operation>", st.ID)
		case s.steps[st.ID].ID != "":
			return errs.New(errs.InvalidConfig, "step %s is registered twice", st.ID)
		case st.Command == nil || !role:
			return errs.New(errs.InvalidConfig, "step %s lacks its command, or is on no agent", st.ID)
		case st.Timeout < 0 || st.Timeout > envelope.MaxLife:
			return errs.New(errs.InvalidConfig, "step %s: time-out %s: want at most %s", st.ID, st.Timeout, envelope.MaxLife)
		}
		s.steps[st.ID] = st
	}
	return nil
}

func (s *Set) addProfile(p Profile) error {
	p.Drivers, p.Steps = cloneBindings(p.Drivers), cloneSteps(p.Steps)
	if err := s.CheckProfile(p); err != nil {
		return err
	}
	if _, twice := s.profiles[p.Name]; twice {
		return errs.New(errs.InvalidConfig, "profile %s is there twice", p.Name)
	}
	s.profiles[p.Name] = p
	s.names = append(s.names, p.Name)
	return nil
}

// CheckProfile says what keeps a profile from running here; the code is
// invalid-config.
func (s *Set) CheckProfile(p Profile) error {
	switch {
	case !nameForm.MatchString(p.Name):
		return errs.New(errs.InvalidConfig, "profile %q: want lower-case letters, digits and inner hyphens, at most 63", p.Name)
	case slices.Contains(reserved, p.Name):
		return errs.New(errs.InvalidConfig, "profile %s: the name is the engine's own workflow's", p.Name)
	case len(p.Steps) == 0 || len(p.Steps) > MaxSteps:
		return errs.New(errs.InvalidConfig, "profile %s has %d steps: want 1 to %d", p.Name, len(p.Steps), MaxSteps)
	}
	if err := binding.Check(p.Drivers); err != nil {
		return errs.New(errs.InvalidConfig, "profile %s: drivers: %v", p.Name, err)
	}
	for kind, b := range p.Drivers {
		if err := s.checkBinding(kind, b); err != nil {
			return fmt.Errorf("profile %s: drivers.%s: %w", p.Name, kind, err)
		}
	}
	size := 0
	for i, step := range p.Steps {
		if err := s.checkStep(p, step); err != nil {
			return fmt.Errorf("profile %s: step %d (%s): %w", p.Name, i, step.Uses, err)
		}
		concern, _, _ := strings.Cut(step.Uses, ".")
		size += len(step.With) + len(p.Drivers[concern].Config)
	}
	if size > MaxBytes {
		return errs.New(errs.InvalidConfig, "profile %s: its steps hold %d bytes of arguments and configuration, more than %d", p.Name, size, MaxBytes)
	}
	return nil
}

// checkBinding judges a configuration by its schema only where the driver is
// registered here: any other driver is known to its agent alone.
func (s *Set) checkBinding(kind string, b binding.Binding) error {
	if d, ok := s.registry.Find(b.Driver, kind); ok && len(b.Config) > 0 {
		if err := d.CheckConfig(b.Config); err != nil {
			return err
		}
	}
	return SecretsByReference(s.registry, map[string]binding.Binding{kind: b})
}

// Finder finds the driver registered under an id that serves a kind.
type Finder interface {
	Find(id, kind string) (*driver.Definition, bool)
}

// SecretsByReference refuses, before it is written anywhere, a secret itself in
// a field that a registered driver's schema marks; the code is invalid-config.
// Which fields of other drivers are secret nobody here knows.
func SecretsByReference(registry Finder, bindings map[string]binding.Binding) error {
	for _, kind := range slices.Sorted(maps.Keys(bindings)) {
		d, ok := registry.Find(bindings[kind].Driver, kind)
		if !ok || len(d.Manifest().ConfigSchema) == 0 {
			continue
		}
		known, err := schema.Read(d.Manifest().ConfigSchema)
		if err == nil {
			err = bindings[kind].ByReference(known.SecretFields()...)
		}
		if err != nil {
			return errs.New(errs.InvalidConfig, "drivers.%s: %v", kind, err)
		}
	}
	return nil
}

func (s *Set) checkStep(p Profile, step ProfileStep) error {
	switch {
	case len(step.With) > MaxWithBytes:
		return errs.New(errs.InvalidConfig, "with has %d bytes, more than %d", len(step.With), MaxWithBytes)
	case len(step.With) > 0 && !json.Valid(step.With):
		return errs.New(errs.InvalidConfig, "with is not JSON")
	case step.Timeout < 0 || step.Timeout > envelope.MaxLife:
		return errs.New(errs.InvalidConfig, "time-out %s: want at most %s", step.Timeout, envelope.MaxLife)
	}
	if _, known := Role(step.On); step.On != "" && !known {
		return errs.New(errs.InvalidConfig, "on = %q: want site, node or ramdisk", step.On)
	}
	if registered, ok := s.steps[step.Uses]; ok {
		if step.On != "" && step.On != registered.On {
			return errs.New(errs.InvalidConfig, "on = %q: this step is the %s's", step.On, registered.On)
		}
		if registered.Check != nil {
			return registered.Check(step.With)
		}
		return nil
	}
	concern, operation, ok := invocation.Split(step.Uses)
	bound := p.Drivers[concern]
	switch {
	case !ok:
		return errs.New(errs.InvalidConfig, "no step has this id, and it is not <concern>.<operation>")
	case s.kinds[invocation.Kind].Name == "":
		return errs.New(errs.InvalidConfig, "no step has this id, and the module with %s is left out", invocation.Kind)
	case step.On == "":
		return errs.New(errs.InvalidConfig, "no step has this id, and on says no agent that would run a driver")
	case bound.Driver == "":
		return errs.New(errs.InvalidConfig, "no step has this id, and the profile binds no driver to %s", concern)
	}
	// What could not be sent is found before the first step of a workflow, not in its middle.
	_, err := invocation.Encode(invocation.Request{
		WorkflowID: "wf", StepID: "main.0", Concern: concern, Operation: operation, Args: step.With, Driver: bound.Driver, Config: bound.Config,
	})
	if err != nil {
		return errs.New(errs.InvalidConfig, "%s", errs.From(err).Message)
	}
	return nil
}

// Registry holds the modules' drivers.
func (s *Set) Registry() *driver.Registry { return s.registry }

// RetrySafe is what the registered drivers of that id say of an operation; all
// of them must list it.
func (s *Set) RetrySafe(id, kind, operation string) bool {
	safe := false
	for _, m := range s.registry.List(kind) {
		if m.ID != id {
			continue
		}
		if !m.IsRetrySafe(kind, operation) {
			return false
		}
		safe = true
	}
	return safe
}

// Kind finds a command kind; one that no module brings is unknown.
func (s *Set) Kind(name string) (Kind, bool) {
	k, ok := s.kinds[name]
	return k, ok
}

// Step finds a registered step.
func (s *Set) Step(id string) (Step, bool) {
	st, ok := s.steps[id]
	return st, ok
}

// Profile finds a profile by name.
func (s *Set) Profile(name string) (Profile, bool) {
	p, ok := s.profiles[name]
	if ok {
		p.Drivers, p.Steps = cloneBindings(p.Drivers), cloneSteps(p.Steps)
	}
	return p, ok
}

// Profiles are the names of all profiles, sorted.
func (s *Set) Profiles() []string { return slices.Clone(s.names) }

func cloneBindings(in map[string]binding.Binding) map[string]binding.Binding {
	out := map[string]binding.Binding{}
	for kind, b := range in {
		out[kind] = binding.Binding{Driver: b.Driver, Config: slices.Clone(b.Config)}
	}
	return out
}

func cloneSteps(in []ProfileStep) []ProfileStep {
	out := slices.Clone(in)
	for i := range out {
		out[i].With = slices.Clone(out[i].With)
	}
	return out
}
