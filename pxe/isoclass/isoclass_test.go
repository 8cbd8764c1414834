package isoclass

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/diskfs/go-diskfs/backend/file"
	"github.com/diskfs/go-diskfs/filesystem/iso9660"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// pe is the start of a UEFI program; certificate says whether it has a signature.
func pe(certificate bool) []byte {
	b := make([]byte, 512)
	copy(b, "MZ")
	binary.LittleEndian.PutUint32(b[0x3c:], 0x80)
	copy(b[0x80:], "PE\x00\x00")
	binary.LittleEndian.PutUint16(b[0x80+24:], 0x20b)
	if certificate {
		binary.LittleEndian.PutUint32(b[0x80+24+112+32+4:], 1234)
	}
	return b
}

// image writes an ISO of files, all of them a few bytes but for UEFI programs.
func image(t testing.TB, o iso9660.FinalizeOptions, names ...string) []byte {
	t.Helper()
	out := filepath.Join(t.TempDir(), "out.iso")
	f, err := os.OpenFile(out, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	work := t.TempDir()
	fs, err := iso9660.Create(file.New(f, false), 0, 0, 2048, work)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		at := filepath.Join(work, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(at), 0o700); err != nil {
			t.Fatal(err)
		}
		data := []byte("content of " + name)
		if strings.HasSuffix(strings.ToLower(name), "x64.efi") {
			data = pe(strings.Contains(o.VolumeIdentifier, "SIGNED"))
		}
		if err := os.WriteFile(at, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := fs.Finalize(o); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func boots(platforms ...iso9660.Platform) *iso9660.ElTorito {
	et := &iso9660.ElTorito{BootCatalog: "/boot.cat"}
	for _, p := range platforms {
		et.Entries = append(et.Entries, &iso9660.ElToritoEntry{Platform: p, BootFile: fmt.Sprintf("/boot%02x.img", byte(p))})
	}
	return et
}

func inspect(data []byte) (Image, error) {
	return Inspect(bytes.NewReader(data), int64(len(data)))
}

func TestClasses(t *testing.T) {
	for _, tt := range []struct {
		name   string
		files  []string
		class  pxev1.IsoClass
		layout string
		tells  string // of parameters or notes
	}{
		{"memtest", []string{"boot/memtest.bin", "EFI/BOOT/BOOTX64.EFI", "boot/grub/grub.cfg"}, contained, "boot programs, kernels and initrds alone", ""},
		{"netboot installer", []string{".disk/mini-info", "linux", "initrd.gz", "isolinux.bin"}, contained, "boot programs, kernels and initrds alone", ""},
		{"ubuntu", []string{".disk/info", "casper/vmlinuz", "casper/initrd", "casper/filesystem.squashfs"}, refetches, "Ubuntu live or server", "url=http://SERVER/"},
		{"debian live", []string{".disk/info", "live/vmlinuz", "live/filesystem.squashfs"}, refetches, "Debian live", "fetch=http://SERVER/live/filesystem.squashfs"},
		{"fedora live", []string{"LiveOS/squashfs.img", "images/pxeboot/vmlinuz"}, refetches, "Fedora live", "root=live:http://SERVER/LiveOS/squashfs.img"},
		{"rhel", []string{".treeinfo", "images/pxeboot/vmlinuz", "images/install.img"}, refetches, "Red Hat installer", "inst.repo=http://SERVER/"},
		{"arch", []string{"arch/boot/x86_64/vmlinuz", "arch/x86_64/airootfs.sfs"}, refetches, "Arch Linux", "archiso_http_srv="},
		{"opensuse", []string{"boot/x86_64/loader/linux", "content"}, refetches, "openSUSE installer", "install=http://SERVER/"},
		{"alpine", []string{"boot/vmlinuz-lts", "apks/x86_64/a.apk"}, refetches, "Alpine Linux", "alpine_repo="},
		{"debian installer", []string{".disk/info", "install.amd/vmlinuz", "pool/a.deb"}, drive, "Debian installer", "looks for a CD-ROM"},
		{"windows", []string{"bootmgr", "sources/boot.wim"}, drive, "Windows", "reads its files from the disc"},
		{"esxi", []string{"boot.cfg", "efi/boot/boot.cfg", "s.v00"}, drive, "VMware ESXi", "modules"},
		{"unknown", []string{"boot/kernel/kernel", "rescue/sh"}, drive, "", "it is not known"},
		{"a root file system by a boot file's name", []string{"vmlinuz", "rootfs.img"}, drive, "", "rootfs.img"},
	} {
		o := iso9660.FinalizeOptions{RockRidge: true, VolumeIdentifier: "SOME DISC", ElTorito: boots(iso9660.BIOS, iso9660.EFI)}
		got, err := inspect(image(t, o, append(tt.files, "boot00.img", "bootef.img")...))
		if err != nil || got.Class != tt.class || got.Layout != tt.layout || !strings.Contains(got.Parameters+strings.Join(got.Notes, " "), tt.tells) {
			t.Errorf("%s: Inspect = %+v, %v, want class %v, layout %q and %q told", tt.name, got, err, tt.class, tt.layout, tt.tells)
		}
		if !got.BIOS || !got.UEFI || got.Label != "SOME DISC" {
			t.Errorf("%s: BIOS %v, UEFI %v, label %q, want both and SOME DISC", tt.name, got.BIOS, got.UEFI, got.Label)
		}
	}
}

// Long names come from Joliet where there is no Rock Ridge, and plain ones lose their version.
func TestNames(t *testing.T) {
	for _, tt := range []struct {
		o    iso9660.FinalizeOptions
		want string
	}{
		{iso9660.FinalizeOptions{Joliet: true}, "memtest-plus-and-a-long-name.bin"},
		{iso9660.FinalizeOptions{RockRidge: true}, "memtest-plus-and-a-long-name.bin"},
		{iso9660.FinalizeOptions{}, "memtest_.bin"},
	} {
		data := image(t, tt.o, "memtest-plus-and-a-long-name.bin")
		d := &disc{r: bytes.NewReader(data), size: int64(len(data)), left: maxRead}
		v, err := d.volumes()
		if err != nil {
			t.Fatal(err)
		}
		if got, err := d.tree(v); err != nil || !got.has(tt.want) {
			t.Errorf("%+v: tree = %v, %v, want %s", tt.o, got.files, err, tt.want)
		}
	}
}

func TestBootImages(t *testing.T) {
	for _, tt := range []struct {
		name       string
		et         *iso9660.ElTorito
		bios, uefi bool
		note       string
	}{
		{"none", nil, false, false, ""},
		{"BIOS", boots(iso9660.BIOS), true, false, ""},
		{"UEFI", boots(iso9660.EFI), false, true, ""},
		{"both", boots(iso9660.BIOS, iso9660.EFI), true, true, ""},
		{"floppy", &iso9660.ElTorito{BootCatalog: "/boot.cat", Entries: []*iso9660.ElToritoEntry{{BootFile: "/boot00.img", Emulation: iso9660.Floppy144Emulation}}}, false, false, "floppy"},
	} {
		got, err := inspect(image(t, iso9660.FinalizeOptions{RockRidge: true, ElTorito: tt.et}, "boot00.img", "bootef.img", "linux"))
		if err != nil || got.BIOS != tt.bios || got.UEFI != tt.uefi || !strings.Contains(strings.Join(got.Notes, " "), tt.note) {
			t.Errorf("%s: Inspect = %+v, %v, want BIOS %v, UEFI %v and %q", tt.name, got, err, tt.bios, tt.uefi, tt.note)
		}
	}
}

func TestSigned(t *testing.T) {
	for label, want := range map[string]bool{"SIGNED": true, "PLAIN": false} {
		got, err := inspect(image(t, iso9660.FinalizeOptions{RockRidge: true, VolumeIdentifier: label}, "EFI/BOOT/BOOTX64.EFI"))
		if err != nil || got.Signed == nil || *got.Signed != want || !slices.Equal(got.Archs, []string{"x64"}) {
			t.Errorf("%s: Inspect = %+v, %v, want signed %v and x64", label, got, err, want)
		}
	}
	if got, _ := inspect(image(t, iso9660.FinalizeOptions{RockRidge: true}, "linux")); got.Signed != nil {
		t.Errorf("without a UEFI program: signed %v, want nothing said", *got.Signed)
	}
}

// The independent reader of another author finds the same files.
func TestTreeAsOthersReadIt(t *testing.T) {
	names := []string{"a/b/long-name-of-a-file.squashfs", "a/readme.txt", "linux"}
	data := image(t, iso9660.FinalizeOptions{RockRidge: true}, names...)
	d := &disc{r: bytes.NewReader(data), size: int64(len(data)), left: maxRead}
	v, err := d.volumes()
	if err != nil {
		t.Fatal(err)
	}
	got, err := d.tree(v)
	if err != nil || !got.whole {
		t.Fatalf("tree = %+v, %v", got, err)
	}
	out := filepath.Join(t.TempDir(), "x.iso")
	if err := os.WriteFile(out, data, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(out)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	other, err := iso9660.Read(file.New(f, true), 0, 0, 2048)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		entries, err := other.ReadDir(path.Dir(name))
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(entries, func(e os.DirEntry) bool { return e.Name() == path.Base(name) })
		if i < 0 {
			t.Fatalf("the other reader does not find %s", name)
		}
		info, err := entries[i].Info()
		if e, ok := got.files[name]; err != nil || !ok || int64(e.size) != info.Size() {
			t.Errorf("%s = %+v, want the %d bytes of the other reader", name, e, info.Size())
		}
	}
}

// Real images by others, where they are installed.
func TestIPXE(t *testing.T) {
	data, err := os.ReadFile("/usr/lib/ipxe/ipxe.iso")
	if err != nil {
		t.Skip("needs Debian's ipxe")
	}
	got, err := inspect(data)
	if err != nil || !got.BIOS || got.Class != contained {
		t.Errorf("ipxe.iso: Inspect = %+v, %v, want an image that boots by BIOS and is all in memory", got, err)
	}
}

// patch changes bytes of a copy.
func patch(data []byte, off int, b ...byte) []byte {
	data = bytes.Clone(data)
	copy(data[off:], b)
	return data
}

func le32(v uint32) []byte { return binary.LittleEndian.AppendUint32(nil, v) }

func TestDamaged(t *testing.T) {
	good := image(t, iso9660.FinalizeOptions{RockRidge: true, ElTorito: boots(iso9660.BIOS)}, "boot00.img", "a/b/linux", "c/initrd.gz")
	pvd := 16 * sector
	rootAt := int(binary.LittleEndian.Uint32(good[pvd+158:])) * sector
	catalog := int(binary.LittleEndian.Uint32(good[17*sector+0x47:])) * sector
	if string(good[17*sector+7:17*sector+30]) != "EL TORITO SPECIFICATION" {
		t.Fatal("the boot record is elsewhere")
	}
	// The root's first real record, and that of the folder a.
	record := rootAt
	for range 2 {
		record += int(good[record])
	}
	folder := bytes.Index(good[rootAt:rootAt+sector], []byte("\x01a"))
	if folder < 0 {
		folder = bytes.Index(good[rootAt:rootAt+sector], []byte("\x01A"))
	}
	folder += rootAt - 32
	for _, tt := range []struct {
		name string
		data []byte
		bad  string // the error; empty: it is classed
		note string
	}{
		{"empty", nil, "no ISO 9660 image", ""},
		{"noise", bytes.Repeat([]byte{0xa5}, 1<<20), "no ISO 9660 image", ""},
		{"cut before the descriptors", good[:pvd+100], "no ISO 9660 image", ""},
		{"cut in the middle", append(good[:20*sector:20*sector], 0), "", "cannot be read"},
		{"says more than it has", patch(good, pvd+80, le32(1<<31)...), "not whole", ""},
		{"other blocks", patch(good, pvd+128, 0, 2), "512 bytes", ""},
		{"root outside", patch(good, pvd+158, le32(1<<31)...), "", "outside of it"},
		{"absurd root", patch(good, pvd+166, le32(1<<31)...), "", "longer than"},
		{"record of no length", patch(good, record, 20), "", "damaged"},
		{"name to the end of its record", patch(patch(good, record, good[record]-1), record+32, good[record]-34), "", ""},
		{"name past its record", patch(good, record+32, 250), "", "damaged"},
		{"folder in itself", patch(patch(good, folder+2, good[pvd+158:pvd+162]...), folder+10, good[pvd+166:pvd+170]...), "", "more files than are looked at"},
		{"catalog outside", patch(good, 17*sector+0x47, le32(1<<31)...), "", "boot catalog cannot be read"},
		{"damaged catalog", patch(good, catalog+4, 'x'), "", "boot catalog cannot be read"},
	} {
		got, err := inspect(tt.data)
		if tt.bad != "" {
			if errs.CodeOf(err) != errs.InvalidArgs || !strings.Contains(err.Error(), tt.bad) {
				t.Errorf("%s: Inspect = %+v, %v, want an error of %q", tt.name, got, err, tt.bad)
			}
			continue
		}
		if err != nil || !strings.Contains(strings.Join(got.Notes, " "), tt.note) {
			t.Errorf("%s: Inspect = %+v, %v, want %q noted", tt.name, got, err, tt.note)
		}
		if !strings.Contains(tt.note, "catalog") && got.Class != drive {
			t.Errorf("%s: class %v, want one that needs a drive", tt.name, got.Class)
		}
	}
	if got, err := inspect(good); err != nil || got.Class != contained || !got.BIOS {
		t.Errorf("undamaged: Inspect = %+v, %v", got, err)
	}
}

// counting counts what is read of an image that has the same sector everywhere.
type counting struct {
	sectors map[int64][]byte
	read    int64
}

func (c *counting) ReadAt(p []byte, off int64) (int, error) {
	c.read += int64(len(p))
	for n := 0; n < len(p); {
		s := c.sectors[(off+int64(n))/sector]
		if s == nil {
			s = c.sectors[-1]
		}
		n += copy(p[n:], s[(off+int64(n))%sector:])
	}
	return len(p), nil
}

// An image whose every folder is full of other folders, or long and nearly empty, is
// looked at so far and no further.
func TestEndless(t *testing.T) {
	for name, records := range map[string]int{"full": 56, "nearly empty": 1} {
		data := image(t, iso9660.FinalizeOptions{}, "a/linux")
		c := &counting{sectors: map[int64][]byte{}}
		for i := range 18 {
			c.sectors[int64(i)] = data[i*sector : (i+1)*sector]
		}
		c.sectors[16] = patch(c.sectors[16], 166, le32(maxDirectory)...)
		one := make([]byte, sector)
		for i := range records {
			off := i * 36
			one[off] = 36
			one[off+25], one[off+32], one[off+33], one[off+34] = 2, 2, 'x', byte('a'+i%26)
			copy(one[off+2:], le32(uint32(1000+off*7)))
			copy(one[off+10:], le32(maxDirectory))
		}
		c.sectors[-1] = one
		got, err := Inspect(c, 1<<42)
		if err != nil || got.Class != drive || c.read > maxRead {
			t.Errorf("%s: Inspect = %+v, %v after %d bytes, want one that needs a drive after at most %d", name, got, err, c.read, maxRead)
		}
	}
}

func TestLimits(t *testing.T) {
	signed, plain := true, false
	both := Image{BIOS: true, UEFI: true, Class: contained}
	for _, tt := range []struct {
		name    string
		image   Image
		boot    Boot
		refuses string // empty: nothing refuses
		tells   string
	}{
		{"well", both, Boot{Size: 1 << 20}, "", ""},
		{"no boot image", Image{Class: contained}, Boot{}, "no boot image", ""},
		{"BIOS alone, UEFI wanted", Image{BIOS: true, Class: contained}, Boot{UEFI: true}, "does not boot under UEFI", ""},
		{"UEFI alone, BIOS wanted", Image{UEFI: true, Class: contained}, Boot{}, "does not boot under BIOS", ""},
		{"into memory", both, Boot{Size: 1 << 30, UEFI: true, RAM: 4 << 30}, "", "1024 of 4096 MiB"},
		{"too large for memory", both, Boot{Size: 4 << 30, UEFI: true, RAM: 4 << 30}, "", "given as a drive"},
		{"more than iPXE reads under BIOS", both, Boot{Size: 5 << 30}, "bios", ""},
		{"memory not known", both, Boot{Size: 1 << 30, UEFI: true}, "", "not known"},
		{"by shim, into memory", both, Boot{Size: 1 << 30, UEFI: true, RAM: 8 << 30, Loader: "shim"}, "", "HTTP boot only"},
		{"by shim, too large for memory", both, Boot{Size: 8 << 30, UEFI: true, RAM: 4 << 30, Loader: "shim"}, "shim", ""},
		{"drive over the network", Image{BIOS: true, Class: drive, Layout: "Windows"}, Boot{}, "looks for its disc", "Windows"},
		{"drive as a drive", Image{BIOS: true, Class: drive}, Boot{Drive: true}, "", ""},
		{"refetches", Image{BIOS: true, Class: refetches, Parameters: "inst.repo=http://SERVER/"}, Boot{}, "", "inst.repo="},
		{"unsigned", Image{UEFI: true, Class: contained, Signed: &plain}, Boot{UEFI: true, RAM: 8 << 30}, "", "Secure Boot"},
		{"arm64", Image{UEFI: true, Class: contained, Archs: []string{"aa64"}, Signed: &signed}, Boot{UEFI: true, RAM: 8 << 30}, "", "not for x64"},
	} {
		var refuses, tells []string
		for _, l := range Limits(tt.image, tt.boot) {
			tells = append(tells, l.Text)
			if l.Refuses {
				refuses = append(refuses, l.Text)
			}
		}
		if (tt.refuses == "") != (len(refuses) == 0) || !strings.Contains(strings.Join(refuses, "\n"), tt.refuses) || !strings.Contains(strings.Join(tells, "\n"), tt.tells) {
			t.Errorf("%s: Limits = %q, refusing %q, want %q to refuse and %q to be told", tt.name, tells, refuses, tt.refuses, tt.tells)
		}
	}
}

func TestParseClass(t *testing.T) {
	for c, name := range classes {
		if got, err := ParseClass(name); err != nil || got != c || Name(c) != name {
			t.Errorf("ParseClass(%q) = %v, %v, want %v", name, got, err, c)
		}
	}
	if _, err := ParseClass("drive"); errs.CodeOf(err) != errs.InvalidArgs {
		t.Errorf("ParseClass(drive) = %v, want %s", err, errs.InvalidArgs)
	}
}

// What is fuzzed begins at the first descriptor: nothing before it is read.
func FuzzInspect(f *testing.F) {
	const before = 16 * sector
	f.Add(image(f, iso9660.FinalizeOptions{RockRidge: true, ElTorito: boots(iso9660.BIOS, iso9660.EFI)}, "boot00.img", "bootef.img", "casper/a.squashfs")[before:])
	f.Add(image(f, iso9660.FinalizeOptions{Joliet: true}, "EFI/BOOT/BOOTX64.EFI", "linux")[before:])
	f.Add([]byte("CD001"))
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := inspect(append(make([]byte, before), data...))
		if err != nil {
			if errs.CodeOf(err) != errs.InvalidArgs {
				t.Errorf("Inspect = %v, want code %s", err, errs.InvalidArgs)
			}
			return
		}
		if Name(got.Class) == "" {
			t.Errorf("Inspect = %+v, without a class", got)
		}
		Limits(got, Boot{UEFI: got.UEFI})
	})
}
