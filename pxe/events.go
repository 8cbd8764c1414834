package pxe

import (
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/better-compute/site-appliance/pxe/decide"
)

// events hands events on from one goroutine, so that a slow receiver holds up
// no packet. The newest are dropped and counted when the queue is full, and those of
// machines that nobody enrolled, who may be made up, when half of it is.
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
	kept             chan<- struct{} // closed once it was handed on; nil: nobody waits
}

const (
	queueLength = 4096
	// keptWithin is how long who must not lose an event waits for it to be handed on:
	// less than a ramdisk waits for the answer to its word.
	keptWithin = 3 * time.Second
)

func newEvents(to func(name, class, key string, body any), log *slog.Logger) *events {
	return &events{to: to, log: log, queue: make(chan event, queueLength), ended: make(chan struct{})}
}

func (e *events) put(name, class, key string, body any) {
	if len(e.queue) >= queueLength/2 && ofStranger(body) {
		e.dropped.Add(1)
		return
	}
	select {
	case e.queue <- event{name: name, class: class, key: key, body: body}:
	default:
		e.dropped.Add(1)
	}
}

// keep hands an event on before it returns, as far as that can be had in time: what
// its sender is told then outlives a power cut.
func (e *events) keep(name, class, key string, body any) {
	kept := make(chan struct{})
	late := time.NewTimer(keptWithin)
	defer late.Stop()
	select {
	case e.queue <- event{name, class, key, body, kept}:
	case <-e.ended:
		return
	case <-late.C:
		e.dropped.Add(1)
		return
	}
	select {
	case <-kept:
	case <-e.ended:
	case <-late.C:
	}
}

func ofStranger(body any) bool {
	switch b := body.(type) {
	case Discovered:
		return true
	case Stage:
		return decide.IsStranger(b.MachineID)
	}
	return false
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
	if ev.kept != nil {
		close(ev.kept)
	}
	if n := e.dropped.Swap(0); n > 0 {
		e.log.Warn("boot events dropped: the queue was full", "count", n)
	}
}

// end is called once.
func (e *events) end() { close(e.ended) }
