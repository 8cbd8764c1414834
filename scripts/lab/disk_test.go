package lab

import (
	"bytes"
	"encoding/binary"
	"math/rand"
	"os"
	"path/filepath"
	"testing"

	"github.com/klauspost/compress/zstd"
)

func TestCompareDisk(t *testing.T) {
	const (
		imageBytes            = 3 << 20
		addedFirst, addedLast = 4500, 4599
	)
	image := make([]byte, imageBytes)
	rand.New(rand.NewSource(1)).Read(image)
	clear(image[2*sector+128 : (1+gptSectors)*sector]) // one partition
	var packed bytes.Buffer
	enc, _ := zstd.NewWriter(&packed)
	enc.Write(image)
	enc.Close()
	dir := t.TempDir()
	zst := filepath.Join(dir, "image.raw.zst")
	os.WriteFile(zst, packed.Bytes(), 0o600)

	for _, tt := range []struct {
		name string
		flip int // -1: none
		ok   bool
	}{
		{"the same", -1, true},
		{"past the image", imageBytes + 7, true},
		{"in the table's free entries, where the seed is listed", 2*sector + 200, true},
		{"in the image's backup table", imageBytes - 5, true},
		{"in an added partition", addedFirst*sector + 9, true},
		{"right behind it", (addedLast + 1) * sector, false},
		{"in the boot code", 3, false},
		{"in an entry of the image", 2*sector + 40, false},
		{"in the first byte after the table", (1 + gptSectors) * sector, false},
		{"in the middle", imageBytes / 2, false},
		{"in the last byte before the backup table", imageBytes - gptSectors*sector - 1, false},
	} {
		disk := append(bytes.Clone(image), make([]byte, 1<<20)...)
		added := disk[2*sector+128:]
		added[0] = 1
		binary.LittleEndian.PutUint64(added[32:], addedFirst)
		binary.LittleEndian.PutUint64(added[40:], addedLast)
		if tt.flip >= 0 {
			disk[tt.flip] ^= 1
		}
		path := filepath.Join(dir, "disk")
		os.WriteFile(path, disk, 0o600)
		if err := CompareDisk(zst, path); (err == nil) != tt.ok {
			t.Errorf("%s: CompareDisk = %v, want ok %v", tt.name, err, tt.ok)
		}
	}
	over := append(bytes.Clone(image), make([]byte, 1<<20)...)
	binary.LittleEndian.PutUint64(over[2*sector+32:], 100) // the image's partition
	binary.LittleEndian.PutUint64(over[2*sector+40:], 200)
	path := filepath.Join(dir, "over")
	os.WriteFile(path, over, 0o600)
	if err := CompareDisk(zst, path); err == nil {
		t.Error("a moved partition passed")
	}
	short := filepath.Join(dir, "short")
	os.WriteFile(short, image[:imageBytes/2], 0o600)
	if err := CompareDisk(zst, short); err == nil {
		t.Error("a short disk passed")
	}
}
