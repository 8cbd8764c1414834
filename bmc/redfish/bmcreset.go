package redfish

import (
	"context"
	"net/http"

	bmclib "github.com/bmc-toolbox/bmclib/v2"
	"github.com/bmc-toolbox/bmclib/v2/bmc"
	schemas "github.com/stmcginnis/gofish/redfish"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
)

var _ bmc.BMCResetter = (*provider)(nil)

// managerResets are bmclib's words for a restart of the BMC. Either restarts the
// BMC and leaves the machine alone, so that one may stand in for the other.
var managerResets = map[string][]schemas.ResetType{
	"warm": {schemas.GracefulRestartResetType, schemas.ForceRestartResetType},
	"cold": {schemas.ForceRestartResetType, schemas.GracefulRestartResetType},
}

// ResetBMC restarts the BMC.
func (m *machine) ResetBMC(ctx *driver.Context) error {
	if err := m.calm(); err != nil {
		return err
	}
	return m.with(ctx, func(c *bmclib.Client, p *provider) error {
		p.tell("bmc", "restarting the BMC")
		_, err := c.ResetBMC(ctx, "warm")
		return err
	})
}

// BmcReset restarts the BMC once. Its sessions are lost with it.
func (p *provider) BmcReset(ctx context.Context, kind string) (bool, error) {
	words, known := managerResets[kind]
	if !known {
		return false, errs.New(errs.InvalidArgs, "unknown BMC reset %q", legible(kind))
	}
	_, manager, err := p.manager(ctx)
	if err != nil {
		return false, err
	}
	action := manager.object("Actions").object("#Manager.Reset")
	if action.text("target") == "" {
		return false, errs.New(errs.UnsupportedOperation, "the BMC has no reset of its own")
	}
	target, err := p.resource(action.text("target"))
	if err != nil {
		return false, err
	}
	allowed, err := p.allowed(ctx, action, "ResetType")
	if err != nil {
		return false, err
	}
	word, offered := pick(allowed, words...)
	if !offered {
		return false, errs.New(errs.UnsupportedOperation, "the BMC does not offer a restart of itself")
	}
	_, err = p.write(ctx, http.MethodPost, target, map[string]string{"ResetType": word})
	if errs.CodeOf(err) == errs.Interrupted && p.gone(ctx) {
		err = nil // it went down before it answered
	}
	if err == nil {
		p.forget()
	}
	return err == nil, err
}

// gone reports whether the BMC stops to answer, as one that restarts does.
func (p *provider) gone(ctx context.Context) bool {
	waiting, cancel := patience(ctx, p.timing.settle)
	defer cancel()
	for {
		_, err := p.do(waiting, request{method: http.MethodGet, path: rootPath})
		if err != nil {
			return waiting.Err() == nil && errs.CodeOf(err) == errs.Unreachable
		}
		if !sleep(waiting, p.timing.tick) {
			return false
		}
	}
}
