package store

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

func openTest(t *testing.T) *Store {
	t.Helper()
	s, err := Open(filepath.Join(t.TempDir(), "gateway.db"), time.Now)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func TestOpenTwice(t *testing.T) {
	path := filepath.Join(t.TempDir(), "gateway.db")
	for range 2 {
		s, err := Open(path, time.Now)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.PutSecret(t.Context(), "secret://t/n", []byte("sealed")); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode of the database = %v, %v, want 0600", st.Mode(), err)
	}
}

func file(sql string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(sql)} }

func TestMigrations(t *testing.T) {
	path := filepath.Join(t.TempDir(), "gateway.db")
	one := fstest.MapFS{"migrations/0001_a.sql": file(`CREATE TABLE a (x); INSERT INTO a VALUES (1);`)}
	two := fstest.MapFS{"migrations/0001_a.sql": one["migrations/0001_a.sql"], "migrations/0002_b.sql": file(`ALTER TABLE a ADD COLUMN y;`)}
	broken := fstest.MapFS{"migrations/0001_a.sql": one["migrations/0001_a.sql"], "migrations/0002_b.sql": file(`ALTER TABLE a ADD COLUMN y; CREATE TABLE a (z);`)}
	for _, step := range []struct {
		name  string
		files fs.FS
		want  string // part of the error
	}{
		{"first", one, ""},
		{"broken", broken, "0002_b.sql"},
		{"after the broken one was rolled back", two, ""},
		{"again", two, ""},
		{"older program", one, "newer"},
	} {
		s, err := open(path, time.Now, step.files)
		if err == nil {
			err = s.Close()
		}
		if (err == nil) != (step.want == "") || err != nil && !strings.Contains(err.Error(), step.want) {
			t.Errorf("%s: open = %v, want %q", step.name, err, step.want)
		}
	}
	for name, files := range map[string]fstest.MapFS{
		"gap":        {"migrations/0001_a.sql": file(""), "migrations/0003_b.sql": file("")},
		"no number":  {"migrations/a.sql": file("")},
		"twice":      {"migrations/0001_a.sql": file(""), "migrations/0001_b.sql": file("")},
		"from zero":  {"migrations/0000_a.sql": file("")},
		"short form": {"migrations/1_a.sql": file("")},
	} {
		if got, err := readMigrations(files); err == nil {
			t.Errorf("%s: readMigrations = %v, want an error", name, got)
		}
	}
}

func TestNewIDSortsByTime(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	s, err := Open(filepath.Join(t.TempDir(), "gateway.db"), func() time.Time { now = now.Add(time.Millisecond); return now })
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	last := ""
	for range 100 {
		id := s.NewID("cmd")
		if id <= last || !strings.HasPrefix(id, "cmd_") || len(id) != 30 || strings.ToLower(id) != id {
			t.Fatalf("NewID = %q after %q", id, last)
		}
		last = id
	}
}

func testAgent(t *testing.T, s *Store, id string) Agent {
	t.Helper()
	token := Token{Hash: [32]byte([]byte(id + strings.Repeat("-", 32-len(id)))), Role: agentv1.Role_ROLE_SITE, SiteID: "site_" + id, Expires: time.Now().Add(time.Hour)}
	if err := s.AddToken(t.Context(), token); err != nil {
		t.Fatal(err)
	}
	e, err := s.Enrol(t.Context(), Enrolment{Token: &token, Agent: Agent{ID: id, Role: token.Role, SiteID: token.SiteID}, Certificate: Certificate{Fingerprint: token.Hash, AgentID: id, CSRHash: token.Hash, DER: []byte("der")}})
	if err != nil {
		t.Fatal(err)
	}
	return e.Agent
}

