package tftp

import "time"

const (
	maxWindow = 64
	// maxWindowBytes bounds what one transfer keeps for sending again, and
	// fullWindows how many keep so much: of more transfers each keeps less.
	maxWindowBytes = 128 << 10
	fullWindows    = 128
	minTimeout     = 100 * time.Millisecond
	maxTimeout     = 4 * time.Second
	// pace is the pause between the bursts of one window, after a loss.
	pace = time.Millisecond
)

// window decides what a transfer sends: go-back-N from the last acknowledged
// block (RFC 7440). Block 0 is the option acknowledgement. A receiver
// acknowledges a whole window only, so a loss makes the bursts shorter and
// never the window.
type window struct {
	last, size int64

	acked int64 // the last block acknowledged; -1: not even block 0
	next  int64 // the next to send
	sent  int64 // the highest ever sent
	burst int64
	// returned is set once blocks after acked were sent again: further
	// duplicates of its acknowledgement ask for nothing new.
	returned bool
	tries    int

	timeout, smoothed, variance time.Duration
	ended                       time.Duration // when the window's end was first sent
}

// newWindow is a transfer of the blocks 1 to last, after block 0 if options is set.
func newWindow(last int64, size int, options bool, timeout time.Duration) window {
	w := window{last: last, size: int64(size), burst: int64(size), timeout: timeout, next: 1}
	if options {
		w.acked, w.next, w.sent = -1, 0, -1
	}
	return w
}

// end is the last block that may be under way.
func (w *window) end() int64 {
	if w.acked < 0 {
		return 0
	}
	return min(w.acked+w.size, w.last)
}

func (w *window) done() bool { return w.acked == w.last }

// send says which blocks to send now, from up to and without to, and how long
// to wait for an answer then.
func (w *window) send(now time.Duration) (from, to int64, wait time.Duration) {
	from = w.next
	to = min(from+w.burst, w.end()+1)
	w.next = to
	w.sent = max(w.sent, to-1)
	if to <= w.end() {
		return from, to, pace
	}
	w.ended = now
	return from, to, w.timeout
}

// ack takes an acknowledgement and says whether it calls for sending: one of a
// block that is not under way, or a duplicate, does not.
func (w *window) ack(number uint16, now time.Duration) bool {
	n := w.acked + int64(number-uint16(w.acked))
	if n < 0 || n > w.sent {
		return false
	}
	if n == w.acked {
		// Lock-step never answers a duplicate: each block would go out twice from there on.
		if w.size == 1 || w.returned || w.next == n+1 {
			return false
		}
		w.back()
		return true
	}
	switch {
	case n == w.end():
		if !w.returned {
			w.measure(now - w.ended)
			w.burst = min(w.burst+1, w.size)
		}
		w.returned = false
		w.acked, w.next = n, n+1
	case n+1 < w.next: // what came after n was lost
		w.acked = n
		w.back()
	default:
		// The window is still being sent: this is as far as the receiver is.
		w.acked, w.returned = n, false
		w.next = n + 1
	}
	w.tries = 0
	return true
}

// expire takes the end of send's wait, and says false when the client has gone.
func (w *window) expire() bool {
	if w.next <= w.end() {
		return true
	}
	if w.tries++; w.tries > retries {
		return false
	}
	w.timeout = min(2*w.timeout, max(maxTimeout, w.timeout))
	w.back()
	return true
}

func (w *window) back() {
	w.next, w.returned = w.acked+1, true
	w.burst = max(w.burst/2, 1)
}

// measure is RFC 6298's, with a floor for the LAN.
func (w *window) measure(rtt time.Duration) {
	if w.smoothed == 0 {
		w.smoothed, w.variance = rtt, rtt/2
	} else {
		w.variance += ((w.smoothed - rtt).Abs() - w.variance) / 4
		w.smoothed += (rtt - w.smoothed) / 8
	}
	w.timeout = min(max(w.smoothed+4*w.variance, minTimeout), maxTimeout)
}
