//go:build !unix

package h2

import "syscall"

// once: here a write waits, so that all is left to finish.
func once(*patient, syscall.RawConn) (syscall.RawConn, func(fd uintptr) bool) { return nil, nil }
