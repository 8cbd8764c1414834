package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
)

func runDrivers(ctx context.Context, args []string, std stdio) error {
	return dispatch(ctx, "better-compute drivers", []command{
		{"list", "list the drivers that the gateway registered", driversList},
	}, args, std)
}

func driversList(ctx context.Context, args []string, std stdio) error {
	f := newCall("drivers list [--kind KIND]", std)
	f.about = "Lists the gateway's own drivers and those of its external_drivers. What agents host is found by better-compute place."
	kind := f.String("kind", "", "only drivers that serve this `kind`, such as power")
	_, c, err := f.begin(args, 0, 0)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.drivers().List, &computev1.ListDriversRequest{TenantId: c.tenant, Kind: *kind})
	if err != nil {
		return err
	}
	if f.json {
		return printDrivers(std.out, res.Items)
	}
	var rows [][]string
	for _, d := range res.Items {
		rows = append(rows, []string{d.Id, d.Version, d.RunsOn, strings.Join(d.Kinds, ","), strings.Join(d.Capabilities, ","), strings.Join(retrySafe(d), ",")})
	}
	return printTable(std.out, "ID VERSION RUNS-ON KINDS CAPABILITIES RETRY-SAFE", rows)
}

func retrySafe(d *computev1.Driver) []string {
	var all []string
	for _, kind := range slices.Sorted(maps.Keys(d.RetrySafe)) {
		for _, v := range d.RetrySafe[kind].GetValues() {
			all = append(all, kind+"."+v.GetStringValue())
		}
	}
	return all
}

// printDrivers prints declarations in their own form: a list of what each
// driver says of itself, with nothing left out that is empty.
func printDrivers(w io.Writer, items []*computev1.Driver) error {
	type declaration struct {
		ID           string              `json:"id"`
		Version      string              `json:"version"`
		RunsOn       string              `json:"runsOn"`
		Kinds        []string            `json:"kinds"`
		Capabilities []string            `json:"capabilities"`
		RetrySafe    map[string][]string `json:"retrySafe"`
	}
	out := []declaration{}
	for _, d := range items {
		one := declaration{d.Id, d.Version, d.RunsOn, append([]string{}, d.Kinds...), append([]string{}, d.Capabilities...), map[string][]string{}}
		for kind, list := range d.RetrySafe {
			for _, v := range list.GetValues() {
				one.RetrySafe[kind] = append(one.RetrySafe[kind], v.GetStringValue())
			}
		}
		out = append(out, one)
	}
	data, err := json.MarshalIndent(out, "", "  ")
	if err != nil {
		return fmt.Errorf("print: %w", err)
	}
	_, err = fmt.Fprintf(w, "%s\n", data)
	return err
}
