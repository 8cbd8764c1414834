// Package script writes the iPXE scripts that machines run.
package script

import (
	"fmt"
	"net/url"
	"strings"
)

// Ramdisk is what a ramdisk boot needs: absolute URLs, and the kernel's
// command line without initrd= arguments.
type Ramdisk struct {
	Kernel, Initrd, Boot string
	// Again is the URL of this script: a failed boot asks for a fresh decision there.
	Again   string
	Cmdline string
}

// maxCmdline is below the 2048 bytes that x86 kernels take.
const maxCmdline = 1500

// Script renders the boot. UEFI kernels find an initrd only by initrd=NAME;
// BIOS loaders ignore it. The appended archive comes last, so that it wins.
func (r Ramdisk) Script() (string, error) {
	for _, u := range []string{r.Kernel, r.Initrd, r.Boot, r.Again} {
		if err := checkURL(u); err != nil {
			return "", err
		}
	}
	if err := checkCmdline(r.Cmdline); err != nil {
		return "", err
	}
	return fmt.Sprintf(`#!ipxe
kernel %s initrd=ramdisk.img initrd=boot.img %s || goto failed
initrd --name ramdisk.img %s || goto failed
initrd --name boot.img %s || goto failed
boot || goto failed
:failed
imgfree
echo Boot failed, asking again in 5 seconds
sleep 5
chain --replace --autofree %s || exit 1
`, r.Kernel, r.Cmdline, r.Initrd, r.Boot, r.Again), nil
}

// LocalDisk leaves iPXE. UEFI firmware goes on to its next boot entry only if
// the entry before failed; a PC BIOS does so in any case.
func LocalDisk() string {
	return `#!ipxe
echo Booting from the local disk
iseq ${platform} efi && exit 1 ||
exit
`
}

func checkURL(s string) error {
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "http" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" {
		return fmt.Errorf("script: %.200q is not a plain http URL", s)
	}
	return checkText("URL", s, " \t\"'\\#$&|")
}

// checkCmdline refuses what iPXE would expand or take as its own syntax.
func checkCmdline(s string) error {
	if len(s) > maxCmdline {
		return fmt.Errorf("script: the command line has %d bytes, more than %d", len(s), maxCmdline)
	}
	for arg := range strings.FieldsSeq(s) {
		if strings.HasPrefix(arg, "initrd=") {
			return fmt.Errorf("script: the command line must not hold %q", arg)
		}
	}
	return checkText("command line", s, "\"'\\#$&|")
}

func checkText(what, s, refused string) error {
	for _, r := range s {
		if r < ' ' && r != '\t' || r > '~' || strings.ContainsRune(refused, r) {
			return fmt.Errorf("script: the %s must not hold %q", what, r)
		}
	}
	return nil
}
