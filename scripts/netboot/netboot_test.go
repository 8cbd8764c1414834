package netboot

import (
	"bytes"
	"context"
	"fmt"
	"image/png"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/image/qemutest"
	"github.com/better-compute/site-appliance/pxe"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// firmware is what a machine boots by.
type firmware func() (qemutest.Config, qemutest.NIC)

// biosROM is SeaBIOS with QEMU's option ROM, which is an iPXE: to the box it is
// one of somebody else's.
func biosROM() (qemutest.Config, qemutest.NIC) { return qemutest.Config{}, qemutest.NIC{} }

// Without an option ROM the network boot is EDK2's own. What is turned off saves
// the minutes that it waits for nobody.
func edk2PXE() (qemutest.Config, qemutest.NIC) {
	return qemutest.Config{UEFI: true, Extra: without("IPv6PXESupport")}, qemutest.NIC{ROM: "none"}
}

func edk2HTTP() (qemutest.Config, qemutest.NIC) {
	return qemutest.Config{UEFI: true, Extra: without("IPv4PXESupport", "IPv6PXESupport")}, qemutest.NIC{ROM: "none"}
}

// edk2PXE6 asks over IPv6 only; what it starts asks over both.
func edk2PXE6() (qemutest.Config, qemutest.NIC) {
	return qemutest.Config{UEFI: true, Extra: without("IPv4PXESupport")}, qemutest.NIC{ROM: "none"}
}

// withScreen adds one, for what draws.
func withScreen(by firmware) firmware {
	return func() (qemutest.Config, qemutest.NIC) {
		cfg, nic := by()
		cfg.VGA = true
		return cfg, nic
	}
}

// securePXE has Secure Boot on, with the keys of PCs.
func securePXE() (qemutest.Config, qemutest.NIC) {
	cfg, nic := edk2PXE()
	cfg.SecureBoot = "microsoft"
	return cfg, nic
}

func arm64PXE() (qemutest.Config, qemutest.NIC) {
	cfg, nic := edk2PXE()
	cfg.ARM64 = true
	return cfg, nic
}

func without(features ...string) (args []string) {
	for _, f := range features {
		args = append(args, "-fw_cfg", "name=opt/org.tianocore/"+f+",string=n")
	}
	return args
}

// cell is one machine's boot.
type cell struct {
	name string
	// long cells are rows of make soak.
	long bool
	// needs says what is missing for it on this computer, if anything.
	needs func() error
	on    wire
	by    firmware
	// unplugged is the model of a NIC that comes before and has no link; empty: there is none.
	unplugged string
	// boots puts into the assignment what the machine boots.
	boots func(t *testing.T, l *lab, m *pxev1.Machine)
	// beside starts what else is on the wire.
	beside func(t *testing.T)
	// stages must come in this order; none that begins with one of never.
	stages, never []string
	// says is what the machine's console says in the end.
	says string
	// then is done after that.
	then func(t *testing.T, l *lab, r *running)
}

// running is a cell's machine.
type running struct {
	*qemutest.VM
	machine *pxev1.Machine
	seen    int // how many of its stages were looked at
}

func (r *running) mac() string { return r.machine.Macs[0] }

// cells are the matrix. The box's image, one box, and machines one after another.
var cells = []cell{
	{
		name: "BIOS iPXE ROM chained to ours", on: lan, by: biosROM, boots: ramdisk,
		stages: []string{"dhcp ipxe bios foreign agent: ", "tftp undionly.kpxe", "dhcp ipxe bios agent: ", "script agent: ", "kernel", "initrd", "boot window w1"},
		never:  []string{"http-loader"},
		says:   "Linux version ",
		then:   explained,
	},
	{
		name: "EDK2 PXE", on: lan, by: edk2PXE, boots: ramdisk,
		stages: []string{"dhcp pxe uefi-x64 agent: ", "tftp snponly.efi", "dhcp ipxe uefi-x64 agent: ", "script agent: ", "kernel", "initrd", "boot window w1"},
		never:  []string{"http-loader", "dhcp http-boot"},
		says:   "Linux version ",
	},
	{
		name: "EDK2 HTTP boot", on: lan, by: edk2HTTP, boots: ramdisk,
		stages: []string{"dhcp http-boot uefi-x64 agent: ", "http-loader snponly.efi", "dhcp ipxe uefi-x64 agent: ", "script agent: ", "kernel", "initrd", "boot window w1"},
		never:  []string{"tftp", "dhcp pxe"},
		says:   "Linux version ",
	},
	{
		name: "sanboot in BIOS", on: lan, by: biosROM, boots: ownDisc,
		stages: []string{"dhcp ipxe bios foreign sanboot-iso: ", "tftp undionly.kpxe", "dhcp ipxe bios sanboot-iso: ", "script sanboot-iso: ", "iso window w1"},
		says:   saysBIOS,
	},
	{
		name: "sanboot in UEFI", long: true, on: lan, by: edk2PXE, boots: ownDisc,
		stages: []string{"dhcp pxe uefi-x64 sanboot-iso: ", "tftp snponly.efi", "dhcp ipxe uefi-x64 sanboot-iso: ", "script sanboot-iso: ", "iso window w1"},
		never:  []string{"http-loader"},
		says:   saysUEFI,
	},
	{
		name: "http-iso", on: lan, by: edk2HTTP, boots: ownDisc,
		stages: []string{"dhcp http-boot uefi-x64 http-iso: ", "iso window w1"},
		never:  []string{"tftp", "http-loader", "script", "dhcp ipxe"},
		says:   saysUEFI,
	},
	{
		name: "proxy BIOS", long: true, on: proxy, by: biosROM, boots: ramdisk, beside: leasesOnly,
		stages: []string{"dhcp ipxe bios foreign agent: ", "tftp undionly.kpxe", "dhcp ipxe bios agent: ", "script agent: ", "kernel", "initrd", "boot window w1"},
		says:   "Linux version ",
		then:   leasedByOther,
	},
	{
		name: "proxy UEFI", long: true, on: proxy, by: edk2PXE, boots: ramdisk, beside: leasesOnly,
		stages: []string{"dhcp pxe uefi-x64 agent: ", "tftp snponly.efi", "dhcp ipxe uefi-x64 agent: ", "script agent: ", "kernel", "initrd", "boot window w1"},
		says:   "Linux version ",
		then:   leasedByOther,
	},
	{
		name: "relay", long: true, on: far, by: edk2PXE, boots: ramdisk, beside: relaying,
		stages: []string{"dhcp pxe uefi-x64 agent: ", "tftp snponly.efi", "dhcp ipxe uefi-x64 agent: ", "script agent: ", "kernel", "initrd", "boot window w1"},
		says:   "Linux version ",
		then:   addressed("10.80.0.1"),
	},
	{
		name: "kernel of the store", long: true, on: lan, by: edk2PXE, boots: kernel,
		stages: []string{"dhcp pxe uefi-x64 kernel: ", "tftp snponly.efi", "dhcp ipxe uefi-x64 kernel: ", "script kernel: ", "kernel window w1", "initrd window w1"},
		says:   " initrd=initrd.img console=ttyS0 of.the.test=1",
	},
	{
		name: "unified kernel image", long: true, on: lan, by: edk2HTTP, boots: uki,
		stages: []string{"dhcp http-boot uefi-x64 uki: ", "uki window w1"},
		never:  []string{"tftp", "http-loader", "script"},
		says:   saysUEFI,
	},
	{
		name: "local disk in BIOS", long: true, on: lan, by: biosROM, boots: localDisk,
		stages: []string{"dhcp ipxe bios foreign local-disk: ", "script local-disk: "},
		never:  []string{"tftp"},
		says:   "Booting from the local disk",
	},
	{
		name: "local disk in EDK2", long: true, on: lan, by: edk2PXE, boots: localDisk,
		// It takes no address of an offer without a boot file: there is no stage.
		never: []string{"dhcp", "tftp", "http-loader", "script"},
		says:  ">>Start HTTP Boot over IPv6",
		then:  leftAlone,
	},
	{
		name: "ipxe.iso in BIOS", long: true, on: lan, by: biosROM, needs: files(ipxeISO), boots: disc(ipxeISO),
		stages: []string{"script sanboot-iso: ", "iso window w1"},
		says:   "ISOLINUX ",
	},
	{
		name: "ipxe.iso in UEFI", long: true, on: lan, by: edk2HTTP, needs: files(ipxeISO), boots: disc(ipxeISO),
		stages: []string{"dhcp http-boot uefi-x64 http-iso: ", "iso window w1", "dhcp ipxe uefi-x64 "},
		never:  []string{"tftp", "http-loader"},
		says:   "iPXE ",
	},
	{
		name: "memtest86+ in UEFI", long: true, on: lan, by: withScreen(edk2HTTP), needs: files(memtestISO), boots: disc(memtestISO),
		stages: []string{"dhcp http-boot uefi-x64 http-iso: ", "iso window w1"},
		never:  []string{"tftp", "http-loader"},
		then:   turnsBlue,
	},
	{
		name: "GRUB rescue disc in BIOS", long: true, on: lan, by: biosROM, needs: files(grubMkrescue, grubModules, xorriso), boots: rescueDisc,
		stages: []string{"script sanboot-iso: ", "iso window w1"},
		says:   rescueSays,
	},
	{
		name: "GRUB rescue disc in UEFI", long: true, on: lan, by: edk2PXE, needs: files(grubMkrescue, grubModulesEFI, xorriso), boots: rescueDisc,
		stages: []string{"script sanboot-iso: ", "iso window w1"},
		says:   rescueSays,
	},
	{
		name: "Secure Boot", long: true, on: lan, by: securePXE, needs: files(signedShim, signedGRUB), boots: by("shim", ramdisk),
		stages: []string{"dhcp pxe uefi-x64 agent: ", "tftp shimx64.efi", "tftp grubx64.efi", "script ", "kernel", "initrd", "boot window w1"},
		never:  []string{"dhcp ipxe", "tftp snponly.efi"},
		says:   "Secure boot enabled",
	},
	{
		name: "arm64 EDK2", long: true, on: lan, by: arm64PXE, needs: arm64, boots: ramdisk,
		stages: []string{"dhcp pxe uefi-arm64 agent: ", "tftp grubnetaa64.efi", "script ", "kernel", "initrd", "boot window w1"},
		says:   "Linux version ",
	},
	{
		name: "first NIC without link in BIOS", long: true, on: lan, by: biosROM, unplugged: "e1000", boots: noKernel,
		stages: []string{"dhcp ipxe bios foreign kernel: ", "tftp undionly.kpxe", "dhcp ipxe bios kernel: ", "script kernel: ", "kernel window w1"},
		says:   "Waiting for link-up on net0",
		then:   recovers,
	},
	{
		name: "first NIC without link in EDK2", long: true, on: lan, by: edk2PXE, unplugged: "virtio-net-pci", boots: by("ipxe", noKernel),
		stages: []string{"dhcp pxe uefi-x64 kernel: ", "tftp ipxe.efi", "dhcp ipxe uefi-x64 kernel: ", "script kernel: ", "kernel window w1"},
		says:   "UEFI PXEv4 (MAC:5254000001",
		then:   recovers,
	},
	{
		name: "EDK2 PXE over IPv6", long: true, on: lan, by: edk2PXE6, boots: ramdisk,
		stages: []string{"dhcp pxe uefi-x64 agent: ", "tftp snponly.efi", "dhcp ipxe uefi-x64 agent: ", "script agent: ", "kernel", "initrd", "boot window w1"},
		never:  []string{"http-loader", "dhcp http-boot"},
		says:   "Linux version ",
		then:   overIPv6,
	},
}

// What is there only where its Debian package is, and the package.
var (
	ipxeISO        = debian{"ipxe", "/usr/lib/ipxe/ipxe.iso"}
	memtestISO     = debian{"memtest86+", "/boot/memtest86+x64.iso"}
	grubMkrescue   = debian{"grub-common", "/usr/bin/grub-mkrescue"}
	grubModules    = debian{"grub-pc-bin", "/usr/lib/grub/i386-pc/moddep.lst"}
	grubModulesEFI = debian{"grub-efi-amd64-bin", "/usr/lib/grub/x86_64-efi/moddep.lst"}
	xorriso        = debian{"xorriso", "/usr/bin/xorriso"}
	signedShim     = debian{"shim-signed", "/usr/lib/shim/shimx64.efi.signed"}
	signedGRUB     = debian{"grub-efi-amd64-signed", "/usr/lib/grub/x86_64-efi-signed/grubnetx64.efi.signed"}
	arm64GRUB      = debian{"grub-efi-arm64-bin", "/usr/lib/grub/arm64-efi/monolithic/grubnetaa64.efi"}
)

type debian struct{ pkg, path string }

func files(all ...debian) func() error {
	return func() error {
		for _, f := range all {
			if _, err := os.Stat(f.path); err != nil {
				return fmt.Errorf("%s is not there: install package %s", f.path, f.pkg)
			}
		}
		return nil
	}
}

func arm64() error {
	if err := qemutest.AvailableARM64(); err != nil {
		return err
	}
	return files(arm64GRUB)()
}

// TestCells boots each cell's machine from one box, which stays up.
func TestCells(t *testing.T) {
	l := start(t)
	for i, c := range cells {
		t.Run(c.name, func(t *testing.T) {
			if c.long && os.Getenv("BC_QEMU_LONG") == "" {
				t.Skip("runs in make soak: BC_QEMU_LONG is not set")
			}
			if c.needs != nil {
				if err := c.needs(); err != nil {
					t.Skipf("needs what not every computer has: %v", err)
				}
			}
			c.run(t, l, i+1)
		})
	}
}

func (c cell) run(t *testing.T, l *lab, n int) {
	m := &pxev1.Machine{
		MachineId: fmt.Sprint("node_", n), Name: fmt.Sprint("machine-", n), Macs: []string{fmt.Sprintf("52:54:00:00:02:%02x", n)},
		WindowId: "w1", WindowUntilMs: time.Now().Add(2 * time.Hour).UnixMilli(), RamBytes: 1 << 30,
	}
	c.boots(t, l, m)
	if c.beside != nil {
		c.beside(t)
	}
	l.assign(t, m)
	cfg, nic := c.by()
	cfg.Name, cfg.Dir, cfg.MemoryMiB = "machine", t.TempDir(), int(m.RamBytes>>20)
	cfg.UUID = fmt.Sprintf("6f0c7a52-0001-4bc0-9d11-0000000000%02x", n)
	nic.Netdev, nic.MAC, nic.BootIndex = tap(c.on.machinePort()), m.Macs[0], 1
	cfg.NICs = []qemutest.NIC{nic}
	if c.unplugged != "" {
		cfg.NICs[0].BootIndex = 2
		cfg.NICs = slices.Insert(cfg.NICs, 0, qemutest.NIC{Netdev: "hubport,hubid=0", MAC: strings.Replace(nic.MAC, ":02:", ":01:", 1),
			Model: c.unplugged, ROM: nic.ROM, BootIndex: 1})
	}
	began := time.Now()
	vm, err := qemutest.Start(t.Context(), cfg)
	check(t, err)
	if c.unplugged != "" {
		_, err := vm.QMP(t.Context(), "set_link", map[string]any{"name": "nic0", "up": false})
		check(t, err)
	}
	r := &running{VM: vm, machine: m}
	t.Cleanup(func() {
		_ = vm.Close()
		if t.Failed() {
			l.tell(t, r)
		}
	})
	for _, want := range c.stages {
		r.await(t, l, want)
	}
	if c.says != "" {
		check(t, vm.WaitMarker(t.Context(), c.says, quiet))
	}
	t.Logf("%-40s %5.0f s", c.name, time.Since(began).Seconds())
	if c.then != nil {
		c.then(t, l, r)
	}
	all, _ := l.stages.of(r.mac())
	for _, s := range all {
		for _, never := range c.never {
			if strings.HasPrefix(line(s), never) {
				t.Errorf("stage %q came, want none of %q", line(s), never)
			}
		}
	}
}

// await waits for the machine's next stage that begins with want.
func (r *running) await(t *testing.T, l *lab, want string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		_ = r.Wait(ctx)
		cancel() // a machine that is gone will not come
	}()
	n, err := l.stages.wait(ctx, r.mac(), r.seen, want)
	if err != nil {
		t.Fatalf("stage %q: %v", want, err)
	}
	r.seen = n
}

