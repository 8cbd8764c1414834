package layout

import (
	"strings"
	"testing"

	"github.com/google/uuid"
)

func TestLayouts(t *testing.T) {
	ids := map[uuid.UUID]bool{}
	for name, d := range map[string]Disk{"site": Site(), "node": Node()} {
		end := int64(MiB)
		for _, p := range append([]Partition{{ID: d.ID, Start: MiB}}, d.Partitions...) {
			if ids[p.ID] {
				t.Errorf("%s: identifier %s is used twice", name, p.ID)
			}
			ids[p.ID] = true
			if p.Start != end || p.Start%MiB != 0 {
				t.Errorf("%s: %q starts at %d, want %d", name, p.Name, p.Start, end)
			}
			end = p.Start + p.Size
		}
		if d.Size != end+MiB {
			t.Errorf("%s: size %d, want %d", name, d.Size, end+MiB)
		}
	}
	if p, ok := Site().Partition(ConfigName); !ok || p.Size != 64*MiB {
		t.Errorf("Partition(%s) = %+v, %v", ConfigName, p, ok)
	}
	if _, ok := Node().Partition(ConfigName); ok {
		t.Error("a node has a configuration partition")
	}
}

func TestEntryName(t *testing.T) {
	for _, tt := range []struct {
		version string
		tries   int
		want    string
	}{
		{"1.2.3", 0, "bcsite_1.2.3.efi"}, {"1.2.3-rc.1", 3, "bcsite_1.2.3-rc.1+3-0.efi"},
		{"1.2+3", 0, ""}, {"", 0, ""}, {"1", 10, ""}, {"../x", 0, ""}, {strings.Repeat("1", 41), 0, ""},
	} {
		got, err := EntryName(tt.version, tt.tries)
		if got != tt.want || (err == nil) != (tt.want != "") {
			t.Errorf("EntryName(%q, %d) = %q, %v, want %q", tt.version, tt.tries, got, err, tt.want)
		}
	}
}
