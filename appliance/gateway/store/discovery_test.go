package store

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
)

const foundMAC = "52:54:00:00:00:aa"

func TestStrangerMAC(t *testing.T) {
	for id, want := range map[string]string{
		"mac-5254000000aa": foundMAC, "mac-525400000001": "52:54:00:00:00:01",
		"": "", "mac-": "", "mac-*": "", "node_1": "", "mac-5254000000AA": "", "mac-5254000000a": "", "mac-5254000000aa0": "", "mac-5254000000aaaa": "",
		"mac-525400000 aa": "", "MAC-5254000000aa": "", "xmac-5254000000aa": "", "mac-000000000000": "", "mac-ffffffffffff": "", "mac-0152000000aa": "", "mac-52:54:00:0": "",
	} {
		got, ok := StrangerMAC(id)
		if got != want || ok != (want != "") || (Agent{MachineID: id}).IsStranger() != ok {
			t.Errorf("StrangerMAC(%q) = %q, %v, want %q", id, got, ok, want)
		}
	}
}

// TestUnknownPolicy: policy, window and snapshot go together, and who leaves
// strangers alone lets none of their vouchers in.
func TestUnknownPolicy(t *testing.T) {
	s := openControl(t)
	ctx := t.Context()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	if u, err := s.Unknown(ctx, "site_1"); err != nil || u.Inspect || u.WindowID != "" || len(u.Expected) != 0 {
		t.Errorf("Unknown = %+v, %v, want machines left alone", u, err)
	}
	until := s.Now().Add(time.Hour).Truncate(time.Millisecond).UTC()
	if err := s.RollUnknown(ctx, "site_1", "win_0", until); !errors.Is(err, ErrNotFound) {
		t.Errorf("RollUnknown of a site that inspects nobody = %v, want ErrNotFound", err)
	}
	if err := s.SetUnknown(ctx, "site_9", true, nil); !errors.Is(err, ErrNotFound) {
		t.Errorf("SetUnknown of no site = %v, want ErrNotFound", err)
	}
	must(s.SetUnknown(ctx, "site_1", true, []string{foundMAC}))
	must(s.RollUnknown(ctx, "site_1", "win_1", until))
	w, err := s.Window(ctx, "win_1")
	if err != nil || w.MachineID != Strangers || w.Purpose != "inspect" || w.SiteID != "site_1" || !w.Until.Equal(until) {
		t.Errorf("Window = %+v, %v", w, err)
	}
	next, err := s.NextSnapshot(ctx, "site_1")
	must(err)
	if u := next.Unknown; !u.Inspect || !slices.Equal(u.Expected, []string{foundMAC}) || u.WindowID != "win_1" || !u.WindowUntil.Equal(until) || next.Change != 2 || len(next.Machines) != 2 {
		t.Errorf("NextSnapshot = %+v", next)
	}
	box := "ag_1 journal"
	if u, err := s.SiteUntold(ctx, "site_1"); err != nil || !u.Behind(box) {
		t.Errorf("SiteUntold = %+v, %v, want the box behind", u, err)
	}
	must(s.Told(ctx, "site_1", next.Change, box))
	all, err := s.Untold(ctx)
	if err != nil || len(all) != 1 || all[0].Behind(box) || !all[0].Behind("ag_1 another journal") {
		t.Errorf("Untold = %+v, %v, want one site whose box has it, and no other box", all, err)
	}
	must(s.SetUnknown(ctx, "site_1", false, nil))
	if w, err := s.Window(ctx, "win_1"); err != nil || w.Until.After(s.Now()) {
		t.Errorf("Window after leaving strangers alone = %+v, %v, want it over", w, err)
	}
	if u, err := s.SiteUntold(ctx, "site_1"); err != nil || !u.Behind(box) || u.Unknown.Inspect || u.Unknown.WindowID != "" {
		t.Errorf("SiteUntold = %+v, %v, want the box behind and no window", u, err)
	}
}

