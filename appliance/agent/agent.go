// Package agent is the one line home of every role: it enrols, holds the
// session, runs commands and sends events.
package agent

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/agent/bootinfo"
	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/agent/enroll"
	"github.com/better-compute/site-appliance/appliance/agent/journal"
	"github.com/better-compute/site-appliance/appliance/agent/outbox"
	"github.com/better-compute/site-appliance/appliance/agent/secrets"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/agentv1/agentv1connect"
	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
	"github.com/better-compute/site-appliance/appliance/base/clock"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
)

// earliestBuild stands in for the build time of a program that was built
// without one; the clock needs some floor.
var earliestBuild = time.Date(2025, 1, 1, 0, 0, 0, 0, time.UTC)

// Config is what a role hands to its agent.
type Config struct {
	Role agentv1.Role
	// StateDir holds identity, journal and events; "" keeps all in memory.
	StateDir string
	// Identity is a second copy of the identity; nil: none.
	Identity enroll.Copy
	// Join enrols a site or a node; nil once it is enrolled.
	Join *trust.Join
	// Boot enrols a ramdisk by its voucher.
	Boot *bootinfo.Info
	// Via is host:port that passes connections through to the gateway; "": Boot's, or directly.
	Via string
	// Dial opens connections; nil: a net.Dialer.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// BootID tells boots apart; "": the kernel's, or one per process for an
	// agent that keeps everything in memory.
	BootID string

	Version      string
	Build        time.Time
	Drivers      []*agentv1.AdvertisedDriver
	Capabilities []string
	// Lanes overrides dispatch.DefaultLanes by name.
	Lanes       map[string]int
	Kinds       []dispatch.Kind
	ProductUUID string
	MACs        []string
	Log         *slog.Logger
}

// Agent is safe for concurrent use.
type Agent struct {
	cfg    Config
	via    string
	dial   func(ctx context.Context, network, addr string) (net.Conn, error)
	log    *slog.Logger
	bootID string
	lock   *os.File

	clock    *clock.Trusted
	store    *enroll.Store
	journal  *journal.Journal
	outbox   *outbox.Outbox
	dispatch *dispatch.Dispatcher
	client   *http.Client // unary calls and artifacts; sessions have their own
	tunnels  *http.Client // one connection for all: bytes must not stand in a call's way

	identity atomic.Pointer[enroll.Identity]
	change   sync.Mutex // held while the identity is replaced
	renewed  chan struct{}

	online   atomic.Bool
	reached  atomic.Bool // the session at hand was welcomed
	heard    atomic.Bool // a gateway's time was taken in this process
	welcome  func()      // closes what dispatch waits for: a gateway's time was offered
	url      atomic.Uint32
	wake     chan struct{}
	rejoined atomic.Bool // a differing join string was refused for good
	troubles troubles
	savedAt  atomic.Int64 // floor last saved, in ms
}

// New opens the agent's state. A journal or outbox that cannot be opened is
// replaced by memory and complained about: a box with a bad disk still serves.
func New(cfg Config) (*Agent, error) {
	if cfg.Log == nil {
		return nil, errors.New("agent: a logger is needed")
	}
	if cfg.Role == agentv1.Role_ROLE_UNSPECIFIED {
		return nil, errors.New("agent: a role is needed")
	}
	a := &Agent{
		cfg: cfg, via: cfg.Via, dial: cfg.Dial, log: cfg.Log, bootID: cfg.BootID,
		wake: make(chan struct{}, 1), renewed: make(chan struct{}, 1),
	}
	if a.via == "" && cfg.Boot != nil {
		a.via = cfg.Boot.Via
	}
	if a.dial == nil {
		a.dial = new(net.Dialer).DialContext
	}
	if a.bootID == "" {
		a.bootID = bootID(cfg.StateDir)
	}
	build := cfg.Build
	if build.Before(earliestBuild) {
		build = earliestBuild
	}
	if err := a.open(build); err != nil {
		a.close()
		return nil, err
	}
	a.client = &http.Client{Transport: a.transport(a.mutual), CheckRedirect: noRedirect}
	a.tunnels = &http.Client{Transport: a.transport(a.mutual), CheckRedirect: noRedirect}

	incarnation := a.journal.Epoch()
	if cfg.Role == agentv1.Role_ROLE_RAMDISK {
		incarnation = a.bootID
	}
	timeKnown := make(chan struct{})
	a.welcome = sync.OnceFunc(func() { close(timeKnown) })
	var err error
	a.dispatch, err = dispatch.New(dispatch.Config{
		Role: cfg.Role, AgentID: a.AgentID, Incarnation: incarnation, Kinds: cfg.Kinds, Lanes: cfg.Lanes,
		Journal: a.journal, Bundle: a.Bundle, Now: a.clock.Now, TimeKnown: timeKnown,
		SiteID: a.SiteID, Latest: a.latest,
		Resolve: func(ctx context.Context, commandID string, refs []string) (map[string]secret.Value, error) {
			return secrets.Resolve(ctx, agentv1connect.NewSecretServiceClient(a.client, a.BaseURL(), clientOptions), commandID, refs)
		},
		Tunnel: a.openTunnel,
		Audit: func(name, key string, body any) error {
			return a.outbox.Emit(name, outbox.Audit, key, body)
		},
		AuditFull: a.outbox.Full, Log: cfg.Log,
	})
	if err != nil {
		a.close()
		return nil, err
	}
	return a, nil
}

