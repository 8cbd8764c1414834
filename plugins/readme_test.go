package plugins_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/plugins/conformance"
)

// block is a fenced piece of Go with a file name.
var block = regexp.MustCompile("(?s)```go ([a-z_]+\\.go)\n(.*?)```\n")

// TestReadme builds, tests and runs the driver of README.md, in a module of its own.
func TestReadme(t *testing.T) {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	files := block.FindAllStringSubmatch(string(text), -1)
	if len(files) != 3 {
		t.Fatalf("README.md has %d Go files, want 3", len(files))
	}
	for _, f := range files {
		if err := os.WriteFile(filepath.Join(dir, f[1]), []byte(f[2]), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	module(t, dir)
	run := func(args ...string) {
		t.Helper()
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-mod=mod", "GOPROXY=off", "GOWORK=off")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	if out, err := exec.Command("gofmt", "-l", dir).CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("gofmt: %v %s", err, out)
	}
	run("go", "vet", ".")
	run("go", "test", "./...")
	run("go", "build", "-o", "acme-bmc", ".")

	report, err := conformance.Run(t.Context(), []string{filepath.Join(dir, "acme-bmc")}, conformance.Options{Patience: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range report.Results {
		if r.Status == conformance.Failed {
			t.Errorf("%s: %s", r.Rule.ID, r.Reason)
		}
	}
	if !report.OK() {
		t.Error("no rule was checked")
	}
}

// module makes dir a module that requires this one as it lies here.
func module(t *testing.T, dir string) {
	t.Helper()
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	ours, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	const path = "github.com/better-compute/site-appliance"
	text, ok := strings.CutPrefix(string(ours), "module "+path+"\n")
	if !ok {
		t.Fatal("go.mod does not begin with its module")
	}
	text = "module acme-bmc\n" + text + "\nrequire " + path + " v0.0.0\n\nreplace " + path + " => " + root + "\n"
	if err := os.WriteFile(filepath.Join(dir, "go.mod"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	sums, err := os.ReadFile(filepath.Join(root, "go.sum"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "go.sum"), sums, 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestReadmeTable keeps the README's table of operations complete.
func TestReadmeTable(t *testing.T) {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile("conformance/reference/reference.go")
	if err != nil {
		t.Fatal(err)
	}
	operations := regexp.MustCompile(`(?m)^\t\t\t"([a-zA-Z]+)":`).FindAllStringSubmatch(string(source), -1)
	if len(operations) < 15 {
		t.Fatalf("reference.go declares %d operations", len(operations))
	}
	for _, op := range operations {
		if !strings.Contains(string(text), "`"+op[1]+"(") {
			t.Errorf("README.md does not tell what %s does", op[1])
		}
	}
}