// TestFound: what boxes and ramdisks saw, and what ends it.
func TestFound(t *testing.T) {
	s := openControl(t)
	ctx := t.Context()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(s.Saw(ctx, Found{SiteID: "site_1", MAC: foundMAC, ProductUUID: "u", Interface: "lan0", Client: "pxe", IP: "10.0.0.9"}))
	must(s.SawHardware(ctx, "site_1", foundMAC, `{"a":1}`))
	must(s.Saw(ctx, Found{SiteID: "site_1", MAC: foundMAC, Interface: "lan0", Client: "ipxe", IP: "10.0.0.8"})) // iPXE says no UUID
	one := func() Found {
		t.Helper()
		found, err := s.FoundAt(ctx, "site_1")
		if err != nil || len(found) != 1 {
			t.Fatalf("FoundAt = %+v, %v, want one", found, err)
		}
		return found[0]
	}
	if f := one(); f.ProductUUID != "u" || f.Client != "ipxe" || f.IP != "10.0.0.8" || f.Inspection != `{"a":1}` || f.Inspected.IsZero() || f.Seen.IsZero() || f.Rejected {
		t.Errorf("found = %+v", f)
	}
	if sites, err := s.FoundSites(ctx, "acme", foundMAC); err != nil || !slices.Equal(sites, []string{"site_1"}) {
		t.Errorf("FoundSites = %q, %v", sites, err)
	}
	if sites, err := s.FoundSites(ctx, "other", foundMAC); err != nil || len(sites) != 0 {
		t.Errorf("FoundSites of another tenant = %q, %v", sites, err)
	}
	must(s.RejectFound(ctx, "site_1", foundMAC))
	if !one().Rejected {
		t.Error("a rejected machine is not")
	}
	if err := s.RejectFound(ctx, "site_1", "52:54:00:00:00:bb"); !errors.Is(err, ErrNotFound) {
		t.Errorf("RejectFound of nobody = %v", err)
	}
	if err := s.Saw(ctx, Found{SiteID: "site_9", MAC: foundMAC}); !errors.Is(err, ErrNotFound) {
		t.Errorf("Saw at no site = %v, want ErrNotFound", err)
	}

	must(s.AddMAC(ctx, "node_1", foundMAC, 16, nil))
	if found, err := s.FoundAt(ctx, "site_1"); err != nil || len(found) != 0 {
		t.Errorf("FoundAt after the MAC was confirmed = %+v, %v", found, err)
	}
	nowhere := func(what string) {
		t.Helper()
		if sites, err := s.FoundSites(ctx, "acme", foundMAC); err != nil || len(sites) != 0 {
			t.Errorf("FoundSites %s = %q, %v, want none", what, sites, err)
		}
	}
	nowhere("after the MAC was confirmed")
	must(s.Saw(ctx, Found{SiteID: "site_1", MAC: foundMAC})) // the box does not know yet
	must(s.SawHardware(ctx, "site_1", foundMAC, "{}"))
	nowhere("of a machine's MAC")
	if found, err := s.FoundAt(ctx, "site_1"); err != nil || len(found) != 0 {
		t.Errorf("FoundAt of a machine's MAC = %+v, %v", found, err)
	}
	m, err := s.MachineOfMAC(ctx, "acme", foundMAC)
	if err != nil || m.ID != "node_1" || !slices.Contains(m.MACs, foundMAC) {
		t.Errorf("MachineOfMAC = %+v, %v", m, err)
	}
	if _, err := s.MachineOfMAC(ctx, "other", foundMAC); !errors.Is(err, ErrNotFound) {
		t.Errorf("MachineOfMAC of another tenant = %v", err)
	}
	if u, err := s.SiteUntold(ctx, "site_1"); err != nil || u.Changes != 1 {
		t.Errorf("SiteUntold = %+v, %v, want one change", u, err)
	}
	// Enrolling ends it too, and where unknown machines are inspected the box is to hear of it.
	must(s.Saw(ctx, Found{SiteID: "site_1", MAC: "52:54:00:00:00:cc"}))
	must(s.AddMachine(ctx, machine("node_7", "m7", "52:54:00:00:00:cc")))
	if sites, err := s.FoundSites(ctx, "acme", "52:54:00:00:00:cc"); err != nil || len(sites) != 0 {
		t.Errorf("FoundSites of an enrolled machine's MAC = %q, %v", sites, err)
	}
	must(s.SetUnknown(ctx, "site_1", true, nil))
	must(s.AddMachine(ctx, machine("node_8", "m8", "52:54:00:00:00:dd")))
	if u, err := s.SiteUntold(ctx, "site_1"); err != nil || u.Changes != 3 {
		t.Errorf("SiteUntold = %+v, %v, want three changes", u, err)
	}
	for name, tt := range map[string]struct {
		machine, mac string
		most         int
		want         error
	}{
		"another machine's": {"node_2", foundMAC, 16, ErrConflict},
		"no machine":        {"node_9", foundMAC, 16, ErrNotFound},
		"one too many":      {"node_1", "52:54:00:00:00:bb", len(m.MACs), ErrFull},
		"again":             {"node_1", foundMAC, len(m.MACs), nil},
	} {
		if err := s.AddMAC(ctx, tt.machine, tt.mac, tt.most, nil); !errors.Is(err, tt.want) {
			t.Errorf("AddMAC %s = %v, want %v", name, err, tt.want)
		}
	}
}

