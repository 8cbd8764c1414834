package mainjob

import (
	"bytes"
	"context"
	"crypto/rand"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/image/qemutest"
	"github.com/better-compute/site-appliance/scripts/lab"
)

// ipxeISO is a disc image by others, of Debian's package ipxe.
const ipxeISO = "/usr/lib/ipxe/ipxe.iso"

// TestWipeAndDiscOnRealParts: a machine boots by its real firmware into the real
// ramdisk, which wipes a disk that is full of bytes, and then into a disc image of the
// catalog, once.
func TestWipeAndDiscOnRealParts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: network namespaces")
	}
	qemutest.Need(t, true)
	if _, err := os.Stat(ipxeISO); err != nil {
		t.Skip("needs Debian's ipxe")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Minute)
	defer cancel()
	l, err := lab.Start(ctx, lab.Config{Dir: t.TempDir(), Out: "../../out"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	must := func(err error) {
		t.Helper()
		if err != nil {
			if vm := l.Metal.VM(); vm != nil {
				t.Logf("the machine's serial line ends:\n%s", vm.Tail(25))
			}
			t.Fatal(err)
		}
	}
	cli := func(args ...string) string {
		t.Helper()
		out, err := l.CLI(ctx, nil, args...)
		must(err)
		return out
	}
	must(l.Keys(ctx))
	must(l.Serve(ctx))
	join, err := l.AddSite(ctx)
	must(err)
	must(l.StartSite(ctx, join, lab.SiteOptions{}))
	must(l.WaitSiteOnline(ctx))
	must(l.Site.WaitFor(ctx, "network boot is served"))
	must(l.EnrollMachine(ctx))

	must(fill(l.Metal.Disk))
	if out := cli("metal", "wipe", lab.MachineName, "--disk-serial", lab.DiskSerial, "--wait"); !strings.Contains(out, "disk.wipe") {
		t.Errorf("metal wipe --wait = %q", out)
	}
	at, err := firstByte(l.Metal.Disk)
	must(err)
	if at >= 0 {
		t.Errorf("the disk has something at byte %d after it was wiped", at)
	}
	if out := cli("metal", "list"); !strings.Contains(out, "wiped") {
		t.Errorf("metal list = %q", out)
	}

	cli("iso", "add", ipxeISO)
	if out := cli("metal", "boot-iso", lab.MachineName, "ipxe", "--wait"); !strings.Contains(out, "boot.wait") {
		t.Errorf("metal boot-iso --wait = %q", out)
	}
	if out := cli("events", "--site", lab.SiteName); !strings.Contains(out, `"stage":"iso"`) {
		t.Errorf("events = %s, want that the machine fetched the image", out)
	}
	cli("metal", "boot-disk", lab.MachineName, "--wait")
}

// fill writes noise over a disk, in places all over it.
func fill(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	noise := make([]byte, 64<<10)
	for off := int64(0); off < lab.DiskBytes; off += 4 << 20 {
		if _, err := rand.Read(noise); err != nil {
			return err
		}
		if _, err := f.WriteAt(noise, off); err != nil {
			return err
		}
	}
	_, err = f.WriteAt(noise, lab.DiskBytes-int64(len(noise)))
	return err
}

// firstByte is where a file has its first byte that is no zero; -1: nowhere.
func firstByte(path string) (int64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	b := make([]byte, 1<<20)
	for off := int64(0); ; off += int64(len(b)) {
		n, err := io.ReadFull(f, b)
		if i := bytes.IndexFunc(b[:n], func(r rune) bool { return r != 0 }); i >= 0 {
			return off + int64(i), nil
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			return -1, nil
		}
		if err != nil {
			return 0, err
		}
	}
}
