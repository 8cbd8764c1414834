//go:build !linux

package host

import (
	"fmt"
	"os"
)

// openPinned opens and hashes a plugin, which is then executed by its path:
// there is no other way here.
func openPinned(path string, want [32]byte) (*os.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", path)
	}
	if err == nil {
		_, err = checkPin(f, path, want)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