func TestCommandMovesForwardOnly(t *testing.T) {
	s := openTest(t)
	a := testAgent(t, s, "ag_1")
	ctx := t.Context()
	c := Command{ID: "cmd_1", AgentID: a.ID, Kind: "bmc.power", Lane: "power", SpecHash: []byte("x"), Issued: time.Now(), NotAfter: time.Now().Add(time.Minute), Signed: &agentv1.SignedCommand{Payload: []byte("p"), KeyId: "k", Signature: []byte("s")}}
	if added, err := s.AddCommand(ctx, c); err != nil || !added {
		t.Fatalf("AddCommand = %v, %v", added, err)
	}
	if added, err := s.AddCommand(ctx, c); err != nil || added {
		t.Errorf("AddCommand(same) = %v, %v, want no row and no error", added, err)
	}
	c.SpecHash = []byte("y")
	if _, err := s.AddCommand(ctx, c); !errors.Is(err, ErrConflict) {
		t.Errorf("AddCommand(other content) = %v, want ErrConflict", err)
	}
	for _, step := range []struct {
		what string
		do   func() error
		ok   bool
	}{
		{"another agent acks", func() error { return s.CommandMoved(ctx, "ag_2", c.ID, CommandReceived) }, false},
		{"another agent finishes", func() error { return s.FinishCommand(ctx, "ag_2", c.ID, nil, nil) }, false},
		{"resign", func() error { return s.Resign(ctx, c.ID, "j", c.Signed) }, true},
		{"sent", func() error { return s.CommandMoved(ctx, a.ID, c.ID, CommandSent) }, true},
		{"resign after sent", func() error { return s.Resign(ctx, c.ID, "j", c.Signed) }, false},
		{"expire after sent", func() error { return s.FinishQueued(ctx, c.ID, errs.New(errs.Expired, "")) }, false},
		{"received", func() error { return s.CommandMoved(ctx, a.ID, c.ID, CommandReceived) }, true},
		{"back to sent", func() error { return s.CommandMoved(ctx, a.ID, c.ID, CommandSent) }, false},
		{"cancel", func() error { return s.CancelCommand(ctx, c.ID) }, true},
		{"done", func() error { return s.FinishCommand(ctx, a.ID, c.ID, []byte("r"), nil) }, true},
		{"done again", func() error { return s.FinishCommand(ctx, a.ID, c.ID, nil, errs.New(errs.Internal, "")) }, false},
		{"received after done", func() error { return s.CommandMoved(ctx, a.ID, c.ID, CommandReceived) }, false},
		{"cancel after done", func() error { return s.CancelCommand(ctx, c.ID) }, false},
	} {
		if err := step.do(); (err == nil) != step.ok || err != nil && !errors.Is(err, ErrConflict) {
			t.Errorf("%s = %v, want allowed %v", step.what, err, step.ok)
		}
	}
	got, err := s.Command(ctx, c.ID)
	if err != nil || got.State != CommandDone || string(got.Result) != "r" || got.Err != nil || !got.Cancel {
		t.Errorf("command = %+v, %v", got, err)
	}
	c.ID, c.SpecHash = "cmd_open", []byte("z")
	if _, err := s.AddCommand(ctx, c); err != nil {
		t.Fatal(err)
	}
	if n, err := s.PruneCommands(ctx, time.Now().Add(-time.Hour)); err != nil || n != 0 {
		t.Errorf("PruneCommands(an hour ago) = %d, %v, want 0", n, err)
	}
	if n, err := s.PruneCommands(ctx, time.Now().Add(time.Hour)); err != nil || n != 1 {
		t.Errorf("PruneCommands(later) = %d, %v, want the done one", n, err)
	}
	if _, err := s.Command(ctx, c.ID); err != nil {
		t.Errorf("the open command after PruneCommands: %v", err)
	}
}

func TestPruneKeepsAudit(t *testing.T) {
	s := openTest(t)
	for _, class := range []string{"telemetry", "state", "audit"} {
		if err := s.AddEvent(t.Context(), Event{Name: "x.done", Class: class, SiteID: "site_1"}); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := s.PruneEvents(t.Context(), time.Now().Add(-time.Hour)); err != nil || n != 0 {
		t.Errorf("PruneEvents(an hour ago) = %d, %v, want 0", n, err)
	}
	if n, err := s.PruneEvents(t.Context(), time.Now().Add(time.Hour)); err != nil || n != 2 {
		t.Errorf("PruneEvents(later) = %d, %v, want 2", n, err)
	}
	events, err := s.Events(t.Context(), EventFilter{})
	if err != nil || len(events) != 1 || events[0].Class != "audit" {
		t.Errorf("events = %+v, %v, want the audit one", events, err)
	}
}

// TestConcurrentUse is about SQLITE_BUSY, which must never reach a caller.
func TestConcurrentUse(t *testing.T) {
	s := openTest(t)
	a := testAgent(t, s, "ag_1")
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 20 {
				if err := errors.Join(s.AddEvent(context.Background(), Event{Name: "x.done", Class: "state"}), s.Seen(context.Background(), a.ID)); err != nil {
					t.Error(err)
				}
				if _, err := s.Agents(context.Background(), AgentFilter{}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}
