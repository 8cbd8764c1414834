package main

import (
	"context"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
)

func runPool(ctx context.Context, args []string, std stdio) error {
	return dispatch(ctx, "better-compute pool", []command{
		{"add", "add a pool of machines at a site", poolAdd},
		{"list", "list pools", poolList},
	}, args, std)
}

func poolAdd(ctx context.Context, args []string, std stdio) error {
	f := newCall("pool add NAME --site SITE [--hardware-profile NAME]", std)
	site := f.String("site", "", "the `site`'s name or id")
	profile := f.String("hardware-profile", "", "`name` of the hardware profile of the pool's machines, one of gateway.toml's")
	f.need("site")
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.pools().Add, &computev1.AddPoolRequest{TenantId: c.tenant, Name: rest[0], Site: *site, Policy: &computev1.PoolPolicy{HardwareProfile: *profile}})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	return printTable(std.out, poolHead, [][]string{poolRow(res.Pool)})
}

func poolList(ctx context.Context, args []string, std stdio) error {
	f := newCall("pool list", std)
	_, c, err := f.begin(args, 0, 0)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.pools().List, &computev1.ListPoolsRequest{TenantId: c.tenant})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	var rows [][]string
	for _, p := range res.Items {
		rows = append(rows, poolRow(p))
	}
	return printTable(std.out, poolHead, rows)
}

const poolHead = "NAME ID SITE HARDWARE-PROFILE"

func poolRow(p *computev1.Pool) []string {
	return []string{p.GetName(), p.GetId(), p.GetSiteId(), p.GetPolicy().GetHardwareProfile()}
}
