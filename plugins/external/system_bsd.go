//go:build unix && !linux

package external

import "syscall"

// attributes put the plugin in a group of its own.
func attributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
