package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/plugins/driver/binding"
)

// boundDriver is a binding as a row keeps it: rows are read without the rules
// for new ones, so that a rule that grows stricter hides no machine.
type boundDriver struct {
	Driver string          `json:"driver"`
	Config json.RawMessage `json:"config,omitempty"`
}

func encodeBindings(bindings map[string]binding.Binding) (string, error) {
	rows := map[string]boundDriver{}
	for kind, b := range bindings {
		rows[kind] = boundDriver(b)
	}
	data, err := json.Marshal(rows)
	return string(data), err
}

func decodeBindings(data string) (map[string]binding.Binding, error) {
	var rows map[string]boundDriver
	if err := json.Unmarshal([]byte(data), &rows); err != nil {
		return nil, fmt.Errorf("read bindings: %w", err)
	}
	bindings := map[string]binding.Binding{}
	for kind, b := range rows {
		bindings[kind] = binding.Binding(b)
	}
	return bindings, nil
}

// MachineByID finds a machine of any tenant.
func (s *Store) MachineByID(ctx context.Context, id string) (Machine, error) {
	m, err := scanMachine(s.r.QueryRowContext(ctx, machineSelect+`WHERE id = ?`, id))
	if err != nil {
		return Machine{}, fmt.Errorf("machine %q: %w", id, one(err))
	}
	return m, nil
}

// setLabels replaces an agent's labels.
func setLabels(ctx context.Context, tx *sql.Tx, agentID string, labels map[string]string) error {
	if _, err := tx.ExecContext(ctx, `DELETE FROM agent_labels WHERE agent_id = ?`, agentID); err != nil {
		return err
	}
	for key, value := range labels {
		if _, err := tx.ExecContext(ctx, `INSERT INTO agent_labels (agent_id, key, value) VALUES (?, ?, ?)`, agentID, key, value); err != nil {
			return err
		}
	}
	return nil
}

// AgentLabels are what an agent's last Hello made.
func (s *Store) AgentLabels(ctx context.Context, agentID string) (map[string]string, error) {
	rows, err := list(ctx, s.r, func(row scanner) (pair [2]string, err error) {
		return pair, row.Scan(&pair[0], &pair[1])
	}, `SELECT key, value FROM agent_labels WHERE agent_id = ?`, agentID)
	if err != nil {
		return nil, fmt.Errorf("labels of %s: %w", agentID, err)
	}
	labels := map[string]string{}
	for _, pair := range rows {
		labels[pair[0]] = pair[1]
	}
	return labels, nil
}

// Candidate is an agent that placement may choose.
type Candidate struct {
	AgentID           string
	Role              agentv1.Role
	SiteID, MachineID string
	Labels            map[string]string
}

// Candidates lists the active agents at a tenant's sites with their labels, by
// id. want narrows them: each of its labels must be there, and have its value
// unless that is empty. An empty siteID stands for all sites. A machine that
// nobody enrolled is none.
func (s *Store) Candidates(ctx context.Context, tenantID, siteID string, want map[string]string) ([]Candidate, error) {
	if want == nil {
		want = map[string]string{} // null would be a row of json_each
	}
	wanted, err := json.Marshal(want)
	if err != nil {
		return nil, err
	}
	candidates, err := list(ctx, s.r, func(row scanner) (Candidate, error) {
		var c Candidate
		var labels string
		err := row.Scan(&c.AgentID, &c.Role, &c.SiteID, &c.MachineID, &labels)
		if err == nil {
			err = json.Unmarshal([]byte(labels), &c.Labels)
		}
		return c, err
	}, `SELECT a.id, a.role, a.site_id, a.machine_id,
		(SELECT coalesce(json_group_object(l.key, l.value), '{}') FROM agent_labels l WHERE l.agent_id = a.id)
		FROM agents a JOIN sites s ON s.id = a.site_id
		WHERE s.tenant_id = ?1 AND a.state = ?2 AND (?3 = '' OR a.site_id = ?3) AND a.machine_id NOT GLOB ?5
		AND NOT EXISTS (SELECT 1 FROM json_each(?4) w WHERE NOT EXISTS (
			SELECT 1 FROM agent_labels l WHERE l.agent_id = a.id AND l.key = w.key AND (w.value = '' OR l.value = w.value)))
		ORDER BY a.id`, tenantID, string(AgentActive), siteID, string(wanted), Strangers)
	if err != nil {
		return nil, fmt.Errorf("list candidates: %w", err)
	}
	return candidates, nil
}
