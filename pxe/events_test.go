package pxe

import (
	"log/slog"
	"testing"
)

// TestEventsOfStrangers: however many of them ask to boot, there is room for what
// enrolled machines do.
func TestEventsOfStrangers(t *testing.T) {
	got := map[string]int{}
	e := newEvents(func(name, _, key string, _ any) { got[name+" "+key]++ }, slog.New(slog.DiscardHandler))
	for range queueLength {
		e.put("pxe.discovered", "state", "stranger", Discovered{})
		e.put("pxe.stage", "telemetry", "stranger", Stage{MachineID: "mac-525400000001"})
	}
	for range queueLength {
		e.put("pxe.stage", "telemetry", "m1", Stage{MachineID: "node_1"})
	}
	e.end()
	e.run()
	if strangers := got["pxe.discovered stranger"] + got["pxe.stage stranger"]; strangers != queueLength/2 || got["pxe.stage m1"] != queueLength/2 {
		t.Errorf("%v are handed on, want %d of each side", got, queueLength/2)
	}
}

// TestEventIsKept: who must not lose an event goes on once it was handed on, before the
// box says anything about it; and at once where nothing is handed on any more.
func TestEventIsKept(t *testing.T) {
	entered, leave := make(chan string), make(chan struct{})
	e := newEvents(func(name, class, _ string, _ any) { entered <- name + " " + class; <-leave }, slog.New(slog.DiscardHandler))
	ran := make(chan struct{})
	go func() { defer close(ran); e.run() }()
	kept := make(chan struct{})
	go func() { defer close(kept); e.keep("pxe.stage", "state", "mac", Stage{Stage: "done"}) }()
	if got := <-entered; got != "pxe.stage state" {
		t.Errorf("handed on is %q", got)
	}
	select {
	case <-kept:
		t.Error("keep returned before the event was handed on")
	default:
	}
	close(leave)
	<-kept
	e.end()
	<-ran
	for range queueLength {
		e.put("fill", "telemetry", "", nil)
	}
	e.keep("pxe.stage", "state", "mac", Stage{Stage: "done"})
}
