// Package errs is the error that crosses a wire: a kebab-case code, a message
// for a person, and whether a repeat can help.
package errs

import (
	"context"
	"errors"
	"fmt"
)

// Code is a kebab-case error code. A code never changes its meaning.
type Code string

// The codes of the line home. Codes of drivers travel as they are.
const (
	ProtocolUnsupported Code = "protocol-unsupported"
	NotEnrolled         Code = "not-enrolled"
	Revoked             Code = "revoked"
	Superseded          Code = "superseded"
	IdentityCloned      Code = "identity-cloned"
	Draining            Code = "draining"
	RateLimited         Code = "rate-limited"
	TokenUsed           Code = "token-used"

	UnknownKind         Code = "unknown-kind"
	RoleMismatch        Code = "role-mismatch"
	WrongAgent          Code = "wrong-agent"
	WrongIncarnation    Code = "wrong-incarnation"
	Expired             Code = "expired"
	SignatureRequired   Code = "signature-required"
	SignatureInvalid    Code = "signature-invalid"
	KeyUnknown          Code = "key-unknown"
	QuorumRequired      Code = "quorum-required"
	GrantInvalid        Code = "grant-invalid"
	DuplicateMismatch   Code = "duplicate-mismatch"
	LaneFull            Code = "lane-full"
	InvalidPayload      Code = "invalid-payload"
	OperationNotAllowed Code = "operation-not-allowed"
	BindingMismatch     Code = "binding-mismatch"

	UnsupportedDriver      Code = "unsupported-driver"
	UnsupportedOperation   Code = "unsupported-operation"
	InvalidConfig          Code = "invalid-config"
	InvalidArgs            Code = "invalid-args"
	InvalidAddress         Code = "invalid-address"
	CredentialsUnavailable Code = "credentials-unavailable"
	PinUnsupported         Code = "pin-unsupported"
	PinMismatch            Code = "pin-mismatch"
	BmcError               Code = "bmc-error"
	Unreachable            Code = "unreachable"
	Unavailable            Code = "unavailable"
	Timeout                Code = "timeout"
	DriverError            Code = "driver-error"
	Cancelled              Code = "cancelled"
	Interrupted            Code = "interrupted"
	DigestMismatch         Code = "digest-mismatch"
	NoSpace                Code = "no-space"
	Internal               Code = "internal"

	// What BMCs refuse, where a person or a workflow does something about it.
	TLSUnsupported         Code = "tls-unsupported"
	SessionLimit           Code = "session-limit"
	PasswordChangeRequired Code = "password-change-required"
	MediaUntrusted         Code = "media-untrusted"
	StaleVersion           Code = "stale-version"
	BootOnceOnly           Code = "boot-once-only"
	// CredentialsUnchanged: a rotation was refused, and the old password holds.
	CredentialsUnchanged Code = "credentials-unchanged"
)

// Error is what a caller across a wire sees.
type Error struct {
	Code      Code
	Message   string
	Retryable bool
}

func (e *Error) Error() string { return string(e.Code) + ": " + e.Message }

// New makes an error that a repeat does not help.
func New(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// Retry makes an error that a repeat may help.
func Retry(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...), Retryable: true}
}

// From turns any error into one with a code: an *Error in its chain keeps
// code and flag, the context's errors become timeout and cancelled, and the
// rest is internal. The message is always the whole chain's. From(nil) is nil.
func From(err error) *Error {
	var e *Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &e):
		if err == error(e) {
			return e
		}
		return &Error{Code: e.Code, Message: wrapped(err, e), Retryable: e.Retryable}
	case errors.Is(err, context.DeadlineExceeded):
		return &Error{Code: Timeout, Message: err.Error(), Retryable: true}
	case errors.Is(err, context.Canceled):
		return &Error{Code: Cancelled, Message: err.Error()}
	}
	return &Error{Code: Internal, Message: err.Error()}
}

// wrapped is the chain's text without the code that e itself prints at its end.
func wrapped(err error, e *Error) string {
	text, inner := err.Error(), e.Error()
	if n := len(text) - len(inner); n >= 0 && text[n:] == inner {
		return text[:n] + e.Message
	}
	return text
}

// CodeOf is From(err).Code, and empty for nil.
func CodeOf(err error) Code {
	if e := From(err); e != nil {
		return e.Code
	}
	return ""
}
