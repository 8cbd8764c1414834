package stream

import (
	"math/rand/v2"
	"testing"
)

// BenchmarkRun streams an image without holes onto a file; make bench puts a
// stream beside dd.
func BenchmarkRun(b *testing.B) {
	raw := make([]byte, 256*mib)
	noise := rand.NewChaCha8([32]byte{5})
	for at := 0; at < len(raw); at += 4096 {
		noise.Read(raw[at:][:2048])
		copy(raw[at+2048:], raw[at:][:2048])
	}
	img, disk := newStored(b, raw), newDisk(b, int64(len(raw)))
	j := job(img, disk)
	b.SetBytes(int64(len(raw)))
	for b.Loop() {
		if _, err := Run(b.Context(), j); err != nil {
			b.Fatal(err)
		}
	}
}
