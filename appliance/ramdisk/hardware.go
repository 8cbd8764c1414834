package ramdisk

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/u-root/u-root/pkg/smbios"

	"github.com/better-compute/site-appliance/image/stream/blockdev"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// Inspect reads what machine this is from the kernel and from SMBIOS (DMTF
// DSP0134). It gives what it found even with an error, which says what is missing.
func Inspect(sys, proc, dev string) (metal.Inspection, error) {
	i := metal.Inspection{Source: "ramdisk", Power: metal.PowerOn}
	var missing []error
	if err := addSMBIOS(&i, filepath.Join(sys, "firmware/dmi/tables")); err != nil {
		missing = append(missing, err)
	}
	disks, err := blockdev.List(sys, dev)
	if err != nil {
		missing = append(missing, err)
	}
	for _, d := range disks {
		i.Drives = append(i.Drives, metal.Drive{Name: d.Name, Serial: d.Serial, SizeBytes: uint64(d.SizeBytes), Model: d.Model})
	}
	if i.NICs, err = nics(sys); err != nil {
		missing = append(missing, err)
	}
	// A machine without SMBIOS still has a processor and memory.
	if len(i.Processors) == 0 {
		i.Processors = processors(filepath.Join(proc, "cpuinfo"))
	}
	if len(i.Memory) == 0 {
		if n := memTotal(filepath.Join(proc, "meminfo")); n > 0 {
			i.Memory = []metal.Memory{{Slot: "total", SizeBytes: n}}
		}
	}
	return i, errors.Join(missing...)
}

// addSMBIOS takes over what the firmware says of itself. The tables are foreign
// bytes: whatever they do to the parser ends as an error.
func addSMBIOS(i *metal.Inspection, dir string) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("parse SMBIOS: %v", r)
		}
	}()
	entry, err := os.ReadFile(filepath.Join(dir, "smbios_entry_point"))
	if err != nil {
		return fmt.Errorf("read SMBIOS: %w", err)
	}
	tables, err := os.ReadFile(filepath.Join(dir, "DMI"))
	if err != nil {
		return fmt.Errorf("read SMBIOS: %w", err)
	}
	info, err := smbios.ParseInfo(entry, tables)
	if err != nil {
		return fmt.Errorf("parse SMBIOS: %w", err)
	}
	if s, err := info.GetSystemInfo(); err == nil {
		i.Manufacturer, i.Model, i.Serial = said(s.Manufacturer), said(s.ProductName), said(s.SerialNumber)
		if s.UUID != (smbios.UUID{}) && s.UUID != allOnes {
			i.ProductUUID = s.UUID.String()
		}
	}
	if boards, err := info.GetBaseboardInfo(); err == nil && len(boards) > 0 {
		b := boards[0]
		if board := (metal.Board{Manufacturer: said(b.Manufacturer), Product: said(b.Product), Serial: said(b.SerialNumber)}); board != (metal.Board{}) {
			i.Board = &board
		}
	}
	if chassis, err := info.GetChassisInfo(); err == nil && len(chassis) > 0 {
		i.AssetTag = said(chassis[0].AssetTagNumber)
	}
	if cpus, err := info.GetProcessorInfo(); err == nil {
		for _, p := range cpus {
			const populated = 1 << 6
			if p.Status&populated == 0 {
				continue
			}
			i.Processors = append(i.Processors, metal.Processor{Model: said(p.Version), Cores: p.GetCoreCount(), Threads: p.GetThreadCount()})
		}
	}
	if modules, err := info.GetMemoryDevices(); err == nil {
		for _, m := range modules {
			if n := m.GetSizeBytes(); n > 0 && m.Size != unknownSize {
				i.Memory = append(i.Memory, metal.Memory{Slot: said(m.DeviceLocator), SizeBytes: n, Serial: said(m.SerialNumber)})
			}
		}
	}
	if bios, err := info.GetBIOSInfo(); err == nil && said(bios.Version) != "" {
		i.Firmware = append(i.Firmware, metal.Firmware{Component: "BIOS", Version: said(bios.Version)})
	}
	return nil
}

const unknownSize = 0xffff // DSP0134 7.18

var allOnes = smbios.UUID(bytes.Repeat([]byte{0xff}, 16))

// said drops what firmware writes when it has nothing to say, and what does not print.
func said(s string) string {
	s = strings.TrimSpace(strings.Map(func(r rune) rune {
		if r < 0x20 || r == 0x7f || r == 0xfffd {
			return -1
		}
		return r
	}, s))
	switch strings.ToLower(s) {
	case "not specified", "none", "unknown", "default string", "to be filled by o.e.m.", "system serial number", "n/a", "no asset tag":
		return ""
	}
	return s
}

// nics lists the Ethernet ports that are hardware.
func nics(sys string) ([]metal.NIC, error) {
	root := filepath.Join(sys, "class/net")
	entries, err := os.ReadDir(root)
	if err != nil {
		return nil, fmt.Errorf("list network ports: %w", err)
	}
	var out []metal.NIC
	for _, e := range entries {
		dir := filepath.Join(root, e.Name())
		const ethernet = "1" // ARPHRD_ETHER
		if _, err := os.Stat(filepath.Join(dir, "device")); err != nil || text(dir, "type") != ethernet {
			continue
		}
		mac := strings.ToLower(text(dir, "address"))
		if mac == "" || mac == "00:00:00:00:00:00" || toBMC(dir) {
			continue
		}
		n := metal.NIC{MAC: mac, Name: e.Name()}
		// Without a link, reading fails or gives -1.
		if speed, err := strconv.Atoi(text(dir, "speed")); err == nil && speed > 0 {
			n.Speed = speed
		}
		out = append(out, n)
	}
	return out, nil
}

// toBMC reports whether the port is a BMC's own, shown to the host over USB:
// it leads to no network, and its MAC is not the machine's.
func toBMC(dir string) bool {
	driver, err := os.Readlink(filepath.Join(dir, "device/driver"))
	if err != nil {
		return false
	}
	switch filepath.Base(driver) {
	case "cdc_ether", "cdc_ncm", "cdc_eem", "rndis_host":
		return true
	}
	return false
}

func text(dir, name string) string {
	b, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// processors counts sockets, cores and threads as the kernel tells.
func processors(path string) []metal.Processor {
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	var out []metal.Processor
	at := map[string]int{}
	var socket, model string
	cores := 0
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	add := func() {
		if model == "" {
			return
		}
		n, found := at[socket]
		if !found {
			n = len(out)
			at[socket] = n
			out = append(out, metal.Processor{Model: model, Cores: cores})
		}
		out[n].Threads++
		socket, model, cores = "", "", 0
	}
	for lines.Scan() {
		key, value, _ := strings.Cut(lines.Text(), ":")
		value = strings.TrimSpace(value)
		switch strings.TrimSpace(key) {
		case "":
			add()
		case "physical id":
			socket = value
		case "model name":
			model = value
		case "cpu cores":
			cores, _ = strconv.Atoi(value)
		}
	}
	add()
	return out
}

func memTotal(path string) uint64 {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if rest, found := strings.CutPrefix(line, "MemTotal:"); found {
			kib, err := strconv.ParseUint(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 54)
			if err == nil {
				return kib << 10
			}
		}
	}
	return 0
}
