package script

import (
	"net/netip"
	"strings"
	"testing"
)

const base = "http://10.0.0.1/boot/52-54-00-00-00-01/"

func around() Around {
	return Around{AgainBefore: "http://10.0.0.1/boot/", AgainAfter: "/script.ipxe", Syslog: netip.MustParseAddr("10.0.0.1")}
}

func sample() Ramdisk {
	return Ramdisk{Around: around(), Kernel: base + "t/vmlinuz", Initrd: base + "t/ramdisk.img", Boot: base + "t/boot.img", Cmdline: "console=ttyS0 panic=10"}
}

const (
	head = "#!ipxe\nset syslog 10.0.0.1 ||\nisset ${bcwait} || set bcwait:int32 2\n"
	tail = `:failed
imgfree
iseq ${bcwait} 128 && goto leave ||
echo Boot failed, asking again in ${bcwait} seconds
sleep ${bcwait}
inc bcwait ${bcwait}
chain --replace --autofree http://10.0.0.1/boot/${netX/mac:hexhyp}/script.ipxe ||
set bcport:int32 0
:port
isset ${net${bcport}/mac} || goto failed
ifclose
dhcp net${bcport} && chain --replace --autofree http://10.0.0.1/boot/${net${bcport}/mac:hexhyp}/script.ipxe ||
inc bcport
goto port
:leave
exit 1
`
)

func TestScripts(t *testing.T) {
	for name, tt := range map[string]struct {
		in   interface{ Script() (string, error) }
		want string
	}{
		"ramdisk": {sample(), "kernel " + base + "t/vmlinuz initrd=ramdisk.img initrd=boot.img console=ttyS0 panic=10 || goto failed\n" +
			"initrd --name ramdisk.img " + base + "t/ramdisk.img || goto failed\ninitrd --name boot.img " + base + "t/boot.img || goto failed\nboot || goto failed\n"},
		"kernel": {Kernel{around(), base + "t/kernel", base + "t/initrd", "quiet"}, "kernel " + base + "t/kernel initrd=initrd.img quiet || goto failed\n" +
			"initrd --name initrd.img " + base + "t/initrd || goto failed\nboot || goto failed\n"},
		"kernel alone": {Kernel{around(), base + "t/kernel", "", "quiet"}, "kernel " + base + "t/kernel quiet || goto failed\nboot || goto failed\n"},
		"uki":          {UKI{around(), base + "t/boot.efi"}, "kernel " + base + "t/boot.efi || goto failed\nboot || goto failed\n"},
		"sanboot": {Sanboot{around(), base + "t/a.iso", "rescue; 'x' || ${y}\n#" + strings.Repeat("z", 500)}, "echo rescue;  x      {y}  " + strings.Repeat("z", maxTold-len("echo rescue;  x      {y}  ")) +
			"\nsanhook --no-describe --drive 0x80 " + base + "t/a.iso || goto failed\nsanboot --no-describe --drive 0x80 ||\n" +
			"echo The disc image has ended, or cannot start here\nsanunhook --drive 0x80 ||\ngoto leave\n"},
	} {
		if got, err := tt.in.Script(); err != nil || got != head+tt.want+tail {
			t.Errorf("%s: Script() = %q, %v, want %q", name, got, err, head+tt.want+tail)
		}
	}
}

func TestScriptRefuses(t *testing.T) {
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
		{"no URL", func(r *Ramdisk) { r.AgainBefore = "" }},
	} {
		r := sample()
		tt.edit(&r)
		if got, err := r.Script(); err == nil {
			t.Errorf("Script(%s) = %q, want an error", tt.name, got)
		}
	}
	for name, s := range map[string]interface{ Script() (string, error) }{
		"kernel": Kernel{around(), base + "a b", "", ""}, "initrd": Kernel{around(), base, base + "\n", ""}, "command line": Kernel{around(), base, "", "a|b"},
		"uki": UKI{around(), "file"}, "iso": Sanboot{around(), "http://h/${x}", ""},
	} {
		if got, err := s.Script(); err == nil {
			t.Errorf("Script(%s) = %q, want an error", name, got)
		}
	}
}

func TestLocalDisk(t *testing.T) {
	if got := LocalDisk(); !strings.HasPrefix(got, "#!ipxe\n") || !strings.Contains(got, "exit") || strings.Contains(got, "kernel") || strings.Contains(got, "sanboot") {
		t.Errorf("LocalDisk() = %q, want a script that only exits", got)
	}
	if got := FirstDisk(); !strings.HasPrefix(got, "#!ipxe\n") || !strings.Contains(got, "sanboot --no-describe --drive 0x80 ||\nexit\n") {
		t.Errorf("FirstDisk() = %q, want the first disk, then the exit", got)
	}
}

// FuzzScript: whatever stands in them, the inputs add no line, no expansion and
// no command to a script.
func FuzzScript(f *testing.F) {
	f.Add("http://10.0.0.1/k", "quiet", "http://10.0.0.1/i.iso")
	f.Add("http://10.0.0.1/boot/", "a=b initrd=x", "/script.ipxe")
	f.Add("http://10.0.0.1/k", "quiet", "http://h/i\ngoto x")
	f.Add("http://10.0.0.1/k\nshell", "${x}", "http://h/i.iso || shell")
	lines := strings.Count(head+tail, "\n")
	dollars, ors := strings.Count(head+tail, "$"), strings.Count(head+tail, "||")
	f.Fuzz(func(t *testing.T, u, cmdline, image string) {
		r := sample()
		r.Kernel, r.Cmdline = u, cmdline
		own := around()
		own.AgainBefore, own.AgainAfter = u, image
		for _, tt := range []struct {
			in         interface{ Script() (string, error) }
			lines, ors int
		}{
			{r, 4, 4}, {UKI{around(), image}, 2, 2}, {Sanboot{around(), image, cmdline}, 6, 3},
			{Kernel{around(), u, image, cmdline}, ownKernel(image), ownKernel(image)}, {UKI{own, "http://h/u"}, 2, 2},
		} {
			got, err := tt.in.Script()
			if err != nil {
				continue
			}
			if n := strings.Count(got, "\n") - lines; n != tt.lines || strings.Count(got, "$") != dollars || strings.Count(got, "||") != ors+tt.ors {
				t.Errorf("Script(%q, %q, %q) has %d lines of its own: %q", u, cmdline, image, n, got)
			}
		}
	})
}

// ownKernel is how many lines of its own the script of a kernel has.
func ownKernel(initrd string) int {
	if initrd == "" {
		return 2
	}
	return 3
}
