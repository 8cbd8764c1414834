package api

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/discovery"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/pxe/productuuid"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// Discovery has boxes hear of what changed.
type Discovery interface{ Changed() }

func (a *API) changed() {
	if a.Discovery != nil {
		a.Discovery.Changed()
	}
}

// parseExpected reads MACs and product UUIDs, in any spelling.
func parseExpected(list []string) ([]string, error) {
	if len(list) > metal.MaxExpected {
		return nil, apierr.Invalid("policy.expected: at most %d, not %d", metal.MaxExpected, len(list))
	}
	var out []string
	for i, text := range list {
		if uuid, ok := productuuid.Parse(text); ok {
			if productuuid.None(uuid) {
				return nil, apierr.Invalid("policy.expected[%d]: many machines have the product UUID %s", i, uuid)
			}
			out = append(out, uuid)
			continue
		}
		mac, err := parseMAC(text)
		if err != nil {
			return nil, apierr.Invalid("policy.expected[%d] %.80q: want a MAC such as 52:54:00:12:34:56, or a product UUID", i, text)
		}
		out = append(out, mac)
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

func parseMAC(text string) (string, error) {
	macs, err := metal.ParseMACs([]string{text})
	if err != nil {
		return "", err
	}
	return macs[0], nil
}

// SetUnknown says what a site does with machines that nobody enrolled.
func (s siteService) SetUnknown(ctx context.Context, req *connect.Request[computev1.SetUnknownRequest]) (*connect.Response[computev1.SetUnknownResponse], error) {
	site, err := s.Store.Site(ctx, req.Msg.TenantId, req.Msg.Site)
	if err != nil {
		return nil, err
	}
	policy := req.Msg.Policy
	if policy == nil {
		return nil, apierr.Invalid("policy is missing")
	}
	expected, err := parseExpected(policy.Expected)
	switch {
	case err != nil:
		return nil, err
	case !policy.Inspect && len(expected) > 0:
		return nil, apierr.Invalid("policy.expected: machines are expected only where they are inspected")
	}
	if err := s.Store.SetUnknown(ctx, site.ID, policy.Inspect, expected); err != nil {
		return nil, err
	}
	s.audit(ctx, site.ID, "", "site.unknown-set", map[string]string{"inspect": strconv.FormatBool(policy.Inspect), "expected": strconv.Itoa(len(expected))})
	s.changed()
	out, err := s.policy(ctx, site.ID)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.SetUnknownResponse{Policy: out}), nil
}

// GetUnknown tells it, and whether the site's box knows.
func (s siteService) GetUnknown(ctx context.Context, req *connect.Request[computev1.GetUnknownRequest]) (*connect.Response[computev1.GetUnknownResponse], error) {
	site, err := s.Store.Site(ctx, req.Msg.TenantId, req.Msg.Site)
	if err != nil {
		return nil, err
	}
	out, err := s.policy(ctx, site.ID)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.GetUnknownResponse{Policy: out}), nil
}

func (s siteService) policy(ctx context.Context, siteID string) (*computev1.UnknownPolicy, error) {
	u, err := s.Store.SiteUntold(ctx, siteID)
	if err != nil {
		return nil, err
	}
	box, enrolled, err := s.siteAgent(ctx, siteID)
	if err != nil {
		return nil, err
	}
	return &computev1.UnknownPolicy{Inspect: u.Unknown.Inspect, Expected: u.Unknown.Expected, WindowUntilMs: unixMS(u.Unknown.WindowUntil),
		// A box that was never told anything leaves unknown machines alone.
		Told: u.Changes == 0 || enrolled && !u.Behind(discovery.Life(box))}, nil
}

