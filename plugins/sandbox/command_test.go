package sandbox

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// Elsewhere than on Linux a plugin runs by path, or not at all when it is to be
// confined, to have a user of its own or to be limited.
func TestCheck(t *testing.T) {
	f, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	shim := []string{"/proc/self/exe", "shim"}
	for _, tt := range []struct {
		name string
		spec Spec
		goos string
		want string // in the error; "": none
	}{
		{"everything, here", Spec{Shim: shim, Confine: true, UID: 61000, GID: 61000, Cgroup: f}, "linux", ""},
		{"confined without a shim", Spec{Confine: true, UID: -1}, "linux", "no shim is set"},
		{"held without a shim", Spec{Held: true, UID: -1}, "linux", "no shim is set"},
		{"by path", Spec{UID: -1}, "darwin", ""},
		{"by path", Spec{UID: -1}, "windows", ""},
		{"a shim", Spec{Shim: shim, UID: -1}, "darwin", "a shim is asked for"},
		{"a shim", Spec{Shim: shim, UID: -1}, "windows", "a shim is asked for"},
		{"a user", Spec{UID: 61000}, "darwin", "a user of its own is asked for"},
		{"root as the user", Spec{UID: 0}, "windows", "a user of its own is asked for"},
		{"a cgroup", Spec{UID: -1, Cgroup: f}, "freebsd", "a cgroup is asked for"},
		{"confined without a shim", Spec{Confine: true, UID: -1}, "darwin", "no shim is set"},
	} {
		err := tt.spec.check(tt.goos)
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("check(%s on %s) = %v, want %q", tt.name, tt.goos, err, tt.want)
		}
	}
}

// TestBuildsElsewhere keeps the hosts of plugins building where there is no
// sandbox, and where there is one without a filter.
func TestBuildsElsewhere(t *testing.T) {
	for _, target := range []string{"linux/arm64", "linux/riscv64", "darwin/arm64", "windows/amd64"} {
		goos, goarch, _ := strings.Cut(target, "/")
		cmd := exec.Command("go", "build", "../sandbox", "../host", "../bcx/...")
		cmd.Env = append(os.Environ(), "GOOS="+goos, "GOARCH="+goarch, "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("build for %s: %v\n%s", target, err, out)
		}
	}
}
