package redfish

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// job is something that a BMC goes on with after its answer.
type job struct {
	// doing says what, for errors and progress.
	doing string
	// atBoot lets a job that waits for the machine's next boot be left alone.
	atBoot bool
	// silent takes a job that says nothing of itself for one that waits so: what
	// it does can be read elsewhere.
	silent bool
}

// outcome is how following a job ended.
type outcome struct {
	// waits is true while the job waits for the machine's next boot.
	waits bool
	// unseen is true when its end was not seen: it had no name, or the BMC forgot
	// it. Whether it was done must be read elsewhere.
	unseen bool
	notes  []message
}

const (
	// maxRefusals is how often in a row a BMC may refuse to show a job; one that
	// restarts does it for a while.
	maxRefusals = 3
	// steady is how often in a row a job must be seen waiting to count as that.
	steady = 3
)

// follow sees what an answer began to its end. The end of ctx is no end of the
// job, and the error says so.
func (p *provider) follow(ctx context.Context, a *answer, j job) (outcome, error) {
	path, r := p.begun(a)
	if path == "" {
		switch {
		case r.failed != "":
			return outcome{}, errs.New(errs.BmcError, "%s: %s", j.doing, r.failed)
		case a.status == http.StatusAccepted:
			return outcome{unseen: true, notes: r.notes}, nil
		}
		return outcome{notes: r.notes}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, longest)
	defer cancel()
	pause, refusals, waiting := p.timing.tick, 0, 0
	for {
		p.progress(j, r)
		switch {
		case r.failed != "":
			return outcome{}, errs.New(errs.BmcError, "%s: the BMC's job ended with %s", j.doing, r.failed)
		case r.done:
			return outcome{notes: r.notes}, nil
		case j.atBoot && r.scheduled, j.atBoot && r.waiting && waiting >= steady:
			return outcome{waits: true, notes: r.notes}, nil
		}
		if !sleep(ctx, pause) {
			return outcome{}, p.leave(ctx, j, path, r)
		}
		pause = min(pause*3/2, 10*p.timing.tick)
		next, err := p.send(ctx, http.MethodGet, path, nil, nil)
		switch {
		case err != nil && (errs.CodeOf(err) == errs.PinMismatch || refusals >= maxRefusals && errs.CodeOf(err) != errs.Unreachable):
			return outcome{}, errs.New(errs.CodeOf(err), "%s: the BMC's job %s cannot be followed, and may go on: %s", j.doing, path, errs.From(err).Message)
		case err != nil:
			// A BMC that restarts is away for a while. That is no end of the job.
			if errs.CodeOf(err) != errs.Unreachable {
				refusals++
			}
			continue
		case next.status == http.StatusNotFound || next.status == http.StatusGone:
			return outcome{unseen: true, notes: r.notes}, nil
		}
		seen := reading(next)
		if seen.unclear {
			if refusals++; refusals >= maxRefusals {
				return outcome{}, errs.New(errs.BmcError, "%s: the BMC's job %s cannot be followed, and may go on: status %d: %s", j.doing, path, next.status, next.reason())
			}
			continue
		}
		refusals = 0
		seen.waiting = seen.waiting || j.silent && seen.state == "" && !seen.done
		if waiting++; !seen.waiting {
			waiting = 0
		}
		if seen.percent == 0 {
			seen.percent = r.percent
		}
		r = seen
	}
}

// leave is the error for a job that outlasts its operation.
func (p *provider) leave(ctx context.Context, j job, path string, r report) error {
	state := first(r.state, "not over")
	if errors.Is(ctx.Err(), context.Canceled) {
		return errs.New(errs.Cancelled, "%s: cancelled; the BMC's job %s (%s) goes on", j.doing, path, state)
	}
	return errs.New(errs.Timeout, "%s: the operation's time is over; the BMC's job %s (%s, %d %%) goes on", j.doing, path, state, r.percent)
}

// progress reports progress.
func (p *provider) progress(j job, r report) {
	if p.emit != nil {
		p.emit(driver.Progress{Phase: "task", Message: strings.TrimSpace(j.doing + " " + r.state), Done: uint64(r.percent), Total: 100})
	}
}

// begun is the path of the job that an answer names, empty for none, and what
// the answer says of it already. What another host has is not gone after.
func (p *provider) begun(a *answer) (string, report) {
	o := a.object()
	r := report{notes: o.allMessages()}
	if isJob(o) {
		r = reading(&answer{status: http.StatusOK, header: a.header, body: a.body})
		if path, err := p.conn.resource(o.text("@odata.id")); err == nil {
			return path, r
		}
	} else if m := worst(r.notes); a.status/100 == 2 && m.critical() {
		r.failed = m.say()
		return "", r
	}
	location := a.header.Get("Location")
	path, err := p.conn.resource(location)
	switch {
	case location == "":
	case err != nil:
		p.log.Info("the BMC names a job that is none of its own", "location", legible(location))
	case a.status == http.StatusAccepted, jobPath(path):
		return path, r
	}
	if path, err := p.conn.resource(o.text("@odata.id")); err == nil && (a.status == http.StatusAccepted || jobPath(path)) {
		return path, r
	}
	return "", r
}

