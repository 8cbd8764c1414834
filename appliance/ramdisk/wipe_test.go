package ramdisk

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/image/imagev1"
)

// fill writes something everywhere that matters on a disk.
func fill(t *testing.T, m machine, disk string, size int64) {
	t.Helper()
	m.write(t, m.dev, disk, "")
	truncate(t, m, disk, size)
	for _, at := range []int64{0, 510, 64 << 10, size / 2, size - 512} {
		put(t, m, disk, at)
	}
}

func blankFile(t *testing.T, m machine, disk string) bool {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(m.dev, disk))
	if err != nil {
		t.Fatal(err)
	}
	return len(bytes.Trim(data, "\x00")) == 0
}

func (l *lab) wipe(t *testing.T, id string, serials ...string) *agentv1.CommandResult {
	t.Helper()
	req := &imagev1.WipeRequest{}
	for _, s := range serials {
		req.Disks = append(req.Disks, &imagev1.DiskSelector{Serial: s})
	}
	args, err := proto.Marshal(req)
	if err != nil {
		t.Fatal(err)
	}
	l.session.Command(&agentv1.CommandPayload{CommandId: id, Kind: WipeKind, Lane: "transfer", Args: args, TargetNodeId: l.id})
	return l.session.Result(id)
}

// TestWipe: the disks that are named are cleared, no other is touched, and one that
// cannot be had keeps all of them whole.
func TestWipe(t *testing.T) {
	const size = 80 * mib
	l := newLab(t, func(l *lab) {
		l.purpose = "wipe"
		l.write(t, l.sys, "block/vdd/size", "163840")
		l.write(t, l.sys, "block/vdd/serial", "DISK0002\n")
		l.write(t, l.sys, "block/vdd/device/vendor", "0x1af4\n")
		l.write(t, l.sys, "block/vde/size", "163840")
		l.write(t, l.sys, "block/vde/serial", "STICK\n")
		l.write(t, l.sys, "block/vde/removable", "1\n")
		l.write(t, l.sys, "block/vde/device/vendor", "0x1af4\n")
		for _, d := range []string{"vda", "vdb", "vdc", "vdd", "vde"} {
			fill(t, l.machine, d, size)
		}
	})
	for _, tt := range []struct {
		name    string
		serials []string
		says    string
	}{
		{"none", nil, "0 disks"},
		{"empty", []string{""}, "serial is missing"},
		{"twice", []string{"DISK0001", "DISK0001"}, "twice"},
		{"one missing", []string{"DISK0001", "GONE"}, "no disk has serial"},
		{"one ambiguous", []string{"DISK0001", "TWIN"}, "2 disks have serial"},
		{"removable", []string{"DISK0001", "STICK"}, "is removable"},
	} {
		got := l.wipe(t, "cmd_"+strings.ReplaceAll(tt.name, " ", "_"), tt.serials...).GetError()
		if got.GetCode() != string(errs.InvalidArgs) || !strings.Contains(got.GetMessage(), tt.says) {
			t.Errorf("%s: %v, want %s with %q", tt.name, got, errs.InvalidArgs, tt.says)
		}
	}
	if blankFile(t, l.machine, "vda") {
		t.Fatal("a disk was touched by a command that was refused")
	}
	result := l.wipe(t, "cmd_good", "DISK0001", "DISK0002")
	var got imagev1.WipeResult
	if result.GetError() != nil || proto.Unmarshal(result.GetResult(), &got) != nil || len(got.Disks) != 2 {
		t.Fatalf("wipe = %v", result)
	}
	if d := got.Disks[1]; d.Serial != "DISK0002" || d.SizeBytes != size || d.Method == "" {
		t.Errorf("wipe answers %v", d)
	}
	for disk, want := range map[string]bool{"vda": true, "vdd": true, "vdb": false, "vdc": false, "vde": false} {
		if blankFile(t, l.machine, disk) != want {
			t.Errorf("%s is blank: %v, want %v", disk, !want, want)
		}
	}
	var told []string
	for len(l.posts) > 0 {
		told = append(told, <-l.posts)
	}
	if !slices.Contains(told, "done") {
		t.Errorf("the box was told %q, want done among it", told)
	}
}

