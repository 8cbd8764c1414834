package lab

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"os"

	"github.com/klauspost/compress/zstd"
)

const sector = 512

// gptSectors is the GPT's header and its 128 entries (UEFI 2.10, 5.3).
const gptSectors = 33

// CompareDisk checks that a disk holds an image (raw, zstd-compressed) byte for
// byte, outside of what streaming changes by design: the two partition tables,
// which also list the seed, and what lies past the image's end.
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
	for ; len(pending) >= 8; pending = pending[8:] {
		if off := int64(binary.LittleEndian.Uint64(pending)); off < end {
			return fmt.Errorf("the disk differs from the image at byte %d", off)
		}
	}
	return compareEntries(entriesImage, entriesDisk)
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
	const entry = 128
	for i := 0; i+entry <= len(image); i += entry {
		if used := image[i : i+16]; !bytes.Equal(used, make([]byte, 16)) && !bytes.Equal(image[i:i+entry], disk[i:i+entry]) {
			return fmt.Errorf("partition %d of the image is not the same on the disk", i/entry+1)
		}
	}
	return nil
}
