package api

import (
	"context"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/appliance/gateway/workflow"
)

type workflowService struct{ *API }

// Start runs a profile's steps on a machine.
func (s workflowService) Start(ctx context.Context, req *connect.Request[computev1.StartWorkflowRequest]) (*connect.Response[computev1.StartWorkflowResponse], error) {
	in := req.Msg
	if in.Profile == "" {
		return nil, apierr.Invalid("profile is missing")
	}
	m, err := s.Store.Machine(ctx, in.TenantId, in.Machine)
	if err != nil {
		return nil, err
	}
	id, err := s.Workflows.StartProfile(ctx, in.Profile, m, traceparent())
	if err != nil {
		return nil, err
	}
	s.audit(ctx, m.SiteID, m.ID, "workflow.requested", map[string]string{"workflow": id, "profile": in.Profile})
	return connect.NewResponse(&computev1.StartWorkflowResponse{WorkflowId: id}), nil
}

// Cancel ends a running workflow.
func (s workflowService) Cancel(ctx context.Context, req *connect.Request[computev1.CancelWorkflowRequest]) (*connect.Response[computev1.CancelWorkflowResponse], error) {
	w, err := s.Store.Workflow(ctx, req.Msg.TenantId, req.Msg.Id)
	if err != nil {
		return nil, err
	}
	if err := s.Workflows.Cancel(ctx, req.Msg.TenantId, w.ID); err != nil {
		return nil, err
	}
	siteID := ""
	if m, err := s.Store.Machine(ctx, w.TenantID, w.MachineID); err == nil {
		siteID = m.SiteID
	}
	s.audit(ctx, siteID, w.MachineID, "workflow.cancelled", map[string]string{"workflow": w.ID})
	return connect.NewResponse(&computev1.CancelWorkflowResponse{}), nil
}

// Get tells a workflow and its steps.
func (s workflowService) Get(ctx context.Context, req *connect.Request[computev1.GetWorkflowRequest]) (*connect.Response[computev1.GetWorkflowResponse], error) {
	w, err := s.Store.Workflow(ctx, req.Msg.TenantId, req.Msg.Id)
	if err != nil {
		return nil, err
	}
	out, err := s.wireWorkflow(ctx, w, true)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.GetWorkflowResponse{Workflow: out}), nil
}

// maxWorkflows bounds a list.
const maxWorkflows = 100

// List tells the tenant's latest workflows, newest last.
func (s workflowService) List(ctx context.Context, req *connect.Request[computev1.ListWorkflowsRequest]) (*connect.Response[computev1.ListWorkflowsResponse], error) {
	workflows, err := s.Store.Workflows(ctx, req.Msg.TenantId, maxWorkflows)
	if err != nil {
		return nil, err
	}
	res := &computev1.ListWorkflowsResponse{}
	for _, w := range workflows {
		item, err := s.wireWorkflow(ctx, w, false)
		if err != nil {
			return nil, err
		}
		res.Items = append(res.Items, item)
	}
	return connect.NewResponse(res), nil
}

// wireWorkflow is a workflow as callers see it; only one at a time comes with
// its results, which may be large.
func (s workflowService) wireWorkflow(ctx context.Context, w store.Workflow, results bool) (*computev1.Workflow, error) {
	read := s.Store.WorkflowStepStates
	if results {
		read = s.Store.WorkflowSteps
	}
	steps, err := read(ctx, w.ID)
	if err != nil {
		return nil, err
	}
	out := &computev1.Workflow{Id: w.ID, Name: w.Name, MachineId: w.MachineID, State: w.State, ErrorCode: w.ErrorCode, ErrorMessage: w.ErrorMessage}
	for _, step := range steps {
		item := &computev1.Step{Id: step.ID, Name: step.Name, State: step.State, StartedMs: unixMS(step.Started), EndedMs: unixMS(step.Ended)}
		if results && step.State == store.StateDone {
			answer, err := workflow.Result(step)
			if err != nil {
				return nil, err
			}
			item.ResultJson = string(answer)
		}
		if step.State == store.StateRunning {
			item.Progress = s.Commands.Progress(workflow.CommandID(w.ID, step.ID, step.Attempt))
			if item.Progress == "" {
				item.Progress = s.Workflows.Note(w.ID)
			}
		}
		out.Steps = append(out.Steps, item)
	}
	return out, nil
}

type eventService struct{ *API }

// maxEvents bounds a list.
const maxEvents = 1000

// List tells the latest events of the tenant's sites, newest last.
func (s eventService) List(ctx context.Context, req *connect.Request[computev1.ListEventsRequest]) (*connect.Response[computev1.ListEventsResponse], error) {
	in := req.Msg
	if in.Limit > maxEvents {
		return nil, apierr.Invalid("limit %d: at most %d", in.Limit, maxEvents)
	}
	var ids []string
	if in.Site != "" {
		site, err := s.Store.Site(ctx, in.TenantId, in.Site)
		if err != nil {
			return nil, err
		}
		ids = []string{site.ID}
	} else {
		sites, err := s.Store.Sites(ctx, in.TenantId)
		if err != nil {
			return nil, err
		}
		for _, site := range sites {
			ids = append(ids, site.ID)
		}
	}
	res := &computev1.ListEventsResponse{}
	if len(ids) == 0 {
		return connect.NewResponse(res), nil // an empty filter would match every tenant's
	}
	events, err := s.Store.Events(ctx, store.EventFilter{SiteIDs: ids, Limit: int(in.Limit)})
	if err != nil {
		return nil, err
	}
	for _, e := range events {
		res.Items = append(res.Items, &computev1.EventRecord{AtMs: unixMS(e.At), SiteId: e.SiteID, AgentId: e.AgentID, Name: e.Name, Class: e.Class, BodyJson: e.BodyJSON})
	}
	return connect.NewResponse(res), nil
}
