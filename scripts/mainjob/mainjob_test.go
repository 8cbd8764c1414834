// Package mainjob runs the main job as the demo does: the box as an image, the
// bare metal as a virtual machine behind a real BMC.
package mainjob

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/image/qemutest"
	"github.com/better-compute/site-appliance/scripts/lab"
)

func TestMainJob(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: network namespaces")
	}
	qemutest.Need(t, true)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Minute)
	defer cancel()
	l, err := lab.Start(ctx, lab.Config{Dir: t.TempDir(), Out: "../../out", Log: os.Stdout})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	steps, err := l.MainJob(ctx, os.Stdout)
	for _, s := range steps {
		t.Logf("%-60s %7.1f s", s.Name, s.Took.Seconds())
	}
	if err != nil {
		if l.Box != nil {
			t.Logf("the box's serial line ends:\n%s", l.Box.Tail(40))
		}
		t.Fatal(err)
	}

	// The box's console shows its steps by name, and no secret.
	serial := l.Box.Serial()
	for _, want := range []string{"bc-init: ready"} {
		if !strings.Contains(serial, want) {
			t.Errorf("the box's serial line lacks %q", want)
		}
	}
	for name, text := range map[string]string{"the box": serial, "the machine": l.Metal.VM().Serial()} {
		if strings.Contains(text, lab.BMCPassword) {
			t.Errorf("the console of %s shows the BMC's password", name)
		}
	}

	// A neighbour on the uplink finds nothing; the same ports answer on the LAN.
	uplink, err := l.BoxUplink()
	if err != nil {
		t.Fatal(err)
	}
	ports := []string{"22", "69", "80", "7443", "7444"}
	if _, err := l.Exec(ctx, "nb", "ip", "route", "add", "10.77.0.0/24", "via", uplink); err != nil {
		t.Fatal(err)
	}
	if err := l.Silent("nb", []string{uplink, lab.SiteLAN}, ports); err != nil {
		t.Error(err)
	}
	for _, port := range []string{"80", "7443", "7444"} {
		if err := l.Dial("bmc", lab.SiteLAN+":"+port); err != nil {
			t.Errorf("from the LAN, port %s: %v", port, err)
		}
	}

	// The comparison can fail: one byte of the image's first partition flipped.
	if err := flip(l.Metal.Disk, 2<<20); err != nil {
		t.Fatal(err)
	}
	if err := lab.CompareDisk("../../out/qemu-amd64/node.raw.zst", l.Metal.Disk); err == nil {
		t.Error("a disk with one flipped byte passed the comparison")
	}
}

// flip changes one bit of a file.
func flip(path string, at int64) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, at); err != nil {
		return err
	}
	b[0] ^= 1
	_, err = f.WriteAt(b, at)
	return err
}