// jobPath says whether a path is that of a task or job.
func jobPath(path string) bool {
	return strings.Contains(path, "/TaskService/") || strings.Contains(path, "/Jobs/") || strings.Contains(path, "/JobService/")
}

func isJob(o object) bool {
	return o.text("TaskState") != "" || o.text("JobState") != ""
}

// report is what one look at a job says.
type report struct {
	state   string
	percent int
	done    bool
	failed  string // why; empty: it has not
	// scheduled is a job for the next boot, and waiting one that has not begun,
	// which is the same if it stays so.
	scheduled, waiting bool
	unclear            bool
	notes              []message
}

var (
	doneStates      = []string{"completed", "ok", "success"}
	failedStates    = []string{"exception", "killed", "cancelled", "canceled", "failed", "completedwitherrors", "rebootfailed", "userintervention", "invalid"}
	scheduledStates = []string{"scheduled", "rebootpending", "pendingactivation"}
	waitingStates   = []string{"pending", "new", "starting", "suspended", "readyforexecution", "waiting"}
)

// reading judges what a GET of a task, a job or a task monitor answered.
func reading(a *answer) report {
	o := a.object()
	r := report{
		state:   first(o.object("Oem").object("Dell").word("JobState"), o.word("JobState"), o.word("TaskState")),
		percent: min(int(o.count("PercentComplete", 1e6)), 100),
		notes:   append(o.messages("Messages"), o.allMessages()...),
	}
	state := strings.ToLower(strings.ReplaceAll(r.state, " ", ""))
	bad := worst(r.notes)
	critical := strings.EqualFold(o.text("TaskStatus"), "Critical") || strings.EqualFold(o.object("Status").text("Health"), "Critical") || bad.critical()
	switch {
	case a.status == http.StatusAccepted:
		// A monitor of a job that goes on, whatever its body says.
		if slices.Contains(scheduledStates, state) {
			r.scheduled = true
		}
		r.waiting = slices.Contains(waitingStates, state)
	case a.status == http.StatusUnauthorized, a.status == http.StatusForbidden, a.status == http.StatusTooManyRequests, a.status >= 500, a.status/100 == 3:
		r.unclear = true
	case a.status/100 == 4: // a monitor tells by its status how the operation ended
		r.failed = first(reason(a.body), http.StatusText(a.status))
	case state == "" && len(o) > 0 && !isJob(o) && critical:
		r.failed = bad.say()
	case state == "" && !isJob(o) && (a.status == http.StatusNoContent || a.status == http.StatusCreated || a.status == http.StatusOK):
		r.done = true
	case slices.Contains(failedStates, state), slices.Contains(doneStates, state) && critical:
		r.failed = r.state
		if critical && slices.Contains(doneStates, state) {
			r.failed += " but critical"
		}
		if len(r.notes) > 0 {
			r.failed += ": " + first(bad.say(), r.notes[len(r.notes)-1].say())
		} else if text := o.word("Message"); text != "" {
			r.failed += ": " + text
		}
	case slices.Contains(doneStates, state):
		r.done, r.percent = true, 100
	case slices.Contains(scheduledStates, state):
		r.scheduled = true
	case slices.Contains(waitingStates, state):
		r.waiting = true
	}
	return r
}

// worst is the first message that is critical, or the last there is.
func worst(list []message) message {
	for _, m := range list {
		if m.critical() {
			return m
		}
	}
	if len(list) > 0 {
		return list[len(list)-1]
	}
	return message{}
}

// unclear says whether a change that failed with err may have been done all the
// same, which only a look can tell. A BMC that is too busy has not begun.
func unclear(err error) bool {
	if err == nil {
		return false
	}
	code, status := errs.CodeOf(err), statusOf(err)
	return code == errs.Interrupted || code == errs.Timeout ||
		status >= 500 && status != http.StatusNotImplemented && status != http.StatusServiceUnavailable
}

// until looks every so often whether something is so, for as long as limit, and
// answers the error of the last look that was not cut short by it.
func (p *provider) until(ctx context.Context, limit time.Duration, look func(context.Context) (bool, error)) (bool, error) {
	bounded, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var last error
	pause := p.timing.tick
	for looks := 0; ; looks++ {
		ok, err := look(bounded)
		if ok {
			return true, nil
		}
		if looks == 0 || bounded.Err() == nil || ctx.Err() != nil {
			last = err
		}
		if !sleep(bounded, pause) {
			return false, last
		}
		pause = min(pause*3/2, 10*p.timing.tick)
	}
}
