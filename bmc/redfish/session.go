package redfish

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stmcginnis/gofish/common"
	schemas "github.com/stmcginnis/gofish/redfish"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
)

// conn is one BMC with one credential, and what was learned of it.
type conn struct {
	target target
	legacy bool
	client *http.Client
	timing timing
	key    key

	// The pool's.
	users  int
	since  time.Time
	expiry *time.Timer

	login gate // one log-in at a time

	mu       sync.Mutex
	password secret.Value // empty while no call has the connection
	auth     *auth
	service  object            // the service root
	system   string            // path of the one system; empty: not looked for yet
	spelling map[string]string // paths that the BMC has with or without a slash at their end only
}

// auth is a log-in.
type auth struct {
	token   string // of the session; empty: basic authentication
	session string // path of the session to delete; empty: none
	// limited says that the password must be changed before anything else.
	limited bool
}

// open reports whether there is a log-in to keep.
func (c *conn) open() bool { return c.current() != nil }

func (c *conn) current() *auth {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.auth
}

// setPassword wipes the one before, and keeps a copy: the caller's own ends with
// its call.
func (c *conn) setPassword(v secret.Value) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.password.Wipe()
	c.password = secret.New(bytes.Clone(v.Reveal()))
}

func (c *conn) revealed() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return string(c.password.Reveal())
}

func (c *conn) set(a *auth) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.auth = a
}

// authorise is the log-in to use; it logs in when there is none, or when it is
// stale, the one that the BMC has just refused.
func (c *conn) authorise(ctx context.Context, stale *auth) (*auth, error) {
	if a := c.current(); a != nil && a != stale {
		return a, nil
	}
	if err := c.login.enter(ctx); err != nil {
		return nil, err
	}
	if a := c.current(); a != nil && a != stale {
		c.login.leave()
		return a, nil
	}
	c.set(nil)
	attempt := &attempt{over: make(chan struct{})}
	go func() {
		defer c.login.leave()
		attempt.run(ctx, c)
	}()
	select {
	case <-attempt.over:
	case <-ctx.Done():
		if attempt.abandon() {
			return nil, errs.Retry(errs.Unreachable, "the BMC cannot be reached: it did not answer the log-in in time")
		}
	}
	return attempt.auth, attempt.err
}

// attempt is a log-in that outlives a call which does not wait for it, so that the
// session that a slow BMC opens then is ended: it has few of them.
type attempt struct {
	mu        sync.Mutex
	abandoned bool
	over      chan struct{} // closed with what follows
	auth      *auth
	err       error
}

// abandon reports whether nobody gets the log-in: it is not over yet.
func (a *attempt) abandon() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	select {
	case <-a.over:
		return false
	default:
	}
	a.abandoned = true
	return true
}

func (a *attempt) run(ctx context.Context, c *conn) {
	on, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(c.timing.late, cancel) })()
	got, err := c.guarded(ctx, on)
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.abandoned {
		if err == nil {
			c.set(got)
		}
		a.auth, a.err = got, err
		close(a.over)
		return
	}
	if err == nil {
		ending, stop := context.WithTimeout(on, c.timing.logout)
		defer stop()
		c.dismiss(ending, got)
		c.client.CloseIdleConnections()
	}
}

// gate lets one in at a time; who waits for it gives up with its own call.
type gate struct {
	once sync.Once
	one  chan struct{}
}

func (g *gate) enter(ctx context.Context) error {
	g.once.Do(func() { g.one = make(chan struct{}, 1) })
	select {
	case g.one <- struct{}{}:
		return nil
	case <-ctx.Done():
		return errs.Retry(errs.Unreachable, "the BMC cannot be reached: another call's log-in is not over")
	}
}

func (g *gate) leave() { <-g.one }

// guarded is logIn, whose fault is its call's: nobody else could recover from it.
func (c *conn) guarded(ctx, on context.Context) (got *auth, err error) {
	defer func() {
		if fault := recover(); fault != nil {
			got, err = nil, errs.New(errs.DriverError, "the code of the log-in failed")
		}
	}()
	return c.logIn(ctx, on)
}

// logIn opens a session. A BMC without sessions gets basic authentication; one
// without a free session gets it where it says that it takes it. What opens the
// session goes on for as long as on.
func (c *conn) logIn(ctx, on context.Context) (*auth, error) {
	root, err := c.root(ctx)
	if err != nil {
		return nil, err
	}
	path, err := c.linkOr(root.object("Links"), "Sessions", sessionsPath)
	if err != nil {
		return nil, err
	}
	password := c.revealed()
	if password == "" || ctx.Err() != nil {
		return nil, errs.Retry(errs.Unreachable, "the BMC cannot be reached: the call was over before the log-in")
	}
	g := &gofishClient{ctx: on, conn: c}
	token, err := schemas.CreateSession(g, path, c.target.username, password)
	switch answer := g.answer; {
	case answer == nil:
		return nil, err
	case says(answer, passwordChange) && answer.status/100 != 2:
		return nil, passwordError()
	case answer.status == http.StatusNotFound, answer.status == http.StatusMethodNotAllowed, answer.status == http.StatusNotImplemented:
		return &auth{}, nil
	case says(answer, sessionLimit):
		if c.takesBasic(ctx, root) {
			return &auth{}, nil
		}
		return nil, errs.Retry(errs.SessionLimit, "log in: all sessions of the BMC are in use")
	case answer.status/100 != 2:
		return nil, logInError(answer)
	case token.Token == "":
		return nil, errs.New(errs.BmcError, "the BMC opened a session without a token")
	default:
		return &auth{token: token.Token, session: c.sessionPath(answer), limited: says(answer, passwordChange)}, nil
	}
}

