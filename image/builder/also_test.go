package builder

import (
	"bytes"
	"debug/elf"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/board"
	"github.com/better-compute/site-appliance/image/authenticode"
	"github.com/better-compute/site-appliance/image/manifest"
	"github.com/better-compute/site-appliance/initramfs/archive"
)

// pack makes a Debian package of files.
func pack(t *testing.T, to, name, version, arch string, files map[string]string) {
	t.Helper()
	root := t.TempDir()
	files["DEBIAN/control"] = "Package: " + name + "\nVersion: " + version + "\nArchitecture: " + arch + "\nMaintainer: nobody <nobody@example.com>\nDescription: test\n"
	for path, text := range files {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.Command("dpkg-deb", "--root-owner-group", "-b", root, filepath.Join(to, name+"_"+version+"_"+arch+".deb")).CombinedOutput(); err != nil {
		t.Fatalf("dpkg-deb: %v: %s", err, out)
	}
}

// alsoBuild is a run with a board that has arm64 beside it; lock is its packages.lock.
func alsoBuild(t *testing.T, log io.Writer, lock string) *build {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, lockFile), []byte(lock), 0o644); err != nil {
		t.Fatal(err)
	}
	o := Options{Root: root, Out: t.TempDir(), Cache: t.TempDir(), Version: "1", Built: time.Unix(1767225600, 0), Agent: standIn, Quick: true, Log: slog.New(slog.NewTextHandler(log, nil))}
	return &build{Options: o, work: t.TempDir(), bin: map[string]string{}, m: &manifest.Manifest{Parts: map[string]int64{}},
		board: &board.Board{Dir: dir, Arch: "amd64", Programs: board.PerRole{Ramdisk: []string{"/usr/sbin/mke2fs"}}, Also: map[string]board.Also{"arm64": {
			Kernel: "linux-image-arm64", Netboot: map[string]string{"grub/grubnetaa64.efi": "grub-efi-arm64-bin:/usr/lib/grub/grubnetaa64.efi"},
			Modules: board.Modules{Load: []string{"vfat"}, Common: []string{"vfat", "not_of_arm64"}},
		}}}}
}

// TestAlsoARM64 makes the ramdisk for arm64 of packages as Debian's are laid out.
func TestAlsoARM64(t *testing.T) {
	for _, p := range []string{"dpkg-deb", depmod(), "go"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("needs %s", p)
		}
	}
	debs := t.TempDir()
	const image, grub = "linux-image-6.1.0-1-arm64", "grub-efi-arm64-bin"
	pack(t, debs, image, "6.1-1", "arm64", map[string]string{
		"boot/vmlinuz-6.1.0-1-arm64": "an arm64 kernel", "lib/modules/6.1.0-1-arm64/kernel/vfat.ko": "",
		"lib/modules/6.1.0-1-arm64/modules.builtin": "", "lib/modules/6.1.0-1-arm64/modules.builtin.modinfo": "", "lib/modules/6.1.0-1-arm64/modules.order": "kernel/vfat.ko\n",
	})
	pack(t, debs, grub, "2.06-1", "arm64", map[string]string{"usr/lib/grub/grubnetaa64.efi": "a GRUB"})
	lock := ""
	for _, name := range []string{image + "_6.1-1_arm64.deb", grub + "_2.06-1_arm64.deb"} {
		sum, err := digest(filepath.Join(debs, name))
		if err != nil {
			t.Fatal(err)
		}
		pkg, version, _ := packageOf(name)
		lock += pkg + " " + version + " " + sum + "\n"
	}
	var log bytes.Buffer
	b := alsoBuild(t, &log, lock+"linux-image-6.1.0-1-amd64 6.1-1 "+strings.Repeat("a", 64)+"\n")
	if err := os.Rename(debs, filepath.Join(b.Cache, "debs")); err != nil {
		t.Fatal(err)
	}
	if err := b.makeAlso(t.Context()); err != nil {
		t.Fatalf("makeAlso = %v", err)
	}
	if string(b.also["grub/grubnetaa64.efi"]) != "a GRUB" || string(b.also["ramdisk-arm64/vmlinuz"]) != "an arm64 kernel" {
		t.Fatalf("made %q and %q; the log:\n%s", b.also["grub/grubnetaa64.efi"], b.also["ramdisk-arm64/vmlinuz"], log.String())
	}
	if got := b.alsoFiles(); !slices.Equal(got, []string{"ramdisk-arm64/initrd", "ramdisk-arm64/vmlinuz"}) {
		t.Errorf("files for the manifest = %q", got)
	}
	for _, name := range b.alsoFiles() {
		if data, err := os.ReadFile(filepath.Join(b.Out, name)); err != nil || !bytes.Equal(data, b.also[name]) {
			t.Errorf("%s in the folder of the build: %d bytes, %v", name, len(data), err)
		}
	}
	if b.board.Arch != "amd64" || b.kernel != nil || len(b.bin) != 0 {
		t.Errorf("the main build was changed: %s, %v, %v", b.board.Arch, b.kernel, b.bin)
	}
	if len(b.m.Packages) != 2 || !b.m.Packages[0].Locked || !b.m.Packages[1].Locked || b.m.Parts["arm64 bcd"] == 0 {
		t.Errorf("the manifest has %+v and %v", b.m.Packages, b.m.Parts)
	}
	if !strings.Contains(log.String(), "no such modules") || !strings.Contains(log.String(), "not_of_arm64") {
		t.Errorf("the module that the kernel does not know is not told of:\n%s", log.String())
	}
	found := map[string]bool{}
	for _, r := range contents(t, b.also["ramdisk-arm64/initrd"]) {
		found[r.Name] = true
		if r.Name != "init" && r.Name != "bin/bcd" {
			continue
		}
		f, err := elf.NewFile(r)
		if err != nil || f.Machine != elf.EM_AARCH64 {
			t.Errorf("%s is %v, %v, want a program for arm64", r.Name, f, err)
		}
	}
	for name, want := range map[string]bool{"init": true, "bin/bcd": true, "lib/modules/6.1.0-1-arm64/kernel/vfat.ko": true, "usr/sbin/mke2fs": false} {
		if found[name] != want {
			t.Errorf("%s is in the ramdisk: %v, want %v", name, found[name], want)
		}
	}
}

