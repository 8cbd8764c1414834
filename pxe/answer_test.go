package pxe

import (
	"fmt"
	"testing"

	"github.com/better-compute/site-appliance/pxe/decide"
)

// TestHeardIsBounded: a flood of made-up MACs takes no known machine's place.
func TestHeardIsBounded(t *testing.T) {
	var h Heard
	known := func(mac string) bool { return mac == macRAM }
	h.note(macRAM, heard{arch: decide.ARM64, uuid: "u"}, known)
	for i := range 3 * maxHeard {
		h.note(fmt.Sprint(i), heard{arch: decide.X64}, known)
	}
	if got := h.of(macRAM); got.arch != decide.ARM64 || got.uuid != "u" {
		t.Errorf("after a flood the known machine is %+v, want as it was heard", got)
	}
	if len(h.byMAC) != maxHeard {
		t.Errorf("%d machines are remembered, want %d", len(h.byMAC), maxHeard)
	}
	// Where all are known one of them has to go, and the newest is there.
	all := func(string) bool { return true }
	h.note("new", heard{arch: decide.BIOS, uuid: "n"}, all)
	if got := h.of("new"); got.uuid != "n" || len(h.byMAC) != maxHeard {
		t.Errorf("a full memory of known machines has %+v of the newest and %d in all", got, len(h.byMAC))
	}
}
