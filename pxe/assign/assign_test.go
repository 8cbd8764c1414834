package assign

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

func ramdisk(id string, macs ...string) *pxev1.Machine {
	return &pxev1.Machine{MachineId: id, Macs: macs, Action: pxev1.Action_ACTION_RAMDISK, Purpose: "inspect",
		WindowId: "w1", WindowUntilMs: 1, Artifacts: []string{strings.Repeat("ab", 32)}}
}

func request(version uint64, machines ...*pxev1.Machine) *pxev1.AssignRequest {
	return &pxev1.AssignRequest{Version: version, Machines: machines}
}

func TestApply(t *testing.T) {
	path := filepath.Join(t.TempDir(), "assign")
	s, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	one := request(5, ramdisk("node_a", "52:54:00:00:00:01"))
	for _, tt := range []struct {
		name string
		in   *pxev1.AssignRequest
		want uint64
		code errs.Code
	}{
		{"first", one, 5, ""},
		{"again", proto.CloneOf(one), 5, ""},
		{"older", request(4, ramdisk("node_a", "52:54:00:00:00:01")), 5, errs.StaleVersion},
		{"same version, other content", request(5), 5, errs.DuplicateMismatch},
		{"the last version that there is", request(1<<64-1, ramdisk("node_a", "52:54:00:00:00:01")), 5, errs.InvalidArgs},
		{"newer but invalid", request(6, ramdisk("node_a")), 5, errs.InvalidArgs},
		{"newer", request(7, ramdisk("node_a", "52:54:00:00:00:02")), 7, ""},
	} {
		got, err := s.Apply(tt.in)
		if got != tt.want || errs.CodeOf(err) != tt.code {
			t.Errorf("Apply(%s) = %d, %v, want %d, %q", tt.name, got, err, tt.want, tt.code)
		}
		// What is in force is on disk.
		again, err := Open(path)
		if err != nil || again.Version() != tt.want {
			t.Errorf("after Apply(%s): Open = version %d, %v, want %d", tt.name, again.Version(), err, tt.want)
		}
	}
	if _, ok := s.ByMAC("52:54:00:00:00:01"); ok {
		t.Error("ByMAC finds a MAC of a replaced snapshot")
	}
	if m, ok := s.ByMAC("52:54:00:00:00:02"); !ok || m.MachineId != "node_a" {
		t.Errorf("ByMAC = %v, %v, want node_a", m, ok)
	}
}

func TestApplyNotPersisted(t *testing.T) {
	s, err := Open(filepath.Join(t.TempDir(), "missing", "assign"))
	if err != nil {
		t.Fatal(err)
	}
	if v, err := s.Apply(request(1)); err == nil || v != 0 || s.Version() != 0 {
		t.Errorf("Apply without a folder = %d, %v, want 0 and an error", v, err)
	}
}

func asISO(m *pxev1.Machine) {
	m.Action, m.Purpose = pxev1.Action_ACTION_ISO, "iso"
	m.Iso = &pxev1.Iso{Sha256: strings.Repeat("ab", 32), Size: 1, Name: "rescue"}
}

func asKernel(m *pxev1.Machine) {
	m.Action, m.Purpose = pxev1.Action_ACTION_KERNEL, "boot"
	m.Kernel = &pxev1.Kernel{Sha256: strings.Repeat("ab", 32), Cmdline: "quiet"}
}

func unknown(u *pxev1.Unknown) *pxev1.AssignRequest {
	r := request(1)
	r.Unknown = u
	return r
}

// claim is an assignment about m that nobody signed.
func claim(m *pxev1.Machine) []byte {
	payload, _ := proto.Marshal(&pxev1.Assignment{MachineId: m.MachineId, Purpose: m.Purpose, WindowId: m.WindowId, WindowUntilMs: m.WindowUntilMs})
	data, _ := proto.Marshal(&pxev1.SignedAssignment{Payload: payload})
	return data
}

