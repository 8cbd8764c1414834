// Package files is where the boot programs come from.
package files

import (
	"fmt"
	"io"
	"io/fs"
	"os"
)

// The names that network boot asks a Source for.
const (
	// UEFILoader is the iPXE that uses the firmware's network driver, UEFIDrivers
	// the one with drivers of its own.
	UEFILoader  = "ipxe/snponly.efi"
	UEFIDrivers = "ipxe/ipxe.efi"
	BIOSLoader  = "ipxe/undionly.kpxe"
	// ARM64Loader is GRUB's network image: there is no iPXE for it.
	ARM64Loader = "grub/grubnetaa64.efi"
	// Shim is what Secure Boot starts. It fetches ShimSecond, GRUB's signed network
	// image, from beside itself.
	Shim       = "grub/shimx64.efi"
	ShimSecond = "grub/grubx64.efi"
	Kernel     = "ramdisk/vmlinuz"
	Initrd     = "ramdisk/initrd"
	// ARM64Kernel and ARM64Initrd are the ramdisk for arm64.
	ARM64Kernel = "ramdisk-arm64/vmlinuz"
	ARM64Initrd = "ramdisk-arm64/initrd"
)

// Choices are the boot programs of x86-64 UEFI firmware that an assignment can name.
var Choices = map[string]string{"snponly": UEFILoader, "ipxe": UEFIDrivers, "shim": Shim}

// File is one opened boot program.
type File interface {
	io.ReadSeekCloser
	Size() int64
}

// Autoexec is what a newer iPXE looks for beside its own file. The box has none, and
// who asks for it is not refused anything worth a line in the log.
const Autoexec = "autoexec.ipxe"

// Source opens boot programs by name.
type Source interface {
	Open(name string) (File, error)
}

// Dir serves the regular files under a folder, and nothing outside of it.
type Dir string

// Open opens the file name under the folder.
func (d Dir) Open(name string) (File, error) {
	root, err := os.OpenRoot(string(d))
	if err != nil {
		return nil, fmt.Errorf("open boot files: %w", err)
	}
	defer root.Close()
	f, err := root.Open(name)
	if err != nil {
		return nil, fmt.Errorf("open boot file: %w", err)
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = &fs.PathError{Op: "open", Path: name, Err: fs.ErrInvalid}
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("open boot file: %w", err)
	}
	return &osFile{f, st.Size()}, nil
}

type osFile struct {
	*os.File
	size int64
}

func (f *osFile) Size() int64 { return f.size }

// Plain is the file on disk that f is: one that the kernel can send, and that nobody
// waits for. Nil: none.
func Plain(f any) *os.File {
	if plain, ok := f.(*osFile); ok {
		return plain.File
	}
	return nil
}
