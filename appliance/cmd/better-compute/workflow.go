package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
)

func runWorkflow(ctx context.Context, args []string, std stdio) error {
	return dispatch(ctx, "better-compute workflow", []command{
		{"start", "run a profile's steps on a machine", workflowStart},
		{"cancel", "end a running workflow", workflowCancel},
		{"list", "list the latest workflows", workflowList},
		{"show", "show a workflow's steps", workflowShow},
		{"watch", "follow a workflow to its end", workflowWatch},
	}, args, std)
}

func workflowStart(ctx context.Context, args []string, std stdio) error {
	f := newCall("workflow start PROFILE MACHINE [--watch]", std)
	f.about = "Runs a procedure, one of the [profiles] of gateway.toml, on a machine, and prints the workflow's id."
	watch := f.Bool("watch", false, "follow the workflow to its end")
	rest, c, err := f.begin(args, 2, 2)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.workflows().Start, &computev1.StartWorkflowRequest{TenantId: c.tenant, Profile: rest[0], Machine: rest[1]})
	if err != nil {
		return err
	}
	if f.json {
		err = printJSON(std.out, res)
	} else {
		_, err = fmt.Fprintln(std.out, res.WorkflowId)
	}
	if err != nil || !*watch {
		return err
	}
	return follow(ctx, c, std, res.WorkflowId)
}

func workflowCancel(ctx context.Context, args []string, std stdio) error {
	f := newCall("workflow cancel ID", std)
	f.about = "The workflow fails with the code cancelled. Its command is stopped where it can be; what was done stays done."
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	_, err = call(ctx, c.workflows().Cancel, &computev1.CancelWorkflowRequest{TenantId: c.tenant, Id: rest[0]})
	return err
}

func workflowList(ctx context.Context, args []string, std stdio) error {
	f := newCall("workflow list", std)
	_, c, err := f.begin(args, 0, 0)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.workflows().List, &computev1.ListWorkflowsRequest{TenantId: c.tenant})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	var rows [][]string
	for _, w := range res.Items {
		at := ""
		for _, s := range w.Steps {
			if s.State == "running" || s.State == "failed" {
				at = s.Id + " " + s.Name
			}
		}
		rows = append(rows, []string{w.Id, w.Name, w.MachineId, w.State, at, w.ErrorCode})
	}
	return printTable(std.out, "ID NAME MACHINE STATE STEP ERROR", rows)
}

func workflowShow(ctx context.Context, args []string, std stdio) error {
	f := newCall("workflow show ID", std)
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	return showWorkflow(ctx, c, std, rest[0], f.json)
}

func showWorkflow(ctx context.Context, c *client, std stdio, id string, json bool) error {
	res, err := call(ctx, c.workflows().Get, &computev1.GetWorkflowRequest{TenantId: c.tenant, Id: id})
	if err != nil {
		return err
	}
	if json {
		return printJSON(std.out, res)
	}
	w := res.Workflow
	fmt.Fprintf(std.out, "%s %s of %s: %s\n", w.GetName(), w.GetId(), w.GetMachineId(), w.GetState())
	if w.GetErrorCode() != "" {
		fmt.Fprintf(std.out, "%s: %s\n", w.GetErrorCode(), clean(w.GetErrorMessage()))
	}
	var rows [][]string
	for _, s := range w.GetSteps() {
		seconds := ""
		if s.EndedMs != 0 {
			seconds = fmt.Sprintf("%.1f", float64(s.EndedMs-s.StartedMs)/1000)
		}
		rows = append(rows, []string{s.Id, s.Name, s.State, clock(s.StartedMs), seconds, said(s)})
	}
	return printTable(std.out, "STEP NAME STATE STARTED SECONDS SAYS", rows)
}

// maxSaid is what a table shows of an answer; --json has all of it.
const maxSaid = 200

// said is what a step says of itself: its progress, or what it answered.
func said(s *computev1.Step) string {
	if s.ResultJson == "" {
		return s.Progress
	}
	text := clean(s.ResultJson)
	if len(text) > maxSaid {
		text = strings.ToValidUTF8(text[:maxSaid], "") + "…"
	}
	return text
}

func workflowWatch(ctx context.Context, args []string, std stdio) error {
	f := newCall("workflow watch ID", std)
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	return follow(ctx, c, std, rest[0])
}

const (
	followEvery  = 500 * time.Millisecond
	progressGap  = 2 * time.Second
	gatewayGrace = 2 * time.Minute // a workflow outlives a gateway's restart, so its watcher does too
)

// follow prints each step as it begins, moves and ends, and fails when the
// workflow does.
func follow(ctx context.Context, c *client, std stdio, id string) error {
	states := map[string]string{}
	progress, progressAt := "", time.Time{}
	var lost time.Time
	// Whoever stops to look on does not stop the workflow.
	stopped := fmt.Errorf("stopped watching; the workflow goes on: better-compute workflow watch %s", id)
	for {
		res, err := call(ctx, c.workflows().Get, &computev1.GetWorkflowRequest{TenantId: c.tenant, Id: id})
		switch {
		case err != nil && ctx.Err() != nil:
			return stopped
		case err != nil && connect.CodeOf(err) == connect.CodeUnavailable && (lost.IsZero() || time.Since(lost) < gatewayGrace):
			if lost.IsZero() {
				lost = time.Now()
				fmt.Fprintf(std.err, "the gateway does not answer; the workflow goes on when it is back\n")
			}
		case err != nil:
			return err
		default:
			lost = time.Time{}
			w := res.Workflow
			for _, s := range w.GetSteps() {
				if states[s.Id] != s.State && s.State != "waiting" {
					states[s.Id] = s.State
					seconds := ""
					if s.EndedMs != 0 {
						seconds = fmt.Sprintf("  %.1f s", float64(s.EndedMs-s.StartedMs)/1000)
					}
					fmt.Fprintf(std.out, "%s  %-8s %-22s %s%s\n", time.Now().UTC().Format("15:04:05"), s.Id, s.Name, s.State, seconds)
				}
				if s.State == "running" && s.Progress != "" && s.Progress != progress && time.Since(progressAt) >= progressGap {
					progress, progressAt = s.Progress, time.Now()
					fmt.Fprintf(std.out, "%s  %-8s %-22s %s\n", time.Now().UTC().Format("15:04:05"), s.Id, s.Name, clean(progress))
				}
			}
			switch w.GetState() {
			case "done":
				return nil
			case "failed":
				return errors.New("workflow " + id + " failed: " + w.GetErrorCode() + ": " + clean(w.GetErrorMessage()))
			}
		}
		select {
		case <-ctx.Done():
			return stopped
		case <-time.After(followEvery):
		}
	}
}
