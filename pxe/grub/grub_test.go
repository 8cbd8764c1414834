package grub_test

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/pxe/grub"
	"github.com/better-compute/site-appliance/pxe/grub/grubtest"
)

var server = netip.MustParseAddr("10.0.0.1")

const at = "/boot/52-54-00-00-00-01/tok/"

func agent(edit ...func(*grub.Linux)) grub.Linux {
	l := grub.Linux{Around: grub.Around{Server: server, Again: grub.PathFor("52:54:00:00:00:01")},
		Kernel: at + "vmlinuz", Initrds: []string{at + "ramdisk.img", at + "boot.img"}, Cmdline: "console=tty0 panic=10"}
	for _, f := range edit {
		f(&l)
	}
	return l
}

// TestText is the whole text of one, for people to read.
func TestText(t *testing.T) {
	got, err := agent().Config()
	if err != nil {
		t.Fatal(err)
	}
	const want = `echo 'Booting over HTTP'
if linux '(http,10.0.0.1)/boot/52-54-00-00-00-01/tok/vmlinuz' 'console=tty0' 'panic=10'; then
  set bc_loaded=1
else
  echo 'Booting over TFTP'
  if linux '(tftp,10.0.0.1)/boot/52-54-00-00-00-01/tok/vmlinuz' 'console=tty0' 'panic=10'; then
    set bc_loaded=1
  fi
fi
if [ "$bc_loaded" = 1 ]; then
  for bc_wait in 2 4 8 16 32 64; do
    if initrd '(http,10.0.0.1)/boot/52-54-00-00-00-01/tok/ramdisk.img' '(http,10.0.0.1)/boot/52-54-00-00-00-01/tok/boot.img'; then
      boot
    fi
    if initrd '(tftp,10.0.0.1)/boot/52-54-00-00-00-01/tok/ramdisk.img' '(tftp,10.0.0.1)/boot/52-54-00-00-00-01/tok/boot.img'; then
      boot
    fi
    echo "Boot failed, trying again in $bc_wait seconds"
    sleep $bc_wait
  done
  reboot
fi
if [ -z "$bc_again" ]; then
  set bc_again=1
  for bc_wait in 2 4 8 16 32 64; do
    echo "Boot failed, asking again in $bc_wait seconds"
    sleep $bc_wait
    source '(tftp,10.0.0.1)/grub/grub.cfg-01-52-54-00-00-00-01'
  done
  exit 1
fi
`
	if got != want {
		t.Errorf("Config() =\n%s\nwant\n%s", got, want)
	}
}

// box serves every path with its own name over the devices that work.
func box(works ...string) func(device, path string) ([]byte, error) {
	return func(device, path string) ([]byte, error) {
		if !slices.Contains(works, device) || strings.HasSuffix(path, ".mod") {
			return nil, errors.New("time out opening " + device + path)
		}
		return []byte(path), nil
	}
}

