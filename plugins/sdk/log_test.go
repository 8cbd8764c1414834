package sdk

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
)

// A call's log says what one with its attributes from the beginning says.
func TestCallLog(t *testing.T) {
	m := &driverv1.InvokeRequest{Driver: "acme", Kind: "power", Operation: "getPower", IdempotencyKey: "k"}
	var lazy, eager strings.Builder
	opts := &slog.HandlerOptions{ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey && len(groups) == 0 {
			return slog.Attr{}
		}
		return a
	}}
	h := handler(t, define(t, "acme", nil))
	h.log = slog.New(slog.NewJSONHandler(&lazy, opts)).WithGroup("plugin")
	for _, log := range []*slog.Logger{
		h.logOf(m),
		slog.New(slog.NewJSONHandler(&eager, opts)).WithGroup("plugin").With("driver", "acme", "operation", "power.getPower", "idempotency_key", "k"),
	} {
		log.Debug("unheard")
		log.Info("a", "b", 1)
		log.With("c", 2).WithGroup("d").Warn("e", "f", 3)
		log.WithGroup("g").Error("h", "i", 4)
	}
	if lazy.String() != eager.String() || !strings.Contains(lazy.String(), `"idempotency_key":"k"`) {
		t.Errorf("the log says\n%swant\n%s", lazy.String(), eager.String())
	}
}
