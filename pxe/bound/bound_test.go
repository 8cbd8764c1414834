package bound

import (
	"net/netip"
	"testing"
)

func TestNeedsAnInterface(t *testing.T) {
	at := netip.MustParseAddrPort("127.0.0.1:0")
	for iface, want := range map[string]bool{"": false, "nope0": false, "lo": true} {
		ln, err := Listen(t.Context(), iface, at)
		if (err == nil) != want {
			t.Errorf("Listen(%q) = %v, want success %v", iface, err, want)
		}
		if err == nil {
			ln.Close()
		}
		conn, err := ListenPacket(t.Context(), iface, at)
		if (err == nil) != want {
			t.Errorf("ListenPacket(%q) = %v, want success %v", iface, err, want)
		}
		if err == nil {
			conn.Close()
		}
	}
}
