package redfish

import (
	"context"
	"slices"
	"strings"

	bmclib "github.com/bmc-toolbox/bmclib/v2"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// GetLayout reads the volumes of all controllers.
func (m *machine) GetLayout(ctx *driver.Context) (l metal.Layout, err error) {
	err = m.with(ctx, func(_ *bmclib.Client, p *provider) error {
		arrays, err := p.arrays(ctx)
		for _, a := range arrays {
			for _, v := range a.volumes {
				l.Volumes = append(l.Volumes, v.Volume)
			}
		}
		return err
	})
	return l, err
}

// ApplyLayout makes the volumes exactly those of l.
func (m *machine) ApplyLayout(ctx *driver.Context, l metal.Layout) (done metal.Applied, err error) {
	err = m.with(ctx, func(_ *bmclib.Client, p *provider) error {
		done, err = p.applyLayout(ctx, l)
		return err
	})
	return done, err
}

const (
	maxArrays  = 16
	maxVolumes = 256
)

// array is a storage controller with its drives and volumes.
type array struct {
	path, id, name string
	// collection is where volumes are made; empty: nowhere.
	collection string
	drives     []disk
	volumes    []volume
	levels     []string // supported RAID types; nil: not said
	times      []string // when it can do things; nil: not said
}

// disk is one drive and the names that a layout may call it by.
type disk struct {
	path  string
	names []string
}

// name is the one that a layout gives, as an inspection does.
func (d disk) name() string { return d.names[0] }

// volume is one volume of a controller.
type volume struct {
	metal.Volume
	path   string
	drives []string // paths
	ids    []string // what the BMC tells volumes apart by; empty: by nothing
}

// arrays reads every controller with all it has. A layout that left a volume
// out would say that its disks are free, so a failing part is an error.
func (p *provider) arrays(ctx context.Context) ([]array, error) {
	system, err := p.find(ctx)
	if err != nil {
		return nil, err
	}
	path := p.link(system.object, "Storage")
	if path == "" {
		return nil, p.simple(ctx, system.object)
	}
	members, err := p.members(ctx, path)
	if absent(err) {
		return nil, p.simple(ctx, system.object)
	}
	switch {
	case err != nil:
		return nil, err
	case len(members) > maxArrays:
		return nil, errs.New(errs.BmcError, "the BMC lists %d storage controllers, more than %d", len(members), maxArrays)
	}
	var list []array
	for _, id := range members {
		a, err := p.array(ctx, id)
		if err != nil {
			return nil, err
		}
		list = append(list, a)
	}
	return list, nil
}

// simple is the answer for a machine without RAID: no volumes where it has
// plain disks, and unsupported-operation where it shows no storage at all.
func (p *provider) simple(ctx context.Context, system object) error {
	path := p.link(system, "SimpleStorage")
	if path == "" {
		return unsupported("storage")
	}
	_, err := p.members(ctx, path)
	if absent(err) {
		return unsupported("storage")
	}
	return err
}

func (p *provider) array(ctx context.Context, path string) (array, error) {
	o, err := p.get(ctx, path)
	if err != nil {
		return array{}, err
	}
	a := array{path: path, id: first(o.word("Id"), lastPart(path)), name: o.word("Name"), collection: p.link(o, "Volumes")}
	for _, c := range o.objects("StorageControllers") {
		a.levels = append(a.levels, c.texts("SupportedRAIDTypes")...)
	}
	for _, id := range o.links("Drives") {
		path, err := p.resource(id)
		if err != nil {
			return array{}, err
		}
		if len(a.drives) == maxParts {
			return array{}, errs.New(errs.BmcError, "%s has more than %d drives", a.path, maxParts)
		}
		d, err := p.get(ctx, path)
		if err != nil && !absent(err) {
			return array{}, err
		}
		a.drives = append(a.drives, newDisk(path, d))
	}
	if a.collection == "" {
		return a, nil
	}
	var members []string
	err = p.pages(ctx, a.collection, func(o object) error {
		for _, id := range o.links("Members") {
			path, err := p.resource(id)
			if err != nil {
				return err
			}
			members = append(members, path)
		}
		if times := o.object("@Redfish.OperationApplyTimeSupport").texts("SupportedValues"); times != nil {
			a.times = times
		}
		if len(members) > maxVolumes {
			return errs.New(errs.BmcError, "%s has more than %d volumes", a.path, maxVolumes)
		}
		return nil
	})
	if absent(err) { // a plain adapter
		a.collection = ""
		return a, nil
	}
	if err != nil {
		return array{}, err
	}
	for _, path := range members {
		o, err := p.get(ctx, path)
		if err != nil {
			return array{}, err
		}
		if v, ok := p.volume(path, o, a); ok {
			a.volumes = append(a.volumes, v)
		}
	}
	return a, nil
}

func newDisk(path string, o object) disk {
	d := disk{path: path}
	location := o.object("PhysicalLocation").object("PartLocation")
	for _, name := range []string{o.word("SerialNumber"), o.word("Id"), word(lastPart(path)), location.word("ServiceLabel"), o.word("Name")} {
		if name != "" && !slices.Contains(d.names, name) {
			d.names = append(d.names, name)
		}
	}
	if d.names == nil {
		d.names = []string{path}
	}
	return d
}

// volumeTypes are the levels of volumes that have no RAIDType.
var volumeTypes = map[string]string{
	"NonRedundant": "0", "Mirrored": "1", "StripedWithParity": "5", "SpannedMirrors": "10", "SpannedStripesWithParity": "50",
}

// volume decodes one; what is a bare disk is none.
func (p *provider) volume(path string, o object, a array) (volume, bool) {
	kind, raid := o.text("VolumeType"), o.text("RAIDType")
	if strings.EqualFold(kind, "RawDevice") || strings.EqualFold(raid, "None") {
		return volume{}, false
	}
	v := volume{path: path, Volume: metal.Volume{
		Name:       first(o.word("DisplayName"), o.word("Name"), o.word("Id"), word(lastPart(path))),
		Level:      first(strings.TrimPrefix(word(raid), "RAID"), volumeTypes[kind], word(kind), "unknown"),
		Controller: a.id,
		SizeBytes:  o.count("CapacityBytes", maxBytes),
		Drives:     []string{},
	}}
	for _, id := range append(o.objects("Identifiers"), object{"DurableName": o["UUID"]}) {
		if text := id.text("DurableName"); text != "" {
			v.ids = append(v.ids, strings.ToLower(text))
		}
	}
	ids := o.object("Links").links("Drives")
	for _, source := range o.objects("CapacitySources") {
		if len(ids) == 0 {
			ids = append(ids, source.links("ProvidingDrives")...)
		}
	}
	for _, id := range ids {
		path := p.path(id)
		if path == "" || slices.Contains(v.drives, path) {
			continue
		}
		v.drives = append(v.drives, path)
		v.Drives = append(v.Drives, a.nameOf(path))
	}
	return v, true
}

// nameOf is a drive's name in a layout.
func (a array) nameOf(path string) string {
	for _, d := range a.drives {
		if d.path == path {
			return d.name()
		}
	}
	return first(word(lastPart(path)), path)
}

func unsupported(what string) error {
	return errs.New(errs.UnsupportedOperation, "the BMC has no %s", what)
}

// part reads a resource that a BMC may do without: then it is unsupported-operation.
func (p *provider) part(ctx context.Context, path, what string) (object, error) {
	o, err := p.get(ctx, path)
	if absent(err) {
		return nil, unsupported(what)
	}
	return o, err
}