// ListFound tells of machines that nobody enrolled, and which enrolled ones they seem to be.
func (s metalService) ListFound(ctx context.Context, req *connect.Request[computev1.ListFoundRequest]) (*connect.Response[computev1.ListFoundResponse], error) {
	in := req.Msg
	only := ""
	if in.Mac != "" {
		var err error
		if only, err = parseMAC(in.Mac); err != nil {
			return nil, err
		}
	}
	sites, err := s.sites(ctx, in.TenantId, in.Site)
	if err != nil {
		return nil, err
	}
	machines, err := s.Store.Machines(ctx, in.TenantId)
	if err != nil {
		return nil, err
	}
	res := &computev1.ListFoundResponse{}
	for _, site := range sites {
		found, err := s.Store.FoundAt(ctx, site.ID)
		if err != nil {
			return nil, err
		}
		for _, m := range discovery.Matches(found, slices.DeleteFunc(slices.Clone(machines), func(m store.Machine) bool { return m.SiteID != site.ID })) {
			if only != "" && m.MAC != only || only == "" && m.Rejected && !in.Rejected {
				continue
			}
			item := wireFound(site, m)
			if only != "" {
				item.HardwareJson = m.Inspection
			}
			res.Items = append(res.Items, item)
		}
	}
	if only != "" && len(res.Items) == 0 {
		return nil, apierr.Missing("MAC %s: no box of this tenant has found it, or it is a machine's", only)
	}
	return connect.NewResponse(res), nil
}

// sites are the one that is named, or all of the tenant's.
func (a *API) sites(ctx context.Context, tenantID, named string) ([]store.Site, error) {
	if named == "" {
		return a.Store.Sites(ctx, tenantID)
	}
	site, err := a.Store.Site(ctx, tenantID, named)
	return []store.Site{site}, err
}

func wireFound(site store.Site, m discovery.Match) *computev1.FoundMachine {
	out := &computev1.FoundMachine{
		SiteId: site.ID, Site: site.Name, Mac: m.MAC, ProductUuid: m.UUID, Manufacturer: m.Hardware.Manufacturer, Model: m.Hardware.Model, Serial: m.Hardware.Serial,
		Processors: m.Processors(), MemoryBytes: m.Memory(), Interface: m.Interface, Client: m.Client, Class: m.Class, Ip: m.IP,
		FirstSeenMs: unixMS(m.First), LastSeenMs: unixMS(m.Seen), InspectedMs: unixMS(m.Found.Inspected), Notes: m.Notes, Rejected: m.Rejected,
	}
	if !m.Found.Inspected.IsZero() {
		out.Macs = m.MACs
	}
	for _, p := range m.Proposals {
		out.Proposals = append(out.Proposals, &computev1.MacProposal{MachineId: p.Machine.ID, Machine: p.Machine.Name, By: p.By, Reason: p.Reason})
	}
	return out
}

// ConfirmMac makes a MAC one that a machine network-boots by.
func (s metalService) ConfirmMac(ctx context.Context, req *connect.Request[computev1.ConfirmMacRequest]) (*connect.Response[computev1.ConfirmMacResponse], error) {
	in := req.Msg
	mac, err := parseMAC(in.Mac)
	if err != nil {
		return nil, err
	}
	m, err := s.Store.Machine(ctx, in.TenantId, in.Machine)
	if err != nil {
		return nil, err
	}
	has := slices.Contains(m.MACs, mac)
	owner, err := s.Store.MachineOfMAC(ctx, in.TenantId, mac)
	switch {
	case has || errors.Is(err, store.ErrNotFound):
	case err != nil:
		return nil, err
	default:
		return nil, apierr.Taken("MAC %s is machine %s's", mac, owner.Name)
	}
	seen := s.saw(ctx, m.SiteID, mac)
	if !seen && !has {
		elsewhere, err := s.Store.FoundSites(ctx, in.TenantId, mac)
		switch {
		case err != nil:
			return nil, err
		case len(elsewhere) > 0:
			return nil, apierr.Busy("other-site", "MAC %s was found at %s, and machine %s is at another site", mac, strings.Join(s.siteNames(ctx, in.TenantId, elsewhere), " and "), m.Name)
		case !in.Unseen:
			return nil, apierr.Busy("mac-not-seen", "MAC %s was not seen by the box of machine %s's site: whoever is sure of it says --unseen", mac, m.Name)
		}
	}
	err = s.Store.AddMAC(ctx, m.ID, mac, metal.MaxMACs, func(a store.Assignment) error { return s.mayGrow(m.Name, a) })
	if errors.Is(err, store.ErrFull) {
		return nil, apierr.Busy("too-many-macs", "machine %s has %d MACs, and at most %d are allowed", m.Name, len(m.MACs), metal.MaxMACs)
	}
	if err != nil {
		return nil, err
	}
	s.audit(ctx, m.SiteID, m.ID, "machine.mac-confirmed", map[string]string{"mac": mac, "seen": strconv.FormatBool(seen)})
	s.changed()
	if m, err = s.Store.MachineByID(ctx, m.ID); err != nil {
		return nil, err
	}
	out, err := s.wireMachine(ctx, m)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.ConfirmMacResponse{Machine: out}), nil
}

