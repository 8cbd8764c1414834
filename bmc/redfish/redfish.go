// Package redfish drives a machine over Redfish through a bmclib client whose
// registry holds our own provider, which speaks to the enrolled BMC alone.
package redfish

import (
	"context"
	"crypto/x509"
	"errors"

	bmclib "github.com/bmc-toolbox/bmclib/v2"
	"github.com/bmc-toolbox/bmclib/v2/providers"
	"github.com/go-logr/logr"
	"github.com/jacobweinstock/registrar"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
)

// Target is one BMC and what it takes to speak with it.
type Target struct {
	// Address is host:port.
	Address string
	// Pin is the hex SHA-256 of the public key of the BMC's certificate. When it
	// is empty, the certificate must be valid for the host under Roots.
	Pin string
	// Roots judge an unpinned BMC; nil: the system's.
	Roots    *x509.CertPool
	Username string
	Password secret.Value
}

// BootDevice is what the machine boots from: none, pxe, disk, cdrom or bios.
type BootDevice struct {
	Device     string `json:"device"`
	Persistent bool   `json:"persistent"`
	EFI        bool   `json:"efi"`
}

// PowerState is "on", "off" or "unknown" (between the two, or not said).
func PowerState(ctx context.Context, t Target) (state string, err error) {
	err = with(ctx, t, func(c *bmclib.Client) error {
		state, err = c.GetPowerState(ctx)
		return err
	})
	return state, err
}

// SetPower does one of on, off, soft, cycle, reset, nmi. It returns when the BMC
// has accepted it; on and off are no work for a machine that is so already.
func SetPower(ctx context.Context, t Target, action string) error {
	return with(ctx, t, func(c *bmclib.Client) error {
		_, err := c.SetPowerState(ctx, action)
		return err
	})
}

// SetBootDevice sets the device of the next boot, or of every boot when it is
// persistent, and reads it back.
func SetBootDevice(ctx context.Context, t Target, dev BootDevice) error {
	return with(ctx, t, func(c *bmclib.Client) error {
		_, err := c.SetBootDevice(ctx, dev.Device, dev.Persistent, dev.EFI)
		return err
	})
}

// GetBootDevice is the override in force; device none when there is none.
func GetBootDevice(ctx context.Context, t Target) (dev BootDevice, err error) {
	err = with(ctx, t, func(c *bmclib.Client) error {
		o, err := c.GetBootDeviceOverride(ctx)
		dev = BootDevice{Device: string(o.Device), Persistent: o.IsPersistent, EFI: o.IsEFIBoot}
		return err
	})
	return dev, err
}

// with opens a client for t, does the work and closes the BMC's session.
func with(ctx context.Context, t Target, work func(*bmclib.Client) error) error {
	p, err := newProvider(t)
	if err != nil {
		return err
	}
	registry := registrar.NewRegistry()
	registry.Register(p.Name(), "redfish", registrar.Features{
		providers.FeaturePowerState, providers.FeaturePowerSet, providers.FeatureBootDeviceSet,
	}, nil, p)
	// The client holds no credential and no HTTP client of its own: with a
	// registry given, it makes no other provider.
	client := bmclib.NewClient(t.Address, "", "", bmclib.WithRegistry(registry), bmclib.WithLogger(logr.Discard()))
	if err := client.Open(ctx); err != nil {
		return plain(ctx, err)
	}
	err = work(client)
	// A BMC has few sessions, but one left open does not undo what was done.
	_ = client.Close(ctx)
	return plain(ctx, err)
}

// plain takes our error out of what bmclib wraps around it.
func plain(ctx context.Context, err error) error {
	var own *errs.Error
	switch {
	case err == nil:
		return nil
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return errs.Retry(errs.Timeout, "the BMC did not answer within the operation's time")
	case ctx.Err() != nil:
		return errs.New(errs.Cancelled, "the operation was cancelled")
	case errors.As(err, &own):
		return own
	}
	return errs.New(errs.BmcError, "%v", err)
}
