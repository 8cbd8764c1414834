// Package script writes the iPXE scripts that machines run.
package script

import (
	"fmt"
	"net/netip"
	"net/url"
	"strings"
)

// Around is what every script needs beside what it boots.
type Around struct {
	// Again is the URL of this script up to the machine's MAC and after it: a failed
	// boot asks for a fresh decision there, by whichever port has a link.
	AgainBefore, AgainAfter string
	// Syslog is where iPXE sends its lines; not valid: nowhere.
	Syslog netip.Addr
}

// Ramdisk is what a ramdisk boot needs: absolute URLs, and the kernel's
// command line without initrd= arguments.
type Ramdisk struct {
	Around
	Kernel, Initrd, Boot string
	Cmdline              string
}

// Kernel boots a kernel of the artifacts. Initrd may be empty.
type Kernel struct {
	Around
	Kernel, Initrd string
	Cmdline        string
}

// UKI boots a unified kernel image, which has its command line inside.
type UKI struct {
	Around
	Image string
}

// Sanboot gives a disc image out as a drive and boots from it.
type Sanboot struct {
	Around
	Image string
	// Told is shown before: what is known of the image. It may be anything.
	Told string
}

// maxCmdline is below the 2048 bytes that x86 kernels take.
const maxCmdline = 1500

// Script renders the boot. UEFI kernels find an initrd only by initrd=NAME;
// BIOS loaders ignore it. The appended archive comes last, so that it wins.
func (r Ramdisk) Script() (string, error) {
	if err := check(r.Cmdline, r.Kernel, r.Initrd, r.Boot); err != nil {
		return "", err
	}
	return r.render(fmt.Sprintf(`kernel %s initrd=ramdisk.img initrd=boot.img %s || goto failed
initrd --name ramdisk.img %s || goto failed
initrd --name boot.img %s || goto failed
boot || goto failed
`, r.Kernel, r.Cmdline, r.Initrd, r.Boot))
}

// Script renders the boot.
func (k Kernel) Script() (string, error) {
	urls, name, initrd := []string{k.Kernel}, "", ""
	if k.Initrd != "" {
		urls = append(urls, k.Initrd)
		name, initrd = "initrd=initrd.img ", "initrd --name initrd.img "+k.Initrd+" || goto failed\n"
	}
	if err := check(k.Cmdline, urls...); err != nil {
		return "", err
	}
	return k.render(fmt.Sprintf("kernel %s %s%s || goto failed\n%sboot || goto failed\n", k.Kernel, name, k.Cmdline, initrd))
}

// Script renders the boot.
func (u UKI) Script() (string, error) {
	if err := check("", u.Image); err != nil {
		return "", err
	}
	return u.render(fmt.Sprintf("kernel %s || goto failed\nboot || goto failed\n", u.Image))
}

// maxTold keeps what is shown on a few lines of a screen.
const maxTold = 400

// Script renders the boot. Nothing describes the drive to the system: no table
// that it could read knows one over HTTP. Hooking and booting are apart: what
// cannot be fetched is asked for again, and an image that ended, or that nothing
// on this machine starts, is left for the firmware's next boot entry. The disc is
// the first drive whatever another DHCP server says of it; iPXE puts the machine's
// own behind its others for as long.
func (s Sanboot) Script() (string, error) {
	if err := check("", s.Image); err != nil {
		return "", err
	}
	told := shown(s.Told)
	return s.render(told[:min(len(told), maxTold)] + fmt.Sprintf(`
sanhook --no-describe --drive 0x80 %s || goto failed
sanboot --no-describe --drive 0x80 ||
echo The disc image has ended, or cannot start here
sanunhook --drive 0x80 ||
goto leave
`, s.Image))
}

// shown is a line that shows a text, without what iPXE would take as its own.
func shown(text string) string {
	return "echo " + strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' || strings.ContainsRune("\"'\\#$&|", r) {
			return ' '
		}
		return r
	}, text)
}

// render puts the retry around what is booted. The wait doubles and outlives the
// script, since iPXE's settings do; after two minutes of them the firmware's next boot
// entry has its turn. netX is the port that was opened last: the one that boots.
func (s Around) render(boot string) (string, error) {
	if err := checkURL(s.AgainBefore + "x" + s.AgainAfter); err != nil {
		return "", err
	}
	syslog := ""
	if s.Syslog.IsValid() {
		name := "syslog"
		if s.Syslog.Is6() {
			name = "syslog6"
		}
		syslog = "set " + name + " " + s.Syslog.String() + " ||\n"
	}
	again := func(port string) string { return s.AgainBefore + "${" + port + "/mac:hexhyp}" + s.AgainAfter }
	return `#!ipxe
` + syslog + `isset ${bcwait} || set bcwait:int32 2
` + boot + `:failed
imgfree
iseq ${bcwait} 128 && goto leave ||
echo Boot failed, asking again in ${bcwait} seconds
sleep ${bcwait}
inc bcwait ${bcwait}
chain --replace --autofree ` + again("netX") + ` ||
set bcport:int32 0
:port
isset ${net${bcport}/mac} || goto failed
ifclose
dhcp net${bcport} && chain --replace --autofree ` + again("net${bcport}") + ` ||
inc bcport
goto port
:leave
exit 1
`, nil
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

// FirstDisk boots a BIOS machine's first disk, where leaving iPXE only starts the
// machine anew.
func FirstDisk() string {
	return `#!ipxe
echo Booting from the first local disk
sanboot --no-describe --drive 0x80 ||
exit
`
}

func check(cmdline string, urls ...string) error {
	for _, u := range urls {
		if err := checkURL(u); err != nil {
			return err
		}
	}
	return checkCmdline(cmdline)
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

// CheckCmdline is whether a script can carry the command line.
func CheckCmdline(s string) error { return checkCmdline(s) }

func checkText(what, s, refused string) error {
	for _, r := range s {
		if r < ' ' && r != '\t' || r > '~' || strings.ContainsRune(refused, r) {
			return fmt.Errorf("script: the %s must not hold %q", what, r)
		}
	}
	return nil
}
