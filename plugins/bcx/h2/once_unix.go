//go:build unix

package h2

import (
	"errors"
	"syscall"
)

// once is how p.kept is written without waiting.
func once(p *patient, raw syscall.RawConn) (syscall.RawConn, func(fd uintptr) bool) {
	return raw, func(fd uintptr) bool {
		for {
			if p.n, p.err = syscall.Write(int(fd), p.kept); !errors.Is(p.err, syscall.EINTR) {
				return true
			}
		}
	}
}
