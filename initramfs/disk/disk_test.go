package disk

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf16"

	"github.com/google/uuid"

	"github.com/better-compute/site-appliance/image/gpt"
	"github.com/better-compute/site-appliance/image/layout"
)

func with(name string, parts ...gpt.Partition) Disk {
	t, err := gpt.New(uuid.New(), 64<<20, 512)
	if err != nil {
		panic(err)
	}
	for i, p := range parts {
		p.First = t.FirstUsable() + uint64(i)
		p.Last = p.First
		if _, err := t.Add(p); err != nil {
			panic(err)
		}
	}
	return Disk{Name: name, Dev: "/dev/" + name, Size: 64 << 20, SectorSize: 512, Table: t}
}

func TestBoot(t *testing.T) {
	esp := uuid.New()
	box := with("vda", gpt.Partition{Type: layout.TypeESP, ID: esp, Name: "esp"}, gpt.Partition{Type: layout.TypeBasic, ID: uuid.New(), Name: layout.ConfigName})
	twin := box
	twin.Name = "vdb"
	other := with("sda", gpt.Partition{Type: layout.TypeLinux, ID: uuid.New(), Name: "root"})
	blank := Disk{Name: "sdb", Size: 1e9, TableErr: gpt.ErrNone}
	for _, tt := range []struct {
		name   string
		disks  []Disk
		loader uuid.UUID
		want   string
		err    error
	}{
		{"loader names it", []Disk{other, blank, box}, esp, "vda", nil},
		{"no loader", []Disk{other, blank, box}, uuid.Nil, "vda", nil},
		{"loader names another", []Disk{other, box}, uuid.New(), "", ErrMissing},
		{"nothing", nil, uuid.Nil, "", ErrMissing},
		{"no box disk", []Disk{other, blank}, uuid.Nil, "", ErrMissing},
		{"two by name", []Disk{box, twin}, uuid.Nil, "", ErrAmbiguous},
		{"two by identifier", []Disk{box, twin}, esp, "", ErrAmbiguous},
	} {
		got, err := Boot(tt.disks, tt.loader, layout.TypeBasic, layout.ConfigName)
		if got.Name != tt.want || !errors.Is(err, tt.err) {
			t.Errorf("%s: Boot = %q, %v, want %q, %v", tt.name, got.Name, err, tt.want, tt.err)
		}
		if errors.Is(err, ErrAmbiguous) && !strings.Contains(err.Error(), "vda and vdb") {
			t.Errorf("%s: %v does not name both disks", tt.name, err)
		}
	}
}

func TestPartition(t *testing.T) {
	for name, want := range map[string]string{"vda": "/dev/vda3", "nvme0n1": "/dev/nvme0n1p3", "mmcblk0": "/dev/mmcblk0p3"} {
		if got := (Disk{Name: name, Dev: "/dev/" + name}).Partition(3); got != want {
			t.Errorf("Partition(3) of %s = %s, want %s", name, got, want)
		}
	}
}

func TestParseLoader(t *testing.T) {
	id := uuid.New()
	data := []byte{6, 0, 0, 0}
	for _, u := range utf16.Encode([]rune(strings.ToUpper(id.String()) + "\x00")) {
		data = append(data, byte(u), byte(u>>8))
	}
	if got := parseLoader(data); got != id {
		t.Errorf("parseLoader = %s, want %s", got, id)
	}
	if got := parseLoader(data[:20]); got != uuid.Nil {
		t.Errorf("parseLoader(cut) = %s, want none", got)
	}
}

func TestList(t *testing.T) {
	sys, dev := t.TempDir(), t.TempDir()
	for _, n := range []string{"vda", "loop0", "sr0", "sdz"} {
		os.MkdirAll(filepath.Join(sys, n, "queue"), 0o755)
		size := "131072\n"
		if n == "sdz" {
			size = "0\n"
		}
		os.WriteFile(filepath.Join(sys, n, "size"), []byte(size), 0o644)
		os.WriteFile(filepath.Join(sys, n, "queue", "logical_block_size"), []byte("512\n"), 0o644)
	}
	f, err := os.Create(filepath.Join(dev, "vda"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	f.Truncate(64 << 20)
	if err := with("vda").Table.Write(f); err != nil {
		t.Fatal(err)
	}
	got, err := List(sys, dev)
	if err != nil || len(got) != 1 || got[0].Name != "vda" || got[0].Table == nil || got[0].Size != 64<<20 {
		t.Errorf("List = %+v, %v, want vda alone", got, err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte{6, 0, 0, 0, 'a', 0})
	f.Fuzz(func(t *testing.T, b []byte) { parseLoader(b); FATLabel(b) })
}
