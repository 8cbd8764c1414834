package store

import (
	"context"
	"database/sql"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
)

// Event is one thing that happened. The gateway's own have no AgentID unless
// they are about an agent.
type Event struct {
	ID                         int64
	Received, At               time.Time
	SiteID, MachineID, AgentID string
	Name                       string // noun.past
	Class                      string // "state", "telemetry" or "audit"
	Key                        string
	BodyJSON                   string
}

// AddEvent records an event of the gateway's own.
func (s *Store) AddEvent(ctx context.Context, e Event) error {
	now := s.nowMs()
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO events (received_ms, at_ms, site_id, machine_id, agent_id, name, class, key, body_json) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)`,
			now, now, e.SiteID, e.MachineID, e.AgentID, e.Name, e.Class, e.Key, e.BodyJSON)
		return err
	})
}

// AddAgentEvents keeps what an agent sent, in order, and moves its
// acknowledged sequence. It answers the events that were not there before and
// the sequence to acknowledge.
func (s *Store) AddAgentEvents(ctx context.Context, agentID string, events []*agentv1.Event) (fresh []*agentv1.Event, acked uint64, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		fresh = nil
		var epoch, site, machine string
		if err := tx.QueryRowContext(ctx, `SELECT event_epoch, event_acked, site_id, machine_id FROM agents WHERE id = ?`, agentID).Scan(&epoch, &acked, &site, &machine); err != nil {
			return one(err)
		}
		_, stranger := StrangerMAC(machine)
		for _, e := range events {
			// An agent may drop or replace what it has not sent, so the sequence
			// has gaps; what is not above the acknowledged one was here before.
			if e.Seq <= acked {
				continue
			}
			if stranger {
				// It reports its hardware and no more, and the latest report is all that is kept.
				if e.Name != HardwareEvent || len(e.BodyJson) > MaxStrangerHardware {
					acked = e.Seq
					continue
				}
				// Neither by a class that is kept for ever nor by a new identity are there more.
				e.Class, e.Key = "state", machine
				if _, err := tx.ExecContext(ctx, `DELETE FROM events WHERE name = ? AND key = ? AND site_id = ?`, HardwareEvent, machine, site); err != nil {
					return err
				}
			}
			if _, err := tx.ExecContext(ctx, `INSERT INTO events (received_ms, at_ms, site_id, machine_id, agent_id, epoch, seq, name, class, key, body_json) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
				ON CONFLICT (agent_id, epoch, seq) DO NOTHING`,
				s.nowMs(), e.AtMs, site, machine, agentID, epoch, e.Seq, e.Name, e.Class, e.Key, string(e.BodyJson)); err != nil {
				return err
			}
			fresh, acked = append(fresh, e), e.Seq
		}
		_, err := tx.ExecContext(ctx, `UPDATE agents SET event_acked = ?, last_seen_ms = ? WHERE id = ?`, acked, s.nowMs(), agentID)
		return err
	})
	return fresh, acked, err
}

// EventFilter narrows a list; zero fields match everything.
type EventFilter struct {
	SiteIDs                  []string
	MachineID, AgentID, Name string
	AfterID                  int64
	Limit                    int // the newest so many; 0 stands for 100
}

// Events lists events, the newest last.
func (s *Store) Events(ctx context.Context, f EventFilter) ([]Event, error) {
	if f.Limit <= 0 {
		f.Limit = 100
	}
	where, args := "", []any{f.MachineID, f.AgentID, f.Name, f.AfterID, f.Limit}
	if len(f.SiteIDs) > 0 {
		where = " AND site_id IN (?" + repeat(", ?", len(f.SiteIDs)-1) + ")"
	}
	// The numbered parameters come first, the sites after them.
	for _, id := range f.SiteIDs {
		args = append(args, id)
	}
	query := `SELECT id, received_ms, at_ms, site_id, machine_id, agent_id, name, class, key, body_json FROM (
		SELECT * FROM events WHERE (?1 = '' OR machine_id = ?1) AND (?2 = '' OR agent_id = ?2) AND (?3 = '' OR name = ?3) AND id > ?4 AND ?5 > 0` + where + `
		ORDER BY id DESC LIMIT ?5) ORDER BY id`
	return list(ctx, s.r, scanEvent, query, args...)
}

// BoxEvent is the newest event of this name and key from the site's own box;
// what the site's other agents sent does not count.
func (s *Store) BoxEvent(ctx context.Context, siteID, name, key string) (Event, error) {
	e, err := scanEvent(s.r.QueryRowContext(ctx, `SELECT id, received_ms, at_ms, site_id, machine_id, agent_id, name, class, key, body_json FROM events
		WHERE name = ?1 AND key = ?2 AND site_id = ?3 AND agent_id IN (SELECT id FROM agents WHERE site_id = ?3 AND role = ?4)
		ORDER BY id DESC LIMIT 1`, name, key, siteID, int32(agentv1.Role_ROLE_SITE)))
	return e, one(err)
}

// EventsOf are the newest 200 events of this name and key that the site's own box sent
// and that came since then.
func (s *Store) EventsOf(ctx context.Context, siteID, name, key string, since time.Time) ([]Event, error) {
	return list(ctx, s.r, scanEvent, `SELECT id, received_ms, at_ms, site_id, machine_id, agent_id, name, class, key, body_json FROM events
		WHERE name = ?1 AND key = ?2 AND site_id = ?3 AND received_ms >= ?5 AND agent_id IN (SELECT id FROM agents WHERE site_id = ?3 AND role = ?4)
		ORDER BY id DESC LIMIT 200`, name, key, siteID, int32(agentv1.Role_ROLE_SITE), since.UnixMilli())
}

func repeat(s string, n int) string {
	out := ""
	for range n {
		out += s
	}
	return out
}

func scanEvent(row scanner) (Event, error) {
	var e Event
	var received, at int64
	err := row.Scan(&e.ID, &received, &at, &e.SiteID, &e.MachineID, &e.AgentID, &e.Name, &e.Class, &e.Key, &e.BodyJSON)
	e.Received, e.At = time.UnixMilli(received), time.UnixMilli(at)
	return e, err
}

// PruneEvents removes telemetry and state that was received before t; audit stays.
func (s *Store) PruneEvents(ctx context.Context, t time.Time) (removed int64, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, `DELETE FROM events WHERE received_ms < ? AND class <> 'audit'`, t.UnixMilli())
		if err != nil {
			return err
		}
		removed, err = res.RowsAffected()
		return err
	})
	return removed, err
}
