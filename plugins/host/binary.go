package host

import (
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
)

// errPin marks a binary that is not the pinned one.
var errPin = errors.New("pin mismatch")

// checkPin hashes an open file and answers its first bytes. It leaves the file's offset alone.
func checkPin(f *os.File, path string, want [32]byte) (head []byte, err error) {
	digest := sha256.New()
	start := new(bytes.Buffer)
	if _, err := io.Copy(io.MultiWriter(digest, &limited{start, len(elf.ELFMAG)}), io.NewSectionReader(f, 0, 1<<62)); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if got := digest.Sum(nil); !bytes.Equal(got, want[:]) {
		return nil, fmt.Errorf("%w: %s has SHA-256 %s, its pin is %s", errPin, path, hex.EncodeToString(got), hex.EncodeToString(want[:]))
	}
	return start.Bytes(), nil
}

func isELF(head []byte) bool { return string(head) == elf.ELFMAG }

// limited keeps the first n bytes.
type limited struct {
	buf *bytes.Buffer
	n   int
}

func (l *limited) Write(p []byte) (int, error) {
	l.buf.Write(p[:min(len(p), l.n-l.buf.Len())])
	return len(p), nil
}
