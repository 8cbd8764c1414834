package api

import (
	"testing"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/api/computev1/computev1connect"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

func TestWorkflowStartAndCancel(t *testing.T) {
	r := newRig(t)
	r.fixture()
	ctx := t.Context()
	r.token("reader", "acme", r.now.AddDate(1, 0, 0), "compute:workflows:read", "compute:metal:write")
	r.token("starter", "acme", r.now.AddDate(1, 0, 0), "compute:workflows:write")
	_, err := call(ctx, r.metal("admin").Enroll, enrollment(func(*computev1.EnrollMachineRequest) {}))
	must(t, err)
	as := func(token string) computev1connect.WorkflowServiceClient {
		return computev1connect.NewWorkflowServiceClient(r.as(token), r.server.URL)
	}
	start := &computev1.StartWorkflowRequest{TenantId: "acme", Profile: "look", Machine: "m1"}
	_, err = call(ctx, as("reader").Start, start)
	wantError(t, "start without the permission", err, connect.CodePermissionDenied, "PERMISSION_DENIED: the token lacks compute:workflows:write")
	_, err = call(ctx, as("admin").Start, &computev1.StartWorkflowRequest{TenantId: "acme", Machine: "m1"})
	wantError(t, "no profile", err, connect.CodeInvalidArgument, "INVALID_INPUT: profile is missing")
	_, err = call(ctx, as("admin").Start, &computev1.StartWorkflowRequest{TenantId: "acme", Profile: "none", Machine: "m1"})
	wantError(t, "an unknown profile", err, connect.CodeInvalidArgument, `INVALID_INPUT: profile "none": there is no such profile; there are: look`)
	_, err = call(ctx, as("admin").Start, &computev1.StartWorkflowRequest{TenantId: "acme", Profile: "look", Machine: "none"})
	wantError(t, "an unknown machine", err, connect.CodeNotFound, "NOT_FOUND: ")
	_, err = call(ctx, as("admin").Start, &computev1.StartWorkflowRequest{TenantId: "other", Profile: "look", Machine: "m1"})
	wantError(t, "another tenant's machine", err, connect.CodeNotFound, "NOT_FOUND: ")

	res, err := call(ctx, as("starter").Start, start)
	must(t, err)
	_, err = call(ctx, as("starter").Start, start)
	wantError(t, "a second workflow", err, connect.CodeFailedPrecondition, "INVALID_INPUT: workflow-running")

	// What a done step answered is told of one workflow, not in lists.
	steps, err := r.store.WorkflowSteps(ctx, res.WorkflowId)
	must(t, err)
	steps[0].State, steps[0].Data = store.StateDone, []byte(`{"result":{"power":"on"}}`)
	must(t, r.store.SaveStep(ctx, steps[0]))
	got, err := call(ctx, as("reader").Get, &computev1.GetWorkflowRequest{TenantId: "acme", Id: res.WorkflowId})
	must(t, err)
	if s := got.Workflow.Steps[0]; s.Id != "main.0" || s.Name != "power.getPower" || s.ResultJson != `{"power":"on"}` {
		t.Errorf("step = %v, want the answer", s)
	}
	list, err := call(ctx, as("reader").List, &computev1.ListWorkflowsRequest{TenantId: "acme"})
	must(t, err)
	if len(list.Items) != 1 || list.Items[0].Steps[0].ResultJson != "" {
		t.Errorf("List = %v, want no answers", list)
	}

	cancel := &computev1.CancelWorkflowRequest{TenantId: "acme", Id: res.WorkflowId}
	_, err = call(ctx, as("reader").Cancel, cancel)
	wantError(t, "cancel without the permission", err, connect.CodePermissionDenied, "PERMISSION_DENIED: ")
	_, err = call(ctx, as("admin").Cancel, &computev1.CancelWorkflowRequest{TenantId: "other", Id: res.WorkflowId})
	wantError(t, "cancel of another tenant's", err, connect.CodeNotFound, "NOT_FOUND: ")
	_, err = call(ctx, as("starter").Cancel, cancel)
	must(t, err)
	events, err := r.store.Events(ctx, store.EventFilter{SiteIDs: []string{"site_1"}, Name: "workflow.cancelled"})
	if err != nil || len(events) != 1 {
		t.Errorf("events of the cancel = %v, %v, want one", events, err)
	}
	must(t, r.store.EndWorkflow(ctx, store.Workflow{ID: res.WorkflowId, MachineID: "m1", State: store.StateFailed}, "", "", store.Event{}))
	_, err = call(ctx, as("starter").Cancel, cancel)
	wantError(t, "cancel of an ended one", err, connect.CodeFailedPrecondition, "INVALID_INPUT: workflow-ended")
}
