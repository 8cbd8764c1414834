// Package inbox has the packets that wait for the one that answers them, those of known machines apart from all others' and before them.
package inbox

import "context"

// Known and Others are how many packets of known machines and of others wait. What does
// not fit is lost, and clients ask again.
const Known, Others = 512, 2048

// Inbox is filled by any number of goroutines.
type Inbox[P any] struct{ known, others chan P }

// New makes one that is empty.
func New[P any]() Inbox[P] { return Inbox[P]{make(chan P, Known), make(chan P, Others)} }

// Put adds a packet if there is room.
func (b Inbox[P]) Put(known bool, p P) bool {
	in := b.others
	if known {
		in = b.known
	}
	select {
	case in <- p:
		return true
	default:
		return false
	}
}

// Next waits for the packet to be answered next; false: ctx has ended.
func (b Inbox[P]) Next(ctx context.Context) (p P, ok bool) {
	select {
	case p = <-b.known:
		return p, ctx.Err() == nil
	default:
	}
	select {
	case <-ctx.Done():
		return p, false
	case p = <-b.known:
	case p = <-b.others:
	}
	return p, true
}

// Waiting is how many wait.
func (b Inbox[P]) Waiting() (known, others int) { return len(b.known), len(b.others) }
