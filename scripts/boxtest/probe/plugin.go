package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/sdk"
)

const (
	kind = "probe"
	// nothing is this program's argument to end at once.
	nothing = "nothing"
)

type probe struct{}

// plugin serves the driver of that name: what a plugin can try.
func plugin(name string) int {
	op := func(f func(driver.Args) (any, error)) driver.Operation[probe] {
		return func(_ *driver.Context, _ probe, args driver.Args) (any, error) { return f(args) }
	}
	k := driver.Kind[probe]{Name: kind, Operations: map[string]driver.Operation[probe]{
		"calls":  op(func(driver.Args) (any, error) { return tryCalls(), nil }),
		"clones": op(func(driver.Args) (any, error) { return tryClones(), nil }),
		"clone3": op(func(driver.Args) (any, error) {
			_, _, e := unix.RawSyscall(unix.SYS_CLONE3, 0, 0, 0)
			return map[string]string{"clone3": unix.ErrnoName(e)}, nil
		}),
		"open":     op(tryOpen),
		"ipmitool": op(ipmitool),
		"fill":     op(fill),
		"breed":    op(breed),
	}}
	d, err := driver.Define(driver.Spec[struct{}]{
		ID: name, Version: "1.0.0", RunsOn: "site",
		Parse: func(json.RawMessage) (struct{}, error) { return struct{}{}, nil },
	}, driver.Implement(k, func(struct{}, *driver.Context) (probe, error) { return probe{}, nil }))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return sdk.Main(sdk.Options{PluginVersion: "test"}, d)
}

func errno(err error) string {
	var e unix.Errno
	switch {
	case err == nil:
		return ""
	case errors.As(err, &e):
		return unix.ErrnoName(e)
	}
	return err.Error()
}

// tryCalls makes every denied call with arguments that cannot do anything: what
// lets them through answers another error, or does nothing.
func tryCalls() map[string]string {
	const (
		bad = ^uintptr(0) // no descriptor, no flags, no process
		pid = 0x3fffffff
	)
	nowhere := []byte("/nonexistent\x00")
	path := uintptr(unsafe.Pointer(&nowhere[0]))
	answers := map[string]string{}
	for name, c := range map[string][]uintptr{
		"kexec_load":        {unix.SYS_KEXEC_LOAD, 0, 1000, 0, 0},
		"kexec_file_load":   {unix.SYS_KEXEC_FILE_LOAD, bad, bad, 0, 0, bad},
		"init_module":       {unix.SYS_INIT_MODULE, 0, 0, path},
		"finit_module":      {unix.SYS_FINIT_MODULE, bad, path, 0x7fff},
		"delete_module":     {unix.SYS_DELETE_MODULE, path, unix.O_NONBLOCK},
		"mount":             {unix.SYS_MOUNT, path, path, path, 0, 0},
		"umount2":           {unix.SYS_UMOUNT2, path, 0},
		"pivot_root":        {unix.SYS_PIVOT_ROOT, path, path},
		"open_tree":         {unix.SYS_OPEN_TREE, bad, path, bad},
		"move_mount":        {unix.SYS_MOVE_MOUNT, bad, path, bad, path, bad},
		"fsopen":            {unix.SYS_FSOPEN, path, 0},
		"fsconfig":          {unix.SYS_FSCONFIG, bad, 0, 0, 0, 0},
		"fsmount":           {unix.SYS_FSMOUNT, bad, bad, 0},
		"fspick":            {unix.SYS_FSPICK, bad, path, bad},
		"mount_setattr":     {unix.SYS_MOUNT_SETATTR, bad, path, bad, 0, 0},
		"open_tree_attr":    {467, bad, path, bad, 0, 0},
		"unshare":           {unix.SYS_UNSHARE, 1},
		"setns":             {unix.SYS_SETNS, bad, 0},
		"swapon":            {unix.SYS_SWAPON, path, 0},
		"swapoff":           {unix.SYS_SWAPOFF, path},
		"reboot":            {unix.SYS_REBOOT, 0, 0, 0, 0}, // without its magic numbers
		"bpf":               {unix.SYS_BPF, 9999, 0, 0},
		"io_uring_setup":    {unix.SYS_IO_URING_SETUP, 0, 0},
		"io_uring_enter":    {unix.SYS_IO_URING_ENTER, bad, 0, 0, 0, 0, 0},
		"io_uring_register": {unix.SYS_IO_URING_REGISTER, bad, 0, 0, 0},
		"ptrace":            {unix.SYS_PTRACE, unix.PTRACE_PEEKDATA, pid, 0, 0},
		"process_vm_readv":  {unix.SYS_PROCESS_VM_READV, pid, 0, 0, 0, 0, 1},
		"process_vm_writev": {unix.SYS_PROCESS_VM_WRITEV, pid, 0, 0, 0, 0, 1},
		"add_key":           {unix.SYS_ADD_KEY, 0, 0, 0, 0, 0},
		"request_key":       {unix.SYS_REQUEST_KEY, 0, 0, 0, 0},
		"keyctl":            {unix.SYS_KEYCTL, 9999},
		"perf_event_open":   {unix.SYS_PERF_EVENT_OPEN, 0, 0, 0, bad, 0},
		"userfaultfd":       {unix.SYS_USERFAULTFD, bad},
		"open_by_handle_at": {unix.SYS_OPEN_BY_HANDLE_AT, bad, 0, 0},
		"settimeofday":      {unix.SYS_SETTIMEOFDAY, 0, 0},
		"clock_settime":     {unix.SYS_CLOCK_SETTIME, 9999, 0},
		"adjtimex":          {unix.SYS_ADJTIMEX, 0},
		"clock_adjtime":     {unix.SYS_CLOCK_ADJTIME, 9999, 0},
		"acct":              {unix.SYS_ACCT, path},
		"quotactl":          {unix.SYS_QUOTACTL, 0xffffffff, 0, 0, 0},
		"quotactl_fd":       {unix.SYS_QUOTACTL_FD, bad, 0xffffffff, 0, 0},
		"lookup_dcookie":    {unix.SYS_LOOKUP_DCOOKIE, 0, 0, 0},
		"syslog":            {unix.SYS_SYSLOG, 9999, 0, 0},
		"iopl":              {sysIopl, 4},
		"ioperm":            {sysIoperm, bad, 1, 1},
	} {
		if c[0] == 0 {
			continue
		}
		c = append(c, 0, 0, 0, 0, 0, 0)
		_, _, e := unix.Syscall6(c[0], c[1], c[2], c[3], c[4], c[5], c[6])
		answers[name] = ""
		if e != 0 {
			answers[name] = unix.ErrnoName(e)
		}
	}
	return answers
}

