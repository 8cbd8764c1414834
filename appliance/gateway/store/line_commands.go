package store

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// CommandState is how far a command came.
type CommandState string

// A command moves forward only.
const (
	CommandQueued   CommandState = "queued"   // signed and kept, never handed to a stream
	CommandSent     CommandState = "sent"     // handed to a stream: the agent may have it
	CommandReceived CommandState = "received" // in the agent's journal
	CommandDone     CommandState = "done"     // has its one outcome
)

// Command is a signed command and what became of it.
type Command struct {
	Seq          int64
	ID           string
	SpecHash     []byte
	AgentID      string
	TargetNodeID string
	Kind, Lane   string
	WorkflowID   string
	StepID       string
	Attempt      uint32
	SecretRefs   []string
	Incarnation  string
	Issued       time.Time
	NotAfter     time.Time
	Signed       *agentv1.SignedCommand
	// GrantID and GrantTargets are what AddCommand counts as used; nobody reads
	// them back.
	GrantID      string
	GrantTargets []string

	State  CommandState
	Cancel bool
	Result []byte
	Err    *errs.Error // nil: Result is the outcome, once State is done
	Ended  time.Time
}

const commandColumns = `seq, id, spec_hash, agent_id, target_node_id, kind, lane, workflow_id, step_id, attempt, secret_refs, incarnation, issued_ms, not_after_ms,
	payload, key_id, signature, state, cancel, result, error_code, error_message, error_retryable, ended_ms`

func scanCommand(row scanner) (Command, error) {
	c := Command{Signed: &agentv1.SignedCommand{}}
	var refs, code, message string
	var retryable bool
	var issued, notAfter, ended int64
	err := row.Scan(&c.Seq, &c.ID, &c.SpecHash, &c.AgentID, &c.TargetNodeID, &c.Kind, &c.Lane, &c.WorkflowID, &c.StepID, &c.Attempt, &refs, &c.Incarnation, &issued, &notAfter,
		&c.Signed.Payload, &c.Signed.KeyId, &c.Signed.Signature, &c.State, &c.Cancel, &c.Result, &code, &message, &retryable, &ended)
	if err != nil {
		return Command{}, one(err)
	}
	if err := json.Unmarshal([]byte(refs), &c.SecretRefs); err != nil {
		return Command{}, fmt.Errorf("command %s: %w", c.ID, err)
	}
	c.Issued, c.NotAfter = time.UnixMilli(issued), time.UnixMilli(notAfter)
	if ended != 0 {
		c.Ended = time.UnixMilli(ended)
	}
	if code != "" {
		c.Err = &errs.Error{Code: errs.Code(code), Message: message, Retryable: retryable}
	}
	return c, nil
}

// AddCommand keeps a signed command. A command with this id that asked for the
// same is no error (added is false); one that asked for something else is ErrConflict.
func (s *Store) AddCommand(ctx context.Context, c Command) (added bool, err error) {
	refs, err := json.Marshal(c.SecretRefs)
	if err != nil {
		return false, err
	}
	err = s.write(ctx, func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, `INSERT INTO commands (id, spec_hash, agent_id, target_node_id, kind, lane, workflow_id, step_id, attempt, secret_refs, incarnation, issued_ms, not_after_ms, payload, key_id, signature, state)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING`,
			c.ID, c.SpecHash, c.AgentID, c.TargetNodeID, c.Kind, c.Lane, c.WorkflowID, c.StepID, c.Attempt, string(refs), c.Incarnation, c.Issued.UnixMilli(), c.NotAfter.UnixMilli(),
			c.Signed.Payload, c.Signed.KeyId, c.Signed.Signature, string(CommandQueued))
		if err != nil {
			return err
		}
		n, err := res.RowsAffected()
		if err != nil {
			return err
		}
		if n == 1 {
			added = true
			for _, target := range c.GrantTargets {
				if _, err := tx.ExecContext(ctx, `INSERT INTO grant_uses (command_id, grant_id, target) VALUES (?, ?, ?)`, c.ID, c.GrantID, target); err != nil {
					return err
				}
			}
			return nil
		}
		var have []byte
		if err := tx.QueryRowContext(ctx, `SELECT spec_hash FROM commands WHERE id = ?`, c.ID).Scan(&have); err != nil {
			return err
		}
		if !bytes.Equal(have, c.SpecHash) {
			return ErrConflict
		}
		return nil
	})
	return added, err
}

// Command reads one, ErrNotFound where there is none.
func (s *Store) Command(ctx context.Context, id string) (Command, error) {
	return scanCommand(s.r.QueryRowContext(ctx, `SELECT `+commandColumns+` FROM commands WHERE id = ?`, id))
}

