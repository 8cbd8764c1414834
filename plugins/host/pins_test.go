package host

import (
	"encoding/hex"
	"strings"
	"testing"
)

const digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

func TestParsePins(t *testing.T) {
	for _, tt := range []struct {
		in   string
		pins []string
		bad  int
	}{
		{"", nil, 0},
		{"# comment\n\n" + digest + "  acme-bmc\n", []string{"acme-bmc"}, 0},
		{digest + " *acme-bmc", []string{"acme-bmc"}, 0},
		{strings.ToUpper(digest) + "\tacme-bmc\r\n", []string{"acme-bmc"}, 0},
		{digest + "  a\n" + digest + "  b\n", []string{"a", "b"}, 0},
		{digest + "  a\n" + digest + "  b\n" + digest + "  a\n", []string{"b"}, 1},
		{digest[1:] + "  a\n", nil, 1},
		{digest + "\n", nil, 1},
		{digest + "  a b\n", nil, 1},
		{digest + "  ../a\n", nil, 1},
		{digest + "  /bin/a\n", nil, 1},
		{digest + "  .\n", nil, 1},
		{digest + "  .hidden\n", nil, 1},
		{digest + "  -rf\n", nil, 1},
		{digest + "  pins\n", nil, 1},
		{"zz" + digest[2:] + "  a\n" + digest + "  b\n", []string{"b"}, 1},
	} {
		pins, bad := ParsePins([]byte(tt.in))
		var names []string
		for _, p := range pins {
			names = append(names, p.Name)
			if hex.EncodeToString(p.SHA256[:]) != digest {
				t.Errorf("ParsePins(%q): digest %x", tt.in, p.SHA256)
			}
		}
		if strings.Join(names, " ") != strings.Join(tt.pins, " ") || len(bad) != tt.bad {
			t.Errorf("ParsePins(%q) = %v, %v, want %v and %d bad", tt.in, names, bad, tt.pins, tt.bad)
		}
	}
}

func FuzzParsePins(f *testing.F) {
	f.Add([]byte(digest + "  acme-bmc\n"))
	f.Add([]byte("# x\n" + digest + " *a\n" + digest + " a\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		pins, _ := ParsePins(data)
		seen := map[string]bool{}
		for _, p := range pins {
			if seen[p.Name] || strings.ContainsAny(p.Name, "/\x00\n ") || p.Name == "" || p.Name == "." || p.Name == ".." {
				t.Errorf("ParsePins(%q) gives %q", data, p.Name)
			}
			seen[p.Name] = true
		}
	})
}

func TestAssignUIDs(t *testing.T) {
	var names []string
	for i := range uidCount {
		names = append(names, "plugin"+string(rune('a'+i%26))+strings.Repeat("x", i/26))
	}
	uids, err := assignUIDs(names)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[int]bool{}
	for _, uid := range uids {
		if uid < firstUID || uid >= firstUID+uidCount || seen[uid] {
			t.Errorf("uid %d is out of range or shared", uid)
		}
		seen[uid] = true
	}
	if _, err := assignUIDs(append(names, "one-more")); err == nil {
		t.Error("more plugins than uids were accepted")
	}
	one, _ := assignUIDs([]string{"bcx-ipmi"})
	two, _ := assignUIDs([]string{"bcx-ipmi"})
	if one["bcx-ipmi"] != two["bcx-ipmi"] {
		t.Error("a plugin's uid changes")
	}
}
