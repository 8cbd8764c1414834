package gateway_test

import (
	"crypto/rand"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/agentv1/agentv1connect"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/gatewaytest"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

const strangerID, strangerMAC = "mac-5254000000aa", "52:54:00:00:00:aa"

// strangers is a gateway with a site that inspects unknown machines, and its box.
type strangers struct {
	*gatewaytest.Gateway
	t      *testing.T
	box    *gatewaytest.Agent
	window string
	until  time.Time
}

func newStrangers(t *testing.T) *strangers {
	t.Helper()
	s := &strangers{Gateway: gatewaytest.New(t), t: t}
	s.must(s.Store.AddSite(t.Context(), store.Site{ID: "site_1", TenantID: "acme", Name: "lab"}))
	s.box = s.Site("site_1")
	s.must(s.Store.SetUnknown(t.Context(), "site_1", true, nil))
	s.Discovery.Changed()
	eventually(t, "the window for strangers", func() bool {
		u, err := s.Store.Unknown(t.Context(), "site_1")
		s.must(err)
		s.window, s.until = u.WindowID, u.WindowUntil
		return s.window != ""
	})
	return s
}

func (s *strangers) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

func (s *strangers) voucher(edit func(*agentv1.Voucher)) *agentv1.Voucher {
	v := &agentv1.Voucher{MachineId: strangerID, WindowId: s.window, Purpose: "inspect", BootNonce: make([]byte, 16), IssuedAtMs: s.Clock.Now().UnixMilli(), NotAfterMs: s.until.UnixMilli()}
	rand.Read(v.BootNonce)
	edit(v)
	return v
}

func same(*agentv1.Voucher) {}

func (s *strangers) enrol(v *agentv1.Voucher) (*gatewaytest.Agent, error) {
	s.t.Helper()
	key := gatewaytest.NewKey(s.t)
	answer, err := s.Enroll(s.t.Context(), &agentv1.EnrollRequest{Credential: &agentv1.EnrollRequest_Voucher{Voucher: s.box.Voucher(v)}, Csr: gatewaytest.CSR(s.t, key), Role: agentv1.Role_ROLE_RAMDISK})
	if err != nil {
		return nil, err
	}
	return s.Adopt(answer, key, agentv1.Role_ROLE_RAMDISK), nil
}

// TestStrangersEnrol: exactly the box's own name for a machine that nobody enrolled,
// in the site's window for those, to be inspected.
func TestStrangersEnrol(t *testing.T) {
	s := newStrangers(t)
	s.must(s.Enrol.OpenWindow(t.Context(), "site_1", "node_1", "win_node", "inspect", s.until))
	s.must(s.Store.AddSite(t.Context(), store.Site{ID: "site_2", TenantID: "acme", Name: "other"}))
	s.must(s.Store.SetUnknown(t.Context(), "site_2", true, nil))
	s.must(s.Store.RollUnknown(t.Context(), "site_2", "win_other", s.until))
	for name, tt := range map[string]struct {
		edit func(*agentv1.Voucher)
		want errs.Code
	}{
		"an enrolled machine's id":         {func(v *agentv1.Voucher) { v.MachineId = "node_1" }, errs.WrongAgent},
		"every stranger at once":           {func(v *agentv1.Voucher) { v.MachineId = store.Strangers }, errs.WrongAgent},
		"a MAC in capitals":                {func(v *agentv1.Voucher) { v.MachineId = "mac-5254000000AA" }, errs.WrongAgent},
		"more than a MAC":                  {func(v *agentv1.Voucher) { v.MachineId += "0" }, errs.WrongAgent},
		"a group's MAC":                    {func(v *agentv1.Voucher) { v.MachineId = "mac-0154000000aa" }, errs.WrongAgent},
		"to deploy":                        {func(v *agentv1.Voucher) { v.Purpose = "deploy" }, errs.WrongAgent},
		"to wipe":                          {func(v *agentv1.Voucher) { v.Purpose = "wipe" }, errs.WrongAgent},
		"an enrolled machine's window":     {func(v *agentv1.Voucher) { v.WindowId = "win_node" }, errs.WrongAgent},
		"another site's window":            {func(v *agentv1.Voucher) { v.WindowId = "win_other" }, errs.WrongAgent},
		"no window":                        {func(v *agentv1.Voucher) { v.WindowId = "win_9" }, errs.NotEnrolled},
		"a voucher that ran out":           {func(v *agentv1.Voucher) { v.IssuedAtMs, v.NotAfterMs = 1, 2 }, errs.Expired},
		"all as it should be":              {same, ""},
		"another machine, as it should be": {func(v *agentv1.Voucher) { v.MachineId = "mac-5254000000ab" }, ""},
	} {
		if _, err := s.enrol(s.voucher(tt.edit)); code(err) != tt.want {
			t.Errorf("%s: Enroll = %v, want %q", name, err, tt.want)
		}
	}
	issued := s.Clock.Now().UnixMilli()
	s.Clock.Add(s.until.Sub(s.Clock.Now()) + time.Second)
	if _, err := s.enrol(s.voucher(func(v *agentv1.Voucher) { v.IssuedAtMs = issued })); code(err) != errs.Expired {
		t.Errorf("after the window: Enroll = %v, want expired", err)
	}
}

// TestStrangersAreHeld: a found machine's identity opens one session and nothing
// else, runs nothing, and ends with the window.
func TestStrangersAreHeld(t *testing.T) {
	s := newStrangers(t)
	ram, err := s.enrol(s.voucher(same))
	s.must(err)
	if !ram.Leaf.NotAfter.Equal(s.until.Truncate(time.Second)) {
		t.Errorf("the certificate ends at %s, the window at %s", ram.Leaf.NotAfter, s.until)
	}
	calls := map[string]func(h *http.Client) error{
		"artifacts, located": func(h *http.Client) error {
			_, err := agentv1connect.NewArtifactServiceClient(h, s.URL).Locate(t.Context(), connect.NewRequest(&agentv1.LocateRequest{Ref: "none"}))
			return err
		},
		"secrets": func(h *http.Client) error {
			_, err := agentv1connect.NewSecretServiceClient(h, s.URL).Resolve(t.Context(), connect.NewRequest(&agentv1.ResolveRequest{CommandId: "cmd_1"}))
			return err
		},
		"its machine": func(h *http.Client) error {
			_, err := agentv1connect.NewNodeServiceClient(h, s.URL).GetSpec(t.Context(), connect.NewRequest(&agentv1.GetSpecRequest{}))
			return err
		},
		"renewal": func(h *http.Client) error {
			_, err := agentv1connect.NewEnrolmentServiceClient(h, s.URL).Renew(t.Context(), connect.NewRequest(&agentv1.RenewRequest{Csr: gatewaytest.CSR(t, ram.Key)}))
			return err
		},
		"a tunnel": func(h *http.Client) error {
			stream := agentv1connect.NewTunnelServiceClient(h, s.URL).Tunnel(t.Context())
			if err := stream.Send(&agentv1.TunnelFrame{}); err != nil {
				t.Log(err) // Receive says why
			}
			_, err := stream.Receive()
			return err
		},
	}
	for name, call := range calls {
		if err := call(ram.HTTP()); code(err) != errs.OperationNotAllowed {
			t.Errorf("%s = %v, want operation-not-allowed", name, err)
		}
		if err := call(s.box.HTTP()); code(err) == errs.OperationNotAllowed {
			t.Errorf("%s of the box = %v, want another answer", name, err)
		}
	}
	res, err := ram.HTTP().Get(s.URL + "/artifacts/" + strings.Repeat("a", 64))
	s.must(err)
	res.Body.Close()
	if res.StatusCode != http.StatusForbidden {
		t.Errorf("an artifact = %s, want forbidden", res.Status)
	}

	session := ram.Connect()
	for _, kind := range []string{"image.stream", "driver.invoke", "disk.wipe"} {
		if c := submitErr(t, s.Gateway, commands.Spec{AgentID: ram.ID, TargetNodeID: strangerID, Kind: kind}); c != errs.OperationNotAllowed && c != errs.UnknownKind {
			t.Errorf("Submit %s = %q, want it refused", kind, c)
		}
	}
	if c := submitErr(t, s.Gateway, commands.Spec{AgentID: ram.ID, Kind: "image.stream"}); c != errs.OperationNotAllowed {
		t.Errorf("Submit image.stream = %q, want operation-not-allowed", c)
	}

	// What it reports becomes a found machine, which nobody else's word is.
	session.Event(&agentv1.Event{Seq: 1, Name: "pxe.discovered", Class: "state", BodyJson: []byte(`{"mac":"52:54:00:00:00:bb"}`)})
	session.Event(&agentv1.Event{Seq: 2, Name: "machine.hardware", Class: "state", BodyJson: []byte(`{"productUuid":"4c4c4544-0042-3010-8056-b4c04f303232"}`)})
	var found []store.Found
	eventually(t, "the report of the hardware", func() bool {
		found, err = s.Store.FoundAt(t.Context(), "site_1")
		s.must(err)
		return len(found) > 0 && !found[0].Inspected.IsZero()
	})
	if len(found) != 1 || found[0].MAC != strangerMAC {
		t.Errorf("found = %+v, want the stranger alone", found)
	}

	// The window's end, early or not, is the end of all that.
	s.must(s.Store.SetUnknown(t.Context(), "site_1", false, nil))
	s.Discovery.Changed()
	if c, _ := session.End(); c.GetCode() != string(errs.Expired) {
		t.Errorf("the session ended with %v, want expired", c)
	}
	if _, err := ram.Dial(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Hello{Hello: ram.Hello()}}).End(); code(err) != errs.NotEnrolled {
		t.Errorf("a session after that = %v, want not-enrolled", err)
	}
	if _, err := s.enrol(s.voucher(same)); code(err) != errs.Expired {
		t.Errorf("Enroll after that = %v, want expired", err)
	}
}

