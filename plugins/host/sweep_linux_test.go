package host

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// sleeper is a process that a record may or may not mean.
func sleeper(t *testing.T, env ...string) mark {
	t.Helper()
	cmd := exec.Command("/bin/sleep", "600")
	cmd.Env = env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return processMark(cmd.Process.Pid)
}

// TestSweepSparesARecycledPID: numbers come to mean other processes. Only what
// the record surely means is killed.
func TestSweepSparesARecycledPID(t *testing.T) {
	boot, uid := bootID(), os.Geteuid()
	// A host that is gone: this process's number with another start.
	deadHost := mark{PID: os.Getpid(), Start: processMark(os.Getpid()).Start + 1}
	for _, tt := range []struct {
		name string
		// change makes the record wrong in one way.
		change func(*record)
		killed bool
	}{
		{"the process itself", func(*record) {}, true},
		{"another start: the number is used again", func(r *record) { r.Process.Start-- }, false},
		{"another uid", func(r *record) { r.UID = 61042 }, false},
		{"another boot", func(r *record) { r.Boot = "another" }, false},
		{"other numbers: its host may live", func(r *record) { r.Space = "pid:[1]" }, false},
		{"its host lives", func(r *record) { r.Host = processMark(os.Getpid()) }, false},
		{"not started yet", func(r *record) { r.Process = mark{} }, false},
	} {
		root := t.TempDir()
		m := sleeper(t)
		r := record{Plugin: "acme", Boot: boot, Space: pidSpace(), Host: deadHost, Process: m, UID: uid}
		tt.change(&r)
		n := &run{dir: filepath.Join(root, "pABCDEFGH"), record: r}
		if err := n.save(); err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(n.dir, 0o700); err != nil {
			t.Fatal(err)
		}
		sweep(root, slog.New(slog.DiscardHandler))
		if got := !m.alive(); got != tt.killed {
			t.Errorf("%s: killed = %v, want %v", tt.name, got, tt.killed)
		}
		entries, _ := os.ReadDir(root)
		if kept := len(entries) == 2; kept != strings.Contains(tt.name, "live") {
			t.Errorf("%s: %d entries are left", tt.name, len(entries))
		}
	}
}

// A process that left everything but its environment is found by that; the same
// folder below another root is another host's.
func TestSweepFindsByEnvironment(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "pABCDEFGH")
	ours := sleeper(t, "BCX_SOCKET_DIR="+dir, "X=y")
	longer := sleeper(t, "BCX_SOCKET_DIR="+dir+"2")
	others := sleeper(t, "BCX_SOCKET_DIR=/run/bcx/pABCDEFGH", "OLD="+dir)
	n := &run{dir: dir, record: record{Plugin: "acme", Boot: bootID(), Space: pidSpace(), Host: mark{PID: os.Getpid(), Start: 1}, UID: os.Geteuid()}}
	if err := n.save(); err != nil {
		t.Fatal(err)
	}
	sweep(root, slog.New(slog.DiscardHandler))
	if ours.alive() || !longer.alive() || !others.alive() {
		t.Errorf("alive: ours %v, of a longer name %v, of another root %v; want only ours killed", ours.alive(), longer.alive(), others.alive())
	}
}

// A group of the recorded number is ours unless its leader is another process.
func TestSweepOfAGroup(t *testing.T) {
	leader := sleeper(t)
	dir := filepath.Join(t.TempDir(), "pABCDEFGH")
	for _, tt := range []struct {
		name   string
		leader mark
		want   int
	}{
		{"its own leader", leader, 1},
		{"a leader with an older start: the number is used again", mark{leader.PID, leader.Start - 1}, 0},
	} {
		r := &run{dir: dir, record: record{Process: tt.leader, UID: os.Geteuid()}}
		if got := members(r); len(got) != tt.want {
			t.Errorf("%s: members = %v, want %d", tt.name, got, tt.want)
		}
	}
}

// What is not a host's record is not followed, and nothing else in the folder is touched.
func TestSweepOfOtherFiles(t *testing.T) {
	root := t.TempDir()
	files := map[string]bool{ // name: swept
		"pABCDEFGH.run": true, "pABCDEFGI.run.tmp": true, "pABCDEFGJ.run.tmp": false, "other.run": false, "pABCDEFGH.txt": false, "pabcdefgh.run": false,
	}
	for name := range files {
		if err := os.WriteFile(filepath.Join(root, name), []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	old := time.Now().Add(-time.Hour)
	if err := os.Chtimes(filepath.Join(root, "pABCDEFGI.run.tmp"), old, old); err != nil {
		t.Fatal(err)
	}
	// A folder of the test's own: what is wrong here runs as root.
	other := t.TempDir()
	if err := errors.Join(os.WriteFile(filepath.Join(other, "kept"), nil, 0o600), os.Symlink(other, filepath.Join(root, "pABCDEFGH"))); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	sweep(root, slog.New(slog.NewTextHandler(&log, nil)))
	for name, swept := range files {
		if _, err := os.Stat(filepath.Join(root, name)); (err != nil) != swept {
			t.Errorf("%s: swept = %v, want %v", name, err != nil, swept)
		}
	}
	if _, err := os.Stat(filepath.Join(other, "kept")); err != nil || !strings.Contains(log.String(), "thrown away") {
		t.Errorf("a link was followed (%v), or the log is silent: %s", err, log.String())
	}
	sweep(filepath.Join(root, "nothing"), slog.New(slog.DiscardHandler))
}

func TestKillTakesTheRightProcess(t *testing.T) {
	m := sleeper(t)
	if (mark{m.PID, m.Start + 1}).kill() || !m.alive() {
		t.Error("a process with another start was killed")
	}
	if !m.kill() || m.alive() {
		t.Error("the process itself was not killed")
	}
}

func FuzzParseRecord(f *testing.F) {
	good, err := json.Marshal(record{Plugin: "acme", Boot: "b", Host: mark{7, 8}, Process: mark{9, 10}, UID: 61000, Cgroup: "/sys/fs/cgroup/bcx/plugin-acme"})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"plugin":"a","boot":"b","host":{"pid":1,"start":1}}`))
	f.Add([]byte(`{"process":{"pid":-1}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := parseRecord(data)
		if err == nil && (r.Host.PID <= 1 || r.Process.PID < 0 || r.Process.PID == 1) {
			t.Errorf("parseRecord(%q) = %+v: a process that no plugin is", data, r)
		}
	})
}
