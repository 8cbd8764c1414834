// Package executable proves that a driver in TypeScript, built as one executable
// file, runs in bcd node: from a profile at a real gateway to the real program.
package executable

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/gateway"
	"github.com/better-compute/site-appliance/appliance/gateway/gatewaytest"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/provision"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/appliance/gateway/workflow"
	"github.com/better-compute/site-appliance/plugins/conformance"
	"github.com/better-compute/site-appliance/plugins/conformance/node"
	"github.com/better-compute/site-appliance/plugins/driver/binding"
)

const root = "../../.."

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func step(operation, with string) module.ProfileStep {
	return module.ProfileStep{Uses: conformance.DriverID + "." + operation, On: module.OnNode, With: json.RawMessage(with)}
}

func TestSingleExecutableOnANode(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: plugins get a uid of their own")
	}
	if missing := node.Needs(); missing != "" {
		t.Skip("needs peer programs to build the TypeScript plugin: " + missing)
	}
	bcd, err := filepath.Abs(root + "/out/bin/bcd")
	must(t, err)
	if _, err := os.Stat(bcd); err != nil {
		t.Fatalf("%v: run make build first", err)
	}
	built, err := node.Build(t.Context(), root)
	must(t, err)

	g := gatewaytest.Make(t)
	g.Modules = []gateway.Module{provision.Module(module.Profile{
		Name:    "look",
		Drivers: map[string]binding.Binding{conformance.DriverID: {Driver: conformance.DriverID, Config: json.RawMessage(`{"token":"secret://acme/token"}`)}},
		Steps:   []module.ProfileStep{step("echo", `["a",{"b":1}]`), step("secret", `["secret://acme/token"]`)},
	}, module.Profile{
		Name:    "fail",
		Drivers: map[string]binding.Binding{conformance.DriverID: {Driver: conformance.DriverID}},
		Steps:   []module.ProfileStep{step("nothingLikeIt", `[]`)},
	})}
	var engine *workflow.Engine
	life, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	g.Prepare = func(gw *gateway.Gateway) {
		engine = workflow.New(workflow.Config{
			Store: gw.Store, Modules: gw.Modules, Commands: gw.Commands, Enrol: gw.Enrol, Secrets: gw.Secrets, Online: gw.Sessions.Online,
			Log: slog.New(slog.DiscardHandler), Poll: 50 * time.Millisecond,
		})
		gw.Sessions.OnState(func(string, bool) { engine.Wake() })
		running.Go(func() { _ = engine.Run(life) })
	}
	g.Start()
	t.Cleanup(running.Wait)
	t.Cleanup(stop)
	ctx, now := t.Context(), g.Store.Now()
	machine := store.Machine{ID: "node_1", TenantID: "acme", Name: "m1", PoolID: "pool_1", SiteID: "site_1", MACs: []string{"52:54:00:00:00:01"}, State: "deployed", Created: now}
	must(t, g.Store.AddSite(ctx, store.Site{ID: "site_1", TenantID: "acme", Name: "lab", Created: now}))
	must(t, g.Store.AddPool(ctx, store.Pool{ID: "pool_1", TenantID: "acme", Name: "metal", SiteID: "site_1", Created: now}))
	must(t, g.Store.AddMachine(ctx, machine))
	_, err = g.Secrets.Put(ctx, "acme", "token", secret.New([]byte("hunter22")))
	must(t, err)
	join, err := g.Enrol.NewToken(ctx, agentv1.Role_ROLE_NODE, "site_1", machine.ID, time.Hour)
	must(t, err)

	dir := t.TempDir()
	content, err := os.ReadFile(built.Executable)
	must(t, err)
	sum := sha256.Sum256(content)
	for name, file := range map[string]struct {
		text []byte
		mode os.FileMode
	}{
		"plugins/acme-node": {content, 0o755},
		"plugins/pins":      {[]byte(hex.EncodeToString(sum[:]) + "  acme-node\n"), 0o644},
		"join":              {[]byte(join), 0o600},
		"config.toml": {fmt.Appendf(nil, "join_file = %q\n[gateway]\nvia = %q\n[plugins]\ndir = %q\n[instances]\ncgroup = \"off\"\n",
			filepath.Join(dir, "join"), strings.TrimPrefix(g.URL, "https://"), filepath.Join(dir, "plugins")), 0o600},
	} {
		path := filepath.Join(dir, name)
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must(t, os.WriteFile(path, file.text, file.mode))
	}
	agent := exec.Command(bcd, "node", "--config", filepath.Join(dir, "config.toml"), "--state", filepath.Join(dir, "state"))
	var said bytes.Buffer
	agent.Stdout, agent.Stderr = &said, &said
	must(t, agent.Start())
	t.Cleanup(func() {
		_ = agent.Process.Signal(syscall.SIGTERM)
		if err := agent.Wait(); err != nil {
			t.Errorf("bcd node ended with %v", err)
		}
		if t.Failed() {
			t.Logf("bcd node said:\n%s", &said)
		}
		if strings.Contains(said.String(), "hunter22") {
			t.Error("bcd node's log holds the secret")
		}
	})

	run := func(profile string) (store.Workflow, []store.WorkflowStep) {
		id, err := engine.StartProfile(ctx, profile, machine, "")
		must(t, err)
		for end := time.Now().Add(2 * time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
			w, err := g.Store.Workflow(ctx, "acme", id)
			must(t, err)
			if w.State == store.StateRunning {
				continue
			}
			steps, err := g.Store.WorkflowSteps(ctx, id)
			must(t, err)
			return w, steps
		}
		t.Fatalf("workflow %s did not end: %s", profile, engine.Note(id))
		return store.Workflow{}, nil
	}
	w, steps := run("look")
	if w.State != store.StateDone {
		t.Fatalf("look is %s: %s: %s", w.State, w.ErrorCode, w.ErrorMessage)
	}
	for i, want := range []string{`["a",{"b":1}]`, `"hunter22"`} {
		if got, err := workflow.Result(steps[i]); err != nil || string(got) != want {
			t.Errorf("step %d answered %s, %v: want %s", i, got, err, want)
		}
	}
	if w, _ := run("fail"); w.ErrorCode != "unsupported-operation" {
		t.Errorf("an operation that is not there ends with %q: %s", w.ErrorCode, w.ErrorMessage)
	}
}
