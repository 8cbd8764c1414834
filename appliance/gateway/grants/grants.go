// Package grants is the gateway's part in people's approvals: it writes down what
// they are asked, takes their signatures, and puts them into commands. It can
// neither approve nor widen anything: boxes believe the approvers alone.
package grants

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent/grants"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/plugins/driver/invocation"
)

// defaultLife is how long a grant holds whose proposer does not say.
const defaultLife = time.Hour

// backdate is how far before its proposal a grant begins: a box's gateway time may
// lie behind by what the line takes.
const backdate = time.Minute

// Service is safe for concurrent use.
type Service struct {
	store  *store.Store
	bundle *trust.Bundle

	mu      sync.Mutex
	targets map[string][]string // of some grants, which never change
}

// maxKnown bounds the grants whose targets are kept in memory: a fleet's commands
// come one after the other.
const maxKnown = 32

// New makes the service for the trust bundle in force.
func New(st *store.Store, bundle *trust.Bundle) *Service {
	return &Service{store: st, bundle: bundle, targets: map[string][]string{}}
}

func (s *Service) targetsOf(ctx context.Context, id string) ([]string, error) {
	s.mu.Lock()
	known, ok := s.targets[id]
	s.mu.Unlock()
	if ok {
		return known, nil
	}
	read, err := s.store.GrantTargets(ctx, id)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.targets) >= maxKnown {
		clear(s.targets)
	}
	s.targets[id] = read
	return read, nil
}

// Proposal is what somebody wants approved.
type Proposal struct {
	TenantID   string
	Operations []*agentv1.GrantOperation
	Machines   []store.Machine
	// BMCs may be no machine's; SiteID says where. It may be left out beside machines.
	SiteID    string
	BMCs      []store.BMC
	Artifacts []string
	Uses      uint32        // of each target; 0: 1
	Valid     time.Duration // 0: defaultLife
	Reason    string
}

// Propose writes a grant down. Nothing is allowed by it yet.
func (s *Service) Propose(ctx context.Context, p Proposal) (store.Grant, error) {
	switch {
	case len(p.Machines) == 0 && len(p.BMCs) == 0:
		return store.Grant{}, apierr.Invalid("machines: none is named")
	case p.SiteID == "" && len(p.Machines) == 0:
		return store.Grant{}, apierr.Invalid("site: it is missing beside bmcs")
	case p.SiteID == "":
		p.SiteID = p.Machines[0].SiteID
	}
	if p.Valid < 0 || p.Valid > grants.MaxLife {
		return store.Grant{}, apierr.Invalid("valid_s: at most %d", int(grants.MaxLife.Seconds()))
	}
	targets, err := targetsOf(p)
	if err != nil {
		return store.Grant{}, err
	}
	now := s.store.Now()
	if p.Valid == 0 {
		p.Valid = defaultLife
	}
	ends := now.Add(p.Valid)
	begins := now.Add(-backdate)
	if earliest := ends.Add(-grants.MaxLife); begins.Before(earliest) {
		begins = earliest
	}
	g := store.Grant{
		ID: s.store.NewID("grant"), TenantID: p.TenantID, SiteID: p.SiteID, Targets: targets, NotAfter: ends, Proposed: now,
	}
	g.Payload, err = grants.Encode(&agentv1.Grant{
		GrantId: g.ID, SiteId: g.SiteID, Operations: p.Operations, TargetsRoot: grants.Root(targets), TargetCount: uint32(len(targets)),
		ArtifactSha256: p.Artifacts, UsesPerTarget: max(p.Uses, 1), NotBeforeMs: begins.UnixMilli(), NotAfterMs: ends.UnixMilli(), Reason: p.Reason,
	})
	if err != nil {
		return store.Grant{}, apierr.Invalid("%s", errs.From(err).Message)
	}
	return g, s.store.AddGrant(ctx, g)
}

// touched says which targets of a machine a kind has; the bmc.* kinds have the BMC's.
var touched = map[string]struct{ bmc, machine bool }{
	assignKind: {machine: true}, streamKind: {machine: true}, wipeKind: {machine: true}, invocation.Kind: {bmc: true, machine: true},
}

func targetsOf(p Proposal) ([]string, error) {
	var targets []string
	for _, o := range p.Operations {
		t, known := touched[o.GetKind()]
		switch {
		case !known && !operates(o.GetKind()):
			return nil, apierr.Invalid("operations: kind %.80q is none that a grant is for", o.GetKind())
		case !known:
			t.bmc = true
		}
		for _, b := range p.BMCs {
			target, ok := bmc(b.Address, b.Driver)
			switch {
			case !t.bmc:
				return nil, apierr.Invalid("bmcs: %s is done to a machine, not to its BMC", o.GetKind())
			case !ok:
				return nil, apierr.Invalid("bmcs: address %.80q under driver %.80q is none that boxes count by", b.Address, b.Driver)
			}
			targets = append(targets, target)
		}
		for _, m := range p.Machines {
			if m.SiteID != p.SiteID {
				return nil, apierr.Invalid("machines: %s is at another site: a grant is not for different sites", m.Name)
			}
			if t.machine {
				targets = append(targets, grants.Machine(m.ID))
			}
			if t.bmc {
				target, ok := bmc(m.BMC.Address, m.BMC.Driver)
				if !ok {
					return nil, apierr.Invalid("machine %s: its BMC's address is none that boxes count by", m.Name)
				}
				targets = append(targets, target)
			}
		}
	}
	sorted, err := grants.Sorted(targets)
	if err != nil {
		return nil, apierr.Invalid("%s", errs.From(err).Message)
	}
	return sorted, nil
}

