package grants

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// The windows in which targets without a grant are counted.
const (
	ShortWindow = 10 * time.Minute
	LongWindow  = 24 * time.Hour
)

// Policy is what the trust bundle in force says.
type Policy interface {
	Approvers
	// QuorumTargets are the numbers of distinct targets in each window from which
	// on a grant is needed.
	QuorumTargets() (short, long int)
}

// Command is what a command does, as the agent that would run it knows it.
type Command struct {
	ID                      string
	Kind, Operation, Action string
	// Always says that the windows do not matter.
	Always             bool
	Targets, Artifacts []string
	Citation           *agentv1.GrantCitation // nil: none
}

// name is what a person reads.
func (c Command) name() string { return strings.TrimSpace(c.Operation + " " + c.Action) }

// unnameable are its targets that no grant can hold: what a configuration leads to
// that names nothing known here.
func (c Command) unnameable() []string {
	return slices.DeleteFunc(slices.Clone(c.Targets), nameable)
}

// counted are targets as the windows count them. A host name can stand for
// another BMC each time, whoever answers for its domain: every use of one counts
// by itself.
func (c Command) counted(targets []string) []string {
	out := slices.Clone(targets)
	for i, t := range out {
		address, bmc := strings.CutPrefix(t, bmcPrefix)
		host, _, err := net.SplitHostPort(address)
		if !bmc || err != nil {
			continue
		}
		if _, err := netip.ParseAddr(host); err != nil {
			out[i] = "name:" + host + " " + c.ID
		}
	}
	return out
}

// Allow is the option of grant propose that allows the command.
func (c Command) Allow() string {
	return strings.TrimSuffix(c.Kind+":"+c.Operation+":"+c.Action, ":")
}

// Use is what one admitted command counts for. It is on disk before the command
// has any effect.
type Use struct {
	// Age is the agent's running time when it was admitted: see Past.
	Age     time.Duration `json:"a"`
	Targets []string      `json:"t"`
	// Grant is what covers it; empty: nobody was asked, and the windows count it.
	Grant string `json:"g,omitempty"`
	// Ends is the grant's not_after in Unix milliseconds.
	Ends int64 `json:"e,omitempty"`
	// Counted are targets that no grant can hold, of a command that one covers: the
	// windows count them all the same.
	Counted []string `json:"c,omitempty"`
}

// InWindows are the targets that the windows count.
func (u Use) InWindows() []string {
	if u.Grant != "" {
		return u.Counted
	}
	return u.Targets
}

// Past is what an agent remembers. Its windows are measured in its own running
// time, which stands still while it is off and which no clock and no gateway can
// move: whoever holds the gateway could otherwise say that a day has passed.
type Past struct {
	// Age is the running time now.
	Age time.Duration
	// Counted says when, in running time, each target was last touched without a
	// grant, for at least LongWindow.
	Counted map[string]time.Duration
	// Used is how often a grant was used for a target; nil: never.
	Used func(grant, target string) uint32
	// Lost says that a part of the memory is gone: until that running time every
	// window is taken for full.
	Lost time.Duration
	// Forgotten is a time in Unix milliseconds: uses of grants that end by then may
	// be forgotten, so those grants hold no more.
	Forgotten int64
}

// Moment is when and where a command is judged.
type Moment struct {
	SiteID string
	// Now is gateway time. Latest is the latest that is known to have been: a grant
	// that ended does not come back with a clock that is set back.
	Now, Latest time.Time
}

// Judge decides about a command that counts, under a trust bundle with quorum in
// force. It answers what the command uses, or quorum-required, or for a citation
// that does not hold grant-invalid.
func Judge(c Command, p Policy, past Past, m Moment) (Use, error) {
	if c.Citation != nil {
		g, err := cited(c, p, past, m)
		if err != nil {
			return Use{}, errs.New(errs.GrantInvalid, "%s: %s", c.name(), errs.From(err).Message)
		}
		// The grant's people did not see these: a machine's id is only what the sender
		// says, and must not open the way to whatever it likes.
		free := c.unnameable()
		if why := full(c, free, p, past); len(free) > 0 && why != "" {
			return Use{}, errs.New(errs.QuorumRequired, "%s: no grant can hold %s, so it counts beside the grant, and %s", c.name(), strings.Join(free, ", "), why)
		}
		return Use{Age: past.Age, Targets: slices.Clone(c.Targets), Grant: g.GetGrantId(), Ends: g.GetNotAfterMs(), Counted: free}, nil
	}
	if why := needed(c, p, past); why != "" {
		return Use{}, errs.New(errs.QuorumRequired, "%s: %s. %d of the approvers must agree: better-compute grant propose --allow %s --machine NAME --reason TEXT, "+
			"then each of them better-compute approve GRANT --key FILE, then the same command again", c.name(), why, max(p.ApproverThreshold(), 1), c.Allow())
	}
	return Use{Age: past.Age, Targets: c.counted(c.Targets)}, nil
}

// needed says why a command without a grant needs one, or nothing.
func needed(c Command, p Policy, past Past) string {
	if c.Always {
		return "a grant is always needed for it (what cannot be undone, and protected machines)"
	}
	return full(c, c.Targets, p, past)
}

