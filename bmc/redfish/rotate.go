package redfish

import (
	"context"
	"net/http"
	"regexp"
	"strconv"
	"strings"

	bmclib "github.com/bmc-toolbox/bmclib/v2"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

const (
	accountServicePath = "/redfish/v1/AccountService"
	// maxAccounts is how many accounts are looked through.
	maxAccounts = 64
	// ownAccounts is how many of the usual paths are tried by who may see nothing
	// but the own account.
	ownAccounts = 16
)

// Rotate changes a password and proves it by a log-in. It can be asked again
// after an interruption: where the new password already holds there is nothing
// to do.
func (m *machine) Rotate(ctx *driver.Context, r metal.Rotation) error {
	username, old, err := login(ctx)
	if err != nil {
		return err
	}
	fresh, err := ctx.Secrets.Resolve(ctx, metal.NewPassword)
	if err != nil {
		return err
	}
	if fresh.Empty() {
		return errs.New(errs.CredentialsUnavailable, "the new password is empty")
	}
	t := rotation{m: m, ctx: ctx, username: username, old: old, fresh: fresh, account: first(r.Username, username)}
	return t.hidden(t.run())
}

// rotation is one call's.
type rotation struct {
	m                 *machine
	ctx               *driver.Context
	username, account string
	old, fresh        secret.Value
}

// hidden takes the passwords out of an error, should a BMC have told them.
func (t rotation) hidden(err error) error {
	e := errs.From(err)
	if e == nil {
		return nil
	}
	clean := *e
	for _, s := range []secret.Value{t.fresh, t.old} {
		if text := string(s.Reveal()); text != "" {
			clean.Message = strings.ReplaceAll(clean.Message, text, "[redacted]")
		}
	}
	return &clean
}

// own says whether the account is the one that is logged in with.
func (t rotation) own() bool { return t.account == t.username }

func (t rotation) run() error {
	t.m.pool.release(t.m.config.address)
	switch err := t.works(t.username, t.old); {
	case err == nil:
	case !turnedAway(err) || !t.own():
		return err
	case t.works(t.account, t.fresh) == nil:
		return nil // an earlier call was interrupted after the change
	default:
		return errs.New(errs.BmcError, "the BMC takes neither the old password of %q nor the new one", legible(t.account))
	}
	sent := false
	err := t.m.as(t.ctx, t.username, t.old, t.own(), func(_ *bmclib.Client, p *provider) (err error) {
		sent, err = p.changePassword(t.ctx, t.account, t.fresh)
		return err
	})
	if err != nil && !sent {
		return unchanged(err)
	}
	t.m.pool.release(t.m.config.address)
	return t.prove(err)
}

// release ends the sessions that no call uses: a BMC has few, and those of a
// changed password are of no more use.
func (l *pool) release(address string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.conns {
		if c.users == 0 && c.target.address == address {
			l.drop(c)
		}
	}
}

// prove logs in with the new password, and tells which one holds if it does not.
func (t rotation) prove(changing error) error {
	why := "the BMC accepted the change"
	if changing != nil {
		why = errs.From(changing).Message
	}
	failed := t.works(t.account, t.fresh)
	if turnedAway(failed) && sleep(t.ctx, 2*t.m.pool.timing.tick) {
		// Some BMCs take a moment. More tries than this would lock the account.
		failed = t.works(t.account, t.fresh)
	}
	if turnedAway(failed) && changing == nil && t.own() && t.lapses() {
		failed = t.works(t.account, t.fresh)
	}
	name := legible(t.account)
	switch {
	case failed == nil:
		return nil
	case !turnedAway(failed):
		return errs.New(errs.CodeOf(failed), "%s; which password of %q holds is not known: %s", why, name, errs.From(failed).Message)
	case !t.own():
		return errs.New(errs.BmcError, "%s; the new password of %q does not log in, and whether the old one does is not known", why, name)
	}
	switch err := t.works(t.account, t.old); {
	case err == nil:
		return errs.New(errs.CredentialsUnchanged, "%s; the new password of %q does not log in: the old one still holds", why, name)
	case turnedAway(err):
		return errs.New(errs.BmcError, "%s; neither the new password of %q logs in nor the old one", why, name)
	default:
		return errs.New(errs.CodeOf(err), "%s; the new password of %q does not log in, and the old one cannot be tried: %s", why, name, errs.From(err).Message)
	}
}

// lapses waits a while until the old password logs in no more, which tells without
// a wrong log-in that a BMC is late with what it accepted.
func (t rotation) lapses() bool {
	timing := t.m.pool.timing
	waiting, cancel := patience(t.ctx, timing.settle)
	defer cancel()
	for sleep(waiting, 2*timing.tick) {
		if turnedAway(t.works(t.username, t.old)) {
			return true
		}
	}
	return false
}

// unchanged is a refusal by a BMC that takes the old password, as callers know it.
func unchanged(err error) error {
	e := errs.From(err)
	if e.Code != errs.BmcError {
		return err
	}
	return errs.New(errs.CredentialsUnchanged, "%s; the old password holds", e.Message)
}

// turnedAway says whether err is a BMC's no to a name and a password.
func turnedAway(err error) bool {
	status := statusOf(err)
	return status == http.StatusUnauthorized || status == http.StatusForbidden || status == http.StatusBadRequest
}

// works logs in anew and out again. A BMC that is away for a moment is waited
// for; one that refuses is not asked twice.
func (t rotation) works(username string, password secret.Value) error {
	timing := t.m.pool.timing
	bounded, cancel := context.WithTimeout(t.ctx, 3*timing.settle)
	defer cancel()
	for pause := timing.tick; ; pause = min(2*pause, 10*timing.tick) {
		err := t.logIn(bounded, username, password)
		if err == nil || turnedAway(err) || !again(err) || !sleep(bounded, pause) {
			return err
		}
	}
}

// again says whether a log-in that failed so can work the next time.
func again(err error) bool {
	e := errs.From(err)
	return e.Retryable || e.Code == errs.Interrupted
}

// logIn opens a session of its own, not one of the pool's, and uses it once: a
// BMC without sessions shows only then whether it takes the password.
func (t rotation) logIn(ctx context.Context, username string, password secret.Value) error {
	to := target{address: t.m.config.address, pin: t.m.config.pin, roots: t.m.pool.options.Roots, username: username, password: password}
	c, err := t.m.pool.dial(to)
	if err != nil {
		return err
	}
	auth, err := c.authorise(ctx, nil)
	if err != nil {
		c.client.CloseIdleConnections()
		return quiet("log in", err)
	}
	defer func() {
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.timing.logout)
		defer cancel()
		if err := c.logout(ending); err != nil {
			t.ctx.Log.Info("BMC session was not ended", "address", to.address, "reason", errs.CodeOf(err))
		}
	}()
	a, err := c.patiently(ctx, request{method: http.MethodGet, path: (&provider{conn: c}).systems(), auth: auth})
	switch {
	case err != nil:
		return err
	case a.status == http.StatusUnauthorized, a.status >= 500:
		return quiet("log in", statusError("log in", a))
	}
	return nil
}

