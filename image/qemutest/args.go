package qemutest

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Args is the command line for a machine, without the program's name. Serial is
// on stdin and stdout, QMP on descriptor 3.
func Args(cfg Config) ([]string, error) {
	memory, cpus := cfg.MemoryMiB, cfg.CPUs
	if memory == 0 {
		memory = 1024
	}
	if cpus == 0 {
		cpus = 2
	}
	name := cfg.Name
	if name == "" {
		name = "vm"
	}
	machine, cpu, code := "q35,graphics=off", "max", codePath
	if cfg.ARM64 {
		if err := cfg.checkARM64(); err != nil {
			return nil, err
		}
		// Real pointer authentication is most of what the emulation would do.
		machine, cpu, code = "virt", "max,pauth-impdef=on", codeARM64Path
	}
	if cfg.SecureBoot != "" {
		if !cfg.UEFI || secureVars[cfg.SecureBoot] == "" {
			return nil, fmt.Errorf("secure boot %q: want UEFI and microsoft or snakeoil", cfg.SecureBoot)
		}
		machine, code = machine+",smm=on", secureCodePath
	}
	args := []string{
		"-name", escape(name),
		"-machine", machine,
		"-m", strconv.Itoa(memory),
		"-smp", strconv.Itoa(cpus),
		"-nodefaults", "-no-user-config", "-display", "none",
		"-chardev", "stdio,id=serial0,signal=off", "-serial", "chardev:serial0",
		"-chardev", "socket,id=qmp0,fd=3", "-mon", "chardev=qmp0,mode=control",
		"-rtc", "base=utc",
		"-object", "rng-random,id=rng0,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=rng0",
	}
	switch cfg.Accel {
	case "", "tcg":
		args = append(args, "-accel", "tcg,thread=multi", "-cpu", cpu)
	case "kvm":
		args = append(args, "-accel", "kvm", "-cpu", "host")
	default:
		return nil, fmt.Errorf("accelerator %q: want tcg or kvm", cfg.Accel)
	}
	if cfg.UEFI {
		args = append(args,
			"-drive", "if=pflash,format=raw,unit=0,readonly=on,file="+escape(code),
			"-drive", "if=pflash,format=raw,unit=1,file="+escape(cfg.Vars))
	}
	if cfg.SecureBoot != "" {
		// Without SMM's protection the variables, and so the keys, would be the system's to write.
		args = append(args, "-global", "driver=cfi.pflash01,property=secure,value=on", "-global", "ICH9-LPC.disable_s3=1")
	}
	if cfg.UUID != "" {
		args = append(args, "-uuid", cfg.UUID)
	}
	if cfg.SMBIOSSerial != "" {
		args = append(args, "-smbios", "type=1,serial="+escape(cfg.SMBIOSSerial))
	}
	if cfg.Kernel != "" {
		args = append(args, "-kernel", cfg.Kernel)
		if cfg.Initrd != "" {
			args = append(args, "-initrd", cfg.Initrd)
		}
		args = append(args, "-append", cfg.Cmdline)
	}
	if slices.ContainsFunc(cfg.Disks, func(d Disk) bool { return d.Bus == "scsi" }) {
		args = append(args, "-device", "virtio-scsi-pci,id=scsi0")
	}
	sata := 0
	for i, d := range cfg.Disks {
		drive, device, err := diskArgs(i, sata, d)
		if err != nil {
			return nil, fmt.Errorf("disk %d: %w", i, err)
		}
		if d.Bus == "sata" {
			sata++
		}
		args = append(args, "-drive", drive, "-device", device)
	}
	for i, n := range cfg.NICs {
		netdev, device, err := nicArgs(i, n)
		if err != nil {
			return nil, fmt.Errorf("network card %d: %w", i, err)
		}
		args = append(args, "-netdev", netdev, "-device", device)
	}
	if cfg.Watchdog {
		args = append(args, "-device", "i6300esb", "-action", "watchdog=reset")
	}
	if cfg.VGA {
		args = append(args, "-device", "VGA,id=vga0")
	}
	if cfg.NoReboot {
		args = append(args, "-no-reboot")
	}
	return append(args, cfg.Extra...), nil
}

// checkARM64 refuses what only a PC has.
func (cfg Config) checkARM64() error {
	for what, has := range map[string]bool{
		"a BIOS": !cfg.UEFI, "these Secure Boot keys": cfg.SecureBoot != "", "KVM here": cfg.Accel == "kvm",
		"an i6300esb": cfg.Watchdog, "a VGA": cfg.VGA,
		"SATA": slices.ContainsFunc(cfg.Disks, func(d Disk) bool { return d.Bus == "sata" }),
	} {
		if has {
			return fmt.Errorf("an arm64 machine has not %s", what)
		}
	}
	return nil
}

func diskArgs(i, sata int, d Disk) (drive, device string, err error) {
	if d.Path == "" {
		return "", "", errors.New("path is missing")
	}
	format := d.Format
	if format == "" {
		format = "raw"
	}
	drive = fmt.Sprintf("if=none,id=drive%d,format=%s,discard=unmap,file=%s", i, format, escape(d.Path))
	if d.ReadOnly {
		drive += ",readonly=on"
	}
	if d.Snapshot {
		drive += ",snapshot=on"
	}
	switch d.Bus {
	case "", "virtio":
		if len(d.Serial) > 20 {
			return "", "", fmt.Errorf("serial %q is over 20 bytes, virtio's limit", d.Serial)
		}
		device = "virtio-blk-pci"
	case "nvme":
		if d.Serial == "" {
			return "", "", errors.New("nvme needs a serial")
		}
		device = "nvme"
	case "sata":
		device = fmt.Sprintf("ide-hd,bus=ide.%d", sata)
	case "scsi":
		device = "scsi-hd,bus=scsi0.0"
	default:
		return "", "", fmt.Errorf("bus %q: want virtio, nvme, sata or scsi", d.Bus)
	}
	device += fmt.Sprintf(",id=disk%d,drive=drive%d", i, i)
	if d.Serial != "" {
		device += ",serial=" + escape(d.Serial)
	}
	if d.BootIndex > 0 {
		device += fmt.Sprintf(",bootindex=%d", d.BootIndex)
	}
	return drive, device, nil
}

func nicArgs(i int, n NIC) (netdev, device string, err error) {
	if n.Netdev == "" {
		return "", "", errors.New("netdev is missing")
	}
	kind, rest, more := strings.Cut(n.Netdev, ",")
	netdev = fmt.Sprintf("%s,id=net%d", kind, i)
	if more {
		netdev += "," + rest
	}
	model := n.Model
	if model == "" {
		model = "virtio-net-pci"
	}
	device = fmt.Sprintf("%s,id=nic%d,netdev=net%d", model, i, i)
	if n.MAC != "" {
		device += ",mac=" + n.MAC
	}
	switch n.ROM {
	case "":
	case "none":
		device += ",romfile="
	default:
		device += ",romfile=" + escape(n.ROM)
	}
	if n.BootIndex > 0 {
		device += fmt.Sprintf(",bootindex=%d", n.BootIndex)
	}
	return netdev, device, nil
}

// escape doubles commas, which end a value in QEMU's options.
func escape(s string) string { return strings.ReplaceAll(s, ",", ",,") }