func TestRun(t *testing.T) {
	const tftp, http = "(tftp,10.0.0.1)", "(http,10.0.0.1)"
	kernel := agent(func(l *grub.Linux) { l.Initrds = nil })
	chain := grub.Chain{Around: agent().Around, Program: at + "boot.efi"}
	text := func(c interface{ Config() (string, error) }) string {
		s, err := c.Config()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	for _, tt := range []struct {
		name    string
		text    string
		http    bool
		disk    string
		works   []string
		how     string
		from    string
		cmdline string
		initrds []string
	}{
		{"Debian 12's, which has no HTTP", text(agent()), false, "", []string{tftp, http}, "linux", tftp + at + "vmlinuz",
			"BOOT_IMAGE=" + tftp + at + "vmlinuz console=tty0 panic=10", []string{at + "ramdisk.img", at + "boot.img"}},
		{"one with HTTP", text(agent()), true, "", []string{tftp, http}, "linux", http + at + "vmlinuz",
			"BOOT_IMAGE=" + http + at + "vmlinuz console=tty0 panic=10", []string{at + "ramdisk.img", at + "boot.img"}},
		{"one whose HTTP fails", text(agent()), true, "", []string{tftp}, "linux", tftp + at + "vmlinuz", "", nil},
		{"by an address of version 6", text(agent(func(l *grub.Linux) { l.Server = netip.MustParseAddr("2001:db8::1") })), false, "", []string{"(tftp,[2001:db8::1])"},
			"linux", "(tftp,[2001:db8::1])" + at + "vmlinuz", "", nil},
		{"by another port", text(agent(func(l *grub.Linux) { l.HTTPPort = 8080 })), true, "", []string{"(http,10.0.0.1:8080)"},
			"linux", "(http,10.0.0.1:8080)" + at + "vmlinuz", "", nil},
		{"a kernel alone", text(kernel), false, "", []string{tftp}, "linux", tftp + at + "vmlinuz", "", []string{}},
		{"a unified kernel image", text(chain), false, "", []string{tftp}, "chainloader", tftp + at + "boot.efi", "", nil},
		{"a dead box", text(agent()), true, "", nil, "exit", "", "", nil},
		{"local disk", grub.LocalDisk("the boot window has ended"), false, "hd0,gpt1", nil, "chainloader", "(hd0,gpt1)/EFI/BOOT/BOOTX64.EFI", "", nil},
		{"local disk without one", grub.LocalDisk("done"), false, "", nil, "exit", "", "", nil},
		{"denied", grub.Deny("it's \"unknown\" $x `y` \\ ; exit\n} é"), false, "", nil, "exit", "", "", nil},
	} {
		m := grubtest.Machine{CPU: "x86_64", HTTP: tt.http, Disk: tt.disk, Fetch: box(tt.works...)}
		got, err := m.Run(tt.text)
		if err != nil {
			t.Errorf("%s: Run: %v, in\n%s", tt.name, err, tt.text)
			continue
		}
		if got.How != tt.how || got.From != tt.from || tt.cmdline != "" && got.Cmdline != tt.cmdline {
			t.Errorf("%s: ended by %q from %q with %q, want %q, %q, %q", tt.name, got.How, got.From, got.Cmdline, tt.how, tt.from, tt.cmdline)
		}
		if tt.initrds != nil && fmt.Sprintf("%s", got.Initrds) != fmt.Sprintf("%s", tt.initrds) {
			t.Errorf("%s: initrds %s, want %s", tt.name, got.Initrds, tt.initrds)
		}
	}
	m := grubtest.Machine{CPU: "arm64", Disk: "hd0,gpt1"}
	if got, err := m.Run(grub.LocalDisk("done")); err != nil || got.From != "(hd0,gpt1)/EFI/BOOT/BOOTAA64.EFI" {
		t.Errorf("local disk on arm64: from %q, %v", got.From, err)
	}
}

// TestRetry: a kernel that does not come is asked for anew, waiting longer each time,
// and GRUB does what it is told then; in the end the firmware has its turn.
func TestRetry(t *testing.T) {
	for _, tt := range []struct {
		name   string
		answer func(asked int) string // the configuration of each further asking
		how    string
		slept  []int
	}{
		{"the same again", nil, "exit", []int{2, 4, 8, 16, 32, 64}},
		{"its disk, when it asks the second time", func(n int) string {
			if n < 2 {
				return ""
			}
			return grub.LocalDisk("done")
		}, "chainloader", []int{2, 4}},
		{"nothing", func(int) string { return grub.Deny("the machine is unknown") }, "exit", []int{2, 10}},
	} {
		again, err := agent(func(l *grub.Linux) { l.HTTP = true }).Config()
		if err != nil {
			t.Fatal(err)
		}
		asked := 0
		m := grubtest.Machine{CPU: "x86_64", HTTP: true, Disk: "hd0",
			Fetch: func(device, path string) ([]byte, error) {
				if path != "/grub/grub.cfg-01-52-54-00-00-00-01" {
					return nil, errors.New("file not found")
				}
				if device != "(http,10.0.0.1)" {
					t.Errorf("%s: asked again at %s, want the way that the first came", tt.name, device)
				}
				asked++
				if tt.answer != nil {
					if text := tt.answer(asked); text != "" {
						return []byte(text), nil
					}
				}
				return []byte(again), nil
			}}
		got, err := m.Run(again)
		if err != nil {
			t.Fatalf("%s: %v", tt.name, err)
		}
		if got.How != tt.how || !slices.Equal(got.Slept, tt.slept) {
			t.Errorf("%s: ended by %q after pauses of %v, want %q after %v; it said %q", tt.name, got.How, got.Slept, tt.how, tt.slept, got.Said)
		}
	}
}

// TestRetryOfInitrds: once a kernel is loaded, only what failed is tried again, over
// both ways, and in the end the machine begins anew.
func TestRetryOfInitrds(t *testing.T) {
	text, err := agent().Config()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name   string
		refuse func(device, path string, asked int) bool
		starts bool
		how    string
		slept  []int
	}{
		{"the archive comes late", func(_, path string, asked int) bool { return strings.HasSuffix(path, "boot.img") && asked < 5 }, true, "linux", []int{2, 4}},
		{"HTTP has the kernel only", func(device, path string, _ int) bool {
			return strings.HasPrefix(device, "(http") && !strings.HasSuffix(path, "vmlinuz")
		}, true, "linux", nil},
		{"it never comes", func(_, path string, _ int) bool { return strings.HasSuffix(path, "boot.img") }, true, "reboot", []int{2, 4, 8, 16, 32, 64}},
		{"the kernel does not start", func(string, string, int) bool { return false }, false, "reboot", []int{2, 4, 8, 16, 32, 64}},
	} {
		asked := 0
		m := grubtest.Machine{CPU: "x86_64", HTTP: true, Boots: func(grubtest.End) bool { return tt.starts },
			Fetch: func(device, path string) ([]byte, error) {
				if strings.HasSuffix(path, "boot.img") {
					asked++
				}
				if tt.refuse(device, path, asked) {
					return nil, errors.New("file not found")
				}
				return []byte(path), nil
			}}
		got, err := m.Run(text)
		if err != nil {
			t.Fatalf("%s: %v", tt.name, err)
		}
		if got.How != tt.how || !slices.Equal(got.Slept, tt.slept) {
			t.Errorf("%s: ended by %q after pauses of %v, want %q after %v; it said %q", tt.name, got.How, got.Slept, tt.how, tt.slept, got.Said)
		}
	}
}

