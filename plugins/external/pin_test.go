//go:build linux

package external

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

func TestPinnedFile(t *testing.T) {
	for _, tt := range []struct{ argv, want string }{
		{"/opt/acme-bmc", "/opt/acme-bmc"},
		{"/opt/acme-bmc script.js", "/opt/acme-bmc"},
		{"./acme", "./acme"},
		{"acme", ""},
		{"/usr/bin/node dist/acme.js", "dist/acme.js"},
		{"node acme.js other.js", "acme.js"},
		{"nodejs --max-old-space-size=256 /a/acme.js --verbose", "/a/acme.js"},
		{"node.exe acme.js", "acme.js"},
		{"node --import=./hook.mjs acme.mjs", "acme.mjs"},
		{"bun acme.ts", "acme.ts"},
		{"bun run acme.ts", "acme.ts"},
		{"bun --smol run --hot acme.ts", "acme.ts"},
		{"/opt/bun run ./run.ts", "./run.ts"},
		{"/opt/mynode acme.js", "/opt/mynode"},
		{"/opt/node18 acme.js", "/opt/node18"},
		// Not what would run, or not to be known.
		{"node", ""}, {"node --version", ""}, {"bun run", ""}, {"bun install", ""}, {"bun run dev", ""}, {"bun run run", ""},
		{"node -e code() acme.js", ""}, {"node --eval=1 acme.js", ""}, {"node -p 1 acme.js", ""}, {"node - acme.js", ""},
		{"node --require ./hook.js acme.js", ""}, {"node --import ./hook.mjs acme.mjs", ""}, {"node -r ./hook.js acme.js", ""},
		{"node --max-old-space-size 256 acme.js", ""}, {"node inspect acme.js", ""}, {"node run acme.js", ""},
		{"", ""},
	} {
		got, err := PinnedFile(strings.Fields(tt.argv))
		if got != tt.want || (err == nil) != (tt.want != "") || err != nil && errs.CodeOf(err) != errs.InvalidConfig {
			t.Errorf("PinnedFile(%s) = %q, %v, want %q", tt.argv, got, err, tt.want)
		}
	}
}

// FuzzPinnedFile: what is answered is an argument, and the first that could be it.
func FuzzPinnedFile(f *testing.F) {
	f.Add("node\n--a=b\nacme.js")
	f.Add("bun\nrun\nacme.ts\nx")
	f.Add("/opt/acme")
	f.Fuzz(func(t *testing.T, line string) {
		argv := strings.Split(line, "\n")
		got, err := PinnedFile(argv)
		if err != nil {
			return
		}
		if got == "" || interpreter(argv[0]) != "" && (strings.HasPrefix(got, "-") || got == argv[0] && len(argv) == 1) {
			t.Errorf("PinnedFile(%q) = %q", argv, got)
		}
	})
}

func TestSHA256File(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path, []byte("test"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := SHA256File(path); err != nil || got != "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08" {
		t.Errorf("SHA256File = %s, %v", got, err)
	}
	for _, bad := range []string{filepath.Dir(path), path + ".none", "/dev/null"} {
		if got, err := SHA256File(bad); err == nil {
			t.Errorf("SHA256File(%s) = %s", bad, got)
		}
	}
}

// TestInterpreterRunsThePinnedScript: node is found, the script's pin decides.
func TestInterpreterRunsThePinnedScript(t *testing.T) {
	node, err := exec.LookPath("node")
	if err != nil {
		t.Skip("needs node: apt-get install nodejs")
	}
	script := filepath.Join(t.TempDir(), "acme.js")
	// It becomes the test's plugin: that a script speaks bcx is another test.
	path, _ := self(t)
	code := `const {spawn} = require('child_process');
const p = spawn(process.argv[2], [], {stdio: 'inherit'});
process.on('SIGTERM', () => {});
p.on('exit', c => process.exit(c));`
	if err := os.WriteFile(script, []byte(code), 0o600); err != nil {
		t.Fatal(err)
	}
	pin, err := SHA256File(script)
	if err != nil {
		t.Fatal(err)
	}
	for _, program := range []string{node, "node"} {
		o := options(t, "")
		o.Command = []string{program, "--max-old-space-size=128", script, path}
		d := New(o)
		if _, err := d.Start(t.Context()); errs.CodeOf(err) != errs.InvalidConfig || !strings.Contains(err.Error(), script) {
			t.Errorf("the program's pin instead of the script's: Start = %v, want invalid-config", err)
		}
		d.Close()
		o.SHA256 = pin
		_, def := run1(t, o)
		if got, err := invoke(t, def, "echo", "", "[1]"); err != nil || got != "[1]" {
			t.Errorf("echo = %s, %v", got, err)
		}
	}
}