// Approve adds an approver's signature. Signing twice changes nothing.
func (s *Service) Approve(ctx context.Context, tenantID, id string, sig *agentv1.Signature) (store.Grant, error) {
	g, err := s.store.Grant(ctx, tenantID, id)
	if err != nil {
		return store.Grant{}, err
	}
	if !s.store.Now().Before(g.NotAfter) {
		return store.Grant{}, apierr.Busy("grant-ended", "grant %s ended at %s", id, g.NotAfter.UTC().Format(time.RFC3339))
	}
	if err := grants.Signed(s.bundle, g.Payload, sig); err != nil {
		e := errs.From(err)
		return store.Grant{}, &apierr.Error{Code: apierr.PermissionDenied, Reason: string(e.Code), Message: e.Message, Connect: apierr.Denied("").Connect}
	}
	if err := s.store.SignGrant(ctx, id, sig); err != nil {
		return store.Grant{}, err
	}
	return s.store.Grant(ctx, tenantID, id)
}

// Approvers are the approvers of the trust bundle in force that signed, and how
// many it wants.
func (s *Service) Approvers(g store.Grant) (signed []string, needed int) {
	for _, sig := range g.Signatures {
		if grants.Signed(s.bundle, g.Payload, sig) == nil {
			signed = append(signed, sig.GetKeyId())
		}
	}
	return signed, s.bundle.ApproverThreshold()
}

// InForce reports whether boxes count grants at all: from two approvers on.
func (s *Service) InForce() bool { return s.bundle.QuorumInForce() }

// Cite finds a grant that covers the command, and proves its targets. Without one
// it answers nil, and the box decides.
func (s *Service) Cite(ctx context.Context, agent store.Agent, p *agentv1.CommandPayload) (*agentv1.GrantCitation, error) {
	if !s.InForce() {
		return nil, nil
	}
	subject, ok := Describe(p, agent.MachineID)
	if !ok {
		return nil, nil
	}
	now := s.store.Now()
	all, err := s.store.GrantsFor(ctx, agent.SiteID, subject.Targets[0], now)
	if err != nil {
		return nil, err
	}
	for _, g := range all {
		signed := &agentv1.SignedGrant{Payload: g.Payload, Signatures: g.Signatures}
		if g.Targets, err = s.targetsOf(ctx, g.ID); err != nil {
			return nil, err
		}
		terms, err := grants.Parse(g.Payload)
		if err != nil || !covers(terms, g.Targets, subject, now) || grants.Approved(s.bundle, signed) != nil {
			continue
		}
		left := true
		for _, t := range subject.Targets {
			n, err := s.store.GrantUses(ctx, g.ID, t)
			if err != nil {
				return nil, err
			}
			left = left && n < terms.GetUsesPerTarget()
		}
		if !left {
			continue
		}
		c := &agentv1.GrantCitation{Grant: signed}
		cite := append(slices.Clone(subject.Targets), subject.Also...)
		slices.Sort(cite)
		for _, t := range slices.Compact(cite) {
			if index, held := slices.BinarySearch(g.Targets, t); held {
				c.Targets = append(c.Targets, grants.Prove(g.Targets, index))
			}
		}
		return c, nil
	}
	return nil, nil
}

// maxLapsed bounds the grants for one target that are looked at for one that lapsed.
const maxLapsed = 64

// Lapsed says of the latest grant that would have covered a command why it holds no
// more, in words for people; empty where nobody approved such a one.
func (s *Service) Lapsed(ctx context.Context, agent store.Agent, p *agentv1.CommandPayload) (string, error) {
	if !s.InForce() {
		return "", nil
	}
	subject, ok := Describe(p, agent.MachineID)
	if !ok {
		return "", nil
	}
	now := s.store.Now()
	all, err := s.store.GrantsEver(ctx, agent.SiteID, subject.Targets[0], maxLapsed)
	if err != nil {
		return "", err
	}
	for _, g := range all {
		if g.Targets, err = s.targetsOf(ctx, g.ID); err != nil {
			return "", err
		}
		terms, err := grants.Parse(g.Payload)
		if err != nil || !allows(terms, g.Targets, subject) || grants.Approved(s.bundle, &agentv1.SignedGrant{Payload: g.Payload, Signatures: g.Signatures}) != nil {
			continue
		}
		var why []string
		for _, t := range subject.Targets {
			n, err := s.store.GrantUses(ctx, g.ID, t)
			if err != nil {
				return "", err
			}
			if n >= terms.GetUsesPerTarget() {
				why = append(why, fmt.Sprintf("is used up for %s (%d of %d)", t, n, terms.GetUsesPerTarget()))
			}
		}
		if !now.Before(g.NotAfter) {
			why = append(why, "ended at "+g.NotAfter.UTC().Format(time.RFC3339))
		}
		if len(why) > 0 {
			return fmt.Sprintf("grant %s covered it and %s", g.ID, strings.Join(why, " and ")), nil
		}
	}
	return "", nil
}

// covers reports whether a grant's terms allow what the command does now.
func covers(g *agentv1.Grant, targets []string, s Subject, now time.Time) bool {
	return g.GetNotBeforeMs() <= now.UnixMilli() && now.UnixMilli() < g.GetNotAfterMs() && allows(g, targets, s)
}

// allows is covers at any time.
func allows(g *agentv1.Grant, targets []string, s Subject) bool {
	return grants.Allows(g, s.Kind, s.Operation, s.Action) && grants.Brings(g, s.Operation, s.Artifacts) == "" &&
		!slices.ContainsFunc(s.Targets, func(t string) bool { _, found := slices.BinarySearch(targets, t); return !found })
}
