package host

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// maxRemoved bounds what is taken away at a time: a process that outlived its
// plugin may be making more.
const maxRemoved = 1 << 20

// removeTree removes a folder that a plugin could write in. Plugins can nest
// folders deeper than this process may have files open, so it goes no deeper than
// one: what lies in a folder's folder is moved up first.
func removeTree(dir string) error {
	// Most often it is empty. Of a link only the link goes.
	if err := os.Remove(dir); err == nil || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	root, err := openFolder(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	prefix := rand.Text()
	for done := 0; done < maxRemoved; {
		names, err := list(root, ".")
		if err != nil {
			return err
		}
		if len(names) == 0 {
			return os.Remove(dir)
		}
		for _, name := range names {
			done++
			if root.Remove(name) == nil {
				continue
			}
			inner, err := list(root, name)
			if err != nil {
				return err
			}
			for _, below := range inner {
				path := filepath.Join(name, below)
				if done++; root.Remove(path) == nil {
					continue
				}
				if err := root.Rename(path, prefix+strconv.Itoa(done)); err != nil {
					return err
				}
			}
		}
	}
	return fmt.Errorf("remove %s: there is no end of it", dir)
}

// openFolder opens a folder itself, and nothing that a link leads to.
func openFolder(dir string) (*os.Root, error) {
	before, err := os.Lstat(dir)
	if err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	after, err := root.Stat(".")
	if err == nil && (!before.IsDir() || !os.SameFile(before, after)) {
		err = fmt.Errorf("%s is not a folder", dir)
	}
	if err != nil {
		root.Close()
		return nil, err
	}
	return root, nil
}

// list is some of what lies in a folder; empty: nothing does.
func list(root *os.Root, name string) ([]string, error) {
	f, err := root.OpenFile(name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names, err := f.Readdirnames(1024)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return names, err
}
