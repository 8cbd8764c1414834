package site

import (
	"context"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/bmc/manual"
)

// confirmKind takes a person's word that a machine without a BMC was switched.
func confirmKind(desk *manual.Desk) dispatch.Kind {
	return dispatch.Kind{
		Name: cmdkind.Confirm, Lane: cmdkind.Lane(cmdkind.Confirm), Roles: siteOnly,
		Decode: func(args []byte) (dispatch.Operation, error) {
			req := &bmcv1.BmcConfirmRequest{}
			if err := envelope.StrictUnmarshal(args, req); err != nil {
				return dispatch.Operation{}, err
			}
			address, err := manual.Normalise(req.GetAddress())
			if err != nil {
				return dispatch.Operation{}, err
			}
			if p := req.GetPower(); p != "on" && p != "off" {
				return dispatch.Operation{}, errs.New(errs.InvalidArgs, "power %.40q: want on or off", p)
			}
			// Its own queue: it is what the machine's power command waits for.
			return dispatch.Operation{Name: "confirm", Key: "confirm " + address, RetrySafe: true, Value: req}, nil
		},
		Run: func(_ context.Context, call dispatch.Call) ([]byte, error) {
			req := call.Operation.Value.(*bmcv1.BmcConfirmRequest)
			if err := desk.Confirm(req.GetAddress(), req.GetPower()); err != nil {
				return nil, err
			}
			return proto.Marshal(&bmcv1.BmcConfirmResult{})
		},
		Recover: repeatIfSafe,
	}
}

// powerAsked is the state event that says what a person is asked to do with a
// machine without a BMC; its key is the machine's address.
const powerAsked = "power.asked"

// tellAsked passes it home.
func (s *site) tellAsked(a manual.Asked) { s.emit(powerAsked, "state", a.Address, a) }