// tell says what both sides know of a boot that failed.
func (l *lab) tell(t *testing.T, r *running) {
	all, _ := l.stages.of(r.mac())
	for _, s := range all {
		t.Logf("stage: %s", line(s))
	}
	t.Logf("the machine's console ends:\n%s", r.Tail(40))
	if l.box.Running() {
		x := l.explain(t, r.mac())
		for _, a := range x.Attempts {
			for _, step := range a.Steps {
				t.Logf("the box noted at %s: %s", time.UnixMilli(step.AtMs).UTC().Format(time.TimeOnly), line(pxe.Stage{Stage: step.Stage, Client: step.Client, Detail: step.Detail}))
			}
		}
		t.Logf("the box waits for: %s\nsyslog: %s", x.WaitsFor, strings.Join(x.Syslog, "\n"))
	}
}

func ramdisk(_ *testing.T, _ *lab, m *pxev1.Machine) {
	m.Action, m.Purpose = pxev1.Action_ACTION_RAMDISK, "inspect"
}

func localDisk(_ *testing.T, _ *lab, m *pxev1.Machine) {
	m.Action, m.WindowId, m.WindowUntilMs = pxev1.Action_ACTION_LOCAL_DISK, "", 0
}

// by is another boot program than the usual before what is booted.
func by(loader string, boots func(*testing.T, *lab, *pxev1.Machine)) func(*testing.T, *lab, *pxev1.Machine) {
	return func(t *testing.T, l *lab, m *pxev1.Machine) {
		t.Helper()
		boots(t, l, m)
		m.Loader = loader
	}
}

