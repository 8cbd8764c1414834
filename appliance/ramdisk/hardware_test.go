package ramdisk

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/better-compute/site-appliance/plugins/metal"
)

// table is one SMBIOS structure; data starts after the header.
func table(kind byte, handle uint16, data []byte, texts ...string) []byte {
	out := []byte{kind, byte(len(data) + 4)}
	out = binary.LittleEndian.AppendUint16(out, handle)
	out = append(out, data...)
	for _, s := range texts {
		out = append(append(out, s...), 0)
	}
	if len(texts) == 0 {
		out = append(out, 0)
	}
	return append(out, 0)
}

func smbiosTables() []byte {
	uuid := []byte{0x5e, 0x3c, 0x1f, 0x5c, 1, 0, 0, 0x40, 0x80, 0, 0, 0, 0, 0, 0, 9}
	system := append([]byte{1, 2, 0, 3}, uuid...)
	system = append(system, 6, 0, 0)
	cpu := make([]byte, 44)
	cpu[12], cpu[20], cpu[31], cpu[32], cpu[33] = 1, 0x41, 8, 8, 16
	empty := bytes.Clone(cpu)
	empty[20] = 0
	module := make([]byte, 36)
	module[8], module[9], module[12], module[20] = 0x00, 0x40, 1, 2 // 16 GiB
	slot := make([]byte, 36)
	slot[12] = 1
	var all []byte
	for _, t := range [][]byte{
		table(0, 0, append([]byte{1, 2, 0, 0, 3, 0}, make([]byte, 14)...), "Maker", "1.2.3", "01/01/2026"),
		table(1, 1, system, "Maker", "Model 9", "SER1"),
		table(2, 2, append([]byte{1, 2, 0, 3, 0}, 0, 0, 0, 0, 10, 0), "Maker", "Board", "Default string"),
		table(4, 3, cpu, "Fast CPU"),
		table(4, 4, empty, "Absent CPU"),
		table(17, 5, module, "DIMM0", "MEM1"),
		table(17, 6, slot, "DIMM1"),
		table(127, 7, nil),
	} {
		all = append(all, t...)
	}
	return all
}

func entryPoint(n int) []byte {
	e := append([]byte("_SM3_"), 0, 24, 3, 2, 0, 1, 0)
	e = binary.LittleEndian.AppendUint32(e, uint32(n))
	e = binary.LittleEndian.AppendUint64(e, 0x1000)
	var sum byte
	for _, b := range e {
		sum += b
	}
	e[5] = -sum
	return e
}

func TestInspect(t *testing.T) {
	m := newMachine(t)
	tables := smbiosTables()
	m.write(t, m.sys, "firmware/dmi/tables/smbios_entry_point", string(entryPoint(len(tables))))
	m.write(t, m.sys, "firmware/dmi/tables/DMI", string(tables))
	// None of these is a port of the machine.
	m.write(t, m.sys, "class/net/lo/address", "00:00:00:00:00:00\n")
	m.write(t, m.sys, "class/net/ib0/address", "80:00\n")
	m.write(t, m.sys, "class/net/ib0/type", "32\n")
	m.write(t, m.sys, "class/net/ib0/device/vendor", "x\n")
	m.write(t, m.sys, "class/net/usb0/address", "02:00:00:00:00:01\n")
	m.write(t, m.sys, "class/net/usb0/type", "1\n")
	m.write(t, m.sys, "class/net/usb0/device/vendor", "x\n")
	if err := os.Symlink("../../../../bus/usb/drivers/cdc_ether", filepath.Join(m.sys, "class/net/usb0/device/driver")); err != nil {
		t.Fatal(err)
	}
	got, err := Inspect(m.sys, m.proc, m.dev)
	if err != nil {
		t.Fatal(err)
	}
	want := metal.Inspection{
		Source: "ramdisk", Power: metal.PowerOn, Manufacturer: "Maker", Model: "Model 9", Serial: "SER1", ProductUUID: "5c1f3c5e-0001-4000-8000-000000000009",
		Board:      &metal.Board{Manufacturer: "Maker", Product: "Board"},
		Processors: []metal.Processor{{Model: "Fast CPU", Cores: 8, Threads: 16}},
		Memory:     []metal.Memory{{Slot: "DIMM0", SizeBytes: 16 << 30, Serial: "MEM1"}},
		Drives: []metal.Drive{
			{Name: "vda", Serial: "DISK0001", SizeBytes: 80 * mib}, {Name: "vdb", Serial: "TWIN", SizeBytes: 80 * mib}, {Name: "vdc", Serial: "TWIN", SizeBytes: 80 * mib},
		},
		NICs:     []metal.NIC{{MAC: "52:54:00:aa:00:01", Name: "eth0", Speed: 1000}},
		Firmware: []metal.Firmware{{Component: "BIOS", Version: "1.2.3"}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("Inspect() = %+v, want %+v", got, want)
	}
}

func TestInspectWithoutSMBIOS(t *testing.T) {
	m := newMachine(t)
	m.write(t, m.proc, "cpuinfo", "processor\t: 0\nmodel name\t: Soft CPU\nphysical id\t: 0\ncpu cores\t: 2\n\nprocessor\t: 1\nmodel name\t: Soft CPU\nphysical id\t: 0\ncpu cores\t: 2\n")
	got, err := Inspect(m.sys, m.proc, m.dev)
	if err == nil {
		t.Error("Inspect() does not say that SMBIOS is missing")
	}
	if len(got.Processors) != 1 || got.Processors[0] != (metal.Processor{Model: "Soft CPU", Cores: 2, Threads: 2}) {
		t.Errorf("processors = %+v", got.Processors)
	}
	if len(got.Memory) != 1 || got.Memory[0].SizeBytes != 1<<20 || len(got.Drives) != 3 {
		t.Errorf("Inspect() = %+v", got)
	}
}

// Whatever stands in the firmware's tables, the agent starts.
func FuzzSMBIOS(f *testing.F) {
	tables := smbiosTables()
	f.Add(entryPoint(len(tables)), tables)
	f.Add(entryPoint(3), tables[:7])
	f.Fuzz(func(t *testing.T, entry, tables []byte) {
		dir := t.TempDir()
		for name, b := range map[string][]byte{"smbios_entry_point": entry, "DMI": tables} {
			if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		var i metal.Inspection
		addSMBIOS(&i, dir)
	})
}
