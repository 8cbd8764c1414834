package redfish

import (
	"context"
	"net/http"
	"time"

	bmclib "github.com/bmc-toolbox/bmclib/v2"
	schemas "github.com/stmcginnis/gofish/redfish"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// resetTypes are the power actions in Redfish's words, the best one first. None
// of a graceful action is hard, and none of a hard one graceful.
var resetTypes = map[string][]schemas.ResetType{
	"on":    {schemas.OnResetType, schemas.ForceOnResetType},
	"off":   {schemas.ForceOffResetType},
	"soft":  {schemas.GracefulShutdownResetType},
	"cycle": {schemas.PowerCycleResetType}, // FullPowerCycle takes the power of the BMC and of all else, too
	"reset": {schemas.ForceRestartResetType},
	"nmi":   {schemas.NmiResetType},
}

// shows is the state that each action ends in, as far as a reading shows it.
var shows = map[string]string{"on": "on", "off": "off", "soft": "off", "cycle": "on", "reset": "on"}

// GetPower reads the power state.
func (m *machine) GetPower(ctx *driver.Context) (state metal.PowerState, err error) {
	err = m.with(ctx, func(c *bmclib.Client, _ *provider) error {
		s, err := c.GetPowerState(ctx)
		state = metal.PowerState(s)
		return err
	})
	return state, err
}

// SetPower does a power action once, and returns when the machine shows it.
func (m *machine) SetPower(ctx *driver.Context, action metal.PowerAction) error {
	if err := m.calm(); err != nil && action != metal.ActionOn {
		return err
	}
	return m.with(ctx, func(c *bmclib.Client, p *provider) error {
		p.tell("power", "setting "+string(action))
		if action == metal.ActionNMI {
			return c.SendNMI(ctx)
		}
		_, err := c.SetPowerState(ctx, string(action))
		return err
	})
}

// PowerStateGet answers on, off or unknown.
func (p *provider) PowerStateGet(ctx context.Context) (string, error) {
	s, err := p.find(ctx)
	if err != nil {
		return "", err
	}
	return s.powerState(), nil
}

// SendNMI makes the machine's processors take a non-maskable interrupt, which no
// reading shows.
func (p *provider) SendNMI(ctx context.Context) error {
	_, err := p.PowerSet(ctx, "nmi")
	return err
}

// PowerSet does a power action once; it never repeats one by itself. A machine
// that is on or off as asked gets nothing.
func (p *provider) PowerSet(ctx context.Context, action string) (bool, error) {
	words, known := resetTypes[action]
	if !known {
		return false, errs.New(errs.InvalidArgs, "unknown power action %q", legible(action))
	}
	s, err := p.find(ctx)
	if err != nil {
		return false, err
	}
	if wanted := shows[action]; wanted == s.powerState() && (action == "on" || wanted == "off") {
		return true, nil
	}
	if s.reset == "" {
		return false, errs.New(errs.UnsupportedOperation, "the BMC has no reset action")
	}
	if s.resets, err = p.allowed(ctx, s.object.object("Actions").object("#ComputerSystem.Reset"), "ResetType"); err != nil {
		return false, err
	}
	word, offered := pick(s.resets, words...)
	switch {
	case action == "cycle" && !offered:
		err = p.offAndOn(ctx, s)
	case !offered:
		return false, errs.New(errs.UnsupportedOperation, "the BMC does not offer power action %s", action)
	default:
		err = p.act(ctx, s, action, word)
	}
	return err == nil, err
}

// act sends one reset and waits until the machine shows what it does. A lost
// answer to on, off or soft is told by the machine's state; to another it is not.
func (p *provider) act(ctx context.Context, s *system, action string, word string) error {
	a, err := p.post(ctx, s, word)
	wanted := shows[action]
	if objected(err) && (action == "on" || wanted == "off") {
		// What it is asked for it may be already: some show it late and refuse it.
		if now, unread := p.read(ctx, s.path); unread == nil && now.powerState() == wanted {
			return nil
		}
	}
	if err == nil && (wanted == "" || wanted == s.powerState()) {
		err = p.failedJob(ctx, a, action) // nothing else would show it
	}
	lost := errs.CodeOf(err) == errs.Interrupted
	if err != nil && (!lost || action == "cycle" || action == "reset") || wanted == "" {
		return err
	}
	now, waited := p.await(ctx, s.path, wanted)
	switch {
	case waited == nil:
		p.keepBoot(ctx, s, now)
		return nil
	case lost:
		return err
	case action == "soft":
		return softError(waited)
	}
	return waited
}

func softError(err error) error {
	if errs.CodeOf(err) != errs.BmcError {
		return err
	}
	return errs.New(errs.BmcError, "the operating system was asked to shut down and did not: %s", errs.From(err).Message)
}

// failedJob looks for a while whether a job that a began fails.
func (p *provider) failedJob(ctx context.Context, a *answer, action string) error {
	if a.status != http.StatusAccepted {
		return nil
	}
	waiting, cancel := patience(ctx, p.timing.settle)
	defer cancel()
	if _, err := p.follow(waiting, a, job{doing: "power " + action}); errs.CodeOf(err) == errs.BmcError {
		return err
	}
	return nil
}

func (p *provider) post(ctx context.Context, s *system, word string) (*answer, error) {
	// A busy BMC that has not switched on is asked again.
	return p.change(ctx, http.MethodPost, s.reset, map[string]string{"ResetType": word}, word == string(schemas.OnResetType))
}

// offAndOn is the power cycle of a BMC that has no such action of its own,
// as most have not.
func (p *provider) offAndOn(ctx context.Context, s *system) error {
	off, hasOff := pick(s.resets, resetTypes["off"]...)
	on, hasOn := pick(s.resets, resetTypes["on"]...)
	switch {
	case !hasOff || !hasOn:
		return errs.New(errs.UnsupportedOperation, "the BMC offers neither a power cycle nor off and on")
	case s.powerState() == "off":
		return errs.New(errs.BmcError, "the machine is off: there is nothing to cycle")
	}
	if err := p.act(ctx, s, "off", off); err != nil {
		failure := *errs.From(err)
		failure.Message += "; within a power cycle: the machine was not switched on again"
		return &failure
	}
	p.tell("power", "the machine is off, switching it on")
	if err := p.act(ctx, s, "on", on); err != nil {
		failure := *errs.From(err)
		failure.Message += "; within a power cycle: the machine was switched off before"
		return &failure
	}
	return nil
}

// await reads the system until it shows a power state, or until little is left
// of ctx. Readings that fail meanwhile, as those of a BMC that restarts, are no
// answer.
func (p *provider) await(ctx context.Context, path, wanted string) (*system, error) {
	waiting, cancel := patience(ctx, p.powerLimit())
	defer cancel()
	begin := time.Now()
	var last *system
	for {
		now, err := p.read(waiting, path)
		switch {
		case err == nil && now.powerState() == wanted:
			return now, nil
		case err == nil:
			last = now
		case final(err):
			return nil, err
		}
		if sleep(waiting, p.timing.tick) {
			continue
		}
		switch waited := time.Since(begin).Round(time.Second); {
		case errs.CodeOf(ctx.Err()) == errs.Cancelled:
			return nil, errs.New(errs.Cancelled, "the operation was cancelled after the BMC had accepted the power action")
		case last == nil:
			return nil, errs.New(errs.Unreachable, "the BMC accepted the power action and could not be read for %s: whether the machine is %s is not known", waited, wanted)
		default:
			return nil, errs.New(errs.BmcError, "the BMC accepted the power action, and after %s the machine is still %s", waited, last.powerState())
		}
	}
}

// final reports whether an error will be the same at the next try.
func final(err error) bool {
	switch errs.CodeOf(err) {
	case errs.PinMismatch, errs.TLSUnsupported, errs.PasswordChangeRequired:
		return true
	}
	return false
}

// patience ends after limit, and a little before ctx, so that what was waited for
// in vain can still be told.
func patience(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline)
		limit = min(limit, left-min(left/10, 3*time.Second))
	}
	return context.WithTimeout(ctx, limit)
}

// powerLimit is how long a power state is waited for: as long as the call may
// last, where something is said of it.
func (p *provider) powerLimit() time.Duration {
	if p.bounded {
		return longest
	}
	return p.timing.power
}
