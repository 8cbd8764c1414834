package redfish

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmctest"
)

func logins(r *bmctest.Redfish) int { return requests(r, "POST /redfish/v1/SessionService/Sessions") }

func requests(r *bmctest.Redfish, prefix string) int {
	n := 0
	for _, q := range r.Requests() {
		if strings.HasPrefix(q, prefix) {
			n++
		}
	}
	return n
}

// Calls one after another share a session, which the closer ends.
func TestSessionIsReused(t *testing.T) {
	r, b := rig(t)
	for range 5 {
		if _, err := b.power(); err != nil {
			t.Fatal(err)
		}
	}
	if got := logins(r); got != 1 {
		t.Errorf("%d log-ins for five calls, want 1", got)
	}
	if got := requests(r, "GET /redfish/v1/Systems"); got > 6 {
		t.Errorf("%d reads of systems for five calls, want at most 6", got)
	}
	b.pool.close(t.Context())
	if got := r.Sessions(); got != 0 {
		t.Errorf("%d sessions are left after the closer, want 0", got)
	}
	if _, err := b.power(); err != nil {
		t.Errorf("getPower() after the closer = %v", err)
	}
	b.pool.ending.Wait()
	if got := r.Sessions(); got != 0 {
		t.Errorf("%d sessions are left by a call after the closer, want 0", got)
	}
}

// What a call costs a BMC: at first, in a session, and once the session has ended,
// when the pool still knows where things are.
func TestRequestsOfACall(t *testing.T) {
	r, b := rig(t)
	for i, want := range []int{4, 1, 2} {
		if i == 2 {
			for c := range b.pool.idleConns() {
				b.pool.timing.idle = 0
				b.pool.expire(c)
			}
			b.pool.ending.Wait()
		}
		before := len(r.Requests())
		if _, err := b.power(); err != nil {
			t.Fatal(err)
		}
		if got := len(r.Requests()) - before; got != want {
			t.Errorf("call %d made requests %q, want %d of them", i, r.Requests()[before:], want)
		}
	}
}

// An idle session is logged out; one in use is not.
func TestIdleSessionEnds(t *testing.T) {
	r, b := rig(t)
	b.pool.timing.idle = 20 * time.Millisecond
	if _, err := b.power(); err != nil {
		t.Fatal(err)
	}
	for r.Sessions() != 0 {
		if t.Context().Err() != nil {
			t.Fatal("the session never ended")
		}
		time.Sleep(time.Millisecond)
	}
	if _, err := b.power(); err != nil || logins(r) != 2 {
		t.Errorf("getPower() = %v after %d log-ins, want a second one", err, logins(r))
	}
	// The time of an idle one is over while it is taken again.
	c, err := b.pool.take(target{address: r.Addr(), pin: r.SPKI(), username: "admin", password: secretOf("pass word")})
	if err != nil {
		t.Fatal(err)
	}
	b.pool.expire(c)
	if got := r.Sessions(); got > 1 || b.pool.conns[c.key] != c {
		t.Errorf("a connection in use was dropped: %d sessions", got)
	}
	b.pool.give(c)
}

// More idle sessions than the cap: the longest idle ones end.
func TestPoolIsCapped(t *testing.T) {
	b := newBench(t, "127.0.0.1:1", "", "admin", "pass word")
	b.pool.timing.most = 3
	var rigs []*bmctest.Redfish
	for range 6 {
		r, err := bmctest.StartRedfish(t.Context(), "127.0.0.1:0", "admin", "pass word", bmctest.NewFake())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = r.Close() }()
		rigs = append(rigs, r)
		b.config["address"], b.config["tlsSpkiSha256"] = r.Addr(), r.SPKI()
		if _, err := b.power(); err != nil {
			t.Fatal(err)
		}
	}
	b.pool.ending.Wait()
	var open []int
	for _, r := range rigs {
		open = append(open, r.Sessions())
	}
	if want := []int{0, 0, 0, 1, 1, 1}; !slices.Equal(open, want) {
		t.Errorf("sessions open at six BMCs in turn: %v, want %v", open, want)
	}
}

// A session that the BMC has forgotten is opened once again, and what failed for
// it goes out again.
func TestLogInAgainAfter401(t *testing.T) {
	r, b := rig(t, bmctest.SessionsExpire.Times(2))
	for range 4 {
		if _, err := b.power(); err != nil {
			t.Fatal(err)
		}
	}
	if got := logins(r); got < 2 || got > 3 {
		t.Errorf("%d log-ins for two sessions that expire, want 2 or 3", got)
	}
	r.SetFaults(bmctest.SessionsExpire)
	for _, action := range []string{"on", "reset", "off"} {
		if _, err := b.do("power", "setPower", action); err != nil {
			t.Errorf("setPower(%s) with sessions that expire = %v", action, err)
		}
	}
	if got, want := r.Log(), []string{"on none", "reset none", "off"}; !slices.Equal(got, want) {
		t.Errorf("the machine saw %q, want %q", got, want)
	}
}

// A BMC that opens sessions and refuses them gets one more log-in and no third.
func TestDeadSessions(t *testing.T) {
	r, b := rig(t, bmctest.SessionsDead)
	if _, err := b.do("power", "setPower", "on"); errs.CodeOf(err) != errs.BmcError {
		t.Errorf("setPower(on) = %v, want bmc-error", err)
	}
	if got := logins(r); got != 2 {
		t.Errorf("%d log-ins, want 2", got)
	}
}