// open loads all state. Where it fails the caller closes what was opened.
func (a *Agent) open(build time.Time) error {
	dir := a.cfg.StateDir
	var identityDir, journalPath, eventsPath string
	if dir != "" {
		identityDir, journalPath, eventsPath = filepath.Join(dir, "identity"), filepath.Join(dir, "journal"), filepath.Join(dir, "events")
		if err := os.MkdirAll(identityDir, 0o700); err != nil {
			return fmt.Errorf("make state folder: %w", err)
		}
		var err error
		if a.lock, err = lockFolder(dir); err != nil {
			return err
		}
	}
	a.clock = clock.New(build, a.loadFloor(), time.Now)

	var jerr, oerr error
	if a.outbox, oerr = outbox.Open(eventsPath, outbox.DefaultLimit, a.clock.Now); oerr != nil {
		a.outbox, _ = outbox.Open("", outbox.DefaultLimit, a.clock.Now) // memory cannot fail
		a.complain("state.degraded", "events", fmt.Errorf("events are kept in memory alone: %w", oerr))
	} else if a.outbox.Damaged() {
		a.complain("state.degraded", "events", errors.New("the events file was damaged; what stood after the damage is lost"))
	}
	if a.journal, jerr = journal.Open(journalPath); jerr != nil {
		a.journal, _ = journal.Open("")
		a.complain("state.degraded", "journal", fmt.Errorf("the journal is kept in memory alone, and destructive work is refused on a site: %w", jerr))
	} else if a.journal.Damaged() {
		a.complain("state.degraded", "journal", errors.New("the journal was damaged; commands for its old epoch are refused"))
	}

	a.store = enroll.NewStore(identityDir, a.cfg.Identity)
	id, err := a.store.Load()
	if err != nil {
		a.complain("state.degraded", "identity", err)
	}
	if id != nil {
		a.identity.Store(id)
		if a.journal.Fresh() {
			// The agent had a journal, and what it said of grants and of destructive work is gone.
			if err := a.journal.Lost(); err != nil {
				a.complain("state.degraded", "journal", err)
			}
		}
	}
	return nil
}

// latest is the latest gateway time that is known to have been.
func (a *Agent) latest() time.Time {
	now, passed := a.clock.Now(), a.clock.Passed()
	if passed.After(now) {
		return passed
	}
	return now
}

// complain logs a fault of this box and leaves an event of it.
func (a *Agent) complain(name, key string, err error) {
	a.log.Error("agent state is degraded", "part", key, "error", err)
	if e := a.outbox.Emit(name, outbox.State, key, map[string]string{"reason": err.Error()}); e != nil {
		a.log.Error("event not kept", "event", name, "error", e)
	}
}

func (a *Agent) close() {
	if a.journal != nil {
		if err := a.journal.Close(); err != nil {
			a.log.Error("close journal", "error", err)
		}
	}
	if a.outbox != nil {
		if err := a.outbox.Close(); err != nil {
			a.log.Error("close events", "error", err)
		}
	}
	if a.lock != nil {
		a.lock.Close()
	}
}

