package mainjob

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/image/qemutest"
)

// TestInterrupt presses Ctrl-C in the middle of the demo: every process that it
// started ends, every namespace goes, and a bystander lives on.
func TestInterrupt(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: network namespaces")
	}
	qemutest.Need(t, true)
	dir := t.TempDir()
	demo := filepath.Join(dir, "demo")
	if out, err := exec.Command("go", "build", "-o", demo, "../demo").CombinedOutput(); err != nil {
		t.Fatalf("build the demo: %v\n%s", err, out)
	}
	if err := os.Mkdir(filepath.Join(dir, "out"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"bin", "qemu-amd64"} {
		built, err := filepath.Abs(filepath.Join("../../out", name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(built, filepath.Join(dir, "out", name)); err != nil {
			t.Fatal(err)
		}
	}
	// It names the same folder as what the demo starts.
	bystander := exec.Command("sleep", "300")
	bystander.Args[0] = filepath.Join(dir, "bystander")
	if err := bystander.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = bystander.Process.Kill()
		_ = bystander.Wait()
	}()

	var out bytes.Buffer
	cmd := exec.Command(demo)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	serial := filepath.Join(dir, "out", "demo", "box", "serial.log")
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		if st, err := os.Stat(serial); err == nil && st.Size() > 0 {
			break
		}
		if time.Now().After(deadline) {
			_ = cmd.Process.Kill()
			t.Fatalf("the demo started no box:\n%s", out.String())
		}
	}
	if got := running(dir); len(got) < 4 {
		t.Errorf("only %q run before the interrupt: the test would see nothing end", got)
	}
	if err := syscall.Kill(-cmd.Process.Pid, syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err == nil {
			t.Error("an interrupted demo exits with 0")
		}
	case <-time.After(time.Minute):
		_ = cmd.Process.Kill()
		t.Fatal("the demo goes on after the interrupt")
	}
	if got := running(dir); len(got) != 1 || !strings.Contains(got[0], "bystander") {
		t.Errorf("after the interrupt %q run, want only the bystander", got)
	}
	if left, _ := filepath.Glob("/run/netns/bc" + strconv.Itoa(cmd.Process.Pid) + "-*"); len(left) > 0 {
		t.Errorf("namespaces left: %q", left)
	}
}

// running lists the command lines that name dir.
func running(dir string) []string {
	var out []string
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		if data, err := os.ReadFile(f); err == nil && bytes.Contains(data, []byte(dir)) {
			out = append(out, strings.ReplaceAll(string(data), "\x00", " "))
		}
	}
	return out
}
