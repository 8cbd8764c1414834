// Package sandbox starts a plugin's process: confined, with a uid of its own,
// executed from the descriptor that was hashed.
package sandbox

import (
	"fmt"
	"os"
)

// shimFailed is the shim's exit code when it could not become the plugin.
const shimFailed = 70

// GoAhead is what a held shim waits for.
const GoAhead = 'x'

// Spec is a process to start.
type Spec struct {
	// Shim is the argv prefix of the program that calls ShimMain; empty: the
	// binary is executed without a shim, and Confine must be false.
	Shim []string
	// Binary is executed from this open descriptor, never by its path; only
	// where there is no such thing (not on Linux) by that.
	Binary *os.File
	// Held keeps the shim from executing the binary until GoAhead comes on stdin,
	// which the binary does not see; anything else, or stdin's end, ends the shim.
	Held bool
	// Name is the process's argv[0].
	Name string
	// UID and GID are the process's own; negative: those of the caller.
	UID, GID int
	// Confine sets no_new_privs, the wall around files and the system call filter.
	Confine bool
	// Folder is where a confined process may write; empty: nowhere.
	Folder string
	// Env is the whole environment.
	Env []string
	// Cgroup is an open cgroup v2 directory to start in; nil: the caller's.
	Cgroup *os.File
}

// check refuses what cannot be started on an operating system as asked.
func (s Spec) check(goos string) error {
	if s.Confine && len(s.Shim) == 0 {
		return fmt.Errorf("confine %s: no shim is set", s.Name)
	}
	if s.Held && len(s.Shim) == 0 {
		return fmt.Errorf("hold %s: no shim is set", s.Name)
	}
	if goos == "linux" {
		return nil
	}
	for _, c := range []struct {
		asked bool
		what  string
	}{{len(s.Shim) > 0, "a shim"}, {s.UID >= 0, "a user of its own"}, {s.Cgroup != nil, "a cgroup"}} {
		if c.asked {
			return fmt.Errorf("start %s: %s is asked for, and %s has no sandbox: it runs with sandbox = false only", s.Name, c.what, goos)
		}
	}
	return nil
}
