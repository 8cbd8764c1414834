package agent_test

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/agent"
	"github.com/better-compute/site-appliance/appliance/agent/agenttest"
	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
)

// TestFullDisk fills the state folder's file system under a running box: work
// is refused with no-space, and taken again once there is room.
func TestFullDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount a small file system")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Skipf("needs root with the right to mount: %v", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	g := agenttest.Start(t)
	cfg := agent.Config{StateDir: dir, Join: g.Join("t"), Kinds: []dispatch.Kind{echo(agentv1.Role_ROLE_SITE, nil)}}
	a := start(t, cfg)
	s := g.Session(1)
	s.Command(command("cmd_1"))
	s.Result("cmd_1")

	ballast := filepath.Join(dir, "ballast")
	fill(t, ballast)
	large := command("cmd_2") // more than what is left of the journal's last block
	large.Args = make([]byte, 16<<10)
	s.Command(large)
	if e := s.Result("cmd_2").GetError(); e.GetCode() != "no-space" || !e.GetRetryable() {
		t.Errorf("command on a full disk: %v, want no-space, retryable", e)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	s.Command(command("cmd_3"))
	if r := s.Result("cmd_3"); r.GetError() != nil {
		t.Errorf("command once there is room: %v, want the echo", r)
	}
	a.stop()

	// Full from the start, without a journal: the box comes home all the same.
	for _, name := range []string{"journal", "events"} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	fill(t, ballast)
	start(t, cfg)
	s = g.Session(2)
	s.Event("state.degraded", "journal")
	s.Command(command("cmd_4"))
	if code := s.Result("cmd_4").GetError().GetCode(); code != "operation-not-allowed" {
		t.Errorf("destructive command without a journal on disk: %q, want operation-not-allowed", code)
	}
}

// TestReadOnlyDisk has the kernel take the state folder's file system away from
// writers, as ext4 does after an error: the box comes home all the same.
func TestReadOnlyDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount a small file system")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=4m"); err != nil {
		t.Skipf("needs root with the right to mount: %v", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	g := agenttest.Start(t)
	cfg := agent.Config{StateDir: dir, Join: g.Join("t"), Kinds: []dispatch.Kind{echo(agentv1.Role_ROLE_SITE, nil)}}
	a := start(t, cfg)
	g.Session(1)
	id := a.AgentID()
	a.stop()
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	a = start(t, cfg)
	s := g.Session(2)
	if a.AgentID() != id {
		t.Errorf("agent is %q, want the stored identity %q", a.AgentID(), id)
	}
	s.Event("state.degraded", "journal")
	s.Command(command("cmd_1"))
	if code := s.Result("cmd_1").GetError().GetCode(); code != "operation-not-allowed" {
		t.Errorf("destructive command without a journal on disk: %q, want operation-not-allowed", code)
	}
	again := cfg
	again.Role, again.Log = agentv1.Role_ROLE_SITE, slog.New(slog.DiscardHandler)
	if _, err := agent.New(again); err == nil {
		t.Error("a second agent took the folder")
	}
}

// fill writes until the file system takes no more.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
}
