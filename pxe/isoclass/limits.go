package isoclass

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// Boot is how an image is to be booted.
type Boot struct {
	Name string
	Size uint64 // of the image, in bytes
	// Drive: the BMC's virtual drive, and not the network.
	Drive bool
	UEFI  bool
	RAM   uint64 // of the machine, in bytes; 0: not known
	// Loader is the machine's own choice, as its assignment has it.
	Loader string
}

// Limit is something that is known before a boot.
type Limit struct {
	Text    string
	Refuses bool
}

// Limits are what is known of an image that is to be booted so.
func Limits(i Image, b Boot) []Limit {
	var out []Limit
	tell := func(refuses bool, format string, args ...any) {
		out = append(out, Limit{fmt.Sprintf(format, args...), refuses})
	}
	switch {
	case !i.BIOS && !i.UEFI:
		tell(true, "the image has no boot image, for BIOS or for UEFI")
	case b.UEFI && !i.UEFI:
		tell(true, "the image does not boot under UEFI: it has a boot image for BIOS alone")
	case !b.UEFI && !i.BIOS:
		tell(true, "the image does not boot under BIOS: it has a boot image for UEFI alone")
	}
	if b.UEFI && len(i.Archs) > 0 && !slices.Contains(i.Archs, "x64") {
		tell(false, "its UEFI programs are for %v, and not for x64", i.Archs)
	}
	if b.UEFI && i.Signed != nil && !*i.Signed {
		tell(false, "its UEFI program has no signature: firmware with Secure Boot on refuses it")
	}
	if !b.Drive {
		tellDecisions(i, b, tell)
		switch i.Class {
		case pxev1.IsoClass_ISO_CLASS_NEEDS_DRIVE:
			tell(true, "its system looks for its disc once its kernel runs, and over the network there is none by then%s", because(i))
		case pxev1.IsoClass_ISO_CLASS_REFETCHES:
			tell(false, "its system fetches the image again only if its command line says from where. In its boot menu, add: %s", cmp.Or(i.Parameters, "what its maker says"))
		}
	}
	for _, n := range i.Notes {
		tell(false, "%s", n)
	}
	return out
}

func because(i Image) string {
	if i.Layout == "" {
		return ""
	}
	return " (" + i.Layout + ")"
}

// tellDecisions says what the box will decide. Nothing that it would give to any
// firmware of the kind refuses the boot.
func tellDecisions(i Image, b Boot, tell func(refuses bool, format string, args ...any)) {
	asking := clients(b.UEFI)
	denied := 0
	for _, c := range asking {
		if decide.Decide(request(i, b, c)).Action == decide.Deny {
			denied++
		}
	}
	for _, c := range asking {
		switch d := decide.Decide(request(i, b, c)); {
		case d.Action == decide.Deny:
			tell(denied == len(asking), "%s: %s", c, d.Reason)
		case c.Program == decide.HTTPBoot:
			tell(false, "firmware that boots over HTTP, and not by PXE: %s", d.Reason)
		}
	}
}

// clients are who will ask the box.
func clients(uefi bool) []decide.Client {
	if uefi {
		return []decide.Client{{Program: decide.HTTPBoot, Arch: decide.X64}, {Program: decide.Firmware, Arch: decide.X64}}
	}
	return []decide.Client{{Program: decide.Firmware, Arch: decide.BIOS}}
}

// request is what the box will decide by.
func request(i Image, b Boot, c decide.Client) decide.Request {
	return decide.Request{Client: c, Now: time.UnixMilli(0), Machine: &pxev1.Machine{
		Action: pxev1.Action_ACTION_ISO, WindowUntilMs: 1, RamBytes: b.RAM, Loader: b.Loader, Iso: &pxev1.Iso{Name: b.Name, Size: b.Size, Class: i.Class},
	}}
}