// mayGrow refuses a MAC for a machine that may boot something now, where boxes count
// grants: for the box that is one more machine that boots it, which nobody approved.
func (s metalService) mayGrow(machine string, a store.Assignment) error {
	boots := metal.Netboot(a, s.Store.Now())
	if boots == "" || s.Grants == nil || !s.Grants.InForce() {
		return nil
	}
	return apierr.Busy("boot-window-open", "machine %s may boot %s, and where people approve, its box takes a MAC that comes meanwhile for a network boot that nobody approved. "+
		"Confirm the MAC when that is over. To end it sooner: workflow cancel while its workflow runs, and after that metal boot-disk %[1]s, which switches the machine off, even one that installs now, "+
		"and needs a grant for that where the box asks for one (grant propose --allow off --machine %[1]s). To boot it again: grant propose --allow netboot --machine %[1]s", machine, boots)
}

// siteNames are for people: an id stays where there is no name to be had.
func (a *API) siteNames(ctx context.Context, tenantID string, ids []string) []string {
	names := slices.Clone(ids)
	for i, id := range ids {
		if site, err := a.Store.Site(ctx, tenantID, id); err == nil {
			names[i] = site.Name
		}
	}
	return names
}

// saw says whether a site's box has found the MAC, or a machine with such a port.
func (s metalService) saw(ctx context.Context, siteID, mac string) bool {
	found, err := s.Store.FoundAt(ctx, siteID)
	if err != nil {
		s.Log.Error("found machines are not read", "site", siteID, "err", err)
		return false
	}
	return slices.ContainsFunc(discovery.Matches(found, nil), func(m discovery.Match) bool { return slices.Contains(m.MACs, mac) })
}

// RejectMac keeps a found machine out of the list.
func (s metalService) RejectMac(ctx context.Context, req *connect.Request[computev1.RejectMacRequest]) (*connect.Response[computev1.RejectMacResponse], error) {
	mac, err := parseMAC(req.Msg.Mac)
	if err != nil {
		return nil, err
	}
	siteID := ""
	if req.Msg.Site != "" {
		site, err := s.Store.Site(ctx, req.Msg.TenantId, req.Msg.Site)
		if err != nil {
			return nil, err
		}
		siteID = site.ID
	} else {
		sites, err := s.Store.FoundSites(ctx, req.Msg.TenantId, mac)
		switch {
		case err != nil:
			return nil, err
		case len(sites) > 1:
			return nil, apierr.Invalid("MAC %s was found at %s: name one (--site)", mac, strings.Join(s.siteNames(ctx, req.Msg.TenantId, sites), " and "))
		case len(sites) == 0:
			return nil, apierr.Missing("MAC %s: no box of this tenant has found it, or it is a machine's", mac)
		}
		siteID = sites[0]
	}
	if err := s.Store.RejectFound(ctx, siteID, mac); err != nil {
		return nil, err
	}
	s.audit(ctx, siteID, "", "machine.mac-rejected", map[string]string{"mac": mac})
	return connect.NewResponse(&computev1.RejectMacResponse{}), nil
}

type pxeService struct{ *API }

