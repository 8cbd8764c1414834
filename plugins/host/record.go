package host

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"

	"github.com/better-compute/site-appliance/plugins/bcx"
)

const (
	recordSuffix = ".run"
	unfinished   = ".tmp"
	maxRecord    = 4 << 10
)

// folderName is the form of a run's folder below the root of sockets.
var folderName = regexp.MustCompile(`^p[A-Z2-7]{8}$`)

// record says which run a socket folder belongs to. It lies beside the folder,
// where the plugin cannot write, from before the start to after the end, so that
// the next host finds what a killed one left behind, and nothing else.
type record struct {
	Plugin string `json:"plugin"`
	// Boot is the kernel's: process numbers of another boot mean nothing.
	Boot string `json:"boot"`
	// Space is the namespace of process numbers: those of another one cannot be
	// judged from here.
	Space string `json:"space"`
	// Host is the process that started it.
	Host mark `json:"host"`
	// Process is the plugin's; zero while it is being started.
	Process mark `json:"process"`
	// UID is the plugin's; negative: the host's own.
	UID int `json:"uid"`
	// Cgroup is the plugin's own, if it has one.
	Cgroup string `json:"cgroup,omitempty"`
}

// mark names a process for good: numbers are used again, but not with the same start.
type mark struct {
	PID int `json:"pid"`
	// Start is in the kernel's ticks since the boot.
	Start uint64 `json:"start"`
}

// parseRecord reads a record's file.
func parseRecord(data []byte) (record, error) {
	var r record
	if len(data) > maxRecord {
		return r, fmt.Errorf("record of a run has over %d bytes", maxRecord)
	}
	if err := json.Unmarshal(data, &r); err != nil {
		return r, fmt.Errorf("record of a run: %w", err)
	}
	if r.Boot == "" || r.Host.PID <= 1 || r.Process.PID < 0 || r.Process.PID == 1 || r.Plugin == "" {
		return r, errors.New("record of a run is not complete")
	}
	return r, nil
}

// run is a folder for one run's socket, and its record.
type run struct {
	dir    string
	record record
}

// newRun records a run that is to be started and makes its folder, for its uid alone.
func newRun(root string, r record, gid int) (*run, error) {
	// Plugins pass through the root to their own folder, and cannot list it.
	if err := os.MkdirAll(root, 0o711); err != nil {
		return nil, fmt.Errorf("make socket folder: %w", err)
	}
	n := &run{dir: filepath.Join(root, "p"+rand.Text()[:8]), record: r}
	err := bcx.CheckSocketPath(filepath.Join(n.dir, bcx.SocketName))
	if err == nil {
		err = n.save()
	}
	if err == nil {
		err = os.Mkdir(n.dir, 0o700)
	}
	if err == nil && r.UID >= 0 {
		err = os.Chown(n.dir, r.UID, gid)
	}
	if err != nil {
		n.remove()
		return nil, fmt.Errorf("make socket folder: %w", err)
	}
	return n, nil
}

// save writes the record at once or not at all. It outlives a process, not a
// machine, and is not synced.
func (n *run) save() error {
	data, err := json.Marshal(n.record)
	if err != nil {
		return err
	}
	path := n.dir + recordSuffix
	if err := os.WriteFile(path+unfinished, data, 0o600); err != nil {
		return err
	}
	return os.Rename(path+unfinished, path)
}

// remove forgets the run, its folder first.
func (n *run) remove() {
	if err := removeTree(n.dir); err != nil {
		return
	}
	for _, path := range []string{n.dir + recordSuffix + unfinished, n.dir + recordSuffix} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return
		}
	}
}