// Readings that go on while the BMC refuses every session make no log-in each.
func TestNoLogInStorm(t *testing.T) {
	var dead atomic.Bool
	f, b := serve(t, map[string]http.HandlerFunc{
		systemGet: func(w http.ResponseWriter, _ *http.Request) {
			if dead.Load() {
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			fmt.Fprint(w, `{"PowerState":"On","Actions":{"#ComputerSystem.Reset":{"target":"/redfish/v1/Systems/1/Actions/ComputerSystem.Reset"}}}`)
		},
		resetPost: func(w http.ResponseWriter, _ *http.Request) {
			dead.Store(true)
			w.WriteHeader(http.StatusNoContent)
		},
	})
	b.hurry()
	if _, err := b.do("power", "setPower", "off"); err == nil {
		t.Error("setPower(off) went well without a reading")
	}
	if got := f.count(sessionsPost); got != 2 {
		t.Errorf("%d log-ins, want 2", got)
	}
	if got := f.count(resetPost); got != 1 {
		t.Errorf("%d resets, want 1", got)
	}
}

func TestSessionLimit(t *testing.T) {
	r, b := rig(t, bmctest.SessionsFull, bmctest.NoBasic)
	_, err := b.power()
	if errs.CodeOf(err) != errs.SessionLimit || !errs.From(err).Retryable {
		t.Errorf("getPower() without a free session = %v, want session-limit, retryable", err)
	}
	if got := logins(r); got != 1 {
		t.Errorf("%d log-ins, want 1", got)
	}
	// Basic authentication stands in where the BMC says that it has it.
	r.SetFaults(bmctest.SessionsFull)
	if got, err := b.power(); got != "off" || err != nil {
		t.Errorf("getPower() over basic authentication = %q, %v, want off", got, err)
	}
	// And where it says nothing, the password is not sent along to try.
	f, quiet := serve(t, map[string]http.HandlerFunc{
		sessionsPost: func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusServiceUnavailable)
			fmt.Fprint(w, `{"error":{"code":"Base.1.0.SessionLimitExceeded"}}`)
		},
		systemsGet: func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") != "" {
				t.Error("the password was sent without an offer")
			}
			w.WriteHeader(http.StatusUnauthorized)
		},
	})
	if _, err := quiet.power(); errs.CodeOf(err) != errs.SessionLimit || f.count(sessionsPost) != 1 {
		t.Errorf("getPower() = %v after %d log-ins, want session-limit after 1", err, f.count(sessionsPost))
	}
}

func TestBasicAuthWithoutSessions(t *testing.T) {
	r, b := rig(t, bmctest.NoSessions)
	if got, err := b.power(); got != "off" || err != nil {
		t.Errorf("getPower() of a BMC without sessions = %q, %v, want off", got, err)
	}
	b.secrets["password"] = "guess"
	before := len(r.Requests())
	if _, err := b.power(); errs.CodeOf(err) != errs.BmcError {
		t.Errorf("getPower() with a wrong password = %v, want bmc-error", err)
	}
	refused := 0
	for _, q := range r.Requests()[before:] {
		if strings.HasPrefix(q, "GET /redfish/v1/Systems") {
			refused++
		}
	}
	if refused != 1 {
		t.Errorf("the wrong password was sent %d times, want 1", refused)
	}
}

// Some BMCs name the session in the body only, or by a whole URL of their own.
func TestSessionsThatAreNamedOtherwise(t *testing.T) {
	for _, fault := range []bmctest.Fault{bmctest.SessionUnnamed, bmctest.AbsoluteLinks, bmctest.ForeignLocation} {
		r, b := rig(t, fault)
		if _, err := b.power(); err != nil {
			t.Errorf("%s: getPower() = %v", fault, err)
		}
		b.pool.close(t.Context())
		if got := r.Sessions(); got != 0 {
			t.Errorf("%s: %d sessions are left, want 0", fault, got)
		}
	}
}

// Calls at the same time share one log-in.
func TestConcurrentCalls(t *testing.T) {
	r, b := rig(t)
	c, err := b.pool.take(target{address: r.Addr(), pin: r.SPKI(), username: "admin", password: secretOf("pass word")})
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	failures := make(chan error, 8)
	for range 8 {
		all.Go(func() {
			p := &provider{conn: c}
			if err := p.Open(context.Background()); err != nil {
				failures <- err
			}
			if _, err := p.find(context.Background()); err != nil {
				failures <- err
			}
		})
	}
	all.Wait()
	b.pool.give(c)
	close(failures)
	for err := range failures {
		t.Error(err)
	}
	if got := logins(r); got != 1 {
		t.Errorf("%d log-ins for eight calls at once, want 1", got)
	}
}

// The closer does not wait for a BMC that does not answer.
func TestCloserEnds(t *testing.T) {
	_, b := serve(t, map[string]http.HandlerFunc{"DELETE /redfish/v1/SessionService/Sessions/1": hang})
	if _, err := b.power(); err != nil {
		t.Fatal(err)
	}
	b.pool.timing.logout = 200 * time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	b.pool.close(ctx)
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		t.Error("the closer did not wait for its context")
	}
	b.pool.ending.Wait()
}
