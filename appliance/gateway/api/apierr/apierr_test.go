package apierr

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

// A driver's own code is the reason of a DRIVER_ERROR, and what nobody
// classified keeps its text to itself.
func TestToConnect(t *testing.T) {
	for name, tt := range map[string]struct {
		err    error
		code   connect.Code
		text   string
		detail string
		retry  bool
		known  bool
	}{
		"a driver's":             {errs.New("fan-broken", "fan 3"), connect.CodeAborted, "DRIVER_ERROR: fan-broken: fan 3", "DRIVER_ERROR/fan-broken", false, true},
		"a driver's, wrapped":    {fmt.Errorf("power: %w", errs.Retry("fan-broken", "fan 3")), connect.CodeUnavailable, "DRIVER_ERROR: fan-broken: fan 3", "DRIVER_ERROR/fan-broken", true, true},
		"a lost plugin":          {errs.Retry(errs.Unreachable, "it died"), connect.CodeUnavailable, "DRIVER_ERROR: unreachable: it died", "DRIVER_ERROR/unreachable", true, true},
		"configuration":          {BadConfig("two of a key"), connect.CodeFailedPrecondition, "INVALID_CONFIG: two of a key", "INVALID_CONFIG", false, true},
		"input":                  {fmt.Errorf("x: %w", Invalid("no")), connect.CodeInvalidArgument, "INVALID_INPUT: no", "INVALID_INPUT", false, true},
		"a driver that cannot":   {Cannot("bmc-driver-unsupported", "no"), connect.CodeFailedPrecondition, "UNSUPPORTED: bmc-driver-unsupported: no", "UNSUPPORTED/bmc-driver-unsupported", false, true},
		"nothing there":          {fmt.Errorf("machine: %w", store.ErrNotFound), connect.CodeNotFound, "NOT_FOUND: machine: not found", "NOT_FOUND", false, true},
		"a name that is taken":   {fmt.Errorf("add machine m2: %w", store.ErrConflict), connect.CodeAlreadyExists, "INVALID_INPUT: taken: add machine m2: there is one of this name or identity", "INVALID_INPUT/taken", false, true},
		"the caller's end":       {context.Canceled, connect.CodeCanceled, "cancelled", "", false, true},
		"what nobody classified": {errors.New("disk is on fire at /secret"), connect.CodeInternal, "internal error: see the gateway's log", "", false, false},
	} {
		got, known := ToConnect(tt.err)
		if got.Code() != tt.code || got.Message() != tt.text || known != tt.known {
			t.Errorf("%s: ToConnect() = %v, %q, %v, want %v, %q, %v", name, got.Code(), got.Message(), known, tt.code, tt.text, tt.known)
		}
		detail, retry := "", false
		for _, d := range got.Details() {
			if m, err := d.Value(); err == nil {
				detail, retry = m.(*agentv1.Error).Code, m.(*agentv1.Error).Retryable
			}
		}
		if detail != tt.detail || retry != tt.retry {
			t.Errorf("%s: detail = %q, %v, want %q, %v", name, detail, retry, tt.detail, tt.retry)
		}
	}
}
