package bmclib

import (
	"context"
	"crypto/x509"
	"errors"
	"net/http"
	"reflect"
	"strings"
	"time"

	"github.com/bmc-toolbox/common"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/printable"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

const (
	// callLimit bounds a call that has no deadline.
	callLimit = 2 * time.Minute
	// logoutLimit bounds closing a session after that.
	logoutLimit = 5 * time.Second
	// pollEvery spaces looks at the power after it was set.
	pollEvery = time.Second
)

// machine is one BMC for one call.
type machine struct {
	vendor vendor
	config config
	login  credentials
	roots  *x509.CertPool
	crew   *crew
}

// with opens a session, runs work in it and closes it. The one request that
// action stands for is let through; without an action none that changes the BMC.
func (m *machine) with(ctx *driver.Context, action metal.PowerAction, work func(ctx context.Context, p provider, g *guard) error) error {
	limited, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	limited, stop := context.WithCancelCause(limited)
	defer stop(nil)
	v := m.vendor
	var wanted func(r *http.Request, body []byte) error
	if action != "" {
		wanted = func(r *http.Request, body []byte) error { return v.wants(action, r, body) }
	}
	g := newGuard(limited, stop, m.config, m.roots, v, wanted)
	err := m.crew.do(limited, func() error {
		defer g.close()
		p, err := v.dial(m.config, m.login, g)
		if err != nil {
			return errs.New(errs.DriverError, "%v", err)
		}
		defer func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(limited), logoutLimit)
			defer cancel()
			g.rebase(ctx)
			_ = p.Close(ctx)
		}()
		// Without a deadline of its own: from one bmclib makes another, which ends
		// the call in its own words.
		ctx, end := context.WithCancel(context.WithoutCancel(limited))
		defer end()
		defer context.AfterFunc(limited, end)()
		if err := p.Open(ctx); err != nil {
			return err
		}
		return work(ctx, p, g)
	})
	return m.told(ctx, limited, g.failure(), err)
}

// told chooses what a call's error is: what the guard saw goes before what the
// provider made of it, and nothing of it shows the password.
func (m *machine) told(ctx, limited context.Context, seen, err error) error {
	var own *errs.Error
	switch {
	case errors.As(seen, &own) && own.Code != errs.Unreachable:
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.As(seen, &own), errors.As(context.Cause(limited), &own), errors.As(err, &own):
	case err == nil:
		return nil
	case limited.Err() != nil:
		return errs.Retry(errs.Unreachable, "the BMC did not answer within %v", callLimit)
	default:
		own = errs.Retry(errs.BmcError, "bmclib: %v", err)
	}
	return &errs.Error{Code: own.Code, Message: m.clean(own.Message), Retryable: own.Retryable}
}

// clean bounds a message, takes the password out, and what a terminal would obey.
func (m *machine) clean(text string) string {
	text = strings.ReplaceAll(text, string(m.login.password.Reveal()), "[redacted]")
	text = printable.Text(text, '?')
	if len(text) > 400 {
		text = strings.ToValidUTF8(text[:400], "") + "…"
	}
	return text
}

// GetPower reads the power.
func (m *machine) GetPower(ctx *driver.Context) (state metal.PowerState, err error) {
	err = m.with(ctx, "", func(ctx context.Context, p provider, g *guard) error {
		word, err := p.PowerStateGet(ctx)
		state = parsePower(word)
		return err
	})
	if err != nil {
		return "", err
	}
	return state, nil
}

func parsePower(word string) metal.PowerState {
	switch strings.ToLower(word) {
	case "on":
		return metal.PowerOn
	case "off":
		return metal.PowerOff
	}
	return metal.PowerUnknown
}

// nmi is what some providers do beside power.
type nmi interface{ SendNMI(context.Context) error }

// SetPower sends one request at most, and looks until the machine is as asked.
func (m *machine) SetPower(ctx *driver.Context, action metal.PowerAction) error {
	word, served := m.vendor.actions[action]
	if !served {
		return errs.New(errs.UnsupportedOperation, "bmclib does not serve %s for %s", action, m.vendor.id)
	}
	ctx.Emit(driver.Progress{Phase: "power", Message: "setting " + string(action)})
	want := map[metal.PowerAction]metal.PowerState{metal.ActionOn: metal.PowerOn, metal.ActionOff: metal.PowerOff, metal.ActionSoft: metal.PowerOff}[action]
	return m.with(ctx, action, func(ctx context.Context, p provider, g *guard) error {
		// Providers take an unknown state for off, and off for done.
		state, err := p.PowerStateGet(ctx)
		if err != nil {
			return err
		}
		switch now := parsePower(state); {
		case now == want:
			return nil
		case now == metal.PowerUnknown:
			return errs.Retry(errs.BmcError, "the machine's power is %.40q now: nothing was sent", state)
		case now == metal.PowerOff && want != metal.PowerOn:
			return errs.New(errs.BmcError, "the machine is off: %s does nothing", action)
		}
		if action == metal.ActionNMI {
			sender, ok := p.(nmi)
			if !ok {
				return errs.New(errs.UnsupportedOperation, "bmclib does not serve nmi for %s", m.vendor.id)
			}
			err = sender.SendNMI(ctx)
		} else {
			// Its first answer is false for a soft power-off that was taken.
			_, err = p.PowerSet(ctx, word)
		}
		if err == nil && !g.written() {
			err = errs.New(errs.BmcError, "bmclib sent nothing to the BMC, and said success")
		}
		if err != nil || want == "" {
			return err
		}
		for {
			if state, err = p.PowerStateGet(ctx); err != nil {
				return err
			}
			if parsePower(state) == want {
				return nil
			}
			select {
			case <-ctx.Done():
				return errs.Retry(errs.Timeout, "the BMC took %s, and the machine is still %s", action, parsePower(state))
			case <-time.After(pollEvery):
			}
		}
	})
}

// inventory is what some providers read.
type inventory interface {
	Inventory(context.Context) (*common.Device, error)
}

// Inspect reads the inventory, and changes nothing on the BMC.
func (m *machine) Inspect(ctx *driver.Context) (in metal.Inspection, err error) {
	ctx.Emit(driver.Progress{Phase: "inspect", Message: "reading the inventory"})
	err = m.with(ctx, "", func(ctx context.Context, p provider, g *guard) error {
		reader, ok := p.(inventory)
		if !ok {
			return errs.New(errs.UnsupportedOperation, "bmclib does not read the inventory of %s", m.vendor.id)
		}
		device, err := reader.Inventory(ctx)
		if err != nil {
			return err
		}
		if device == nil {
			return errs.New(errs.BmcError, "bmclib read no inventory")
		}
		state, err := p.PowerStateGet(ctx)
		if err != nil {
			return err
		}
		read := inspection(device)
		read.Source, read.Power = m.vendor.id, parsePower(state)
		if reflect.DeepEqual(read, metal.Inspection{Source: read.Source, Power: read.Power}) {
			return errs.New(errs.BmcError, "bmclib read nothing of the machine")
		}
		in = read
		return nil
	})
	if err != nil {
		return metal.Inspection{}, err
	}
	return in, nil
}
