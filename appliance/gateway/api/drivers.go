package api

import (
	"cmp"
	"context"
	"regexp"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/placement"
	"github.com/better-compute/site-appliance/plugins/driver"
)

type driverService struct{ *API }

var kindFilter = regexp.MustCompile(`^[a-z0-9-]{1,64}$`)

// List tells the drivers that the deployment registered: declarations, never a
// configuration.
func (s driverService) List(_ context.Context, req *connect.Request[computev1.ListDriversRequest]) (*connect.Response[computev1.ListDriversResponse], error) {
	kind := req.Msg.Kind
	if kind != "" && !kindFilter.MatchString(kind) {
		return nil, apierr.Invalid("kind %.80q: want lower-case letters, digits and hyphens, at most 64", kind)
	}
	res := &computev1.ListDriversResponse{}
	for _, m := range s.Drivers.List(kind) {
		res.Items = append(res.Items, wireDriver(m))
	}
	return connect.NewResponse(res), nil
}

// wireDriver leaves out the schema: what a configuration looks like is between
// the driver and who binds it.
func wireDriver(m driver.Manifest) *computev1.Driver {
	out := &computev1.Driver{
		Id: m.ID, Version: m.Version, RunsOn: m.RunsOn, Kinds: slices.Sorted(slices.Values(m.Kinds)),
		Capabilities: slices.Sorted(slices.Values(m.Capabilities)), RetrySafe: map[string]*structpb.ListValue{},
	}
	for _, operation := range slices.Sorted(slices.Values(m.RetrySafe)) {
		kind, name, _ := strings.Cut(operation, ".")
		if out.RetrySafe[kind] == nil {
			out.RetrySafe[kind] = &structpb.ListValue{}
		}
		out.RetrySafe[kind].Values = append(out.RetrySafe[kind].Values, structpb.NewStringValue(name))
	}
	return out
}

type placementService struct{ *API }

// Find tells the tenant's agents that carry every label that is asked for.
func (s placementService) Find(ctx context.Context, req *connect.Request[computev1.PlacementRequest]) (*connect.Response[computev1.PlacementResponse], error) {
	in := req.Msg
	want, err := placement.Want(in.NodeLabels)
	if err != nil {
		return nil, apierr.Invalid("%v", err)
	}
	siteID := ""
	if in.Site != "" {
		site, err := s.Store.Site(ctx, in.TenantId, in.Site)
		if err != nil {
			return nil, err
		}
		siteID = site.ID
	}
	candidates, err := s.Store.Candidates(ctx, in.TenantId, siteID, want)
	if err != nil {
		return nil, err
	}
	res := &computev1.PlacementResponse{}
	for _, c := range candidates {
		res.Items = append(res.Items, &computev1.PlacementCandidate{AgentId: c.AgentID, Role: roleName(c.Role), SiteId: c.SiteID, MachineId: c.MachineID,
			Online: s.Online(c.AgentID), Labels: c.Labels})
	}
	slices.SortStableFunc(res.Items, func(a, b *computev1.PlacementCandidate) int {
		switch {
		case a.Online && !b.Online:
			return -1
		case b.Online && !a.Online:
			return 1
		}
		return cmp.Compare(a.AgentId, b.AgentId)
	})
	return connect.NewResponse(res), nil
}

func roleName(role agentv1.Role) string {
	return map[agentv1.Role]string{agentv1.Role_ROLE_SITE: "site", agentv1.Role_ROLE_RAMDISK: "ramdisk", agentv1.Role_ROLE_NODE: "node"}[role]
}
