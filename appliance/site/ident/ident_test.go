package ident

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

func partition(t *testing.T) (string, *Partition) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "ident")
	if err := os.WriteFile(path, make([]byte, 4<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	return path, New(path)
}

func TestStoreLoad(t *testing.T) {
	_, p := partition(t)
	if got, err := p.Load(); got != nil || err != nil {
		t.Errorf("Load() of an empty partition = %q, %v", got, err)
	}
	for _, want := range []string{"one", "two", "three"} {
		if err := p.Store([]byte(want)); err != nil {
			t.Fatal(err)
		}
		if got, err := p.Load(); string(got) != want || err != nil {
			t.Errorf("Load() = %q, %v, want %q", got, err, want)
		}
	}
	if err := p.Store(make([]byte, MaxBytes+1)); err == nil {
		t.Error("an oversized identity was stored")
	}
}

// A cut in the middle of a write damages only the slot that was being written.
func TestDamagedSlotFallsBack(t *testing.T) {
	path, p := partition(t)
	for _, s := range []string{"old", "new"} {
		if err := p.Store([]byte(s)); err != nil {
			t.Fatal(err)
		}
	}
	data, _ := os.ReadFile(path)
	at := bytes.Index(data, []byte("new"))
	for _, offset := range []int{at, at - 1, at - headerSize} {
		torn := bytes.Clone(data)
		torn[offset] ^= 1
		os.WriteFile(path, torn, 0o600)
		if got, err := p.Load(); string(got) != "old" || err != nil {
			t.Errorf("byte %d damaged: Load() = %q, %v, want the older", offset, got, err)
		}
		if err := p.Store([]byte("again")); err != nil {
			t.Fatal(err)
		}
		if got, _ := p.Load(); string(got) != "again" {
			t.Errorf("after a store Load() = %q", got)
		}
	}
}

func TestMissingDevice(t *testing.T) {
	p := New(filepath.Join(t.TempDir(), "none"))
	if _, err := p.Load(); err == nil {
		t.Error("Load of a missing device succeeded")
	}
	if err := p.Store(nil); err == nil {
		t.Error("Store to a missing device succeeded")
	}
}

func FuzzLoad(f *testing.F) {
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, head []byte) {
		path := filepath.Join(t.TempDir(), "ident")
		data := make([]byte, 4<<20)
		copy(data, head)
		os.WriteFile(path, data, 0o600)
		if _, err := New(path).Load(); err != nil {
			t.Error(err)
		}
	})
}
