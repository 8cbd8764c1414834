package sdk

import (
	"context"
	"log/slog"
	"sync"

	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
)

// callLog is the log of one call. It takes on the call's attributes once it is
// used, which most calls do not: slog writes them out as soon as it has them.
type callLog struct {
	log                          *slog.Logger
	driver, kind, operation, key string

	once    sync.Once
	handler slog.Handler
}

// logOf does not keep m, which has secrets.
func (h *Handler) logOf(m *driverv1.InvokeRequest) *slog.Logger {
	return slog.New(&callLog{
		log: h.log, driver: m.GetDriver(), kind: m.GetKind(), operation: m.GetOperation(), key: m.GetIdempotencyKey(),
	})
}

func (l *callLog) with() slog.Handler {
	l.once.Do(func() {
		l.handler = l.log.With("driver", l.driver, "operation", l.kind+"."+l.operation, "idempotency_key", l.key).Handler()
	})
	return l.handler
}

func (l *callLog) Enabled(ctx context.Context, level slog.Level) bool {
	return l.with().Enabled(ctx, level)
}

func (l *callLog) Handle(ctx context.Context, r slog.Record) error { return l.with().Handle(ctx, r) }

func (l *callLog) WithAttrs(attrs []slog.Attr) slog.Handler { return l.with().WithAttrs(attrs) }

func (l *callLog) WithGroup(name string) slog.Handler { return l.with().WithGroup(name) }
