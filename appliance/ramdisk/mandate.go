package ramdisk

import (
	"context"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/pxe/mandate"
)

// orders are what this boot is for: the gateway's signed assignment, and the
// voucher that it must be about.
type orders struct {
	assignment, voucher []byte
	bundle              func() *trust.Bundle // nil before enrolment
}

// allow says whether a command kind that destroys is part of what the machine was
// booted for. Without an assignment that the gateway signed nothing is.
func (o *orders) allow(kind, machine string) error {
	bundle := o.bundle()
	if bundle == nil {
		return errs.Retry(errs.NotEnrolled, "the ramdisk is not enrolled yet")
	}
	if len(o.assignment) == 0 {
		return errs.New(errs.OperationNotAllowed, "%s: the box handed over no signed assignment, so that nothing is destroyed here: a gateway of this version sends one", kind)
	}
	a, err := mandate.Verify(o.assignment, bundle.CommandKey)
	if err != nil {
		return err
	}
	signed, v := &agentv1.SignedVoucher{}, &agentv1.Voucher{}
	if err := envelope.StrictUnmarshal(o.voucher, signed); err != nil {
		return err
	}
	if err := envelope.StrictUnmarshal(signed.GetPayload(), v); err != nil {
		return err
	}
	switch {
	case a.GetMachineId() != machine || a.GetMachineId() != v.GetMachineId():
		return errs.New(errs.OperationNotAllowed, "%s: the assignment is machine %.64q's, and this is %s", kind, a.GetMachineId(), machine)
	case a.GetWindowId() != v.GetWindowId():
		return errs.New(errs.OperationNotAllowed, "%s: the assignment is of the boot window %.64q, and the voucher of %.64q", kind, a.GetWindowId(), v.GetWindowId())
	case !mandate.Allows(a.GetPurpose(), kind):
		return errs.New(errs.OperationNotAllowed, "%s: this machine was booted for %.40q, which does not include it", kind, a.GetPurpose())
	}
	return nil
}

const (
	postWithin = 5 * time.Second
	postTries  = 3
)

// post tells the box how far the machine is. What the box makes of it is no reason
// to fail anything.
func (m *imager) post(ctx context.Context, what, detail string) {
	if m.report == "" {
		return
	}
	var last error
	for range postTries {
		if last = m.postOnce(ctx, what, detail); last == nil || ctx.Err() != nil {
			break
		}
	}
	if last != nil {
		m.log.Warn("the box is not told how far this machine is", "what", what, "err", last)
	}
}

func (m *imager) postOnce(ctx context.Context, what, detail string) error {
	ctx, cancel := context.WithTimeout(ctx, postWithin)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, m.report+what, strings.NewReader(detail))
	if err != nil {
		return err
	}
	resp, err := m.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 4<<10)) // so that the connection is used again
	if resp.StatusCode/100 != 2 {
		return errs.New(errs.Unavailable, "the box answers %s", resp.Status)
	}
	return nil
}