func TestRefused(t *testing.T) {
	for _, tt := range []struct {
		name string
		c    interface{ Config() (string, error) }
		want string // in the error; empty: taken
	}{
		{"an ordinary one", agent(), ""},
		{"what is special to GRUB outside of quotes", agent(func(l *grub.Linux) { l.Cmdline = "a=$x b={y} c;d e&f g|h <i> #j (k) `l` *?" }), ""},
		{"a quote", agent(func(l *grub.Linux) { l.Cmdline = "a='b c'" }), "must not hold '\\''"},
		{"a double quote", agent(func(l *grub.Linux) { l.Cmdline = `a="b c"` }), "must not hold '\"'"},
		{"a backslash", agent(func(l *grub.Linux) { l.Cmdline = `a=\` }), `must not hold '\\'`},
		{"a new line", agent(func(l *grub.Linux) { l.Cmdline = "a\nexit" }), "must not hold"},
		{"a NUL", agent(func(l *grub.Linux) { l.Cmdline = "a\x00" }), "must not hold"},
		{"another script", agent(func(l *grub.Linux) { l.Cmdline = "é" }), "must not hold"},
		{"an initrd of its own", agent(func(l *grub.Linux) { l.Cmdline = "a initrd=x" }), "must not hold \"initrd=x\""},
		{"too long", agent(func(l *grub.Linux) { l.Cmdline = strings.Repeat("a", 1501) }), "1501 bytes"},
		{"a path out of the box", agent(func(l *grub.Linux) { l.Kernel = "/boot/../secret" }), "not a plain path"},
		{"another device", agent(func(l *grub.Linux) { l.Kernel = "(hd0)/boot" }), "not a plain path"},
		{"a path with a quote", agent(func(l *grub.Linux) { l.Initrds[1] = "/a'b" }), "not a plain path"},
		{"no path", agent(func(l *grub.Linux) { l.Kernel = "" }), "not a plain path"},
		{"a path that is too long", agent(func(l *grub.Linux) { l.Kernel = "/" + strings.Repeat("a", 400) }), "not a plain path"},
		{"no server", agent(func(l *grub.Linux) { l.Server = netip.Addr{} }), "address is missing"},
		{"an image's path", grub.Chain{Around: agent().Around, Program: "boot.efi"}, "not a plain path"},
		{"nowhere to ask again", agent(func(l *grub.Linux) { l.Again = "" }), "not a plain path"},
	} {
		_, err := tt.c.Config()
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
}

// TestConfigPath: what GRUB's network images ask for, by their sources.
func TestConfigPath(t *testing.T) {
	for _, tt := range []struct {
		path, mac string
		ok        bool
	}{
		{"grub/grub.cfg", "", true},            // Debian's debian/build-efi-images: prefix /grub
		{"grub/x86_64-efi/grub.cfg", "", true}, // the same, where its test for a file works
		{"grub/arm64-efi/grub.cfg", "", true},
		{"grub/grub.cfg-01-52-54-00-ab-cd-ef", "52:54:00:ab:cd:ef", true}, // net.c's grub_net_search_config_file
		{"grub/grub.cfg-01-52-54-00-AB-CD-EF", "52:54:00:ab:cd:ef", true},
		{"grub/grub.cfg-0A4D0064", "", false}, // the same, by address: the next one that it tries is served
		{"grub/grub.cfg-01-52-54-00", "", false},
		{"grub/grub.cfg-01-02-00-5e-10-00-00-00-01", "", false},
		{"grub/arm64-efi/command.lst", "", false}, // asked for as normal mode begins
		{"grub/arm64-efi/http.mod", "", false},
		{"grub/i386-pc/grub.cfg", "", false},
		{"grub.cfg", "", true}, // beside the image, as Fedora's (fw_path)
		{"grub.cfg-01-52-54-00-ab-cd-ef", "52:54:00:ab:cd:ef", true},
		{"arm64-efi/grub.cfg", "", false},
		{"grub", "", false},
		{"grub/grub/grub.cfg", "", false},
		{"boot/grub.cfg", "", false},
		{"", "", false},
	} {
		mac, ok := grub.ConfigPath(strings.Split(tt.path, "/"))
		if mac != tt.mac || ok != tt.ok {
			t.Errorf("ConfigPath(%q) = %q, %v, want %q, %v", tt.path, mac, ok, tt.mac, tt.ok)
		}
	}
	if mac, ok := grub.ConfigPath(strings.Split(grub.PathFor("52:54:00:ab:cd:ef"), "/")[1:]); !ok || mac != "52:54:00:ab:cd:ef" {
		t.Errorf("ConfigPath of PathFor = %q, %v", mac, ok)
	}
}

func TestSpeaksHTTP(t *testing.T) {
	if grub.SpeaksHTTP([]byte("MZ … tftp octet blksize")) {
		t.Error("an image without an HTTP client counts as one with it")
	}
	if !grub.SpeaksHTTP([]byte("MZ \x00GET \x00 HTTP/1.1\r\nHost: \x00")) {
		t.Error("an image with GRUB's HTTP client counts as one without")
	}
	if grub.SpeaksHTTP([]byte("MZ \x00GET \x00 HTTP/1.1\r\nHost: \x00UefiHttpBoot/1.0\x00")) {
		t.Error("an image that takes a refusal for an empty file counts as one that does not")
	}
}

// FuzzConfig: whatever is given, GRUB reads what was meant or there is no configuration.
func FuzzConfig(f *testing.F) {
	f.Add("console=tty0 a=$b", at+"vmlinuz", at+"boot.img", "the machine is unknown")
	f.Add("a;b 'c' \"d\" \\e #f", "/a/../b", "/c'd", "x'; reboot; echo '")
	f.Add("}{ || && <> ` \x00\n", "", "/", "\n}\xff é")
	f.Fuzz(func(t *testing.T, cmdline, kernel, initrd, why string) {
		for _, text := range []string{grub.Deny(why), grub.LocalDisk(why)} {
			m := grubtest.Machine{CPU: "x86_64"}
			got, err := m.Run(text)
			if err != nil || got.How != "exit" || len(got.Said) == 0 || len(got.Fetched) != 0 {
				t.Fatalf("Run = %+v, %v, of\n%s", got, err, text)
			}
		}
		l := agent(func(l *grub.Linux) { l.Cmdline, l.Kernel, l.Initrds = cmdline, kernel, []string{initrd} })
		text, err := l.Config()
		if err != nil {
			return
		}
		m := grubtest.Machine{CPU: "x86_64", Fetch: box("(tftp,10.0.0.1)")}
		got, err := m.Run(text)
		if err != nil {
			t.Fatalf("Run: %v, of\n%s", err, text)
		}
		want := strings.TrimSuffix("BOOT_IMAGE=(tftp,10.0.0.1)"+kernel+" "+strings.Join(strings.Fields(cmdline), " "), " ")
		if got.How != "linux" || string(got.Kernel) != kernel || string(got.Initrds[0]) != initrd || got.Cmdline != want {
			t.Fatalf("booted %+v, want %q, %q and %q, of\n%s", got, kernel, initrd, want, text)
		}
	})
}
