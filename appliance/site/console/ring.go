package console

import "sync"

// ring is the last of what a machine said, as a log whose old end is dropped.
// Readers go by offset, so that a slow one holds nobody up.
type ring struct {
	mu      sync.Mutex
	data    []byte
	start   int64 // offset of data[0]
	changed chan struct{}
}

// slack is how much more than HistoryBytes is kept before the old end is dropped.
const slack = 64 << 10

func newRing() *ring { return &ring{changed: make(chan struct{})} }

// Write appends p and wakes readers.
func (r *ring) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.data = append(r.data, p...)
	if over := len(r.data) - HistoryBytes; over > slack {
		r.data = append(r.data[:0], r.data[over:]...)
		r.start += int64(over)
	}
	close(r.changed)
	r.changed = make(chan struct{})
	return len(p), nil
}

// back is the offset n bytes before the end, or of the oldest byte that is kept.
func (r *ring) back(n int) int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.start + int64(max(len(r.data)-min(n, HistoryBytes), 0))
}

// read copies from offset. skipped were dropped before anybody read them; where
// nothing is there yet, changed is closed when something is.
func (r *ring) read(offset int64, p []byte) (n int, next, skipped int64, changed <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if offset < r.start {
		skipped, offset = r.start-offset, r.start
	}
	n = copy(p, r.data[offset-r.start:])
	return n, offset + int64(n), skipped, r.changed
}

func (r *ring) empty() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.data) == 0
}
