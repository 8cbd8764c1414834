package store

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// Grant is what people were asked to approve. Its terms are the payload's.
type Grant struct {
	ID, TenantID, SiteID string
	Payload              []byte
	NotAfter             time.Time
	Proposed             time.Time
	// Targets are in the order of the grant's tree.
	Targets    []string
	Signatures []*agentv1.Signature
}

// AddGrant keeps a grant that nobody has signed yet.
func (s *Store) AddGrant(ctx context.Context, g Grant) error {
	err := s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO grants (id, tenant_id, site_id, payload, not_after_ms, proposed_ms) VALUES (?, ?, ?, ?, ?, ?)`,
			g.ID, g.TenantID, g.SiteID, g.Payload, toMS(g.NotAfter), toMS(g.Proposed))
		if err != nil {
			return taken(err)
		}
		for i, target := range g.Targets {
			if _, err := tx.ExecContext(ctx, `INSERT INTO grant_targets (grant_id, position, target) VALUES (?, ?, ?)`, g.ID, i, target); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("add grant: %w", err)
	}
	return nil
}

const grantColumns = `id, tenant_id, site_id, payload, not_after_ms, proposed_ms`

func scanGrant(row scanner) (Grant, error) {
	var g Grant
	var ends, proposed int64
	err := row.Scan(&g.ID, &g.TenantID, &g.SiteID, &g.Payload, &ends, &proposed)
	g.NotAfter, g.Proposed = fromMS(ends), fromMS(proposed)
	return g, err
}

// fill reads a grant's signatures, by key.
func (s *Store) fill(ctx context.Context, g *Grant) (err error) {
	g.Signatures, err = list(ctx, s.r, func(row scanner) (*agentv1.Signature, error) {
		sig := &agentv1.Signature{}
		return sig, row.Scan(&sig.KeyId, &sig.Signature)
	}, `SELECT key_id, signature FROM grant_signatures WHERE grant_id = ? ORDER BY key_id`, g.ID)
	return err
}

// GrantTargets are a grant's targets, which never change, in the order of its tree.
func (s *Store) GrantTargets(ctx context.Context, id string) ([]string, error) {
	targets, err := list(ctx, s.r, func(row scanner) (t string, err error) { err = row.Scan(&t); return t, err },
		`SELECT target FROM grant_targets WHERE grant_id = ? ORDER BY position`, id)
	if err != nil {
		return nil, fmt.Errorf("targets of grant %s: %w", id, err)
	}
	return targets, nil
}

// Grant finds a tenant's grant.
func (s *Store) Grant(ctx context.Context, tenantID, id string) (Grant, error) {
	g, err := scanGrant(s.r.QueryRowContext(ctx, `SELECT `+grantColumns+` FROM grants WHERE tenant_id = ? AND id = ?`, tenantID, id))
	if err == nil {
		err = s.fill(ctx, &g)
	}
	if err == nil {
		g.Targets, err = s.GrantTargets(ctx, id)
	}
	if err != nil {
		return Grant{}, fmt.Errorf("grant %q: %w", id, one(err))
	}
	return g, nil
}

// Grants lists a tenant's grants, the newest first, at most limit; their targets
// are left out.
func (s *Store) Grants(ctx context.Context, tenantID string, limit int) ([]Grant, error) {
	return s.grants(ctx, `SELECT `+grantColumns+` FROM grants WHERE tenant_id = ? ORDER BY proposed_ms DESC, id DESC LIMIT ?`, tenantID, limit)
}

// GrantsFor lists grants of the site's tenant for that site that hold target and
// have not ended at t, the one that ends first first; their targets are left out.
func (s *Store) GrantsFor(ctx context.Context, siteID, target string, t time.Time) ([]Grant, error) {
	return s.grants(ctx, `SELECT `+grantColumns+` FROM grants WHERE site_id = ?1 AND not_after_ms > ?3
		AND tenant_id = (SELECT tenant_id FROM sites WHERE sites.id = ?1)
		AND EXISTS (SELECT 1 FROM grant_targets WHERE target = ?2 AND grant_id = grants.id) ORDER BY not_after_ms, id`, siteID, target, toMS(t))
}

// GrantsEver lists grants of the site's tenant for that site that hold target,
// ended or not, the one that ends last first, at most limit; their targets are left out.
func (s *Store) GrantsEver(ctx context.Context, siteID, target string, limit int) ([]Grant, error) {
	return s.grants(ctx, `SELECT `+grantColumns+` FROM grants WHERE site_id = ?1 AND tenant_id = (SELECT tenant_id FROM sites WHERE sites.id = ?1)
		AND EXISTS (SELECT 1 FROM grant_targets WHERE target = ?2 AND grant_id = grants.id) ORDER BY not_after_ms DESC, id DESC LIMIT ?3`, siteID, target, limit)
}

func (s *Store) grants(ctx context.Context, query string, args ...any) ([]Grant, error) {
	all, err := list(ctx, s.r, scanGrant, query, args...)
	for i := range all {
		if err == nil {
			err = s.fill(ctx, &all[i])
		}
	}
	if err != nil {
		return nil, fmt.Errorf("list grants: %w", err)
	}
	return all, nil
}

// SignGrant keeps an approver's signature; the same key's again changes nothing.
func (s *Store) SignGrant(ctx context.Context, id string, sig *agentv1.Signature) error {
	_, err := s.w.ExecContext(ctx, `INSERT INTO grant_signatures (grant_id, key_id, signature, signed_ms) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING`,
		id, sig.GetKeyId(), sig.GetSignature(), s.nowMs())
	if err != nil {
		return fmt.Errorf("sign grant %s: %w", id, err)
	}
	return nil
}

// notUsed are the codes of commands that an agent refused, or never got: they
// used nothing.
var notUsed = []errs.Code{
	errs.QuorumRequired, errs.GrantInvalid, errs.LaneFull, errs.WrongIncarnation, errs.WrongAgent, errs.UnknownKind, errs.RoleMismatch,
	errs.SignatureRequired, errs.SignatureInvalid, errs.KeyUnknown, errs.Expired, errs.OperationNotAllowed, errs.InvalidPayload,
}

// GrantUses counts the commands that cited a grant for a target and that its agent
// took, or may have taken.
func (s *Store) GrantUses(ctx context.Context, id, target string) (n uint32, err error) {
	args := []any{id, target}
	for _, code := range notUsed {
		args = append(args, string(code))
	}
	err = s.r.QueryRowContext(ctx, `SELECT count(*) FROM grant_uses WHERE grant_id = ? AND target = ? AND NOT EXISTS (SELECT 1 FROM commands
		WHERE commands.id = command_id AND state = 'done' AND error_code IN (?`+strings.Repeat(", ?", len(notUsed)-1)+`))`, args...).Scan(&n)
	if err != nil {
		return 0, fmt.Errorf("uses of grant %s: %w", id, err)
	}
	return n, nil
}
