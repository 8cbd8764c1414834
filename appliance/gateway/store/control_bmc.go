package store

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/better-compute/site-appliance/plugins/driver/binding"
)

// Rotation is a credential whose new password no log-in has proved yet.
type Rotation struct {
	CredentialsRef, PendingRef string
	TenantID, MachineID        string
	// CommandID is the latest attempt, and Flying true until its outcome counted.
	CommandID string
	Attempts  int
	Flying    bool
	// Unclear is true once an attempt may have changed the BMC.
	Unclear bool
	// Next is when it is tried again by itself; zero: not.
	Next                    time.Time
	ErrorCode, ErrorMessage string
	Begun                   time.Time
}

const rotationSelect = `SELECT credentials_ref, pending_ref, tenant_id, machine_id, command_id, attempts, flying, unclear, next_ms, error_code, error_message, begun_ms FROM rotations `

func scanRotation(row scanner) (Rotation, error) {
	var r Rotation
	var next, begun int64
	err := row.Scan(&r.CredentialsRef, &r.PendingRef, &r.TenantID, &r.MachineID, &r.CommandID, &r.Attempts, &r.Flying, &r.Unclear, &next, &r.ErrorCode, &r.ErrorMessage, &begun)
	r.Next, r.Begun = fromMS(next), fromMS(begun)
	return r, err
}

// BeginRotation notes an attempt by r.CommandID before it is sent. The first of a
// credential also keeps the sealed new password; a later one goes on with the
// password that is there. ErrConflict while another attempt flies.
func (s *Store) BeginRotation(ctx context.Context, r Rotation, sealed []byte) error {
	err := s.write(ctx, func(tx *sql.Tx) error {
		have, err := scanRotation(tx.QueryRowContext(ctx, rotationSelect+`WHERE credentials_ref = ?`, r.CredentialsRef))
		switch {
		case errors.Is(err, sql.ErrNoRows):
			if _, err := tx.ExecContext(ctx, `INSERT INTO secrets (ref, sealed, updated_ms) VALUES (?, ?, ?)
				ON CONFLICT (ref) DO UPDATE SET sealed = excluded.sealed, updated_ms = excluded.updated_ms`, r.PendingRef, sealed, s.nowMs()); err != nil {
				return err
			}
			_, err = tx.ExecContext(ctx, `INSERT INTO rotations (credentials_ref, pending_ref, tenant_id, machine_id, command_id, attempts, flying, unclear, next_ms, begun_ms)
				VALUES (?, ?, ?, ?, ?, 1, 1, 0, 0, ?)`, r.CredentialsRef, r.PendingRef, r.TenantID, r.MachineID, r.CommandID, s.nowMs())
			return err
		case err != nil:
			return err
		case have.Flying && have.CommandID != r.CommandID:
			return ErrConflict
		}
		_, err = tx.ExecContext(ctx, `UPDATE rotations SET machine_id = ?, command_id = ?, attempts = attempts + 1, flying = 1, next_ms = 0 WHERE credentials_ref = ?`,
			r.MachineID, r.CommandID, r.CredentialsRef)
		return err
	})
	if err != nil {
		return fmt.Errorf("begin rotation of %s: %w", r.CredentialsRef, err)
	}
	return nil
}

// Rotation is a credential's open rotation; ErrNotFound where there is none.
func (s *Store) Rotation(ctx context.Context, credentialsRef string) (Rotation, error) {
	r, err := scanRotation(s.r.QueryRowContext(ctx, rotationSelect+`WHERE credentials_ref = ?`, credentialsRef))
	return r, one(err)
}

// Rotations lists all open rotations, the oldest first.
func (s *Store) Rotations(ctx context.Context) ([]Rotation, error) {
	return list(ctx, s.r, scanRotation, rotationSelect+`ORDER BY begun_ms, credentials_ref`)
}

// ProveRotation makes the pending password the credential's in one transaction:
// sealed takes the place of what was read as before, and the pending secret and the
// rotation are gone. ErrConflict where the credential or the rotation is another by now.
func (s *Store) ProveRotation(ctx context.Context, credentialsRef, commandID string, before, sealed []byte) error {
	return s.endRotation(ctx, credentialsRef, commandID, func(tx *sql.Tx) error {
		var have []byte
		if err := tx.QueryRowContext(ctx, `SELECT sealed FROM secrets WHERE ref = ?`, credentialsRef).Scan(&have); err != nil {
			return err
		}
		if !bytes.Equal(have, before) {
			return ErrConflict
		}
		_, err := tx.ExecContext(ctx, `UPDATE secrets SET sealed = ?, updated_ms = ? WHERE ref = ?`, sealed, s.nowMs(), credentialsRef)
		return err
	})
}

// DropRotation forgets the pending password: the credential's own still holds.
// ErrConflict where the rotation is another by now.
func (s *Store) DropRotation(ctx context.Context, credentialsRef, commandID string) error {
	return s.endRotation(ctx, credentialsRef, commandID, func(*sql.Tx) error { return nil })
}

