package settle

import (
	"context"
	"errors"

	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/plugins/driver/binding"
)

// Rebind sends a command that binds a machine's BMC anew, and has it become the
// machine's own once the box has done it.
func (s *Service) Rebind(ctx context.Context, r store.Rebind, spec commands.Spec) (id string, err error) {
	r.CommandID = s.c.Store.NewID("cmd")
	spec.ID = r.CommandID
	over := s.start(r.CommandID)
	defer over()
	if err := s.c.Store.AddRebind(ctx, r); err != nil {
		return "", err
	}
	return s.c.Commands.Submit(ctx, spec)
}

// rebind takes one rebinding further.
func (s *Service) rebind(ctx context.Context, r store.Rebind) (open bool, err error) {
	outcome, open, err := s.ended(ctx, r.CommandID)
	if err != nil || open {
		return open, err
	}
	m, err := s.c.Store.MachineByID(ctx, r.MachineID)
	if err != nil {
		return false, err
	}
	details := map[string]string{"driver": r.BMC.Driver, "address": r.BMC.Address, "credentials": r.BMC.CredentialsRef, "command": r.CommandID}
	if r.Protected {
		details["protected"] = "yes"
	}
	if outcome != nil {
		details["code"] = string(outcome.Code)
		s.audit(ctx, m, "bmc.rebind-failed", details)
		return false, s.c.Store.DropRebind(ctx, r.CommandID)
	}
	err = s.c.Store.Rebound(ctx, r, func(m store.Machine) map[string]binding.Binding { return rebound(m, r.BMC) })
	if errors.Is(err, store.ErrConflict) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	s.audit(ctx, m, "bmc.rebound", details)
	if r.Protected != m.Protected && len(m.MACs) > 0 {
		if err := s.tellProtection(ctx, m); err != nil && ctx.Err() == nil {
			s.c.Log.Warn("the box hears of a machine's protection with its next boot decision", "machine", m.ID, "err", err)
		}
	}
	return false, nil
}

// tellProtection sends the site's boot decisions as they are: beside the BMC's
// address, the box knows the machine itself as protected from then on.
func (s *Service) tellProtection(ctx context.Context, m store.Machine) error {
	box, err := s.box(ctx, m.SiteID)
	if err != nil {
		return err
	}
	next, err := s.c.Store.NextSnapshot(ctx, m.SiteID)
	if err != nil {
		return err
	}
	c := metal.AssignCommand(next, s.c.Store.Now())
	_, err = s.c.Commands.Submit(ctx, commands.Spec{AgentID: box, TargetNodeID: m.ID, Kind: c.Kind, Lane: c.Lane, Args: c.Args, Timeout: c.Timeout})
	return err
}

// rebound is a machine's bindings with those that were its BMC's bound to the new
// one. What a profile or a person bound stays.
func rebound(m store.Machine, to store.BMC) map[string]binding.Binding {
	out := map[string]binding.Binding{}
	was := binding.BMC(m.BMC.Driver, m.BMC.Address, m.BMC.CredentialsRef)
	is := binding.BMC(to.Driver, to.Address, to.CredentialsRef)
	for kind, b := range m.Drivers {
		if old, ok := was[kind]; ok && old.Driver == b.Driver && string(old.Config) == string(b.Config) {
			b = is[kind]
		}
		out[kind] = b
	}
	return out
}
