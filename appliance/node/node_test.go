package node

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent/agenttest"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

func write(t *testing.T, path, text string, mode fs.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}

// start runs a node until stop is called or the test ends.
func start(t *testing.T, c Config) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, c) }()
	stopped := false
	stop = func() {
		cancel()
		if stopped {
			return
		}
		stopped = true
		select {
		case <-ended:
		case <-time.After(20 * time.Second):
			t.Error("the node does not end")
		}
	}
	t.Cleanup(stop)
	return stop
}

func TestJoinsAndComesBackWithoutTheJoinFile(t *testing.T) {
	g := agenttest.Start(t)
	dir := t.TempDir()
	join, sys := filepath.Join(dir, "join"), filepath.Join(dir, "sys")
	write(t, join, g.Join("node-token").Encode()+"\n", 0o600)
	write(t, filepath.Join(dir, "config.toml"), fmt.Sprintf("join_file = %q\n\n[gateway]\nvia = %q\n", join, g.Addr()), 0o600)
	write(t, filepath.Join(sys, "class/dmi/id/product_uuid"), "5C1F3C5E-0001-4000-8000-000000000009\n", 0o400)
	write(t, filepath.Join(sys, "class/net/eth0/address"), "52:54:00:AA:00:01\n", 0o600)
	write(t, filepath.Join(sys, "class/net/eth0/device/vendor"), "x", 0o600)
	if got := macs(sys); len(got) != 1 || got[0] != "52:54:00:aa:00:01" {
		t.Errorf("macs() = %v", got)
	}
	if got, want := productUUID(sys), "5c1f3c5e-0001-4000-8000-000000000009"; got != want {
		t.Errorf("productUUID() = %q, want %q", got, want)
	}
	c := Config{ConfigFile: filepath.Join(dir, "config.toml"), StateDir: filepath.Join(dir, "state"), Sys: sys, Version: "test", Log: slog.New(slog.DiscardHandler)}
	stop := start(t, c)
	s := g.Session(1)
	if role := s.Hello.GetRole(); role != agentv1.Role_ROLE_NODE {
		t.Errorf("role = %v, want a node", role)
	}
	// Nothing that a node could be asked for is built: it says so by name.
	s.Command(&agentv1.CommandPayload{CommandId: "cmd_1", Kind: "instance.apply", Lane: "provision"})
	if got := s.Result("cmd_1").GetError().GetCode(); got != string(errs.UnknownKind) {
		t.Errorf("instance.apply = %q, want %q", got, errs.UnknownKind)
	}
	stop()

	if err := os.Remove(join); err != nil {
		t.Fatal(err)
	}
	start(t, c)
	if again := g.Session(2); again.AgentID != s.AgentID {
		t.Errorf("after a restart the agent is %q, was %q", again.AgentID, s.AgentID)
	}
}

func TestRefusals(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	write(t, path("garbage"), "bc1.AAAA", 0o600)
	write(t, path("huge"), strings.Repeat("x", maxJoin+1), 0o600)
	for name, tt := range map[string]struct{ text, state, want string }{
		"unknown key":   {"join_file = \"x\"\nbogus = 1\n", "s", ":2: unknown key \"bogus\""},
		"no join file":  {fmt.Sprintf("join_file = %q\n", path("absent")), "s", "not there"},
		"nothing":       {"", "s", "not there"},
		"bad join":      {fmt.Sprintf("join_file = %q\n", path("garbage")), "s", "join string"},
		"huge join":     {fmt.Sprintf("join_file = %q\n", path("huge")), "s", "bytes"},
		"via":           {"[gateway]\nvia = \"nowhere\"\n", "s", "want host:port"},
		"plugins":       {"[plugins]\ndir = \"/p\"\n", "s", "plugins.dir"},
		"no state":      {"", "", "state folder"},
		"not even toml": {"[", "s", ":1:"},
	} {
		file := path(strings.ReplaceAll(name, " ", "_") + ".toml")
		write(t, file, tt.text, 0o600)
		state := tt.state
		if state != "" {
			state = filepath.Join(t.TempDir(), state)
		}
		err := Run(t.Context(), Config{ConfigFile: file, StateDir: state, Log: slog.New(slog.DiscardHandler)})
		if err == nil || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "AAAA") {
			t.Errorf("%s: Run() = %v, want %q", name, err, tt.want)
		}
	}
	if err := Run(t.Context(), Config{ConfigFile: path("none.toml"), Log: slog.New(slog.DiscardHandler)}); err == nil {
		t.Error("Run without a configuration succeeded")
	}
}

func TestWarnsOfAnOpenJoinFile(t *testing.T) {
	g := agenttest.Start(t)
	for mode, want := range map[fs.FileMode]bool{0o600: false, 0o644: true} {
		path := filepath.Join(t.TempDir(), "join")
		write(t, path, g.Join("t").Encode(), mode)
		var log bytes.Buffer
		join, err := readJoin(path, slog.New(slog.NewTextHandler(&log, nil)))
		if err != nil || join == nil {
			t.Fatal(err)
		}
		if got := strings.Contains(log.String(), "others"); got != want {
			t.Errorf("mode %v: warned %v, want %v", mode, got, want)
		}
	}
}
