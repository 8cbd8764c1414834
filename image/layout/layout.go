// Package layout is where things lie on the disk of a box and of a node: the
// partitions, their names and types, and the files of the boot partition.
package layout

import (
	"encoding/binary"
	"fmt"
	"regexp"

	"github.com/google/uuid"

	"github.com/better-compute/site-appliance/image/gpt"
)

// MiB is 2^20 bytes.
const MiB = 1 << 20

// Sector is the sector size that images are made for.
const Sector = 512

// Names of partitions, as the table has them.
const (
	ESPName    = "esp"
	ConfigName = "bcconfig"
	IdentName  = "bc-ident"
	DataName   = "bc-data"
	// NewDataName is data's while it has no file system yet, so that making one
	// again after a power cut can never hit data that was in use.
	NewDataName = "bc-data-new"
)

// Labels of FAT file systems.
const (
	ESPLabel    = "ESP"
	ConfigLabel = "BCCONFIG"
	SeedLabel   = "CIDATA"
)

// Types of partitions.
var (
	TypeESP   = uuid.MustParse("c12a7328-f81f-11d2-ba4b-00a0c93ec93b")
	TypeBasic = uuid.MustParse("ebd0a0a2-b9e5-4433-87c0-68b6b72699c7")
	TypeLinux = uuid.MustParse("0fc63daf-8483-4772-8e79-3d69d8477de4")
	// TypeIdent is our own: nothing else claims or formats it.
	TypeIdent = uuid.MustParse("6a1d1f3e-54f1-4c0e-9d1b-3c7f0f0a5b11")
)

// Partition is one that an image carries. Its identifier is fixed, so that
// builds are reproducible.
type Partition struct {
	Name string
	Type uuid.UUID
	ID   uuid.UUID
	// Start and Size are in bytes.
	Start, Size int64
	// Label is the FAT label; empty for raw bytes.
	Label string
}

// Serial is the number of the partition's FAT file system.
func (p Partition) Serial() uint32 { return binary.BigEndian.Uint32(p.ID[12:]) | 1<<31 }

// Disk is an image's layout.
type Disk struct {
	ID         uuid.UUID
	Size       int64
	Partitions []Partition
}

// ConfigFile is the box's configuration on its partition.
const ConfigFile = "site.toml"

// Site is the layout of a box: data is made on the rest of the disk at first boot.
func Site() Disk {
	return lay("5c1f3c5e-0001-4000-8000-0000000000%02x", []Partition{
		{Name: ESPName, Type: TypeESP, Size: 512 * MiB, Label: ESPLabel},
		{Name: ConfigName, Type: TypeBasic, Size: 64 * MiB, Label: ConfigLabel},
		{Name: IdentName, Type: TypeIdent, Size: 4 * MiB},
	})
}

// Node is the layout of a deployed machine.
func Node() Disk {
	return lay("5c1f3c5e-0002-4000-8000-0000000000%02x", []Partition{
		{Name: ESPName, Type: TypeESP, Size: 96 * MiB, Label: ESPLabel},
	})
}

func lay(ids string, parts []Partition) Disk {
	d := Disk{ID: uuid.MustParse(fmt.Sprintf(ids, 0))}
	at := int64(MiB)
	for i, p := range parts {
		p.ID = uuid.MustParse(fmt.Sprintf(ids, i+1))
		p.Start = at
		at += p.Size
		d.Partitions = append(d.Partitions, p)
	}
	d.Size = at + MiB
	return d
}

// Partition finds one by name.
func (d Disk) Partition(name string) (Partition, bool) {
	for _, p := range d.Partitions {
		if p.Name == name {
			return p, true
		}
	}
	return Partition{}, false
}

// Table is the layout as a partition table.
func (d Disk) Table() (*gpt.Table, error) {
	t, err := gpt.New(d.ID, uint64(d.Size), Sector)
	if err != nil {
		return nil, err
	}
	for _, p := range d.Partitions {
		if _, err := t.Add(gpt.Partition{Type: p.Type, ID: p.ID, First: uint64(p.Start) / Sector, Last: uint64(p.Start+p.Size)/Sector - 1, Name: p.Name}); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// versionPattern keeps file names on the boot partition plain; the plus sign
// starts systemd-boot's counter.
var versionPattern = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z.~-]{0,39}$`)

// EntryName is the file name of a version's UKI. With tries, systemd-boot
// counts its starts and falls back to another version when they are used up;
// without, the version is blessed. Counters have a fixed width of one digit.
func EntryName(version string, tries int) (string, error) {
	if !versionPattern.MatchString(version) {
		return "", fmt.Errorf("version %q: want letters, digits, dots, tildes and dashes, at most 40", version)
	}
	switch {
	case tries == 0:
		return "bcsite_" + version + ".efi", nil
	case tries < 1 || tries > 9:
		return "", fmt.Errorf("%d tries: want 0 to 9", tries)
	}
	return fmt.Sprintf("bcsite_%s+%d-0.efi", version, tries), nil
}

// LoaderConf is systemd-boot's configuration: no menu, no editing of command lines.
const LoaderConf = `timeout 0
default bcsite_*
console-mode keep
editor no
auto-firmware no
`

// Paths on the boot partition.
const (
	EntryDir       = "EFI/Linux"
	LoaderConfPath = "loader/loader.conf"
	LoaderPath     = "EFI/systemd/systemd-boot%s.efi"
	RemovablePath  = "EFI/BOOT/BOOT%s.EFI"
	RescuePath     = "loader/entries/rescue.conf"
)
