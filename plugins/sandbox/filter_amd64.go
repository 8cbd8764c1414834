package sandbox

import "golang.org/x/sys/unix"

const (
	auditArch = unix.AUDIT_ARCH_X86_64
	// x32Bit marks calls of the x32 ABI, which share the architecture's number.
	x32Bit = 0x40000000
)

var deniedHere = []uint32{unix.SYS_IOPL, unix.SYS_IOPERM}
