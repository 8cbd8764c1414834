package process

import (
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// gateFD is where the gate finds its pipe.
const gateFD = 3

// The gate's exit codes, as shells use them.
const (
	exitGate = 125
	exitExec = 127
)

// GateMain is the child between fork and the instance's program. It waits until
// the agent has written down which process it is: an agent that is killed
// before that closes the pipe, and nothing unknown runs. args are the program
// and its arguments; the answer is an exit code, since a good run never returns.
func GateMain(args []string) int {
	if len(args) == 0 {
		fmt.Fprintln(os.Stderr, "instance gate: nothing to run")
		return exitGate
	}
	var word [1]byte
	for {
		n, err := unix.Read(gateFD, word[:])
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			return exitGate
		}
		break
	}
	// No descriptor of the agent's reaches the program.
	if err := unix.CloseRange(gateFD, ^uint(0)>>1, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		unix.CloseOnExec(gateFD)
	}
	err := syscall.Exec(args[0], args, os.Environ())
	fmt.Fprintf(os.Stderr, "instance gate: run %s: %v\n", args[0], err)
	return exitExec
}
