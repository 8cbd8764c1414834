// Package sandbox starts a plugin's process: confined, with a uid of its own,
// executed from the descriptor that was hashed.
package sandbox

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"
)

// Spec is a process to start.
type Spec struct {
	// Shim is the argv prefix of the program that calls ShimMain; empty: the
	// binary is executed without a shim, and Confine must be false.
	Shim []string
	// Binary is executed from this open descriptor, never by path.
	Binary *os.File
	// Name is the process's argv[0].
	Name string
	// UID and GID are the process's own; negative: those of the caller.
	UID, GID int
	// Confine sets no_new_privs and the system call filter.
	Confine bool
	// Env is the whole environment.
	Env []string
	// Cgroup is an open cgroup v2 directory to start in; nil: the caller's.
	Cgroup *os.File
}

// Command prepares the process. It gets a process group of its own and dies
// with the thread that starts it: the caller locks its goroutine to that
// thread for as long as the process lives.
func Command(s Spec) (*exec.Cmd, error) {
	cmd := &exec.Cmd{
		Env: s.Env, Dir: "/", ExtraFiles: []*os.File{s.Binary},
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL},
	}
	if s.Cgroup != nil {
		cmd.SysProcAttr.UseCgroupFD = true
		cmd.SysProcAttr.CgroupFD = int(s.Cgroup.Fd())
	}
	if len(s.Shim) == 0 {
		if s.Confine {
			return nil, fmt.Errorf("confine %s: no shim is set", s.Name)
		}
		cmd.Path, cmd.Args = "/proc/self/fd/3", []string{s.Name}
		if s.UID >= 0 {
			cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(s.UID), Gid: uint32(s.GID)}
		}
		return cmd, nil
	}
	cmd.Path = s.Shim[0]
	cmd.Args = append([]string{}, s.Shim...)
	cmd.Args = append(cmd.Args,
		"-uid="+strconv.Itoa(s.UID), "-gid="+strconv.Itoa(s.GID),
		"-parent="+strconv.Itoa(os.Getpid()), "-confine="+strconv.FormatBool(s.Confine), "--", s.Name)
	return cmd, nil
}
