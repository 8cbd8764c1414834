// Package node builds the conformance driver in TypeScript, as one script and
// as a Node single executable.
package node

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

// Built are the files of a build.
type Built struct {
	// Node is the runtime for Script.
	Node, Script string
	// Executable holds both.
	Executable string
}

// Needs says what a build lacks on this machine; empty: nothing.
func Needs() string {
	var missing []string
	for _, tool := range []string{"npm", "protoc", "flock", "bash"} {
		if _, err := exec.LookPath(tool); err != nil {
			missing = append(missing, tool)
		}
	}
	return strings.Join(missing, ", ")
}

// Build runs the script build, which does nothing if this content is built. root
// is the folder of the module.
func Build(ctx context.Context, root string) (Built, error) {
	if runtime.GOOS != "linux" {
		return Built{}, fmt.Errorf("build the TypeScript plugin: no single executable for %s", runtime.GOOS)
	}
	cmd := exec.CommandContext(ctx, filepath.Join(root, "plugins/conformance/node/build"))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return Built{}, fmt.Errorf("build the TypeScript plugin: %w\n%s", err, stderr.String())
	}
	dir := strings.TrimSpace(string(out))
	return Built{filepath.Join(dir, "node"), filepath.Join(dir, "script.cjs"), filepath.Join(dir, "bcx-conformance-node")}, nil
}
