package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
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
	// Loader is the boot program that its UEFI firmware gets; empty: the usual one.
	Loader string
}

// Assignment is a machine's part of its site's pxe.assign snapshot.
type Assignment struct {
	Action            string // "local-disk", "ramdisk", "iso", "kernel" or "uki"
	Purpose, WindowID string
	WindowUntil       time.Time
	Artifacts         []string // hex SHA-256
	Boot              Boot
}

// Boot is what a machine boots from the network beside the ramdisk.
type Boot struct {
	ISO    *BootISO    `json:"iso,omitempty"`
	Kernel *BootKernel `json:"kernel,omitempty"`
	// MaxBoots is how often in the window; 0: the box's own bound.
	MaxBoots uint32 `json:"max_boots,omitempty"`
}

// BootISO is a disc image of the catalog as it was when it was assigned.
type BootISO struct {
	Name      string `json:"name"`
	SHA256    string `json:"sha256"`
	SizeBytes uint64 `json:"size_bytes"`
	Class     int32  `json:"class"`
}

// BootKernel is a kernel or a unified kernel image.
type BootKernel struct {
	SHA256       string `json:"sha256"`
	InitrdSHA256 string `json:"initrd_sha256,omitempty"`
	Cmdline      string `json:"cmdline,omitempty"`
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
			tls_spki_sha256, driver_options, product_uuid, state, created_ms, hardware_profile, drivers, loader) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
			m.ID, m.TenantID, m.Name, m.PoolID, m.SiteID, m.BMC.Driver, m.BMC.Address, m.BMC.CredentialsRef,
			m.BMC.TLSSPKISHA256, m.BMC.DriverOptions, m.ProductUUID, m.State, toMS(m.Created), m.HardwareProfile, drivers, m.Loader)
		if err != nil {
			return taken(err)
		}
		for _, mac := range m.MACs {
			_, err := tx.ExecContext(ctx, `INSERT INTO machine_macs (site_id, mac, machine_id) VALUES (?, ?, ?)`, m.SiteID, mac, m.ID)
			if err != nil {
				return fmt.Errorf("mac %s: %w", mac, taken(err))
			}
			if err := resolve(ctx, tx, m.SiteID, mac); err != nil {
				return err
			}
		}
		if len(m.MACs) == 0 && m.ProductUUID == "" {
			return nil
		}
		// Until its box hears of it, the machine would be inspected as a stranger.
		_, err = tx.ExecContext(ctx, `UPDATE sites SET assign_change = assign_change + 1 WHERE id = ? AND unknown_inspect = 1`, m.SiteID)
		return err
	})
	if err != nil {
		return fmt.Errorf("add machine %s: %w", m.Name, err)
	}
	return nil
}

const machineSelect = `SELECT id, tenant_id, name, pool_id, site_id, driver, address, credentials_ref, tls_spki_sha256, driver_options,
	product_uuid, state, hardware_json, created_ms, action, purpose, window_id, window_until_ms, artifacts, boot, hardware_profile, drivers, protected, loader,
	(SELECT json_group_array(mac) FROM (SELECT mac FROM machine_macs WHERE machine_id = machines.id ORDER BY mac)) FROM machines `

