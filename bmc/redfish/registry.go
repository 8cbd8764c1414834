package redfish

import (
	"context"
	"strings"
)

// attribute is what a BIOS attribute registry says of one setting.
type attribute struct {
	readOnly bool
	values   []string // of an enumeration
	standard any      // its default; nil: not said
}

// registry reads what the BMC says of its settings. Most say nothing: then the
// values that they show are all that is known. Only the loss of the BMC is an error.
func (p *provider) registry(ctx context.Context, b bios) (map[string]attribute, error) {
	for _, path := range p.registryPaths(ctx, b) {
		o, err := p.get(ctx, path)
		if fatal(ctx, err) {
			return nil, err
		}
		if list := attributes(o); len(list) > 0 {
			return list, nil
		}
	}
	return nil, nil
}

// registryPaths are where the registry that b names may be.
func (p *provider) registryPaths(ctx context.Context, b bios) []string {
	var paths []string
	name := b.resource.text("AttributeRegistry")
	root, err := p.root(ctx)
	if err != nil || name == "" {
		return nil
	}
	if registries := p.link(root, "Registries"); registries != "" {
		members, _ := p.members(ctx, registries)
		for _, id := range members {
			if !strings.EqualFold(lastPart(id), name) && !strings.HasPrefix(lastPart(id), strings.SplitN(name, ".", 2)[0]) {
				continue
			}
			file, err := p.get(ctx, id)
			if err != nil {
				continue
			}
			for _, l := range file.objects("Location") {
				if path := p.path(l.text("Uri")); path != "" && (l.text("Language") == "" || strings.HasPrefix(l.text("Language"), "en")) {
					paths = append(paths, path)
				}
			}
		}
	}
	return append(paths, strings.TrimSuffix(b.path, "/")+"/BiosRegistry")
}

// attributes reads a registry.
func attributes(o object) map[string]attribute {
	out := map[string]attribute{}
	for _, a := range o.object("RegistryEntries").objects("Attributes") {
		name := a.text("AttributeName")
		if name == "" {
			continue
		}
		entry := attribute{standard: scalar(a["DefaultValue"])}
		entry.readOnly, _ = a.boolean("ReadOnly")
		if strings.EqualFold(a.text("Type"), "Enumeration") {
			for _, v := range a.objects("Value") {
				if word := v.text("ValueName"); word != "" {
					entry.values = append(entry.values, word)
				}
			}
		}
		out[name] = entry
	}
	return out
}
