package host

import (
	"context"
	"encoding/json"
	"errors"
	"net/url"
	"slices"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// Egress lets a plugin's uid reach the addresses of one call.
type Egress interface {
	// Allow opens the way to targets, each a host or host:port, before it
	// returns; release closes it again.
	Allow(ctx context.Context, uid int, targets []string) (release func(), err error)
}

// maxTargets bounds the addresses of one call.
const maxTargets = 64

// addresses are the top-level fields of a configuration that hold an address: those
// that the schema calls a URI, and the one named address.
func addresses(schema json.RawMessage) []string {
	var s struct {
		Properties map[string]struct {
			Format string `json:"format"`
		} `json:"properties"`
	}
	// A schema that cannot be read names no field; the driver's host checks it.
	_ = json.Unmarshal(schema, &s)
	names := []string{"address"}
	for name, p := range s.Properties {
		if p.Format == "uri" || p.Format == "url" {
			names = append(names, name)
		}
	}
	return names
}

// targets finds the addresses in a configuration: what its fields of these names hold.
func targets(names []string, config json.RawMessage) []string {
	var fields map[string]json.RawMessage
	if json.Unmarshal(config, &fields) != nil {
		return nil
	}
	var list []string
	for name, raw := range fields {
		if !slices.Contains(names, name) {
			continue
		}
		var text string
		if json.Unmarshal(raw, &text) != nil {
			continue
		}
		if t := target(text); t != "" && !slices.Contains(list, t) {
			list = append(list, t)
		}
	}
	slices.Sort(list)
	return list[:min(len(list), maxTargets)]
}

// target is the host, or host:port, of an address or a URL; empty: there is none.
func target(text string) string {
	if len(text) > 2048 || strings.ContainsAny(text, " \t\r\n\x00") {
		return ""
	}
	if strings.Contains(text, "://") {
		u, err := url.Parse(text)
		if err != nil {
			return ""
		}
		return u.Host
	}
	host, _, _ := strings.Cut(text, "/")
	return host
}

// admit opens the way for a call of a confined plugin.
func (p *plugin) admit(ctx context.Context, driver string, config json.RawMessage) (release func(), err error) {
	if p.launch.egress == nil || !p.launch.confine || p.launch.uid < 0 {
		return func() {}, nil
	}
	to := targets(p.addresses[driver], config)
	release, err = p.launch.egress.Allow(ctx, p.launch.uid, to)
	var coded *errs.Error
	switch {
	case err == nil:
		return release, nil
	case errors.As(err, &coded):
		return nil, coded
	}
	return nil, errs.Retry(errs.Unavailable, "open the way to %s for plugin %s: %v", strings.Join(to, ", "), p.launch.pin.Name, err)
}
