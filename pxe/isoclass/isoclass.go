// Package isoclass reads what a disc image is: how it boots, and what it needs once its kernel runs.
//
// It has a small reader of ISO 9660 (ECMA-119), Rock Ridge names and Joliet, and of
// the El Torito boot catalog. Images are foreign bytes of any size: each reads a
// bounded number of bytes and names, at places that are checked. go-diskfs, which
// the tests write images with, allocates what an image asks for and follows its
// continuation areas without end.
package isoclass

import (
	"io"
	"path"
	"slices"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/printable"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// Image is what an image is.
type Image struct {
	// Label is the volume's.
	Label string `json:"label,omitempty"`
	// BIOS and UEFI say what its boot catalog has an image for.
	BIOS bool `json:"bios,omitempty"`
	UEFI bool `json:"uefi,omitempty"`
	// Archs are the processors of its UEFI boot programs, as far as its files tell:
	// "x64", "aa64", "ia32", "riscv64".
	Archs []string       `json:"archs,omitempty"`
	Class pxev1.IsoClass `json:"class,omitempty"`
	// Layout is what it is, for people; empty: not known.
	Layout string `json:"layout,omitempty"`
	// Parameters are what its kernel's command line needs so that it fetches itself again.
	Parameters string `json:"parameters,omitempty"`
	// Signed says, where one of its UEFI programs could be read, whether it has a signature.
	Signed *bool `json:"signed,omitempty"`
	// Notes are what else is to be known.
	Notes []string `json:"notes,omitempty"`
}

// The classes as they are written.
var classes = map[pxev1.IsoClass]string{
	pxev1.IsoClass_ISO_CLASS_SELF_CONTAINED: "self-contained",
	pxev1.IsoClass_ISO_CLASS_REFETCHES:      "refetches",
	pxev1.IsoClass_ISO_CLASS_NEEDS_DRIVE:    "needs-drive",
}

// Name is how a class is written.
func Name(c pxev1.IsoClass) string { return classes[c] }

// ParseClass reads a class.
func ParseClass(name string) (pxev1.IsoClass, error) {
	for c, text := range classes {
		if text == name {
			return c, nil
		}
	}
	return 0, errs.New(errs.InvalidArgs, "class %.40q: want self-contained, refetches or needs-drive", name)
}

// Inspect reads an image of size bytes. What is no ISO 9660 image, or ends early, is
// invalid-args; what is damaged further in is a note, and an image that needs a drive.
func Inspect(r io.ReaderAt, size int64) (Image, error) {
	d := &disc{r: r, size: size, left: maxRead}
	v, err := d.volumes()
	if err != nil {
		return Image{}, err
	}
	i := Image{Label: clean(v.label)}
	boots, err := d.catalog(v.catalog)
	if err != nil {
		i.Notes = append(i.Notes, "its boot catalog cannot be read: "+err.Error())
	}
	for _, b := range boots {
		switch {
		case b.platform == platformEFI:
			i.UEFI = true
		case b.platform == platformBIOS && b.emulates:
			i.Notes = append(i.Notes, "its BIOS boot image wants to be a floppy or hard disk, which iPXE does not do")
		case b.platform == platformBIOS:
			i.BIOS = true
		}
	}
	t, err := d.tree(v)
	if err != nil {
		i.Notes = append(i.Notes, "its file system cannot be read: "+err.Error())
	}
	i.Archs = archs(t)
	if signed, known := d.signed(t); known {
		i.Signed = &signed
	}
	l := classify(t, v.udf)
	i.Class, i.Layout, i.Parameters = l.class, l.name, l.parameters
	if l.note != "" {
		i.Notes = append(i.Notes, l.note)
	}
	return i, nil
}

func clean(s string) string { return strings.TrimSpace(printable.Text(s, '?')) }

// layout is how a kind of image is recognised, and what it needs.
type layout struct {
	name  string
	has   func(tree) bool
	class pxev1.IsoClass
	// parameters have SERVER where the URL of the unpacked image, or of its file, goes.
	parameters, note string
}

const (
	drive     = pxev1.IsoClass_ISO_CLASS_NEEDS_DRIVE
	refetches = pxev1.IsoClass_ISO_CLASS_REFETCHES
	contained = pxev1.IsoClass_ISO_CLASS_SELF_CONTAINED
)

// layouts are looked through in order; the first that fits counts.
var layouts = []layout{
	{"Windows", anyOf("sources/boot.wim", "sources/install.wim", "sources/install.esd", "bootmgr"), drive, "", "Windows setup reads its files from the disc"},
	{"VMware ESXi", all("boot.cfg", "efi/boot/boot.cfg"), drive, "", "the installer reads its modules from the disc"},
	{"Ubuntu live or server", under("casper/", ".squashfs"), refetches, "ip=dhcp url=http://SERVER/image.iso", ""},
	{"Debian live", under("live/", ".squashfs"), refetches, "boot=live components fetch=http://SERVER/live/filesystem.squashfs", ""},
	{"Fedora live", anyOf("liveos/squashfs.img"), refetches, "ip=dhcp rd.live.image root=live:http://SERVER/LiveOS/squashfs.img", ""},
	{"Red Hat installer", all("images/pxeboot/vmlinuz"), refetches, "ip=dhcp inst.repo=http://SERVER/", ""},
	{"Arch Linux", under("arch/", ".sfs", ".erofs"), refetches, "ip=dhcp archisobasedir=arch archiso_http_srv=http://SERVER/", ""},
	{"openSUSE installer", all("boot/x86_64/loader/linux"), refetches, "netsetup=dhcp install=http://SERVER/", ""},
	{"Alpine Linux", under("apks/", ".apk"), refetches, "ip=dhcp modloop=http://SERVER/boot/modloop-lts alpine_repo=http://SERVER/apks", ""},
	{"Debian installer", func(t tree) bool {
		return t.has(".disk/info") && (t.dir("install.amd/") || t.dir("install/") || t.dir("install.a64/"))
	}, drive, "", "its installer looks for a CD-ROM; Debian's netboot installer does not"},
}

func classify(t tree, udf bool) layout {
	for _, l := range layouts {
		if l.has(t) {
			return l
		}
	}
	switch {
	case udf:
		return layout{class: drive, note: "its files are in UDF, which is not looked into"}
	case !t.whole:
		return layout{class: drive, note: "it has more files than are looked at"}
	case len(t.files) == 0:
		return layout{class: drive, note: "it has no files"}
	}
	for name := range t.files {
		if !inBoot(name) {
			return layout{class: drive, note: "it is not known, and has files beside its boot programs, such as " + clean(name)}
		}
	}
	return layout{name: "boot programs, kernels and initrds alone", class: contained}
}

// bootFiles are what a loader reads before any kernel runs, by suffix and by what
// the name begins with.
var (
	bootSuffixes = []string{
		".c32", ".cfg", ".conf", ".cat", ".catalog", ".efi", ".mod", ".lst", ".pf2", ".fnt", ".env", ".sys", ".txt", ".msg", ".png", ".jpg", ".lkrn", ".krn", ".ipxe",
		".elf", ".kpxe", ".0", ".f12", ".img", ".bin", ".mo", ".html", ".sig",
	}
	bootNames = []string{"vmlinuz", "bzimage", "linux", "initrd", "initramfs", "core.gz", "corepure64.gz", "rootfs.gz", "modules.gz", "memtest", "mt86", "ipxe", "readme", "license", "copying", "eltorito", "boot.catalog"}
)

// inBoot says whether a file is read before the image's kernel runs, if ever.
func inBoot(name string) bool {
	if strings.HasPrefix(name, ".disk/") {
		return true
	}
	base := path.Base(name)
	// A system's own image may be anywhere, and under any of the common names.
	if strings.HasSuffix(base, ".img") && (strings.Contains(base, "root") || strings.Contains(base, "squash") || strings.Contains(base, "live") || strings.Contains(base, "install")) {
		return false
	}
	return slices.ContainsFunc(bootSuffixes, func(s string) bool { return strings.HasSuffix(base, s) }) ||
		slices.ContainsFunc(bootNames, func(s string) bool { return strings.HasPrefix(base, s) })
}

func anyOf(names ...string) func(tree) bool {
	return func(t tree) bool { return slices.ContainsFunc(names, t.has) }
}

func all(names ...string) func(tree) bool {
	return func(t tree) bool {
		return !slices.ContainsFunc(names, func(n string) bool { return !t.has(n) })
	}
}

// under looks for a file of one of the suffixes below a folder.
func under(dir string, suffixes ...string) func(tree) bool {
	return func(t tree) bool {
		for name := range t.files {
			if strings.HasPrefix(name, dir) && slices.ContainsFunc(suffixes, func(s string) bool { return strings.HasSuffix(name, s) }) {
				return true
			}
		}
		return false
	}
}

// archs are those of the programs in EFI/BOOT.
func archs(t tree) []string {
	var out []string
	for _, a := range []string{"x64", "aa64", "ia32", "riscv64"} {
		if t.has("efi/boot/boot" + a + ".efi") {
			out = append(out, a)
		}
	}
	return out
}
