// Package store keeps the gateway's state in one SQLite file and is the only
// package that speaks SQL.
package store

import (
	"context"
	"crypto/rand"
	"database/sql"
	"embed"
	"encoding/base32"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	_ "modernc.org/sqlite" // the driver that sql.Open names
)

//go:embed migrations/*.sql
var migrations embed.FS

// ErrNotFound says that there is no such row.
var ErrNotFound = errors.New("not found")

// ErrConflict says that a row with this identity is there with other content.
var ErrConflict = errors.New("conflict")

// Store is safe for concurrent use. Every change is on disk when its method returns.
type Store struct {
	w   *sql.DB // one connection: SQLite has one writer, and waiting here is fair
	r   *sql.DB
	now func() time.Time
}

// Open opens or creates the file and brings its schema up to date. now is
// time.Now outside of tests.
func Open(path string, now func() time.Time) (*Store, error) {
	s, err := open(path, now, migrations)
	if err != nil {
		return nil, fmt.Errorf("open store %s: %w", path, err)
	}
	return s, nil
}

func open(path string, now func() time.Time, files fs.FS) (*Store, error) {
	// Created here so that the file is never readable by others, not even for a moment.
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := f.Close(); err != nil {
		return nil, err
	}
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	dsn := func(extra ...string) string {
		q := url.Values{"_pragma": append([]string{"busy_timeout(10000)", "foreign_keys(1)"}, extra...)}
		q.Set("_txlock", "immediate")
		return (&url.URL{Scheme: "file", Path: abs, RawQuery: q.Encode()}).String()
	}
	w, err := sql.Open("sqlite", dsn("journal_mode(WAL)", "synchronous(FULL)"))
	if err != nil {
		return nil, err
	}
	w.SetMaxOpenConns(1)
	if err := migrate(w, files, now); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	r, err := sql.Open("sqlite", dsn("query_only(1)"))
	if err != nil {
		return nil, errors.Join(err, w.Close())
	}
	r.SetMaxOpenConns(4)
	return &Store{w: w, r: r, now: now}, nil
}

// Close ends all use.
func (s *Store) Close() error { return errors.Join(s.r.Close(), s.w.Close()) }

// Now is the store's clock.
func (s *Store) Now() time.Time { return s.now() }

// nowMs is the store's clock as rows keep it.
func (s *Store) nowMs() int64 { return s.now().UnixMilli() }

// write runs f in a transaction of the one writer; an error rolls it back.
func (s *Store) write(ctx context.Context, f func(tx *sql.Tx) error) error {
	tx, err := s.w.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := f(tx); err != nil {
		return err
	}
	return tx.Commit()
}

// one turns "no row" into ErrNotFound.
func one(err error) error {
	if errors.Is(err, sql.ErrNoRows) {
		return ErrNotFound
	}
	return err
}

// querier is a transaction or the pool of readers.
type querier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// scanner is a row or rows at a row.
type scanner interface{ Scan(dest ...any) error }

// list collects what scan makes of each row.
func list[T any](ctx context.Context, q querier, scan func(scanner) (T, error), query string, args ...any) ([]T, error) {
	rows, err := q.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var items []T
	for rows.Next() {
		item, err := scan(rows)
		if err != nil {
			return nil, err
		}
		items = append(items, item)
	}
	return items, rows.Err()
}

var idEncoding = base32.NewEncoding("0123456789abcdefghjkmnpqrstvwxyz").WithPadding(base32.NoPadding)

// NewID makes an identifier: prefix, "_", and 26 lower-case characters that sort by time.
func (s *Store) NewID(prefix string) string {
	var raw [16]byte
	binary.BigEndian.PutUint64(raw[:8], uint64(s.nowMs())<<16)
	rand.Read(raw[6:])
	return prefix + "_" + idEncoding.EncodeToString(raw[:])
}

// migration is one numbered file of SQL.
type migration struct {
	version int
	name    string
	sql     string
}

// readMigrations wants files named NNNN_what.sql, numbered from 1 without a gap.
func readMigrations(files fs.FS) ([]migration, error) {
	names, err := fs.Glob(files, "migrations/*.sql")
	if err != nil {
		return nil, err
	}
	var all []migration
	for i, name := range names { // Glob sorts
		base := filepath.Base(name)
		number, _, ok := strings.Cut(base, "_")
		version, err := strconv.Atoi(number)
		if !ok || err != nil || len(number) != 4 || version != i+1 {
			return nil, fmt.Errorf("migration %s: want number %04d", base, i+1)
		}
		text, err := fs.ReadFile(files, name)
		if err != nil {
			return nil, err
		}
		all = append(all, migration{version, base, string(text)})
	}
	return all, nil
}

// migrate applies what is missing, each file in its own transaction, and
// refuses a file that a newer program made.
func migrate(db *sql.DB, files fs.FS, now func() time.Time) error {
	all, err := readMigrations(files)
	if err != nil {
		return err
	}
	if _, err := db.Exec(`CREATE TABLE IF NOT EXISTS schema_version (version INTEGER PRIMARY KEY, applied_ms INTEGER NOT NULL) STRICT`); err != nil {
		return err
	}
	for {
		done, err := migrateOne(db, all, now)
		if err != nil || done {
			return err
		}
	}
}

func migrateOne(db *sql.DB, all []migration, now func() time.Time) (done bool, err error) {
	tx, err := db.Begin()
	if err != nil {
		return false, err
	}
	defer tx.Rollback()
	// Read inside the transaction: another process may be migrating too.
	var have int
	if err := tx.QueryRow(`SELECT coalesce(max(version), 0) FROM schema_version`).Scan(&have); err != nil {
		return false, err
	}
	if have > len(all) {
		return false, fmt.Errorf("schema version %d is newer than this program's %d: use the program that wrote it", have, len(all))
	}
	if have == len(all) {
		return true, nil
	}
	m := all[have]
	if _, err := tx.Exec(m.sql); err != nil {
		return false, fmt.Errorf("migration %s: %w", m.name, err)
	}
	if _, err := tx.Exec(`INSERT INTO schema_version (version, applied_ms) VALUES (?, ?)`, m.version, now().UnixMilli()); err != nil {
		return false, fmt.Errorf("migration %s: %w", m.name, err)
	}
	return false, tx.Commit()
}
