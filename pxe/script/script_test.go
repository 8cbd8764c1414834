package script

import (
	"strings"
	"testing"
)

func sample() Ramdisk {
	base := "http://10.0.0.1/boot/52:54:00:00:00:01/"
	return Ramdisk{Kernel: base + "t/vmlinuz", Initrd: base + "t/ramdisk.img", Boot: base + "t/boot.img",
		Again: base + "script.ipxe", Cmdline: "console=ttyS0 panic=10"}
}

func TestRamdisk(t *testing.T) {
	got, err := sample().Script()
	want := `#!ipxe
kernel http://10.0.0.1/boot/52:54:00:00:00:01/t/vmlinuz initrd=ramdisk.img initrd=boot.img console=ttyS0 panic=10 || goto failed
initrd --name ramdisk.img http://10.0.0.1/boot/52:54:00:00:00:01/t/ramdisk.img || goto failed
initrd --name boot.img http://10.0.0.1/boot/52:54:00:00:00:01/t/boot.img || goto failed
boot || goto failed
:failed
imgfree
echo Boot failed, asking again in 5 seconds
sleep 5
chain --replace --autofree http://10.0.0.1/boot/52:54:00:00:00:01/script.ipxe || exit 1
`
	if err != nil || got != want {
		t.Errorf("Script() = %q, %v, want %q", got, err, want)
	}
}

func TestRamdiskRefuses(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit func(*Ramdisk)
	}{
		{"newline", func(r *Ramdisk) { r.Cmdline = "quiet\nshell" }},
		{"expansion", func(r *Ramdisk) { r.Cmdline = "a=${net0/mac}" }},
		{"operator", func(r *Ramdisk) { r.Cmdline = "quiet || shell" }},
		{"quote", func(r *Ramdisk) { r.Cmdline = `a="b` }},
		{"comment", func(r *Ramdisk) { r.Cmdline = "a #b" }},
		{"own initrd", func(r *Ramdisk) { r.Cmdline = "initrd=other.img" }},
		{"long", func(r *Ramdisk) { r.Cmdline = strings.Repeat("a", maxCmdline+1) }},
		{"scheme", func(r *Ramdisk) { r.Kernel = "tftp://10.0.0.1/k" }},
		{"space in URL", func(r *Ramdisk) { r.Boot = "http://10.0.0.1/a b" }},
		{"no URL", func(r *Ramdisk) { r.Again = "" }},
	} {
		r := sample()
		tt.edit(&r)
		if got, err := r.Script(); err == nil {
			t.Errorf("Script(%s) = %q, want an error", tt.name, got)
		}
	}
}

func TestLocalDisk(t *testing.T) {
	if got := LocalDisk(); !strings.HasPrefix(got, "#!ipxe\n") || !strings.Contains(got, "exit") || strings.Contains(got, "kernel") {
		t.Errorf("LocalDisk() = %q, want a script that only exits", got)
	}
}

func FuzzScript(f *testing.F) {
	f.Add("http://10.0.0.1/k", "quiet")
	f.Add("http://10.0.0.1/k\nshell", "${x}")
	f.Fuzz(func(t *testing.T, u, cmdline string) {
		r := sample()
		r.Kernel, r.Cmdline = u, cmdline
		got, err := r.Script()
		if err != nil {
			return
		}
		if n := strings.Count(got, "\n"); n != 10 || strings.Contains(got, "$") {
			t.Errorf("Script(%q, %q) has %d lines: %q", u, cmdline, n, got)
		}
	})
}
