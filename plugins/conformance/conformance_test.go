package conformance_test

import (
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/plugins/conformance"
	"github.com/better-compute/site-appliance/plugins/conformance/reference"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
	"github.com/better-compute/site-appliance/plugins/sdk"
)

// The test binary is every plugin, by its arguments: an environment of its own
// would be one more thing that a plugin gets.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "reference":
			d, err := reference.Driver()
			if err != nil {
				panic(err)
			}
			os.Exit(sdk.Main(sdk.Options{PluginVersion: "test"}, d))
		case "plain":
			os.Exit(plain())
		case "breaker":
			os.Exit(breaker(os.Args[2]))
		}
	}
	os.Exit(m.Run())
}

type still struct{}

func (still) GetPower(*driver.Context) (metal.PowerState, error) { return metal.PowerOn, nil }
func (still) SetPower(*driver.Context, metal.PowerAction) error  { return nil }

// plain is a plugin that does not know the suite.
func plain() int {
	d, err := driver.Define(driver.Spec[struct{}]{
		ID: "acme-bmc", Version: "1.0.0", RunsOn: "site",
		Parse: func(json.RawMessage) (struct{}, error) { return struct{}{}, nil },
	}, driver.Implement(metal.PowerKind(), func(struct{}, *driver.Context) (metal.Power, error) { return still{}, nil }))
	if err != nil {
		panic(err)
	}
	return sdk.Main(sdk.Options{PluginVersion: "test"}, d)
}

func self(t *testing.T, args ...string) []string {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return append([]string{path}, args...)
}

func run(t *testing.T, argv []string, o conformance.Options) conformance.Report {
	t.Helper()
	report, err := conformance.Run(t.Context(), argv, o)
	if err != nil {
		t.Fatal(err)
	}
	return report
}

func passes(t *testing.T, argv []string) {
	t.Helper()
	report := run(t, argv, conformance.Options{Patience: time.Minute})
	for _, r := range report.Results {
		if r.Status != conformance.Passed {
			t.Errorf("%s: %s %s", r.Rule.ID, r.Status, r.Reason)
		}
	}
}

func TestSDKPasses(t *testing.T) {
	t.Parallel()
	passes(t, self(t, "reference"))
}

// TestUnbrokenPasses shows that what the breakers break is all that is wrong with them.
func TestUnbrokenPasses(t *testing.T) {
	t.Parallel()
	passes(t, self(t, "breaker", "none"))
}

func TestRulesHaveBreakers(t *testing.T) {
	ids := map[string]bool{}
	for _, r := range conformance.Rules() {
		if ids[r.ID] {
			t.Errorf("rule %s is there twice", r.ID)
		}
		ids[r.ID] = true
		if r.Statement == "" {
			t.Errorf("rule %s says nothing", r.ID)
		}
	}
	rules, breakers := slices.Sorted(maps.Keys(ids)), slices.Sorted(slices.Values(breakerIDs()))
	if !slices.Equal(rules, breakers) {
		t.Errorf("rules %d, breakers %d", len(rules), len(breakers))
		for _, id := range rules {
			if !slices.Contains(breakers, id) {
				t.Errorf("rule %s has no breaker", id)
			}
		}
		for _, id := range breakers {
			if !ids[id] {
				t.Errorf("breaker %s breaks no rule", id)
			}
		}
	}
}

// atOnce bounds the breakers that run at a time: most of theirs is waiting for
// what they do not do.
const atOnce = 24

func forEach(ids []string, f func(id string)) {
	var wg sync.WaitGroup
	slots := make(chan struct{}, atOnce)
	for _, id := range ids {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			f(id)
		})
	}
	wg.Wait()
}

func TestBreakersAreCaught(t *testing.T) {
	t.Parallel()
	forEach(breakerIDs(), func(id string) {
		report, err := conformance.Run(t.Context(), self(t, "breaker", id), conformance.Options{Only: []string{id}, Patience: 5 * time.Second})
		if err != nil || len(report.Results) != 1 || report.Results[0].Status != conformance.Failed {
			t.Errorf("a plugin that breaks %s gets %+v, %v, want it to fail", id, report.Results, err)
			return
		}
		t.Logf("%s: %s", id, report.Results[0].Reason)
	})
}

