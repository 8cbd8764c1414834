// Package reclog is an append-only file of checksummed records that survives a
// cut at any byte: a torn tail is cut off, damage before it is reported.
package reclog

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"

	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
)

// MaxRecordBytes bounds one record.
const MaxRecordBytes = 16 << 20

// Each record is its length, the CRC-32C of its bytes (both little-endian), and its bytes.
const headerBytes = 8

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// ErrDamaged says that records before the tail are lost: not what a cut leaves
// behind, since each record is on disk before the next one is written.
var ErrDamaged = errors.New("records before the end of the file are damaged")

// roomBytes is what is set aside on disk past the file's end, so that a full
// disk does not stop who keeps records at once: that is thousands of them.
const roomBytes = 1 << 20

// Log is an open file. It is not safe for concurrent use.
type Log struct {
	path string
	file *os.File
	size int64
	room int64 // up to where the file system has set blocks aside
	err  error // after a failed sync nothing more is believed
}

// Open reads every record of the file at path, which is made if it is missing,
// and leaves it ready for appending. With ErrDamaged the file is left untouched.
func Open(path string) (*Log, [][]byte, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, nil, err
	}
	l := &Log{path: path, file: f}
	records, err := l.load()
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return l, records, nil
}

// OpenOrSalvage is Open, and for a damaged file Salvage and a file that begins
// anew: damaged then says that records are lost behind those that it returns.
func OpenOrSalvage(path string) (l *Log, records [][]byte, damaged bool, err error) {
	l, records, err = Open(path)
	if !errors.Is(err, ErrDamaged) {
		return l, records, false, err
	}
	if records, err = Salvage(path); err != nil {
		return nil, nil, true, err
	}
	l, _, err = Open(path)
	return l, records, true, err
}

// Salvage sets a damaged file aside as path + ".damaged", over an older one,
// and returns the records before the damage.
func Salvage(path string) ([][]byte, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	records, _ := Split(data)
	_, err = atomicfile.SetAside(path)
	return records, err
}

func (l *Log) load() ([][]byte, error) {
	data, err := io.ReadAll(l.file)
	if err != nil {
		return nil, err
	}
	records, good := Split(data)
	if good < len(data) {
		if holdsRecord(data[good+1:]) {
			return nil, fmt.Errorf("%s: %w (at byte %d of %d)", l.path, ErrDamaged, good, len(data))
		}
		if err := l.file.Truncate(int64(good)); err != nil {
			return nil, fmt.Errorf("cut torn tail: %w", err)
		}
		if err := l.file.Sync(); err != nil {
			return nil, fmt.Errorf("cut torn tail: %w", err)
		}
	}
	l.size = int64(good)
	l.keepRoom()
	if _, err := l.file.Seek(l.size, io.SeekStart); err != nil {
		return nil, err
	}
	return records, atomicfile.SyncDir(filepath.Dir(l.path))
}

// Split parses records from the front of data; good is where the first bad one begins.
func Split(data []byte) (records [][]byte, good int) {
	for {
		record, ok := first(data[good:])
		if !ok {
			return records, good
		}
		records = append(records, record)
		good += headerBytes + len(record)
	}
}

func first(data []byte) ([]byte, bool) {
	if len(data) < headerBytes {
		return nil, false
	}
	n := binary.LittleEndian.Uint32(data)
	if n == 0 || n > MaxRecordBytes || int64(n) > int64(len(data)-headerBytes) {
		return nil, false
	}
	record := data[headerBytes : headerBytes+int(n)]
	return record, crc32.Checksum(record, castagnoli) == binary.LittleEndian.Uint32(data[4:])
}

// holdsRecord looks for a whole record at any offset: one that follows a bad
// one proves that the bad one is no torn tail.
func holdsRecord(data []byte) bool {
	for i := range data {
		if _, ok := first(data[i:]); ok {
			return true
		}
	}
	return false
}

// NewEpoch names a file that begins: a reader who knows another name knows that
// what came before is gone.
func NewEpoch() string {
	var b [16]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// Encode appends a record in its stored form to buf.
func Encode(buf, record []byte) []byte {
	buf = binary.LittleEndian.AppendUint32(buf, uint32(len(record)))
	buf = binary.LittleEndian.AppendUint32(buf, crc32.Checksum(record, castagnoli))
	return append(buf, record...)
}

// Append writes a record. After a failed write the file is cut back to what it
// was, so that a full disk leaves no half record; after a failed sync the log
// refuses everything, since nobody knows what is on disk.
func (l *Log) Append(record []byte, sync bool) error {
	if l.err != nil {
		return l.err
	}
	if len(record) == 0 || len(record) > MaxRecordBytes {
		return fmt.Errorf("record of %d bytes; 1 to %d are allowed", len(record), MaxRecordBytes)
	}
	data := Encode(nil, record)
	if _, err := l.file.Write(data); err != nil {
		if terr := l.rewind(); terr != nil {
			l.err = fmt.Errorf("cut back %s: %w", l.path, terr)
		}
		return fmt.Errorf("append to %s: %w", l.path, err)
	}
	l.size += int64(len(data))
	l.keepRoom()
	if !sync {
		return nil
	}
	return l.Sync()
}

// keepRoom renews the room once half of it is used. A disk or a file system
// that gives none is no fault: then appending says when it fails.
func (l *Log) keepRoom() {
	if l.room-l.size < roomBytes/2 && setAside(l.file, l.size, roomBytes) == nil {
		l.room = l.size + roomBytes
	}
}

func (l *Log) rewind() error {
	l.room = 0 // cutting a file gives its room back
	if err := l.file.Truncate(l.size); err != nil {
		return err
	}
	_, err := l.file.Seek(l.size, io.SeekStart)
	return err
}

// Sync makes everything that was appended durable.
func (l *Log) Sync() error {
	if l.err != nil {
		return l.err
	}
	if err := l.file.Sync(); err != nil {
		l.err = fmt.Errorf("sync %s: %w", l.path, err)
		return l.err
	}
	return nil
}

// Replace swaps the whole content for these records, atomically.
func (l *Log) Replace(records [][]byte) error {
	if l.err != nil {
		return l.err
	}
	var data []byte
	for _, record := range records {
		data = Encode(data, record)
	}
	if err := atomicfile.Write(l.path, data, 0o600); err != nil {
		return err
	}
	f, err := os.OpenFile(l.path, os.O_RDWR, 0o600)
	if err == nil {
		_, err = f.Seek(0, io.SeekEnd)
	}
	if err != nil {
		// The old descriptor names a file that is gone: nothing may go there.
		l.err = fmt.Errorf("reopen %s: %w", l.path, err)
		return l.err
	}
	l.file.Close()
	l.file, l.size, l.room = f, int64(len(data)), 0
	l.keepRoom()
	return nil
}

// Err is why the log refuses everything, or nil.
func (l *Log) Err() error { return l.err }

// Size is the file's length in bytes.
func (l *Log) Size() int64 { return l.size }

// Close closes the file; what was synced stays.
func (l *Log) Close() error { return l.file.Close() }
