package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

const cgroupRoot = "/sys/fs/cgroup"

// prepareCgroup makes dir, below which each plugin gets a leaf, and enables the
// controllers that the limits need. cgroup v2 gives none to the children of a
// group that holds processes, so the caller first moves itself into a leaf
// named main when it finds itself there.
func prepareCgroup(dir string, l limits) error {
	if dir == "" {
		if l.any() {
			return errors.New("limits are set but no cgroup to hold them")
		}
		return nil
	}
	clean := filepath.Clean(dir)
	if !strings.HasPrefix(clean, cgroupRoot+"/") {
		return fmt.Errorf("cgroup %s does not lie in %s", dir, cgroupRoot)
	}
	parent := filepath.Dir(clean)
	if l.any() {
		if err := leave(parent); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(clean, 0o755); err != nil {
		return fmt.Errorf("make cgroup: %w", err)
	}
	if _, err := os.Stat(filepath.Join(clean, "cgroup.procs")); err != nil {
		return fmt.Errorf("%s is not a cgroup: %w", clean, err)
	}
	if _, err := os.Stat(filepath.Join(clean, "cgroup.controllers")); err != nil {
		return fmt.Errorf("%s is not a cgroup of version 2: %w", clean, err)
	}
	for _, c := range l.controllers() {
		for _, d := range []string{parent, clean} {
			if err := write(filepath.Join(d, "cgroup.subtree_control"), "+"+c); err != nil {
				return fmt.Errorf("enable controller %s in %s: %w", c, d, err)
			}
		}
	}
	return nil
}

// leave moves this process out of parent, if it is directly in it.
func leave(parent string) error {
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return fmt.Errorf("read own cgroup: %w", err)
	}
	for line := range strings.Lines(string(own)) {
		path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::")
		if !ok || filepath.Join(cgroupRoot, path) != parent || parent == cgroupRoot {
			continue
		}
		leaf := filepath.Join(parent, "main")
		if err := os.MkdirAll(leaf, 0o755); err != nil {
			return fmt.Errorf("make cgroup: %w", err)
		}
		if err := write(filepath.Join(leaf, "cgroup.procs"), strconv.Itoa(os.Getpid())); err != nil {
			return fmt.Errorf("move into %s: %w", leaf, err)
		}
	}
	return nil
}

// leafCgroup makes and opens a plugin's own group with its limits. The group is
// always a new one: in a group that was ever killed, Linux 6.18 kills what is
// started right into it.
func leafCgroup(path string, l limits) (*os.File, error) {
	if err := removeCgroup(path); err != nil {
		return nil, err
	}
	if err := os.Mkdir(path, 0o755); err != nil {
		return nil, fmt.Errorf("make cgroup: %w", err)
	}
	for file, value := range map[string]int64{"memory.max": l.memoryMax, "pids.max": l.pidsMax} {
		if value == 0 {
			continue
		}
		if err := write(filepath.Join(path, file), strconv.FormatInt(value, 10)); err != nil {
			return nil, fmt.Errorf("set %s: %w", file, err)
		}
	}
	return os.Open(path)
}

// removeCgroup kills what lives in a group and removes it. The kernel needs a
// moment to empty it.
func removeCgroup(path string) error {
	var err error
	for range 200 {
		if err = os.Remove(path); err == nil || errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		_ = write(filepath.Join(path, "cgroup.kill"), "1")
		time.Sleep(10 * time.Millisecond)
	}
	return fmt.Errorf("remove cgroup: %w", err)
}

// verdict says what the kernel did to the processes of a group; empty: nothing.
func verdict(path string, l limits, killed bool) string {
	if l.memoryMax > 0 && event(filepath.Join(path, "memory.events"), "oom_kill") > 0 {
		if killed {
			return fmt.Sprintf("killed by the kernel: out of memory, limit %d bytes", l.memoryMax)
		}
		return fmt.Sprintf("the kernel killed one of its processes: out of memory, limit %d bytes", l.memoryMax)
	}
	if tasksRefused(path, l) > 0 {
		return refusedTask(l)
	}
	return ""
}

// tasksRefused counts how often the limit on tasks was hit.
func tasksRefused(path string, l limits) uint64 {
	if path == "" || l.pidsMax == 0 {
		return 0
	}
	return event(filepath.Join(path, "pids.events"), "max")
}

func event(path, name string) uint64 {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	return parseEvent(data, name)
}

// write opens without O_CREATE: a missing control file must not look like success.
func write(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}
