package lab

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/klauspost/compress/zstd"
)

const sector = 512

// gptSectors is the GPT's header and its 128 entries (UEFI 2.10, 5.3).
const gptSectors = 33

const entryBytes = 128

// CompareDisk checks that a disk holds an image (raw, zstd-compressed) byte for
// byte, outside of what is added by design: the two partition tables, the
// partitions that the disk has beside the image's (the seed, and the data that
// a node makes at its first boot), and what lies past the image's end.
func CompareDisk(imageZst, disk string) error {
	packed, err := os.Open(imageZst)
	if err != nil {
		return err
	}
	defer packed.Close()
	unpacked, err := zstd.NewReader(packed)
	if err != nil {
		return err
	}
	defer unpacked.Close()
	d, err := os.Open(disk)
	if err != nil {
		return err
	}
	defer d.Close()

	image, written := bufio.NewReaderSize(unpacked, 1<<20), bufio.NewReaderSize(d, 1<<20)
	// The image's own backup table ends it: hold that much back while comparing.
	const chunk = 1 << 20
	var pending []byte
	a, b := make([]byte, chunk), make([]byte, chunk)
	var at int64
	var entriesImage, entriesDisk []byte
	for {
		n, err := io.ReadFull(image, a)
		if n == 0 {
			break
		}
		if err != nil && err != io.ErrUnexpectedEOF {
			return fmt.Errorf("read image: %w", err)
		}
		if _, err := io.ReadFull(written, b[:n]); err != nil {
			return fmt.Errorf("read disk at %d: %w", at, err)
		}
		if at == 0 {
			entriesImage = append(entriesImage, a[2*sector:(1+gptSectors)*sector]...)
			entriesDisk = append(entriesDisk, b[2*sector:(1+gptSectors)*sector]...)
			// The protective MBR's size and the table.
			copy(b[446:(1+gptSectors)*sector], a[446:(1+gptSectors)*sector])
		}
		pending = append(pending, diff(at, a[:n], b[:n])...)
		at += int64(n)
	}
	end := at - gptSectors*sector
	added := partitionsBeside(entriesImage, entriesDisk)
	for _, p := range partitionsBeside(nil, entriesImage) {
		if slices.ContainsFunc(added, func(a [2]int64) bool { return a[0] < p[1] && p[0] < a[1] }) {
			return fmt.Errorf("a partition was added over one of the image's, at byte %d", p[0])
		}
	}
	for ; len(pending) >= 8; pending = pending[8:] {
		off := int64(binary.LittleEndian.Uint64(pending))
		inAdded := slices.ContainsFunc(added, func(r [2]int64) bool { return r[0] <= off && off < r[1] })
		if off < end && !inAdded {
			return fmt.Errorf("the disk differs from the image at byte %d", off)
		}
	}
	return compareEntries(entriesImage, entriesDisk)
}

// partitionsBeside are the byte ranges of the disk's partitions where the image has none.
func partitionsBeside(image, disk []byte) [][2]int64 {
	var out [][2]int64
	none := make([]byte, 16)
	for i := 0; i+entryBytes <= len(disk); i += entryBytes {
		inImage := i < len(image) && !bytes.Equal(image[i:i+16], none)
		if !inImage && !bytes.Equal(disk[i:i+16], none) {
			first, last := binary.LittleEndian.Uint64(disk[i+32:]), binary.LittleEndian.Uint64(disk[i+40:])
			out = append(out, [2]int64{int64(first) * sector, (int64(last) + 1) * sector})
		}
	}
	return out
}

// diff lists the first differing offset of each sector, 8 bytes each.
func diff(at int64, a, b []byte) []byte {
	if bytes.Equal(a, b) {
		return nil
	}
	var out []byte
	for s := 0; s < len(a); s += sector {
		e := min(s+sector, len(a))
		for i := s; i < e; i++ {
			if a[i] != b[i] {
				out = binary.LittleEndian.AppendUint64(out, uint64(at)+uint64(i))
				break
			}
		}
	}
	return out
}

// compareEntries checks that every partition of the image is still there as it was.
func compareEntries(image, disk []byte) error {
	for i := 0; i+entryBytes <= len(image); i += entryBytes {
		if used := image[i : i+16]; !bytes.Equal(used, make([]byte, 16)) && !bytes.Equal(image[i:i+entryBytes], disk[i:i+entryBytes]) {
			return fmt.Errorf("partition %d of the image is not the same on the disk", i/entryBytes+1)
		}
	}
	return nil
}