// TestFoundBound: a flood of made-up MACs takes no inspected machine's place.
func TestFoundBound(t *testing.T) {
	s := openControl(t)
	ctx := t.Context()
	at := time.UnixMilli(1_700_000_000_000)
	s.now = func() time.Time { return at }
	mac := func(i int) string { return fmt.Sprintf("52:54:00:01:%02x:%02x", i>>8, i&0xff) }
	for i := range MaxFound {
		if _, err := s.w.Exec(`INSERT INTO found (site_id, mac, first_ms, seen_ms) VALUES ('site_1', ?, ?2, ?2)`, mac(i), at.UnixMilli()+int64(i)); err != nil {
			t.Fatal(err)
		}
	}
	has := func(want string) bool {
		t.Helper()
		found, err := s.FoundAt(ctx, "site_1")
		if err != nil || len(found) != MaxFound {
			t.Fatalf("%d machines are kept, want %d: %v", len(found), MaxFound, err)
		}
		return slices.ContainsFunc(found, func(f Found) bool { return f.MAC == want })
	}
	at = at.Add(time.Hour)
	if err := s.SawHardware(ctx, "site_1", mac(0), "{}"); err != nil {
		t.Fatal(err)
	}
	if err := s.Saw(ctx, Found{SiteID: "site_1", MAC: foundMAC}); err != nil || !has(foundMAC) || has(mac(1)) || !has(mac(0)) {
		t.Errorf("Saw beyond the bound = %v, want the oldest that was not inspected to give way", err)
	}
	if _, err := s.w.Exec(`UPDATE found SET inspected_ms = 1`); err != nil {
		t.Fatal(err)
	}
	if err := s.Saw(ctx, Found{SiteID: "site_1", MAC: mac(1)}); !errors.Is(err, ErrFull) || has(mac(1)) {
		t.Errorf("Saw where all were inspected = %v, want ErrFull", err)
	}
	if err := s.Saw(ctx, Found{SiteID: "site_1", MAC: foundMAC}); err != nil {
		t.Errorf("Saw of one that is known = %v", err)
	}
	if err := s.SawHardware(ctx, "site_1", mac(1), "{}"); err != nil || !has(mac(1)) || has(mac(2)) {
		t.Errorf("SawHardware where all were inspected = %v, want the oldest to give way", err)
	}
	if err := s.PruneFound(ctx, at.Add(time.Second)); err != nil {
		t.Fatal(err)
	}
	if found, err := s.FoundAt(ctx, "site_1"); err != nil || len(found) != 0 {
		t.Errorf("%d machines are left, %v", len(found), err)
	}
}

