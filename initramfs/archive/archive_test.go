package archive

import (
	"bytes"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/u-root/mkuimage/cpio"
)

func sample(order bool) *Tree {
	t := New()
	add := []func(){
		func() { t.File("/etc/bc/role", []byte("site\n"), 0o644) },
		func() { t.Link("sbin/modprobe", "/init") },
		func() { t.Device("dev/console", 0o600, 5, 1) },
		func() { t.Dir("tmp", 0o777) },
	}
	if order {
		for _, f := range add {
			f()
		}
		return t
	}
	for i := len(add) - 1; i >= 0; i-- {
		add[i]()
	}
	return t
}

func TestCpio(t *testing.T) {
	a, err := sample(true).Cpio()
	if err != nil {
		t.Fatal(err)
	}
	b, err := sample(false).Cpio()
	if err != nil || !bytes.Equal(a, b) {
		t.Errorf("the order of adding shows in the archive (%v)", err)
	}
	records, err := cpio.ReadAllRecords(cpio.Newc.Reader(bytes.NewReader(a)))
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]cpio.Record{}
	for _, r := range records {
		got[r.Name] = r
	}
	for name, mode := range map[string]uint64{".": 0o40755, "etc": 0o40755, "etc/bc": 0o40755, "etc/bc/role": 0o100644, "sbin/modprobe": 0o120777, "dev/console": 0o20600, "tmp": 0o40777} {
		if r, ok := got[name]; !ok || r.Mode != mode {
			t.Errorf("mode of %s = %o (there: %v), want %o", name, r.Mode, ok, mode)
		}
	}
	if len(a)%4 != 0 {
		t.Errorf("archive of %d bytes is not padded", len(a))
	}
}

func TestCompress(t *testing.T) {
	in := bytes.Repeat([]byte("module"), 1000)
	out, err := Compress(in, zstd.SpeedFastest)
	if err != nil || len(out)%4 != 0 || len(out) > len(in) {
		t.Fatalf("Compress = %d bytes, %v", len(out), err)
	}
	dec, err := zstd.NewReader(bytes.NewReader(out), zstd.IgnoreChecksum(false))
	if err != nil {
		t.Fatal(err)
	}
	defer dec.Close()
	back := make([]byte, len(in))
	if _, err := dec.Read(back); err != nil || !bytes.Equal(back, in) {
		t.Errorf("what was packed does not come back: %v", err)
	}
}
