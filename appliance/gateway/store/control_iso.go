package store

import (
	"context"
	"database/sql"
	"fmt"
	"time"
)

// ISO is a disc image of a tenant's catalog. Its bytes are an artifact of the same digest.
type ISO struct {
	TenantID, Name, SHA256 string
	SizeBytes              uint64
	// FactsJSON is what is known of it.
	FactsJSON string
	Added     time.Time
}

const isoColumns = `tenant_id, name, sha256, size, facts, added_ms`

func scanISO(row scanner) (ISO, error) {
	var i ISO
	var added int64
	err := row.Scan(&i.TenantID, &i.Name, &i.SHA256, &i.SizeBytes, &i.FactsJSON, &added)
	i.Added = fromMS(added)
	return i, one(err)
}

// AddISO keeps an image; ErrConflict where the tenant has one of that name.
func (s *Store) AddISO(ctx context.Context, i ISO) error {
	err := s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO isos (`+isoColumns+`) VALUES (?, ?, ?, ?, ?, ?)`,
			i.TenantID, i.Name, i.SHA256, int64(i.SizeBytes), i.FactsJSON, toMS(i.Added))
		return taken(err)
	})
	if err != nil {
		return fmt.Errorf("add disc image %s: %w", i.Name, err)
	}
	return nil
}

// ISO finds a tenant's image by name or hex SHA-256; a name wins.
func (s *Store) ISO(ctx context.Context, tenantID, ref string) (ISO, error) {
	i, err := scanISO(s.r.QueryRowContext(ctx, `SELECT `+isoColumns+` FROM isos WHERE tenant_id = ?1 AND (name = ?2 OR sha256 = ?2)
		ORDER BY name = ?2 DESC, name LIMIT 1`, tenantID, ref))
	if err != nil {
		return ISO{}, fmt.Errorf("disc image %q: %w", ref, err)
	}
	return i, nil
}

// ISOs lists a tenant's images by name.
func (s *Store) ISOs(ctx context.Context, tenantID string) ([]ISO, error) {
	isos, err := list(ctx, s.r, scanISO, `SELECT `+isoColumns+` FROM isos WHERE tenant_id = ? ORDER BY name`, tenantID)
	if err != nil {
		return nil, fmt.Errorf("list disc images: %w", err)
	}
	return isos, nil
}

// isoHolders are the machines that may boot an image now, or are about to. CASE keeps
// json_extract from what is no JSON.
const isoHolders = `SELECT m.name FROM machines m WHERE m.tenant_id = ?1 AND (
	m.window_until_ms > ?4 AND CASE m.action WHEN 'iso' THEN json_extract(m.boot, '$.iso.name') = ?2 AND json_extract(m.boot, '$.iso.sha256') = ?3 END
	OR EXISTS (SELECT 1 FROM workflows w WHERE w.machine_id = m.id AND w.state = 'running' AND CASE json_valid(CAST(w.params AS TEXT)) WHEN 1
		THEN json_extract(CAST(w.params AS TEXT), '$.boot.iso.name') = ?2 AND json_extract(CAST(w.params AS TEXT), '$.boot.iso.sha256') = ?3 END))
	ORDER BY m.name`

func (s *Store) isoMachines(ctx context.Context, q querier, i ISO) ([]string, error) {
	return list(ctx, q, func(row scanner) (string, error) {
		var name string
		return name, row.Scan(&name)
	}, isoHolders, i.TenantID, i.Name, i.SHA256, s.nowMs())
}

// ISOMachines are the names of the machines that an image is assigned to, or that a
// running workflow is about to assign it to.
func (s *Store) ISOMachines(ctx context.Context, i ISO) ([]string, error) {
	names, err := s.isoMachines(ctx, s.r, i)
	if err != nil {
		return nil, fmt.Errorf("machines of disc image %s: %w", i.Name, err)
	}
	return names, nil
}

// RemoveISO forgets an image, unless a machine is assigned to it: then it names those.
func (s *Store) RemoveISO(ctx context.Context, i ISO) (held []string, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		if held, err = s.isoMachines(ctx, tx, i); err != nil || len(held) > 0 {
			return err
		}
		res, err := tx.ExecContext(ctx, `DELETE FROM isos WHERE tenant_id = ? AND name = ? AND sha256 = ?`, i.TenantID, i.Name, i.SHA256)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n != 1 {
			return ErrNotFound
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("remove disc image %s: %w", i.Name, err)
	}
	return held, nil
}

// ISOPrefix begins the names of the artifacts that are the catalog's, which nobody can import.
const ISOPrefix = "ISO."

// LostISOs are the artifacts of the catalog that it has no image for: a gateway that
// stopped while one was added or removed leaves them.
func (s *Store) LostISOs(ctx context.Context) ([]Artifact, error) {
	return list(ctx, s.r, scanArtifact, `SELECT `+artifactColumns+` FROM artifacts WHERE substr(name, 1, length(?1)) = ?1
		AND name NOT IN (SELECT json_extract(facts, '$.artifact') FROM isos) ORDER BY name`, ISOPrefix)
}

// RemoveArtifact takes a name away from a file and reports whether another one has it.
func (s *Store) RemoveArtifact(ctx context.Context, name, arch string) (sha256 string, named bool, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		err := tx.QueryRowContext(ctx, `DELETE FROM artifacts WHERE name = ? AND arch = ? RETURNING sha256`, name, arch).Scan(&sha256)
		if err != nil {
			return one(err)
		}
		return tx.QueryRowContext(ctx, `SELECT count(*) > 0 FROM artifacts WHERE sha256 = ?`, sha256).Scan(&named)
	})
	if err != nil {
		return "", false, fmt.Errorf("remove artifact %s: %w", name, err)
	}
	return sha256, named, nil
}