// TestEndStrangers: their identities end with their window, and nobody else's does.
func TestEndStrangers(t *testing.T) {
	s := openControl(t)
	ctx := t.Context()
	if err := s.SetUnknown(ctx, "site_1", true, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.RollUnknown(ctx, "site_1", "win_old", s.Now().Add(-time.Minute)); err != nil {
		t.Fatal(err)
	}
	if err := s.RollUnknown(ctx, "site_1", "win_new", s.Now().Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	if err := s.OpenWindow(ctx, Window{ID: "win_node", SiteID: "site_1", MachineID: "node_1", Purpose: "inspect", Until: s.Now().Add(-time.Minute)}); err != nil {
		t.Fatal(err)
	}
	enrol := func(id, machine, window string) {
		t.Helper()
		var c Certificate
		copy(c.Fingerprint[:], id)
		c.AgentID, c.DER, c.NotAfter, c.RenewAfter = id, []byte{1}, s.Now().Add(time.Hour), s.Now()
		if _, err := s.Enrol(ctx, Enrolment{WindowID: window, BootNonce: []byte(id), Agent: Agent{ID: id, Role: agentv1.Role_ROLE_RAMDISK, SiteID: "site_1", MachineID: machine, WindowID: window}, Certificate: c}); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Greeted(ctx, id, &agentv1.Hello{BootId: "b", JournalEpoch: "j", EventEpoch: "e", Drivers: []*agentv1.AdvertisedDriver{{Id: "x", Version: "1.0.0", Kinds: []string{"y"}}}}); err != nil {
			t.Fatal(err)
		}
	}
	enrol("ag_old", "mac-525400000001", "win_old")
	enrol("ag_new", "mac-525400000002", "win_new")
	enrol("ag_node", "node_1", "win_node")
	if n, err := s.Strangers(ctx, "site_1", ""); err != nil || n != 2 {
		t.Errorf("Strangers = %d, %v, want 2", n, err)
	}
	if n, err := s.Strangers(ctx, "site_1", "mac-525400000002"); err != nil || n != 1 {
		t.Errorf("Strangers besides one = %d, %v, want 1", n, err)
	}
	// What one advertises is nobody's to choose by, and its identity is of one boot.
	for id, want := range map[string]int{"ag_new": 0, "ag_node": 2} {
		if labels, err := s.AgentLabels(ctx, id); err != nil || len(labels) != want {
			t.Errorf("labels of %s = %q, %v, want %d", id, labels, err, want)
		}
	}
	if all, err := s.Candidates(ctx, "acme", "", nil); err != nil || len(all) != 1 || all[0].AgentID != "ag_node" {
		t.Errorf("Candidates = %+v, %v, want the enrolled machine alone", all, err)
	}
	for id, want := range map[string]error{"ag_new": ErrCloned, "ag_node": nil} {
		if _, err := s.Greeted(ctx, id, &agentv1.Hello{BootId: "another", JournalEpoch: "j", EventEpoch: "e"}); !errors.Is(err, want) {
			t.Errorf("Greeted of another boot of %s = %v, want %v", id, err, want)
		}
	}
	if err := s.SetAgentState(ctx, "ag_new", AgentActive); err != nil {
		t.Fatal(err)
	}
	// Events: the latest report of the hardware is all that one leaves.
	events := func(id string) (names []string) {
		t.Helper()
		got, err := s.Events(ctx, EventFilter{AgentID: id})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range got {
			names = append(names, e.Name+" "+e.BodyJSON)
		}
		return names
	}
	sent := []*agentv1.Event{{Seq: 1, Name: "pxe.discovered", Class: "state", BodyJson: []byte(`{}`)}, {Seq: 2, Name: HardwareEvent, Class: "audit", BodyJson: []byte(`{"a":1}`)},
		{Seq: 3, Name: HardwareEvent, Class: "state", BodyJson: []byte(`{"a":2}`)}, {Seq: 4, Name: HardwareEvent, Class: "state", BodyJson: slices.Repeat([]byte(" "), MaxStrangerHardware+1)}, {Seq: 5, Name: "other", Class: "audit"}}
	fresh, acked, err := s.AddAgentEvents(ctx, "ag_new", sent)
	if got := events("ag_new"); err != nil || acked != 5 || len(fresh) != 2 || !slices.Equal(got, []string{HardwareEvent + ` {"a":2}`}) {
		t.Errorf("AddAgentEvents of a stranger = %d fresh, acked %d, %v; kept %q", len(fresh), acked, err, got)
	}
	for _, e := range fresh {
		if e.Class != "state" || e.Key != "mac-525400000002" {
			t.Errorf("a stranger's report is kept as class %s of %q, want state of its machine", e.Class, e.Key)
		}
	}
	if _, _, err := s.AddAgentEvents(ctx, "ag_old", sent[1:2]); err != nil || len(events("ag_old")) != 1 {
		t.Errorf("AddAgentEvents of another stranger = %v; kept %q", err, events("ag_old"))
	}
	if _, acked, err = s.AddAgentEvents(ctx, "ag_node", sent[:3]); err != nil || acked != 3 || len(events("ag_node")) != 3 {
		t.Errorf("AddAgentEvents of an enrolled machine = %v; kept %q", err, events("ag_node"))
	}

	ended, err := s.EndStrangers(ctx, s.Now().Add(-time.Hour))
	if err != nil || !slices.Equal(ended, []string{"ag_old"}) {
		t.Errorf("EndStrangers = %q, %v, want the one whose window is over", ended, err)
	}
	if got, kept := events("ag_old"), events("ag_new"); len(got) != 0 || len(kept) != 1 {
		t.Errorf("after the window the one that ended left %q, and the other %q", got, kept)
	}
	for id, want := range map[string]error{"ag_old": ErrNotFound, "ag_new": nil, "ag_node": nil} {
		if _, err := s.Agent(ctx, id); !errors.Is(err, want) {
			t.Errorf("Agent(%s) = %v, want %v", id, err, want)
		}
		certificates, err := s.Certificates(ctx, id)
		if err != nil || (len(certificates) == 0) != (want != nil) {
			t.Errorf("Certificates(%s) = %d, %v", id, len(certificates), err)
		}
	}
	if _, err := s.Window(ctx, "win_old"); err != nil {
		t.Errorf("the window that just ended: %v, want it known", err)
	}
	if ended, err = s.EndStrangers(ctx, s.Now()); err != nil || len(ended) != 0 {
		t.Errorf("EndStrangers again = %q, %v", ended, err)
	}
	for id, want := range map[string]error{"win_old": ErrNotFound, "win_new": nil, "win_node": nil} {
		if _, err := s.Window(ctx, id); !errors.Is(err, want) {
			t.Errorf("Window(%s) = %v, want %v", id, err, want)
		}
	}
}
