package main

import (
	"context"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
)

func runEvents(ctx context.Context, args []string, std stdio) error {
	f := newCall("events [--site SITE] [--limit N]", std)
	site := f.String("site", "", "only of this `site`, by name or id")
	limit := f.Uint("limit", 100, "at most this many, newest last")
	_, c, err := f.begin(args, 0, 0)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.events().List, &computev1.ListEventsRequest{TenantId: c.tenant, Site: *site, Limit: uint32(min(*limit, 1<<31))})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	var rows [][]string
	for _, e := range res.Items {
		rows = append(rows, []string{clock(e.AtMs), e.SiteId, e.AgentId, e.Class, e.Name, e.BodyJson})
	}
	return printTable(std.out, "AT SITE AGENT CLASS NAME BODY", rows)
}
