package host

import (
	"fmt"
	"os"
)

// verify says why f must not be executed.
func verify(f *os.File, path string, want [32]byte) error {
	head, err := checkPin(f, path, want)
	if err != nil {
		return err
	}
	// A pin on a script would leave what its interpreter loads unpinned.
	if !isELF(head) {
		return fmt.Errorf("%s is not an ELF executable", path)
	}
	return nil
}
