// Package grub writes the configurations that the network images of Debian's GRUB run.
package grub

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Around is what every configuration needs beside what it boots.
type Around struct {
	// Server is the box as the machine reaches it.
	Server netip.Addr
	// HTTPPort is the box's for HTTP; 0: 80. GRUB 2.06 knows 80 only.
	HTTPPort int
	// HTTP: the configuration was asked for over HTTP. A failed boot asks again there.
	HTTP bool
	// Again is the path of this configuration: a failed boot asks for a fresh decision.
	Again string
}

// Linux boots a kernel. Paths begin with a slash and are the same over TFTP and HTTP.
type Linux struct {
	Around
	Kernel string
	// Initrds are joined in their order: the kernel unpacks a later one over what an
	// earlier one left.
	Initrds []string
	Cmdline string
}

// Chain starts an EFI program, such as a unified kernel image.
type Chain struct {
	Around
	Program string
}

// maxCmdline is below the 2048 bytes that kernels take.
const maxCmdline = 1500

// Config renders the boot.
func (l Linux) Config() (string, error) {
	if err := checkCmdline(l.Cmdline); err != nil {
		return "", err
	}
	if err := checkPaths(append([]string{l.Kernel}, l.Initrds...)...); err != nil {
		return "", err
	}
	tftp, http := l.roots()
	load := func(root string) string {
		s := "linux " + word(root+l.Kernel)
		for arg := range strings.FieldsSeq(l.Cmdline) {
			s += " " + word(arg)
		}
		return s
	}
	// One kernel is loaded in GRUB's life and no more: GRUB 2.02 and 2.04 start a
	// second one into nothing. So what fails after it is tried again alone, and in
	// the end the machine begins anew.
	const loaded = "set bc_loaded=1\n"
	return l.render(say("Booting over HTTP") +
		"if " + load(http) + "; then\n" + indent(loaded) + "else\n" + indent(say("Booting over TFTP")+when(load(tftp), loaded)) + "fi\n" +
		when(`[ "$bc_loaded" = 1 ]`, l.start(http, tftp)+"reboot\n"))
}

// start boots the kernel that is loaded, with its initrds from any of the roots.
func (l Linux) start(roots ...string) string {
	if len(l.Initrds) == 0 {
		return "boot\nsleep 10\n"
	}
	all := ""
	for _, root := range roots {
		// GRUB 2.02 and Ubuntu's 2.12 open all before they read the first: what is small
		// comes last, so that it is here before the time-out of its transfer. Debian's
		// 2.06 reads each as it opens it.
		initrd := "initrd"
		for _, path := range l.Initrds {
			initrd += " " + word(root+path)
		}
		all += when(initrd, "boot\n")
	}
	return each(all + `echo "Boot failed, trying again in $bc_wait seconds"` + "\nsleep $bc_wait\n")
}

// Config renders the boot.
func (c Chain) Config() (string, error) {
	if err := checkPaths(c.Program); err != nil {
		return "", err
	}
	tftp, http := c.roots()
	start := func(root string) string { return when("chainloader "+word(root+c.Program), "boot\n") }
	return c.render(say("Booting over HTTP") + start(http) + say("Booting over TFTP") + start(tftp))
}

// waits are the seconds before each further decision is asked for.
var waits = []string{"2", "4", "8", "16", "32", "64"}

// each goes through the waits.
func each(body string) string {
	return "for bc_wait in " + strings.Join(waits, " ") + "; do\n" + indent(body) + "done\n"
}

// render puts the retry behind what is booted. A configuration that is fetched again
// runs inside of the first one's loop and tries once. After the last wait, the
// firmware's next boot entry has its turn.
//
// HTTP comes first: it is many times faster than GRUB's TFTP, which has one block of
// 1024 bytes under way. Debian's images have it from 2.12 on; others say that there is
// no such device. (To ask with insmod is of no use: it succeeds in any case.)
func (a Around) render(boot string) (string, error) {
	if err := checkPaths(a.Again); err != nil {
		return "", err
	}
	if !a.Server.IsValid() {
		return "", fmt.Errorf("grub: the box's address is missing")
	}
	tftp, http := a.roots()
	again := tftp
	if a.HTTP {
		again = http
	}
	return boot + when(`[ -z "$bc_again" ]`, "set bc_again=1\n"+each(
		`echo "Boot failed, asking again in $bc_wait seconds"`+"\n"+
			"sleep $bc_wait\n"+
			"source "+word(again+a.Again)+"\n")+"exit 1\n"), nil
}

// roots are GRUB's devices.
func (a Around) roots() (tftp, http string) {
	host := a.Server.String()
	if a.Server.Is6() {
		host = "[" + host + "]"
	}
	tftp, http = "(tftp,"+host+")", "(http,"+host+")"
	if a.HTTPPort != 0 && a.HTTPPort != 80 {
		http = "(http," + host + ":" + strconv.Itoa(a.HTTPPort) + ")"
	}
	return tftp, http
}

