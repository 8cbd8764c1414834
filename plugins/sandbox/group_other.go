//go:build !unix

package sandbox

import "syscall"

func ownGroup() *syscall.SysProcAttr { return nil }
