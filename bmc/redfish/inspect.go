package redfish

import (
	"context"
	"log/slog"
	"strings"

	bmclib "github.com/bmc-toolbox/bmclib/v2"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

const (
	// maxReads is how many resources one inspection reads.
	maxReads = 600
	// maxParts is how many processors, modules, drives, ports, sensors or
	// components of a machine are told.
	maxParts = 256
	// maxChassis is how many chassis of one system are looked at.
	maxChassis = 8
)

// Inspect reads what the machine is made of. It changes nothing at the BMC.
func (m *machine) Inspect(ctx *driver.Context) (found metal.Inspection, err error) {
	err = m.with(ctx, func(_ *bmclib.Client, p *provider) error {
		found, err = p.inspect(ctx)
		return err
	})
	return found, err
}

// survey reads resources for one inspection. What a BMC fails to answer is left
// out; when the BMC itself is lost, the survey fails.
type survey struct {
	p      *provider
	log    *slog.Logger
	reads  int
	expand string // the query that this BMC expands collections by; empty: none
	lost   error
	failed error // the last collection's, that could not be read
}

// get reads a resource, or answers nil for one that cannot be had.
func (s *survey) get(ctx context.Context, path string) object {
	if path == "" {
		return nil
	}
	o, err := s.try(ctx, path)
	if err != nil {
		s.log.Info("a part of the inspection is left out", "resource", path, "reason", err.Error())
	}
	return o
}

func (s *survey) try(ctx context.Context, path string) (object, error) {
	switch {
	case s.lost != nil:
		return nil, s.lost
	case s.reads >= maxReads:
		return nil, errs.New(errs.BmcError, "more than %d resources", maxReads)
	}
	s.reads++
	o, err := s.p.get(ctx, path)
	if fatal(ctx, err) {
		s.lost = err
	}
	return o, err
}

// fatal says whether err is about the BMC as a whole.
func fatal(ctx context.Context, err error) bool {
	if err == nil {
		return false
	}
	code := errs.CodeOf(err)
	return ctx.Err() != nil || code == errs.Unreachable || code == errs.PinMismatch || code == errs.Timeout || code == errs.Cancelled
}

// all are the resources of a collection, by one request where the BMC expands
// them or lists them whole.
func (s *survey) all(ctx context.Context, path string) []object {
	s.failed = nil
	if path == "" {
		return nil
	}
	if s.expand != "" {
		if o, err := s.try(ctx, path+"?"+s.expand); err == nil && o.text("Members@odata.nextLink") == "" {
			return s.whole(ctx, path, o.objects("Members"))
		}
		if s.lost != nil {
			return nil
		}
	}
	var members []object
	s.reads++
	err := s.p.pages(ctx, path, func(o object) error {
		members = append(members, o.objects("Members")...)
		if len(members) > maxMembers {
			return errs.New(errs.BmcError, "%s has more than %d members", path, maxMembers)
		}
		return nil
	})
	if s.failed = err; err != nil {
		if fatal(ctx, err) {
			s.lost = err
		}
		s.log.Info("a part of the inspection is left out", "resource", path, "reason", err.Error())
		return nil
	}
	return s.whole(ctx, path, members)
}

// whole reads those of members that are references alone.
func (s *survey) whole(ctx context.Context, path string, members []object) []object {
	var out []object
	failed, reason := 0, ""
	for i, m := range members {
		if i == maxParts || s.lost != nil {
			break
		}
		if m.bare() {
			id, err := s.p.resource(m.text("@odata.id"))
			self := m["@odata.id"]
			if err == nil {
				m, err = s.try(ctx, id)
			}
			if err == nil && m.text("@odata.id") == "" {
				m["@odata.id"] = self
			}
			if err != nil {
				if failed++; reason == "" {
					reason = err.Error()
				}
				continue
			}
		}
		if !m.missing() {
			out = append(out, m)
		}
	}
	if failed > 0 {
		s.log.Info("parts of the inspection are left out", "resource", path, "count", failed, "reason", reason)
	}
	return out
}

// expansion is the query by which a service says that it puts the members of a
// collection into its answer; empty: it does not.
func expansion(root object) string {
	e := root.object("ProtocolFeaturesSupported").object("ExpandQuery")
	noLinks, _ := e.boolean("NoLinks")
	all, _ := e.boolean("ExpandAll")
	levels, _ := e.boolean("Levels")
	query := "$expand="
	switch {
	case noLinks:
		query += "."
	case all:
		query += "*"
	default:
		return ""
	}
	if levels {
		query += "($levels=1)"
	}
	return query
}

func (p *provider) inspect(ctx context.Context) (metal.Inspection, error) {
	root, err := p.root(ctx)
	if err != nil {
		return metal.Inspection{}, err
	}
	sys, err := p.find(ctx)
	if err != nil {
		return metal.Inspection{}, err
	}
	system := sys.object
	s := &survey{p: p, log: p.log, expand: expansion(root)}
	managerPath, manager, err := p.manager(ctx)
	if fatal(ctx, err) {
		return metal.Inspection{}, err
	}
	chassis := s.chassis(ctx, root, system, manager)

	found := identity(system, chassis)
	found.Power = metal.PowerState(sys.powerState())
	var own map[string]bool
	found.BMC, own = s.bmc(ctx, root, managerPath, manager)
	found.Processors = processors(system, s.all(ctx, s.p.link(system, "Processors")))
	found.Memory = modules(s.all(ctx, s.p.link(system, "Memory")))
	found.Drives = s.drives(ctx, system)
	found.NICs = s.nics(ctx, system, chassis, own)
	service := s.get(ctx, p.collection("UpdateService", updatePath))
	found.Firmware = told(components(p.conn, s.all(ctx, p.link(service, "FirmwareInventory"))))
	if len(found.Firmware) == 0 {
		found.Firmware = versions(system, manager)
	}
	for _, c := range chassis {
		found.Sensors = s.sensors(ctx, c, found.Sensors)
	}
	return found, s.lost
}

// chassis are those of the system: as it says, or its manager, or all there are.
func (s *survey) chassis(ctx context.Context, root, system, manager object) []object {
	ids := system.object("Links").links("Chassis")
	if len(ids) == 0 {
		ids = manager.object("Links").links("ManagerForChassis")
	}
	if len(ids) == 0 {
		var list []object
		for _, c := range s.all(ctx, s.p.link(root, "Chassis")) {
			if len(list) < maxChassis {
				list = append(list, c)
			}
		}
		return list
	}
	var list []object
	for i, id := range ids {
		if path := s.p.path(id); path != "" && i < maxChassis {
			if c := s.get(ctx, path); c != nil {
				list = append(list, c)
			}
		}
	}
	return list
}

// identity is what the machine says it is.
func identity(system object, chassis []object) metal.Inspection {
	found := metal.Inspection{
		Source:       "redfish",
		Manufacturer: system.word("Manufacturer"),
		Model:        system.word("Model"),
		Serial:       system.word("SerialNumber"),
		AssetTag:     system.word("AssetTag"),
		ProductUUID:  system.uuid("UUID"),
	}
	board := metal.Board{}
	if tag := system.word("SKU"); strings.HasPrefix(found.Manufacturer, "Dell") && serviceTag(tag) && found.Serial != tag {
		// Here the serial number is the board's, and the machine's is its service tag.
		board = metal.Board{Manufacturer: found.Manufacturer, Serial: found.Serial, PartNumber: system.word("PartNumber")}
		found.Serial = tag
	}
	for _, c := range chassis {
		found.Manufacturer = first(found.Manufacturer, c.word("Manufacturer"))
		found.Model = first(found.Model, c.word("Model"))
		found.Serial = first(found.Serial, c.word("SerialNumber"))
		found.AssetTag = first(found.AssetTag, c.word("AssetTag"))
		if kind := c.text("ChassisType"); board == (metal.Board{}) && (kind == "Card" || kind == "Component") {
			board = metal.Board{
				Manufacturer: c.word("Manufacturer"), Product: first(c.word("Model"), c.word("Name")),
				Serial: c.word("SerialNumber"), PartNumber: c.word("PartNumber"),
			}
		}
		oem := c.object("Oem").object("Supermicro")
		board.Serial = first(board.Serial, oem.word("BoardSerialNumber"))
		board.Product = first(board.Product, oem.word("BoardID"))
	}
	if board != (metal.Board{}) {
		found.Board = &board
	}
	return found
}

// serviceTag says whether s has the form of Dell's.
func serviceTag(s string) bool {
	return len(s) >= 5 && len(s) <= 7 && strings.Trim(s, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789") == ""
}

// bmc is the management controller, and the MACs that are its own.
func (s *survey) bmc(ctx context.Context, root object, path string, manager object) (*metal.BMC, map[string]bool) {
	b := metal.BMC{Version: root.word("RedfishVersion")}
	own := map[string]bool{}
	if manager != nil {
		b.Manufacturer = first(manager.word("Manufacturer"), root.word("Vendor"))
		b.Firmware = manager.word("FirmwareVersion")
		for _, e := range s.all(ctx, s.p.link(manager, "EthernetInterfaces")) {
			for _, key := range []string{"MACAddress", "PermanentMACAddress"} {
				if m := mac(e.text(key)); m != "" {
					own[m] = true
				}
			}
			enabled, said := e.boolean("InterfaceEnabled")
			at := address(e)
			if !hostInterface(e) && (b.MAC == "" || b.Address == "" && at != "") && (enabled || !said) {
				b.MAC, b.Address = mac(first(e.text("PermanentMACAddress"), e.text("MACAddress"))), at
			}
		}
		for _, h := range s.all(ctx, s.p.link(manager, "HostInterfaces")) {
			for _, e := range s.all(ctx, s.p.link(h, "HostEthernetInterfaces")) {
				own[mac(first(e.text("PermanentMACAddress"), e.text("MACAddress")))] = true
			}
		}
	}
	if b == (metal.BMC{}) {
		return nil, own
	}
	return &b, own
}

// address is the first that an interface has.
func address(e object) string {
	for _, key := range []string{"IPv4Addresses", "IPv6Addresses"} {
		for _, a := range e.objects(key) {
			if text := a.word("Address"); text != "" && text != "0.0.0.0" && text != "::" {
				return text
			}
		}
	}
	return ""
}

// versions stand in for a firmware inventory.
func versions(system, manager object) []metal.Firmware {
	var list []metal.Firmware
	if v := system.word("BiosVersion"); v != "" {
		list = append(list, metal.Firmware{Component: "BIOS", Version: v})
	}
	if v := manager.word("FirmwareVersion"); v != "" {
		list = append(list, metal.Firmware{Component: "BMC", Version: v})
	}
	return list
}