func (s *Store) endRotation(ctx context.Context, credentialsRef, commandID string, f func(tx *sql.Tx) error) error {
	err := s.write(ctx, func(tx *sql.Tx) error {
		var pending string
		err := tx.QueryRowContext(ctx, `DELETE FROM rotations WHERE credentials_ref = ? AND command_id = ? AND flying = 1 RETURNING pending_ref`, credentialsRef, commandID).Scan(&pending)
		if errors.Is(err, sql.ErrNoRows) {
			return ErrConflict
		}
		if err == nil {
			err = f(tx)
		}
		if err == nil {
			_, err = tx.ExecContext(ctx, `DELETE FROM secrets WHERE ref = ?`, pending)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("end rotation of %s: %w", credentialsRef, one(err))
	}
	return nil
}

// KeepRotation records that an attempt ended and the pending password stays.
func (s *Store) KeepRotation(ctx context.Context, r Rotation) error {
	return s.change(ctx, `UPDATE rotations SET flying = 0, unclear = ?, next_ms = ?, error_code = ?, error_message = ? WHERE credentials_ref = ? AND command_id = ? AND flying = 1`,
		r.Unclear, toMS(r.Next), r.ErrorCode, r.ErrorMessage, r.CredentialsRef, r.CommandID)
}

// HurryRotation has an unclear rotation that does not fly tried again now.
func (s *Store) HurryRotation(ctx context.Context, credentialsRef string) error {
	return s.change(ctx, `UPDATE rotations SET next_ms = ? WHERE credentials_ref = ? AND flying = 0 AND unclear = 1`, s.nowMs(), credentialsRef)
}

// PostponeRotation moves the time at which an unclear rotation is tried again by
// itself; zero: never.
func (s *Store) PostponeRotation(ctx context.Context, credentialsRef string, next time.Time) error {
	return s.change(ctx, `UPDATE rotations SET next_ms = ? WHERE credentials_ref = ? AND flying = 0`, toMS(next), credentialsRef)
}

// Rebind is what a bmc.bind makes of a machine once it is done.
type Rebind struct {
	CommandID, MachineID string
	BMC                  BMC
	Protected            bool
	Begun                time.Time
}

// AddRebind notes a rebinding before its command is sent.
func (s *Store) AddRebind(ctx context.Context, r Rebind) error {
	_, err := s.w.ExecContext(ctx, `INSERT INTO rebinds (command_id, machine_id, driver, address, credentials_ref, tls_spki_sha256, driver_options, protected, begun_ms)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)`, r.CommandID, r.MachineID, r.BMC.Driver, r.BMC.Address, r.BMC.CredentialsRef, r.BMC.TLSSPKISHA256, r.BMC.DriverOptions, r.Protected, s.nowMs())
	if err != nil {
		return fmt.Errorf("note rebinding of %s: %w", r.MachineID, err)
	}
	return nil
}

// Rebinds lists the open rebindings in the order in which they were sent.
func (s *Store) Rebinds(ctx context.Context) ([]Rebind, error) {
	return list(ctx, s.r, func(row scanner) (Rebind, error) {
		var r Rebind
		var begun int64
		err := row.Scan(&r.CommandID, &r.MachineID, &r.BMC.Driver, &r.BMC.Address, &r.BMC.CredentialsRef, &r.BMC.TLSSPKISHA256, &r.BMC.DriverOptions, &r.Protected, &begun)
		r.Begun = fromMS(begun)
		return r, err
	}, `SELECT command_id, machine_id, driver, address, credentials_ref, tls_spki_sha256, driver_options, protected, begun_ms FROM rebinds ORDER BY begun_ms, rowid`)
}

// DropRebind forgets a rebinding that was not done.
func (s *Store) DropRebind(ctx context.Context, commandID string) error {
	_, err := s.w.ExecContext(ctx, `DELETE FROM rebinds WHERE command_id = ?`, commandID)
	return err
}

// Rebound makes a rebinding that was done the machine's, and rebind of its
// bindings; ErrConflict where it was so already.
func (s *Store) Rebound(ctx context.Context, r Rebind, rebind func(Machine) map[string]binding.Binding) error {
	err := s.write(ctx, func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, `DELETE FROM rebinds WHERE command_id = ?`, r.CommandID)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return errOr(err, ErrConflict)
		}
		m, err := scanMachine(tx.QueryRowContext(ctx, machineSelect+`WHERE id = ?`, r.MachineID))
		if err != nil {
			return one(err)
		}
		drivers, err := encodeBindings(rebind(m))
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `UPDATE machines SET driver = ?, address = ?, credentials_ref = ?, tls_spki_sha256 = ?, driver_options = ?, protected = ?, drivers = ? WHERE id = ?`,
			r.BMC.Driver, r.BMC.Address, r.BMC.CredentialsRef, r.BMC.TLSSPKISHA256, r.BMC.DriverOptions, r.Protected, drivers, r.MachineID)
		return err
	})
	if err != nil {
		return fmt.Errorf("rebind %s: %w", r.MachineID, err)
	}
	return nil
}

// MachinesByCredential lists a tenant's machines whose BMC has this credential.
func (s *Store) MachinesByCredential(ctx context.Context, tenantID, credentialsRef string) ([]Machine, error) {
	machines, err := list(ctx, s.r, scanMachine, machineSelect+`WHERE tenant_id = ? AND credentials_ref = ? ORDER BY name`, tenantID, credentialsRef)
	if err != nil {
		return nil, fmt.Errorf("list machines of a credential: %w", err)
	}
	return machines, nil
}
