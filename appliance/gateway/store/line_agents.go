package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/gateway/placement"
)

// AgentState says what an identity may do.
type AgentState string

// Only an active agent may call.
const (
	AgentActive     AgentState = "active"
	AgentSuperseded AgentState = "superseded" // a newer identity stands for the same thing
	AgentRevoked    AgentState = "revoked"
	AgentCloned     AgentState = "cloned" // held until a person looks
)

// Agent is an enrolled identity and what it last said of itself.
type Agent struct {
	ID        string
	Role      agentv1.Role
	SiteID    string
	MachineID string // empty for a site
	WindowID  string // the boot window of a ramdisk
	State     AgentState

	ProductUUID string
	MACs        []string
	Enrolled    time.Time
	// BundleVersion is the trust bundle that it enrolled with; it may have newer ones.
	BundleVersion uint64

	Version      string
	BootID       string
	JournalEpoch string
	Drivers      []*agentv1.AdvertisedDriver
	Capabilities []string
	ClockSource  string
	SessionEpoch uint64
	LastSeen     time.Time // zero: never connected
	EventEpoch   string
	EventAcked   uint64
}

// Incarnation is what a command for the agent must name: the boot of a
// ramdisk, the journal of all others. It is empty before the first Hello.
func (a Agent) Incarnation() string {
	if a.Role == agentv1.Role_ROLE_RAMDISK {
		return a.BootID
	}
	return a.JournalEpoch
}

const agentColumns = `id, role, site_id, machine_id, window_id, state, product_uuid, macs, enrolled_ms, bundle_version, version, boot_id, journal_epoch,
	drivers, capabilities, clock_source, session_epoch, last_seen_ms, event_epoch, event_acked`

func scanAgent(row scanner) (Agent, error) {
	var a Agent
	var macs, capabilities string
	var drivers []byte
	var enrolled, seen int64
	err := row.Scan(&a.ID, &a.Role, &a.SiteID, &a.MachineID, &a.WindowID, &a.State, &a.ProductUUID, &macs, &enrolled, &a.BundleVersion, &a.Version, &a.BootID, &a.JournalEpoch,
		&drivers, &capabilities, &a.ClockSource, &a.SessionEpoch, &seen, &a.EventEpoch, &a.EventAcked)
	if err != nil {
		return Agent{}, one(err)
	}
	a.Enrolled = time.UnixMilli(enrolled)
	if seen != 0 {
		a.LastSeen = time.UnixMilli(seen)
	}
	for _, part := range []struct {
		text []byte
		into any
	}{{[]byte(macs), &a.MACs}, {[]byte(capabilities), &a.Capabilities}, {drivers, &a.Drivers}} {
		if len(part.text) == 0 {
			continue
		}
		if err := json.Unmarshal(part.text, part.into); err != nil {
			return Agent{}, fmt.Errorf("agent %s: %w", a.ID, err)
		}
	}
	return a, nil
}

// Agent reads one identity, ErrNotFound where there is none.
func (s *Store) Agent(ctx context.Context, id string) (Agent, error) {
	return scanAgent(s.r.QueryRowContext(ctx, `SELECT `+agentColumns+` FROM agents WHERE id = ?`, id))
}

// AgentFilter narrows a list; zero fields match everything.
type AgentFilter struct {
	SiteID, MachineID, WindowID string
	Role                        agentv1.Role
	State                       AgentState
}

// Agents lists identities, the newest last.
func (s *Store) Agents(ctx context.Context, f AgentFilter) ([]Agent, error) {
	return list(ctx, s.r, scanAgent, `SELECT `+agentColumns+` FROM agents
		WHERE (?1 = '' OR site_id = ?1) AND (?2 = '' OR machine_id = ?2) AND (?3 = '' OR window_id = ?3) AND (?4 = 0 OR role = ?4) AND (?5 = '' OR state = ?5)
		ORDER BY enrolled_ms, id`, f.SiteID, f.MachineID, f.WindowID, int32(f.Role), string(f.State))
}

