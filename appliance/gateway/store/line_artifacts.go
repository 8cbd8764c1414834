package store

import (
	"context"
	"database/sql"
	"time"
)

// Artifact describes a file that machines and boxes may fetch. Digests are hex SHA-256.
type Artifact struct {
	Name, Arch, Format string
	SHA256             string // of the bytes as stored
	SizeBytes          uint64
	UnpackedSHA256     string
	UnpackedSizeBytes  uint64
	ChunkSizeBytes     uint32
	ChunksSHA256       string // of the concatenated chunk digests
	Imported           time.Time
}

const artifactColumns = `name, arch, format, sha256, size, unpacked_sha256, unpacked_size, chunk_size, chunks_sha256, imported_ms`

func scanArtifact(row scanner) (Artifact, error) {
	var a Artifact
	var imported int64
	err := row.Scan(&a.Name, &a.Arch, &a.Format, &a.SHA256, &a.SizeBytes, &a.UnpackedSHA256, &a.UnpackedSizeBytes, &a.ChunkSizeBytes, &a.ChunksSHA256, &imported)
	a.Imported = time.UnixMilli(imported)
	return a, one(err)
}

// ClaimArtifactName gives a name to the tenant that asks first, for good;
// ErrConflict where it is another's.
func (s *Store) ClaimArtifactName(ctx context.Context, name, tenantID string) error {
	return s.change(ctx, `INSERT INTO artifact_names (name, tenant_id) VALUES (?, ?)
		ON CONFLICT (name) DO UPDATE SET tenant_id = excluded.tenant_id WHERE tenant_id = excluded.tenant_id`, name, tenantID)
}

// PutArtifact names a file; the name's older meaning is replaced.
func (s *Store) PutArtifact(ctx context.Context, a Artifact) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT OR REPLACE INTO artifacts (`+artifactColumns+`) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
			a.Name, a.Arch, a.Format, a.SHA256, int64(a.SizeBytes), a.UnpackedSHA256, int64(a.UnpackedSizeBytes), a.ChunkSizeBytes, a.ChunksSHA256, a.Imported.UnixMilli())
		return err
	})
}

// Artifact finds one by the hex SHA-256 of its stored bytes or by name. An
// empty arch matches any; of several the newest is taken.
func (s *Store) Artifact(ctx context.Context, ref, arch string) (Artifact, error) {
	return scanArtifact(s.r.QueryRowContext(ctx, `SELECT `+artifactColumns+` FROM artifacts WHERE (sha256 = ?1 OR name = ?1) AND (?2 = '' OR arch = ?2)
		ORDER BY sha256 = ?1 DESC, imported_ms DESC LIMIT 1`, ref, arch))
}

// Artifacts lists all, by name.
func (s *Store) Artifacts(ctx context.Context) ([]Artifact, error) {
	return list(ctx, s.r, scanArtifact, `SELECT `+artifactColumns+` FROM artifacts ORDER BY name, arch`)
}
