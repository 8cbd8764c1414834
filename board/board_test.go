package board

import (
	"os"
	"strings"
	"testing"
)

func TestLoadEveryBoard(t *testing.T) {
	entries, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		n++
		b, err := Load("..", e.Name())
		if err != nil {
			t.Errorf("Load(%q) = %v", e.Name(), err)
			continue
		}
		if b.Name != e.Name() || len(b.Modules.Common) == 0 || len(b.Programs.Of("site")) == 0 {
			t.Errorf("Load(%q) = %+v", e.Name(), b)
		}
		if !strings.Contains(b.Kernel.Cmdline, "panic=") {
			t.Errorf("board %s: cmdline %q never leaves a panic: nobody can walk up to it", e.Name(), b.Kernel.Cmdline)
		}
	}
	if n == 0 {
		t.Error("no board is there")
	}
}

func TestLoadErrors(t *testing.T) {
	good, err := os.ReadFile("qemu-amd64/board.toml")
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ old, new, want string }{
		{"[boot]\nloader", "[boot]\nloadr", `unknown key "boot.loadr"`},
		{`arch = "amd64"`, ``, "arch is missing"},
		{`arch = "amd64"`, `arch = amd64`, "board.toml:2:"},
	} {
		text := strings.Replace(string(good), tt.old, tt.new, 1)
		if text == string(good) {
			t.Fatalf("%q is not in the board", tt.old)
		}
		if _, err := parse("board.toml", []byte(text)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("parse(%q for %q) = %v, want %q", tt.new, tt.old, err, tt.want)
		}
	}
	if _, err := Load("..", "../board"); err == nil {
		t.Error("a board name that is a path was taken")
	}
}
