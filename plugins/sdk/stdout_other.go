//go:build !linux

package sdk

import "os"

// takeStdout answers the process's stdout, and lets prints go to stderr.
func takeStdout() (*os.File, error) {
	stdout := os.Stdout
	os.Stdout = os.Stderr
	return stdout, nil
}
