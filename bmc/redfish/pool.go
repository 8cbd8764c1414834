package redfish

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/secret"
)

// timing is how long things last. Tests shorten it.
type timing struct {
	// idle is how long a session outlives the last call that used it, and most
	// how many sessions may.
	idle time.Duration
	most int
	// tick is the pause before something is read again, and settle how long a BMC
	// may take to show what it has accepted.
	tick, settle time.Duration
	// media is how long a BMC may take to fetch what it needs of an image.
	media time.Duration
	// power is how long a machine may take to go on or off in a call without a
	// deadline.
	power time.Duration
	// retry is the first pause before a busy BMC is asked again.
	retry time.Duration
	// logout bounds the end of a session, and late is how long a log-in that was
	// sent is waited for once its call is over.
	logout, late time.Duration
}

var standardTiming = timing{
	idle: time.Minute, most: 256,
	tick: time.Second, settle: 20 * time.Second, media: time.Minute, power: 2 * time.Minute,
	retry: time.Second, logout: 5 * time.Second, late: time.Minute,
}

// key is who logs in where, so that a password that changed gets a session of its
// own. It holds a digest that is of no use outside of this pool: while nothing is
// asked of a BMC its password is kept nowhere.
type key struct {
	address, pin, username string
	password               [sha256.Size]byte
}

func (l *pool) key(t target) key {
	digest := hmac.New(sha256.New, l.salt[:])
	digest.Write(t.password.Reveal())
	return key{t.address, t.pin, t.username, [sha256.Size]byte(digest.Sum(nil))}
}

// layout is what a BMC's resources are found by. It outlives the sessions, so that
// a call at a BMC that was asked before begins with what it is about.
type layout struct {
	service object
	system  string
	since   time.Time
}

const (
	// placeLife bounds what is believed of a BMC that may get other firmware.
	placeLife = 10 * time.Minute
	maxPlaces = 4096
)

// pool keeps the sessions of BMCs between calls.
type pool struct {
	options Options
	timing  timing
	log     *slog.Logger

	salt [sha256.Size]byte

	mu     sync.Mutex
	conns  map[key]*conn
	places map[string]layout // by address and pin
	idle   int               // conns that no call uses
	closed bool
	ending sync.WaitGroup // log-outs in the background

	updating sync.Map // the component whose firmware is being written, by address
}

func newPool(o Options) *pool {
	log := o.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	l := &pool{options: o, timing: standardTiming, log: log, conns: map[key]*conn{}, places: map[string]layout{}}
	_, _ = rand.Read(l.salt[:]) // never fails
	return l
}

// take is the connection for t, shared with the calls that have it.
func (l *pool) take(t target) (*conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.key(t)
	c := l.conns[k]
	if c == nil {
		var err error
		if c, err = l.dial(t); err != nil {
			return nil, err
		}
		c.key = k
		if p, known := l.places[t.address+t.pin]; known && time.Since(p.since) < placeLife {
			c.service, c.system = p.service, p.system
		}
		l.conns[k] = c
	} else if c.users == 0 {
		l.idle--
		c.expiry.Stop()
	}
	if c.users == 0 {
		c.setPassword(t.password)
	}
	c.users++
	return c, nil
}

// dial makes a connection to t, which is not one of the pool's yet.
func (l *pool) dial(t target) (*conn, error) {
	legacy := l.options.Legacy != nil && l.options.Legacy(t.address)
	client, err := newClient(t, legacy)
	if err != nil {
		return nil, err
	}
	c := &conn{target: t, legacy: legacy, client: client, timing: l.timing}
	c.setPassword(t.password)
	c.target.password = secret.Value{}
	return c, nil
}

// learn keeps where things are; l.mu is held.
func (l *pool) learn(c *conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.target.address + c.target.pin
	if p, known := l.places[at]; c.system == "" || known && p.system == c.system && time.Since(p.since) < placeLife {
		return
	}
	if len(l.places) >= maxPlaces {
		clear(l.places)
	}
	l.places[at] = layout{service: c.service, system: c.system, since: time.Now()}
}

// give takes a connection back. One that no call uses is logged out after a
// while, or at once when too many are idle: the longest idle first.
func (l *pool) give(c *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c.users--
	if c.users > 0 {
		return
	}
	l.idle++
	l.learn(c)
	c.setPassword(secret.Value{})
	if l.closed || !c.open() {
		l.drop(c)
		return
	}
	c.since = time.Now()
	if c.expiry == nil {
		c.expiry = time.AfterFunc(l.timing.idle, func() { l.expire(c) })
	} else {
		c.expiry.Reset(l.timing.idle)
	}
	if l.idle > l.timing.most {
		oldest := c
		for _, other := range l.conns {
			if other.users == 0 && other.since.Before(oldest.since) {
				oldest = other
			}
		}
		l.drop(oldest)
	}
}

// expire ends a connection whose time is over, unless a call took it meanwhile.
func (l *pool) expire(c *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conns[c.key] == c && c.users == 0 && time.Since(c.since) >= l.timing.idle {
		l.drop(c)
	}
}

// drop forgets an idle connection and logs out in the background; l.mu is held.
func (l *pool) drop(c *conn) {
	l.idle--
	if c.expiry != nil {
		c.expiry.Stop()
	}
	delete(l.conns, c.key)
	l.ending.Add(1)
	go func() {
		defer l.ending.Done()
		ctx, cancel := context.WithTimeout(context.Background(), l.timing.logout)
		defer cancel()
		l.end(ctx, c)
	}()
}

func (l *pool) end(ctx context.Context, c *conn) {
	if err := c.logout(ctx); err != nil && !errors.Is(err, context.Canceled) {
		l.log.Info("BMC session was not ended", "address", c.target.address, "reason", err.Error())
	}
}

// close logs out of all BMCs that no call uses, and waits for it until ctx ends.
// What is in use is logged out when its call ends.
func (l *pool) close(ctx context.Context) {
	l.mu.Lock()
	l.closed = true
	for _, c := range l.conns {
		if c.users == 0 {
			l.drop(c)
		}
	}
	l.mu.Unlock()
	done := make(chan struct{})
	go func() {
		l.ending.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-ctx.Done():
	}
}
