package bmclib

import (
	"cmp"
	"net"
	"strings"

	"github.com/bmc-toolbox/common"

	"github.com/better-compute/site-appliance/plugins/metal"
)

// inspection is what of bmclib's device metal has a place for. A MAC of the
// BMC's own is no NIC.
func inspection(d *common.Device) metal.Inspection {
	in := metal.Inspection{Manufacturer: word(d.Vendor), Model: word(d.Model), Serial: word(d.Serial)}
	own := map[string]bool{}
	if d.BMC != nil {
		bmc := metal.BMC{Manufacturer: word(d.BMC.Vendor), Firmware: installed(d.BMC.Firmware)}
		if d.BMC.NIC != nil {
			for _, p := range d.BMC.NIC.NICPorts {
				if mac := macOf(p); mac != "" {
					own[mac] = true
					bmc.MAC = cmp.Or(bmc.MAC, mac)
				}
			}
		}
		if bmc != (metal.BMC{}) {
			in.BMC = &bmc
		}
		addFirmware(&in, "BMC", d.BMC.Firmware)
	}
	if d.BIOS != nil {
		addFirmware(&in, "BIOS", d.BIOS.Firmware)
	}
	if b := d.Mainboard; b != nil {
		board := metal.Board{Manufacturer: word(b.Vendor), Product: cmp.Or(word(b.ProductName), word(b.Model)), Serial: word(b.Serial)}
		if board != (metal.Board{}) {
			in.Board = &board
		}
	}
	for _, c := range d.CPUs {
		if c != nil {
			in.Processors = append(in.Processors, metal.Processor{Model: word(c.Model), Cores: max(c.Cores, 0), Threads: max(c.Threads, 0)})
		}
	}
	for _, m := range d.Memory {
		if m != nil {
			in.Memory = append(in.Memory, metal.Memory{Slot: cmp.Or(word(m.Slot), word(m.ID)), SizeBytes: uint64(max(m.SizeBytes, 0)), Serial: word(m.Serial)})
		}
	}
	for _, v := range d.Drives {
		if v != nil {
			in.Drives = append(in.Drives, metal.Drive{
				Name: cmp.Or(word(v.ID), word(v.LogicalName)), Serial: word(v.Serial), SizeBytes: uint64(max(v.CapacityBytes, 0)), Model: cmp.Or(word(v.Model), word(v.ProductName)),
			})
		}
	}
	for _, n := range d.NICs {
		if n == nil {
			continue
		}
		for _, p := range n.NICPorts {
			if mac := macOf(p); mac != "" && !own[mac] {
				in.NICs = append(in.NICs, metal.NIC{MAC: mac, Name: cmp.Or(word(p.ID), word(n.ID)), Speed: int(max(p.SpeedBits, 0) / 1e6)})
			}
		}
	}
	for _, c := range d.CPLDs {
		if c != nil {
			addFirmware(&in, "CPLD", c.Firmware)
		}
	}
	return in
}

// word is text without what stands for nothing.
func word(text string) string {
	text = strings.TrimSpace(text)
	switch strings.ToLower(text) {
	case "n/a", "na", "none", "null", "unknown", "not available", "not specified":
		return ""
	}
	return text
}

func installed(f *common.Firmware) string {
	if f == nil {
		return ""
	}
	return word(f.Installed)
}

func addFirmware(in *metal.Inspection, component string, f *common.Firmware) {
	if v := installed(f); v != "" {
		in.Firmware = append(in.Firmware, metal.Firmware{Component: component, Version: v})
	}
}

// macOf is a port's MAC; a GUID of another length is none.
func macOf(p *common.NICPort) string {
	if p == nil {
		return ""
	}
	mac, err := net.ParseMAC(p.MacAddress)
	if err != nil || len(mac) != 6 || mac.String() == "00:00:00:00:00:00" {
		return ""
	}
	return mac.String()
}