// TestStrangersFlood: events beyond what a report needs end the session, and there
// is no room for more identities than the bound.
func TestStrangersFlood(t *testing.T) {
	s := newStrangers(t)
	ram, err := s.enrol(s.voucher(same))
	s.must(err)
	session := ram.Connect()
	for i := range 300 {
		if session.Stream.Send(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Event{Event: &agentv1.Event{Seq: uint64(i + 1), Name: "machine.hardware", Class: "state", BodyJson: []byte(`{}`)}}}) != nil {
			break // it ended: End says how
		}
	}
	if c, err := session.End(); c.GetCode() != string(errs.RateLimited) {
		t.Errorf("a flood of events ended with %v, %v, want rate-limited", c, err)
	}
	events, err := s.Store.Events(t.Context(), store.EventFilter{AgentID: ram.ID})
	s.must(err)
	if len(events) > 2 { // the last report, and its enrolment
		t.Errorf("%d events are kept of a flood", len(events))
	}

	// Neither another session nor another identity has room for more, but for the hardware of
	// that one, who may be the machine whose name was used; another machine and the box have
	// theirs, and so has the flooding one after the hour.
	report := func(a *gatewaytest.Agent, seq uint64, name string) *gatewaytest.Session {
		t.Helper()
		session := a.Connect()
		s.must(session.Stream.Send(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Event{Event: &agentv1.Event{Seq: seq << 20, Name: name, Class: "state", BodyJson: []byte(fmt.Sprintf(`{"seq":%d}`, seq))}}}))
		return session
	}
	kept := func(a *gatewaytest.Agent, seq uint64, name string) {
		t.Helper()
		report(a, seq, name)
		eventually(t, fmt.Sprint(name, " ", seq, " of ", a.ID), func() bool {
			events, err := s.Store.Events(t.Context(), store.EventFilter{AgentID: a.ID, Name: name})
			s.must(err)
			return len(events) == 1 && events[0].BodyJSON == fmt.Sprintf(`{"seq":%d}`, seq)
		})
	}
	limited := func(what string, a *gatewaytest.Agent, seq uint64, name string) {
		t.Helper()
		if c, err := report(a, seq, name).End(); c.GetCode() != string(errs.RateLimited) {
			t.Errorf("%s ended with %v, %v, want rate-limited", what, c, err)
		}
	}
	limited("another session of a flood", ram, 1, "machine.hardware")
	again, err := s.enrol(s.voucher(same))
	s.must(err)
	kept(again, 1, "machine.hardware")
	limited("another identity of a machine that flooded", again, 2, "machine.progress")
	for seq := range uint64(7) {
		kept(again, 3+seq, "machine.hardware")
	}
	limited("hardware without end", again, 10, "machine.hardware")
	other, err := s.enrol(s.voucher(func(v *agentv1.Voucher) { v.MachineId = "mac-5254000000ab" }))
	s.must(err)
	kept(other, 1, "machine.hardware")
	kept(other, 2, "machine.hardware")
	kept(s.box, 1, "pxe.discovered")
	s.Clock.Add(time.Hour)
	kept(again, 11, "machine.hardware")

	// As many come as may come at once, and then no more; the one that is known does,
	// once there is time again.
	refused := 0
	for i := range 300 {
		if _, err := s.enrol(s.voucher(func(v *agentv1.Voucher) { v.MachineId = fmt.Sprintf("mac-525400%06x", i) })); code(err) == errs.RateLimited {
			refused++
		} else {
			s.must(err)
		}
	}
	if refused == 0 {
		t.Error("300 strangers at once were all let in")
	}
}

