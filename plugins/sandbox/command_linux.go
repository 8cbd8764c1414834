package sandbox

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"
)

// Command prepares the process. It gets a process group of its own and dies
// with the thread that starts it: the caller locks its goroutine to that
// thread for as long as the process lives.
func Command(s Spec) (*exec.Cmd, error) {
	if err := s.check("linux"); err != nil {
		return nil, err
	}
	cmd := &exec.Cmd{
		Env: s.Env, Dir: "/",
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL},
	}
	if s.Cgroup != nil {
		cmd.SysProcAttr.UseCgroupFD = true
		cmd.SysProcAttr.CgroupFD = int(s.Cgroup.Fd())
	}
	if len(s.Shim) == 0 {
		// The child's copy of the descriptor is closed by the exec that it serves.
		cmd.Path, cmd.Args = fmt.Sprintf("/proc/self/fd/%d", s.Binary.Fd()), []string{s.Name}
		if s.UID >= 0 {
			cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(s.UID), Gid: uint32(s.GID)}
		}
		return cmd, nil
	}
	cmd.Path, cmd.ExtraFiles = s.Shim[0], []*os.File{s.Binary} // binaryFD
	cmd.Args = append([]string{}, s.Shim...)
	cmd.Args = append(cmd.Args,
		"-uid="+strconv.Itoa(s.UID), "-gid="+strconv.Itoa(s.GID), "-parent="+strconv.Itoa(os.Getpid()),
		"-confine="+strconv.FormatBool(s.Confine), "-held="+strconv.FormatBool(s.Held), "-folder="+s.Folder, "--", s.Name)
	return cmd, nil
}
