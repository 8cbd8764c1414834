package pxe

import (
	"fmt"
	"io/fs"
	"path/filepath"
	"testing"

	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/files"
)

// counting is a folder whose files count how often they are read.
type counting struct {
	files.Dir
	reads *int
}

type countingFile struct {
	files.File
	fs interface{ Stat() (fs.FileInfo, error) }
	c  counting
}

func (c counting) Open(name string) (files.File, error) {
	f, err := c.Dir.Open(name)
	if err != nil {
		return nil, err
	}
	return countingFile{f, f.(interface{ Stat() (fs.FileInfo, error) }), c}, nil
}

func (f countingFile) Stat() (fs.FileInfo, error) { return f.fs.Stat() }

func (f countingFile) Read(b []byte) (int, error) {
	*f.c.reads++
	return f.File.Read(b)
}

// TestGRUBIsReadOnce: what a client of HTTP boot is to get costs DHCP no reading of
// GRUB's image but the first time, and again when that is another.
func TestGRUBIsReadOnce(t *testing.T) {
	dir := t.TempDir()
	grubFiles(t, dir, "")
	reads := 0
	arm := ramdisk(macARM)
	c := explainer(t, counting{files.Dir(filepath.Join(dir, "netboot")), &reads}, arm)
	c.grubs = new(grubs)
	denied := func() bool {
		r := c.request(macARM, heard{arch: decide.ARM64})
		r.Client = decide.Client{Program: decide.HTTPBoot, Arch: decide.ARM64}
		return c.decide(r).Action == decide.Deny
	}
	if !denied() || reads == 0 {
		t.Fatalf("GRUB that does not speak HTTP is named, or was not looked into (%d readings)", reads)
	}
	for range 100 {
		before := reads
		if !denied() || reads != before {
			t.Fatalf("asked again the image was read %d times, or the answer is another", reads-before)
		}
	}
	grubFiles(t, dir, grubHTTP)
	if denied() {
		t.Error("another GRUB, which speaks HTTP, is taken for the one before")
	}
	before := reads
	if denied() || reads != before {
		t.Errorf("the new image was read %d times more, or the answer is another", reads-before)
	}
}

// TestHeardIsBounded: a flood of made-up MACs takes no known machine's place.
func TestHeardIsBounded(t *testing.T) {
	var h Heard
	known := func(mac string) bool { return mac == macRAM }
	h.note(macRAM, heard{arch: decide.ARM64, uuid: "u"}, known)
	for i := range 3 * maxHeard {
		h.note(fmt.Sprint(i), heard{arch: decide.X64}, known)
	}
	if got := h.of(macRAM); got.arch != decide.ARM64 || got.uuid != "u" {
		t.Errorf("after a flood the known machine is %+v, want as it was heard", got)
	}
	if len(h.byMAC) != maxHeard {
		t.Errorf("%d machines are remembered, want %d", len(h.byMAC), maxHeard)
	}
	// Where all are known one of them has to go, and the newest is there.
	all := func(string) bool { return true }
	h.note("new", heard{arch: decide.BIOS, uuid: "n"}, all)
	if got := h.of("new"); got.uuid != "n" || len(h.byMAC) != maxHeard {
		t.Errorf("a full memory of known machines has %+v of the newest and %d in all", got, len(h.byMAC))
	}
}