func TestAlready(t *testing.T) {
	if got := already(nil); got != "" {
		t.Errorf("already() = %q, want nothing", got)
	}
	if got, want := already([]*imagev1.WipedDisk{{Serial: "A"}, {Serial: "B"}}), "; wiped before it: A, B"; got != want {
		t.Errorf("already() = %q, want %q", got, want)
	}
}

// A machine that was booted for something else keeps its disks.
func TestWipeNeedsItsPurpose(t *testing.T) {
	l := newLab(t, func(l *lab) { l.purpose = "inspect"; fill(t, l.machine, "vda", 80*mib) })
	if got := l.wipe(t, "cmd_1", "DISK0001").GetError(); got.GetCode() != string(errs.OperationNotAllowed) {
		t.Errorf("disk.wipe for inspect = %v, want %s", got, errs.OperationNotAllowed)
	}
	if blankFile(t, l.machine, "vda") {
		t.Error("the disk was wiped")
	}
}

// slow is a disk that can do some things.
type slow struct {
	data            []byte
	secure, discard error
	// dirty: a discard leaves what was there.
	dirty bool
	stuck bool // zeros are not kept
	did   []string
}

func (s *slow) ReadAt(p []byte, off int64) (int, error) { return copy(p, s.data[off:]), nil }
func (s *slow) Size() int64                             { return int64(len(s.data)) }
func (s *slow) Sync() error                             { return nil }

func (s *slow) note(what string) {
	if !slices.Contains(s.did, what) {
		s.did = append(s.did, what)
	}
}

func (s *slow) Discard(off, n int64, secure bool) error {
	err, what := s.discard, discarded
	if secure {
		err, what = s.secure, securely
	}
	if err != nil {
		return err
	}
	s.note(what)
	if !s.dirty {
		clear(s.data[off : off+n])
	}
	return nil
}

func (s *slow) Zero(off, n int64) error {
	if n > mib {
		s.note(overwritten)
	}
	if !s.stuck {
		clear(s.data[off : off+n])
	}
	return nil
}

func TestClearDisk(t *testing.T) {
	no := errors.ErrUnsupported
	for _, tt := range []struct {
		name string
		disk slow
		want string // the method; empty: an error
	}{
		{"secure discard", slow{}, securely},
		{"discard", slow{secure: no}, discarded},
		{"neither", slow{secure: no, discard: no}, overwritten},
		{"a discard that breaks", slow{secure: errors.New("i/o error"), discard: no}, overwritten},
		{"a discard that keeps the bytes", slow{dirty: true}, overwritten},
		{"zeros that do not stick", slow{secure: no, stuck: true, dirty: true}, ""},
	} {
		d := tt.disk
		d.data = bytes.Repeat([]byte{0xa5}, 5*mib+512)
		last := int64(0)
		got, err := clearDisk(t.Context(), &d, func(done, _ int64) { last = done })
		if got != tt.want && tt.want != "" || (err != nil) != (tt.want == "") {
			t.Errorf("%s: clearDisk = %q, %v, want %q", tt.name, got, err, tt.want)
			continue
		}
		if tt.want == "" {
			continue
		}
		if last != d.Size() || !slices.Contains(d.did, tt.want) {
			t.Errorf("%s: told of %d bytes of %d, did %q", tt.name, last, d.Size(), d.did)
		}
		for _, at := range []int{0, 512, mib - 1, len(d.data) - mib, len(d.data) - 1} {
			if d.data[at] != 0 {
				t.Errorf("%s: byte %d is %#x, want 0", tt.name, at, d.data[at])
			}
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	d := slow{data: bytes.Repeat([]byte{0xa5}, 5*mib)}
	if _, err := clearDisk(ctx, &d, func(int64, int64) {}); !errors.Is(err, context.Canceled) || d.data[0] != 0 || d.data[2*mib] == 0 {
		t.Errorf("cancelled clearDisk = %v, first byte %#x, want it to stop after the ends", err, d.data[0])
	}
	small := slow{data: bytes.Repeat([]byte{0xa5}, 4096)}
	if got, err := clearDisk(t.Context(), &small, func(int64, int64) {}); err != nil || got != securely || len(bytes.Trim(small.data, "\x00")) > 0 {
		t.Errorf("clearDisk of a small disk = %q, %v", got, err)
	}
}
