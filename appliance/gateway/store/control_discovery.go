package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// Unknown is what a site does with machines that nobody enrolled.
type Unknown struct {
	// Inspect boots them into the ramdisk, for their hardware and no more; else they are left alone.
	Inspect bool
	// Expected are MACs and product UUIDs; if there is any, only these are inspected.
	Expected []string
	// WindowID is the boot window that their vouchers are of, until WindowUntil.
	WindowID    string
	WindowUntil time.Time
}

const unknownColumns = `unknown_inspect, unknown_expected, unknown_window, unknown_until_ms`

// scanUnknown reads a row that ends in unknownColumns.
func scanUnknown(row scanner, u *Unknown, before ...any) error {
	var expected string
	var until int64
	if err := row.Scan(append(before, &u.Inspect, &expected, &u.WindowID, &until)...); err != nil {
		return err
	}
	u.WindowUntil = fromMS(until)
	return json.Unmarshal([]byte(expected), &u.Expected)
}

// Unknown is a site's policy.
func (s *Store) Unknown(ctx context.Context, siteID string) (Unknown, error) {
	var u Unknown
	err := scanUnknown(s.r.QueryRowContext(ctx, `SELECT `+unknownColumns+` FROM sites WHERE id = ?`, siteID), &u)
	if err != nil {
		return Unknown{}, fmt.Errorf("unknown machines of %s: %w", siteID, one(err))
	}
	return u, nil
}

// SetUnknown replaces a site's policy. Its box is to hear of it; where machines
// are left alone now, no voucher of theirs enrols any more.
func (s *Store) SetUnknown(ctx context.Context, siteID string, inspect bool, expected []string) error {
	list, err := json.Marshal(append([]string{}, expected...))
	if err != nil {
		return err
	}
	err = s.write(ctx, func(tx *sql.Tx) error {
		if err := changed(ctx, tx, `UPDATE sites SET unknown_inspect = ?, unknown_expected = ?, assign_change = assign_change + 1 WHERE id = ?`, inspect, string(list), siteID); err != nil || inspect {
			return err
		}
		if _, err := tx.ExecContext(ctx, `UPDATE sites SET unknown_window = '', unknown_until_ms = 0 WHERE id = ?`, siteID); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, `UPDATE windows SET until_ms = min(until_ms, ?) WHERE site_id = ? AND machine_id = ?`, s.nowMs(), siteID, Strangers)
		return err
	})
	if err != nil {
		return fmt.Errorf("set what %s does with unknown machines: %w", siteID, err)
	}
	return nil
}

// changed wants one row to be changed.
func changed(ctx context.Context, tx *sql.Tx, query string, args ...any) error {
	res, err := tx.ExecContext(ctx, query, args...)
	if err != nil {
		return err
	}
	if n, err := res.RowsAffected(); err != nil || n != 1 {
		return errOr(err, ErrNotFound)
	}
	return nil
}

// RollUnknown opens the next window for strangers of a site that inspects them;
// ErrNotFound where it does not. The window before stays open until its own end.
func (s *Store) RollUnknown(ctx context.Context, siteID, windowID string, until time.Time) error {
	err := s.write(ctx, func(tx *sql.Tx) error {
		err := changed(ctx, tx, `UPDATE sites SET unknown_window = ?, unknown_until_ms = ?, assign_change = assign_change + 1 WHERE id = ? AND unknown_inspect = 1`,
			windowID, toMS(until), siteID)
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `INSERT INTO windows (id, site_id, machine_id, purpose, opened_ms, until_ms) VALUES (?, ?, ?, ?, ?, ?)`,
			windowID, siteID, Strangers, StrangersPurpose, s.nowMs(), toMS(until))
		return err
	})
	if err != nil {
		return fmt.Errorf("open a window for the strangers of %s: %w", siteID, err)
	}
	return nil
}

// Untold is how far a site's box is behind the changes that it is to hear of.
type Untold struct {
	SiteID string
	// Changes is how many there were, Told how many the box had that ToldTo names.
	Changes, Told int64
	ToldTo        string
	Unknown       Unknown
}

// Behind says whether the box that has this name lacks something.
func (u Untold) Behind(box string) bool { return u.Told < u.Changes || u.ToldTo != box }

const untoldSelect = `SELECT id, assign_change, assign_told, assign_told_to, ` + unknownColumns + ` FROM sites `

func scanUntold(row scanner) (Untold, error) {
	var u Untold
	err := scanUnknown(row, &u.Unknown, &u.SiteID, &u.Changes, &u.Told, &u.ToldTo)
	return u, err
}

