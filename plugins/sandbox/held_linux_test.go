package sandbox

import (
	"os"
	"strings"
	"testing"
)

// A held shim executes nothing before its go-ahead, and leaves what follows to the
// program.
func TestHeld(t *testing.T) {
	shell, err := os.Open("/bin/sh")
	if err != nil {
		t.Fatal(err)
	}
	defer shell.Close()
	for _, tt := range []struct {
		stdin, want string
		ok          bool
	}{
		{"xhello", "ran, read hello", true},
		{"x", "ran, read", true},
		{"", "the host gave no go-ahead", false},
		{"hello", "the host gave no go-ahead", false},
		{"\nxhello", "the host gave no go-ahead", false},
	} {
		for _, confine := range []bool{true, false} {
			cmd, err := Command(Spec{
				Shim: []string{"/proc/self/exe", shimWord}, Binary: shell, Held: true, Name: "sh", UID: -1, GID: -1, Confine: confine,
				Env: []string{"PATH=/usr/bin:/bin"},
			})
			if err != nil {
				t.Fatal(err)
			}
			cmd.Args = append(cmd.Args, "-c", "echo ran, read $(cat)")
			cmd.Stdin = strings.NewReader(tt.stdin)
			out, err := cmd.CombinedOutput()
			if got := strings.TrimSpace(string(out)); (err == nil) != tt.ok || !strings.HasSuffix(got, tt.want) || !tt.ok && strings.Contains(got, "ran") {
				t.Errorf("held, stdin %q, confine %v: %q, %v, want %q, ok %v", tt.stdin, confine, got, err, tt.want, tt.ok)
			}
		}
	}
}
