package store

import (
	"context"
	"database/sql"
)

// PutSecret keeps sealed bytes under a reference, replacing older ones.
func (s *Store) PutSecret(ctx context.Context, ref string, sealed []byte) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO secrets (ref, sealed, updated_ms) VALUES (?, ?, ?)
			ON CONFLICT (ref) DO UPDATE SET sealed = excluded.sealed, updated_ms = excluded.updated_ms`, ref, sealed, s.nowMs())
		return err
	})
}

// Secret reads the sealed bytes.
func (s *Store) Secret(ctx context.Context, ref string) ([]byte, error) {
	var sealed []byte
	err := s.r.QueryRowContext(ctx, `SELECT sealed FROM secrets WHERE ref = ?`, ref).Scan(&sealed)
	return sealed, one(err)
}

// DeleteSecret forgets a secret; an unknown one is no error.
func (s *Store) DeleteSecret(ctx context.Context, ref string) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM secrets WHERE ref = ?`, ref)
		return err
	})
}