// TestBreakersBreakNothingElse takes the breakers that alter single messages
// through the other rules about messages. Left out is what costs much.
func TestBreakersBreakNothingElse(t *testing.T) {
	t.Parallel()
	var tampering []string
	for id := range tampers() {
		if !strings.HasPrefix(id, "message.") && id != "stream.lifetime" {
			tampering = append(tampering, id)
		}
	}
	forEach(tampering, func(id string) {
		others := slices.DeleteFunc(slices.Clone(tampering), func(other string) bool { return other == id || slices.Contains(also[id], other) })
		report, err := conformance.Run(t.Context(), self(t, "breaker", id), conformance.Options{Only: others, Patience: 20 * time.Second})
		if err != nil {
			t.Errorf("%s: %v", id, err)
		}
		for _, r := range report.Results {
			if r.Status == conformance.Failed {
				t.Errorf("a plugin that breaks %s also breaks %s: %s", id, r.Rule.ID, r.Reason)
			}
		}
	})
}

// TestStuckStream has a plugin that leaves a stream open and says nothing.
func TestStuckStream(t *testing.T) {
	t.Parallel()
	report := run(t, self(t, "breaker", "stuck"), conformance.Options{
		Only: []string{"stream.fail", "stream.open"}, Patience: time.Second,
	})
	for _, r := range report.Results {
		if want := r.Rule.ID == "stream.fail"; (r.Status == conformance.Failed) != want {
			t.Errorf("%s: %s %s, want failed %v", r.Rule.ID, r.Status, r.Reason, want)
		}
	}
}

// TestTardyTimeout has a plugin that says timeout when it no longer matters.
func TestTardyTimeout(t *testing.T) {
	t.Parallel()
	report := run(t, self(t, "breaker", "tardy"), conformance.Options{Only: []string{"deadline.ignored"}, Patience: time.Minute})
	if r := report.Results[0]; r.Status != conformance.Failed {
		t.Errorf("%s: %s, want it to fail", r.Rule.ID, r.Status)
	}
}

func TestOtherDriversGetTheGeneralRules(t *testing.T) {
	t.Parallel()
	report := run(t, self(t, "plain"), conformance.Options{Patience: time.Minute})
	for _, r := range report.Results {
		want := conformance.Passed
		if r.Rule.Driver {
			want = conformance.Skipped
		}
		if r.Status != want || (r.Status == conformance.Skipped) != (r.Reason != "") {
			t.Errorf("%s: %s %q, want %s", r.Rule.ID, r.Status, r.Reason, want)
		}
	}
	if !report.OK() {
		t.Error("the report is not ok")
	}
}

func TestRunRefuses(t *testing.T) {
	for name, tt := range map[string]struct {
		argv []string
		only []string
	}{
		"no argv": {nil, nil}, "no program": {[]string{"/nonexistent"}, nil}, "no such rule": {self(t, "reference"), []string{"cookie.eaten"}},
	} {
		if _, err := conformance.Run(context.Background(), tt.argv, conformance.Options{Only: tt.only}); err == nil {
			t.Errorf("%s: Run = nil, want an error", name)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := conformance.Run(ctx, self(t, "reference"), conformance.Options{}); err == nil {
		t.Error("Run under an ended context = nil, want an error")
	}
}

func TestReport(t *testing.T) {
	rule := conformance.Rule{ID: "a.b", Statement: "it does"}
	r := conformance.Report{Results: []conformance.Result{
		{Rule: rule, Status: conformance.Passed}, {Rule: rule, Status: conformance.Skipped, Reason: "no driver"},
	}}
	var b bytes.Buffer
	if err := r.Write(&b); err != nil || !r.OK() || !strings.Contains(b.String(), "1 passed, 0 failed, 1 skipped") || !strings.Contains(b.String(), "no driver") {
		t.Errorf("Write = %q, %v; OK() = %v", b.String(), err, r.OK())
	}
	r.Results = append(r.Results, conformance.Result{Rule: rule, Status: conformance.Failed, Reason: "it does not"})
	if r.OK() {
		t.Error("OK() with a failure = true, want false")
	}
	if (conformance.Report{}).OK() {
		t.Error("OK() of nothing = true, want false")
	}
}

// TestRunLeavesNothing shows that a run takes its sockets' folders away.
func TestRunLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	run(t, self(t, "reference"), conformance.Options{Only: []string{"cookie.missing", "certificate.fresh", "end.orphan", "args.array"}})
	left, err := filepath.Glob(filepath.Join(dir, "bcx*"))
	if err != nil || len(left) > 0 {
		t.Errorf("a run leaves %v, %v", left, err)
	}
}
