package discovery

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// TestHeard: of unknown machines only a site's box is believed, and of a machine's
// hardware only the ramdisk of one that nobody enrolled.
func TestHeard(t *testing.T) {
	ctx := t.Context()
	st, err := store.Open(filepath.Join(t.TempDir(), "gateway.db"), time.Now)
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(st.AddSite(ctx, store.Site{ID: "site_1", TenantID: "acme", Name: "lab"}))
	for id, a := range map[string]store.Agent{
		"box": {Role: agentv1.Role_ROLE_SITE}, "node": {Role: agentv1.Role_ROLE_NODE, MachineID: "node_1"},
		"ramdisk": {Role: agentv1.Role_ROLE_RAMDISK, MachineID: "node_1"}, "stranger": {Role: agentv1.Role_ROLE_RAMDISK, MachineID: "mac-525400aa0001"},
	} {
		a.ID, a.SiteID = id, "site_1"
		token := store.Token{Hash: sha256.Sum256([]byte(id)), Role: a.Role, SiteID: a.SiteID, MachineID: a.MachineID, Expires: time.Now().Add(time.Hour)}
		must(st.AddToken(ctx, token))
		_, err := st.Enrol(ctx, store.Enrolment{Token: &token, Agent: a, Certificate: store.Certificate{AgentID: id, Fingerprint: token.Hash, DER: []byte{1}, NotAfter: token.Expires, RenewAfter: token.Expires}})
		must(err)
	}
	s := New(Config{Store: st, Log: slog.New(slog.DiscardHandler)})
	for _, tt := range []struct {
		title, agent, name, body string
		want                     string // MAC, product UUID and whether it was inspected; empty: nothing
	}{
		{"the box", "box", "pxe.discovered", `{"mac":"52:54:00:AA:00:02","product_uuid":"4C4C4544-0042-3010-8056-B4C04F303232","interface":"lan0"}`, "52:54:00:aa:00:02 4c4c4544-0042-3010-8056-b4c04f303232 false"},
		{"the box, of nothing", "box", "pxe.discovered", `{}`, ""},
		{"the box, of no MAC", "box", "pxe.discovered", `{"mac":"52:54:00:aa:00:02:03:04"}`, ""},
		{"the box, no JSON", "box", "pxe.discovered", `[`, ""},
		{"the box, of hardware", "box", "machine.hardware", `{}`, ""},
		{"a node", "node", "pxe.discovered", `{"mac":"52:54:00:aa:00:02"}`, ""},
		{"an enrolled machine's ramdisk", "ramdisk", "machine.hardware", `{}`, ""},
		{"a stranger, of others", "stranger", "pxe.discovered", `{"mac":"52:54:00:aa:00:02"}`, ""},
		{"a stranger", "stranger", "machine.hardware", `{"productUuid":"x"}`, "52:54:00:aa:00:01  true"},
		{"a stranger, no object", "stranger", "machine.hardware", `null`, ""},
		{"a stranger, too much", "stranger", "machine.hardware", `{"a":"` + strings.Repeat("x", store.MaxStrangerHardware) + `"}`, ""},
		{"nobody", "none", "pxe.discovered", `{"mac":"52:54:00:aa:00:02"}`, ""},
		{"another event", "box", "pxe.stage", `{"mac":"52:54:00:aa:00:02"}`, ""},
		{"what steers a terminal", "box", "pxe.discovered", `{"mac":"52:54:00:aa:00:02","product_uuid":"\u001b` + strings.Repeat("y", 300) + `"}`, "52:54:00:aa:00:02 ." + strings.Repeat("y", 127) + "… false"},
	} {
		s.Heard(ctx, tt.agent, &agentv1.Event{Name: tt.name, BodyJson: []byte(tt.body)})
		found, err := st.FoundAt(ctx, "site_1")
		must(err)
		got := ""
		for _, f := range found {
			got += f.MAC + " " + f.ProductUUID + " " + map[bool]string{false: "false", true: "true"}[!f.Inspected.IsZero()]
		}
		if got != tt.want {
			t.Errorf("%s: found = %q, want %q", tt.title, got, tt.want)
		}
		must(st.PruneFound(ctx, time.Now().Add(time.Hour)))
	}
}

// line is a box that takes what it is sent.
type line struct{ sent chan commands.Spec }

func (l line) Submit(_ context.Context, spec commands.Spec) (string, error) {
	l.sent <- spec
	return "cmd_1", nil
}

func (l line) Wait(context.Context, string) (commands.Outcome, error) {
	return commands.Outcome{}, nil
}