// changePassword writes the account that has this name. It reports whether the
// BMC may have changed anything; what it says against the request itself, it has
// not done.
func (p *provider) changePassword(ctx context.Context, account string, fresh secret.Value) (sent bool, err error) {
	if err := p.lengthFits(ctx, len(fresh.Reveal())); err != nil {
		return false, err
	}
	path, err := p.accountPath(ctx, account)
	if err != nil {
		return false, err
	}
	_, err = p.write(ctx, http.MethodPatch, path, map[string]string{"Password": string(fresh.Reveal())})
	sent = err == nil || !objected(err)
	return sent, quiet("the BMC refuses the new password", err)
}

// quiet is an answer's error by its status and the names of the BMC's messages
// alone: their texts may repeat a password, or a part of one.
func quiet(doing string, err error) error {
	a := answerOf(err)
	if a == nil {
		return err
	}
	code, names := errs.CodeOf(err), []string{"status " + strconv.Itoa(a.status)}
	for _, m := range a.object().allMessages() {
		if !messageName.MatchString(m.id) || len(names) > 4 {
			continue
		}
		names = append(names, m.id)
		if m.is(propertyFaults...) {
			code = errs.InvalidArgs
		}
	}
	return &refusal{err: &errs.Error{Code: code, Message: doing + ": " + strings.Join(names, ", "), Retryable: errs.From(err).Retryable}, answer: a}
}

var messageName = regexp.MustCompile(`^[A-Za-z0-9_.]{1,80}$`)

// lengthFits refuses a password of a length that the BMC does not take. One that does
// not say, or shows nothing before the change, is asked.
func (p *provider) lengthFits(ctx context.Context, length int) error {
	service, err := p.get(ctx, p.collection("AccountService", accountServicePath))
	if err != nil {
		if fatal(ctx, err) {
			return err
		}
		return nil
	}
	low, high := service.count("MinPasswordLength", maxCount), service.count("MaxPasswordLength", maxCount)
	if high > 0 && uint64(length) > high || uint64(length) < low {
		return errs.New(errs.InvalidArgs, "the new password has %d bytes: the BMC takes %d to %d", length, low, high)
	}
	return nil
}

// accountPath finds the account by its name.
func (p *provider) accountPath(ctx context.Context, name string) (string, error) {
	service, err := p.get(ctx, p.collection("AccountService", accountServicePath))
	if err != nil && fatal(ctx, err) {
		return "", err
	}
	accounts := first(p.link(service, "Accounts"), accountServicePath+"/Accounts")
	members, err := p.members(ctx, accounts)
	if errs.CodeOf(err) == errs.PasswordChangeRequired {
		// All that is shown now is the own account.
		members = nil
		for i := 1; i <= ownAccounts; i++ {
			members = append(members, accounts+"/"+strconv.Itoa(i))
		}
	} else if err != nil {
		return "", err
	}
	for i, path := range members {
		if i == maxAccounts {
			break
		}
		o, err := p.get(ctx, path)
		if fatal(ctx, err) {
			return "", err
		}
		if err == nil && o.text("UserName") == name {
			return path, nil
		}
	}
	return "", errs.New(errs.InvalidArgs, "the BMC shows no account %q", legible(name))
}
