// Package conformance drives any bcx plugin through the rules of the protocol,
// as a host of its own.
package conformance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/plugins/bcx"
)

// DriverID is the driver, and its only kind, that lets a plugin take the rules
// for which the suite must know what an operation does.
const DriverID = "conformance"

// Rule is one thing that the protocol asks of a plugin.
type Rule struct {
	ID, Statement string
	// Driver marks a rule that needs the driver DriverID.
	Driver bool

	check func(*run) error
}

// Rules are all of them, in the order in which they are checked.
func Rules() []Rule {
	return slices.Concat(startRules(), endRules(), describeRules(), callRules(), operationRules(), streamRules())
}

// Options of a run.
type Options struct {
	// Env is set beside PATH and the three BCX variables.
	Env []string
	// Only names the rules to check; empty: all.
	Only []string
	// Patience bounds each wait for the plugin; zero: the protocol's StartTimeout.
	Patience time.Duration
}

// Status is how a rule ended.
type Status string

// The ends of a rule.
const (
	Passed  Status = "pass"
	Failed  Status = "FAIL"
	Skipped Status = "skip"
)

// Result is how one rule ended, and why.
type Result struct {
	Rule   Rule
	Status Status
	Reason string
}

// Report is how a plugin fared.
type Report struct{ Results []Result }

// OK reports whether no rule failed, and at least one passed.
func (r Report) OK() bool { return r.count(Failed) == 0 && r.count(Passed) > 0 }

func (r Report) count(s Status) int {
	n := 0
	for _, x := range r.Results {
		if x.Status == s {
			n++
		}
	}
	return n
}

// Write prints the report, a line a rule.
func (r Report) Write(w io.Writer) error {
	var b strings.Builder
	for _, x := range r.Results {
		fmt.Fprintf(&b, "%s  %-24s %s", x.Status, x.Rule.ID, x.Rule.Statement)
		if x.Reason != "" {
			fmt.Fprintf(&b, "\n      %-24s %s", "", x.Reason)
		}
		b.WriteByte('\n')
	}
	fmt.Fprintf(&b, "%d passed, %d failed, %d skipped\n", r.count(Passed), r.count(Failed), r.count(Skipped))
	_, err := io.WriteString(w, b.String())
	return err
}

// errSkip is a rule that this plugin, or this system, cannot be checked for.
type errSkip string

func (e errSkip) Error() string { return string(e) }

// Run starts the plugin argv, as often as the rules ask for, and checks them. It
// leaves no process and no folder behind. An error means that nothing could be
// checked; what the plugin does wrong is in the report.
func Run(ctx context.Context, argv []string, o Options) (Report, error) {
	var report Report
	if len(argv) == 0 {
		return report, errors.New("conformance: no plugin is named")
	}
	rules := Rules()
	for _, id := range o.Only {
		if !slices.ContainsFunc(rules, func(r Rule) bool { return r.ID == id }) {
			return report, fmt.Errorf("conformance: no rule %q", id)
		}
	}
	if _, err := exec.LookPath(argv[0]); err != nil {
		return report, fmt.Errorf("conformance: %w", err)
	}
	self, err := newIdentity()
	if err != nil {
		return report, fmt.Errorf("conformance: %w", err)
	}
	o.Patience = cmp.Or(o.Patience, bcx.StartTimeout)
	r := &run{ctx: ctx, argv: argv, o: o, self: self}
	defer r.close()
	for _, rule := range rules {
		if len(o.Only) > 0 && !slices.Contains(o.Only, rule.ID) {
			continue
		}
		if err := ctx.Err(); err != nil {
			return report, fmt.Errorf("conformance: %w", err)
		}
		report.Results = append(report.Results, r.judge(rule))
	}
	return report, nil
}

func (r *run) judge(rule Rule) Result {
	err := error(nil)
	if rule.Driver {
		err = r.needsDriver()
	}
	if err == nil {
		err = rule.check(r)
	}
	r.sweep()
	if err != nil {
		r.doubt()
	}
	var skip errSkip
	switch {
	case err == nil:
		return Result{Rule: rule, Status: Passed}
	case errors.As(err, &skip):
		return Result{Rule: rule, Status: Skipped, Reason: string(skip)}
	}
	return Result{Rule: rule, Status: Failed, Reason: err.Error()}
}

// doubt drops the shared process after a failure if it no longer answers, so
// that the next rule is judged by itself.
func (r *run) doubt() {
	if r.shared == nil {
		return
	}
	ctx, cancel := r.wait()
	defer cancel()
	if _, err := r.shared.conn.describe(ctx); err != nil {
		r.shared.destroy()
		r.shared = nil
	}
}