// kernel boots the ramdisk's as one that a person stored.
func kernel(t *testing.T, l *lab, m *pxev1.Machine) {
	m.Action, m.Purpose = pxev1.Action_ACTION_KERNEL, "boot"
	m.Kernel = &pxev1.Kernel{
		Sha256:       l.store(t, "kernel", filepath.Join(imageDir, "ramdisk/vmlinuz")).SHA256,
		InitrdSha256: l.store(t, "initrd", filepath.Join(imageDir, "ramdisk/initrd")).SHA256,
		Cmdline:      "console=ttyS0 of.the.test=1",
	}
}

// noKernel is what no iPXE starts: too large for a boot sector, and nothing else.
func noKernel(t *testing.T, l *lab, m *pxev1.Machine) {
	path := filepath.Join(t.TempDir(), "none")
	check(t, os.WriteFile(path, bytes.Repeat([]byte("none"), 256<<10), 0o644))
	m.Action, m.Purpose = pxev1.Action_ACTION_KERNEL, "boot"
	m.Kernel = &pxev1.Kernel{Sha256: l.store(t, "none", path).SHA256}
}

// recovers gives a machine whose boot has failed the ramdisk. Its script finds it by
// asking again as the port that booted, which needs no other address for that.
func recovers(t *testing.T, l *lab, r *running) {
	t.Helper()
	check(t, r.WaitMarker(t.Context(), "Boot failed, asking again", quiet))
	r.machine.Kernel = nil
	ramdisk(t, l, r.machine)
	l.assign(t, r.machine)
	failed := r.seen
	for _, want := range []string{"script agent: ", "kernel", "initrd", "boot window w1"} {
		r.await(t, l, want)
	}
	all, _ := l.stages.of(r.mac())
	for _, s := range all[failed:r.seen] {
		if s.Stage == "dhcp" {
			t.Errorf("stage %q came after the boot failed, want the script by the port that has its address", line(s))
		}
	}
	check(t, r.WaitMarker(t.Context(), "Linux version ", quiet))
}

