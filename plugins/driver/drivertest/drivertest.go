// Package drivertest makes the contexts that a driver's unit tests call it with.
package drivertest

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// Recorder keeps what a call emitted.
type Recorder struct {
	mu       sync.Mutex
	progress []driver.Progress
}

// Progress is all that was emitted so far, in order.
func (r *Recorder) Progress() []driver.Progress {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.progress)
}

func (r *Recorder) record(p driver.Progress) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.progress = append(r.progress, p)
}

// Context is the context of one call, and the recorder of its progress.
//
// Deadline and cancellation are ctx's: t.Context() for a call that ends with
// the test, context.WithTimeout for one that runs out of time. The secrets are
// what a host would have delivered, by reference or by name such as username
// and password; any other is credentials-unavailable, as in service. The log
// goes to t's output; without t, as in an example, it is discarded.
//
// The fields of the context may be changed before the call: Secrets for a
// resolver of the test's own, IdempotencyKey, Traceparent, TargetNodeID, Log.
func Context(t testing.TB, ctx context.Context, secrets map[string]string) (*driver.Context, *Recorder) {
	log := slog.New(slog.DiscardHandler)
	if t != nil {
		t.Helper()
		log = slog.New(slog.NewTextHandler(t.Output(), nil))
	}
	delivered := driver.Delivered{}
	for ref, value := range secrets {
		delivered[ref] = secret.New([]byte(value))
	}
	r := &Recorder{}
	c := driver.NewContext(ctx, delivered, log, r.record)
	c.IdempotencyKey = "cmd_test"
	return c, r
}