func TestCheck(t *testing.T) {
	edit := func(f func(*pxev1.Machine)) *pxev1.AssignRequest {
		m := ramdisk("node_a", "52:54:00:00:00:01")
		f(m)
		return request(1, m)
	}
	for _, tt := range []struct {
		name string
		in   *pxev1.AssignRequest
		want string // part of the message, empty for fine
	}{
		{"fine", edit(func(*pxev1.Machine) {}), ""},
		{"none", nil, "version"},
		{"version 0", request(0), "version"},
		{"no machines", request(1), ""},
		{"nil machine", request(1, nil), "empty"},
		{"no id", edit(func(m *pxev1.Machine) { m.MachineId = "" }), "machine_id"},
		{"path in id", edit(func(m *pxev1.Machine) { m.MachineId = "../x" }), "machine_id"},
		{"upper-case MAC", edit(func(m *pxev1.Machine) { m.Macs = []string{"52:54:00:00:00:AB"} }), "MAC"},
		{"short MAC", edit(func(m *pxev1.Machine) { m.Macs = []string{"52:54"} }), "MAC"},
		{"multicast MAC", edit(func(m *pxev1.Machine) { m.Macs = []string{"01:00:5e:00:00:01"} }), "not a machine's"},
		{"zero MAC", edit(func(m *pxev1.Machine) { m.Macs = []string{"00:00:00:00:00:00"} }), "not a machine's"},
		{"MAC twice", request(1, ramdisk("node_a", "52:54:00:00:00:01"), ramdisk("node_b", "52:54:00:00:00:01")), "belongs to node_a and node_b"},
		{"id twice", request(1, ramdisk("node_a", "52:54:00:00:00:01"), ramdisk("node_a", "52:54:00:00:00:02")), "twice"},
		{"no action", edit(func(m *pxev1.Machine) { m.Action = 0 }), "action"},
		{"later action", edit(func(m *pxev1.Machine) { m.Action = 99 }), "action 99"},
		{"no purpose", edit(func(m *pxev1.Machine) { m.Purpose = "" }), "purpose"},
		{"wipe", edit(func(m *pxev1.Machine) { m.Purpose = "wipe" }), ""},
		{"another purpose", edit(func(m *pxev1.Machine) { m.Purpose = "play" }), "purpose"},
		{"purpose of another action", edit(func(m *pxev1.Machine) { m.Purpose = "boot" }), "purpose"},
		{"address", edit(func(m *pxev1.Machine) { m.Address = "10.0.0.9" }), ""},
		{"no address", edit(func(m *pxev1.Machine) { m.Address = "10.0.0.256" }), "address"},
		{"IPv6 address", edit(func(m *pxev1.Machine) { m.Address = "fd00::1" }), "address"},
		{"loader", edit(func(m *pxev1.Machine) { m.Loader = "ipxe" }), ""},
		{"shim", edit(func(m *pxev1.Machine) { m.Loader = "shim" }), ""},
		{"another loader", edit(func(m *pxev1.Machine) { m.Loader = "grub" }), "loader \"grub\": want ipxe, shim, snponly"},
		{"many boots", edit(func(m *pxev1.Machine) { m.MaxBoots = 1001 }), "max_boots"},
		{"iso", edit(asISO), ""},
		{"iso for the ramdisk", edit(func(m *pxev1.Machine) { m.Iso = &pxev1.Iso{} }), "iso"},
		{"no iso", edit(func(m *pxev1.Machine) { asISO(m); m.Iso = nil }), "iso"},
		{"iso without size", edit(func(m *pxev1.Machine) { asISO(m); m.Iso.Size = 0 }), "iso.size"},
		{"iso digest", edit(func(m *pxev1.Machine) { asISO(m); m.Iso.Sha256 = "x" }), "iso.sha256"},
		{"iso class", edit(func(m *pxev1.Machine) { asISO(m); m.Iso.Class = 9 }), "iso.class"},
		{"kernel", edit(asKernel), ""},
		{"no kernel", edit(func(m *pxev1.Machine) { asKernel(m); m.Kernel = nil }), "kernel"},
		{"kernel digest", edit(func(m *pxev1.Machine) { asKernel(m); m.Kernel.Sha256 = "" }), "kernel.sha256"},
		{"kernel command line", edit(func(m *pxev1.Machine) { asKernel(m); m.Kernel.Cmdline = "a\nshell" }), "kernel.cmdline"},
		{"unified image with a command line", edit(func(m *pxev1.Machine) { asKernel(m); m.Action = pxev1.Action_ACTION_UKI }), "inside"},
		{"assignment", edit(func(m *pxev1.Machine) { m.Assignment = claim(m) }), ""},
		{"an assignment of noise", edit(func(m *pxev1.Machine) { m.Assignment = []byte{1} }), "assignment"},
		{"an assignment for more", edit(func(m *pxev1.Machine) { m.Assignment = claim(m); m.Purpose = "deploy" }), "assignment"},
		{"an assignment of another window", edit(func(m *pxev1.Machine) { m.Assignment = claim(m); m.WindowId += "2" }), "assignment"},
		{"an assignment for longer", edit(func(m *pxev1.Machine) { m.Assignment = claim(m); m.WindowUntilMs++ }), "assignment"},
		{"another machine's assignment", edit(func(m *pxev1.Machine) { m.Assignment = claim(m); m.MachineId += "2" }), "assignment"},
		{"a long assignment", edit(func(m *pxev1.Machine) { m.Assignment = make([]byte, maxAssignment+1) }), "assignment"},
		{"assignment without the ramdisk", edit(func(m *pxev1.Machine) { asISO(m); m.Assignment = []byte{1} }), "assignment"},
		{"unknown inspected", unknown(&pxev1.Unknown{Inspect: true, WindowId: "u", WindowUntilMs: 1, Expected: []*pxev1.Expected{{Mac: mac1}}}), ""},
		{"unknown without a window", unknown(&pxev1.Unknown{Inspect: true}), "window_id"},
		{"unknown without an end", unknown(&pxev1.Unknown{Inspect: true, WindowId: "u"}), "window_until_ms"},
		{"a list and no inspect", unknown(&pxev1.Unknown{Expected: []*pxev1.Expected{{Mac: mac1}}}), "without inspect"},
		{"expected nobody", unknown(&pxev1.Unknown{Inspect: true, WindowId: "u", WindowUntilMs: 1, Expected: []*pxev1.Expected{{}}}), "neither"},
		{"expected no UUID", unknown(&pxev1.Unknown{Inspect: true, WindowId: "u", WindowUntilMs: 1, Expected: []*pxev1.Expected{{ProductUuid: "x"}}}), "no UUID"},
		{"expected zeros", unknown(&pxev1.Unknown{Inspect: true, WindowId: "u", WindowUntilMs: 1, Expected: []*pxev1.Expected{{ProductUuid: "00000000-0000-0000-0000-000000000000"}}}), "given none"},
		{"expected ones", unknown(&pxev1.Unknown{Inspect: true, WindowId: "u", WindowUntilMs: 1, Expected: []*pxev1.Expected{{ProductUuid: "FFFFFFFF-ffff-ffff-ffff-ffffffffffff"}}}), "given none"},
		{"expected MAC", unknown(&pxev1.Unknown{Inspect: true, WindowId: "u", WindowUntilMs: 1, Expected: []*pxev1.Expected{{Mac: "52:54:00:00:00:AB"}}}), "MAC"},
		{"no window", edit(func(m *pxev1.Machine) { m.WindowId = "" }), "window_id"},
		{"no end", edit(func(m *pxev1.Machine) { m.WindowUntilMs = 0 }), "window_until_ms"},
		{"digest", edit(func(m *pxev1.Machine) { m.Artifacts = []string{"AB"} }), "artifact"},
		{"local with purpose", edit(func(m *pxev1.Machine) { m.Action = pxev1.Action_ACTION_LOCAL_DISK }), "purpose"},
		{"local", request(1, &pxev1.Machine{MachineId: "n", Macs: []string{"52:54:00:00:00:01"}, Action: pxev1.Action_ACTION_LOCAL_DISK}), ""},
	} {
		err := Check(tt.in)
		if (err == nil) != (tt.want == "") || err != nil && (!strings.Contains(err.Error(), tt.want) || errs.CodeOf(err) != errs.InvalidArgs) {
			t.Errorf("Check(%s) = %v, want %q", tt.name, err, tt.want)
		}
	}
}

