// Package dispatch admits signed commands, queues them by key and lane, runs
// them once, and hands their acks, progress and results to the session.
package dispatch

import (
	"context"
	"io"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/secret"
)

// Kind is one command kind that this agent serves.
type Kind struct {
	// Name is noun.verb.
	Name string
	Lane string
	// Roles that may be asked for it.
	Roles []agentv1.Role
	// Decode reads args strictly and says what they ask for. It has no effects.
	Decode func(args []byte) (Operation, error)
	// Check judges args against the rest of the signed payload, before the command
	// is taken, and may choose another key; nil: they have nothing in common.
	Check func(p *agentv1.CommandPayload, op Operation) (Operation, error)
	// Ready is asked when the command's turn at its target has come, before it takes a
	// slot of its lane: an error is its result, and it never began. Nil: it is ready.
	Ready func(ctx context.Context, op Operation) error
	// Run does it. It returns the encoded result, and heeds ctx until the point
	// of no return. An error's code and flag come from errs.From; a code that says
	// that nothing ran becomes driver-error.
	Run func(ctx context.Context, c Call) ([]byte, error)
	// Recover finds out, after a restart, what became of a command that was
	// started. Nil: interrupted.
	Recover func(ctx context.Context, c Call) Verdict
}

// Operation is what a command's args ask for.
type Operation struct {
	// Name is "<concern>.<operation>" or the kind's own word.
	Name string
	// Key names the target: one command per key runs at a time, first in, first
	// out. Empty: the kind's name.
	Key string
	// Destructive work needs a durable journal on a box, room for its audit event,
	// and leaves one.
	Destructive bool
	// Action narrows Name where one operation does several things, for example
	// "off" of power.setPower: grants name it. Empty: there is nothing to narrow.
	Action string
	// Counts says that the work counts among what is destructive: from so many
	// targets on it needs people's grants where quorum is in force.
	Counts bool
	// Always says that it needs a grant there however few the targets are.
	Always bool
	// Targets are what it touches, as this agent knows them: "bmc:" and host:port,
	// "machine:" and a machine's id. Others are counted, but no grant can name
	// them. Empty: the key stands for one.
	Targets []string
	// Artifacts is everything that it brings along: the hex SHA-256 of each, or
	// for what has no digest its own text, which no grant that names artifacts holds.
	Artifacts []string
	// RetrySafe work may run twice without harm.
	RetrySafe bool
	// Value is Decode's own, for Run and Recover.
	Value any
}

// Call is one command as Run and Recover see it.
type Call struct {
	Payload   *agentv1.CommandPayload
	Operation Operation
	// Secrets resolves references that the payload lists; others are
	// credentials-unavailable.
	Secrets func(ctx context.Context, refs ...string) (map[string]secret.Value, error)
	// Granted reports that people's grant covers the command, and so all its targets.
	Granted bool
	// Progress is latest-wins and never blocks.
	Progress func(phase, message string, done, total uint64)
	// Deadline is not_after on this machine's monotonic clock; ctx ends then too.
	Deadline time.Time
	// Release gives up the command's place in its key's queue and its lane's slot
	// while it goes on: what waits for a person, or carries a person's bytes, must
	// not hold up the rest. A second call changes nothing, nor does any call while
	// very many commands of the lane have done so.
	Release func()
	// Tunnel opens the command's tunnel, once: bytes to and from who sent the
	// command. It ends with ctx, and with the command.
	Tunnel func(ctx context.Context) (io.ReadWriteCloser, error)
}

// Verdict is what Recover found.
type Verdict struct {
	outcome outcome
	result  []byte
}

type outcome int

const (
	interrupted outcome = iota
	done
	rerun
)

// Done says that the command had finished, with this encoded result.
func Done(result []byte) Verdict { return Verdict{done, result} }

// Rerun says that running it again does no harm. Dispatch does so only for a
// retry-safe operation that has not expired.
func Rerun() Verdict { return Verdict{outcome: rerun} }

// Interrupted says that nobody can tell.
func Interrupted() Verdict { return Verdict{} }

// String names the verdict.
func (v Verdict) String() string {
	switch v.outcome {
	case done:
		return "done"
	case rerun:
		return "rerun"
	}
	return "interrupted"
}
