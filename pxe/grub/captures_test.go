package grub_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/pxe/grub"
	"github.com/better-compute/site-appliance/pxe/grub/grubtest"
)

// captured is what network images of GRUB asked this box for, by the packets of QEMU
// machines (q35, virtio, EDK2 of 2020.11 by PXE). None of them sent DHCP packets of
// its own. MACs and tokens are written as those of these tests.
var captured = []struct {
	version string
	agent   string // how it names itself over HTTP; empty: it has no HTTP
	// first is what it asked for until it had its configuration.
	first []request
	// late is what it asked for when the boot's own archive was refused over each way
	// the first time; gone when the kernel was, until it got a new configuration.
	late, gone []string
}{
	{"Debian's 2.06-3~deb11u6, and so 2.06-8", "", debian, lateTFTP, goneTFTP},
	{"Ubuntu's 2.02-2ubuntu8", "", debian, lateTFTP, goneTFTP},
	{"Ubuntu's 2.02-2ubuntu8.15", "GRUB 2.02-2ubuntu8.15", debian, lateHTTP, goneHTTP},
	{"Ubuntu's 2.04-1ubuntu21", "GRUB 2.04-1ubuntu21", debian, lateHTTP, goneHTTP},
	{"Ubuntu's 2.12-1ubuntu7.1", "GRUB 2.12-1ubuntu7.1", debian, lateHTTP, goneHTTP},
	{"Fedora's 2.06-116.fc39", "GRUB 2.06", fedora, lateHTTP, goneHTTP},
}

// request is a file that was asked for, and what it is: "configuration" or "list",
// or what the box has not.
type request struct{ path, is string }

func kind(path string) string {
	parts := strings.Split(path, "/")[1:]
	if _, ok := grub.ConfigPath(parts); ok {
		return "configuration"
	}
	if grub.IsList(parts) {
		return "list"
	}
	return ""
}

var (
	debian = []request{
		{"/grub/x86_64-efi/command.lst", "list"}, {"/grub/x86_64-efi/fs.lst", "list"},
		{"/grub/x86_64-efi/crypto.lst", "list"}, {"/grub/x86_64-efi/terminal.lst", "list"},
		{"/grub/grub.cfg", "configuration"},
	}
	fedora = []request{
		{"/grub.cfg-00000000-0000-0000-0000-000000000000", ""}, // by the machine's UUID, which QEMU had none
		{"/grub.cfg-01-52-54-00-00-00-01", "configuration"},
		{"/EFI/fedora/x86_64-efi/command.lst", ""}, {"/EFI/fedora/x86_64-efi/fs.lst", ""},
		{"/EFI/fedora/x86_64-efi/crypto.lst", ""}, {"/EFI/fedora/x86_64-efi/terminal.lst", ""},
		{"/grub.cfg-01-52-54-00-00-00-01", "configuration"},
	}

	lateTFTP = []string{
		"tftp /grub/x86_64-efi/http.mod", "tftp " + at + "vmlinuz",
		"tftp /grub/x86_64-efi/http.mod", "tftp " + at + "ramdisk.img", "tftp " + at + "boot.img",
		"tftp /grub/x86_64-efi/http.mod", "tftp " + at + "ramdisk.img", "tftp " + at + "boot.img",
	}
	goneTFTP = []string{"tftp /grub/x86_64-efi/http.mod", "tftp " + at + "vmlinuz", "tftp /grub/grub.cfg-01-52-54-00-00-00-01"}

	lateHTTP = []string{
		"http " + at + "vmlinuz", "http " + at + "ramdisk.img", "http " + at + "boot.img",
		"tftp " + at + "ramdisk.img", "tftp " + at + "boot.img",
		"http " + at + "ramdisk.img", "http " + at + "boot.img",
	}
	goneHTTP = []string{"http " + at + "vmlinuz", "tftp " + at + "vmlinuz", "tftp /grub/grub.cfg-01-52-54-00-00-00-01"}
)

// TestCaptured: what real ones asked for is known for what it is, and grubtest's
// machine, by which all else here is judged, asks for the same in the same order.
func TestCaptured(t *testing.T) {
	text, err := agent().Config()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range captured {
		if tt.agent != "" && !grub.Asks(tt.agent) {
			t.Errorf("%q is not taken for GRUB", tt.agent)
		}
		for _, r := range tt.first {
			if got := kind(r.path); got != r.is {
				t.Errorf("%s: %s is taken for %q, want %q", tt.version, r.path, got, r.is)
			}
		}
		for _, want := range [][]string{tt.late, tt.gone} {
			var asked []string
			m := grubtest.Machine{CPU: "x86_64", HTTP: tt.agent != ""}
			m.Fetch = func(device, path string) ([]byte, error) {
				request := device[1:5] + " " + path
				again := slices.Contains(asked, request)
				asked = append(asked, request)
				switch name := path[strings.LastIndexByte(path, '/')+1:]; {
				case name == grub.PathFor("52:54:00:00:00:01")[len("/grub/"):]:
					return []byte(grub.LocalDisk("done")), nil
				case name == "http.mod", name == "vmlinuz" && slices.Equal(want, tt.gone), name == "boot.img" && !again:
					return nil, errors.New("file not found")
				}
				return []byte(path), nil
			}
			if _, err := m.Run(text); err != nil || !slices.Equal(asked, want) {
				t.Errorf("%s: %v; it asked for\n%s\nwant\n%s", tt.version, err, strings.Join(asked, "\n"), strings.Join(want, "\n"))
			}
		}
	}
}
