package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
)

// Instance is one thing that a machine is to run, and what is known of it.
type Instance struct {
	ID, TenantID, MachineID, Name string
	// Runtime is a driver's id; SpecJSON is its own.
	Runtime, SpecJSON string
	Generation        uint64
	// Removing says that it is to go, at Generation.
	Removing bool
	Created  time.Time

	// TakenGeneration is what the node took last, and TakenBy the life of the
	// agent that did: its id and incarnation.
	TakenGeneration uint64
	TakenBy         string
	// Attempt counts the commands for this generation that failed.
	Attempt uint32

	State, Message     string
	ObservedGeneration uint64
	Observed           time.Time // zero: nothing was heard
}

// ErrFull says that there is room for no more.
var ErrFull = errors.New("full")

const instanceColumns = `id, tenant_id, machine_id, name, runtime, spec_json, generation, removing, created_ms,
	taken_generation, taken_by, attempt, state, message, observed_generation, observed_ms`

func scanInstance(row scanner) (Instance, error) {
	var i Instance
	var created, observed int64
	err := row.Scan(&i.ID, &i.TenantID, &i.MachineID, &i.Name, &i.Runtime, &i.SpecJSON, &i.Generation, &i.Removing, &created,
		&i.TakenGeneration, &i.TakenBy, &i.Attempt, &i.State, &i.Message, &i.ObservedGeneration, &observed)
	i.Created, i.Observed = fromMS(created), fromMS(observed)
	return i, one(err)
}

// PutInstance stores what a machine is to run under i's name. One that is there
// keeps its id; its generation rises when something changed, and it is wanted
// again if it was being removed. A machine takes at most limit: ErrFull.
func (s *Store) PutInstance(ctx context.Context, i Instance, limit int) (stored Instance, changed bool, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		have, err := scanInstance(tx.QueryRowContext(ctx, `SELECT `+instanceColumns+` FROM instances WHERE machine_id = ? AND name = ?`, i.MachineID, i.Name))
		switch {
		case errors.Is(err, ErrNotFound):
			var n int
			if err := tx.QueryRowContext(ctx, `SELECT count(*) FROM instances WHERE machine_id = ?`, i.MachineID).Scan(&n); err != nil {
				return err
			}
			if n >= limit {
				return ErrFull
			}
			i.Generation, i.State, changed = 1, "pending", true
			stored = i
			_, err = tx.ExecContext(ctx, `INSERT INTO instances (id, tenant_id, machine_id, name, runtime, spec_json, generation, removing, created_ms)
				VALUES (?, ?, ?, ?, ?, ?, 1, 0, ?)`, i.ID, i.TenantID, i.MachineID, i.Name, i.Runtime, i.SpecJSON, toMS(i.Created))
			return taken(err)
		case err != nil:
			return err
		case !have.Removing && have.Runtime == i.Runtime && have.SpecJSON == i.SpecJSON:
			stored = have
			return nil
		}
		stored, err = scanInstance(tx.QueryRowContext(ctx, `UPDATE instances SET runtime = ?, spec_json = ?, generation = generation + 1, removing = 0, attempt = 0,
			state = 'pending', message = '' WHERE id = ? RETURNING `+instanceColumns, i.Runtime, i.SpecJSON, have.ID))
		changed = true
		return err
	})
	if err != nil {
		return Instance{}, false, fmt.Errorf("put instance %s: %w", i.Name, err)
	}
	return stored, changed, nil
}

// RemoveInstance has an instance removed: the row goes once the node says that
// it is gone. Asking again changes nothing.
func (s *Store) RemoveInstance(ctx context.Context, id string) (Instance, error) {
	var i Instance
	err := s.write(ctx, func(tx *sql.Tx) (err error) {
		_, err = tx.ExecContext(ctx, `UPDATE instances SET generation = generation + 1, removing = 1, attempt = 0, state = 'removing', message = ''
			WHERE id = ? AND removing = 0`, id)
		if err == nil {
			i, err = scanInstance(tx.QueryRowContext(ctx, `SELECT `+instanceColumns+` FROM instances WHERE id = ?`, id))
		}
		return err
	})
	if err != nil {
		return Instance{}, fmt.Errorf("remove instance %s: %w", id, err)
	}
	return i, nil
}

// Instance finds a tenant's instance by id.
func (s *Store) Instance(ctx context.Context, tenantID, id string) (Instance, error) {
	i, err := scanInstance(s.r.QueryRowContext(ctx, `SELECT `+instanceColumns+` FROM instances WHERE tenant_id = ? AND id = ?`, tenantID, id))
	if err != nil {
		return Instance{}, fmt.Errorf("instance %q: %w", id, err)
	}
	return i, nil
}

// InstanceOn finds a machine's instance by id.
func (s *Store) InstanceOn(ctx context.Context, machineID, id string) (Instance, error) {
	i, err := scanInstance(s.r.QueryRowContext(ctx, `SELECT `+instanceColumns+` FROM instances WHERE machine_id = ? AND id = ?`, machineID, id))
	if err != nil {
		return Instance{}, fmt.Errorf("instance %q: %w", id, err)
	}
	return i, nil
}

// InstanceNamed finds a machine's instance by name.
func (s *Store) InstanceNamed(ctx context.Context, machineID, name string) (Instance, error) {
	i, err := scanInstance(s.r.QueryRowContext(ctx, `SELECT `+instanceColumns+` FROM instances WHERE machine_id = ? AND name = ?`, machineID, name))
	if err != nil {
		return Instance{}, fmt.Errorf("instance %q: %w", name, err)
	}
	return i, nil
}

// InstanceFilter narrows a list; empty fields match everything.
type InstanceFilter struct{ TenantID, MachineID string }

