package store

import (
	"context"
	"fmt"
	"time"
)

// Site is a place with one box.
type Site struct {
	ID, TenantID, Name string
	Created            time.Time
}

// Pool groups machines of one site.
type Pool struct {
	ID, TenantID, Name, SiteID string
	// HardwareProfile is what its machines take where they name none; empty: none.
	HardwareProfile string
	Created         time.Time
}

// AddSite stores a site; ErrConflict when the tenant has one of that name.
func (s *Store) AddSite(ctx context.Context, site Site) error {
	_, err := s.w.ExecContext(ctx, `INSERT INTO sites (id, tenant_id, name, created_ms) VALUES (?, ?, ?, ?)`,
		site.ID, site.TenantID, site.Name, toMS(site.Created))
	if err != nil {
		return fmt.Errorf("add site %s: %w", site.Name, taken(err))
	}
	return nil
}

const siteColumns = `id, tenant_id, name, created_ms`

func scanSite(row scanner) (Site, error) {
	var site Site
	var created int64
	err := row.Scan(&site.ID, &site.TenantID, &site.Name, &created)
	site.Created = fromMS(created)
	return site, err
}

// Site finds a tenant's site by id or name; an id wins.
func (s *Store) Site(ctx context.Context, tenantID, idOrName string) (Site, error) {
	site, err := scanSite(s.r.QueryRowContext(ctx, `SELECT `+siteColumns+` FROM sites WHERE tenant_id = ?1 AND (id = ?2 OR name = ?2)
		ORDER BY id = ?2 DESC LIMIT 1`, tenantID, idOrName))
	if err != nil {
		return Site{}, fmt.Errorf("site %q: %w", idOrName, one(err))
	}
	return site, nil
}

// Sites lists a tenant's sites by name.
func (s *Store) Sites(ctx context.Context, tenantID string) ([]Site, error) {
	sites, err := list(ctx, s.r, scanSite, `SELECT `+siteColumns+` FROM sites WHERE tenant_id = ? ORDER BY name`, tenantID)
	if err != nil {
		return nil, fmt.Errorf("list sites: %w", err)
	}
	return sites, nil
}

// AddPool stores a pool; ErrConflict when the tenant has one of that name.
func (s *Store) AddPool(ctx context.Context, p Pool) error {
	_, err := s.w.ExecContext(ctx, `INSERT INTO pools (id, tenant_id, name, site_id, created_ms, hardware_profile) VALUES (?, ?, ?, ?, ?, ?)`,
		p.ID, p.TenantID, p.Name, p.SiteID, toMS(p.Created), p.HardwareProfile)
	if err != nil {
		return fmt.Errorf("add pool %s: %w", p.Name, taken(err))
	}
	return nil
}

const poolColumns = `id, tenant_id, name, site_id, created_ms, hardware_profile`

func scanPool(row scanner) (Pool, error) {
	var p Pool
	var created int64
	err := row.Scan(&p.ID, &p.TenantID, &p.Name, &p.SiteID, &created, &p.HardwareProfile)
	p.Created = fromMS(created)
	return p, err
}

// Pool finds a tenant's pool by id or name; an id wins.
func (s *Store) Pool(ctx context.Context, tenantID, idOrName string) (Pool, error) {
	p, err := scanPool(s.r.QueryRowContext(ctx, `SELECT `+poolColumns+` FROM pools WHERE tenant_id = ?1 AND (id = ?2 OR name = ?2)
		ORDER BY id = ?2 DESC LIMIT 1`, tenantID, idOrName))
	if err != nil {
		return Pool{}, fmt.Errorf("pool %q: %w", idOrName, one(err))
	}
	return p, nil
}

// Pools lists a tenant's pools by name.
func (s *Store) Pools(ctx context.Context, tenantID string) ([]Pool, error) {
	pools, err := list(ctx, s.r, scanPool, `SELECT `+poolColumns+` FROM pools WHERE tenant_id = ? ORDER BY name`, tenantID)
	if err != nil {
		return nil, fmt.Errorf("list pools: %w", err)
	}
	return pools, nil
}
