package sandbox

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// binaryFD is where Command puts the open binary.
const binaryFD = 3

// ShimMain turns this process into the plugin at descriptor 3. It returns only
// when that failed, with the exit code; why is on stderr.
func ShimMain(args []string) int {
	if err := shim(args); err != nil {
		fmt.Fprintln(os.Stderr, "bcx-shim:", err)
	}
	return shimFailed
}

func shim(args []string) error {
	// Every step below holds for a thread, and exec keeps the caller's.
	runtime.LockOSThread()
	flags := flag.NewFlagSet("bcx-shim", flag.ContinueOnError)
	uid := flags.Int("uid", -1, "uid to become; negative: stay")
	gid := flags.Int("gid", -1, "gid to become")
	parent := flags.Int("parent", 0, "pid of the host")
	confine := flags.Bool("confine", true, "set no_new_privs, the wall around files and the filter")
	held := flags.Bool("held", false, "wait for the go-ahead on stdin before executing the plugin")
	folder := flags.String("folder", "", "the only folder to write in")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() < 1 {
		return fmt.Errorf("no program name")
	}
	if *uid >= 0 {
		if err := become(*uid, *gid); err != nil {
			return err
		}
	}
	// A change of uid clears the death signal, so it is armed after; a host that
	// died before that has left another parent behind.
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return fmt.Errorf("set death signal: %w", err)
	}
	if os.Getppid() != *parent {
		return fmt.Errorf("the host (pid %d) is gone", *parent)
	}
	// A core file would hold the credentials of the calls in flight. With a limit of
	// none the kernel still pipes one to a program that handles them, with one byte
	// it does neither (core(5)).
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: 1, Max: 1}); err != nil {
		return fmt.Errorf("forbid core files: %w", err)
	}
	unix.Umask(0o077)
	if *confine {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("set no_new_privs: %w", err)
		}
		if err := wallFiles(*folder, binaryFD); err != nil {
			return fmt.Errorf("wall off files: %w", err)
		}
		if err := installFilter(); err != nil {
			return fmt.Errorf("install system call filter: %w", err)
		}
	}
	if err := unix.CloseRange(binaryFD+1, ^uint(0)>>1, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return fmt.Errorf("close inherited descriptors: %w", err)
	}
	unix.CloseOnExec(binaryFD)
	if *held {
		if err := awaitGoAhead(); err != nil {
			return err
		}
	}
	err := unix.Exec(fmt.Sprintf("/proc/self/fd/%d", binaryFD), flags.Args(), os.Environ())
	return fmt.Errorf("execute the plugin: %w", err)
}

// awaitGoAhead waits for one byte and takes no more: what follows is the plugin's.
func awaitGoAhead() error {
	var b [1]byte
	for {
		n, err := unix.Read(0, b[:])
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return fmt.Errorf("wait for the go-ahead: %w", err)
		case n == 0 || b[0] != GoAhead:
			return errors.New("the host gave no go-ahead")
		}
		return nil
	}
}

func become(uid, gid int) error {
	if gid < 0 {
		return fmt.Errorf("uid %d without a gid", uid)
	}
	if err := syscall.Setgroups(nil); err != nil {
		return fmt.Errorf("drop groups: %w", err)
	}
	if err := syscall.Setresgid(gid, gid, gid); err != nil {
		return fmt.Errorf("become gid %d: %w", gid, err)
	}
	if err := syscall.Setresuid(uid, uid, uid); err != nil {
		return fmt.Errorf("become uid %d: %w", uid, err)
	}
	return nil
}
