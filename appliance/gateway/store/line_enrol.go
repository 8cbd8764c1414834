package store

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
)

// Token is a one-time right to enrol. Only its hash is kept.
type Token struct {
	Hash      [32]byte
	Role      agentv1.Role
	SiteID    string
	MachineID string
	Expires   time.Time
}

// AddToken keeps a new token's hash.
func (s *Store) AddToken(ctx context.Context, t Token) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO tokens (hash, role, site_id, machine_id, created_ms, expires_ms) VALUES (?, ?, ?, ?, ?, ?)`,
			t.Hash[:], int32(t.Role), t.SiteID, t.MachineID, s.nowMs(), t.Expires.UnixMilli())
		return err
	})
}

// Token reads a token by its hash, used or not.
func (s *Store) Token(ctx context.Context, hash [32]byte) (Token, error) {
	t := Token{Hash: hash}
	var expires int64
	err := s.r.QueryRowContext(ctx, `SELECT role, site_id, machine_id, expires_ms FROM tokens WHERE hash = ?`, hash[:]).Scan(&t.Role, &t.SiteID, &t.MachineID, &expires)
	t.Expires = time.UnixMilli(expires)
	return t, one(err)
}

// Window is a time in which a machine may boot the ramdisk.
type Window struct {
	ID, SiteID, MachineID, Purpose string
	Opened, Until                  time.Time
}

// OpenWindow records a window; the same one again only moves its end.
func (s *Store) OpenWindow(ctx context.Context, w Window) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, `INSERT INTO windows (id, site_id, machine_id, purpose, opened_ms, until_ms) VALUES (?, ?, ?, ?, ?, ?)
			ON CONFLICT (id) DO UPDATE SET until_ms = excluded.until_ms
			WHERE site_id = excluded.site_id AND machine_id = excluded.machine_id AND purpose = excluded.purpose`,
			w.ID, w.SiteID, w.MachineID, w.Purpose, s.nowMs(), w.Until.UnixMilli())
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return errOr(err, ErrConflict)
		}
		return nil
	})
}

// CloseWindow ends a window now; closing an unknown one does nothing.
func (s *Store) CloseWindow(ctx context.Context, id string) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `UPDATE windows SET until_ms = min(until_ms, ?) WHERE id = ?`, s.nowMs(), id)
		return err
	})
}

// Window reads one, open or over.
func (s *Store) Window(ctx context.Context, id string) (Window, error) {
	w := Window{ID: id}
	var opened, until int64
	err := s.r.QueryRowContext(ctx, `SELECT site_id, machine_id, purpose, opened_ms, until_ms FROM windows WHERE id = ?`, id).Scan(&w.SiteID, &w.MachineID, &w.Purpose, &opened, &until)
	w.Opened, w.Until = time.UnixMilli(opened), time.UnixMilli(until)
	return w, one(err)
}

// Certificate is one leaf that an agent may present.
type Certificate struct {
	Fingerprint [32]byte // SHA-256 of DER
	AgentID     string
	CSRHash     [32]byte
	DER         []byte
	NotAfter    time.Time
	RenewAfter  time.Time
}

const certificateColumns = `fingerprint, agent_id, csr_hash, der, not_after_ms, renew_after_ms`

func scanCertificate(row scanner) (Certificate, error) {
	var c Certificate
	var fingerprint, csr []byte
	var end, renew int64
	if err := row.Scan(&fingerprint, &c.AgentID, &csr, &c.DER, &end, &renew); err != nil {
		return Certificate{}, one(err)
	}
	copy(c.Fingerprint[:], fingerprint)
	copy(c.CSRHash[:], csr)
	c.NotAfter, c.RenewAfter = time.UnixMilli(end), time.UnixMilli(renew)
	return c, nil
}

// Certificates lists an agent's leaves, the one that lasts longest first.
func (s *Store) Certificates(ctx context.Context, agentID string) ([]Certificate, error) {
	return list(ctx, s.r, scanCertificate, `SELECT `+certificateColumns+` FROM certificates WHERE agent_id = ? ORDER BY not_after_ms DESC`, agentID)
}

// AgentByCertificate is the agent that the leaf with this fingerprint was issued to.
func (s *Store) AgentByCertificate(ctx context.Context, fingerprint [32]byte) (Agent, error) {
	return scanAgent(s.r.QueryRowContext(ctx, `SELECT `+agentColumns+` FROM agents WHERE id = (SELECT agent_id FROM certificates WHERE fingerprint = ?)`, fingerprint[:]))
}

// AddCertificate keeps a renewed leaf beside the older ones, which stay good
// until they end: the agent may lose the answer.
func (s *Store) AddCertificate(ctx context.Context, c Certificate) error {
	return s.write(ctx, func(tx *sql.Tx) error { return addCertificate(ctx, tx, c) })
}

func addCertificate(ctx context.Context, tx *sql.Tx, c Certificate) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO certificates (`+certificateColumns+`) VALUES (?, ?, ?, ?, ?, ?)`,
		c.Fingerprint[:], c.AgentID, c.CSRHash[:], c.DER, c.NotAfter.UnixMilli(), c.RenewAfter.UnixMilli())
	return err
}

