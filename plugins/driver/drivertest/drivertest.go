// Package drivertest makes the contexts that a driver's unit tests call it with.
package drivertest

import (
	"context"
	"log/slog"
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

// Progress is all that was emitted so far.
func (r *Recorder) Progress() []driver.Progress {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]driver.Progress(nil), r.progress...)
}

// Context is a call's context with these secrets, and the recorder of its progress.
func Context(t testing.TB, ctx context.Context, secrets map[string]string) (*driver.Context, *Recorder) {
	t.Helper()
	values := driver.Secrets{}
	for k, v := range secrets {
		values[k] = secret.New([]byte(v))
	}
	r := &Recorder{}
	c := driver.NewContext(ctx, values, slog.New(slog.NewTextHandler(t.Output(), nil)), func(p driver.Progress) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.progress = append(r.progress, p)
	})
	c.IdempotencyKey = "cmd_test"
	return c, r
}
