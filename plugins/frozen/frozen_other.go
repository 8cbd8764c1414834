//go:build !linux

package frozen

import (
	"fmt"
	"os"
)

// Open opens a regular file. Nothing here keeps its bytes from changing, and a
// program is executed by its path: there is no other way.
func Open(path string, follow bool) (*os.File, error) {
	if !follow {
		if st, err := os.Lstat(path); err == nil && st.Mode()&os.ModeSymlink != 0 {
			return nil, fmt.Errorf("%s is a symbolic link", path)
		}
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", path)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
