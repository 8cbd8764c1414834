package node_test

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/plugins/conformance"
	"github.com/better-compute/site-appliance/plugins/conformance/node"
	"github.com/better-compute/site-appliance/plugins/host"
	"github.com/better-compute/site-appliance/plugins/host/hosttest"
)

func TestMain(m *testing.M) {
	hosttest.Shim()
	os.Exit(m.Run())
}

func build(t *testing.T) node.Built {
	t.Helper()
	if missing := node.Needs(); missing != "" {
		t.Skip("needs peer programs to build the TypeScript plugin: " + missing)
	}
	b, err := node.Build(t.Context(), "../../..")
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func passes(t *testing.T, argv ...string) {
	t.Helper()
	report, err := conformance.Run(t.Context(), argv, conformance.Options{Patience: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	if len(report.Results) != len(conformance.Rules()) {
		t.Errorf("%d rules were checked: want %d", len(report.Results), len(conformance.Rules()))
	}
	for _, r := range report.Results {
		if r.Status != conformance.Passed {
			t.Errorf("%s: %s %s", r.Rule.ID, r.Status, r.Reason)
		}
	}
}

func TestScriptConforms(t *testing.T) {
	t.Parallel()
	b := build(t)
	passes(t, b.Node, b.Script)
}

func TestExecutableConforms(t *testing.T) {
	t.Parallel()
	passes(t, build(t).Executable)
}

const ref = "secret://root/bmc"

// TestExecutableInBcd has bcd's host run the single executable, confined.
func TestExecutableInBcd(t *testing.T) {
	hosttest.NeedsRoot(t)
	content, err := os.ReadFile(build(t).Executable)
	if err != nil {
		t.Fatal(err)
	}
	dir := hosttest.NewDir(t)
	dir.Add("acme-node", content)
	config := dir.Config()
	config.StartTimeout = time.Minute
	h := hosttest.Start(t, config)
	if s := h.Status(); len(s) != 1 || s[0].State != "running" {
		t.Fatalf("Status() = %+v, want one plugin that runs", s)
	}
	call := host.Call{Driver: conformance.DriverID, Kind: conformance.DriverID, Config: json.RawMessage("{}")}
	with := func(operation, args string) host.Call {
		c := call
		c.Operation, c.Args = operation, json.RawMessage(args)
		return c
	}

	if got, err := h.Invoke(t.Context(), with("echo", `["a",{"b":1}]`)); err != nil || string(got) != `["a",{"b":1}]` {
		t.Errorf("echo = %s, %v", got, err)
	}
	var phases []string
	c := with("progress", `[3]`)
	c.Progress = func(_, message string, _, _ uint64) { phases = append(phases, message) }
	if got, err := h.Invoke(t.Context(), c); err != nil || string(got) != "3" || len(phases) != 3 || phases[2] != "3 of 3" {
		t.Errorf("progress = %s, %v after %q", got, err, phases)
	}
	c = with("secret", `["`+ref+`"]`)
	if _, err := h.Invoke(t.Context(), c); errs.CodeOf(err) != errs.CredentialsUnavailable {
		t.Errorf("an undelivered secret = %v, want credentials-unavailable", err)
	}
	c.Secrets = map[string]secret.Value{ref: secret.New([]byte("hunter2"))}
	if got, err := h.Invoke(t.Context(), c); err != nil || string(got) != `"hunter2"` {
		t.Errorf("a delivered secret = %s, %v", got, err)
	}
	c = with("ignoreDeadline", `[30000]`)
	c.Deadline = time.Now().Add(200 * time.Millisecond)
	if _, err := h.Invoke(t.Context(), c); errs.CodeOf(err) != errs.Timeout {
		t.Errorf("over its deadline = %v, want timeout", err)
	}
	if err := h.Validate(t.Context(), conformance.DriverID, json.RawMessage(`{"delayMs":-1}`), nil, time.Time{}); errs.CodeOf(err) != errs.InvalidConfig {
		t.Errorf("Validate of a bad configuration = %v, want invalid-config", err)
	}
	pipe(t, func(ctx context.Context) (io.ReadWriteCloser, error) { return h.Stream(ctx, with("pipe", "")) })
}

// pipe sends bytes through a stream and wants them back.
func pipe(t *testing.T, open func(context.Context) (io.ReadWriteCloser, error)) {
	t.Helper()
	s, err := open(t.Context())
	if err != nil {
		t.Errorf("open: %v", err)
		return
	}
	if _, err := s.Write([]byte("hello")); err != nil {
		t.Errorf("write: %v", err)
	}
	got := make([]byte, 5)
	if _, err := io.ReadFull(s, got); err != nil || string(got) != "hello" {
		t.Errorf("read = %q, %v, want hello", got, err)
	}
	if err := s.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
}
