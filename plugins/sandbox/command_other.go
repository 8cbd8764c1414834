//go:build !linux

package sandbox

import (
	"os/exec"
	"runtime"
)

// Command prepares the process: by path, as the caller's user, in a process
// group of its own where there are such.
func Command(s Spec) (*exec.Cmd, error) {
	if err := s.check(runtime.GOOS); err != nil {
		return nil, err
	}
	return &exec.Cmd{
		Path: s.Binary.Name(), Args: []string{s.Name}, Env: s.Env, SysProcAttr: ownGroup(),
	}, nil
}
