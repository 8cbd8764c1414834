package instances

import (
	"slices"
	"strings"

	"github.com/better-compute/site-appliance/plugins/instance"
)

// action is one thing to ask of a runtime.
type action struct {
	id     string
	remove bool
	spec   instance.Spec // of an apply
	// generation that it brings about; what is tried again counts by it.
	generation uint64
}

// plan says what one runtime is to do, from what is wanted and what it lists.
//
// What is wanted and is missing, older, or failed is applied; "stopped" is how
// an instance ends that is not to be started again. What is not wanted is
// removed only when somebody asked for that: its removal is on record, or it
// moved to another runtime. Whatever else a runtime lists is an orphan: told,
// and never touched.
func plan(runtime string, d *desired, observed []instance.Status) []action {
	var actions []action
	seen := map[string]instance.Status{}
	for _, o := range observed {
		seen[o.ID] = o
		e, known := d.entries[o.ID]
		asked := d.grave(o.ID)
		if known {
			asked = 0
			if e.Runtime != runtime || e.Removing {
				asked = e.Generation
			}
		}
		if asked != 0 && o.Generation <= asked {
			actions = append(actions, action{id: o.ID, remove: true, generation: asked})
		}
	}
	for id, e := range d.entries {
		if e.Runtime != runtime || e.Removing {
			continue
		}
		o, there := seen[id]
		if !there || o.Generation < e.Generation || o.Generation == e.Generation && o.State == instance.Failed {
			actions = append(actions, action{id: id, spec: e.Spec.Spec, generation: e.Generation})
		}
	}
	slices.SortFunc(actions, func(a, b action) int { return strings.Compare(a.id, b.id) })
	return actions
}

// orphan reports whether nobody asked for what a runtime lists, nor for its removal.
func (d *desired) orphan(o instance.Status) bool {
	if e, known := d.entries[o.ID]; known {
		return e.Generation < o.Generation
	}
	return d.grave(o.ID) < max(o.Generation, 1)
}

// The states that are the node's own, beside those of a runtime.
const (
	removing = "removing"
	removed  = "removed"
)

// Status is one instance as the gateway hears of it.
type Status struct {
	ID         string `json:"instance_id"`
	Runtime    string `json:"runtime"`
	State      string `json:"state"`
	Message    string `json:"message,omitempty"`
	Generation uint64 `json:"generation"`
	Orphan     bool   `json:"orphan,omitempty"`
}

// statuses is what there is to say of one runtime. trouble is the last error by
// instance.
func statuses(runtime string, d *desired, observed []instance.Status, trouble map[string]string) []Status {
	var all []Status
	seen := map[string]instance.Status{}
	for _, o := range observed {
		seen[o.ID] = o
		switch e, known := d.entries[o.ID]; {
		case d.orphan(o) && !known:
			all = append(all, Status{ID: o.ID, Runtime: runtime, State: o.State, Message: o.Message, Generation: o.Generation, Orphan: true})
		case !known:
			// Removed, and back: it is being removed again.
			all = append(all, Status{ID: o.ID, Runtime: runtime, State: removing, Message: trouble[o.ID], Generation: d.grave(o.ID)})
		case e.Runtime == runtime:
		}
	}
	for id, e := range d.entries {
		if e.Runtime != runtime {
			continue
		}
		s := Status{ID: id, Runtime: runtime, State: instance.Pending, Generation: e.Generation, Message: trouble[id]}
		o, there := seen[id]
		switch {
		case e.Removing:
			s.State = removing
		case there && o.Generation > e.Generation:
			s.State, s.Message = o.State, "it runs as a newer generation than the one that is wanted here"
			s.Orphan = true
		case there && o.Generation == e.Generation:
			s.State = o.State
			if o.Message != "" {
				s.Message = o.Message
			} else if o.State != instance.Failed {
				s.Message = ""
			}
		case s.Message != "":
			s.State = instance.Failed
		}
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b Status) int { return strings.Compare(a.ID, b.ID) })
	return all
}
