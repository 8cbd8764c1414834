// Package nodespec tells a machine's agent what its machine is meant to be.
package nodespec

import (
	"context"
	"encoding/json"
	"errors"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/agentv1/agentv1connect"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/caller"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

// Machines finds a machine of any tenant; store.ErrNotFound where there is none.
type Machines interface {
	MachineByID(ctx context.Context, id string) (store.Machine, error)
}

// Service is safe for concurrent use once Layout is set.
type Service struct {
	machines Machines
	// Layout is the BIOS settings and the RAID layout of a hardware profile, JSON
	// objects, nil where there is none; nil: there are no hardware profiles.
	Layout func(profile string) (bios, raid json.RawMessage)
}

var _ agentv1connect.NodeServiceHandler = (*Service)(nil)

// New makes the service.
func New(machines Machines) *Service { return &Service{machines: machines} }

// GetSpec answers about the machine of the caller's certificate, and no other:
// the request cannot name one.
func (s *Service) GetSpec(ctx context.Context, _ *connect.Request[agentv1.GetSpecRequest]) (*connect.Response[agentv1.GetSpecResponse], error) {
	agent, err := caller.From(ctx)
	if err == nil && (agent.Role != agentv1.Role_ROLE_NODE && agent.Role != agentv1.Role_ROLE_RAMDISK || agent.MachineID == "") {
		err = errs.New(errs.RoleMismatch, "a %s stands for no machine", agent.Role)
	}
	if err != nil {
		return nil, caller.Error(err)
	}
	m, err := s.machines.MachineByID(ctx, agent.MachineID)
	if errors.Is(err, store.ErrNotFound) {
		return nil, connect.NewError(connect.CodeNotFound, errors.New("the machine is not there any more"))
	}
	if err != nil {
		return nil, caller.Error(err)
	}
	spec := &agentv1.NodeSpec{MachineId: m.ID, Name: m.Name, Drivers: map[string]*agentv1.DriverBinding{}, HardwareProfile: m.HardwareProfile}
	for kind, b := range m.Drivers {
		spec.Drivers[kind] = &agentv1.DriverBinding{Driver: b.Driver, ConfigJson: string(b.Config)}
	}
	if s.Layout != nil && m.HardwareProfile != "" {
		bios, raid := s.Layout(m.HardwareProfile)
		spec.BiosJson, spec.RaidJson = string(bios), string(raid)
	}
	return connect.NewResponse(&agentv1.GetSpecResponse{Spec: spec}), nil
}
