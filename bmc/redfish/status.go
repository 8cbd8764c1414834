package redfish

import (
	"encoding/json"
	"errors"
	"net/http"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// Parts of the message identifiers that decide something. Registries and
// versions around them differ between BMCs.
const (
	passwordChange = "PasswordChangeRequired"
	sessionLimit   = "SessionLimitExceeded"
	busyInPost     = "UnableToModifyDuringSystemPOST"
	noConnection   = "CouldNotEstablishConnection"
)

// messages are what an answer says beside its status: those of an error, and
// those of a success.
func (a *answer) messages() []object {
	o := a.object()
	var all []object
	for _, holder := range []object{o.object("error"), o} {
		all = append(all, holder.objects("@Message.ExtendedInfo")...)
	}
	return all
}

// says reports whether a holds a message whose identifier has this name.
func says(a *answer, name string) bool {
	if strings.Contains(a.object().object("error").text("code"), name) {
		return true
	}
	for _, m := range a.messages() {
		id := m.text("MessageId")
		if id == "" {
			id = m.text("MessageID")
		}
		if strings.HasSuffix(id, name) {
			return true
		}
	}
	return false
}

// reason is what the answer says to a person.
func (a *answer) reason() string {
	if text := reason(a.body); text != "" {
		return text
	}
	return http.StatusText(a.status)
}

// reason is what an error answer says to a person.
func reason(data []byte) string {
	o, err := parseObject(data)
	if err != nil {
		return ""
	}
	inner := o.object("error")
	var infos []json.RawMessage
	if json.Unmarshal(inner["@Message.ExtendedInfo"], &infos) == nil {
		for _, raw := range infos {
			var info object
			if json.Unmarshal(raw, &info) == nil && info.text("Message") != "" {
				return legible(info.text("Message"))
			}
		}
	}
	return legible(inner.text("message"))
}

func passwordError() *errs.Error {
	return errs.New(errs.PasswordChangeRequired, "the BMC wants this account's password changed before anything else: rotate the credential")
}

// refusal is the error of an answer, which it keeps.
type refusal struct {
	err    *errs.Error
	answer *answer
}

func (r *refusal) Error() string { return r.err.Error() }
func (r *refusal) Unwrap() error { return r.err }

// statusOf is the HTTP status behind err; 0: none.
func statusOf(err error) int {
	var r *refusal
	if !errors.As(err, &r) {
		return 0
	}
	return r.answer.status
}

// objected reports whether a BMC answered that a request itself is wrong, so that
// nothing was done and another may do: none of 401, 403, 408, 412, 428 and 429.
func objected(err error) bool {
	var r *refusal
	if !errors.As(err, &r) {
		return false
	}
	switch r.answer.status {
	case http.StatusBadRequest, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusNotAcceptable, http.StatusConflict,
		http.StatusUnsupportedMediaType, http.StatusUnprocessableEntity, http.StatusNotImplemented:
		return !says(r.answer, busyInPost) && !says(r.answer, noConnection)
	}
	return false
}

// statusError is an answer that is no success. Only what a BMC says of its own
// load is worth a repeat: repeated wrong passwords lock accounts.
func statusError(doing string, a *answer) error {
	return &refusal{err: statusCode(doing, a), answer: a}
}

func statusCode(doing string, a *answer) *errs.Error {
	switch {
	case says(a, passwordChange):
		return passwordError()
	case says(a, sessionLimit):
		return errs.Retry(errs.SessionLimit, "%s: all sessions of the BMC are in use: %s", doing, a.reason())
	case a.status == http.StatusUnauthorized:
		return errs.New(errs.BmcError, "%s: the BMC refuses the credential: %s", doing, a.reason())
	case a.status == http.StatusForbidden: // a missing privilege, or a missing licence
		return errs.New(errs.BmcError, "%s: the BMC does not permit it: %s", doing, a.reason())
	case a.status/100 == 3:
		return errs.New(errs.BmcError, "%s: the BMC redirects, which is not followed", doing)
	case a.status == http.StatusTooManyRequests || a.status >= 500 && a.status != http.StatusNotImplemented || says(a, busyInPost):
		return errs.Retry(errs.BmcError, "%s: status %d: %s", doing, a.status, a.reason())
	}
	return errs.New(errs.BmcError, "%s: status %d: %s", doing, a.status, a.reason())
}
