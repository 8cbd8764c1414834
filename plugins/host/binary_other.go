//go:build !linux

package host

import (
	"fmt"
	"os"
)

// openBinary opens a plugin for verify. It is then executed by its path: there
// is no other way here.
func openBinary(path string) (*os.File, error) {
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

// verify says why f must not be executed.
func verify(f *os.File, path string, want [32]byte) error {
	_, err := checkPin(f, path, want)
	return err
}
