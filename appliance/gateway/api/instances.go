package api

import (
	"context"
	"strings"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

// Instances keeps what machines are to run.
type Instances interface {
	Apply(ctx context.Context, m store.Machine, name, runtime, spec string) (store.Instance, error)
	List(ctx context.Context, tenantID, machineID string) ([]store.Instance, error)
	Remove(ctx context.Context, i store.Instance) error
	// State is what is known of an instance now.
	State(ctx context.Context, i store.Instance) (state, message string, err error)
}

type instanceService struct{ *API }

// Apply stores what a machine is to run; its agent gets it when it can.
func (s instanceService) Apply(ctx context.Context, req *connect.Request[computev1.ApplyInstanceRequest]) (*connect.Response[computev1.ApplyInstanceResponse], error) {
	m := req.Msg
	if err := checkName("name", m.Name); err != nil {
		return nil, err
	}
	machine, err := s.Store.Machine(ctx, m.TenantId, m.Machine)
	if err != nil {
		return nil, err
	}
	i, err := s.Instances.Apply(ctx, machine, m.Name, m.Runtime, m.SpecJson)
	if err != nil {
		return nil, err
	}
	s.audit(ctx, machine.SiteID, machine.ID, "instance.applied", map[string]string{"instance": i.ID, "name": i.Name, "runtime": i.Runtime})
	item, err := s.wireInstance(ctx, i)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.ApplyInstanceResponse{Instance: item}), nil
}

// List tells the tenant's instances, or one machine's.
func (s instanceService) List(ctx context.Context, req *connect.Request[computev1.ListInstancesRequest]) (*connect.Response[computev1.ListInstancesResponse], error) {
	machineID := ""
	if req.Msg.Machine != "" {
		machine, err := s.Store.Machine(ctx, req.Msg.TenantId, req.Msg.Machine)
		if err != nil {
			return nil, err
		}
		machineID = machine.ID
	}
	all, err := s.Instances.List(ctx, req.Msg.TenantId, machineID)
	if err != nil {
		return nil, err
	}
	res := &computev1.ListInstancesResponse{}
	for _, i := range all {
		item, err := s.wireInstance(ctx, i)
		if err != nil {
			return nil, err
		}
		res.Items = append(res.Items, item)
	}
	return connect.NewResponse(res), nil
}

// Remove has an instance removed; the list shows it until it is gone.
func (s instanceService) Remove(ctx context.Context, req *connect.Request[computev1.RemoveInstanceRequest]) (*connect.Response[computev1.RemoveInstanceResponse], error) {
	m := req.Msg
	i, err := s.findInstance(ctx, m)
	if err != nil {
		return nil, err
	}
	machine, err := s.Store.Machine(ctx, m.TenantId, i.MachineID)
	if err != nil {
		return nil, err
	}
	if err := s.Instances.Remove(ctx, i); err != nil {
		return nil, err
	}
	s.audit(ctx, machine.SiteID, machine.ID, "instance.removed", map[string]string{"instance": i.ID, "name": i.Name, "runtime": i.Runtime})
	return connect.NewResponse(&computev1.RemoveInstanceResponse{}), nil
}

// findInstance takes an instance's id, or a machine and the instance's name there.
func (s instanceService) findInstance(ctx context.Context, m *computev1.RemoveInstanceRequest) (store.Instance, error) {
	// Ids hold an underscore, and names do not.
	byID := strings.Contains(m.Instance, "_")
	switch {
	case m.Instance == "":
		return store.Instance{}, apierr.Invalid("instance is missing")
	case m.Machine == "" && !byID:
		return store.Instance{}, apierr.Invalid("machine is missing: a name is an instance's on one machine")
	case m.Machine == "":
		return s.Store.Instance(ctx, m.TenantId, m.Instance)
	}
	machine, err := s.Store.Machine(ctx, m.TenantId, m.Machine)
	if err != nil {
		return store.Instance{}, err
	}
	if !byID {
		return s.Store.InstanceNamed(ctx, machine.ID, m.Instance)
	}
	i, err := s.Store.Instance(ctx, m.TenantId, m.Instance)
	if err == nil && i.MachineID != machine.ID {
		err = apierr.Missing("machine %s has no instance %s", machine.Name, m.Instance)
	}
	return i, err
}

func (s instanceService) wireInstance(ctx context.Context, i store.Instance) (*computev1.Instance, error) {
	state, message, err := s.Instances.State(ctx, i)
	if err != nil {
		return nil, err
	}
	return &computev1.Instance{
		Id: i.ID, Name: i.Name, MachineId: i.MachineID, Runtime: i.Runtime, SpecJson: i.SpecJSON,
		State: state, Message: message, Generation: i.Generation, ObservedMs: unixMS(i.Observed),
	}, nil
}
