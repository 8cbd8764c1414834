package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/image/qemutest"
)

// The firmware's own words stand for an image's: the disk is empty.
func TestImageTest(t *testing.T) {
	qemutest.Need(t, true)
	img := filepath.Join(t.TempDir(), "disk.img")
	if err := os.WriteFile(img, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	var out, complaints bytes.Buffer
	keep := filepath.Join(t.TempDir(), "logs")
	args := []string{"--marker", "BdsDxe: failed to load", "--quiet", "15s", "--memory", "256", "--size", "16", "--keep", keep, "--verbose", img}
	if err := runImageTest(t.Context(), args, stdio{strings.NewReader(""), &out, &complaints}); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "BdsDxe: failed to load\" after") {
		t.Errorf("out = %q", out.String())
	}
	if st, err := os.Stat(filepath.Join(keep, "serial.log")); err != nil || st.Size() == 0 {
		t.Errorf("serial.log: %v", err)
	}
	if after, err := os.ReadFile(img); err != nil || !bytes.Equal(after, make([]byte, 1<<20)) {
		t.Errorf("the image was changed: %v", err)
	}
}

func TestImageTestRefusals(t *testing.T) {
	for _, args := range [][]string{{}, {"a", "b"}, {"/no/such.img"}, {"--bogus"}} {
		var out bytes.Buffer
		if err := runImageTest(t.Context(), args, stdio{strings.NewReader(""), &out, &out}); err == nil {
			t.Errorf("image test %q succeeded", args)
		}
	}
}

func TestStepWriter(t *testing.T) {
	var out bytes.Buffer
	w := &stepWriter{out: &out, start: time.Now()}
	for _, part := range []string{"[ 1.0] noise\r\nbc-in", "it: data: ok (t=1s)\r", "\n\x1b[0mbc-init: ready\n", strings.Repeat("x", 5000)} {
		w.Write([]byte(part))
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 2 || !strings.HasSuffix(lines[0], "bc-init: data: ok (t=1s)") || !strings.HasSuffix(lines[1], "bc-init: ready") {
		t.Errorf("shown: %q", lines)
	}
}
