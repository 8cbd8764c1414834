package main

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
)

// bootCommands are the verbs that boot something else than the machine's disk.
func bootCommands() []command {
	return []command{
		{"boot-iso", "boot a disc image of the catalog", metalBootISO},
		{"boot-kernel", "boot a kernel or a unified kernel image", metalBootKernel},
		{"boot-disk", "end what was booted from the network, and start from the disk", metalBootDisk},
		{"wipe", "clear disks by the ramdisk", metalWipe},
	}
}

// assignsOnly is what becomes of the machines that nobody can start from afar.
const assignsOnly = "Where the driver cannot choose what the machine boots (wol, manual), it is assigned and waited for: let somebody start it from the network\n" +
	"in that time, or have the network stand before the disk in its firmware's boot order."

// bootFlags are those that all boots from the network have.
type bootFlags struct {
	firmware *string
	window   *time.Duration
	boots    *uint
}

func (f *flags) boot() bootFlags {
	return bootFlags{
		firmware: f.String("firmware", "", "the machine's firmware, `bios` or uefi (default: uefi where that can boot it)"),
		window:   f.Duration("window", 12*time.Hour, "how `long` the machine may boot it, at most 168h"),
		boots:    f.Uint("max-boots", 1, "how `often` it may in that time; then it gets its disk"),
	}
}

func (b bootFlags) check(usage string) error {
	switch {
	case *b.window < time.Minute || *b.window > 168*time.Hour:
		return fmt.Errorf("--window %s: want 1m to 168h; usage: better-compute %s", *b.window, usage)
	case *b.boots < 1 || *b.boots > 1000:
		return fmt.Errorf("--max-boots %d: want 1 to 1000; usage: better-compute %s", *b.boots, usage)
	}
	return nil
}

func (b bootFlags) seconds() uint32 { return uint32(min(b.window.Seconds(), math.MaxUint32)) }

func metalBootISO(ctx context.Context, args []string, std stdio) error {
	f := newCall("metal boot-iso MACHINE ISO [--pxe] [--firmware bios|uefi] [--window DURATION] [--max-boots N] [--check] [--anyway] [--wait]", std)
	f.about = "Tells first what is known to stand in the way, and begins unless one of that refuses the boot.\n" +
		"Where the BMC has a virtual drive, the image goes there; else the machine boots it over the network, which counts among what is destructive.\n" + assignsOnly
	pxe := f.Bool("pxe", false, "over the network, though the BMC has a virtual drive")
	check := f.Bool("check", false, "tell what stands in the way, and do nothing")
	anyway := f.Bool("anyway", false, "in spite of what refuses it")
	wait := f.Bool("wait", false, "follow the steps until the machine boots")
	b := f.boot()
	rest, c, err := f.begin(args, 2, 2)
	if err != nil {
		return err
	}
	if err := b.check(f.usage); err != nil {
		return err
	}
	req := &computev1.BootIsoRequest{
		TenantId: c.tenant, Machine: rest[0], Iso: rest[1], Pxe: *pxe, Firmware: *b.firmware, Anyway: *anyway, Check: true, WindowS: b.seconds(), MaxBoots: uint32(*b.boots),
	}
	// What is known is told before anything is done.
	res, err := call(ctx, c.boots().BootIso, req)
	if err != nil {
		return err
	}
	told := std.err
	if *check && !f.json {
		told = std.out
	}
	if !f.json || !*check {
		fmt.Fprintf(told, "%s boots by %s, under %s\n", clean(rest[1]), clean(res.Way), clean(res.Firmware))
		for _, l := range res.Limits {
			mark := "note"
			if l.Refuses {
				mark = "refused"
			}
			fmt.Fprintf(told, "%s: %s\n", mark, clean(l.Text))
		}
	}
	if *check {
		if f.json {
			return printJSON(std.out, res)
		}
		return nil
	}
	req.Check = false
	if res, err = call(ctx, c.boots().BootIso, req); err != nil {
		return err
	}
	return started(ctx, c, f, std, res.WorkflowId, *wait)
}

func metalBootKernel(ctx context.Context, args []string, std stdio) error {
	f := newCall("metal boot-kernel MACHINE --kernel NAME|SHA256 [--uki] [--initrd NAME|SHA256] [--cmdline TEXT] [--firmware bios|uefi] [--window DURATION] [--max-boots N] [--wait]", std)
	f.about = "Boots raw artifacts (artifact import --format raw) over the network, which counts among what is destructive.\n" + assignsOnly
	kernel := f.String("kernel", "", "the artifact's `name` or SHA-256")
	uki := f.Bool("uki", false, "it is a unified kernel image, with initrd and command line inside")
	initrd := f.String("initrd", "", "the initrd's `name` or SHA-256")
	cmdline := f.String("cmdline", "", "the kernel's command `line`; it is no place for secrets")
	wait := f.Bool("wait", false, "follow the steps until the machine boots")
	b := f.boot()
	f.need("kernel")
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	if err := b.check(f.usage); err != nil {
		return err
	}
	res, err := call(ctx, c.boots().BootKernel, &computev1.BootKernelRequest{
		TenantId: c.tenant, Machine: rest[0], Kernel: *kernel, Uki: *uki, Initrd: *initrd, Cmdline: *cmdline,
		Firmware: *b.firmware, WindowS: b.seconds(), MaxBoots: uint32(*b.boots),
	})
	if err != nil {
		return err
	}
	return started(ctx, c, f, std, res.WorkflowId, *wait)
}

func metalBootDisk(ctx context.Context, args []string, std stdio) error {
	f := newCall("metal boot-disk MACHINE [--firmware bios|uefi] [--wait]", std)
	f.about = "Ends what boot-iso or boot-kernel began: the machine is switched off and starts from its own disk. A virtual drive keeps its image until metal media MACHINE eject.\n" +
		"Where the driver cannot choose what the machine boots (wol, manual), the machine is not switched: it gets its disk when it boots next."
	firmware := f.String("firmware", "", "the machine's firmware, `bios` or uefi (default: uefi)")
	wait := f.Bool("wait", false, "follow the steps to the end")
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.boots().BootDisk, &computev1.BootDiskRequest{TenantId: c.tenant, Machine: rest[0], Firmware: *firmware})
	if err != nil {
		return err
	}
	return started(ctx, c, f, std, res.WorkflowId, *wait)
}

func metalWipe(ctx context.Context, args []string, std stdio) error {
	f := newCall("metal wipe MACHINE --disk-serial SERIAL [--disk-serial SERIAL …] [--wait]", std)
	f.about = "Boots the ramdisk, clears the named disks whole, and turns the machine off. A disk that can discard is discarded, securely where it can;\nany other, and one that gives something back after it, is overwritten with zeros, which takes hours. The disks' own erase commands (NVMe format, ATA secure erase) are not used."
	var serials stringList
	f.Var(&serials, "disk-serial", "`serial` number of a disk that is cleared; may be given several times")
	wait := f.Bool("wait", false, "follow the steps to the end")
	f.need("disk-serial")
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.boots().Wipe, &computev1.WipeRequest{TenantId: c.tenant, Machine: rest[0], DiskSerials: serials})
	if err != nil {
		return err
	}
	return started(ctx, c, f, std, res.WorkflowId, *wait)
}
