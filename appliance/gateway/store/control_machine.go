package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/plugins/driver/binding"
)

// BMC is how a machine's management controller is reached. The credential is
// a reference.
type BMC struct {
	Driver, Address, CredentialsRef, TLSSPKISHA256, DriverOptions string
}

// Machine is a bare-metal machine of a pool.
type Machine struct {
	ID, TenantID, Name, PoolID, SiteID string
	BMC                                BMC
	MACs                               []string // lower-case, colon-separated, sorted
	ProductUUID                        string
	State                              string
	HardwareJSON                       string
	Created                            time.Time
	Assignment                         Assignment
	// Drivers are the machine's bindings by kind; HardwareProfile is where they
	// partly came from, or empty.
	Drivers         map[string]binding.Binding
	HardwareProfile string
	// Protected machines need people's grants for all that is destructive.
	Protected bool
}

// Assignment is a machine's part of its site's pxe.assign snapshot.
type Assignment struct {
	Action            string // "local-disk" or "ramdisk"
	Purpose, WindowID string
	WindowUntil       time.Time
	Artifacts         []string // hex SHA-256
}

// AddMachine stores a machine; ErrConflict when the tenant has one of that
// name, or the site has one with one of its MACs.
func (s *Store) AddMachine(ctx context.Context, m Machine) error {
	err := s.write(ctx, func(tx *sql.Tx) error {
		drivers, err := encodeBindings(m.Drivers)
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `INSERT INTO machines (id, tenant_id, name, pool_id, site_id, driver, address, credentials_ref,
			tls_spki_sha256, driver_options, product_uuid, state, created_ms, hardware_profile, drivers) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
			m.ID, m.TenantID, m.Name, m.PoolID, m.SiteID, m.BMC.Driver, m.BMC.Address, m.BMC.CredentialsRef,
			m.BMC.TLSSPKISHA256, m.BMC.DriverOptions, m.ProductUUID, m.State, toMS(m.Created), m.HardwareProfile, drivers)
		if err != nil {
			return taken(err)
		}
		for _, mac := range m.MACs {
			_, err := tx.ExecContext(ctx, `INSERT INTO machine_macs (site_id, mac, machine_id) VALUES (?, ?, ?)`, m.SiteID, mac, m.ID)
			if err != nil {
				return fmt.Errorf("mac %s: %w", mac, taken(err))
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("add machine %s: %w", m.Name, err)
	}
	return nil
}

const machineSelect = `SELECT id, tenant_id, name, pool_id, site_id, driver, address, credentials_ref, tls_spki_sha256, driver_options,
	product_uuid, state, hardware_json, created_ms, action, purpose, window_id, window_until_ms, artifacts, hardware_profile, drivers, protected,
	(SELECT json_group_array(mac) FROM (SELECT mac FROM machine_macs WHERE machine_id = machines.id ORDER BY mac)) FROM machines `

func scanMachine(row scanner) (Machine, error) {
	var m Machine
	var created, until int64
	var artifacts, drivers, macs string
	a := &m.Assignment
	err := row.Scan(&m.ID, &m.TenantID, &m.Name, &m.PoolID, &m.SiteID, &m.BMC.Driver, &m.BMC.Address, &m.BMC.CredentialsRef,
		&m.BMC.TLSSPKISHA256, &m.BMC.DriverOptions, &m.ProductUUID, &m.State, &m.HardwareJSON, &created,
		&a.Action, &a.Purpose, &a.WindowID, &until, &artifacts, &m.HardwareProfile, &drivers, &m.Protected, &macs)
	if err == nil {
		err = json.Unmarshal([]byte(artifacts), &a.Artifacts)
	}
	if err == nil {
		err = json.Unmarshal([]byte(macs), &m.MACs)
	}
	if err == nil {
		m.Drivers, err = decodeBindings(drivers)
	}
	m.Created, a.WindowUntil = fromMS(created), fromMS(until)
	return m, err
}

// Machine finds a tenant's machine by id or name; an id wins.
func (s *Store) Machine(ctx context.Context, tenantID, idOrName string) (Machine, error) {
	m, err := scanMachine(s.r.QueryRowContext(ctx, machineSelect+`WHERE tenant_id = ?1 AND (id = ?2 OR name = ?2)
		ORDER BY id = ?2 DESC LIMIT 1`, tenantID, idOrName))
	if err != nil {
		return Machine{}, fmt.Errorf("machine %q: %w", idOrName, one(err))
	}
	return m, nil
}

// Machines lists a tenant's machines by name.
func (s *Store) Machines(ctx context.Context, tenantID string) ([]Machine, error) {
	machines, err := list(ctx, s.r, scanMachine, machineSelect+`WHERE tenant_id = ? ORDER BY name`, tenantID)
	if err != nil {
		return nil, fmt.Errorf("list machines: %w", err)
	}
	return machines, nil
}

// RecordHardware keeps what a machine's ramdisk reported, as JSON.
func (s *Store) RecordHardware(ctx context.Context, machineID, hardware string) error {
	_, err := s.w.ExecContext(ctx, `UPDATE machines SET hardware_json = ? WHERE id = ?`, hardware, machineID)
	if err != nil {
		return fmt.Errorf("record hardware of %s: %w", machineID, err)
	}
	return nil
}

// Assign sets a machine's part of its site's snapshot and, in the same
// transaction, raises the snapshot's version, hands version and machines (all
// of the site's, by id) to record, and saves the step that record answers.
// So a version exists if and only if the step that carries it is stored.
func (s *Store) Assign(ctx context.Context, siteID, machineID string, a Assignment, record func(version uint64, machines []Machine) (WorkflowStep, error)) error {
	err := s.write(ctx, func(tx *sql.Tx) error {
		artifacts, err := json.Marshal(append([]string{}, a.Artifacts...))
		if err != nil {
			return err
		}
		res, err := tx.ExecContext(ctx, `UPDATE machines SET action = ?, purpose = ?, window_id = ?, window_until_ms = ?, artifacts = ?
			WHERE id = ? AND site_id = ?`, a.Action, a.Purpose, a.WindowID, toMS(a.WindowUntil), string(artifacts), machineID, siteID)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n != 1 {
			return fmt.Errorf("machine %s of site %s: %w", machineID, siteID, ErrNotFound)
		}
		var version int64
		err = tx.QueryRowContext(ctx, `UPDATE sites SET assign_version = assign_version + 1 WHERE id = ? RETURNING assign_version`, siteID).Scan(&version)
		if err != nil {
			return one(err)
		}
		machines, err := list(ctx, tx, scanMachine, machineSelect+`WHERE site_id = ? ORDER BY id`, siteID)
		if err != nil {
			return err
		}
		step, err := record(uint64(version), machines)
		if err != nil {
			return err
		}
		return saveStep(ctx, tx, step)
	})
	if err != nil {
		return fmt.Errorf("assign %s: %w", machineID, err)
	}
	return nil
}

// NextSnapshot raises the version of a site's snapshot and lists the site's
// machines, by id, as they are in it.
func (s *Store) NextSnapshot(ctx context.Context, siteID string) (version uint64, machines []Machine, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		var v int64
		if err := tx.QueryRowContext(ctx, `UPDATE sites SET assign_version = assign_version + 1 WHERE id = ? RETURNING assign_version`, siteID).Scan(&v); err != nil {
			return one(err)
		}
		version = uint64(v)
		machines, err = list(ctx, tx, scanMachine, machineSelect+`WHERE site_id = ? ORDER BY id`, siteID)
		return err
	})
	if err != nil {
		return 0, nil, fmt.Errorf("next snapshot of %s: %w", siteID, err)
	}
	return version, machines, nil
}

// maxHeard bounds how far a box may raise the version: a box that takes its place
// begins at 0, and takes nothing that is more than 2^32 ahead.
const maxHeard = 1 << 31

// HeardAssignVersion raises the version of the site's snapshot to what its box has
// in force: a gateway that was restored is behind. Other agents are not believed.
func (s *Store) HeardAssignVersion(ctx context.Context, agentID string, version uint64) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `UPDATE sites SET assign_version = MAX(assign_version, ?1)
			WHERE id = (SELECT site_id FROM agents WHERE id = ?2 AND role = ?3)`,
			int64(min(version, maxHeard)), agentID, int32(agentv1.Role_ROLE_SITE))
		return err
	})
}

// AssignVersion is the version of a site's latest snapshot; 0 before the first.
func (s *Store) AssignVersion(ctx context.Context, siteID string) (uint64, error) {
	var version int64
	err := s.r.QueryRowContext(ctx, `SELECT assign_version FROM sites WHERE id = ?`, siteID).Scan(&version)
	if err != nil {
		return 0, fmt.Errorf("assign version of %s: %w", siteID, one(err))
	}
	return uint64(version), nil
}
