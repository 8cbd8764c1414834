//go:build !linux

package host

import (
	"errors"
	"fmt"
	"os"
	"runtime"
)

// prepareCgroup refuses: there are no cgroups here.
func prepareCgroup(dir string, l limits) error {
	if dir != "" || l.any() {
		return fmt.Errorf("a cgroup or limits are asked for, and %s has none", runtime.GOOS)
	}
	return nil
}

func leafCgroup(string, limits) (*os.File, error) { return nil, errors.ErrUnsupported }

func removeCgroup(string) error { return nil }

func killCgroup(string) {}

func verdict(string, limits, bool) string { return "" }

func tasksRefused(string, limits) uint64 { return 0 }
