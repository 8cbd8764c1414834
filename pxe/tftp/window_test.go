package tftp

import (
	"testing"
	"time"
)

// step is one event of a table and what is sent after it.
type step struct {
	ack      int // the number acknowledged; -1: the wait ended
	from, to int64
}

func TestWindow(t *testing.T) {
	for _, tt := range []struct {
		name    string
		last    int64
		size    int
		options bool
		from    int64 // of the first sending
		to      int64
		steps   []step
		done    bool
	}{
		{"lock-step", 2, 1, true, 0, 1, []step{{0, 1, 2}, {1, 2, 3}, {2, 0, 0}}, true},
		{"no options", 1, 1, false, 1, 2, []step{{1, 0, 0}}, true},
		{"a duplicate in lock-step is no request", 3, 1, false, 1, 2, []step{{1, 2, 3}, {1, 0, 0}, {2, 3, 4}, {2, 0, 0}}, false},
		{"whole windows", 6, 4, true, 0, 1, []step{{0, 1, 5}, {4, 5, 7}, {6, 0, 0}}, true},
		{"the last block stays", 6, 4, true, 0, 1, []step{{0, 1, 5}, {4, 5, 7}}, false},
		{"a gap: from the block after the acknowledged", 20, 8, false, 1, 9, []step{{3, 4, 8}, {-1, 8, 12}, {11, 12, 16}}, false},
		{"a first block lost, told once per block received", 20, 4, false, 1, 5, []step{{4, 5, 9}, {4, 5, 7}, {4, 0, 0}, {-1, 7, 9}, {4, 0, 0}, {8, 9, 11}}, false},
		{"a time-out goes back", 20, 4, false, 1, 5, []step{{-1, 1, 3}, {-1, 3, 5}, {4, 5, 7}}, false},
		{"a late acknowledgement after going back", 20, 4, false, 1, 5, []step{{-1, 1, 3}, {4, 5, 7}}, false},
		{"blocks never sent", 20, 4, false, 1, 5, []step{{5, 0, 0}, {65535, 0, 0}, {4, 5, 9}}, false},
		{"an old one", 20, 4, false, 1, 5, []step{{4, 5, 9}, {2, 0, 0}, {8, 9, 13}}, false},
	} {
		w := newWindow(tt.last, tt.size, tt.options, time.Second)
		if from, to, _ := w.send(0); from != tt.from || to != tt.to {
			t.Errorf("%s: first sends %d to %d, want %d to %d", tt.name, from, to, tt.from, tt.to)
		}
		for i, s := range tt.steps {
			sends := false
			if s.ack < 0 {
				sends = w.expire()
			} else {
				sends = w.ack(uint16(s.ack), 0) && !w.done()
			}
			var from, to int64
			if sends {
				from, to, _ = w.send(0)
			}
			if from != s.from || to != s.to {
				t.Errorf("%s: step %d sends %d to %d, want %d to %d", tt.name, i, from, to, s.from, s.to)
			}
		}
		if w.done() != tt.done {
			t.Errorf("%s: done = %v, want %v", tt.name, w.done(), tt.done)
		}
	}
}

func TestWindowWraps(t *testing.T) {
	const last = 200_000
	w := newWindow(last, 16, false, time.Second)
	for !w.done() {
		_, to, _ := w.send(0)
		if !w.ack(uint16(to-1), 0) {
			t.Fatalf("the acknowledgement of block %d calls for nothing, want the next window", to-1)
		}
	}
}

func TestStalledClientEnds(t *testing.T) {
	w := newWindow(100, 4, false, time.Second)
	total := time.Duration(0)
	for {
		_, _, wait := w.send(total)
		total += wait
		w.ack(0, total) // of a client that repeats itself
		w.ack(99, total)
		if !w.expire() {
			break
		}
		if total > time.Minute {
			t.Fatal("a client without progress is kept for a minute, want its end")
		}
	}
}

func TestTimeoutFollowsTheWay(t *testing.T) {
	w := newWindow(1000, 4, false, time.Second)
	now := time.Duration(0)
	for range 50 {
		_, to, _ := w.send(now)
		now += 300 * time.Millisecond
		w.ack(uint16(to-1), now)
	}
	if w.timeout < 300*time.Millisecond || w.timeout > 600*time.Millisecond {
		t.Errorf("time-out on a way of 300 ms = %v, want a little more than the way", w.timeout)
	}
}

// FuzzWindow has a client answer as it likes: what is sent stays in the window
// that it has acknowledged, and events without progress cause bounded sending.
func FuzzWindow(f *testing.F) {
	f.Add(uint16(20), uint8(4), true, []byte{0, 0, 0, 4, 255, 255, 0, 4})
	f.Add(uint16(3), uint8(1), false, []byte{0, 1, 0, 1, 0, 2, 0, 3})
	f.Fuzz(func(t *testing.T, last uint16, size uint8, options bool, events []byte) {
		w := newWindow(int64(last)+1, int(size%maxWindow)+1, options, time.Second)
		sendings, acked := 0, w.acked
		for i := 0; ; i += 2 {
			from, to, wait := w.send(time.Duration(i))
			if from > to || from < w.acked || to > w.end()+1 || to-from > w.size || wait <= 0 || w.burst < 1 || w.burst > w.size {
				t.Fatalf("%+v sends %d to %d and waits %v", w, from, to, wait)
			}
			if w.acked < acked {
				t.Fatalf("acknowledged %d after %d", w.acked, acked)
			}
			if w.acked > acked {
				acked, sendings = w.acked, 0
			}
			// A window's bursts, once more for a duplicate and once for each time-out.
			if sendings++; sendings > int(w.size+1)*(retries+3) {
				t.Fatalf("%d sendings without progress: %+v", sendings, w)
			}
			for ; i+1 < len(events); i += 2 {
				n := uint16(events[i])<<8 | uint16(events[i+1])
				if n == 0xffff || w.ack(n, time.Duration(i)) {
					break
				}
			}
			if w.done() || i+1 >= len(events) {
				return
			}
			if events[i] == 0xff && events[i+1] == 0xff && !w.expire() {
				return
			}
		}
	})
}