// OpenCommands lists an agent's commands without an outcome, in the order in which they came.
func (s *Store) OpenCommands(ctx context.Context, agentID string) ([]Command, error) {
	return list(ctx, s.r, scanCommand, `SELECT `+commandColumns+` FROM commands WHERE agent_id = ? AND state <> 'done' ORDER BY seq`, agentID)
}

// deadline is when a command without an outcome gets one from the gateway:
// one that was never handed out at its not_after, any other after ?1 more.
const deadline = `(not_after_ms + CASE state WHEN 'queued' THEN 0 ELSE ?1 END)`

// DueCommands lists commands of all agents whose deadline is over at t: the
// not_after of queued ones, grace later for the rest.
func (s *Store) DueCommands(ctx context.Context, t time.Time, grace time.Duration) ([]Command, error) {
	return list(ctx, s.r, scanCommand, `SELECT `+commandColumns+` FROM commands WHERE state <> 'done' AND not_after_ms <= ?2 AND `+deadline+` <= ?2 ORDER BY seq`, grace.Milliseconds(), t.UnixMilli())
}

// NextDeadline is when the next command becomes due, ErrNotFound where none is open.
func (s *Store) NextDeadline(ctx context.Context, grace time.Duration) (time.Time, error) {
	var ms sql.NullInt64
	err := s.r.QueryRowContext(ctx, `SELECT min`+deadline+` FROM commands WHERE state <> 'done'`, grace.Milliseconds()).Scan(&ms)
	if err == nil && !ms.Valid {
		err = ErrNotFound
	}
	return time.UnixMilli(ms.Int64), one(err)
}

// Resign replaces the signature of a command that was never handed to a
// stream; ErrConflict where it was.
func (s *Store) Resign(ctx context.Context, id, incarnation string, signed *agentv1.SignedCommand) error {
	return s.change(ctx, `UPDATE commands SET incarnation = ?, payload = ?, key_id = ?, signature = ? WHERE id = ? AND state = 'queued'`,
		incarnation, signed.Payload, signed.KeyId, signed.Signature, id)
}

// CommandMoved moves an open command of the agent on to sent or received; it
// never moves one back. ErrConflict where there is no such open command.
func (s *Store) CommandMoved(ctx context.Context, agentID, id string, state CommandState) error {
	from := `('queued', 'sent')`
	if state == CommandReceived {
		from = `('queued', 'sent', 'received')`
	}
	return s.change(ctx, `UPDATE commands SET state = ? WHERE id = ? AND agent_id = ? AND state IN `+from, string(state), id, agentID)
}

// CancelCommand marks an open command; ErrConflict where it has its outcome.
func (s *Store) CancelCommand(ctx context.Context, id string) error {
	return s.change(ctx, `UPDATE commands SET cancel = 1 WHERE id = ? AND state <> 'done'`, id)
}

// FinishCommand gives an open command of the agent its outcome; ErrConflict
// where it has one, which stays.
func (s *Store) FinishCommand(ctx context.Context, agentID, id string, result []byte, e *errs.Error) error {
	if e == nil {
		e = &errs.Error{}
	}
	return s.change(ctx, `UPDATE commands SET state = 'done', result = ?, error_code = ?, error_message = ?, error_retryable = ?, ended_ms = ? WHERE id = ? AND agent_id = ? AND state <> 'done'`,
		result, string(e.Code), e.Message, e.Retryable, s.nowMs(), id, agentID)
}

// FinishQueued is FinishCommand for one that was never handed to a stream.
func (s *Store) FinishQueued(ctx context.Context, id string, e *errs.Error) error {
	return s.change(ctx, `UPDATE commands SET state = 'done', error_code = ?, error_message = ?, error_retryable = ?, ended_ms = ? WHERE id = ? AND state = 'queued'`,
		string(e.Code), e.Message, e.Retryable, s.nowMs(), id)
}

// PruneCommands removes commands that had their outcome before t.
func (s *Store) PruneCommands(ctx context.Context, t time.Time) (removed int64, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, `DELETE FROM commands WHERE state = 'done' AND ended_ms < ?`, t.UnixMilli())
		if err != nil {
			return err
		}
		removed, err = res.RowsAffected()
		return err
	})
	return removed, err
}

// change runs one UPDATE that must touch a row.
func (s *Store) change(ctx context.Context, query string, args ...any) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, query, args...)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return errOr(err, ErrConflict)
		}
		return nil
	})
}
