package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
)

func runSite(ctx context.Context, args []string, std stdio) error {
	return dispatch(ctx, "better-compute site", []command{
		{"add", "add a site and print its box's join string", siteAdd},
		{"list", "list sites and their boxes", siteList},
	}, args, std)
}

// siteAdd prints nothing but the join string on standard output, so that it
// can go straight into a file.
func siteAdd(ctx context.Context, args []string, std stdio) error {
	f := newCall("site add NAME", std)
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.sites().Add, &computev1.AddSiteRequest{TenantId: c.tenant, Name: rest[0]})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	fmt.Fprintf(std.err, "site %s (%s) added; its join string holds a one-time token: keep it in a file of mode 0600 until the box has enrolled\n", res.Site.GetName(), res.Site.GetId())
	_, err = fmt.Fprintln(std.out, res.JoinString)
	return err
}

func siteList(ctx context.Context, args []string, std stdio) error {
	f := newCall("site list", std)
	_, c, err := f.begin(args, 0, 0)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.sites().List, &computev1.ListSitesRequest{TenantId: c.tenant})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	var rows [][]string
	for _, s := range res.Items {
		rows = append(rows, []string{s.Name, s.Id, s.State, s.AgentId, s.Version, clock(s.LastSeenMs), strings.Join(s.Drivers, ",")})
	}
	return printTable(std.out, "NAME ID STATE AGENT VERSION LAST-SEEN DRIVERS", rows)
}
