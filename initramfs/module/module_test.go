package module

import (
	"errors"
	"reflect"
	"strings"
	"testing"
	"testing/fstest"
)

func index(t *testing.T) *Index {
	x, err := Read(fstest.MapFS{
		"modules.dep": {Data: []byte("kernel/drivers/net/virtio_net.ko: kernel/net/failover.ko\nkernel/fs/ext4/ext4.ko:\n" +
			"kernel/crypto/crc32c-intel.ko:\nkernel/crypto/crc32c_generic.ko.xz:\nkernel/net/netfilter/nfnetlink.ko:\nkernel/a.ko:\nkernel/b.ko:\n")},
		"modules.alias": {Data: []byte("# comment\nalias virtio:d00000001v* virtio_net\nalias crc32c crc32c_intel\nalias crc32c crc32c-generic\n" +
			"alias net-pf-16-proto-12 nfnetlink\nalias dmi*:svnAcme*:pnBox/2:* a\nalias acpi*:PNP0C0C:* b\n")},
		"modules.softdep": {Data: []byte("softdep ext4 pre: crc32c\nsoftdep a pre: b\nsoftdep b post: a\n")},
	})
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func TestResolve(t *testing.T) {
	x := index(t)
	for in, want := range map[string][]string{
		"virtio-net":                    {"virtio_net"},
		"virtio:d00000001v00001AF4":     {"virtio_net"},
		"virtio:d00000002v00001AF4":     {},
		"crc32c":                        {"crc32c_generic", "crc32c_intel"},
		"net-pf-16-proto-12":            {"nfnetlink"},
		"dmi:bvnX:svnAcme/Co:pnBox/2:x": {"a"},
		"acpi:PNP0C0C:":                 {"b"},
	} {
		if got := x.Resolve(in); !reflect.DeepEqual(got, want) {
			t.Errorf("Resolve(%q) = %v, want %v", in, got, want)
		}
	}
}

func TestMatch(t *testing.T) {
	for _, tt := range []struct {
		pattern, s string
		want       bool
	}{
		{"a*c", "a/b/c", true}, {"a*c", "a/b/d", false}, {"*", "", true}, {"?", "", false}, {"a?c", "a/c", true},
		{"x[0-9a]y", "x5y", true}, {"x[0-9a]y", "xay", true}, {"x[0-9a]y", "xby", false}, {"x[^0-9]y", "xby", true}, {"x[!b]y", "xby", false},
		{"a*b*c", "aXbYbZc", true}, {"a*b*c", "aXbYbZ", false}, {"[", "[", true}, {"pci:v*d*", "pci:v8086d1", true},
	} {
		if got := Match(tt.pattern, tt.s); got != tt.want {
			t.Errorf("Match(%q, %q) = %v, want %v", tt.pattern, tt.s, got, tt.want)
		}
	}
}

func TestLoad(t *testing.T) {
	var order []string
	fail := map[string]error{"crc32c_intel": errors.New("no such CPU")}
	l := NewLoader(index(t), func(m string) error { order = append(order, m); return fail[m] })
	if err := l.Load("ext4"); err != nil {
		t.Errorf("Load(ext4) = %v: a soft dependency's failure is no failure", err)
	}
	if got := strings.Join(order, " "); got != "crc32c_generic crc32c_intel ext4" {
		t.Errorf("order = %q", got)
	}
	if err := l.Load("a"); err != nil {
		t.Errorf("Load(a), which depends on itself = %v", err)
	}
	if err := l.Load("none"); err == nil {
		t.Error("Load(none) = nil, want an error")
	}
	if err := l.Load("crc32c-intel"); err == nil || !strings.Contains(err.Error(), "no such CPU") {
		t.Errorf("Load(crc32c-intel) = %v", err)
	}
}

func TestColdplug(t *testing.T) {
	devices := fstest.MapFS{"pci/modalias": {Data: []byte("acpi:PNP0C0C:\n")}}
	var got []string
	l := NewLoader(index(t), func(m string) error {
		got = append(got, m)
		if m == "b" { // a bus driver brings devices
			devices["pci/virtio0/modalias"] = &fstest.MapFile{Data: []byte("virtio:d00000001v00001AF4\n")}
		}
		return nil
	})
	if err := l.Coldplug(devices, func() {}); err != nil {
		t.Fatal(err)
	}
	if strings.Join(got, " ") != "a b virtio_net" {
		t.Errorf("loaded %v", got)
	}
}

func TestReadNeedsTheIndex(t *testing.T) {
	if _, err := Read(fstest.MapFS{}); err == nil {
		t.Error("Read of an empty folder = nil, want an error: nothing could be loaded")
	}
}

func FuzzMatch(f *testing.F) {
	f.Add("a*[b-c]?", "axb/")
	f.Fuzz(func(t *testing.T, pattern, s string) { Match(pattern, s) })
}
