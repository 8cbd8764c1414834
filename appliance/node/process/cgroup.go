package process

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// DefaultCgroup is a folder for instances in this machine's cgroup v2 tree, or
// empty where there is none that this process may change.
func DefaultCgroup() string {
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var st unix.Statfs_t
		if unix.Statfs(root, &st) != nil || st.Type != unix.CGROUP2_SUPER_MAGIC {
			continue
		}
		if unix.Access(root, unix.W_OK) == nil {
			return filepath.Join(root, "better-compute-instances")
		}
	}
	return ""
}

// prepareCgroup makes the folder below which each run has a group of its own.
func prepareCgroup(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make cgroup: %w", err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("look at cgroup %s: %w", dir, err)
	}
	if st.Type != unix.CGROUP2_SUPER_MAGIC {
		return fmt.Errorf("%s is no cgroup of version 2", dir)
	}
	return nil
}

// settings are the control files that the limits need, and their controllers.
func (l Limits) settings() (files map[string]string, controllers []string) {
	files = map[string]string{}
	if l.CPUMax > 0 {
		const period = 100000 // µs
		files["cpu.max"] = strconv.FormatInt(int64(l.CPUMax*period), 10) + " " + strconv.Itoa(period)
		controllers = append(controllers, "cpu")
	}
	if l.MemoryMaxBytes > 0 {
		files["memory.max"] = strconv.FormatInt(l.MemoryMaxBytes, 10)
		controllers = append(controllers, "memory")
	}
	if l.PidsMax > 0 {
		files["pids.max"] = strconv.FormatInt(l.PidsMax, 10)
		controllers = append(controllers, "pids")
	}
	return files, controllers
}

// enable makes the limits possible below parent. Limits that cannot be set are
// an error: what was asked to be limited never runs without.
func (l Limits) enable(parent string) error {
	files, controllers := l.settings()
	if parent == "" && len(files) > 0 {
		return errs.New(errs.UnsupportedOperation, "process: limits need cgroup v2, which this node does not offer")
	}
	for _, c := range controllers {
		for _, dir := range []string{filepath.Dir(parent), parent} {
			if err := control(dir, "cgroup.subtree_control", "+"+c); err != nil {
				return errs.New(errs.UnsupportedOperation, "process: this node cannot limit %s: %v", c, err)
			}
		}
	}
	return nil
}

// makeGroup makes one run's group, with its limits; empty where there are no groups.
func makeGroup(parent, name string, l Limits) (string, error) {
	if parent == "" {
		return "", nil
	}
	files, _ := l.settings()
	path := filepath.Join(parent, name)
	if err := os.Mkdir(path, 0o755); err != nil {
		return "", fmt.Errorf("make cgroup: %w", err)
	}
	for file, value := range files {
		if err := control(path, file, value); err != nil {
			return "", errors.Join(fmt.Errorf("set limit: %w", err), os.Remove(path))
		}
	}
	return path, nil
}

// killGroup kills what lives in a run's group and removes it. A group that is
// not there is fine.
func killGroup(path string) error {
	if path == "" {
		return nil
	}
	var err error
	for range 500 {
		if err = removeGroup(path); err == nil {
			return nil
		}
		if kerr := control(path, "cgroup.kill", "1"); kerr != nil && !errors.Is(kerr, fs.ErrNotExist) {
			return fmt.Errorf("kill cgroup: %w", kerr)
		}
		time.Sleep(10 * time.Millisecond) // the kernel empties it in its own time
	}
	return fmt.Errorf("remove cgroup: %w", err)
}

// removeGroup removes a group in which nothing lives, with the groups that were
// made in it. One that is not there is fine.
func removeGroup(path string) error {
	err := unix.Rmdir(path)
	if errors.Is(err, unix.EBUSY) {
		inner, rerr := os.ReadDir(path)
		if rerr != nil {
			return rerr
		}
		for _, d := range inner {
			if !d.IsDir() {
				continue
			}
			if err := removeGroup(filepath.Join(path, d.Name())); err != nil {
				return err
			}
		}
		err = unix.Rmdir(path)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return &fs.PathError{Op: "rmdir", Path: path, Err: err}
	}
	return nil
}

// populated reports whether anything lives in a group or below it.
func populated(path string) bool {
	data, err := os.ReadFile(filepath.Join(path, "cgroup.events"))
	return err == nil && strings.Contains(string(data), "populated 1")
}

// outOfMemory reports whether the kernel killed something in a group for its limit.
func outOfMemory(path string) bool {
	data, err := os.ReadFile(filepath.Join(path, "memory.events"))
	if err != nil {
		return false
	}
	return oomKills(data) > 0
}

// oomKills reads memory.events.
func oomKills(data []byte) uint64 {
	for line := range strings.Lines(string(data)) {
		if count, ok := strings.CutPrefix(strings.TrimSpace(line), "oom_kill "); ok {
			n, err := strconv.ParseUint(count, 10, 64)
			if err != nil {
				return 0
			}
			return n
		}
	}
	return 0
}

// control opens without O_CREATE: a missing file must not look like success.
func control(dir, file, text string) error {
	f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}