// LocalDisk leaves GRUB for the disk. Its exit counts as success, on which EDK2 shows
// its menu and waits; so the first disk's own loader is started where there is one.
func LocalDisk(why string) string {
	const disk = `search --no-floppy --file --set=bc_disk "$bc_efi"`
	return say("Booting from the local disk: "+why) +
		"if [ \"$grub_cpu\" = \"arm64\" ]; then\n  set bc_efi=/EFI/BOOT/BOOTAA64.EFI\nelse\n  set bc_efi=/EFI/BOOT/BOOTX64.EFI\nfi\n" +
		when(disk, when(`chainloader "($bc_disk)$bc_efi"`, "boot\n")) + "exit 1\n"
}

// Deny says why nothing is booted, and leaves.
func Deny(why string) string { return say("Nothing to boot: "+why) + "sleep 10\nexit 1\n" }

// when is an if without else.
func when(condition, then string) string {
	return "if " + condition + "; then\n" + indent(then) + "fi\n"
}

func indent(s string) string {
	return "  " + strings.ReplaceAll(strings.TrimSuffix(s, "\n"), "\n", "\n  ") + "\n"
}

// say shows a text of any origin.
func say(text string) string {
	text = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' || r == '\'' {
			return '?'
		}
		return r
	}, text)
	return "echo " + word(text[:min(len(text), 300)]) + "\n"
}

// word is one argument of a command, in which nothing is special; s was checked.
func word(s string) string { return "'" + s + "'" }

var plainPath = regexp.MustCompile(`^/[A-Za-z0-9._/-]+$`)

// maxPath keeps a TFTP request, whose name it is, below the 512 bytes that GRUB has for it.
const maxPath = 400

func checkPaths(paths ...string) error {
	for _, p := range paths {
		if !plainPath.MatchString(p) || len(p) > maxPath || path.Clean(p) != p {
			return fmt.Errorf("grub: %.200q is not a plain path", p)
		}
	}
	return nil
}

// checkCmdline refuses what GRUB would pass on as something else: it escapes quotes
// and backslashes for a loader of its own. A kernel started as an EFI program would
// look for what initrd= names.
func checkCmdline(s string) error {
	if len(s) > maxCmdline {
		return fmt.Errorf("grub: the command line has %d bytes, more than %d", len(s), maxCmdline)
	}
	for _, r := range s {
		if r < ' ' && r != '\t' || r > '~' || strings.ContainsRune(`'"\`, r) {
			return fmt.Errorf("grub: the command line must not hold %q", r)
		}
	}
	for arg := range strings.FieldsSeq(s) {
		if strings.HasPrefix(arg, "initrd=") {
			return fmt.Errorf("grub: the command line must not hold %.200q", arg)
		}
	}
	return nil
}

// platforms are GRUB's names of what its images are for.
var platforms = []string{"x86_64-efi", "arm64-efi"}

// dir is the prefix that is built into Debian's network images.
const dir = "grub"

// PathFor is where the machine with a MAC finds its configuration again.
func PathFor(mac string) string {
	return "/" + dir + "/grub.cfg-01-" + strings.ReplaceAll(mac, ":", "-")
}

// ConfigPath says whether a path, cut at its slashes, is one of a configuration.
// Debian's image asks for grub/grub.cfg, and for the platform's before it where its
// test for a file sees a server's. An image that searches by itself asks by the port's
// MAC first, which it then names, and some, as Fedora's, ask beside themselves.
func ConfigPath(parts []string) (mac string, ok bool) {
	if len(parts) > 0 && parts[0] == dir {
		parts = parts[1:]
		if len(parts) == 2 && slices.Contains(platforms, parts[0]) {
			return "", parts[1] == "grub.cfg"
		}
	}
	switch {
	case len(parts) != 1:
		return "", false
	case parts[0] == "grub.cfg":
		return "", true
	}
	text, ok := strings.CutPrefix(parts[0], "grub.cfg-01-")
	if !ok {
		return "", false
	}
	hw, err := net.ParseMAC(text)
	if err != nil || len(hw) != 6 {
		return "", false
	}
	return hw.String(), true
}

// Asks says whether a program that names itself so is GRUB with its own HTTP client.
func Asks(userAgent string) bool { return strings.HasPrefix(userAgent, "GRUB ") }

// IsList says whether a path, cut at its slashes, is one of the lists of modules that
// GRUB reads as it starts, all of which may be empty.
func IsList(parts []string) bool {
	return len(parts) == 3 && parts[0] == dir && slices.Contains(platforms, parts[1]) && strings.HasSuffix(parts[2], ".lst")
}

// SpeaksHTTP says whether an image may be fetched over HTTP. It needs GRUB's HTTP
// client, which Debian 12's network images have not: they would find their
// configuration nowhere. Ubuntu's 2.04-1ubuntu47.4 and 2.12 use the firmware's client
// instead where it has fetched them, as Fedora's can, and take all that they are
// refused there for an empty file: so they booted without a voucher.
func SpeaksHTTP(image []byte) bool {
	return bytes.Contains(image, []byte(" HTTP/1.1\r\nHost: ")) && !bytes.Contains(image, []byte("UefiHttpBoot/"))
}