// uki boots an image that firmware starts by itself; what is in it is not its concern.
func uki(t *testing.T, l *lab, m *pxev1.Machine) {
	path := filepath.Join(t.TempDir(), "image.efi")
	check(t, os.WriteFile(path, uefiProgram(2<<20), 0o644))
	m.Action, m.Purpose = pxev1.Action_ACTION_UKI, "boot"
	m.Kernel = &pxev1.Kernel{Sha256: l.store(t, "image", path).SHA256}
}

// bootDisc makes the machine boot a disc image, in as much memory as that takes.
func (l *lab) bootDisc(t *testing.T, m *pxev1.Machine, name, path string) {
	t.Helper()
	m.Action, m.Purpose, m.RamBytes = pxev1.Action_ACTION_ISO, "iso", 2<<30
	a := l.store(t, name, path)
	m.Iso = &pxev1.Iso{Sha256: a.SHA256, Size: a.SizeBytes, Name: name, Class: pxev1.IsoClass_ISO_CLASS_SELF_CONTAINED}
}

// ownDisc is the test's own disc image.
func ownDisc(t *testing.T, l *lab, m *pxev1.Machine) { l.bootDisc(t, m, "own-disc", makeDisc(t)) }

// disc is somebody else's.
func disc(f debian) func(*testing.T, *lab, *pxev1.Machine) {
	return func(t *testing.T, l *lab, m *pxev1.Machine) {
		t.Helper()
		l.bootDisc(t, m, strings.TrimRight(f.pkg, "+"), f.path)
	}
}

