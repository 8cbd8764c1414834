package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"strings"
	"time"
)

// AllTenants is the tenant of a token that speaks for every tenant.
const AllTenants = "*"

// APIToken is a bearer token of the API for people. Only its hash is kept.
type APIToken struct {
	Hash        [32]byte // SHA-256 of the token
	Name        string
	TenantID    string // AllTenants for an operator
	Permissions []string
	Created     time.Time
	Expires     time.Time // zero: never
}

// PutAPIToken stores a token, in place of one with the same name and tenant.
func (s *Store) PutAPIToken(ctx context.Context, t APIToken) error {
	permissions, err := json.Marshal(append([]string{}, t.Permissions...))
	if err != nil {
		return fmt.Errorf("put api token: %w", err)
	}
	err = s.write(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, `DELETE FROM api_tokens WHERE name = ? AND tenant_id = ?`, t.Name, t.TenantID); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, `INSERT INTO api_tokens (hash, name, tenant_id, permissions, created_ms, expires_ms) VALUES (?, ?, ?, ?, ?, ?)`,
			t.Hash[:], t.Name, t.TenantID, string(permissions), toMS(t.Created), toMS(t.Expires))
		return taken(err)
	})
	if err != nil {
		return fmt.Errorf("put api token: %w", err)
	}
	return nil
}

// APIToken finds a token by its hash; ErrNotFound when there is none. The
// caller judges its expiry.
func (s *Store) APIToken(ctx context.Context, hash [32]byte) (APIToken, error) {
	t := APIToken{Hash: hash}
	var permissions string
	var created, expires int64
	err := s.r.QueryRowContext(ctx, `SELECT name, tenant_id, permissions, created_ms, expires_ms FROM api_tokens WHERE hash = ?`, hash[:]).
		Scan(&t.Name, &t.TenantID, &permissions, &created, &expires)
	if err == nil {
		err = json.Unmarshal([]byte(permissions), &t.Permissions)
	}
	if err != nil {
		return APIToken{}, fmt.Errorf("api token: %w", one(err))
	}
	t.Created, t.Expires = fromMS(created), fromMS(expires)
	return t, nil
}

// toMS and fromMS keep a zero time zero.
func toMS(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

func fromMS(ms int64) time.Time {
	if ms == 0 {
		return time.Time{}
	}
	return time.UnixMilli(ms).UTC()
}

// taken turns a broken uniqueness rule into ErrConflict.
func taken(err error) error {
	if err != nil && strings.Contains(err.Error(), "UNIQUE constraint failed") {
		return ErrConflict
	}
	return err
}