func TestOpenDamaged(t *testing.T) {
	path := filepath.Join(t.TempDir(), "assign")
	s, _ := Open(path)
	if _, err := s.Apply(request(3, ramdisk("node_a", "52:54:00:00:00:01"))); err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	flipped := bytes.Clone(good)
	flipped[len(flipped)-1] ^= 1
	for name, data := range map[string][]byte{"empty": {}, "torn": good[:len(good)-3], "flipped": flipped, "other": []byte("hello")} {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := Open(path)
		if err != nil || s.Damaged() == nil || s.Version() != 0 {
			t.Errorf("Open(%s) = version %d, damaged %v, %v, want 0 and a reason", name, s.Version(), s.Damaged(), err)
			continue
		}
		if _, err := os.Stat(path + ".damaged"); err != nil {
			t.Errorf("Open(%s) kept no damaged copy: %v", name, err)
		}
		if v, err := s.Apply(request(1)); v != 1 || err != nil {
			t.Errorf("Apply after Open(%s) = %d, %v, want 1", name, v, err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	data, _ := encode(request(3, ramdisk("node_a", "52:54:00:00:00:01")))
	f.Add(data)
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, data []byte) {
		if req, err := decode(data); err == nil && Check(req) != nil {
			t.Errorf("decode(%x) gave what Check refuses", data)
		}
	})
}

// TestNamed: what machines may still ask for is named, and nothing else.
func TestNamed(t *testing.T) {
	hex := func(s string) string { return strings.Repeat(s, 32) }
	now := time.UnixMilli(1000)
	window := func(m *pxev1.Machine, until int64) *pxev1.Machine {
		m.WindowId, m.WindowUntilMs = "w1", until
		return m
	}
	s, err := Open(filepath.Join(t.TempDir(), "assign"))
	if err != nil {
		t.Fatal(err)
	}
	if got := s.Named(now); len(got) != 0 {
		t.Errorf("Named = %v with no machines", got)
	}
	if _, err := s.Apply(request(1,
		window(&pxev1.Machine{MachineId: "a", Macs: []string{"52:54:00:00:00:01"}, Action: pxev1.Action_ACTION_RAMDISK, Purpose: "deploy", Artifacts: []string{hex("a1"), hex("a2")}}, 1001),
		window(&pxev1.Machine{MachineId: "b", Macs: []string{"52:54:00:00:00:02"}, Action: pxev1.Action_ACTION_ISO, Purpose: "iso", Iso: &pxev1.Iso{Sha256: hex("b1"), Size: 1}}, 1001),
		window(&pxev1.Machine{MachineId: "c", Macs: []string{"52:54:00:00:00:03"}, Action: pxev1.Action_ACTION_KERNEL, Purpose: "boot", Kernel: &pxev1.Kernel{Sha256: hex("c1"), InitrdSha256: hex("c2")}}, 1001),
		window(&pxev1.Machine{MachineId: "d", Macs: []string{"52:54:00:00:00:04"}, Action: pxev1.Action_ACTION_ISO, Purpose: "iso", Iso: &pxev1.Iso{Sha256: hex("d1"), Size: 1}}, 1000),
		&pxev1.Machine{MachineId: "e", Macs: []string{"52:54:00:00:00:05"}, Action: pxev1.Action_ACTION_LOCAL_DISK, Artifacts: []string{hex("e1")}},
	)); err != nil {
		t.Fatal(err)
	}
	want := map[string]bool{hex("a1"): true, hex("a2"): true, hex("b1"): true, hex("c1"): true, hex("c2"): true}
	if got := s.Named(now); !maps.Equal(got, want) {
		t.Errorf("Named = %v, want %v", got, want)
	}
}
