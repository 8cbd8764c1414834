package reclog_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/better-compute/site-appliance/appliance/agent/reclog"
)

func write(t *testing.T, path string, records ...string) {
	t.Helper()
	l, _, err := reclog.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range records {
		if err := l.Append([]byte(r), true); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, path string) []string {
	t.Helper()
	l, records, err := reclog.Open(path)
	if err != nil {
		t.Fatalf("Open = %v, want nil", err)
	}
	defer l.Close()
	var out []string
	for _, r := range records {
		out = append(out, string(r))
	}
	return out
}

// TestTornTail cuts the file at every byte: all whole records before the cut
// are there, and the file takes new ones.
func TestTornTail(t *testing.T) {
	dir := t.TempDir()
	whole := filepath.Join(dir, "whole")
	write(t, whole, "one", "two two", "three")
	data, err := os.ReadFile(whole)
	if err != nil {
		t.Fatal(err)
	}
	ends := []int{0, 11, 26, 39}
	if len(data) != ends[3] {
		t.Fatalf("file has %d bytes, want %d", len(data), ends[3])
	}
	for cut := range len(data) + 1 {
		for _, tail := range [][]byte{nil, make([]byte, 64), []byte("garbage that is no record")} {
			path := filepath.Join(dir, "torn")
			if err := os.WriteFile(path, append(bytes.Clone(data[:cut]), tail...), 0o600); err != nil {
				t.Fatal(err)
			}
			want := 0
			for want < 3 && ends[want+1] <= cut {
				want++
			}
			if got := read(t, path); len(got) != want {
				t.Errorf("cut at %d with %d more bytes: %q, want %d records", cut, len(tail), got, want)
			}
			write(t, path, "next")
			if got := read(t, path); len(got) != want+1 || got[want] != "next" {
				t.Errorf("cut at %d, appended: %q, want %d records and \"next\"", cut, got, want)
			}
		}
	}
}

func TestDamageBeforeTheTail(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	write(t, path, "one", "two two", "three")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for at := range 26 { // every byte of the first two records
		bad := bytes.Clone(data)
		bad[at] ^= 0x40
		if err := os.WriteFile(path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, _, err := reclog.Open(path); !errors.Is(err, reclog.ErrDamaged) {
			t.Errorf("Open with byte %d flipped = %v, want ErrDamaged", at, err)
		}
		if after, _ := os.ReadFile(path); !bytes.Equal(after, bad) {
			t.Errorf("Open with byte %d flipped changed the file", at)
		}
	}
}

func TestReplace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	write(t, path, "one", "two")
	l, _, err := reclog.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Replace([][]byte{[]byte("two")}); err != nil {
		t.Fatal(err)
	}
	if err := l.Append([]byte("three"), true); err != nil {
		t.Fatal(err)
	}
	l.Close()
	if got := fmt.Sprint(read(t, path)); got != "[two three]" {
		t.Errorf("after Replace and Append: %s, want [two three]", got)
	}
}

func TestAppendRefuses(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	write(t, path, "one")
	l, _, err := reclog.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := l.Append(make([]byte, reclog.MaxRecordBytes+1), true); err == nil {
		t.Error("Append(too long) = nil, want an error")
	}
	if err := l.Append(nil, true); err == nil {
		t.Error("Append(empty) = nil, want an error: an empty record looks like zeros on disk")
	}
	if got := fmt.Sprint(read(t, path)); got != "[one]" {
		t.Errorf("after refused appends: %s, want [one]", got)
	}
}

func FuzzSplit(f *testing.F) {
	f.Add(reclog.Encode(reclog.Encode(nil, []byte("a")), []byte("bc")))
	f.Add([]byte{1, 0, 0, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		records, good := reclog.Split(data)
		var again []byte
		for _, r := range records {
			again = reclog.Encode(again, r)
		}
		if !bytes.Equal(again, data[:good]) {
			t.Errorf("Split(%x) = %x up to %d, which encode to %x", data, records, good, again)
		}
	})
}