// tryClones starts a program in each new namespace that clone(2) can make.
func tryClones() map[string]string {
	answers := map[string]string{}
	for name, flag := range map[string]uintptr{
		"none": 0, "NEWNS": unix.CLONE_NEWNS, "NEWCGROUP": unix.CLONE_NEWCGROUP, "NEWUTS": unix.CLONE_NEWUTS,
		"NEWIPC": unix.CLONE_NEWIPC, "NEWUSER": unix.CLONE_NEWUSER, "NEWPID": unix.CLONE_NEWPID, "NEWNET": unix.CLONE_NEWNET,
	} {
		cmd := exec.Command("/proc/self/exe", nothing)
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flag}
		answers[name] = errno(cmd.Run())
	}
	return answers
}

func tryOpen(args driver.Args) (any, error) {
	answers := map[string]string{}
	for _, a := range args {
		var path string
		if json.Unmarshal(a, &path) != nil {
			return nil, errs.New(errs.InvalidArgs, "want paths")
		}
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			unix.Close(fd)
		}
		answers[path] = errno(err)
	}
	return answers, nil
}

// ipmitool asks a BMC that is not there, with a password from a file.
func ipmitool(args driver.Args) (any, error) {
	var file string
	if len(args) != 1 || json.Unmarshal(args[0], &file) != nil {
		return nil, errs.New(errs.InvalidArgs, "want a path")
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	if _, err := w.WriteString("secret\n"); err != nil {
		return nil, err
	}
	w.Close()
	cmd := exec.Command("/usr/bin/ipmitool", "-I", "lanplus", "-H", "127.0.0.1", "-N", "1", "-R", "1", "-U", "root", "-f", file, "power", "status")
	cmd.ExtraFiles = []*os.File{r}
	out, err := cmd.CombinedOutput()
	if _, ended := errors.AsType[*exec.ExitError](err); err != nil && !ended {
		return nil, err
	}
	return string(out), nil
}

// fill uses memory until somebody stops it.
func fill(driver.Args) (any, error) {
	var kept [][]byte
	for range 1 << 12 {
		b := make([]byte, 1<<20)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		kept = append(kept, b)
	}
	return len(kept), nil
}

// breed starts processes until one is refused, and ends them.
func breed(driver.Args) (any, error) {
	var children []*exec.Cmd
	defer func() {
		for _, c := range children {
			_ = c.Process.Kill()
			_ = c.Wait()
		}
	}()
	for range 1 << 12 {
		// It reads from a pipe that stays empty.
		cmd := exec.Command("/proc/self/exe", nothing, "wait")
		if _, err := cmd.StdinPipe(); err != nil {
			return nil, err
		}
		if err := cmd.Start(); err != nil {
			return nil, fmt.Errorf("after %d: %w", len(children), err)
		}
		children = append(children, cmd)
	}
	return len(children), nil
}
