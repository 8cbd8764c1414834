// Package apierr is the error that the API for people answers with: an
// upper-case code, where it helps a kebab-case reason, and a message.
package apierr

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

// Code is an upper-case code of the specification.
type Code string

// The codes. A driver's own code is the reason of a DRIVER_ERROR.
const (
	InvalidConfig    Code = "INVALID_CONFIG"
	InvalidInput     Code = "INVALID_INPUT"
	Unsupported      Code = "UNSUPPORTED"
	DriverError      Code = "DRIVER_ERROR"
	NotFound         Code = "NOT_FOUND"
	PermissionDenied Code = "PERMISSION_DENIED"
)

// Error is what a caller of the API sees.
type Error struct {
	Code Code
	// Reason is kebab-case, or empty.
	Reason  string
	Message string
	// Connect is the transport's code.
	Connect   connect.Code
	Retryable bool
}

func (e *Error) Error() string {
	if e.Reason != "" {
		return string(e.Code) + ": " + e.Reason + ": " + e.Message
	}
	return string(e.Code) + ": " + e.Message
}

// Invalid says that the caller's input is wrong.
func Invalid(format string, args ...any) *Error {
	return &Error{Code: InvalidInput, Message: fmt.Sprintf(format, args...), Connect: connect.CodeInvalidArgument}
}

// BadConfig says that what the deployment was configured with is wrong.
func BadConfig(format string, args ...any) *Error {
	return &Error{Code: InvalidConfig, Message: fmt.Sprintf(format, args...), Connect: connect.CodeFailedPrecondition}
}

// Busy says that the input is right but the thing is not in a state for it.
func Busy(reason, format string, args ...any) *Error {
	return &Error{Code: InvalidInput, Reason: reason, Message: fmt.Sprintf(format, args...), Connect: connect.CodeFailedPrecondition}
}

// Taken says that a thing with this identity is there already.
func Taken(format string, args ...any) *Error {
	return &Error{Code: InvalidInput, Reason: "taken", Message: fmt.Sprintf(format, args...), Connect: connect.CodeAlreadyExists}
}

// Cannot says that the thing does not serve what was asked.
func Cannot(reason, format string, args ...any) *Error {
	return &Error{Code: Unsupported, Reason: reason, Message: fmt.Sprintf(format, args...), Connect: connect.CodeFailedPrecondition}
}

// Missing says that there is no such thing, or none that the caller may see.
func Missing(format string, args ...any) *Error {
	return &Error{Code: NotFound, Message: fmt.Sprintf(format, args...), Connect: connect.CodeNotFound}
}

// Unauthenticated says that the caller is nobody that the gateway knows.
func Unauthenticated(format string, args ...any) *Error {
	return &Error{Code: PermissionDenied, Message: fmt.Sprintf(format, args...), Connect: connect.CodeUnauthenticated}
}

// Denied says that the caller may not do this.
func Denied(format string, args ...any) *Error {
	return &Error{Code: PermissionDenied, Message: fmt.Sprintf(format, args...), Connect: connect.CodePermissionDenied}
}

// ToConnect is the error that crosses the wire. What nobody classified is
// answered without its text, which is for the gateway's log; known says
// whether it was classified.
func ToConnect(err error) (wire *connect.Error, known bool) {
	var e *Error
	var ce *connect.Error
	var command *errs.Error
	switch {
	case errors.As(err, &e):
	case errors.As(err, &ce):
		return ce, true
	case errors.As(err, &command):
		e = &Error{Code: DriverError, Reason: string(command.Code), Message: command.Message, Connect: connect.CodeAborted, Retryable: command.Retryable}
		if command.Retryable {
			e.Connect = connect.CodeUnavailable
		}
	case errors.Is(err, store.ErrNotFound):
		e = Missing("%v", err)
	case errors.Is(err, store.ErrConflict):
		// "add machine m2: conflict" would not say what is in the way.
		e = Taken("%s: there is one of this name or identity", strings.TrimSuffix(err.Error(), ": "+store.ErrConflict.Error()))
	case errors.Is(err, context.Canceled):
		return connect.NewError(connect.CodeCanceled, errors.New("cancelled")), true
	case errors.Is(err, context.DeadlineExceeded):
		return connect.NewError(connect.CodeDeadlineExceeded, errors.New("the call's deadline is over")), true
	default:
		return connect.NewError(connect.CodeInternal, errors.New("internal error: see the gateway's log")), false
	}
	wire = connect.NewError(e.Connect, errors.New(e.Error()))
	code := string(e.Code)
	if e.Reason != "" {
		code += "/" + e.Reason
	}
	if detail, derr := connect.NewErrorDetail(&agentv1.Error{Code: code, Message: e.Message, Retryable: e.Retryable}); derr == nil {
		wire.AddDetail(detail)
	}
	return wire, true
}
