package bcx

import (
	"encoding/json"
	"errors"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// Described is m as Describe carries it.
func Described(m driver.Manifest) *driverv1.DescribedDriver {
	return &driverv1.DescribedDriver{
		Manifest: &driverv1.DriverManifest{
			Id: m.ID, Version: m.Version, Kinds: m.Kinds, RunsOn: m.RunsOn, ConfigSchemaJson: string(m.ConfigSchema),
			Capabilities: m.Capabilities, RetrySafeOperations: m.RetrySafe,
		},
		StreamOperations: m.StreamOperations,
	}
}

// Manifest reads and checks what a plugin described.
func Manifest(d *driverv1.DescribedDriver) (driver.Manifest, error) {
	w := d.GetManifest()
	m := driver.Manifest{
		ID: w.GetId(), Version: w.GetVersion(), Kinds: w.GetKinds(), RunsOn: w.GetRunsOn(),
		Capabilities: w.GetCapabilities(), RetrySafe: w.GetRetrySafeOperations(), StreamOperations: d.GetStreamOperations(),
	}
	if s := w.GetConfigSchemaJson(); s != "" {
		m.ConfigSchema = json.RawMessage(s)
	}
	return m, m.Check()
}

// ErrorOf puts err on the wire: codes travel as they are, anything without one
// is driver-error, and retryable is cleared unless the operation is retry-safe.
func ErrorOf(err error, retrySafe bool) *driverv1.Error {
	e := errs.From(err)
	code, retryable := e.Code, e.Retryable
	var own *errs.Error
	if code == errs.Internal && !errors.As(err, &own) || !driver.ValidCode(string(code)) {
		code, retryable = errs.DriverError, false
	}
	// A message that is no text has no form on the wire, and the error with it.
	text := strings.ToValidUTF8(e.Message, "\uFFFD")
	return &driverv1.Error{Code: string(code), Message: text, Retryable: retryable && retrySafe}
}

// FromWire is a plugin's error; a code that is not kebab-case is driver-error.
func FromWire(e *driverv1.Error) *errs.Error {
	code := errs.Code(e.GetCode())
	if !driver.ValidCode(e.GetCode()) {
		code = errs.DriverError
	}
	return &errs.Error{Code: code, Message: e.GetMessage(), Retryable: e.GetRetryable()}
}
