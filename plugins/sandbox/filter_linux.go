package sandbox

import (
	"errors"
	"runtime"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// installFilter puts the filter on every thread; no_new_privs is set already.
// An architecture without a filter gets none.
func installFilter() error {
	a, ok := abis[runtime.GOARCH]
	if !ok {
		return nil
	}
	raw, err := bpf.Assemble(a.filter())
	if err != nil {
		return err
	}
	code := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		code[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	prog := unix.SockFprog{Len: uint16(len(code)), Filter: &code[0]}
	thread, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER,
		unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		return errno
	}
	if thread != 0 {
		return errors.New("a thread could not take it")
	}
	return nil
}
