package api

import (
	"context"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/grants"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

// Grants keeps what people approve of destructive work.
type Grants interface {
	Propose(ctx context.Context, p grants.Proposal) (store.Grant, error)
	Approve(ctx context.Context, tenantID, id string, sig *agentv1.Signature) (store.Grant, error)
	Approvers(g store.Grant) (signed []string, needed int)
	InForce() bool
}

type grantService struct{ *API }

const (
	// maxGrantMachines is what a site has at most.
	maxGrantMachines = 4096
	// maxGrants bounds a list; older ones are not told.
	maxGrants = 200
)

// Propose writes down what people are asked to approve.
func (s grantService) Propose(ctx context.Context, req *connect.Request[computev1.ProposeGrantRequest]) (*connect.Response[computev1.ProposeGrantResponse], error) {
	in := req.Msg
	switch {
	case !s.Grants.InForce():
		return nil, apierr.Cannot("no-approvers", "no box asks for grants: the trust bundle has fewer than two approvers (better-compute gateway bundle add-approver)")
	case len(in.Machines)+len(in.Bmcs) > maxGrantMachines:
		return nil, apierr.Invalid("machines and bmcs: at most %d, not %d", maxGrantMachines, len(in.Machines)+len(in.Bmcs))
	}
	p := grants.Proposal{TenantID: in.TenantId, Artifacts: in.ArtifactSha256, Uses: in.UsesPerTarget, Valid: time.Duration(in.ValidS) * time.Second, Reason: in.Reason}
	for _, o := range in.Operations {
		p.Operations = append(p.Operations, &agentv1.GrantOperation{Kind: o.GetKind(), Operation: o.GetOperation(), Action: o.GetAction()})
	}
	for _, name := range in.Machines {
		m, err := s.Store.Machine(ctx, in.TenantId, name)
		if err != nil {
			return nil, err
		}
		p.Machines = append(p.Machines, m)
	}
	for _, b := range in.Bmcs {
		p.BMCs = append(p.BMCs, store.BMC{Driver: b.GetDriver(), Address: b.GetAddress()})
	}
	if in.Site != "" {
		site, err := s.Store.Site(ctx, in.TenantId, in.Site)
		if err != nil {
			return nil, err
		}
		p.SiteID = site.ID
	}
	g, err := s.Grants.Propose(ctx, p)
	if err != nil {
		return nil, err
	}
	s.audit(ctx, g.SiteID, "", "grant.proposed", map[string]string{"grant": g.ID, "reason": in.Reason})
	return connect.NewResponse(&computev1.ProposeGrantResponse{Grant: s.record(g)}), nil
}

// Get tells one grant of the tenant.
func (s grantService) Get(ctx context.Context, req *connect.Request[computev1.GetGrantRequest]) (*connect.Response[computev1.GetGrantResponse], error) {
	g, err := s.Store.Grant(ctx, req.Msg.TenantId, req.Msg.GrantId)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.GetGrantResponse{Grant: s.record(g)}), nil
}

// List tells the tenant's grants, the newest first.
func (s grantService) List(ctx context.Context, req *connect.Request[computev1.ListGrantsRequest]) (*connect.Response[computev1.ListGrantsResponse], error) {
	all, err := s.Store.Grants(ctx, req.Msg.TenantId, maxGrants)
	if err != nil {
		return nil, err
	}
	res := &computev1.ListGrantsResponse{}
	for _, g := range all {
		res.Items = append(res.Items, s.record(g))
	}
	return connect.NewResponse(res), nil
}

// Approve takes an approver's signature. Whose it is says the key, not the token.
func (s grantService) Approve(ctx context.Context, req *connect.Request[computev1.ApproveGrantRequest]) (*connect.Response[computev1.ApproveGrantResponse], error) {
	g, err := s.Grants.Approve(ctx, req.Msg.TenantId, req.Msg.GrantId, &agentv1.Signature{KeyId: req.Msg.KeyId, Signature: req.Msg.Signature})
	if err != nil {
		return nil, err
	}
	s.audit(ctx, g.SiteID, "", "grant.approved", map[string]string{"grant": g.ID, "approver": req.Msg.KeyId})
	return connect.NewResponse(&computev1.ApproveGrantResponse{Grant: s.record(g)}), nil
}

func (s grantService) record(g store.Grant) *computev1.GrantRecord {
	signed, needed := s.Grants.Approvers(g)
	return &computev1.GrantRecord{
		GrantId: g.ID, Payload: g.Payload, Targets: g.Targets, Approvers: signed, Needed: uint32(needed), ProposedMs: unixMS(g.Proposed),
	}
}
