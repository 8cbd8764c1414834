package api

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

// ConfirmPower passes a person's word on to the machine's box, asked or not.
func (s metalService) ConfirmPower(ctx context.Context, req *connect.Request[computev1.ConfirmPowerRequest]) (*connect.Response[computev1.ConfirmPowerResponse], error) {
	m, err := s.Store.Machine(ctx, req.Msg.TenantId, req.Msg.Machine)
	if err != nil {
		return nil, err
	}
	c, err := metal.ConfirmCommand(m.BMC, req.Msg.Power)
	if err != nil {
		return nil, err
	}
	box, enrolled, err := s.siteAgent(ctx, m.SiteID)
	if err != nil {
		return nil, err
	}
	id, _, err := s.send(ctx, m, box, enrolled, c)
	s.audit(ctx, m.SiteID, m.ID, "power.confirmed", map[string]string{"power": req.Msg.Power, "command": id, "code": string(errs.CodeOf(err))})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.ConfirmPowerResponse{}), nil
}

// powerAsked is what a person is asked to do with the machine now.
func (a *API) powerAsked(ctx context.Context, m store.Machine) (string, error) {
	if m.BMC.Driver != metal.Manual {
		return "", nil
	}
	e, err := a.Store.BoxEvent(ctx, m.SiteID, "power.asked", metal.ManualKey(m.BMC.Address))
	if errors.Is(err, store.ErrNotFound) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	return askedNow(e.BodyJSON, a.Store.Now()), nil
}

// askedNow reads what the box said last. An asking that is over says so by its
// own time where the box could not.
func askedNow(body string, now time.Time) string {
	var asked struct {
		Action string    `json:"action"`
		Until  time.Time `json:"until"`
	}
	if json.Unmarshal([]byte(body), &asked) != nil || !slices.Contains(metal.ManualActions(), asked.Action) {
		return ""
	}
	if !asked.Until.IsZero() && !asked.Until.After(now) {
		return ""
	}
	return asked.Action
}
