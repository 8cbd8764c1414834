package redfish

import (
	"context"
	"errors"
	"time"

	bmclib "github.com/bmc-toolbox/bmclib/v2"
	"github.com/bmc-toolbox/bmclib/v2/providers"
	"github.com/go-logr/logr"
	"github.com/jacobweinstock/registrar"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// machine is one BMC for one call.
type machine struct {
	pool   *pool
	config config
}

// longest is how long a call without a deadline may take.
const longest = time.Hour

// with opens a bmclib client whose registry holds our provider alone, logged in
// with the call's credential, and does the work.
func (m *machine) with(ctx *driver.Context, work func(c *bmclib.Client, p *provider) error) error {
	username, password, err := login(ctx)
	if err != nil {
		return err
	}
	return m.as(ctx, username, password, false, work)
}

// as is with for another credential than the call's. restricted accepts a log-in
// that is good for nothing but to change its own password.
func (m *machine) as(ctx *driver.Context, username string, password secret.Value, restricted bool, work func(c *bmclib.Client, p *provider) error) error {
	t := target{
		address: m.config.address, pin: m.config.pin, roots: m.pool.options.Roots, username: username, password: password,
	}
	p := &provider{emit: ctx.Emit, log: ctx.Log, restricted: restricted}
	return m.pool.run(ctx, t, p, work)
}

// login takes the call's credential.
func login(ctx *driver.Context) (string, secret.Value, error) {
	username, err := ctx.Secrets.Resolve(ctx, "username")
	if err != nil {
		return "", secret.Value{}, err
	}
	password, err := ctx.Secrets.Resolve(ctx, "password")
	if err != nil {
		return "", secret.Value{}, err
	}
	if username.Empty() || password.Empty() {
		return "", secret.Value{}, errs.New(errs.CredentialsUnavailable, "the credential has no username or no password")
	}
	return string(username.Reveal()), password, nil
}

// features are what our provider tells bmclib's registry that it can.
var features = registrar.Features{
	providers.FeaturePowerState, providers.FeaturePowerSet, providers.FeatureBootDeviceSet,
	providers.FeatureVirtualMedia, providers.FeatureBmcReset,
}

// run does work through a bmclib client over a connection of the pool.
func (l *pool) run(ctx context.Context, t target, p *provider, work func(*bmclib.Client, *provider) error) error {
	c, err := l.take(t)
	if err != nil {
		return err
	}
	defer l.give(c)
	p.conn = c
	registry := registrar.NewRegistry()
	registry.Register(p.Name(), "redfish", features, nil, p)
	limit := longest
	if deadline, ok := ctx.Deadline(); ok {
		limit, p.bounded = time.Until(deadline), true
	}
	// The client holds no credential and no HTTP client of its own: with a
	// registry given, it makes no other provider.
	client := bmclib.NewClient(t.address, "", "", bmclib.WithRegistry(registry), bmclib.WithLogger(logr.Discard()), bmclib.WithPerProviderTimeout(limit))
	if err := client.Open(ctx); err != nil {
		return plain(ctx, err)
	}
	err = work(client, p)
	_ = client.Close(ctx) // the session goes back to the pool, which ends it
	return plain(ctx, err)
}

// plain takes our error out of what bmclib wraps around it.
func plain(ctx context.Context, err error) error {
	var own *errs.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &own) && own.Code != errs.Unreachable:
		return own
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return errs.Retry(errs.Timeout, "the BMC did not answer within the operation's time")
	case ctx.Err() != nil:
		return errs.New(errs.Cancelled, "the operation was cancelled")
	case own != nil:
		return own
	}
	return errs.New(errs.BmcError, "%s", legible(err.Error()))
}
