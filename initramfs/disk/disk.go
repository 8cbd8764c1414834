// Package disk finds the disk that the box booted from and its partitions.
package disk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"

	"github.com/google/uuid"

	"github.com/better-compute/site-appliance/image/gpt"
)

// Disk is one whole disk.
type Disk struct {
	// Name is the kernel's, such as vda; Dev its device file.
	Name, Dev  string
	Size       uint64
	SectorSize uint64
	// Table is nil where there is none that can be read.
	Table *gpt.Table
	// TableErr says why.
	TableErr error
}

// Partition is the device file of partition n, from 1.
func (d Disk) Partition(n int) string {
	if last := d.Name[len(d.Name)-1]; last >= '0' && last <= '9' {
		return fmt.Sprintf("%sp%d", d.Dev, n)
	}
	return fmt.Sprintf("%s%d", d.Dev, n)
}

// names of block devices that no system boots from
var notDisks = []string{"loop", "ram", "sr", "zram", "dm-", "md", "fd", "nbd", "mtd"}

// List reads /sys/block (sys) and the tables of the disks there.
func List(sys, dev string) ([]Disk, error) {
	entries, err := os.ReadDir(sys)
	if err != nil {
		return nil, fmt.Errorf("list disks: %w", err)
	}
	var disks []Disk
	for _, e := range entries {
		name := e.Name()
		if slices.ContainsFunc(notDisks, func(p string) bool { return strings.HasPrefix(name, p) }) || strings.Contains(name, "boot") {
			continue
		}
		sectors := number(filepath.Join(sys, name, "size"))
		if sectors == 0 {
			continue
		}
		d := Disk{Name: name, Dev: filepath.Join(dev, name), Size: sectors * 512, SectorSize: number(filepath.Join(sys, name, "queue", "logical_block_size"))}
		d.Table, d.TableErr = ReadTable(d)
		disks = append(disks, d)
	}
	return disks, nil
}

// ReadTable reads d's table from its device.
func ReadTable(d Disk) (*gpt.Table, error) {
	f, err := os.Open(d.Dev)
	if err != nil {
		return nil, fmt.Errorf("open disk: %w", err)
	}
	defer f.Close()
	return gpt.Read(f, d.Size, d.SectorSize)
}

func number(path string) uint64 {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(data)), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// Errors of Boot. Both are worth a person's attention; the first can pass by itself.
var (
	ErrMissing   = errors.New("disk is missing")
	ErrAmbiguous = errors.New("disk is ambiguous")
)

// Boot picks the disk that the loader named by its boot partition's
// identifier, or, where no loader named one, the only disk that has a
// partition of type and name.
func Boot(disks []Disk, loader uuid.UUID, typ uuid.UUID, name string) (Disk, error) {
	var found []Disk
	for _, d := range disks {
		if d.Table == nil {
			continue
		}
		match := false
		for _, p := range d.Table.Partitions() {
			if loader != uuid.Nil {
				match = match || p.ID == loader
			} else {
				match = match || p.Type == typ && p.Name == name
			}
		}
		if match {
			found = append(found, d)
		}
	}
	what := fmt.Sprintf("a partition %q", name)
	if loader != uuid.Nil {
		what = fmt.Sprintf("the boot partition %s", loader)
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return Disk{}, fmt.Errorf("%w: no disk has %s; disks: %s", ErrMissing, what, describe(disks))
	}
	return Disk{}, fmt.Errorf("%w: %s have %s each: remove all but one", ErrAmbiguous, join(found), what)
}

func join(disks []Disk) string {
	var names []string
	for _, d := range disks {
		names = append(names, d.Name)
	}
	return strings.Join(names, " and ")
}

func describe(disks []Disk) string {
	if len(disks) == 0 {
		return "none"
	}
	var out []string
	for _, d := range disks {
		s := fmt.Sprintf("%s (%d MB", d.Name, d.Size/1e6)
		if d.TableErr != nil {
			s += ", " + d.TableErr.Error()
		}
		out = append(out, s+")")
	}
	return strings.Join(out, ", ")
}

// loaderVar is what systemd-boot and its stub leave, under the vendor id of
// the boot loader interface.
const loaderVar = "LoaderDevicePartUUID-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"

// Loader reads the boot partition's identifier from the firmware's variables;
// uuid.Nil where the loader left none.
func Loader(efivars string) uuid.UUID {
	data, err := os.ReadFile(filepath.Join(efivars, loaderVar))
	if err != nil {
		return uuid.Nil
	}
	return parseLoader(data)
}

// parseLoader takes four bytes of attributes, then UTF-16 text.
func parseLoader(data []byte) uuid.UUID {
	if len(data) < 4 || len(data) > 1024 {
		return uuid.Nil
	}
	var units []uint16
	for b := data[4:]; len(b) >= 2; b = b[2:] {
		if u := binary.LittleEndian.Uint16(b); u != 0 {
			units = append(units, u)
		}
	}
	id, err := uuid.Parse(strings.TrimSpace(string(utf16.Decode(units))))
	if err != nil {
		return uuid.Nil
	}
	return id
}

// FATLabel reads the label of a FAT file system's boot sector; empty for anything else.
func FATLabel(boot []byte) string {
	if len(boot) < 512 || boot[510] != 0x55 || boot[511] != 0xaa {
		return ""
	}
	for _, v := range []struct{ kind, label int }{{82, 71}, {54, 43}} { // FAT32; FAT12 and FAT16
		if string(boot[v.kind:v.kind+3]) == "FAT" {
			return strings.TrimRight(string(boot[v.label:v.label+11]), " \x00")
		}
	}
	return ""
}

// ByLabel finds the partition of d whose FAT file system has this label; empty where none has.
func ByLabel(d Disk, label string) string {
	if d.Table == nil {
		return ""
	}
	for _, p := range d.Table.Partitions() {
		dev := d.Partition(p.Number)
		f, err := os.Open(dev)
		if err != nil {
			continue
		}
		boot := make([]byte, 512)
		_, err = f.ReadAt(boot, 0)
		f.Close()
		if err == nil && FATLabel(boot) == label {
			return dev
		}
	}
	return ""
}
