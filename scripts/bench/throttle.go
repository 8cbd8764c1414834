package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// sata is what an SSD on SATA III takes, in bytes a second.
const sata = 550e6

var errNoThrottle = errors.New("the disk cannot be held to a speed here")

// throttled runs f while this process and its children read and write dir's
// disk at no more than so many bytes a second.
func throttled(dir string, bytesPerSecond int64, f func() error) (err error) {
	disk, err := diskOf(dir)
	if err != nil {
		return fmt.Errorf("%w: %v", errNoThrottle, err)
	}
	root, limits, err := controller(disk, bytesPerSecond)
	if err != nil {
		return fmt.Errorf("%w: %v", errNoThrottle, err)
	}
	group := filepath.Join(root, fmt.Sprintf("bench-%d", os.Getpid()))
	if err := os.Mkdir(group, 0o755); err != nil {
		return fmt.Errorf("%w: %v", errNoThrottle, err)
	}
	defer func() { err = errors.Join(err, os.Remove(group)) }()
	for name, text := range limits {
		if err := os.WriteFile(filepath.Join(group, name), []byte(text), 0); err != nil {
			return fmt.Errorf("%w: %v", errNoThrottle, err)
		}
	}
	before, err := own(root)
	if err != nil {
		return err
	}
	self := fmt.Appendf(nil, "%d", os.Getpid())
	if err := os.WriteFile(filepath.Join(group, "cgroup.procs"), self, 0); err != nil {
		return fmt.Errorf("%w: %v", errNoThrottle, err)
	}
	defer func() { err = errors.Join(err, os.WriteFile(filepath.Join(before, "cgroup.procs"), self, 0)) }()
	return f()
}

const (
	rootV1 = "/sys/fs/cgroup/blkio"
	rootV2 = "/sys/fs/cgroup"
)

// controller is the root of the cgroups that limit disks, and the files that
// hold one to a speed.
func controller(disk string, speed int64) (string, map[string]string, error) {
	if _, err := os.Stat(filepath.Join(rootV2, "cgroup.controllers")); err == nil {
		if err := os.WriteFile(filepath.Join(rootV2, "cgroup.subtree_control"), []byte("+io"), 0); err != nil {
			return "", nil, err
		}
		return rootV2, map[string]string{"io.max": fmt.Sprintf("%s rbps=%d wbps=%d", disk, speed, speed)}, nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return "", nil, err
	}
	if _, err := os.Stat(rootV1); err != nil {
		return "", nil, err
	}
	limit := fmt.Sprintf("%s %d", disk, speed)
	return rootV1, map[string]string{"blkio.throttle.read_bps_device": limit, "blkio.throttle.write_bps_device": limit}, nil
}

// own is this process's group below root.
func own(root string) (string, error) {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) == 3 && (root == rootV1 && fields[1] == "blkio" || root == rootV2 && fields[0] == "0") {
			return filepath.Join(root, fields[2]), nil
		}
	}
	return "", fmt.Errorf("this process is in no group below %s", root)
}

// diskOf is major:minor of the whole disk that holds dir.
func diskOf(dir string) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return "", fmt.Errorf("stat %s: %w", dir, err)
	}
	sys, err := filepath.EvalSymlinks(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)))
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(filepath.Join(sys, "partition")); err == nil {
		sys = filepath.Dir(sys)
	}
	number, err := os.ReadFile(filepath.Join(sys, "dev"))
	if err != nil {
		return "", err
	}
	return strings.TrimSpace(string(number)), nil
}