// Enrolment spends a token or a voucher: exactly one of them is set.
type Enrolment struct {
	Token     *Token
	WindowID  string
	BootNonce []byte

	Agent       Agent
	Certificate Certificate
}

// Enrolled is what an enrolment led to.
type Enrolled struct {
	Agent       Agent
	Certificate Certificate
	// Superseded are the identities that the new one replaced.
	Superseded []string
	// Again says that the same credential came with the same CSR before.
	Again bool
}

// ErrSpent says that the token or voucher came before with another CSR.
var ErrSpent = errors.New("the credential was used with another CSR")

// Enrol spends the credential and records the new identity in one step. The
// same CSR again answers the identity of the first time.
func (s *Store) Enrol(ctx context.Context, e Enrolment) (Enrolled, error) {
	var out Enrolled
	err := s.write(ctx, func(tx *sql.Tx) error {
		var row *sql.Row
		if e.Token != nil {
			row = tx.QueryRowContext(ctx, `SELECT csr_hash, agent_id FROM tokens WHERE hash = ?`, e.Token.Hash[:])
		} else {
			row = tx.QueryRowContext(ctx, `SELECT csr_hash, agent_id FROM vouchers WHERE window_id = ? AND boot_nonce = ?`, e.WindowID, e.BootNonce)
		}
		var csr []byte
		var agentID sql.NullString
		err := row.Scan(&csr, &agentID)
		if err != nil && (e.Token != nil || !errors.Is(err, sql.ErrNoRows)) {
			return one(err)
		}
		if agentID.Valid {
			if !bytes.Equal(csr, e.Certificate.CSRHash[:]) {
				return ErrSpent
			}
			out.Again = true
			if out.Agent, err = scanAgent(tx.QueryRowContext(ctx, `SELECT `+agentColumns+` FROM agents WHERE id = ?`, agentID.String)); err != nil {
				return err
			}
			out.Certificate, err = scanCertificate(tx.QueryRowContext(ctx, `SELECT `+certificateColumns+` FROM certificates WHERE agent_id = ? AND csr_hash = ?`, agentID.String, csr))
			return err
		}
		if e.Token != nil {
			_, err = tx.ExecContext(ctx, `UPDATE tokens SET csr_hash = ?, agent_id = ?, used_ms = ? WHERE hash = ?`, e.Certificate.CSRHash[:], e.Agent.ID, s.nowMs(), e.Token.Hash[:])
		} else {
			_, err = tx.ExecContext(ctx, `INSERT INTO vouchers (window_id, boot_nonce, csr_hash, agent_id, used_ms) VALUES (?, ?, ?, ?, ?)`, e.WindowID, e.BootNonce, e.Certificate.CSRHash[:], e.Agent.ID, s.nowMs())
		}
		if err != nil {
			return err
		}
		// One identity stands for a site, and one per role for a machine.
		a := e.Agent
		text := func(row scanner) (string, error) { var id string; return id, row.Scan(&id) }
		out.Superseded, err = list(ctx, tx, text, `UPDATE agents SET state = ? WHERE site_id = ? AND machine_id = ? AND role = ? AND state IN (?, ?) RETURNING id`,
			string(AgentSuperseded), a.SiteID, a.MachineID, int32(a.Role), string(AgentActive), string(AgentCloned))
		if err != nil {
			return err
		}
		macs, err := json.Marshal(a.MACs)
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `INSERT INTO agents (id, role, site_id, machine_id, window_id, state, product_uuid, macs, enrolled_ms, bundle_version, version) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
			a.ID, int32(a.Role), a.SiteID, a.MachineID, a.WindowID, string(AgentActive), a.ProductUUID, string(macs), s.nowMs(), a.BundleVersion, a.Version)
		if err != nil {
			return err
		}
		if err := addCertificate(ctx, tx, e.Certificate); err != nil {
			return err
		}
		out.Agent, out.Certificate = a, e.Certificate
		out.Agent.State = AgentActive
		return nil
	})
	return out, err
}