// Explain asks a site's box what a machine would get from network boot, and why.
func (s pxeService) Explain(ctx context.Context, req *connect.Request[computev1.ExplainBootRequest]) (*connect.Response[computev1.ExplainBootResponse], error) {
	in := req.Msg
	mac, err := parseMAC(in.Mac)
	if err != nil {
		return nil, err
	}
	site, err := s.siteOf(ctx, in.TenantId, in.Site, mac)
	if err != nil {
		return nil, err
	}
	box, err := s.box(ctx, site.ID)
	if e := (*errs.Error)(nil); errors.As(err, &e) {
		return nil, &errs.Error{Code: e.Code, Message: e.Message + " (site " + site.Name + ")", Retryable: e.Retryable}
	}
	if err != nil {
		return nil, err
	}
	c := metal.CommandOf(cmdkind.Explain)
	id, err := s.Commands.Submit(ctx, commands.Spec{AgentID: box.ID, Kind: c.Kind, Lane: c.Lane, Timeout: c.Timeout, Args: &pxev1.ExplainRequest{Mac: mac}, Traceparent: traceparent()})
	if err != nil {
		return nil, err
	}
	outcome, err := s.Commands.Wait(ctx, id)
	switch {
	case err != nil:
		return nil, err
	case outcome.Err != nil:
		return nil, outcome.Err
	}
	var told pxev1.ExplainResult
	if err := proto.Unmarshal(outcome.Result, &told); err != nil {
		return nil, fmt.Errorf("read the answer to %s: %w", cmdkind.Explain, err)
	}
	out := wireExplained(&told)
	out.SiteId, out.Site, out.Mac = site.ID, site.Name, mac
	if m, err := s.Store.Machine(ctx, in.TenantId, told.MachineId); err == nil && m.ID == told.MachineId {
		out.Machine = m.Name
	} else if err != nil && !errors.Is(err, store.ErrNotFound) {
		return nil, err
	}
	return connect.NewResponse(out), nil
}

// siteOf is the site that is named, else the one of the machine with the MAC, else
// the one whose box has found it, else the tenant's only one.
func (s pxeService) siteOf(ctx context.Context, tenantID, named, mac string) (store.Site, error) {
	if named != "" {
		return s.Store.Site(ctx, tenantID, named)
	}
	m, err := s.Store.MachineOfMAC(ctx, tenantID, mac)
	if err == nil {
		return s.Store.Site(ctx, tenantID, m.SiteID)
	}
	if !errors.Is(err, store.ErrNotFound) {
		return store.Site{}, err
	}
	found, err := s.Store.FoundSites(ctx, tenantID, mac)
	if err != nil {
		return store.Site{}, err
	}
	if len(found) == 1 {
		return s.Store.Site(ctx, tenantID, found[0])
	}
	sites, err := s.Store.Sites(ctx, tenantID)
	switch {
	case err != nil:
		return store.Site{}, err
	case len(sites) == 1:
		return sites[0], nil
	}
	return store.Site{}, apierr.Invalid("site is missing: MAC %s is no machine's, and was found at %d of %d sites: name the one whose box is asked (--site)", mac, len(found), len(sites))
}

func wireExplained(r *pxev1.ExplainResult) *computev1.ExplainBootResponse {
	out := &computev1.ExplainBootResponse{MachineId: r.MachineId, WaitsFor: r.WaitsFor, Syslog: r.Syslog}
	for _, a := range r.Answers {
		out.Answers = append(out.Answers, &computev1.BootAnswer{Protocol: a.GetProtocol(), Client: a.GetClient(), Action: a.GetAction(), File: a.GetFile(), Reason: a.GetReason()})
	}
	for _, a := range r.Attempts {
		attempt := &computev1.BootAttempt{BeganMs: a.GetBeganMs(), Interface: a.GetInterface()}
		for _, step := range a.GetSteps() {
			attempt.Steps = append(attempt.Steps, &computev1.BootStep{AtMs: step.GetAtMs(), Stage: step.GetStage(), Client: step.GetClient(), Detail: step.GetDetail()})
		}
		out.Attempts = append(out.Attempts, attempt)
	}
	return out
}

// checkEnrolment refuses a machine that its site could never boot.
func (s metalService) checkEnrolment(ctx context.Context, pool store.Pool, bmc store.BMC, macs []string, uuid string) error {
	if uuid != "" && productuuid.None(uuid) {
		return apierr.Invalid("product_uuid %s: makers gave it to many machines, and it tells this one from no other", uuid)
	}
	_, enrolled, err := s.siteAgent(ctx, pool.SiteID)
	if err != nil {
		return err
	}
	return metal.CheckIdentity(bmc.Driver, pool.Name, enrolled, macs, uuid)
}
