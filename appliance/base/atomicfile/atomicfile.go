// Package atomicfile replaces a file so that a power cut leaves the old bytes or the new ones.
package atomicfile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Write puts data at path: temporary file beside it, fsync, rename, fsync of the folder.
func Write(path string, data []byte, mode os.FileMode) error {
	dir := filepath.Dir(path)
	tmp, err := os.CreateTemp(dir, "."+filepath.Base(path)+".tmp*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer os.Remove(tmp.Name())
	err = tmp.Chmod(mode)
	if err == nil {
		_, err = tmp.Write(data)
	}
	if err == nil {
		err = tmp.Sync()
	}
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err == nil {
		err = SyncDir(dir)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

const damagedSuffix = ".damaged"

// SetAside renames a damaged file, over one that was set aside before, and
// returns its new name. That it lies there is durable when SetAside returns.
func SetAside(path string) (string, error) {
	aside := path + damagedSuffix
	err := os.Rename(path, aside)
	if err == nil {
		err = SyncDir(filepath.Dir(path))
	}
	if err != nil {
		return "", fmt.Errorf("set the damaged file %s aside: %w", path, err)
	}
	return aside, nil
}

// WasSetAside reports whether a file of this name lies aside.
func WasSetAside(path string) (bool, error) {
	switch _, err := os.Lstat(path + damagedSuffix); {
	case err == nil:
		return true, nil
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	default:
		return false, fmt.Errorf("look for a damaged %s: %w", path, err)
	}
}

// SyncDir makes renames and removals in dir durable.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
