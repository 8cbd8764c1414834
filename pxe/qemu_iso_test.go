package pxe

import (
	"context"
	"encoding/binary"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/image/qemutest"
	"github.com/better-compute/site-appliance/pxe/pxetest"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// speaks is a boot sector that says a text on the first serial line and then gives
// up to the next boot device, as a disc's loader does that a person leaves.
func speaks(text string) []byte {
	code := []byte{
		0xe8, 0, 0, // call the next one, which learns where it is
		0x5e,             // pop si
		0x83, 0xc6, 0x20, // add si, from there to the text
		0x2e, 0xac, // lodsb
		0x84, 0xc0, // until a zero
		0x74, 0x12,
		0x88, 0xc4,
		0xba, 0xfd, 0x03, // wait until the line takes a byte
		0xec, 0xa8, 0x20, 0x74, 0xfb,
		0xba, 0xf8, 0x03, // give it one
		0x88, 0xe0, 0xee,
		0xeb, 0xe8,
		0xcd, 0x18, // int 18h
		0xeb, 0xfe,
	}
	return append(append(code, text...), 0)
}

// farDisc is a disc image whose boot image lies beyond 2 GiB; all else is a hole.
func farDisc(t *testing.T, text string) (*os.File, int64) {
	t.Helper()
	const sector, catalog, far = 2048, 20, 1_200_000
	put := func(lba int, b []byte) []byte {
		return append(binary.LittleEndian.AppendUint32(nil, uint32(lba)), b...)
	}
	descriptor := func(kind byte) []byte { return append([]byte{kind}, "CD001\x01"...) }
	boot := make([]byte, 0x4b)
	copy(boot, descriptor(0))
	copy(boot[7:], "EL TORITO SPECIFICATION")
	binary.LittleEndian.PutUint32(boot[0x47:], catalog)
	entries := make([]byte, 64)
	entries[0], entries[30], entries[31] = 1, 0x55, 0xaa
	binary.LittleEndian.PutUint16(entries[28:], ^uint16(0xaa55+1)+1) // the sum of all words is zero
	entries[32] = 0x88
	binary.LittleEndian.PutUint16(entries[38:], 4)
	binary.LittleEndian.PutUint32(entries[40:], far)
	f, err := os.Create(filepath.Join(t.TempDir(), "far.iso"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	for _, b := range [][]byte{put(16, descriptor(1)), put(17, boot), put(18, descriptor(255)), put(catalog, entries), put(far, speaks(text))} {
		if _, err := f.WriteAt(b[4:], int64(binary.LittleEndian.Uint32(b))*sector); err != nil {
			t.Fatal(err)
		}
	}
	const size = (far + 1000) * sector
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	return f, size
}

// farFile is that image as the box's cache gives it.
type farFile struct {
	*io.SectionReader
	file *os.File
}

func (f *farFile) Close() error { return nil } // the test's

func (f *farFile) Next(limit int64) (*os.File, int64, int64, error) {
	off, err := f.Seek(0, io.SeekCurrent)
	if err != nil || off >= f.Size() {
		return nil, 0, 0, io.EOF
	}
	n := min(limit, f.Size()-off)
	_, err = f.Seek(n, io.SeekCurrent)
	return f.file, off, n, err
}

func (f *farFile) Has(int64, int64) bool { return true }

// TestQEMUFarDisc has iPXE in a BIOS read a disc where its 32 bits have become
// negative. The disc's loader starts, and when it ends, the firmware goes on.
func TestQEMUFarDisc(t *testing.T) {
	if os.Getenv("BC_QEMU_LONG") == "" {
		t.Skip("runs in make soak: BC_QEMU_LONG is not set")
	}
	qemutest.Need(t, false)
	for _, name := range []string{undionlyFile, "/dev/net/tun"} {
		if _, err := os.Stat(name); err != nil {
			t.Skipf("needs QEMU: %v", err)
		}
	}
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir)
	copyFile(t, undionlyFile, filepath.Join(dir, "netboot/ipxe/undionly.kpxe"))
	pxetest.Bridge(t, "br0", netip.MustParsePrefix(boxAddr+"/24"), "tap0")
	disc, size := farDisc(t, "\r\nThe disc speaks\r\n")
	const mac = "52:54:00:00:01:05"
	m := &pxev1.Machine{MachineId: "node_a", Macs: []string{mac}, Action: pxev1.Action_ACTION_ISO, Purpose: "iso", WindowId: "w1",
		WindowUntilMs: time.Now().Add(time.Hour).UnixMilli(), Iso: &pxev1.Iso{Sha256: digest, Size: uint64(size), Name: "far", Class: pxev1.IsoClass_ISO_CLASS_NEEDS_DRIVE}}
	b := start(t, "br0", dir, func(c *Config) {
		c.Artifacts = func(context.Context, string) (io.ReadSeekCloser, int64, error) {
			return &farFile{io.NewSectionReader(disc, 0, size), disc}, size, nil
		}
	}, m)
	vm := runQEMU(t, qemutest.Config{}, qemutest.NIC{MAC: mac})
	for _, says := range []string{"This machine is assigned to the disc image far", "leaves the BIOS", "The disc speaks", "The disc image has ended", "Booting from Hard Disk"} {
		if err := vm.WaitMarker(t.Context(), says, 5*quiet); err != nil {
			t.Fatal(err)
		}
	}
	b.wait(t, quiet, "pxe.stage telemetry "+mac+" {MAC:"+mac+" MachineID:node_a Stage:iso ")
}