// bootID is the kernel's, so that a restarted process takes over its session.
// Without state a restart has lost its journal as a reboot has, and must not
// take commands that were meant for the process before it.
func bootID(stateDir string) string {
	if stateDir != "" {
		if data, err := os.ReadFile("/proc/sys/kernel/random/boot_id"); err == nil {
			if id := strings.TrimSpace(string(data)); id != "" {
				return id
			}
		}
	}
	var b [16]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

func (a *Agent) floorPath() string { return filepath.Join(a.cfg.StateDir, "clock") }

func (a *Agent) loadFloor() time.Time {
	if a.cfg.StateDir == "" {
		return time.Time{}
	}
	data, err := os.ReadFile(a.floorPath())
	if err != nil {
		return time.Time{}
	}
	ms, err := strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
	if err != nil {
		return time.Time{}
	}
	return time.UnixMilli(ms)
}

// saveFloorEvery spaces writes of the clock's floor: whoever reboots a box and sets
// its time back gains at most so much.
const saveFloorEvery = 10 * time.Minute

// saveFloor keeps the clock's floor, at most once in saveFloorEvery of it.
func (a *Agent) saveFloor() {
	floor := a.clock.Passed().UnixMilli()
	if a.cfg.StateDir == "" || floor-a.savedAt.Load() < saveFloorEvery.Milliseconds() {
		return
	}
	if err := atomicfile.Write(a.floorPath(), []byte(strconv.FormatInt(floor, 10)+"\n"), 0o600); err != nil {
		a.trouble("clock", err)
		return
	}
	a.savedAt.Store(floor)
}

// Emit keeps an event for the gateway: name is noun.past, class is "state",
// "telemetry" or "audit", and a state event replaces an older one with its key.
func (a *Agent) Emit(name, class, key string, body any) error {
	return a.outbox.Emit(name, class, key, body)
}

// HTTPClient reaches the gateway with the agent's certificate. It follows no
// redirects and has no time-out of its own.
func (a *Agent) HTTPClient() *http.Client { return a.client }

// BaseURL is the gateway's URL in use, "" before enrolment.
func (a *Agent) BaseURL() string {
	b := a.Bundle()
	if b == nil {
		return ""
	}
	urls := b.URLs()
	return strings.TrimSuffix(urls[int(a.url.Load())%len(urls)], "/")
}

// Locate asks the gateway where an artifact is.
func (a *Agent) Locate(ctx context.Context, ref, arch string) (*agentv1.LocateResponse, error) {
	answer, err := agentv1connect.NewArtifactServiceClient(a.client, a.BaseURL(), clientOptions).
		Locate(ctx, connect.NewRequest(&agentv1.LocateRequest{Ref: ref, Arch: arch}))
	if err != nil {
		return nil, fmt.Errorf("locate artifact %s: %w", ref, err)
	}
	return answer.Msg, nil
}

// SignVoucher signs a boot window's voucher with the agent's own key.
func (a *Agent) SignVoucher(v *agentv1.Voucher) (*agentv1.SignedVoucher, error) {
	id := a.identity.Load()
	if id == nil {
		return nil, errs.New(errs.NotEnrolled, "the agent is not enrolled yet")
	}
	return trust.SignVoucher(id.Key, id.AgentID, v)
}

// AgentID is "" before enrolment.
func (a *Agent) AgentID() string {
	if id := a.identity.Load(); id != nil {
		return id.AgentID
	}
	return ""
}

// SiteID is the site that the agent belongs to.
func (a *Agent) SiteID() string {
	switch id := a.identity.Load(); {
	case id != nil:
		return id.SiteID
	case a.cfg.Boot != nil:
		return a.cfg.Boot.SiteID
	case a.cfg.Join != nil:
		return a.cfg.Join.SiteID
	}
	return ""
}

// MachineID is the machine that a ramdisk or node stands for.
func (a *Agent) MachineID() string {
	switch id := a.identity.Load(); {
	case id != nil:
		return id.MachineID
	case a.cfg.Boot != nil:
		return a.cfg.Boot.MachineID
	}
	return ""
}

// Bundle is the trust bundle in force, nil before enrolment.
func (a *Agent) Bundle() *trust.Bundle {
	if id := a.identity.Load(); id != nil {
		return id.Bundle
	}
	return nil
}

// Clock is gateway time once a gateway was heard.
func (a *Agent) Clock() *clock.Trusted { return a.clock }

// Online reports whether a session is up.
func (a *Agent) Online() bool { return a.online.Load() }

// LinkUp ends the wait before the next attempt to come home.
func (a *Agent) LinkUp() {
	select {
	case a.wake <- struct{}{}:
	default:
	}
}
