package assign

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/pxe/pxev1"
)

func local(id string, macs ...string) *pxev1.Machine {
	return &pxev1.Machine{MachineId: id, Macs: macs, Action: pxev1.Action_ACTION_LOCAL_DISK}
}

func with(m *pxev1.Machine, edit func(*pxev1.Machine)) *pxev1.Machine {
	edit(m)
	return m
}

const (
	mac1 = "52:54:00:00:00:01"
	mac2 = "52:54:00:00:00:02"
	mac3 = "52:54:00:00:00:03"
)

func TestChanges(t *testing.T) {
	protect := func(m *pxev1.Machine) { m.Protected = true }
	present := []*pxev1.Machine{local("a", mac1), ramdisk("b", mac2), with(local("p", mac3), protect)}
	for name, tt := range map[string]struct {
		next      []*pxev1.Machine
		want      []string
		protected bool
	}{
		"nothing":                        {present, nil, false},
		"back to the disk":               {[]*pxev1.Machine{local("a", mac1), local("b", mac2), local("p", mac3)}, nil, false},
		"a disk to the ramdisk":          {[]*pxev1.Machine{ramdisk("a", mac1), ramdisk("b", mac2), local("p", mac3)}, []string{"a"}, false},
		"another window":                 {[]*pxev1.Machine{local("a", mac1), with(ramdisk("b", mac2), func(m *pxev1.Machine) { m.WindowId = "w2" }), local("p", mac3)}, []string{"b"}, false},
		"another artifact":               {[]*pxev1.Machine{local("a", mac1), with(ramdisk("b", mac2), func(m *pxev1.Machine) { m.Artifacts = nil }), local("p", mac3)}, []string{"b"}, false},
		"a protected one to the ramdisk": {[]*pxev1.Machine{local("a", mac1), ramdisk("b", mac2), ramdisk("p", mac3)}, []string{"p"}, true},
		"protected in the same command":  {[]*pxev1.Machine{with(ramdisk("a", mac1), protect), ramdisk("b", mac2), local("p", mac3)}, []string{"a"}, true},
		"signed by another key":          {[]*pxev1.Machine{local("a", mac1), with(ramdisk("b", mac2), func(m *pxev1.Machine) { m.Assignment = claim(m) }), local("p", mac3)}, nil, false},
		"inspected since":                {[]*pxev1.Machine{local("a", mac1), with(ramdisk("b", mac2), func(m *pxev1.Machine) { m.RamBytes = 8 << 30 }), local("p", mac3)}, nil, false},
		"by another loader":              {[]*pxev1.Machine{local("a", mac1), with(ramdisk("b", mac2), func(m *pxev1.Machine) { m.Loader = "ipxe" }), local("p", mac3)}, nil, false},
		"another name":                   {[]*pxev1.Machine{with(local("a", mac1), func(m *pxev1.Machine) { m.Name = "x" }), with(ramdisk("b", mac2), func(m *pxev1.Machine) { m.Name = "x" }), local("p", mac3)}, nil, false},
		"a new one at its disk":          {append(slices.Clone(present), local("n", "52:54:00:00:00:09")), nil, false},
		"a new one":                      {append(slices.Clone(present), ramdisk("n", "52:54:00:00:00:09")), []string{"n"}, false},
		"one left out":                   {present[1:], []string{"a"}, false},
		"a protected one left out":       {present[:2], []string{"p"}, true},
		"all left out":                   {nil, []string{"a", "b", "p"}, true},
		"a MAC under another's ramdisk":  {[]*pxev1.Machine{local("a", "52:54:00:00:00:09"), ramdisk("b", mac2, mac1), local("p", mac3)}, []string{"a", "b"}, false},
		"a protected MAC under another":  {[]*pxev1.Machine{local("a", mac1), ramdisk("b", mac2, mac3)}, []string{"b", "p"}, true},
		"a MAC moved at the disk":        {[]*pxev1.Machine{local("a", mac1, mac3), ramdisk("b", mac2)}, []string{"p"}, true},
		"one more MAC in a window":       {[]*pxev1.Machine{local("a", mac1), ramdisk("b", mac2, "52:54:00:00:00:09"), local("p", mac3)}, []string{"b"}, false},
		"one more MAC at the disk":       {[]*pxev1.Machine{local("a", mac1, "52:54:00:00:00:09"), ramdisk("b", mac2), local("p", mac3)}, nil, false},
		"a MAC taken away":               {[]*pxev1.Machine{local("a", "52:54:00:00:00:09"), ramdisk("b", mac2), local("p", mac3)}, []string{"a"}, false},
		"under another id":               {[]*pxev1.Machine{local("a", mac1), ramdisk("b2", mac2), local("p", mac3)}, []string{"b", "b2"}, false},
	} {
		got := changes(request(1, present...), request(2, tt.next...), false)
		if !slices.Equal(got.Machines, tt.want) || got.Protected != tt.protected {
			t.Errorf("%s: changes = %v, protected %v, want %v, %v", name, got.Machines, got.Protected, tt.want, tt.protected)
		}
	}
	got := changes(request(1), request(2, ramdisk("a", mac1), local("l", mac2)), false)
	if want := []string{strings.Repeat("ab", 32)}; !slices.Equal(got.Artifacts, want) {
		t.Errorf("artifacts = %v, want %v", got.Artifacts, want)
	}
}

