package redfish

import (
	"context"
	"net/http"
	"strings"

	bmclib "github.com/bmc-toolbox/bmclib/v2"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// GetSecureBoot says whether the machine's last boot was a secure one.
func (m *machine) GetSecureBoot(ctx *driver.Context) (state metal.SecureBootState, err error) {
	err = m.with(ctx, func(_ *bmclib.Client, p *provider) error {
		_, o, err := p.secureBoot(ctx)
		state = secureBootState(o)
		return err
	})
	return state, err
}

// SetSecureBoot says whether the machine's next boot is to be a secure one.
func (m *machine) SetSecureBoot(ctx *driver.Context, want metal.SecureBoot) error {
	return m.with(ctx, func(_ *bmclib.Client, p *provider) error { return p.setSecureBoot(ctx, want.Enabled) })
}

func (p *provider) secureBoot(ctx context.Context) (string, object, error) {
	s, err := p.find(ctx)
	if err != nil {
		return "", nil, err
	}
	id := s.object.object("SecureBoot").text("@odata.id")
	if id == "" {
		return "", nil, errs.New(errs.UnsupportedOperation, "the BMC knows nothing of secure boot")
	}
	path, err := p.resource(id)
	if err != nil {
		return "", nil, err
	}
	o, err := p.get(ctx, path)
	return path, o, err
}

// secureBootState goes by what the last boot was, and by what is set where the
// BMC does not tell.
func secureBootState(o object) metal.SecureBootState {
	state := metal.SecureBootState{Mode: strings.TrimSuffix(strings.ToLower(legible(o.text("SecureBootMode"))), "mode")}
	if current := o.text("SecureBootCurrentBoot"); current != "" {
		state.Enabled = strings.EqualFold(current, "Enabled")
	} else {
		state.Enabled, _ = o.boolean("SecureBootEnable")
	}
	return state
}

func (p *provider) setSecureBoot(ctx context.Context, enable bool) error {
	path, o, err := p.secureBoot(ctx)
	if err != nil {
		return err
	}
	is, said := o.boolean("SecureBootEnable")
	targets, ahead := []string{path}, false
	if id := o.object("@Redfish.Settings").object("SettingsObject").text("@odata.id"); id != "" {
		pending, err := p.resource(id)
		if err != nil {
			return err
		}
		targets = []string{pending, path}
		next, err := p.get(ctx, pending)
		if err != nil && errs.CodeOf(err) != errs.BmcError {
			return err
		}
		// What it says of the next boot goes before what is so now.
		var then bool
		if then, ahead = next.boolean("SecureBootEnable"); ahead {
			is, said = then, true
		}
	}
	if said && is == enable {
		return nil
	}
	for i, target := range targets {
		_, err = p.firstTaken(ctx, []plan{{method: http.MethodPatch, path: target, body: map[string]any{"SecureBootEnable": enable}}})
		switch {
		case err == nil && i == 0 && ahead:
			return p.shown(ctx, targets[:1], enable)
		case err == nil:
			return p.shown(ctx, targets, enable)
		case !objected(err):
			return err
		}
	}
	return err
}

// shown reads what was set until one of the resources shows it. It holds from the
// next boot, which is why the current boot's state says nothing of it.
func (p *provider) shown(ctx context.Context, paths []string, enable bool) error {
	waiting, cancel := patience(ctx, p.timing.settle)
	defer cancel()
	for {
		for _, path := range paths {
			o, err := p.get(waiting, path)
			if err != nil && !absent(err) && waiting.Err() == nil {
				return err
			}
			if is, said := o.boolean("SecureBootEnable"); said && is == enable {
				return nil
			}
		}
		if !sleep(waiting, p.timing.tick) {
			return errs.New(errs.BmcError, "the BMC accepted the change of secure boot and does not show it")
		}
	}
}