// Instances lists instances by machine and name.
func (s *Store) Instances(ctx context.Context, f InstanceFilter) ([]Instance, error) {
	all, err := list(ctx, s.r, scanInstance, `SELECT `+instanceColumns+` FROM instances
		WHERE (?1 = '' OR tenant_id = ?1) AND (?2 = '' OR machine_id = ?2) ORDER BY machine_id, name`, f.TenantID, f.MachineID)
	if err != nil {
		return nil, fmt.Errorf("list instances: %w", err)
	}
	return all, nil
}

// PendingInstance is an instance that its machine's agent has not taken yet.
type PendingInstance struct {
	Instance
	// AgentID stands for the machine, and Life names it and its incarnation.
	AgentID, Life string
}

// PendingInstances lists what the machines' present agents have not taken.
func (s *Store) PendingInstances(ctx context.Context) ([]PendingInstance, error) {
	scan := func(row scanner) (PendingInstance, error) {
		var p PendingInstance
		i, err := scanInstance(also{row, []any{&p.AgentID, &p.Life}})
		p.Instance = i
		return p, err
	}
	all, err := list(ctx, s.r, scan, `SELECT `+instanceColumns+`, agent, life FROM instances JOIN
		(SELECT a.id AS agent, a.machine_id AS stands_for, a.id || '/' || a.journal_epoch AS life FROM agents a
			WHERE a.role = ? AND a.state = ? AND a.machine_id != '' AND a.journal_epoch != ''
			AND NOT EXISTS (SELECT 1 FROM agents b WHERE b.machine_id = a.machine_id AND b.role = a.role AND b.state = a.state AND (b.enrolled_ms, b.id) > (a.enrolled_ms, a.id)))
		ON stands_for = machine_id WHERE taken_generation != generation OR taken_by != life ORDER BY machine_id, name`,
		int32(agentv1.Role_ROLE_NODE), string(AgentActive))
	if err != nil {
		return nil, fmt.Errorf("list instances to send: %w", err)
	}
	return all, nil
}

// also scans more columns behind those that a scan function knows.
type also struct {
	scanner
	more []any
}

func (a also) Scan(dest ...any) error { return a.scanner.Scan(append(dest, a.more...)...) }

// RaiseInstance makes an instance newer than a generation that its machine
// knows: a gateway that was restored from a copy would else be refused for ever.
func (s *Store) RaiseInstance(ctx context.Context, machineID, id string, above uint64) error {
	_, err := s.w.ExecContext(ctx, `UPDATE instances SET generation = ?3 + 1, attempt = 0 WHERE id = ?1 AND machine_id = ?2 AND generation < ?3`, id, machineID, above)
	if err != nil {
		return fmt.Errorf("raise instance %s: %w", id, err)
	}
	return nil
}

// Observation is what a node said of an instance.
type Observation struct {
	State, Message string
	Generation     uint64
}

// InstanceTaken records that a life of an agent took a generation, and what it
// said. Another generation than the one that is wanted changes nothing.
func (s *Store) InstanceTaken(ctx context.Context, id string, generation uint64, by string, o Observation) error {
	_, err := s.w.ExecContext(ctx, `UPDATE instances SET taken_generation = ?2, taken_by = ?3, attempt = 0, state = ?4, message = ?5, observed_generation = ?6, observed_ms = ?7
		WHERE id = ?1 AND generation = ?2`, id, generation, by, o.State, o.Message, o.Generation, s.nowMs())
	if err != nil {
		return fmt.Errorf("record instance %s as taken: %w", id, err)
	}
	return nil
}

// InstanceRefused records that a command for a generation failed.
func (s *Store) InstanceRefused(ctx context.Context, id string, generation uint64, attempt uint32, state, message string) error {
	_, err := s.w.ExecContext(ctx, `UPDATE instances SET attempt = ?3 + 1, state = ?4, message = ?5, observed_ms = ?6
		WHERE id = ?1 AND generation = ?2 AND attempt = ?3`, id, generation, attempt, state, message, s.nowMs())
	if err != nil {
		return fmt.Errorf("record refusal of instance %s: %w", id, err)
	}
	return nil
}

// ObserveInstance records a state that a machine told. One of an older
// generation, or of another machine, changes nothing.
func (s *Store) ObserveInstance(ctx context.Context, machineID, id string, o Observation) error {
	_, err := s.w.ExecContext(ctx, `UPDATE instances SET state = CASE removing WHEN 1 THEN 'removing' ELSE ?4 END, message = ?5, observed_generation = ?3, observed_ms = ?6
		WHERE id = ?1 AND machine_id = ?2 AND generation = ?3`, id, machineID, o.Generation, o.State, o.Message, s.nowMs())
	if err != nil {
		return fmt.Errorf("record state of instance %s: %w", id, err)
	}
	return nil
}

// ForgetTaken makes an instance be sent again: the machine lost what it took.
func (s *Store) ForgetTaken(ctx context.Context, machineID, id string) error {
	_, err := s.w.ExecContext(ctx, `UPDATE instances SET taken_by = '', attempt = attempt + 1 WHERE id = ? AND machine_id = ?`, id, machineID)
	if err != nil {
		return fmt.Errorf("send instance %s again: %w", id, err)
	}
	return nil
}

// InstanceGone deletes an instance whose removal, at most of that generation,
// its machine reports as done.
func (s *Store) InstanceGone(ctx context.Context, machineID, id string, generation uint64) (gone bool, err error) {
	res, err := s.w.ExecContext(ctx, `DELETE FROM instances WHERE id = ? AND machine_id = ? AND removing = 1 AND generation <= ?`, id, machineID, generation)
	if err != nil {
		return false, fmt.Errorf("forget instance %s: %w", id, err)
	}
	n, err := res.RowsAffected()
	return n > 0, err
}
