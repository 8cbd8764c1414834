//go:build !linux

package host

import (
	"log/slog"
	"os"
	"os/exec"
)

// What a host leaves behind when it is killed can be told from other processes
// on Linux only.
func sweep(string, *slog.Logger) {}

func bootID() string { return "unknown" }

func pidSpace() string { return "" }

func processMark(pid int) mark { return mark{PID: pid} }

func removeTree(dir string) error { return os.RemoveAll(dir) }

// await leaves the waiting to Wait.
func await(*exec.Cmd) bool { return false }

func killedBySignal(error) bool { return false }