// SetAgentState revokes an identity, holds it, or lets a held one in again.
// Letting it in forgets the boots heard before, so that the box that a person
// judged to be the right one may connect.
func (s *Store) SetAgentState(ctx context.Context, id string, state AgentState) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, `UPDATE agents SET state = ? WHERE id = ?`, string(state), id)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return errOr(err, ErrNotFound)
		}
		if state != AgentActive {
			return nil
		}
		if _, err := tx.ExecContext(ctx, `DELETE FROM agent_boots WHERE agent_id = ?`, id); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `UPDATE agents SET boot_id = '' WHERE id = ?`, id)
		return err
	})
}

// errOr is err, or other where err is nil.
func errOr(err, other error) error {
	if err != nil {
		return err
	}
	return other
}

// ErrCloned says that a boot_id came back after a newer one was heard.
var ErrCloned = fmt.Errorf("a boot that ended is back: two boxes share one identity")

// Greeted records a Hello, with the labels that it makes, and answers the agent
// as it is now. A boot_id that
// was heard before the current one marks the agent as cloned: ErrCloned. So does
// any other one of a stranger, whose identity is of one boot; what a stranger
// advertises is not kept.
func (s *Store) Greeted(ctx context.Context, id string, h *agentv1.Hello) (Agent, error) {
	var agent Agent
	cloned := false
	err := s.write(ctx, func(tx *sql.Tx) (err error) {
		agent, err = scanAgent(tx.QueryRowContext(ctx, `SELECT `+agentColumns+` FROM agents WHERE id = ?`, id))
		if err != nil {
			return err
		}
		advertised, can := h.Drivers, h.Capabilities
		if agent.IsStranger() {
			advertised, can = nil, nil
		}
		drivers, err := json.Marshal(advertised)
		if err != nil {
			return err
		}
		capabilities, err := json.Marshal(append([]string{}, can...))
		if err != nil {
			return err
		}
		if agent.BootID != h.BootId {
			var known bool
			if err := tx.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM agent_boots WHERE agent_id = ? AND boot_id = ?)`, id, h.BootId).Scan(&known); err != nil {
				return err
			}
			if known || agent.BootID != "" && agent.IsStranger() {
				cloned = true
				_, err := tx.ExecContext(ctx, `UPDATE agents SET state = ? WHERE id = ?`, string(AgentCloned), id)
				return err
			}
			if _, err := tx.ExecContext(ctx, `INSERT INTO agent_boots (agent_id, boot_id, first_ms) VALUES (?, ?, ?)`, id, h.BootId, s.nowMs()); err != nil {
				return err
			}
		}
		if agent.EventEpoch != h.EventEpoch {
			agent.EventAcked = 0
		}
		_, err = tx.ExecContext(ctx, `UPDATE agents SET version = ?, boot_id = ?, journal_epoch = ?, drivers = ?, capabilities = ?, clock_source = ?,
			session_epoch = session_epoch + 1, last_seen_ms = ?, event_epoch = ?, event_acked = ? WHERE id = ?`,
			h.Version, h.BootId, h.JournalEpoch, drivers, string(capabilities), h.ClockSource, s.nowMs(), h.EventEpoch, agent.EventAcked, id)
		if err != nil {
			return err
		}
		if err := setLabels(ctx, tx, id, placement.Labels(advertised, can)); err != nil {
			return err
		}
		agent, err = scanAgent(tx.QueryRowContext(ctx, `SELECT `+agentColumns+` FROM agents WHERE id = ?`, id))
		return err
	})
	if err == nil && cloned {
		err = ErrCloned
	}
	return agent, err
}

// Seen records that the agent was heard now.
func (s *Store) Seen(ctx context.Context, id string) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `UPDATE agents SET last_seen_ms = ? WHERE id = ?`, s.nowMs(), id)
		return err
	})
}
