package redfish

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// maxSystems is how many systems of one BMC are looked at.
const maxSystems = 16

// system is what we need of a ComputerSystem.
type system struct {
	object
	path    string
	etag    string
	power   string   // as the BMC says it
	kind    string   // SystemType; empty: not said
	reset   string   // target of the reset action; empty: none
	resets  []string // allowed reset types; nil: not said
	info    string   // path of what else the reset action says of itself; empty: none
	boot    object
	targets []string // allowed boot targets; nil: not said
	enables []string // allowed values of BootSourceOverrideEnabled; nil: not said
	pending string   // path of the settings object; empty: none
}

// resolver turns an identifier of an answer into a path.
type resolver func(id string) (string, error)

func parseSystem(path string, data []byte, resolve resolver) (*system, error) {
	o, err := parseObject(data)
	if err != nil {
		return nil, err
	}
	s := &system{object: o, path: path, etag: o.text("@odata.etag"), power: o.text("PowerState"), kind: o.text("SystemType"), boot: o.object("Boot")}
	action := o.object("Actions").object("#ComputerSystem.Reset")
	for _, link := range []struct {
		id   string
		into *string
	}{
		{action.text("target"), &s.reset},
		{action.text("@Redfish.ActionInfo"), &s.info},
		{o.object("@Redfish.Settings").object("SettingsObject").text("@odata.id"), &s.pending},
	} {
		if link.id == "" {
			continue
		}
		if *link.into, err = resolve(link.id); err != nil {
			return nil, err
		}
	}
	s.resets = action.texts("ResetType@Redfish.AllowableValues")
	if s.targets = s.boot.texts("BootSourceOverrideTarget@Redfish.AllowableValues"); s.targets == nil {
		s.targets = s.boot.texts("BootSourceOverrideSupported") // its name in the first version
	}
	s.enables = s.boot.texts("BootSourceOverrideEnabled@Redfish.AllowableValues")
	return s, nil
}

// is reports whether the resource is a system. Some BMCs list a manager among
// their systems.
func (s *system) is() bool {
	if kind := s.text("@odata.type"); kind != "" {
		return strings.HasPrefix(kind, "#ComputerSystem.")
	}
	return !strings.Contains(s.path, "/Managers/") && !strings.Contains(s.path, "/Chassis/")
}

// powerState is on, off or unknown.
func (s *system) powerState() string {
	switch strings.ToLower(s.power) {
	case "on", "paused":
		return "on"
	case "off":
		return "off"
	}
	return "unknown"
}

// systems is the path of the collection.
func (p *provider) systems() string { return p.collection("Systems", systemsPath) }

// collection is the path that the service root has for name, or the standard's.
func (p *provider) collection(name, standard string) string {
	p.mu.Lock()
	root := p.service
	p.mu.Unlock()
	if path, err := p.linkOr(root, name, standard); err == nil {
		return path
	}
	return standard
}

// find is the one system that the BMC drives, whose place is remembered.
func (p *provider) find(ctx context.Context) (*system, error) {
	p.mu.Lock()
	known := p.conn.system
	p.mu.Unlock()
	if known != "" {
		if s, err := p.read(ctx, known); !absent(err) {
			return s, err
		}
	}
	s, err := p.search(ctx)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	p.conn.system = s.path
	p.mu.Unlock()
	return s, nil
}

// search looks through the collection. Beside the host some BMCs list composed
// systems and boards, which have no reset of their own.
func (p *provider) search(ctx context.Context) (*system, error) {
	root, err := p.root(ctx)
	if err != nil {
		return nil, err
	}
	path, err := p.linkOr(root, "Systems", systemsPath)
	if err != nil {
		return nil, err
	}
	members, err := p.members(ctx, path)
	if err != nil {
		return nil, err
	}
	if len(members) > maxSystems {
		return nil, errs.New(errs.BmcError, "the BMC lists %d systems, more than %d", len(members), maxSystems)
	}
	var all, hosts []*system
	for _, id := range members {
		s, err := p.read(ctx, id)
		if err != nil {
			return nil, err
		}
		if !s.is() {
			continue
		}
		all = append(all, s)
		if s.reset != "" && (s.kind == "" || strings.EqualFold(s.kind, "Physical")) {
			hosts = append(hosts, s)
		}
	}
	switch {
	case len(all) == 0:
		return nil, errs.New(errs.BmcError, "the BMC lists no system")
	case len(all) == 1:
		return all[0], nil
	case len(hosts) == 1:
		return hosts[0], nil
	}
	return nil, errs.New(errs.BmcError, "the BMC lists %d systems, %d of them hosts: which one is meant cannot be told", len(all), len(hosts))
}

func (p *provider) read(ctx context.Context, path string) (*system, error) {
	a, err := p.send(ctx, http.MethodGet, path, nil, nil)
	if err != nil {
		return nil, err
	}
	if a.status != http.StatusOK {
		return nil, statusError("read "+path, a)
	}
	s, err := parseSystem(path, a.body, p.resource)
	if err != nil {
		return nil, err
	}
	p.remember(path, a, s.object)
	s.etag = p.etags[path]
	return s, nil
}

// manager is the BMC itself: the manager of the system, or the only one there is.
func (p *provider) manager(ctx context.Context) (string, object, error) {
	s, err := p.find(ctx)
	if err != nil {
		return "", nil, err
	}
	candidates := s.object.object("Links").links("ManagedBy")
	if len(candidates) == 0 {
		if candidates, err = p.members(ctx, p.collection("Managers", managersPath)); err != nil {
			return "", nil, err
		}
	}
	if len(candidates) == 0 {
		return "", nil, errs.New(errs.BmcError, "the BMC lists no manager")
	}
	var first string
	var firstObject object
	for _, id := range candidates[:min(len(candidates), maxSystems)] {
		path, err := p.resource(id)
		if err != nil {
			return "", nil, err
		}
		o, err := p.get(ctx, path)
		if err != nil {
			return "", nil, err
		}
		if len(candidates) == 1 || strings.EqualFold(o.text("ManagerType"), "BMC") {
			return path, o, nil
		}
		if firstObject == nil {
			first, firstObject = path, o
		}
	}
	return first, firstObject, nil
}

// allowed are the values that an action takes for a parameter: as it says beside
// itself, or in the resource that says more of it. nil: not said.
func (p *provider) allowed(ctx context.Context, action object, parameter string) ([]string, error) {
	if values := action.texts(parameter + "@Redfish.AllowableValues"); values != nil {
		return values, nil
	}
	id := action.text("@Redfish.ActionInfo")
	if id == "" {
		return nil, nil
	}
	path, err := p.resource(id)
	if err != nil {
		return nil, err
	}
	info, err := p.get(ctx, path)
	if errs.CodeOf(err) == errs.BmcError {
		return nil, nil // a BMC that points at nothing has not said what it takes
	}
	if err != nil {
		return nil, err
	}
	for _, o := range info.objects("Parameters") {
		if strings.EqualFold(o.text("Name"), parameter) {
			return o.texts("AllowableValues"), nil
		}
	}
	return nil, nil
}

// encode writes a request's body; nil is none.
func encode(body any) ([]byte, error) {
	if body == nil {
		return nil, nil
	}
	if body == nil {
		return nil, nil
	}
	raw, err := json.Marshal(body)
	if err != nil {
		return nil, errs.New(errs.Internal, "encode a request: %v", err)
	}
	return raw, nil
}
