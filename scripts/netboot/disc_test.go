package netboot

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"

	"github.com/diskfs/go-diskfs/backend/file"
	"github.com/diskfs/go-diskfs/filesystem/fat16"
	"github.com/diskfs/go-diskfs/filesystem/iso9660"
)

// What the test's disc says on a console once all that it needs was read from it.
const (
	saysBIOS = "disc read to its end in BIOS"
	saysUEFI = "disc read to its end in UEFI"
)

// isoSector is ISO 9660's, which El Torito's no-emulation boot reads by too.
const isoSector = 2048

// makeDisc writes a disc image that boots in BIOS and in UEFI, and says so.
func makeDisc(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	tree := filepath.Join(dir, "tree")
	check(t, os.Mkdir(tree, 0o755))
	check(t, os.WriteFile(filepath.Join(tree, "BIOS.BIN"), biosProgram(1<<20), 0o644))
	makeESP(t, filepath.Join(tree, "ESP.IMG"), uefiProgram(2<<20))

	path := filepath.Join(dir, "disc.iso")
	out, err := os.Create(path)
	check(t, err)
	defer out.Close()
	fs, err := iso9660.Create(file.New(out, false), 0, 0, isoSector, tree)
	check(t, err)
	bios := &iso9660.ElToritoEntry{Platform: iso9660.BIOS, Emulation: iso9660.NoEmulation, BootFile: "BIOS.BIN", BootTable: true}
	bios.SetLoadSize(isoSector / 512)
	check(t, fs.Finalize(iso9660.FinalizeOptions{VolumeIdentifier: "NETBOOT", ElTorito: &iso9660.ElTorito{
		Entries: []*iso9660.ElToritoEntry{bios, {Platform: iso9660.EFI, Emulation: iso9660.NoEmulation, BootFile: "ESP.IMG"}},
	}}))
	return path
}

// makeESP writes a file system of FAT16 with the program that UEFI starts: EDK2
// takes no FAT32 that is as small.
func makeESP(t *testing.T, path string, program []byte) {
	t.Helper()
	const size = 8 << 20
	f, err := os.Create(path)
	check(t, err)
	defer f.Close()
	check(t, f.Truncate(size))
	fs, err := fat16.Create(file.New(f, false), size, 0, 512, "DISC", true)
	check(t, err)
	for _, dir := range []string{"EFI", "EFI/BOOT"} {
		check(t, fs.Mkdir(dir))
	}
	w, err := fs.OpenFile("EFI/BOOT/BOOTX64.EFI", os.O_CREATE|os.O_RDWR)
	check(t, err)
	_, err = w.Write(program)
	check(t, err)
	check(t, w.Close())
}

// biosProgram is a no-emulation boot image of size bytes. Its first sector is
// loaded by the BIOS; it reads its last one by drive number, and prints it.
func biosProgram(size int) []byte {
	code := []byte{
		0xeb, 0x3e, // jmp 0x40; the boot information table (mkisofs(8)) is from 8 on
		0x40:       0xfa, // cli
		0x31, 0xc0, // xor ax, ax
		0x8e, 0xd8, // mov ds, ax
		0x8e, 0xc0, // mov es, ax
		0x8e, 0xd0, // mov ss, ax
		0xbc, 0x00, 0x7c, // mov sp, 0x7c00
		0xfb,                   // sti
		0x66, 0xa1, 0x0c, 0x7c, // mov eax, [0x7c0c]: where this image is on the disc
		0x66, 0x05, 0, 0, 0, 0, // add eax, its last sector
		0x66, 0xa3, 0x88, 0x7c, // mov [0x7c88], eax
		0xbe, 0x80, 0x7c, // mov si, 0x7c80
		0xb4, 0x42, // mov ah, 0x42: extended read from dl
		0xcd, 0x13, // int 0x13
		0xbe, 0x00, 0x80, // mov si, 0x8000
		0x73, 0x03, // jnc print
		0xbe, 0x90, 0x7c, // mov si, 0x7c90
		0xac,       // print: lodsb
		0x84, 0xc0, // test al, al
		0x74, 0x09, // jz end
		0xb4, 0x0e, // mov ah, 0x0e: teletype
		0xbb, 0x07, 0x00, // mov bx, 7
		0xcd, 0x10, // int 0x10
		0xeb, 0xf2, // jmp print
		0xf4,       // end: hlt
		0xeb, 0xfd, // jmp end
		0x80: 0x10, 0, 1, 0, 0x00, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, // one sector to 0:8000
		0x90: 'd', 'i', 's', 'c', ' ', 'n', 'o', 't', ' ', 'r', 'e', 'a', 'd', 0,
	}
	out := make([]byte, size)
	copy(out, code)
	last := size/isoSector - 1
	binary.LittleEndian.PutUint32(out[0x53:], uint32(last))
	copy(out[last*isoSector:], "\r\n"+saysBIOS+"\r\nand stays here\r\n\x00") // SeaBIOS holds back the last word
	return out
}

// uefiProgram is an application of size bytes that prints what stands at its end.
func uefiProgram(size int) []byte {
	const (
		headers = 0x200
		text    = 0x1000 // where the section lies in memory
	)
	var words []byte
	for _, r := range "\r\n" + saysUEFI + "\r\n\x00" {
		words = binary.LittleEndian.AppendUint16(words, uint16(r))
	}
	section := make([]byte, (size-headers)/0x200*0x200)
	message := len(section) - len(words)&^1
	copy(section[message:], words)
	code := []byte{
		0x48, 0x83, 0xec, 0x28, // sub rsp, 40
		0x48, 0x8b, 0x4a, 0x40, // mov rcx, [rdx+64]: SystemTable.ConOut
		0x48, 0x8d, 0x15, 0, 0, 0, 0, // lea rdx, [rip+message]
		0xff, 0x51, 0x08, // call [rcx+8]: OutputString
		0xf4,       // hlt
		0xeb, 0xfd, // jmp back to it
	}
	binary.LittleEndian.PutUint32(code[11:], uint32(message-15))
	copy(section, code)

	var b bytes.Buffer
	put := func(v ...any) {
		for _, v := range v {
			_ = binary.Write(&b, binary.LittleEndian, v) // a buffer takes all
		}
	}
	b.WriteString("MZ")
	b.Write(make([]byte, 58))
	put(uint32(64))
	b.WriteString("PE\x00\x00")
	// COFF: x86-64, one section, the optional header's size, executable.
	put(uint16(0x8664), uint16(1), uint32(0), uint32(0), uint32(0), uint16(240), uint16(0x22))
	image := uint32(text + (len(section)+0xfff)&^0xfff)
	// PE32+: code, entry point and bases; subsystem 10 is an EFI application.
	put(uint16(0x20b), uint16(0), uint32(len(section)), uint32(0), uint32(0), uint32(text), uint32(text))
	put(uint64(0), uint32(0x1000), uint32(0x200), uint32(0), uint32(0), uint32(0), uint32(0))
	put(image, uint32(headers), uint32(0), uint16(10), uint16(0), uint64(0), uint64(0), uint64(0), uint64(0), uint32(0), uint32(16))
	b.Write(make([]byte, 16*8))
	b.WriteString(".text\x00\x00\x00")
	put(uint32(len(section)), uint32(text), uint32(len(section)), uint32(headers), uint32(0), uint32(0), uint32(0), uint32(0x60000020))
	b.Write(make([]byte, headers-b.Len()))
	b.Write(section)
	return b.Bytes()
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