// full says why the windows have no room for more targets, or nothing.
func full(c Command, targets []string, p Policy, past Past) string {
	if past.Lost > past.Age {
		return fmt.Sprintf("this agent lost what it remembered of destructive work, so a grant is needed for another %s of its running time", round(past.Lost-past.Age))
	}
	short, long := p.QuorumTargets()
	for _, w := range []struct {
		length time.Duration
		limit  int
		name   string
	}{{ShortWindow, short, "10 minutes"}, {LongWindow, long, "24 hours"}} {
		counted := map[string]bool{}
		for t, age := range past.Counted {
			if past.Age-age < w.length {
				counted[t] = true
			}
		}
		before := len(counted)
		for _, t := range c.counted(targets) {
			counted[t] = true
		}
		if len(counted) >= w.limit {
			hint := ""
			if !slices.Equal(c.counted(targets), targets) {
				hint = " (a host name counts each time; an IP address, once)"
			}
			return fmt.Sprintf("destructive work without a grant touched %d distinct targets in the last %s of this agent's running time, and with %s it would be %d%s: from %d on a grant is needed",
				before, w.name, strings.Join(targets[:min(len(targets), 3)], ", "), len(counted), hint, w.limit)
		}
	}
	return ""
}

func round(d time.Duration) time.Duration {
	return max(d.Round(time.Minute), time.Minute)
}

// cited checks a citation from its bytes to its last use.
func cited(c Command, p Policy, past Past, m Moment) (*agentv1.Grant, error) {
	bad := func(format string, args ...any) (*agentv1.Grant, error) {
		return nil, errs.New(errs.GrantInvalid, format, args...)
	}
	signed := c.Citation.GetGrant()
	// The signatures come first: nothing else is to be believed before.
	if err := Approved(p, signed); err != nil {
		return nil, err
	}
	g, err := Parse(signed.GetPayload())
	if err != nil {
		return nil, err
	}
	id := g.GetGrantId()
	ends := time.UnixMilli(g.GetNotAfterMs())
	switch {
	case g.GetSiteId() != m.SiteID:
		return bad("grant %s is for site %s, not %s", id, g.GetSiteId(), m.SiteID)
	case m.Now.Before(time.UnixMilli(g.GetNotBeforeMs())):
		return bad("grant %s begins at %s; it is %s", id, stamp(time.UnixMilli(g.GetNotBeforeMs())), stamp(m.Now))
	case !m.Now.Before(ends) || !m.Latest.Before(ends):
		return bad("grant %s ended at %s", id, stamp(ends))
	case g.GetNotAfterMs() <= past.Forgotten:
		return bad("grant %s may have been used: this agent forgot the uses of grants that end by %s", id, stamp(time.UnixMilli(past.Forgotten)))
	case !Allows(g, c.Kind, c.Operation, c.Action):
		return bad("grant %s does not allow %s", id, c.Allow())
	}
	if why := Brings(g, c.Operation, c.Artifacts); why != "" {
		return bad("grant %s %s", id, why)
	}
	proven, err := proofs(g, c.Citation.GetTargets())
	if err != nil {
		return nil, err
	}
	used := past.Used
	if used == nil {
		used = func(string, string) uint32 { return 0 }
	}
	covered := 0
	for _, t := range c.Targets {
		switch {
		case !nameable(t):
			continue
		case !proven[t]:
			return bad("grant %s is not cited for the target %s", id, t)
		case used(id, t) >= g.GetUsesPerTarget():
			return bad("grant %s is used up for the target %s: %d of %d", id, t, used(id, t), g.GetUsesPerTarget())
		}
		covered++
	}
	if covered == 0 {
		return bad("the command has no target that a grant could name")
	}
	return g, nil
}

// Allows reports whether a grant names the operation.
func Allows(g *agentv1.Grant, kind, operation, action string) bool {
	return slices.ContainsFunc(g.GetOperations(), func(o *agentv1.GrantOperation) bool {
		return o.GetKind() == kind && o.GetOperation() == operation && o.GetAction() == action
	})
}

// bringing are the operations that are nothing without an artifact: one that names
// none brings something that nobody has looked at.
var bringing = []string{"firmware.update", "image.stream", "deploy.deploy"}

// Brings says why a grant does not allow what an operation brings along, or nothing.
func Brings(g *agentv1.Grant, operation string, artifacts []string) string {
	switch allowed := g.GetArtifactSha256(); {
	case len(allowed) == 0:
		return ""
	case len(artifacts) == 0 && slices.Contains(bringing, operation):
		return "names artifacts, and the command does not say which it brings"
	default:
		for _, a := range artifacts {
			if !slices.Contains(allowed, a) {
				return fmt.Sprintf("does not allow the artifact %.80q", a)
			}
		}
	}
	return ""
}

// proofs checks every proof of a citation.
func proofs(g *agentv1.Grant, list []*agentv1.TargetProof) (map[string]bool, error) {
	if len(list) > MaxTargets {
		return nil, errs.New(errs.GrantInvalid, "%d targets are cited; at most %d", len(list), MaxTargets)
	}
	proven := map[string]bool{}
	for _, p := range list {
		if !nameable(p.GetTarget()) || !Proven(p, g.GetTargetCount(), g.GetTargetsRoot()) {
			return nil, errs.New(errs.GrantInvalid, "grant %s does not hold the target %.80q: its proof does not lead to the grant's root", g.GetGrantId(), p.GetTarget())
		}
		proven[p.GetTarget()] = true
	}
	return proven, nil
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// Keep reports whether a use must be remembered at a running time, and past the
// end of grants that were forgotten.
func (u Use) Keep(age time.Duration, forgotten int64) bool {
	return u.Grant != "" && u.Ends > forgotten || len(u.InWindows()) > 0 && age-u.Age < LongWindow
}
