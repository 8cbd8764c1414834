//go:build unix

package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// lockFolder keeps a second process out of the state folder for as long as the
// file stays open.
func lockFolder(dir string) (*os.File, error) {
	path := filepath.Join(dir, "lock")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if errors.Is(err, unix.EROFS) {
		// A disk that takes nothing more must not keep the box from coming home.
		f, err = os.Open(path)
	}
	if err != nil {
		return nil, fmt.Errorf("lock state folder: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock state folder: %s is held by another process: %w", path, err)
	}
	return f, nil
}