// Untold lists the sites that ever had such a change.
func (s *Store) Untold(ctx context.Context) ([]Untold, error) {
	all, err := list(ctx, s.r, scanUntold, untoldSelect+`WHERE assign_change > 0 ORDER BY id`)
	if err != nil {
		return nil, fmt.Errorf("list sites to be told: %w", err)
	}
	return all, nil
}

// SiteUntold is one site's.
func (s *Store) SiteUntold(ctx context.Context, siteID string) (Untold, error) {
	u, err := scanUntold(s.r.QueryRowContext(ctx, untoldSelect+`WHERE id = ?`, siteID))
	if err != nil {
		return Untold{}, fmt.Errorf("site %s: %w", siteID, one(err))
	}
	return u, nil
}

// Told notes that a box has a snapshot with so many changes.
func (s *Store) Told(ctx context.Context, siteID string, changes int64, box string) error {
	_, err := s.w.ExecContext(ctx, `UPDATE sites SET assign_told = ?, assign_told_to = ? WHERE id = ?`, changes, box, siteID)
	if err != nil {
		return fmt.Errorf("note what the box of %s has: %w", siteID, err)
	}
	return nil
}

// Found is a machine that asked a site's box to boot and is none of the site's. All
// of it is its own word.
type Found struct {
	SiteID, MAC string
	// ProductUUID is what its firmware said over DHCP.
	ProductUUID, Interface, Client, Class, IP string
	First, Seen                               time.Time
	// Inspected is zero before its ramdisk reported Inspection, JSON.
	Inspected  time.Time
	Inspection string
	Rejected   bool
}

const foundSelect = `SELECT site_id, mac, product_uuid, interface, client, class, ip, first_ms, seen_ms, inspected_ms, inspection, rejected_ms > 0 FROM found
	WHERE NOT EXISTS (SELECT 1 FROM machine_macs m WHERE m.site_id = found.site_id AND m.mac = found.mac) `

func scanFound(row scanner) (Found, error) {
	var f Found
	var first, seen, inspected int64
	err := row.Scan(&f.SiteID, &f.MAC, &f.ProductUUID, &f.Interface, &f.Client, &f.Class, &f.IP, &first, &seen, &inspected, &f.Inspection, &f.Rejected)
	f.First, f.Seen, f.Inspected = fromMS(first), fromMS(seen), fromMS(inspected)
	return f, err
}

// FoundAt lists what a site's box has found, by MAC.
func (s *Store) FoundAt(ctx context.Context, siteID string) ([]Found, error) {
	all, err := list(ctx, s.r, scanFound, foundSelect+`AND site_id = ? ORDER BY mac`, siteID)
	if err != nil {
		return nil, fmt.Errorf("list found machines: %w", err)
	}
	return all, nil
}

// FoundSites are the tenant's sites that have found a MAC.
func (s *Store) FoundSites(ctx context.Context, tenantID, mac string) ([]string, error) {
	text := func(row scanner) (string, error) { var id string; return id, row.Scan(&id) }
	sites, err := list(ctx, s.r, text, `SELECT f.site_id FROM found f JOIN sites ON sites.id = f.site_id WHERE sites.tenant_id = ? AND f.mac = ? ORDER BY f.site_id`, tenantID, mac)
	if err != nil {
		return nil, fmt.Errorf("find MAC %s: %w", mac, err)
	}
	return sites, nil
}

// Saw notes a machine that asked to boot, if it is none of the site's. Where as
// many as are kept are known, the one gives way that was heard of longest ago and
// never inspected; where all were inspected, ErrFull.
func (s *Store) Saw(ctx context.Context, f Found) error {
	return s.saw(ctx, f.SiteID, f.MAC, `inspected_ms = 0`, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO found (site_id, mac, product_uuid, interface, client, class, ip, first_ms, seen_ms) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?8)
			ON CONFLICT (site_id, mac) DO UPDATE SET interface = excluded.interface, client = excluded.client, class = excluded.class, ip = excluded.ip,
			product_uuid = CASE excluded.product_uuid WHEN '' THEN product_uuid ELSE excluded.product_uuid END, seen_ms = excluded.seen_ms`,
			f.SiteID, f.MAC, f.ProductUUID, f.Interface, f.Client, f.Class, f.IP, s.nowMs())
		return err
	})
}

// SawHardware notes what a found machine's ramdisk reported. It always finds a
// place: what was inspected longest ago gives way last.
func (s *Store) SawHardware(ctx context.Context, siteID, mac, inspection string) error {
	return s.saw(ctx, siteID, mac, `1`, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO found (site_id, mac, first_ms, seen_ms, inspected_ms, inspection) VALUES (?1, ?2, ?3, ?3, ?3, ?4)
			ON CONFLICT (site_id, mac) DO UPDATE SET seen_ms = excluded.seen_ms, inspected_ms = excluded.inspected_ms, inspection = excluded.inspection`,
			siteID, mac, s.nowMs(), inspection)
		return err
	})
}