// TestAlsoWithoutPackages: no line to Debian leaves the ramdisk out, said aloud.
func TestAlsoWithoutPackages(t *testing.T) {
	path := t.TempDir()
	for _, name := range []string{"apt-get", "apt-cache"} {
		if err := os.WriteFile(filepath.Join(path, name), []byte("#!/bin/sh\necho \"E: no line, by $APT_CONFIG\" >&2\nexit 100\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", path+":"+os.Getenv("PATH"))
	var log bytes.Buffer
	b := alsoBuild(t, &log, "")
	if err := b.makeAlso(t.Context()); err != nil || len(b.also) != 0 {
		t.Fatalf("makeAlso = %v, %v, want nothing", b.also, err)
	}
	if !strings.Contains(log.String(), "NOTICE: the ramdisk for another architecture is left out") || !strings.Contains(log.String(), "no line, by "+filepath.Join(b.Cache, "apt-arm64/apt.conf")) {
		t.Errorf("the log does not say so, or another place of apt's was used:\n%s", log.String())
	}
}

// TestOptional: with shim goes a kernel that Secure Boot starts, or no image.
func TestOptional(t *testing.T) {
	there := filepath.Join(t.TempDir(), "shim")
	if err := os.WriteFile(there, []byte("a shim"), 0o644); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	b := alsoBuild(t, &log, "")
	b.kernel = &kernel{release: "6.1-x", image: []byte("MZ, and no more")}
	b.board.NetbootOptional = map[string]string{"grub/shimx64.efi": there + "-not"}
	tree := archive.New()
	if err := b.addOptional(tree); err != nil || tree.Has(netbootDir+"grub/shimx64.efi") {
		t.Errorf("addOptional of what is not there = %v", err)
	}
	if !strings.Contains(log.String(), "NOTICE: a boot program is left out") {
		t.Errorf("the log does not say so:\n%s", log.String())
	}
	b.board.NetbootOptional["grub/shimx64.efi"] = there
	if err := b.addOptional(tree); err == nil || !strings.Contains(err.Error(), "6.1-x for machines with Secure Boot") {
		t.Errorf("addOptional with a kernel that is not signed = %v", err)
	}
	b.kernel.image = theKernel(t)
	if err := b.addOptional(tree); err != nil || !tree.Has(netbootDir+"grub/shimx64.efi") {
		t.Errorf("addOptional with Debian's kernel = %v", err)
	}
}

// theKernel is the one that the board is locked to, out of the cache.
func theKernel(t *testing.T) []byte {
	t.Helper()
	images(t)
	lock, err := readLock("../../board/qemu-amd64/" + lockFile)
	if err != nil {
		t.Fatal(err)
	}
	for name, l := range lock {
		if release, ok := strings.CutPrefix(name, "linux-image-"); ok && strings.HasSuffix(name, "-amd64") {
			image, err := os.ReadFile(filepath.Join(DefaultCache("../.."), "kernel-"+l.sha256[:16], "boot", "vmlinuz-"+release))
			if err != nil {
				t.Skipf("needs the kernel that the board is locked to: %v", err)
			}
			return image
		}
	}
	t.Fatal("the board is locked to no kernel")
	return nil
}

// TestKernelIsSigned: the ramdisk's kernel is Debian's, as signed as it came.
func TestKernelIsSigned(t *testing.T) {
	image := theKernel(t)
	got, err := authenticode.Of(image)
	if err != nil || len(got) != 1 || got[0].Issuer != "CN=Debian Secure Boot CA" || got[0].Signer == nil || !strings.HasPrefix(got[0].Signer.Subject.CommonName, "Debian Secure Boot Signer") {
		t.Fatalf("Of the kernel = %+v, %v, want Debian's signature", got, err)
	}
	served, err := os.ReadFile(filepath.Join(images(t), RamdiskKernel))
	if err != nil {
		t.Fatal(err)
	}
	if signed, err := authenticode.Of(served); err != nil || len(signed) == 0 {
		t.Errorf("what the box serves = %v, %v, want it signed", signed, err)
	}
	image[0x1000] ^= 1
	if _, err := authenticode.Of(image); err == nil || errors.Is(err, authenticode.ErrUnsigned) {
		t.Errorf("Of a changed kernel = %v, want that the signature is of another", err)
	}
}
