package chain

import (
	"fmt"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/pxe/decide"
)

var t0 = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// TestJudge: who counts as what, by one protocol and by two at once. What only
// DHCPv4 needs is in its own tests.
func TestJudge(t *testing.T) {
	type step struct {
		p     Protocol
		what  string // ipxe, pxe, loaded, http
		after time.Duration
		want  string
	}
	for name, steps := range map[string][]step{
		"our iPXE asks by both after a fetch by one": {
			{DHCPv6, "pxe", 0, ""}, {DHCPv6, "loaded", time.Second, ""}, {DHCPv4, "ipxe", time.Second, ""}, {DHCPv6, "ipxe", 0, ""},
		},
		"a foreign iPXE is given ours by each": {
			{DHCPv4, "ipxe", 0, "foreign"}, {DHCPv6, "ipxe", 0, "foreign"}, {DHCPv6, "loaded", time.Second, ""},
			{DHCPv4, "ipxe", time.Second, ""}, {DHCPv6, "ipxe", 0, ""},
		},
		"firmware goes on from one entry to the next": {
			{DHCPv4, "pxe", 0, ""}, {DHCPv4, "loaded", time.Second, ""}, {DHCPv6, "pxe", time.Minute, ""}, {DHCPv6, "loaded", time.Second, ""},
			{DHCPv4, "pxe", time.Minute, ""}, {DHCPv4, "loaded", time.Second, ""}, {DHCPv6, "pxe", time.Minute, ""},
		},
		"our iPXE after HTTP boot, by each protocol": {
			{DHCPv6, "http", 0, ""}, {DHCPv4, "ipxe", time.Second, ""}, {DHCPv6, "ipxe", 0, ""},
		},
		"firmware goes on from PXE, which fetches nothing, to HTTP boot and again": {
			{DHCPv4, "pxe", 0, ""}, {DHCPv4, "http", time.Second, ""}, {DHCPv4, "pxe", time.Second, ""}, {DHCPv4, "http", time.Second, ""},
			{DHCPv4, "pxe", time.Second, ""}, {DHCPv4, "http", time.Second, ""}, {DHCPv4, "pxe", time.Second, ""},
		},
		"an iPXE that hides, by DHCPv6": {
			{DHCPv6, "pxe", 0, ""}, {DHCPv6, "loaded", time.Second, ""}, {DHCPv6, "pxe", time.Second, ""}, {DHCPv6, "loaded", time.Second, ""},
			{DHCPv6, "pxe", time.Second, "looping"},
		},
	} {
		var c Memory
		now := t0
		for i, st := range steps {
			now = now.Add(st.after)
			switch st.what {
			case "loaded":
				c.Loaded(st.p, "m", now)
				continue
			case "http":
				c.LoadedHTTP("m", now)
				continue
			}
			told := decide.Client{Program: decide.IPXE, Arch: decide.X64}
			if st.what == "pxe" {
				told.Program = decide.Firmware
			}
			// The packets of one exchange are judged alike, whatever numbers they have.
			for j := range 3 {
				judged := c.Judge(st.p, "m", Exchange{ID: uint32(3*i + j), Continued: j > 0}, told, now)
				got := ""
				switch {
				case judged.Foreign:
					got = "foreign"
				case judged.Looping:
					got = "looping"
				}
				if got != st.want {
					t.Errorf("%s: step %d, %s = %q, want %q", name, i+1, st.what, got, st.want)
				}
			}
		}
	}
}

func TestMemoryIsBounded(t *testing.T) {
	var c Memory
	for i := range 3 * maxChains {
		c.Judge(DHCPv4, fmt.Sprint(i), Exchange{}, decide.Client{Program: decide.Firmware}, t0)
	}
	if len(c.byMAC) != maxChains || len(c.old) != maxChains {
		t.Errorf("%d and %d are remembered, want %d", len(c.byMAC), len(c.old), maxChains)
	}
}