func scanMachine(row scanner) (Machine, error) {
	var m Machine
	var created, until int64
	var artifacts, boot, drivers, macs string
	a := &m.Assignment
	err := row.Scan(&m.ID, &m.TenantID, &m.Name, &m.PoolID, &m.SiteID, &m.BMC.Driver, &m.BMC.Address, &m.BMC.CredentialsRef,
		&m.BMC.TLSSPKISHA256, &m.BMC.DriverOptions, &m.ProductUUID, &m.State, &m.HardwareJSON, &created,
		&a.Action, &a.Purpose, &a.WindowID, &until, &artifacts, &boot, &m.HardwareProfile, &drivers, &m.Protected, &m.Loader, &macs)
	if err == nil {
		err = json.Unmarshal([]byte(artifacts), &a.Artifacts)
	}
	if err == nil && boot != "" {
		err = json.Unmarshal([]byte(boot), &a.Boot)
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

// SetLoader changes the boot program that a machine gets.
func (s *Store) SetLoader(ctx context.Context, machineID, loader string) error {
	if _, err := s.w.ExecContext(ctx, `UPDATE machines SET loader = ? WHERE id = ?`, loader, machineID); err != nil {
		return fmt.Errorf("set the loader of %s: %w", machineID, err)
	}
	return nil
}

// RecordHardware keeps what a machine's ramdisk reported, as JSON.
func (s *Store) RecordHardware(ctx context.Context, machineID, hardware string) error {
	_, err := s.w.ExecContext(ctx, `UPDATE machines SET hardware_json = ? WHERE id = ?`, hardware, machineID)
	if err != nil {
		return fmt.Errorf("record hardware of %s: %w", machineID, err)
	}
	return nil
}

// Snapshot is what a site's box is to boot, as one version.
type Snapshot struct {
	Version  uint64
	Machines []Machine // all of the site's, by id
	Unknown  Unknown
	// Change is how many changes it holds that the box is to hear of by themselves.
	Change int64
}

// nextSnapshot raises the version of a site's snapshot and reads it.
func nextSnapshot(ctx context.Context, tx *sql.Tx, siteID string) (Snapshot, error) {
	var n Snapshot
	var version int64
	row := tx.QueryRowContext(ctx, `UPDATE sites SET assign_version = assign_version + 1 WHERE id = ? RETURNING assign_version, assign_change, `+unknownColumns, siteID)
	err := scanUnknown(row, &n.Unknown, &version, &n.Change)
	if err != nil {
		return Snapshot{}, one(err)
	}
	n.Version = uint64(version)
	n.Machines, err = list(ctx, tx, scanMachine, machineSelect+`WHERE site_id = ? ORDER BY id`, siteID)
	return n, err
}

// Assign sets a machine's part of its site's snapshot and, in the same
// transaction, raises the snapshot's version, hands the snapshot to record, and
// saves the step that record answers.
// So a version exists if and only if the step that carries it is stored.
func (s *Store) Assign(ctx context.Context, siteID, machineID string, a Assignment, record func(Snapshot) (WorkflowStep, error)) error {
	err := s.write(ctx, func(tx *sql.Tx) error {
		artifacts, err := json.Marshal(append([]string{}, a.Artifacts...))
		if err != nil {
			return err
		}
		boot := []byte{}
		if a.Boot != (Boot{}) {
			if boot, err = json.Marshal(a.Boot); err != nil {
				return err
			}
		}
		res, err := tx.ExecContext(ctx, `UPDATE machines SET action = ?, purpose = ?, window_id = ?, window_until_ms = ?, artifacts = ?, boot = ?
			WHERE id = ? AND site_id = ?`, a.Action, a.Purpose, a.WindowID, toMS(a.WindowUntil), string(artifacts), string(boot), machineID, siteID)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n != 1 {
			return fmt.Errorf("machine %s of site %s: %w", machineID, siteID, ErrNotFound)
		}
		snapshot, err := nextSnapshot(ctx, tx, siteID)
		if err != nil {
			return err
		}
		step, err := record(snapshot)
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

// NextSnapshot raises the version of a site's snapshot.
func (s *Store) NextSnapshot(ctx context.Context, siteID string) (Snapshot, error) {
	var n Snapshot
	err := s.write(ctx, func(tx *sql.Tx) (err error) {
		n, err = nextSnapshot(ctx, tx, siteID)
		return err
	})
	if err != nil {
		return Snapshot{}, fmt.Errorf("next snapshot of %s: %w", siteID, err)
	}
	return n, nil
}

// maxHeard bounds how far a box may raise the version: a box that takes its place
// begins at 0, and takes nothing that is more than 2^32 ahead.
const maxHeard = 1 << 31

// HeardAssignVersion raises the version of the site's snapshot to what its box has
// in force: a gateway that was restored is behind. Where the box is behind, since it lost
// its own, it is to hear of it anew, and its site is named. Other agents are not believed.
func (s *Store) HeardAssignVersion(ctx context.Context, agentID string, version uint64) (behind string, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		var siteID string
		var ahead bool
		err := tx.QueryRowContext(ctx, `UPDATE sites SET assign_version = MAX(assign_version, ?1), assign_change = assign_change + (assign_version > ?1)
			WHERE id = (SELECT site_id FROM agents WHERE id = ?2 AND role = ?3) RETURNING id, assign_version > ?1`,
			int64(min(version, maxHeard)), agentID, int32(agentv1.Role_ROLE_SITE)).Scan(&siteID, &ahead)
		if errors.Is(err, sql.ErrNoRows) {
			return nil
		}
		if ahead {
			behind = siteID
		}
		return err
	})
	return behind, err
}

// EndBoots gives all machines of a site back to their own disks in its next snapshot, and
// answers how many might have booted something else. Of each of those there is an event.
func (s *Store) EndBoots(ctx context.Context, siteID, why string) (ended int, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		machines, err := list(ctx, tx, scanMachine, machineSelect+`WHERE site_id = ? AND window_until_ms > ? ORDER BY id`, siteID, s.nowMs())
		if err != nil {
			return err
		}
		for _, m := range machines {
			body, err := json.Marshal(map[string]string{"machine": m.Name, "window": m.Assignment.WindowID, "message": why})
			if err != nil {
				return err
			}
			if err := s.addEvent(ctx, tx, Event{SiteID: siteID, MachineID: m.ID, Name: "machine.window-ended", Class: "audit", Key: m.ID, BodyJSON: string(body)}); err != nil {
				return err
			}
		}
		ended = len(machines)
		_, err = tx.ExecContext(ctx, `UPDATE machines SET action = 'local-disk', purpose = '', window_id = '', window_until_ms = 0,
			artifacts = '[]', boot = '' WHERE site_id = ? AND window_until_ms > 0`, siteID)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("end the boots of %s: %w", siteID, err)
	}
	return ended, nil
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
