package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"
)

// The states of a workflow, and of its steps, which start as waiting.
const (
	StateWaiting = "waiting"
	StateRunning = "running"
	StateDone    = "done"
	StateFailed  = "failed"
)

// Workflow is one run of a procedure on a machine. Params is its own JSON.
type Workflow struct {
	ID, TenantID, Name, MachineID string
	State                         string
	Params                        []byte
	ErrorCode, ErrorMessage       string
	Created, Ended                time.Time
}

// WorkflowStep is a step's row. Data is what a restart needs to take it up again.
type WorkflowStep struct {
	WorkflowID     string
	Seq            int
	ID, Name       string
	State          string
	Attempt        uint32
	Started, Ended time.Time
	Data           []byte
}

// AddWorkflow stores a running workflow with its steps and sets its machine's
// state, unless that is empty, and records the event; ErrConflict when the
// machine has a running one.
func (s *Store) AddWorkflow(ctx context.Context, w Workflow, steps []WorkflowStep, machineState string, e Event) error {
	err := s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO workflows (id, tenant_id, name, machine_id, state, params, created_ms)
			VALUES (?, ?, ?, ?, ?, ?, ?)`, w.ID, w.TenantID, w.Name, w.MachineID, w.State, w.Params, toMS(w.Created))
		if err != nil {
			return taken(err)
		}
		for _, step := range steps {
			_, err := tx.ExecContext(ctx, `INSERT INTO workflow_steps (workflow_id, seq, id, name, state) VALUES (?, ?, ?, ?, ?)`,
				w.ID, step.Seq, step.ID, step.Name, StateWaiting)
			if err != nil {
				return fmt.Errorf("step %s: %w", step.ID, err)
			}
		}
		if machineState != "" {
			_, err = tx.ExecContext(ctx, `UPDATE machines SET state = ? WHERE id = ?`, machineState, w.MachineID)
			if err != nil {
				return err
			}
		}
		return s.addEvent(ctx, tx, e)
	})
	if err != nil {
		return fmt.Errorf("add workflow %s: %w", w.ID, err)
	}
	return nil
}

// SaveStep stores all that changes in a step.
func (s *Store) SaveStep(ctx context.Context, step WorkflowStep) error {
	if err := s.write(ctx, func(tx *sql.Tx) error { return saveStep(ctx, tx, step) }); err != nil {
		return fmt.Errorf("save step %s of %s: %w", step.ID, step.WorkflowID, err)
	}
	return nil
}

func saveStep(ctx context.Context, tx *sql.Tx, step WorkflowStep) error {
	data := step.Data
	if data == nil {
		data = []byte{}
	}
	res, err := tx.ExecContext(ctx, `UPDATE workflow_steps SET state = ?, attempt = ?, started_ms = ?, ended_ms = ?, data = ?
		WHERE workflow_id = ? AND seq = ?`, step.State, step.Attempt, toMS(step.Started), toMS(step.Ended), data, step.WorkflowID, step.Seq)
	if err != nil {
		return err
	}
	if n, err := res.RowsAffected(); err != nil || n != 1 {
		return fmt.Errorf("step %s: %w", step.ID, ErrNotFound)
	}
	return nil
}

// addEvent is AddEvent as a part of a larger change.
func (s *Store) addEvent(ctx context.Context, tx *sql.Tx, e Event) error {
	now := s.nowMs()
	_, err := tx.ExecContext(ctx, `INSERT INTO events (received_ms, at_ms, site_id, machine_id, agent_id, name, class, key, body_json) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)`,
		now, now, e.SiteID, e.MachineID, e.AgentID, e.Name, e.Class, e.Key, e.BodyJSON)
	return err
}

// EndWorkflow stores a workflow's end, its machine's state, unless that is empty, and
// the event. A failed one also ends its running step as failed, and gives the machine
// back to its own disk in the site's next snapshot where it boots by window, which is
// the workflow's; empty: it has none.
func (s *Store) EndWorkflow(ctx context.Context, w Workflow, machineState, window string, e Event) error {
	err := s.write(ctx, func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, `UPDATE workflows SET state = ?, error_code = ?, error_message = ?, ended_ms = ? WHERE id = ? AND state = ?`,
			w.State, w.ErrorCode, w.ErrorMessage, toMS(w.Ended), w.ID, StateRunning)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return errors.Join(err, ErrConflict)
		}
		if w.State == StateFailed {
			_, err = tx.ExecContext(ctx, `UPDATE workflow_steps SET state = ?, ended_ms = ? WHERE workflow_id = ? AND state = ?`,
				StateFailed, toMS(w.Ended), w.ID, StateRunning)
			if err != nil {
				return err
			}
		}
		if w.State == StateFailed && window != "" {
			_, err = tx.ExecContext(ctx, `UPDATE machines SET action = 'local-disk', purpose = '', window_id = '', window_until_ms = 0,
				artifacts = '[]', boot = '' WHERE id = ? AND window_id = ?`, w.MachineID, window)
			if err != nil {
				return err
			}
		}
		if machineState != "" {
			_, err = tx.ExecContext(ctx, `UPDATE machines SET state = ? WHERE id = ?`, machineState, w.MachineID)
			if err != nil {
				return err
			}
		}
		return s.addEvent(ctx, tx, e)
	})
	if err != nil {
		return fmt.Errorf("end workflow %s: %w", w.ID, err)
	}
	return nil
}

// SetWorkflowParams replaces the parameters of a running workflow; ErrNotFound
// where it does not run.
func (s *Store) SetWorkflowParams(ctx context.Context, id string, params []byte) error {
	res, err := s.w.ExecContext(ctx, `UPDATE workflows SET params = ? WHERE id = ? AND state = ?`, params, id, StateRunning)
	if err != nil {
		return fmt.Errorf("set parameters of workflow %s: %w", id, err)
	}
	if n, err := res.RowsAffected(); err != nil || n != 1 {
		return fmt.Errorf("set parameters of workflow %s: %w", id, ErrNotFound)
	}
	return nil
}

const workflowSelect = `SELECT id, tenant_id, name, machine_id, state, params, error_code, error_message, created_ms, ended_ms FROM workflows `

func scanWorkflow(row scanner) (Workflow, error) {
	var w Workflow
	var created, ended int64
	err := row.Scan(&w.ID, &w.TenantID, &w.Name, &w.MachineID, &w.State, &w.Params, &w.ErrorCode, &w.ErrorMessage, &created, &ended)
	w.Created, w.Ended = fromMS(created), fromMS(ended)
	return w, err
}

// Workflow finds a tenant's workflow.
func (s *Store) Workflow(ctx context.Context, tenantID, id string) (Workflow, error) {
	w, err := scanWorkflow(s.r.QueryRowContext(ctx, workflowSelect+`WHERE tenant_id = ? AND id = ?`, tenantID, id))
	if err != nil {
		return Workflow{}, fmt.Errorf("workflow %q: %w", id, one(err))
	}
	return w, nil
}

// Workflows lists a tenant's latest workflows, newest last, at most limit.
func (s *Store) Workflows(ctx context.Context, tenantID string, limit int) ([]Workflow, error) {
	workflows, err := list(ctx, s.r, scanWorkflow, `SELECT * FROM (`+workflowSelect+`WHERE tenant_id = ?
		ORDER BY created_ms DESC, id DESC LIMIT ?) ORDER BY created_ms, id`, tenantID, limit)
	if err != nil {
		return nil, fmt.Errorf("list workflows: %w", err)
	}
	return workflows, nil
}

// RunningWorkflows lists every tenant's unfinished workflows, oldest first.
func (s *Store) RunningWorkflows(ctx context.Context) ([]Workflow, error) {
	workflows, err := list(ctx, s.r, scanWorkflow, workflowSelect+`WHERE state = 'running' ORDER BY created_ms, id`)
	if err != nil {
		return nil, fmt.Errorf("list running workflows: %w", err)
	}
	return workflows, nil
}

const stepSelect = `SELECT workflow_id, seq, id, name, state, attempt, started_ms, ended_ms, %s FROM workflow_steps WHERE workflow_id = ? ORDER BY seq`

// WorkflowSteps lists a workflow's steps in order.
func (s *Store) WorkflowSteps(ctx context.Context, workflowID string) ([]WorkflowStep, error) {
	return s.steps(ctx, workflowID, "data")
}

// WorkflowStepStates is WorkflowSteps without their data, which may be large.
func (s *Store) WorkflowStepStates(ctx context.Context, workflowID string) ([]WorkflowStep, error) {
	return s.steps(ctx, workflowID, "x''")
}

func (s *Store) steps(ctx context.Context, workflowID, data string) ([]WorkflowStep, error) {
	steps, err := list(ctx, s.r, func(row scanner) (WorkflowStep, error) {
		var step WorkflowStep
		var started, ended int64
		err := row.Scan(&step.WorkflowID, &step.Seq, &step.ID, &step.Name, &step.State, &step.Attempt, &started, &ended, &step.Data)
		step.Started, step.Ended = fromMS(started), fromMS(ended)
		return step, err
	}, fmt.Sprintf(stepSelect, data), workflowID)
	if err != nil {
		return nil, fmt.Errorf("steps of workflow %s: %w", workflowID, err)
	}
	return steps, nil
}