// logInError is a refused log-in in our words and the names of the BMC's messages:
// what else the BMC says may repeat the password, or a part of it.
func logInError(a *answer) error {
	doing := "log in"
	switch a.status {
	case http.StatusUnauthorized:
		doing += ": the BMC refuses the credential"
	case http.StatusForbidden:
		doing += ": the BMC does not permit it"
	}
	said := statusCode(doing, a)
	return &refusal{err: &errs.Error{Code: said.Code, Message: errs.From(quiet(doing, statusError(doing, a))).Message, Retryable: said.Retryable}, answer: a}
}

// dismiss ends a session that is not the connection's any more.
func (c *conn) dismiss(ctx context.Context, a *auth) {
	if a.session != "" {
		_ = schemas.DeleteSession(&gofishClient{ctx: ctx, conn: c, auth: a}, a.session)
	}
}

// takesBasic asks without a credential whether basic authentication is there, as
// a BMC that has it says (RFC 9110, section 11.6.1), and tries it then once.
func (c *conn) takesBasic(ctx context.Context, root object) bool {
	path, err := c.linkOr(root, "Systems", systemsPath)
	if err != nil {
		return false
	}
	a, err := c.patiently(ctx, request{method: http.MethodGet, path: path})
	if err != nil || a.status != http.StatusUnauthorized {
		return false
	}
	offered := slices.ContainsFunc(a.header.Values("WWW-Authenticate"), func(challenge string) bool {
		return strings.Contains(strings.ToLower(challenge), "basic")
	})
	if !offered {
		return false
	}
	a, err = c.patiently(ctx, request{method: http.MethodGet, path: path, auth: &auth{}})
	return err == nil && a.status == http.StatusOK
}

// sessionPath is where the session that a answers is deleted. Some BMCs send a
// whole URL as Location, and some the path in the body only.
func (c *conn) sessionPath(a *answer) string {
	for _, id := range []string{a.header.Get("Location"), a.object().text("@odata.id")} {
		if path, err := c.resource(id); err == nil {
			return path
		}
	}
	return ""
}

// root is the service root, which needs no log-in.
func (c *conn) root(ctx context.Context) (object, error) {
	c.mu.Lock()
	root := c.service
	c.mu.Unlock()
	if root != nil {
		return root, nil
	}
	a, err := c.patiently(ctx, request{method: http.MethodGet, path: rootPath})
	if err != nil {
		return nil, err
	}
	switch a.status {
	case http.StatusOK:
		if root, err = parseObject(a.body); err != nil {
			return nil, err
		}
	case http.StatusUnauthorized: // against the standard, whose own paths are left then
		root = object{}
	default:
		return nil, statusError("read "+rootPath, a)
	}
	c.mu.Lock()
	c.service = root
	c.mu.Unlock()
	return root, nil
}

// logout ends the session, if there is one, and the connections.
func (c *conn) logout(ctx context.Context) error {
	defer c.client.CloseIdleConnections()
	a := c.current()
	c.set(nil)
	if a == nil || a.session == "" {
		return nil
	}
	return schemas.DeleteSession(&gofishClient{ctx: ctx, conn: c, auth: a}, a.session)
}

// forget drops the session without a word, as after the BMC's own restart.
func (c *conn) forget() {
	c.set(nil)
	c.client.CloseIdleConnections()
}

// gofishClient is what gofish's sessions are made with: our own requests, so that
// the credential goes where they go. It keeps the last answer.
type gofishClient struct {
	common.Client // none: what is not below is not used
	ctx           context.Context
	conn          *conn
	auth          *auth
	answer        *answer
}

func (g *gofishClient) Post(path string, payload any) (*http.Response, error) {
	body, err := json.Marshal(payload)
	if err != nil {
		return nil, errs.New(errs.CredentialsUnavailable, "the credential cannot be written as JSON")
	}
	return g.do(http.MethodPost, path, body)
}

func (g *gofishClient) Delete(path string) (*http.Response, error) {
	resp, err := g.do(http.MethodDelete, path, nil)
	if err == nil && resp.StatusCode/100 != 2 && resp.StatusCode != http.StatusNotFound && resp.StatusCode != http.StatusUnauthorized {
		return resp, statusError("log out", g.answer)
	}
	return resp, err
}

func (g *gofishClient) do(method, path string, body []byte) (*http.Response, error) {
	a, err := g.conn.patiently(g.ctx, request{method: method, path: path, body: body, auth: g.auth, harmless: true})
	if err != nil {
		return nil, err
	}
	g.answer = a
	return &http.Response{StatusCode: a.status, Header: a.header, Body: io.NopCloser(bytes.NewReader(a.body))}, nil
}
