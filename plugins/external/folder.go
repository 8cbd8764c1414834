package external

import (
	"crypto/rand"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/bcx"
)

// prefix begins the names of our socket folders.
const prefix = "bcx-host-"

// folder is the socket folder of one run. Its lock says that its host lives.
type folder struct {
	path string
	lock *os.File
}

// makeFolder makes a folder for this user alone, and takes those away that
// hosts left which are gone. A path too long for a socket is refused before
// anything is made or started.
func makeFolder(root string, log *slog.Logger) (*folder, error) {
	root, err := filepath.Abs(root)
	if err != nil {
		return nil, err
	}
	name := func() string { return filepath.Join(root, prefix+strings.ToLower(rand.Text()[:10])) }
	if err := bcx.CheckSocketPath(socket(name())); err != nil {
		return nil, errs.New(errs.InvalidConfig, "temporary folder: %v", err)
	}
	sweep(root, log)
	for range 10 {
		path := name()
		if err := os.Mkdir(path, 0o700); err != nil {
			return nil, fmt.Errorf("make socket folder: %w", err)
		}
		lock, err := hold(path)
		if err == nil {
			return &folder{path, lock}, nil
		}
		// Another host may have taken it for a leftover.
		os.RemoveAll(path)
	}
	return nil, fmt.Errorf("make socket folder: cannot lock one in %s", root)
}

// remove takes the folder away, then gives up the lock.
func (f *folder) remove() {
	os.RemoveAll(f.path)
	if f.lock != nil {
		f.lock.Close()
	}
}

// sweep removes the folders of hosts that are gone, and what their plugins left
// running.
func sweep(root string, log *slog.Logger) {
	list, err := os.ReadDir(root)
	if err != nil {
		return
	}
	for _, e := range list {
		path := filepath.Join(root, e.Name())
		if !strings.HasPrefix(e.Name(), prefix) {
			continue
		}
		release, yes := abandoned(path)
		if !yes {
			continue
		}
		if n := endLeft(path); n > 0 {
			log.Warn("processes that a plugin left are killed", "folder", path, "processes", n)
		}
		if os.RemoveAll(path) == nil {
			log.Info("left socket folder removed", "folder", path)
		}
		release()
	}
}

// isOld judges a folder that nobody may have locked yet.
func isOld(st os.FileInfo) bool { return time.Since(st.ModTime()) > time.Hour }
