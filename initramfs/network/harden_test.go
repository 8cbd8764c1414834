package network

import (
	"os"
	"path/filepath"
	"testing"
)

// TestHarden: what the kernel is told, and that a kernel without IPv6 is no error.
func TestHarden(t *testing.T) {
	dir := t.TempDir()
	for _, key := range []string{"ipv4/ip_forward", "ipv4/conf/all/x", "ipv4/conf/default/x", "ipv4/neigh/default/x"} {
		if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(key)), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := Harden(dir); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]string{
		"ipv4/ip_forward": "0", "ipv4/conf/all/arp_ignore": "1", "ipv4/conf/all/rp_filter": "1", "ipv4/neigh/default/gc_thresh3": "32768",
	} {
		if got, err := os.ReadFile(filepath.Join(dir, key)); err != nil || string(got) != want {
			t.Errorf("%s = %q, %v, want %q", key, got, err, want)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "ipv6")); err == nil {
		t.Error("something was written for IPv6, which the kernel has not")
	}
	if err := Harden(filepath.Join(dir, "nowhere")); err == nil {
		t.Error("Harden of a folder that is not there = nil, want an error")
	}
}
