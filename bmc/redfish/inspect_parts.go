package redfish

import (
	"context"
	"strings"

	"github.com/better-compute/site-appliance/plugins/metal"
)

// maxCount bounds cores and speeds, and maxBytes sizes: more is no fact.
const (
	maxCount = 1 << 24
	maxBytes = 1 << 60
	maxMiB   = 1 << 40
)

// processors are the CPUs among list; a BMC that lists none may have a summary.
func processors(system object, list []object) []metal.Processor {
	var out []metal.Processor
	for _, o := range list {
		if kind := o.text("ProcessorType"); kind != "" && !strings.EqualFold(kind, "CPU") {
			continue
		}
		p := metal.Processor{
			Model: o.word("Model"), Cores: int(o.count("TotalCores", maxCount)), Threads: int(o.count("TotalThreads", maxCount)),
		}
		if p != (metal.Processor{}) {
			out = append(out, p)
		}
	}
	summary := system.object("ProcessorSummary")
	if model := summary.word("Model"); len(out) == 0 && model != "" {
		for range summary.count("Count", 64) {
			out = append(out, metal.Processor{Model: model})
		}
	}
	return out
}

// modules are the memory modules among list.
func modules(list []object) []metal.Memory {
	var out []metal.Memory
	for _, o := range list {
		m := metal.Memory{
			Slot: first(o.word("DeviceLocator"), o.object("Location").object("PartLocation").word("ServiceLabel"), o.word("Name"), o.word("Id")),
			// Some BMCs list empty slots as modules of no size.
			SizeBytes: o.count("CapacityMiB", maxMiB) << 20,
			Serial:    o.word("SerialNumber"),
		}
		if _, said := o.number("CapacityMiB"); said && m.SizeBytes == 0 {
			continue
		}
		out = append(out, m)
	}
	return out
}

// drives are those of the storage controllers, or of the simple ones.
func (s *survey) drives(ctx context.Context, system object) []metal.Drive {
	var out []metal.Drive
	seen := map[string]bool{}
	for _, storage := range s.all(ctx, s.p.link(system, "Storage")) {
		for _, id := range storage.links("Drives") {
			path := s.p.path(id)
			if path == "" || seen[path] || len(out) == maxParts {
				continue
			}
			seen[path] = true
			if o := s.get(ctx, path); o != nil && !o.missing() {
				out = append(out, drive(path, o))
			}
		}
	}
	if len(out) > 0 {
		return out
	}
	for _, storage := range s.all(ctx, s.p.link(system, "SimpleStorage")) {
		for _, o := range storage.objects("Devices") {
			d := metal.Drive{Name: o.word("Name"), Serial: o.word("SerialNumber"), SizeBytes: o.count("CapacityBytes", maxBytes), Model: o.word("Model")}
			if d != (metal.Drive{}) && !o.missing() && len(out) < maxParts {
				out = append(out, d)
			}
		}
	}
	return out
}

// drive is one disk. Its name is the resource's id, which a layout can use.
func drive(path string, o object) metal.Drive {
	return metal.Drive{
		Name: first(o.word("Id"), word(lastPart(path)), o.word("Name")), Serial: o.word("SerialNumber"),
		SizeBytes: o.count("CapacityBytes", maxBytes), Model: o.word("Model"),
	}
}

// nics are the machine's ports: not those that lead to the BMC, and not what
// the operating system makes of them.
func (s *survey) nics(ctx context.Context, system object, chassis []object, own map[string]bool) []metal.NIC {
	list := &ports{seen: map[string]bool{}}
	for address := range own {
		list.seen[address] = true
	}
	for _, e := range s.all(ctx, s.p.link(system, "EthernetInterfaces")) {
		address := mac(first(e.text("PermanentMACAddress"), e.text("MACAddress")))
		switch {
		case hostInterface(e):
			list.seen[address] = true // wherever else it turns up
		case strings.EqualFold(e.text("EthernetInterfaceType"), "Virtual"), len(e.object("Links").links("RelatedInterfaces")) > 0:
		default:
			speed := e.count("SpeedMbps", maxCount)
			list.add(address, portName(e), speed)
		}
	}
	for _, c := range chassis {
		for _, adapter := range s.all(ctx, s.p.link(c, "NetworkAdapters")) {
			s.adapter(ctx, adapter, list)
		}
	}
	return list.nics
}

// ports collects NICs by their MACs, each once.
type ports struct {
	seen map[string]bool
	nics []metal.NIC
}

func (l *ports) add(address, name string, speed uint64) {
	if address == "" || l.seen[address] || len(l.nics) == maxParts {
		return
	}
	l.seen[address] = true
	l.nics = append(l.nics, metal.NIC{MAC: address, Name: name, Speed: int(speed)})
}

// adapter adds the ports of a network adapter, and its functions where the
// ports have no address.
func (s *survey) adapter(ctx context.Context, a object, list *ports) {
	for _, collection := range []string{first(s.p.link(a, "Ports"), s.p.link(a, "NetworkPorts")), s.p.link(a, "NetworkDeviceFunctions")} {
		before := len(list.nics)
		for _, o := range s.all(ctx, collection) {
			speed := o.count("CurrentLinkSpeedMbps", maxCount)
			if gbps, ok := o.number("CurrentSpeedGbps"); ok && gbps > 0 && gbps < 1e4 {
				speed = uint64(gbps * 1000)
			}
			ethernet := o.object("Ethernet")
			addresses := append(o.texts("AssociatedNetworkAddresses"), ethernet.texts("AssociatedMACAddresses")...)
			addresses = append(addresses, first(ethernet.text("PermanentMACAddress"), ethernet.text("MACAddress")))
			for _, address := range addresses {
				list.add(mac(address), portName(o), speed)
			}
		}
		if len(list.nics) > before {
			return
		}
	}
}

