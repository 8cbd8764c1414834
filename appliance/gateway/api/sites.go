package api

import (
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

// joinLife is how long a site's join string waits to be used.
const joinLife = 30 * 24 * time.Hour

type siteService struct{ *API }

// Add makes a site and the join string of its box.
func (s siteService) Add(ctx context.Context, req *connect.Request[computev1.AddSiteRequest]) (*connect.Response[computev1.AddSiteResponse], error) {
	m := req.Msg
	if err := checkName("name", m.Name); err != nil {
		return nil, err
	}
	if _, err := s.Store.Site(ctx, m.TenantId, m.Name); err == nil {
		return nil, apierr.Taken("there is a site %s already", m.Name)
	} else if !errors.Is(err, store.ErrNotFound) {
		return nil, err
	}
	site := store.Site{ID: s.Store.NewID("site"), TenantID: m.TenantId, Name: m.Name, Created: s.Store.Now()}
	// The token first: a site without one could never be joined.
	join, err := s.Enrol.NewToken(ctx, agentv1.Role_ROLE_SITE, site.ID, "", joinLife)
	if err != nil {
		return nil, err
	}
	if err := s.Store.AddSite(ctx, site); err != nil {
		return nil, err
	}
	s.audit(ctx, site.ID, "", "site.added", map[string]string{"name": site.Name})
	return connect.NewResponse(&computev1.AddSiteResponse{Site: &computev1.Site{Id: site.ID, Name: site.Name, State: "new"}, JoinString: join}), nil
}

// List tells each site's box and how it is.
func (s siteService) List(ctx context.Context, req *connect.Request[computev1.ListSitesRequest]) (*connect.Response[computev1.ListSitesResponse], error) {
	sites, err := s.Store.Sites(ctx, req.Msg.TenantId)
	if err != nil {
		return nil, err
	}
	res := &computev1.ListSitesResponse{}
	for _, site := range sites {
		item := &computev1.Site{Id: site.ID, Name: site.Name, State: "new"}
		agent, ok, err := s.siteAgent(ctx, site.ID)
		if err != nil {
			return nil, err
		}
		if ok {
			item.AgentId, item.State, item.LastSeenMs, item.Version = agent.ID, "offline", unixMS(agent.LastSeen), agent.Version
			if s.Online(agent.ID) {
				item.State = "online"
			}
			for _, d := range agent.Drivers {
				item.Drivers = append(item.Drivers, d.GetId()+"@"+d.GetVersion())
			}
		}
		res.Items = append(res.Items, item)
	}
	return connect.NewResponse(res), nil
}

type poolService struct{ *API }

// Add makes a pool at a site.
func (s poolService) Add(ctx context.Context, req *connect.Request[computev1.AddPoolRequest]) (*connect.Response[computev1.AddPoolResponse], error) {
	m := req.Msg
	if err := checkName("name", m.Name); err != nil {
		return nil, err
	}
	site, err := s.Store.Site(ctx, m.TenantId, m.Site)
	if err != nil {
		return nil, err
	}
	profile := m.Policy.GetHardwareProfile()
	if err := s.Metal.CheckName("policy.hardware_profile", profile); err != nil {
		return nil, err
	}
	pool := store.Pool{ID: s.Store.NewID("pool"), TenantID: m.TenantId, Name: m.Name, SiteID: site.ID, HardwareProfile: profile, Created: s.Store.Now()}
	if err := s.Store.AddPool(ctx, pool); err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.AddPoolResponse{Pool: wirePool(pool)}), nil
}

// List tells the tenant's pools.
func (s poolService) List(ctx context.Context, req *connect.Request[computev1.ListPoolsRequest]) (*connect.Response[computev1.ListPoolsResponse], error) {
	pools, err := s.Store.Pools(ctx, req.Msg.TenantId)
	if err != nil {
		return nil, err
	}
	res := &computev1.ListPoolsResponse{}
	for _, pool := range pools {
		res.Items = append(res.Items, wirePool(pool))
	}
	return connect.NewResponse(res), nil
}

func wirePool(p store.Pool) *computev1.Pool {
	out := &computev1.Pool{Id: p.ID, Name: p.Name, SiteId: p.SiteID}
	if p.HardwareProfile != "" {
		out.Policy = &computev1.PoolPolicy{HardwareProfile: p.HardwareProfile}
	}
	return out
}

type secretService struct{ *API }

// Put keeps a secret encrypted; no call gives it out again.
func (s secretService) Put(ctx context.Context, req *connect.Request[computev1.PutSecretRequest]) (*connect.Response[computev1.PutSecretResponse], error) {
	value := secret.New(req.Msg.Value)
	defer value.Wipe()
	ref, err := s.Secrets.Put(ctx, req.Msg.TenantId, req.Msg.Name, value)
	if e := (*errs.Error)(nil); errors.As(err, &e) && e.Code == errs.InvalidArgs {
		return nil, apierr.Invalid("%s", e.Message)
	}
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.PutSecretResponse{Ref: ref}), nil
}