const rescueSays = "GRUB has its configuration from the disc"

// rescueDisc is what grub-mkrescue makes. Its configuration is read by GRUB's own
// drivers, from the drive that it booted from.
func rescueDisc(t *testing.T, l *lab, m *pxev1.Machine) {
	t.Helper()
	dir := t.TempDir()
	check(t, os.MkdirAll(filepath.Join(dir, "tree/boot/grub"), 0o755))
	check(t, os.WriteFile(filepath.Join(dir, "tree/boot/grub/grub.cfg"),
		[]byte("serial --unit=0 --speed=115200\nterminal_output serial console\necho \""+rescueSays+"\"\nsleep 3600\n"), 0o644))
	path := filepath.Join(dir, "rescue.iso")
	out, err := exec.CommandContext(t.Context(), grubMkrescue.path, "-o", path, filepath.Join(dir, "tree")).CombinedOutput()
	if err != nil {
		t.Fatalf("grub-mkrescue: %v\n%s", err, out)
	}
	l.bootDisc(t, m, "grub-rescue", path)
}

// turnsBlue waits until most of the screen is blue, as memtest86+ paints it and no
// firmware does.
func turnsBlue(t *testing.T, _ *lab, r *running) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "screen.png")
	share := 0
	for end := time.Now().Add(qemutest.Slack * quiet); time.Now().Before(end); time.Sleep(time.Second) {
		check(t, r.Screen(t.Context(), path))
		f, err := os.Open(path)
		check(t, err)
		img, err := png.Decode(f)
		f.Close()
		check(t, err)
		blue, all := 0, 0
		for y := img.Bounds().Min.Y; y < img.Bounds().Max.Y; y++ {
			for x := img.Bounds().Min.X; x < img.Bounds().Max.X; x++ {
				red, green, b, _ := img.At(x, y).RGBA()
				if all++; b > 0x8000 && red < 0x4000 && green < 0x4000 {
					blue++
				}
			}
		}
		if share = 100 * blue / max(all, 1); share > 50 {
			return
		}
	}
	t.Errorf("%d %% of the screen are blue, want most", share)
}