func (s *Store) saw(ctx context.Context, siteID, mac, gives string, note func(tx *sql.Tx) error) error {
	err := s.write(ctx, func(tx *sql.Tx) error {
		var known, others int
		err := tx.QueryRowContext(ctx, `SELECT (SELECT count(*) FROM machine_macs WHERE site_id = ?1 AND mac = ?2), (SELECT count(*) FROM found WHERE site_id = ?1 AND mac <> ?2)
			FROM sites WHERE id = ?1`, siteID, mac).Scan(&known, &others)
		if err != nil || known > 0 {
			return one(err)
		}
		if others >= MaxFound {
			err := changed(ctx, tx, `DELETE FROM found WHERE site_id = ?1 AND mac = (SELECT mac FROM found WHERE site_id = ?1 AND mac <> ?2 AND `+gives+`
				ORDER BY inspected_ms > 0, seen_ms LIMIT 1)`, siteID, mac)
			if errors.Is(err, ErrNotFound) {
				return ErrFull
			}
			if err != nil {
				return err
			}
		}
		return note(tx)
	})
	if err != nil {
		return fmt.Errorf("note found machine %s: %w", mac, err)
	}
	return nil
}

// RejectFound keeps a found machine out of sight.
func (s *Store) RejectFound(ctx context.Context, siteID, mac string) error {
	err := s.write(ctx, func(tx *sql.Tx) error {
		return changed(ctx, tx, `UPDATE found SET rejected_ms = ? WHERE site_id = ? AND mac = ?`, s.nowMs(), siteID, mac)
	})
	if err != nil {
		return fmt.Errorf("found machine %s: %w", mac, err)
	}
	return nil
}

// PruneFound forgets what was not seen since t.
func (s *Store) PruneFound(ctx context.Context, t time.Time) error {
	_, err := s.w.ExecContext(ctx, `DELETE FROM found WHERE seen_ms < ?`, toMS(t))
	return err
}

// resolve ends what was found of a MAC: it is a machine's now.
func resolve(ctx context.Context, tx *sql.Tx, siteID, mac string) error {
	_, err := tx.ExecContext(ctx, `DELETE FROM found WHERE site_id = ? AND mac = ?`, siteID, mac)
	return err
}

// MachineOfMAC is the tenant's machine that has a MAC.
func (s *Store) MachineOfMAC(ctx context.Context, tenantID, mac string) (Machine, error) {
	m, err := scanMachine(s.r.QueryRowContext(ctx, machineSelect+`WHERE tenant_id = ?1 AND id IN (SELECT machine_id FROM machine_macs WHERE mac = ?2) ORDER BY id LIMIT 1`, tenantID, mac))
	if err != nil {
		return Machine{}, fmt.Errorf("MAC %s: %w", mac, one(err))
	}
	return m, nil
}

// AddMAC gives a machine one more MAC to boot by, ends what was found of it, and
// has the site's box hear of it. ErrConflict where another machine of the site
// has the MAC; ErrFull where the machine has most already; may's error where the
// machine's assignment as it is then forbids it (nil: none does).
func (s *Store) AddMAC(ctx context.Context, machineID, mac string, most int, may func(Assignment) error) error {
	err := s.write(ctx, func(tx *sql.Tx) error {
		var siteID string
		var has, others int
		err := tx.QueryRowContext(ctx, `SELECT site_id, (SELECT count(*) FROM machine_macs WHERE machine_id = ?1 AND mac = ?2), (SELECT count(*) FROM machine_macs WHERE machine_id = ?1 AND mac <> ?2)
			FROM machines WHERE id = ?1`, machineID, mac).Scan(&siteID, &has, &others)
		switch {
		case err != nil:
			return one(err)
		case has > 0:
			return resolve(ctx, tx, siteID, mac)
		case others >= most:
			return ErrFull
		}
		if may != nil {
			m, err := scanMachine(tx.QueryRowContext(ctx, machineSelect+`WHERE id = ?`, machineID))
			if err == nil {
				err = may(m.Assignment)
			}
			if err != nil {
				return err
			}
		}
		if _, err := tx.ExecContext(ctx, `INSERT INTO machine_macs (site_id, mac, machine_id) VALUES (?, ?, ?)`, siteID, mac, machineID); err != nil {
			return taken(err)
		}
		if err := resolve(ctx, tx, siteID, mac); err != nil {
			return err
		}
		return changed(ctx, tx, `UPDATE sites SET assign_change = assign_change + 1 WHERE id = ?`, siteID)
	})
	if err != nil {
		return fmt.Errorf("add MAC %s to %s: %w", mac, machineID, err)
	}
	return nil
}
