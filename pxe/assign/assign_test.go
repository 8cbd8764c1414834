package assign

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

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
		{"wipe", edit(func(m *pxev1.Machine) { m.Purpose = "wipe" }), "purpose"},
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
	if s.Suspect() || s.Protected("node_b") {
		t.Error("a store that lost nothing is suspect")
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
		again, err := Open(path)
		if err != nil || !s.Suspect() || !again.Suspect() || !again.Protected("node_a") {
			t.Errorf("after Open(%s): suspect %v, after a restart %v, node_a protected %v, %v", name, s.Suspect(), again.Suspect(), again.Protected("node_a"), err)
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
