package relay

import (
	"context"
	"net"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/bmc/breaker"
	"github.com/better-compute/site-appliance/bmc/redfish"
)

const (
	// heardWithin is how long an answer spares a BMC the knock.
	heardWithin = time.Minute
	// knockWithin is how long a BMC may take to accept a connection.
	knockWithin = 5 * time.Second
)

// Ready refuses, with unreachable, a BMC whose circuit is open, and, where its
// driver speaks over TCP, one that accepts no connection. It takes nobody's slot:
// the dead are found out beside the living.
func (r *Relay) Ready(ctx context.Context, op *bmcv1.BmcOperationRequest) error {
	key, err := addressbook.Normalise(op.GetAddress(), op.GetDriver())
	if err != nil {
		return err
	}
	// Nothing goes out to an address that this operation may not use.
	if err := r.book.Check(op.GetAddress(), op.GetTlsSpkiSha256(), op.GetCredentialsRef(), op.GetDriver()); err != nil {
		return err
	}
	report, err := r.breaker.Ask(key)
	if err != nil {
		return err
	}
	if op.GetDriver() != redfish.ID || r.breaker.Heard(key, heardWithin) {
		report(breaker.ErrNothingLearned)
		return nil
	}
	within, cancel := context.WithTimeout(ctx, knockWithin)
	defer cancel()
	if err := r.knock(within, key); err != nil && ctx.Err() == nil {
		failure := errs.Retry(errs.Unreachable, "%s accepts no connection: %v", key, err)
		report(failure)
		return failure
	}
	report(breaker.ErrNothingLearned)
	return nil
}

func knock(ctx context.Context, address string) error {
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return c.Close()
}
