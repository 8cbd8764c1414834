package pxe

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/pxe/assign"
	"github.com/better-compute/site-appliance/pxe/boots"
	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// TestNoSecondInstallation: a box whose boot decisions were lost, and that is sent the
// same window anew, gives a machine that has had its boots its disk, whatever was damaged
// with them; the next window is a new one.
func TestNoSecondInstallation(t *testing.T) {
	const machine, mac = "node_1", "52:54:00:00:00:01"
	snapshot := func(version uint64, window string) *pxev1.AssignRequest {
		return &pxev1.AssignRequest{Version: version, Machines: []*pxev1.Machine{{
			MachineId: machine, Macs: []string{mac}, Action: pxev1.Action_ACTION_RAMDISK, Purpose: "deploy", WindowId: window, WindowUntilMs: time.Now().Add(time.Hour).UnixMilli(), MaxBoots: 1,
		}}}
	}
	for _, tt := range []struct {
		name          string
		booted, done  bool
		lose          []string // files that are damaged
		missing       bool     // the decisions' file is gone instead
		first, second decide.Action
	}{
		{name: "booted", booted: true, first: decide.LocalDisk, second: decide.RunAgent},
		{name: "booted and done", booted: true, done: true, first: decide.LocalDisk, second: decide.RunAgent},
		{name: "missing", booted: true, missing: true, first: decide.LocalDisk, second: decide.RunAgent},
		{name: "its count is damaged too", booted: true, lose: []string{machine + ".boots"}, first: decide.LocalDisk, second: decide.RunAgent},
		{name: "not booted", first: decide.RunAgent, second: decide.RunAgent},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, "assignments.json")
			must := func(err error) {
				t.Helper()
				if err != nil {
					t.Fatal(err)
				}
			}
			var s *server
			box := func() {
				t.Helper()
				decisions, err := assign.Open(file)
				must(err)
				counts, err := boots.Open(filepath.Join(dir, "boots"), func(m string) (string, bool) {
					if decisions.Version() == 0 {
						return boots.AnyWindow, true
					}
					return decisions.Window(m)
				})
				must(err)
				s = &server{Config: Config{Assign: decisions, Counts: counts, Heard: new(Heard), Now: time.Now, Log: slog.New(slog.DiscardHandler)}}
			}
			// follow takes up what is in force, and ends.
			follow := func() {
				t.Helper()
				over, cancel := context.WithCancel(t.Context())
				cancel()
				must(s.follow(over))
			}
			gets := func(when string, want decide.Action) {
				t.Helper()
				r := s.ask(mac)
				r.Client.Program = decide.Firmware
				if d := decide.Decide(r); d.Action != want {
					t.Errorf("%s it gets %s (%s), want %s", when, d.Action, d.Reason, want)
				}
			}
			box()
			_, err := s.Assign.Apply(snapshot(1, "win_1"))
			must(err)
			follow()
			if tt.booted {
				must(s.Counts.Booted(machine, "win_1"))
			}
			if tt.done {
				must(s.Counts.Done(machine, "win_1"))
			}
			for _, name := range tt.lose {
				must(os.WriteFile(filepath.Join(dir, "boots", name), []byte("torn"), 0o600))
			}
			if must(os.WriteFile(file, []byte("torn"), 0o600)); tt.missing {
				must(os.Remove(file))
			}
			for range 2 { // it is started again before it is told
				box()
				follow()
				gets("without decisions", decide.Deny)
			}
			_, err = s.Assign.Apply(snapshot(2, "win_1"))
			must(err)
			gets("told anew", tt.first)
			follow()
			gets("told anew, a moment later,", tt.first)
			_, err = s.Assign.Apply(snapshot(3, "win_2"))
			must(err)
			gets("in the next window", tt.second)
			box()
			gets("started again in it", tt.second)
		})
	}
}