func dnsmasq(t *testing.T, args ...string) {
	t.Helper()
	const program = "/usr/sbin/dnsmasq"
	if _, err := os.Stat(program); err != nil {
		t.Skipf("needs package dnsmasq-base: %v", err)
	}
	spawn(t, append([]string{program, "--keep-in-foreground", "--conf-file=/dev/null", "--port=0", "--no-ping", "--log-dhcp", "--log-facility=-",
		"--dhcp-leasefile=" + filepath.Join(t.TempDir(), "leases"), "--pid-file=", "--user=root", "--bind-interfaces"}, args...)...)
}

// leasesOnly is the DHCP server of a network that knows nothing of booting.
func leasesOnly(t *testing.T) {
	dnsmasq(t, "--interface=br-"+proxy.name, "--dhcp-authoritative", "--dhcp-range=10.78.0.100,10.78.0.150,1h")
}

// relaying passes what machines far away ask on to the box.
func relaying(t *testing.T) {
	dnsmasq(t, "--interface=br-"+far.name, "--interface=br-"+relay.name, "--dhcp-relay=10.80.0.1,10.79.0.1")
}

// leasedByOther checks that the box gave the boot and not the address.
func leasedByOther(t *testing.T, l *lab, r *running) { addressed("10.78.0.1")(t, l, r) }

