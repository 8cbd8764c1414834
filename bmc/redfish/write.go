package redfish

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// write sends a changing request until the BMC takes it or says for good that it
// does not: 2xx, or an error. After an answer that says that nothing was done for
// want of the right If-Match, it goes out again with another one. A POST is
// repeated for nothing else; what is idempotent also while the BMC is busy, and
// when an answer was lost.
func (p *provider) write(ctx context.Context, method, path string, body any) (*answer, error) {
	return p.change(ctx, method, path, body, method != http.MethodPost)
}

// change is write, told whether doing it twice does no harm.
func (p *provider) change(ctx context.Context, method, path string, body any, idempotent bool) (*answer, error) {
	raw, err := encode(body)
	if err != nil {
		return nil, err
	}
	pause := p.timing.retry
	for lost := 0; ; {
		a, err := p.matched(ctx, method, path, raw)
		if errs.CodeOf(err) == errs.Interrupted && idempotent && method != http.MethodPost && lost < maxLost && sleep(ctx, pause) {
			lost++
			continue
		}
		if err != nil {
			return nil, err
		}
		if a.status/100 == 2 || lost > 0 && method == http.MethodDelete && a.status == http.StatusNotFound {
			return a, nil
		}
		if lost > 0 && a.status/100 == 4 && !busy(method, a) {
			// Perhaps it is refused because the first one was taken.
			return nil, errs.New(errs.Interrupted, "the answer to %s %s was lost, and its repeat is refused with status %d: whether it was done is not known", method, path, a.status)
		}
		if !idempotent || !busy(method, a) {
			return nil, uncertain(method, statusError(strings.ToLower(method)+" "+path, a))
		}
		wait := retryAfter(a.header.Get("Retry-After"), pause)
		if !fits(ctx, wait) || !p.worthwhile(pause) || !sleep(ctx, wait) {
			return nil, statusError(strings.ToLower(method)+" "+path, a)
		}
		p.tell("busy", "the BMC is busy, asking again") // without its words, which may repeat a password
		pause = min(2*pause, maxPause*p.timing.retry)
	}
}

// uncertain says of a POST's failure within the BMC that it may have been done all
// the same.
func uncertain(method string, err error) error {
	status := statusOf(err)
	if method != http.MethodPost || status < 500 || status == http.StatusNotImplemented {
		return err
	}
	var r *refusal
	errors.As(err, &r)
	return &refusal{err: errs.New(r.err.Code, "%s: whether it was done is not known", r.err.Message), answer: r.answer}
}

// maxLost is how often a write that does no harm twice is sent again because its
// answer was lost.
const maxLost = 2

// maxPause is how much longer than the first the pauses get.
const maxPause = 16

// worthwhile bounds the repeats of a call that has no deadline.
func (p *provider) worthwhile(pause time.Duration) bool {
	return p.bounded || pause < maxPause*p.timing.retry
}

// busy reports whether a says that the BMC cannot now, but will. A 503 does not say
// that nothing was done.
func busy(method string, a *answer) bool {
	return a.status == http.StatusServiceUnavailable && method != http.MethodPost || a.status == http.StatusTooManyRequests || says(a, busyInPost)
}

// matched sends a request with every If-Match that the BMC may want, as long as
// its answer is that the one it got is wrong.
func (p *provider) matched(ctx context.Context, method, path string, body []byte) (*answer, error) {
	about := subject(method, path)
	etag, known := p.etags[about]
	if !known && method != http.MethodPost {
		// Whoever writes without having read gets the tag now; a BMC that does not
		// let it be read can still be written.
		if _, err := p.get(ctx, about); err != nil && errs.CodeOf(err) != errs.BmcError {
			return nil, err
		}
		etag = p.etags[about]
	}
	if method == http.MethodPost {
		etag = "" // an action needs none, until a BMC says otherwise
	}
	tried := map[string]bool{}
	a, err := p.attempt(ctx, method, path, body, etag, tried)
	if err != nil || !unmatched(a) {
		return a, err
	}
	// Perhaps it changed since it was read.
	if _, err := p.get(ctx, about); err != nil && errs.CodeOf(err) != errs.BmcError {
		return nil, err
	}
	for _, form := range forms(p.etags[about]) {
		if tried[form] {
			continue
		}
		if a, err = p.attempt(ctx, method, path, body, form, tried); err != nil || !unmatched(a) {
			return a, err
		}
	}
	return a, nil
}

func (p *provider) attempt(ctx context.Context, method, path string, body []byte, etag string, tried map[string]bool) (*answer, error) {
	tried[etag] = true
	header := http.Header{}
	if etag != "" {
		header.Set("If-Match", etag)
	}
	a, err := p.send(ctx, method, path, body, header)
	if err == nil && a.status/100 == 2 {
		delete(p.etags, subject(method, path)) // it has another one now
	}
	return a, err
}

// subject is the resource whose tag a request at path is about: an action's is
// the resource that has it.
func subject(method, path string) string {
	if before, _, found := strings.Cut(path, "/Actions/"); found && method == http.MethodPost {
		return before
	}
	return path
}

// forms are the ways in which BMCs want to see their own tag again: as it was
// sent, weak for strong and strong for weak, without quotes, in doubled ones, not
// at all, and any.
func forms(etag string) []string {
	var list []string
	if etag != "" {
		list = append(list, etag)
		strong, weak := strings.CutPrefix(etag, "W/")
		if weak {
			list = append(list, strong)
		} else {
			list = append(list, "W/"+etag)
		}
		bare := strings.Trim(strings.ReplaceAll(strong, `\"`, `"`), `"`)
		list = append(list, `"`+bare+`"`, `W/"`+bare+`"`, bare, `""`+bare+`""`)
	}
	return append(list, "", "*")
}

// unmatched reports whether a says that nothing was done for want of the right
// If-Match.
func unmatched(a *answer) bool {
	switch a.status {
	case http.StatusPreconditionFailed, http.StatusPreconditionRequired:
		return true
	case http.StatusBadRequest:
		text := strings.ToLower(string(a.body[:min(len(a.body), 4096)]))
		return strings.Contains(text, "if-match") || strings.Contains(text, "etag") || strings.Contains(text, "precondition")
	}
	return false
}
