package store

import (
	"context"
	"database/sql"
	"encoding/hex"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/pxe/mandate"
)

// Strangers stands in a boot window for every machine that nobody enrolled.
const Strangers = mandate.StrangerPrefix + "*"

// StrangersPurpose is all that such a machine boots for.
const StrangersPurpose = "inspect"

// StrangerMAC is the MAC by which the machine of this id booted; ok is false for
// every id that is not exactly that of a stranger. No enrolled machine has such an id.
func StrangerMAC(machineID string) (mac string, ok bool) {
	digits, found := strings.CutPrefix(machineID, mandate.StrangerPrefix)
	raw, err := hex.DecodeString(digits)
	if !found || err != nil || len(raw) != 6 || digits != strings.ToLower(digits) || raw[0]&1 != 0 || string(raw) == "\x00\x00\x00\x00\x00\x00" {
		return "", false
	}
	return net.HardwareAddr(raw).String(), true
}

// IsStranger says whether an agent stands for a machine that nobody enrolled.
func (a Agent) IsStranger() bool {
	_, ok := StrangerMAC(a.MachineID)
	return ok
}

// HardwareEvent carries what a ramdisk found its machine to be.
const HardwareEvent = "machine.hardware"

// Bounds of what machines that nobody enrolled leave here, for each site.
const (
	// MaxStrangers identities of them are good at once.
	MaxStrangers = 1024
	// MaxFound are remembered.
	MaxFound = 1024
	// MaxStrangerHardware is the largest report that is kept.
	MaxStrangerHardware = 64 << 10
)

// Strangers counts the identities of a site's strangers beside that of one machine.
func (s *Store) Strangers(ctx context.Context, siteID, besides string) (int, error) {
	var n int
	err := s.r.QueryRowContext(ctx, `SELECT count(*) FROM agents WHERE site_id = ? AND role = ? AND state = ? AND machine_id GLOB ? AND machine_id <> ?`,
		siteID, int32(agentv1.Role_ROLE_RAMDISK), string(AgentActive), Strangers, besides).Scan(&n)
	if err != nil {
		return 0, fmt.Errorf("count the strangers of %s: %w", siteID, err)
	}
	return n, nil
}

// EndStrangers forgets the strangers' identities whose boot window is over, and
// answers their ids. Windows that ended before old are forgotten too.
func (s *Store) EndStrangers(ctx context.Context, old time.Time) (ended []string, err error) {
	const over = `IN (SELECT id FROM windows WHERE machine_id = ? AND until_ms <= ?)`
	err = s.write(ctx, func(tx *sql.Tx) error {
		text := func(row scanner) (string, error) { var id string; return id, row.Scan(&id) }
		now := s.nowMs()
		ended, err = list(ctx, tx, text, `SELECT id FROM agents WHERE machine_id GLOB ? AND window_id `+over, Strangers, Strangers, now)
		if err != nil {
			return err
		}
		for _, id := range ended {
			for _, query := range []string{
				`DELETE FROM agent_labels WHERE agent_id = ?`, `DELETE FROM agent_boots WHERE agent_id = ?`,
				`DELETE FROM certificates WHERE agent_id = ?`, `DELETE FROM events WHERE agent_id = ? AND name = '` + HardwareEvent + `'`,
				`DELETE FROM agents WHERE id = ?`,
			} {
				if _, err := tx.ExecContext(ctx, query, id); err != nil {
					return err
				}
			}
		}
		if _, err := tx.ExecContext(ctx, `DELETE FROM vouchers WHERE window_id `+over, Strangers, now); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, `DELETE FROM windows WHERE machine_id = ? AND until_ms <= ?`, Strangers, toMS(old))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("end strangers: %w", err)
	}
	return ended, nil
}