// TestChangesBeyondTheRamdisk: a disc image, a kernel and a unified kernel image change a
// machine as the ramdisk does, and each brings its artifacts along.
func TestChangesBeyondTheRamdisk(t *testing.T) {
	iso, kernel, initrd := strings.Repeat("01", 32), strings.Repeat("02", 32), strings.Repeat("03", 32)
	boots := func(id string, edit func(*pxev1.Machine), macs ...string) *pxev1.Machine {
		return with(&pxev1.Machine{MachineId: id, Macs: macs, Purpose: "boot", WindowId: "w1", WindowUntilMs: 1}, edit)
	}
	asISO := func(m *pxev1.Machine) {
		m.Action, m.Purpose, m.Iso = pxev1.Action_ACTION_ISO, "iso", &pxev1.Iso{Sha256: iso, Size: 1}
	}
	asKernel := func(m *pxev1.Machine) {
		m.Action, m.Kernel = pxev1.Action_ACTION_KERNEL, &pxev1.Kernel{Sha256: kernel, InitrdSha256: initrd}
	}
	asUKI := func(m *pxev1.Machine) {
		m.Action, m.Kernel = pxev1.Action_ACTION_UKI, &pxev1.Kernel{Sha256: kernel}
	}
	for name, tt := range map[string]struct {
		edit      func(*pxev1.Machine)
		artifacts []string
	}{"iso": {asISO, []string{iso}}, "kernel": {asKernel, []string{kernel, initrd}}, "uki": {asUKI, []string{kernel}}} {
		disk := request(1, with(local("a", mac1), func(m *pxev1.Machine) { m.Protected = true }))
		got := changes(disk, request(2, boots("a", tt.edit, mac1)), false)
		if !slices.Equal(got.Machines, []string{"a"}) || !got.Protected || !slices.Equal(got.Artifacts, tt.artifacts) {
			t.Errorf("%s: changes = %+v, want the protected machine a with %v", name, got, tt.artifacts)
		}
		other := func(m *pxev1.Machine) { tt.edit(m); m.MaxBoots = 100 }
		if got := changes(request(1, boots("a", tt.edit, mac1)), request(2, boots("a", other, mac1)), false); !slices.Equal(got.Machines, []string{"a"}) {
			t.Errorf("%s: more boots change %v, want a", name, got.Machines)
		}
		if got := changes(request(1, boots("a", tt.edit, mac1)), request(2, local("a", mac1)), false); len(got.Machines) != 0 {
			t.Errorf("%s: back to the disk changes %v, want none", name, got.Machines)
		}
	}
}

// TestProtectedStays: a snapshot that forgets a protection does not take it away.
func TestProtectedStays(t *testing.T) {
	path := filepath.Join(t.TempDir(), "assign")
	s, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	apply := func(version uint64, protected bool, unprotect ...string) {
		t.Helper()
		req := request(version, with(local("a", mac1), func(m *pxev1.Machine) { m.Protected = protected }))
		before := proto.CloneOf(req)
		for range 2 { // a repeat is the same
			if v, err := s.Apply(req, unprotect...); err != nil || v != version {
				t.Fatalf("Apply(%d) = %d, %v", version, v, err)
			}
		}
		if !proto.Equal(req, before) {
			t.Error("Apply changed its argument")
		}
	}
	want := func(what string, protected bool) {
		t.Helper()
		again, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		if s.Protected("a") != protected || again.Protected("a") != protected {
			t.Errorf("%s: protected = %v, on disk %v, want %v", what, s.Protected("a"), again.Protected("a"), protected)
		}
	}
	apply(1, false)
	want("as enrolled", false)
	apply(2, true)
	want("protected", true)
	apply(3, false)
	want("forgotten", true)
	apply(4, false, "b")
	want("another is let go", true)
	apply(5, false, "a")
	want("let go", false)
}

// TestChangesOfASuspectStore: a MAC that the damage took may have been a protected
// machine's, under whatever id it comes now.
func TestChangesOfASuspectStore(t *testing.T) {
	known := request(1, local("a", "52:54:00:00:00:01"))
	for _, tt := range []struct {
		next      *pxev1.AssignRequest
		protected bool
	}{
		{request(2, ramdisk("a", "52:54:00:00:00:01")), false},
		{request(2, ramdisk("a", "52:54:00:00:00:01", "52:54:00:00:00:02")), true},
		{request(2, ramdisk("b", "52:54:00:00:00:02")), true},
		{request(2, local("a", "52:54:00:00:00:01"), local("b", "52:54:00:00:00:02")), false},
	} {
		if got := changes(known, tt.next, true); got.Protected != tt.protected {
			t.Errorf("%v: protected %v, want %v", tt.next, got.Protected, tt.protected)
		}
	}
}
