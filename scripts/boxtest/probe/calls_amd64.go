package main

import "golang.org/x/sys/unix"

const (
	sysIopl   = unix.SYS_IOPL
	sysIoperm = unix.SYS_IOPERM
)
