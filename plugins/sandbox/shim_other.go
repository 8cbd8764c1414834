//go:build !linux

package sandbox

import (
	"fmt"
	"os"
	"runtime"
)

// ShimMain confines on Linux only: here it says so and answers the exit code.
func ShimMain([]string) int {
	fmt.Fprintln(os.Stderr, "bcx-shim: there is no sandbox on", runtime.GOOS)
	return shimFailed
}

// FileWall is 0: there is none.
func FileWall() int { return 0 }
