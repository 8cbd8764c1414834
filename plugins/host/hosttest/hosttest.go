// Package hosttest starts a real plugin host in tests: a folder of pinned
// binaries, a shim, and sockets that plugin uids can reach.
package hosttest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/plugins/host"
	"github.com/better-compute/site-appliance/plugins/sandbox"
)

const shimWord = "bcx-shim"

// Shim lets a test binary act as the shim: call it first in TestMain.
func Shim() {
	if len(os.Args) > 1 && os.Args[1] == shimWord {
		os.Exit(sandbox.ShimMain(os.Args[2:]))
	}
}

// NeedsRoot skips a test that gives plugins a uid of their own.
func NeedsRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: plugins get a uid of their own")
	}
}

// Dir is a folder of plugins with its pins file.
type Dir struct {
	t    testing.TB
	Path string
	pins []string
}

// NewDir makes an empty one.
func NewDir(t testing.TB) *Dir {
	t.Helper()
	return &Dir{t: t, Path: t.TempDir()}
}

// Add puts content in as an executable, and pins it.
func (d *Dir) Add(name string, content []byte) {
	d.t.Helper()
	sum := sha256.Sum256(content)
	d.AddPinned(name, content, hex.EncodeToString(sum[:]))
}

// AddPinned is Add with a pin of the test's choice.
func (d *Dir) AddPinned(name string, content []byte, pin string) {
	d.t.Helper()
	if err := os.WriteFile(filepath.Join(d.Path, name), content, 0o755); err != nil {
		d.t.Fatal(err)
	}
	d.pins = append(d.pins, pin+"  "+name)
	d.WritePins(strings.Join(d.pins, "\n") + "\n")
}

// WritePins replaces the pins file.
func (d *Dir) WritePins(text string) {
	d.t.Helper()
	if err := os.WriteFile(filepath.Join(d.Path, "pins"), []byte(text), 0o644); err != nil {
		d.t.Fatal(err)
	}
}

// Self is the test binary's content: it serves as a plugin when TestMain says so.
func Self(t testing.TB) []byte {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

// Build compiles a command as the image does.
func Build(t testing.TB, pkg string) []byte {
	t.Helper()
	out := filepath.Join(t.TempDir(), "plugin")
	cmd := exec.Command("go", "build", "-trimpath", "-o", out, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", pkg, err, text)
	}
	content, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

// Config is a sandboxed host's over d, with the test binary as shim.
func (d *Dir) Config() host.Config {
	d.t.Helper()
	// t.TempDir lies in a folder that other uids cannot enter.
	root, err := os.MkdirTemp("", "bcx")
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { os.RemoveAll(root) })
	if err := os.Chmod(root, 0o711); err != nil {
		d.t.Fatal(err)
	}
	return host.Config{
		Dir: d.Path, Sandbox: true, Shim: []string{"/proc/self/exe", shimWord}, SocketRoot: root,
		Log: slog.New(slog.NewTextHandler(d.t.Output(), nil)),
	}
}

// Start starts a host and closes it with the test.
func Start(t testing.TB, c host.Config) *host.Host {
	t.Helper()
	h, err := host.Start(context.Background(), c)
	if err != nil {
		t.Fatalf("Start: %v", err)
	}
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return h
}
