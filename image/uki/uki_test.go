package uki

import (
	"bytes"
	"os"
	"strings"
	"testing"
)

const stubPath = "/usr/lib/systemd/boot/efi/linuxx64.efi.stub"

func parts(t *testing.T) Parts {
	stub, err := os.ReadFile(stubPath)
	if err != nil {
		t.Skipf("needs systemd-boot-efi: %v", err)
	}
	return Parts{Stub: stub, OSRelease: "ID=x\n", Cmdline: "quiet", Uname: "6.1", Initrd: bytes.Repeat([]byte{7}, 5000), Linux: []byte("MZ-linux")}
}

func TestBuild(t *testing.T) {
	p := parts(t)
	got, err := Build(p)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][]byte{
		".osrel": []byte(p.OSRelease), ".cmdline": []byte(p.Cmdline), ".uname": []byte(p.Uname), ".initrd": p.Initrd, ".linux": p.Linux,
	} {
		if data, err := Section(got, name); err != nil || !bytes.Equal(data, want) {
			t.Errorf("Section(%s) = %d bytes, %v, want %d bytes", name, len(data), err, len(want))
		}
	}
	if text, err := Section(got, ".text"); err != nil || len(text) == 0 {
		t.Errorf("the stub's own code: %d bytes, %v", len(text), err)
	}
	again, err := Build(p)
	if err != nil || !bytes.Equal(got, again) {
		t.Errorf("two builds of the same parts differ (%v)", err)
	}
	if _, err := Section(got, ".none"); err == nil {
		t.Error("Section(.none) = nil, want an error")
	}
}

func TestBuildErrors(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*Parts)
		want   string
	}{
		{"no kernel", func(p *Parts) { p.Linux = nil }, "kernel is empty"},
		{"no stub", func(p *Parts) { p.Stub = nil }, "stub is empty"},
		{"not PE", func(p *Parts) { p.Stub = bytes.Repeat([]byte("x"), 4096) }, "parse EFI stub"},
		{"cut", func(p *Parts) { p.Stub = p.Stub[:2048] }, "parse EFI stub"},
	} {
		p := parts(t)
		tt.change(&p)
		if _, err := Build(p); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: Build = %v, want %q", tt.name, err, tt.want)
		}
	}
}

// A UKI of a few sections more has no room left: it must be refused, not written over code.
func TestBuildNoRoom(t *testing.T) {
	p := parts(t)
	for range 3 {
		out, err := Build(p)
		if err != nil {
			if !strings.Contains(err.Error(), "room for") {
				t.Errorf("Build = %v, want a complaint about room", err)
			}
			return
		}
		p.Stub = out
	}
	t.Error("sections were added without end")
}

func FuzzSection(f *testing.F) {
	f.Add([]byte("MZ"))
	f.Fuzz(func(t *testing.T, image []byte) {
		Section(image, ".linux")
		Build(Parts{Stub: image, Cmdline: "c", Initrd: []byte("i"), Linux: []byte("l")})
	})
}