// addressed checks that the machine's address begins so.
func addressed(prefix string) func(*testing.T, *lab, *running) {
	return func(t *testing.T, l *lab, r *running) {
		t.Helper()
		all, _ := l.stages.of(r.mac())
		for _, s := range all {
			if s.IP != "" && !strings.HasPrefix(s.IP, prefix) {
				t.Errorf("stage %s has address %s, want %s…", line(s), s.IP, prefix)
			}
		}
	}
}

// overIPv6 checks that the firmware came by the address that its MAC gives it.
func overIPv6(t *testing.T, l *lab, r *running) {
	t.Helper()
	b, err := net.ParseMAC(r.mac())
	check(t, err)
	want := fmt.Sprintf("fd00:77::%x%02x:%x:%x:%x", b[0], b[1], int(b[2])<<8, b[3], int(b[4])<<8|int(b[5]))
	all, _ := l.stages.of(r.mac())
	for _, s := range all {
		if strings.HasPrefix(line(s), "dhcp pxe ") || strings.HasPrefix(line(s), "tftp ") {
			if s.IP != want {
				t.Errorf("stage %s has address %s, want %s", line(s), s.IP, want)
			}
		}
	}
}

// explained checks that the box's own account has what happened.
func explained(t *testing.T, l *lab, r *running) {
	t.Helper()
	x := l.explain(t, r.mac())
	if x.MachineId != r.machine.MachineId || len(x.Attempts) == 0 {
		t.Fatalf("explain = %v, want machine %s and its boot", x, r.machine.MachineId)
	}
	var steps []string
	for _, s := range x.Attempts[len(x.Attempts)-1].Steps {
		steps = append(steps, s.Stage)
	}
	const want = "tftp script kernel initrd boot"
	if got := strings.Join(steps, " "); !inOrder(steps, strings.Fields(want)) {
		t.Errorf("explain has the stages %s, want %s", got, want)
	}
}

// leftAlone checks that the box's own account says why the machine got nothing.
func leftAlone(t *testing.T, l *lab, r *running) {
	t.Helper()
	x := l.explain(t, r.mac())
	for _, client := range []string{"pxe uefi-x64", "http-boot uefi-x64"} {
		if !slices.ContainsFunc(x.Attempts, func(a *pxev1.Attempt) bool {
			return slices.ContainsFunc(a.Steps, func(s *pxev1.Step) bool {
				return s.Stage == "dhcp" && s.Client == client && strings.HasPrefix(s.Detail, "local-disk: ")
			})
		}) {
			t.Errorf("explain has no %s that was sent to its disk: %v", client, x.Attempts)
		}
	}
}

// inOrder says whether want is in have, in that order.
func inOrder(have, want []string) bool {
	for _, s := range have {
		if len(want) > 0 && s == want[0] {
			want = want[1:]
		}
	}
	return len(want) == 0
}