// hostInterface says whether an interface joins the machine and its BMC.
func hostInterface(e object) bool {
	if e.object("Links").object("HostInterface") != nil || len(e.object("Links").links("HostInterfaces")) > 0 {
		return true
	}
	id := strings.ToLower(e.text("Id"))
	for _, name := range []string{"tomanager", "tohost", "hostusb", "usb0", "redfish-host-interface"} {
		if id == name {
			return true
		}
	}
	return false
}

// portName is the id where it says something, else the name: an id may be a
// number or the MAC again.
func portName(e object) string {
	id := e.word("Id")
	if id == "" || digits(id) || mac(id) != "" {
		return first(e.word("Name"), id)
	}
	return id
}

// sensors adds those of a chassis to list. The newer resources are read where
// the older ones say nothing, or where they cost one request.
func (s *survey) sensors(ctx context.Context, chassis object, list []metal.Sensor) []metal.Sensor {
	seen := map[string]bool{}
	for _, x := range list {
		seen[x.Name] = true
	}
	before := len(list)
	add := func(o object, name, unit, key string) {
		x := metal.Sensor{Name: name, Status: o.health()}
		if v, ok := o.number(key); ok {
			x.Value, x.Unit = &v, unit
		}
		if name == "" || seen[name] || o.missing() || len(list) == maxParts || x.Value == nil && x.Status == "" {
			return
		}
		seen[name] = true
		list = append(list, x)
	}
	named := func(o object) string { return first(o.word("Name"), o.word("FanName"), o.word("MemberId")) }
	thermal, power := s.get(ctx, s.p.link(chassis, "Thermal")), s.get(ctx, s.p.link(chassis, "Power"))
	for _, o := range thermal.objects("Temperatures") {
		add(o, named(o), "C", "ReadingCelsius")
	}
	for _, o := range thermal.objects("Fans") {
		key, unit := "Reading", first(units[o.text("ReadingUnits")], o.word("ReadingUnits"), "RPM")
		if _, ok := o.number("ReadingRPM"); ok {
			key, unit = "ReadingRPM", "RPM"
		}
		add(o, named(o), unit, key)
	}
	for _, o := range power.objects("Voltages") {
		add(o, named(o), "V", "ReadingVolts")
	}
	for _, o := range power.objects("PowerControl") {
		add(o, named(o), "W", "PowerConsumedWatts")
	}
	for _, o := range power.objects("PowerSupplies") {
		key := "PowerOutputWatts"
		if _, ok := o.number(key); !ok {
			key = "LastPowerOutputWatts"
		}
		add(o, named(o), "W", key)
	}
	if len(list) > before && s.expand == "" {
		return list
	}
	reading := func(o object) {
		add(o, named(o), first(units[o.text("ReadingUnits")], o.word("ReadingUnits")), "Reading")
	}
	if len(list) > before {
		for _, o := range s.expanded(ctx, s.p.link(chassis, "Sensors")) {
			reading(o)
		}
		return list
	}
	for _, o := range s.all(ctx, s.p.link(chassis, "Sensors")) {
		reading(o)
	}
	if len(list) > before {
		return list
	}
	cooling := s.get(ctx, s.p.link(chassis, "ThermalSubsystem"))
	for _, o := range s.get(ctx, s.p.link(cooling, "ThermalMetrics")).objects("TemperatureReadingsCelsius") {
		add(o, first(o.word("DeviceName"), word(lastPart(o.text("DataSourceUri")))), "C", "Reading")
	}
	for _, o := range s.all(ctx, s.p.link(cooling, "Fans")) {
		speed := o.object("SpeedPercent")
		if _, rpm := speed.number("SpeedRPM"); rpm {
			add(merged(o, speed), named(o), "RPM", "SpeedRPM")
			continue
		}
		add(merged(o, speed), named(o), "%", "Reading")
	}
	supply := s.get(ctx, s.p.link(chassis, "PowerSubsystem"))
	for _, o := range s.all(ctx, s.p.link(supply, "PowerSupplies")) {
		add(o, named(o), "", "")
	}
	return list
}

// merged is o with the members of inner that o has not.
func merged(o, inner object) object {
	out := object{}
	for k, v := range inner {
		out[k] = v
	}
	for k, v := range o {
		out[k] = v
	}
	return out
}

// units are the unit codes of Redfish (UCUM) in the words of our sensors.
var units = map[string]string{"Cel": "C", "{rev}/min": "RPM", "RPM": "RPM", "%": "%", "Percent": "%", "V": "V", "W": "W", "A": "A", "J": "J", "Hz": "Hz"}

// expanded are the members of a collection as far as one request gives them.
func (s *survey) expanded(ctx context.Context, path string) []object {
	if path == "" {
		return nil
	}
	o, err := s.try(ctx, path+"?"+s.expand)
	if err != nil {
		return nil
	}
	var out []object
	for _, m := range o.objects("Members") {
		if !m.bare() && len(out) < maxParts {
			out = append(out, m)
		}
	}
	return out
}