// TestBoxIsTold: policy, windows and confirmed MACs reach the box by themselves, the
// next window comes before the end of the last, and a box that lost all is told again.
func TestBoxIsTold(t *testing.T) {
	s := newStrangers(t)
	s.must(s.Store.AddPool(t.Context(), store.Pool{ID: "pool_1", TenantID: "acme", Name: "metal", SiteID: "site_1"}))
	s.must(s.Store.AddMachine(t.Context(), store.Machine{ID: "node_1", TenantID: "acme", Name: "m1", PoolID: "pool_1", SiteID: "site_1", ProductUUID: "4c4c4544-0042-3010-8056-b4c04f303232"}))
	session := s.box.Connect()
	command := func() *agentv1.SignedCommand {
		t.Helper()
		for {
			if f := session.Next(); f.GetCommand() != nil {
				return f.GetCommand()
			} else if f.GetResultAck() == nil && f.GetEventAck() == nil {
				t.Fatalf("frame = %v, want a command", f)
			}
		}
	}
	next := func(what string) *pxev1.AssignRequest {
		t.Helper()
		p, _, err := envelope.Open(command(), s.box.Bundle)
		s.must(err)
		req := &pxev1.AssignRequest{}
		s.must(proto.Unmarshal(p.Args, req))
		if p.Kind != "pxe.assign" {
			t.Fatalf("%s: %s, want pxe.assign", what, p.Kind)
		}
		session.Ack(p.CommandId)
		result, err := proto.Marshal(&pxev1.AssignResult{Version: req.Version})
		s.must(err)
		session.Result(p.CommandId, result)
		return req
	}
	told := func(what string) {
		t.Helper()
		eventually(t, what, func() bool {
			u, err := s.Store.SiteUntold(t.Context(), "site_1")
			s.must(err)
			return !u.Behind(s.box.ID + " " + s.box.JournalEpoch)
		})
	}
	first := next("the policy")
	if u := first.Unknown; !u.GetInspect() || u.WindowId != s.window || u.WindowUntilMs != s.until.UnixMilli() || len(first.Machines) != 0 {
		t.Errorf("the first snapshot = %v, want the window %s until %s", first, s.window, s.until)
	}
	told("the box has the policy")

	// A list of expected machines, in both forms.
	s.must(s.Store.SetUnknown(t.Context(), "site_1", true, []string{strangerMAC, "4c4c4544-0042-3010-8056-b4c04f303232"}))
	s.Discovery.Changed()
	if e := next("the list").Unknown.GetExpected(); len(e) != 2 || e[0].Mac != strangerMAC || e[0].ProductUuid != "" || e[1].ProductUuid != "4c4c4544-0042-3010-8056-b4c04f303232" || e[1].Mac != "" {
		t.Errorf("expected = %v", e)
	}
	told("the box has the list")

	// The machine's MAC, once it is confirmed, is the machine's.
	s.must(s.Store.AddMAC(t.Context(), "node_1", strangerMAC, 16, nil))
	s.Discovery.Changed()
	if m := next("the MAC").Machines; len(m) != 1 || m[0].MachineId != "node_1" || len(m[0].Macs) != 1 || m[0].Macs[0] != strangerMAC || m[0].Action != pxev1.Action_ACTION_LOCAL_DISK {
		t.Errorf("machines = %v, want node_1 with its MAC", m)
	}
	told("the box has the MAC")

	// The next window begins while the last is open still.
	s.Clock.Add(s.until.Sub(s.Clock.Now())/2 + time.Minute)
	s.Discovery.Changed()
	u := next("the next window").Unknown
	if u.WindowId == s.window || u.WindowUntilMs <= s.until.UnixMilli() {
		t.Errorf("the next window = %v, want another than %s, until later than %s", u, s.window, s.until)
	}
	told("the box has the next window")
	if _, err := s.enrol(s.voucher(same)); err != nil {
		t.Errorf("a voucher of the window before = %v, want it good until that ends", err)
	}

	// A box that lost its journal has lost what it was told.
	s.box.JournalEpoch, s.box.EventEpoch = "journal-2", "events-2"
	session = s.box.Connect()
	if again := next("all of it again"); again.Unknown.GetWindowId() != u.WindowId || len(again.Machines) != 1 {
		t.Errorf("what the box is told again = %v", again)
	}
	told("the box has it again")

	// One that refuses is asked again.
	s.must(s.Store.SetUnknown(t.Context(), "site_1", false, nil))
	s.Discovery.Changed()
	p, _, err := envelope.Open(command(), s.box.Bundle)
	s.must(err)
	session.Ack(p.CommandId)
	session.Fail(p.CommandId, &agentv1.Error{Code: string(errs.StaleVersion), Message: "overtaken"})
	eventually(t, "the refusal", func() bool {
		c, err := s.Store.Command(t.Context(), p.CommandId)
		s.must(err)
		return c.State == store.CommandDone
	})
	s.Discovery.Changed()
	if last := next("the end of it"); last.Unknown != nil {
		t.Errorf("unknown machines are left alone, and the box is told %v", last.Unknown)
	}
	told("the box leaves them alone")

	// So is one that says that it is behind, since it lost what it was told; one that has
	// the newest is not.
	latest, err := s.Store.AssignVersion(t.Context(), "site_1")
	s.must(err)
	before, err := s.Store.SiteUntold(t.Context(), "site_1")
	s.must(err)
	session.Event(&agentv1.Event{Seq: 1, Name: "pxe.assigned", Class: "state", BodyJson: fmt.Appendf(nil, `{"version":%d}`, latest)})
	session.Event(&agentv1.Event{Seq: 2, Name: "pxe.assigned", Class: "state", BodyJson: []byte(`{"version":0}`)})
	if again := next("what it lost"); again.Version != latest+1 || len(again.Machines) != 1 {
		t.Errorf("a box that lost version %d is told %v", latest, again)
	}
	told("the box has what it lost")
	if after, err := s.Store.SiteUntold(t.Context(), "site_1"); err != nil || after.Changes != before.Changes+1 {
		t.Errorf("%d changes became %d, %v, want one more", before.Changes, after.Changes, err)
	}
}

// TestStrangersBound: a site has room for so many and no more, and who is in may come again.
func TestStrangersBound(t *testing.T) {
	s := newStrangers(t)
	for i := range store.MaxStrangers {
		id := fmt.Sprintf("mac-525400%06x", i)
		var c store.Certificate
		copy(c.Fingerprint[:], id)
		c.AgentID, c.DER, c.NotAfter, c.RenewAfter = "ag_"+id, []byte{1}, s.until, s.until
		_, err := s.Store.Enrol(t.Context(), store.Enrolment{WindowID: s.window, BootNonce: []byte(id), Certificate: c,
			Agent: store.Agent{ID: "ag_" + id, Role: agentv1.Role_ROLE_RAMDISK, SiteID: "site_1", MachineID: id, WindowID: s.window}})
		s.must(err)
	}
	for machine, want := range map[string]errs.Code{"mac-525400ffffff": errs.RateLimited, "mac-525400000007": ""} {
		if _, err := s.enrol(s.voucher(func(v *agentv1.Voucher) { v.MachineId = machine })); code(err) != want {
			t.Errorf("%s: Enroll = %v, want %q", machine, err, want)
		}
	}
}