// TestTurn: boot decisions wait for whoever sends others, and are those of then. They
// are sent for no machine's sake.
func TestTurn(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	st, err := store.Open(filepath.Join(t.TempDir(), "gateway.db"), time.Now)
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(st.AddSite(ctx, store.Site{ID: "site_1", TenantID: "acme", Name: "lab"}))
	token := store.Token{Hash: sha256.Sum256(nil), Role: agentv1.Role_ROLE_SITE, SiteID: "site_1", Expires: time.Now().Add(time.Hour)}
	must(st.AddToken(ctx, token))
	_, err = st.Enrol(ctx, store.Enrolment{Token: &token, Agent: store.Agent{ID: "box", Role: token.Role, SiteID: "site_1"}, Certificate: store.Certificate{AgentID: "box", DER: []byte{1}}})
	must(err)
	must(st.SetUnknown(ctx, "site_1", true, nil))

	l := line{make(chan commands.Spec, 10)}
	waits, proceed := make(chan bool, 10), make(chan bool)
	s := New(Config{Store: st, Commands: l, Online: func(string) bool { return true }, Expel: func(context.Context, string, *errs.Error) error { return nil }, Log: slog.New(slog.DiscardHandler)})
	s.Turn = func(context.Context, string) (func(), error) { waits <- true; <-proceed; return func() {}, nil }
	ended := make(chan bool)
	go func() { s.Run(ctx); close(ended) }()
	select {
	case <-waits:
	case <-time.After(20 * time.Second):
		t.Fatal("it does not wait for its turn")
	}
	if len(l.sent) != 0 {
		t.Error("it was sent before its turn")
	}
	next, err := st.NextSnapshot(ctx, "site_1") // somebody else's
	must(err)
	proceed <- true
	spec := <-l.sent
	var req pxev1.AssignRequest
	data, err := proto.Marshal(spec.Args)
	must(err)
	must(proto.Unmarshal(data, &req))
	if req.Version != next.Version+1 || !req.Unknown.GetInspect() || spec.TargetNodeID != store.Strangers {
		t.Errorf("sent %v to %q after version %d, want the next one, for no machine", &req, spec.TargetNodeID, next.Version)
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		u, err := st.SiteUntold(ctx, "site_1")
		must(err)
		if !u.Behind("box ") {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the box is never known to have it")
		}
	}
	cancel()
	<-ended
}

// TestOneFailsAlone: a stranger whose session cannot be ended keeps neither the others'
// from their ends nor boxes from what they are to hear.
func TestOneFailsAlone(t *testing.T) {
	ctx := t.Context()
	now := time.UnixMilli(1_800_000_000_000)
	st, err := store.Open(filepath.Join(t.TempDir(), "gateway.db"), func() time.Time { return now })
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(st.AddSite(ctx, store.Site{ID: "site_1", TenantID: "acme", Name: "lab"}))
	must(st.SetUnknown(ctx, "site_1", true, nil))
	must(st.RollUnknown(ctx, "site_1", "win_1", now.Add(time.Minute)))
	enrol := func(a store.Agent) {
		t.Helper()
		a.SiteID = "site_1"
		token := store.Token{Hash: sha256.Sum256([]byte(a.ID)), Role: a.Role, SiteID: a.SiteID, MachineID: a.MachineID, Expires: now.Add(time.Hour)}
		must(st.AddToken(ctx, token))
		e := store.Enrolment{Token: &token, Agent: a, Certificate: store.Certificate{AgentID: a.ID, Fingerprint: token.Hash, DER: []byte{1}}}
		if a.WindowID != "" {
			e.Token, e.WindowID, e.BootNonce = nil, a.WindowID, []byte(a.ID)
		}
		_, err := st.Enrol(ctx, e)
		must(err)
	}
	enrol(store.Agent{ID: "box", Role: agentv1.Role_ROLE_SITE})
	strangers := []string{"ag_1", "ag_2", "ag_3"}
	for i, id := range strangers {
		enrol(store.Agent{ID: id, Role: agentv1.Role_ROLE_RAMDISK, MachineID: fmt.Sprintf("mac-52540000000%d", i), WindowID: "win_1"})
	}
	now = now.Add(time.Hour)
	var expelled []string
	l := line{make(chan commands.Spec, 10)}
	s := New(Config{Store: st, Commands: l, Online: func(string) bool { return true }, Log: slog.New(slog.DiscardHandler), Expel: func(_ context.Context, id string, _ *errs.Error) error {
		if expelled = append(expelled, id); id == "ag_1" {
			return errors.New("the disk is full")
		}
		return nil
	}})
	err = s.look(ctx)
	s.wg.Wait()
	if err == nil || !strings.Contains(err.Error(), "ag_1: the disk is full") {
		t.Errorf("look = %v, want what failed", err)
	}
	if slices.Sort(expelled); !slices.Equal(expelled, strangers) || len(l.sent) != 1 {
		t.Errorf("sessions of %q were ended and %d snapshots sent, want those of %q, and one", expelled, len(l.sent), strangers)
	}
}
