package pxe

import (
	"log/slog"
	"sync/atomic"
)

// events hands events on from one goroutine, so that a slow receiver holds up
// no packet. The newest are dropped and counted when the queue is full.
type events struct {
	to      func(name, class, key string, body any)
	log     *slog.Logger
	queue   chan event
	ended   chan struct{}
	dropped atomic.Int64
}

type event struct {
	name, class, key string
	body             any
}

const queueLength = 4096

func newEvents(to func(name, class, key string, body any), log *slog.Logger) *events {
	return &events{to: to, log: log, queue: make(chan event, queueLength), ended: make(chan struct{})}
}

func (e *events) put(name, class, key string, body any) {
	select {
	case e.queue <- event{name, class, key, body}:
	default:
		e.dropped.Add(1)
	}
}

// run hands on until end, and then what the queue still holds.
func (e *events) run() {
	for {
		select {
		case ev := <-e.queue:
			e.give(ev)
		case <-e.ended:
			for {
				select {
				case ev := <-e.queue:
					e.give(ev)
				default:
					return
				}
			}
		}
	}
}

func (e *events) give(ev event) {
	e.to(ev.name, ev.class, ev.key, ev.body)
	if n := e.dropped.Swap(0); n > 0 {
		e.log.Warn("boot events dropped: the queue was full", "count", n)
	}
}

// end is called once.
func (e *events) end() { close(e.ended) }
