package lease

import (
	"container/heap"
	"time"
)

// offsets is a set of a pool's places: everything is one step, whatever its size.
type offsets struct {
	members []uint32
	at      []int32 // where in members, -1 outside
}

func newOffsets(n int) offsets {
	o := offsets{members: make([]uint32, 0, n), at: make([]int32, n)}
	for i := range o.at {
		o.at[i] = -1
	}
	return o
}

func (o *offsets) len() int          { return len(o.members) }
func (o *offsets) has(i int) bool    { return o.at[i] >= 0 }
func (o *offsets) get(place int) int { return int(o.members[place]) }

func (o *offsets) set(i int, in bool) {
	if in {
		o.add(i)
	} else {
		o.remove(i)
	}
}

func (o *offsets) add(i int) {
	if o.at[i] < 0 {
		o.at[i] = int32(len(o.members))
		o.members = append(o.members, uint32(i))
	}
}

func (o *offsets) remove(i int) {
	place := o.at[i]
	if place < 0 {
		return
	}
	last := o.members[len(o.members)-1]
	o.members[place], o.at[last] = last, place
	o.members = o.members[:len(o.members)-1]
	o.at[i] = -1
}

// queue is slots in the order in which something about them ends.
type queue struct {
	slots []*slot
	end   func(*slot) time.Duration
	place func(*slot) *int
}

func liveQueue() queue {
	return queue{end: func(s *slot) time.Duration { return s.until }, place: func(s *slot) *int { return &s.liveAt }}
}

func passingQueue() queue {
	return queue{end: (*slot).passes, place: func(s *slot) *int { return &s.passingAt }}
}

// passes is when the next of its offer and its quarantine ends.
func (s *slot) passes() time.Duration {
	switch {
	case !s.inBad:
		return s.holdUntil
	case s.holder == "":
		return s.badUntil
	}
	return min(s.holdUntil, s.badUntil)
}

func (q *queue) first() *slot {
	if len(q.slots) == 0 {
		return nil
	}
	return q.slots[0]
}

// set puts s into the queue, at its place, or takes it out.
func (q *queue) set(s *slot, in bool) {
	place := *q.place(s)
	switch {
	case in && place < 0:
		heap.Push(q, s)
	case in:
		heap.Fix(q, place)
	case place >= 0:
		heap.Remove(q, place)
	}
}

func (q *queue) Len() int           { return len(q.slots) }
func (q *queue) Less(i, j int) bool { return q.end(q.slots[i]) < q.end(q.slots[j]) }
func (q *queue) Swap(i, j int) {
	q.slots[i], q.slots[j] = q.slots[j], q.slots[i]
	*q.place(q.slots[i]), *q.place(q.slots[j]) = i, j
}

func (q *queue) Push(x any) {
	s := x.(*slot)
	*q.place(s) = len(q.slots)
	q.slots = append(q.slots, s)
}

func (q *queue) Pop() any {
	s := q.slots[len(q.slots)-1]
	q.slots = q.slots[:len(q.slots)-1]
	*q.place(s) = -1
	return s
}
