package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
)

func runPlace(ctx context.Context, args []string, std stdio) error {
	f := newCall("place [--label KEY=VALUE …] [--site SITE]", std)
	f.about = "Finds agents that carry every given label. The value * takes any."
	var labels stringList
	site := f.String("site", "", "only agents of this `site`")
	f.Var(&labels, "label", "`KEY=VALUE` that an agent must carry; may be given several times")
	_, c, err := f.begin(args, 0, 0)
	if err != nil {
		return err
	}
	want, err := parseLabels(labels)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.placement().Find, &computev1.PlacementRequest{TenantId: c.tenant, NodeLabels: want, Site: *site})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	var rows [][]string
	for _, p := range res.Items {
		state := "offline"
		if p.Online {
			state = "online"
		}
		var all []string
		for _, key := range slices.Sorted(maps.Keys(p.Labels)) {
			all = append(all, key+"="+p.Labels[key])
		}
		rows = append(rows, []string{p.AgentId, p.Role, state, p.SiteId, p.MachineId, strings.Join(all, " ")})
	}
	return printTable(std.out, "AGENT ROLE STATE SITE MACHINE LABELS", rows)
}

// parseLabels reads KEY=VALUE; a key is given once.
func parseLabels(list []string) (map[string]string, error) {
	labels := map[string]string{}
	for _, text := range list {
		key, value, ok := strings.Cut(text, "=")
		if !ok || key == "" || value == "" {
			return nil, fmt.Errorf("--label %q: want KEY=VALUE, or KEY='*' for any value", text)
		}
		if _, twice := labels[key]; twice {
			return nil, fmt.Errorf("--label %s is given twice", key)
		}
		labels[key] = value
	}
	return labels, nil
}
