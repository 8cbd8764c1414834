package inbox

import (
	"context"
	"testing"
)

// TestInbox: known machines' packets come first, each kind in its order, and a flood of
// one fills its own room only.
func TestInbox(t *testing.T) {
	b := New[int]()
	put := func(known bool, n int) (in int) {
		for i := range n {
			if b.Put(known, i) {
				in++
			}
		}
		return in
	}
	if got := put(false, 2*Others); got != Others {
		t.Errorf("%d packets of others wait, want %d", got, Others)
	}
	if got := put(true, 2*Known); got != Known {
		t.Errorf("%d packets of known machines wait beside them, want %d", got, Known)
	}
	if known, others := b.Waiting(); known != Known || others != Others {
		t.Errorf("Waiting = %d, %d, want %d, %d", known, others, Known, Others)
	}
	for _, n := range []int{Known, Others} {
		for i := range n {
			if got, ok := b.Next(t.Context()); !ok || got != i {
				t.Fatalf("Next = %d, %v, want packet %d of %d", got, ok, i, n)
			}
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if got, ok := b.Next(ctx); ok {
		t.Errorf("Next of an empty one after the end = %d, want none", got)
	}
	put(true, 1)
	if got, ok := b.Next(ctx); ok {
		t.Errorf("Next after the end = %d, want none", got)
	}
}
