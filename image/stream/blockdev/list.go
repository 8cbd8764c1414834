// Package blockdev finds a machine's disks in sysfs and writes to them past the
// page cache.
package blockdev

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// The reasons why a serial picks no disk; errors of Find wrap them.
var (
	ErrNoDisk        = errors.New("no disk has this serial")
	ErrAmbiguousDisk = errors.New("several disks have this serial")
)

// Disk is a whole disk as sysfs tells.
type Disk struct {
	// Name is the kernel's, such as "nvme0n1"; Path its device file.
	Name, Path string
	// Serial and Model may be empty.
	Serial, Model string
	SizeBytes     int64
	ReadOnly      bool
	Removable     bool
	Rotational    bool
}

func (d Disk) String() string {
	serial := "no serial"
	if d.Serial != "" {
		serial = "serial " + strconv.Quote(d.Serial)
	}
	return fmt.Sprintf("%s (%s, %d bytes)", d.Name, serial, d.SizeBytes)
}

// List reads the disks under sys ("/sys"); device files are named below dev
// ("/dev"). Virtual devices, optical drives and empty slots are left out.
func List(sys, dev string) ([]Disk, error) {
	root := filepath.Join(sys, "block")
	entries, err := os.ReadDir(root)
	if err != nil {
		return nil, fmt.Errorf("list disks: %w", err)
	}
	var disks []Disk
	for _, e := range entries {
		dir := filepath.Join(root, e.Name())
		if _, err := os.Stat(filepath.Join(dir, "device")); err != nil {
			continue // loop, ram, dm, md, zram
		}
		const typeOptical = "5" // SCSI peripheral device type
		if attr(dir, "hidden") == "1" || attr(dir, "device/type") == typeOptical || strings.HasPrefix(e.Name(), "fd") {
			continue
		}
		sectors, err := strconv.ParseInt(attr(dir, "size"), 10, 64)
		const sector = 512 // sysfs counts in these, whatever the disk does
		if err != nil || sectors <= 0 || sectors > (1<<63-1)/sector {
			continue
		}
		// The kernel writes ! for / in names.
		path := filepath.Join(dev, strings.ReplaceAll(e.Name(), "!", "/"))
		disks = append(disks, Disk{
			Name: e.Name(), Path: path, Serial: serial(dir), Model: attr(dir, "device/model"), SizeBytes: sectors * sector,
			ReadOnly: attr(dir, "ro") == "1", Removable: attr(dir, "removable") == "1", Rotational: attr(dir, "queue/rotational") == "1",
		})
	}
	return disks, nil
}

// serial tries where the drivers keep it: virtio, NVMe and MMC as text, SCSI and
// SATA as the vital product data page 0x80.
func serial(dir string) string {
	for _, name := range []string{"serial", "device/serial"} {
		if s := attr(dir, name); s != "" {
			return s
		}
	}
	page, err := os.ReadFile(filepath.Join(dir, "device/vpd_pg80"))
	if err != nil {
		return ""
	}
	return parseVPD80(page)
}

// parseVPD80 reads a unit serial number page: four header bytes, the last two
// of which are the length.
func parseVPD80(page []byte) string {
	if len(page) < 4 || page[1] != 0x80 {
		return ""
	}
	n := min(int(page[2])<<8|int(page[3]), len(page)-4)
	return clean(page[4 : 4+n])
}

func attr(dir, name string) string {
	b, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return ""
	}
	return clean(b)
}

// clean trims padding and turns what does not print into question marks: this
// text comes from a device and ends in logs.
func clean(b []byte) string {
	s := strings.Trim(string(b), " \t\r\n\x00")
	return strings.Map(func(r rune) rune {
		if r < 0x20 || r == 0x7f || r == 0xfffd {
			return '?'
		}
		return r
	}, s)
}

// selectError is an errs.Error with a reason that errors.Is finds.
type selectError struct {
	reason error
	coded  *errs.Error
}

func (e *selectError) Error() string   { return e.coded.Error() }
func (e *selectError) Unwrap() []error { return []error{e.reason, e.coded} }

// Find picks the one disk with this serial. No match and several matches are
// invalid-args errors, which say what disks there are.
func Find(disks []Disk, serial string) (Disk, error) {
	serial = strings.TrimSpace(serial)
	if serial == "" {
		return Disk{}, errs.New(errs.InvalidArgs, "the disk's serial is missing")
	}
	var found []Disk
	for _, d := range disks {
		if d.Serial == serial {
			found = append(found, d)
		}
	}
	switch len(found) {
	case 1:
		if found[0].ReadOnly {
			return Disk{}, errs.New(errs.InvalidArgs, "disk %s is read-only", found[0])
		}
		return found[0], nil
	case 0:
		return Disk{}, &selectError{ErrNoDisk, errs.New(errs.InvalidArgs, "no disk has serial %q: there are %s", serial, describe(disks))}
	}
	return Disk{}, &selectError{ErrAmbiguousDisk, errs.New(errs.InvalidArgs, "%d disks have serial %q: %s", len(found), serial, describe(found))}
}

func describe(disks []Disk) string {
	if len(disks) == 0 {
		return "no disks"
	}
	var names []string
	for _, d := range disks {
		names = append(names, d.String())
	}
	return strings.Join(names, ", ")
}
