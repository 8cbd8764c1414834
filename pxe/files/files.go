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
	UEFILoader = "ipxe/snponly.efi"
	BIOSLoader = "ipxe/undionly.kpxe"
	Kernel     = "ramdisk/vmlinuz"
	Initrd     = "ramdisk/initrd"
)

// File is one opened boot program.
type File interface {
	io.ReadSeekCloser
	Size() int64
}

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
