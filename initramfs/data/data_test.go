package data

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/better-compute/site-appliance/image/layout"
	"github.com/better-compute/site-appliance/image/layout/gpt"
)

func box(t *testing.T, extra ...gpt.Partition) *gpt.Table {
	l := layout.Site()
	tab, err := gpt.New(l.ID, uint64(l.Size), layout.Sector)
	if err != nil {
		t.Fatal(err)
	}
	for i, p := range l.Partitions {
		tab.Partitions[i] = gpt.Partition{Type: p.Type, ID: p.ID, First: uint64(p.Start) / layout.Sector, Last: uint64(p.Start+p.Size)/layout.Sector - 1, Name: p.Name}
	}
	copy(tab.Partitions[len(l.Partitions):], extra)
	return tab
}

func TestDecide(t *testing.T) {
	size := uint64(layout.Site().Size)
	after := uint64(581 * layout.MiB / layout.Sector)
	part := func(name string) gpt.Partition {
		return gpt.Partition{Type: layout.TypeLinux, ID: uuid.New(), First: after, Last: after + 9999, Name: name}
	}
	for _, tt := range []struct {
		name  string
		table *gpt.Table
		size  uint64
		want  Plan
		err   error
	}{
		{"first boot", box(t), 2048 * layout.MiB, Plan{Step: Create, First: after, Last: 2047*layout.MiB/layout.Sector - 1}, nil},
		{"later boot", box(t, part(layout.DataName)), 2048 * layout.MiB, Plan{Step: Use, Number: 4}, nil},
		{"cut off in mke2fs", box(t, part(layout.NewDataName)), 2048 * layout.MiB, Plan{Step: Format, Number: 4}, nil},
		{"disk as small as the image", box(t), size, Plan{}, ErrNoRoom},
	} {
		got, err := Decide(tt.table, tt.size)
		if got != tt.want || !errors.Is(err, tt.err) {
			t.Errorf("%s: Decide = %+v, %v, want %+v, %v", tt.name, got, err, tt.want, tt.err)
		}
	}
	if _, err := Decide(box(t), size/2); err == nil {
		t.Error("a disk smaller than its table was taken")
	}
}

// fsck answers with one code per call.
type fsck struct {
	codes []int
	calls []string
}

func (f *fsck) Run(_ context.Context, argv ...string) (int, string, error) {
	f.calls = append(f.calls, strings.Join(argv, " "))
	code := f.codes[0]
	f.codes = f.codes[1:]
	return code, "a\nlast words\n", nil
}

func TestCheck(t *testing.T) {
	for _, tt := range []struct {
		codes []int
		calls int
		want  string
	}{
		{[]int{0}, 1, ""},
		{[]int{1}, 1, ""},
		{[]int{4, 1}, 2, ""},
		{[]int{8, 8}, 2, "cannot be repaired and is left as it is: e2fsck exit code 8: last words"},
	} {
		f := &fsck{codes: tt.codes}
		err := Setup{Runner: f, Say: func(string, ...any) {}}.check(context.Background(), "/dev/x")
		if len(f.calls) != tt.calls || (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("check with codes %v = %v after %q, want %q", tt.codes, err, f.calls, tt.want)
		}
	}
}
