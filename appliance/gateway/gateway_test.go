package gateway_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/klauspost/compress/zstd"

	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/agentv1/agentv1connect"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/gateway"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/gatewaytest"
	"github.com/better-compute/site-appliance/appliance/gateway/sessions"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
)

func powerOn(agentID string) commands.Spec {
	return commands.Spec{AgentID: agentID, Kind: "bmc.power", TargetNodeID: "node_1", SecretRefs: []string{"secret://default/bmc"},
		Args: &bmcv1.BmcOperationRequest{Driver: "ipmi", Address: "10.0.0.5:623", CredentialsRef: "secret://default/bmc", Operation: "power.setPower", ArgsJson: `["on"]`}}
}

func submit(t *testing.T, g *gatewaytest.Gateway, spec commands.Spec) string {
	t.Helper()
	id, err := g.Commands.Submit(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func wait(t *testing.T, g *gatewaytest.Gateway, id string) commands.Outcome {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	out, err := g.Commands.Wait(ctx, id)
	if err != nil {
		t.Fatalf("Wait(%s): %v", id, err)
	}
	return out
}

// code reads the code of the line home from an RPC's error.
func code(err error) errs.Code {
	var c *connect.Error
	if !errors.As(err, &c) {
		return ""
	}
	for _, d := range c.Details() {
		if m, derr := d.Value(); derr == nil {
			if e, ok := m.(*agentv1.Error); ok {
				return errs.Code(e.Code)
			}
		}
	}
	return ""
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("%s did not come true", what)
}

// TestCommandTravels is the whole way of one command, across a restart of the gateway.
func TestCommandTravels(t *testing.T) {
	g := gatewaytest.Make(t)
	var log bytes.Buffer
	g.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	g.Start()
	box := g.Site("site_1")
	if id := submitErr(t, g, powerOn(box.ID)); id != errs.Unavailable {
		t.Errorf("Submit before the first Hello = %q, want unavailable", id)
	}
	if _, err := g.Secrets.Put(t.Context(), "default", "bmc", secret.New([]byte(`{"username":"admin","password":"calvin-xyzzy"}`))); err != nil {
		t.Fatal(err)
	}
	s := box.Connect()
	id := submit(t, g, powerOn(box.ID))
	c := s.Command(box)
	payload, _, err := envelope.Open(c, box.Bundle)
	if err != nil {
		t.Fatalf("Open(command): %v", err)
	}
	if payload.CommandId != id || payload.AgentId != box.ID || payload.Incarnation != box.JournalEpoch || payload.Lane != "power" {
		t.Errorf("payload = %v, want command %s for %s/%s in lane power", payload, id, box.ID, box.JournalEpoch)
	}
	args := &bmcv1.BmcOperationRequest{}
	if err := envelope.StrictUnmarshal(payload.Args, args); err != nil || args.ArgsJson != `["on"]` {
		t.Errorf("args = %v, %v", args, err)
	}
	s.Ack(id)
	s.Send(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Progress{Progress: &agentv1.CommandProgress{CommandId: id, Phase: "power", Message: "on", Done: 1, Total: 2}}})
	eventually(t, "progress", func() bool { return g.Commands.Progress(id) == "power: on (1 of 2)" })

	// The secret comes for this command, by this agent, and for nothing else.
	secrets := agentv1connect.NewSecretServiceClient(box.HTTP(), g.URL)
	res, err := secrets.Resolve(t.Context(), connect.NewRequest(&agentv1.ResolveRequest{CommandId: id, Refs: []string{"secret://default/bmc"}}))
	if err != nil || !strings.Contains(string(res.Msg.Values["secret://default/bmc"]), "calvin-xyzzy") {
		t.Errorf("Resolve = %v, %v", res, err)
	}
	_, err = secrets.Resolve(t.Context(), connect.NewRequest(&agentv1.ResolveRequest{CommandId: id, Refs: []string{"secret://default/other"}}))
	if code(err) != errs.CredentialsUnavailable {
		t.Errorf("Resolve(unlisted) = %v, want credentials-unavailable", err)
	}

	// The gateway restarts while the command runs; the agent comes back with its result.
	g.Stop()
	if c, _ := s.End(); c == nil || c.Code != string(errs.Draining) {
		t.Errorf("Close = %v, want draining", c)
	}
	g.Start()
	digest := sha256.Sum256(c.Payload)
	s = box.Connect(func(h *agentv1.Hello) {
		h.Open = []*agentv1.OpenCommand{{CommandId: id, State: "done", Digest: digest[:]}}
	})
	s.Result(id, []byte("result"))
	if f := s.Next(); f.GetResultAck().GetCommandId() != id {
		t.Fatalf("frame = %v, want the result's ack", f)
	}
	if out := wait(t, g, id); out.Err != nil || string(out.Result) != "result" {
		t.Errorf("outcome = %+v, want the result", out)
	}
	// A repeat is acknowledged and changes nothing.
	s.Fail(id, &agentv1.Error{Code: "bmc-error"})
	if f := s.Next(); f.GetResultAck().GetCommandId() != id {
		t.Fatalf("frame = %v, want the ack again", f)
	}
	if out := wait(t, g, id); out.Err != nil {
		t.Errorf("outcome changed to %+v", out)
	}
	// Over: no secrets any more.
	_, err = agentv1connect.NewSecretServiceClient(box.HTTP(), g.URL).Resolve(t.Context(), connect.NewRequest(&agentv1.ResolveRequest{CommandId: id, Refs: []string{"secret://default/bmc"}}))
	if code(err) != errs.CredentialsUnavailable {
		t.Errorf("Resolve(done command) = %v, want credentials-unavailable", err)
	}
	// Nothing of the secret lies in the folder or the log.
	g.Stop()
	if text := log.String(); strings.Contains(text, "calvin-xyzzy") || !strings.Contains(text, "agent enrolled") {
		t.Errorf("the log holds the secret, or nothing: %s", text)
	}
	entries, err := os.ReadDir(g.Dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(g.Dir, e.Name()))
		if err == nil && bytes.Contains(data, []byte("calvin-xyzzy")) {
			t.Errorf("%s holds the secret in clear", e.Name())
		}
	}
}

func submitErr(t *testing.T, g *gatewaytest.Gateway, spec commands.Spec) errs.Code {
	t.Helper()
	_, err := g.Commands.Submit(t.Context(), spec)
	return errs.CodeOf(err)
}

func TestEnrolByToken(t *testing.T) {
	g := gatewaytest.New(t)
	join, err := g.Enrol.NewToken(t.Context(), agentv1.Role_ROLE_SITE, "site_1", "", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	j, err := trust.ParseJoin(join)
	if err != nil {
		t.Fatal(err)
	}
	csr := gatewaytest.CSR(t, gatewaytest.NewKey(t))
	req := func(edit func(*agentv1.EnrollRequest)) *agentv1.EnrollRequest {
		m := &agentv1.EnrollRequest{Credential: &agentv1.EnrollRequest_Token{Token: string(j.Token.Reveal())}, Csr: csr, Role: agentv1.Role_ROLE_SITE, SiteId: "site_1"}
		edit(m)
		return m
	}
	for name, tt := range map[string]struct {
		edit func(*agentv1.EnrollRequest)
		want errs.Code
	}{
		"unknown token": {func(m *agentv1.EnrollRequest) { m.Credential = &agentv1.EnrollRequest_Token{Token: "guess"} }, errs.NotEnrolled},
		"no credential": {func(m *agentv1.EnrollRequest) { m.Credential = nil }, errs.NotEnrolled},
		"other role":    {func(m *agentv1.EnrollRequest) { m.Role = agentv1.Role_ROLE_NODE }, errs.RoleMismatch},
		"other site":    {func(m *agentv1.EnrollRequest) { m.SiteId = "site_2" }, errs.RoleMismatch},
		"no csr":        {func(m *agentv1.EnrollRequest) { m.Csr = nil }, errs.InvalidPayload},
		"flipped csr":   {func(m *agentv1.EnrollRequest) { m.Csr = flip(csr) }, errs.SignatureInvalid},
		"new protocol":  {func(m *agentv1.EnrollRequest) { m.ProtocolMin, m.ProtocolMax = 7, 9 }, errs.ProtocolUnsupported},
	} {
		if _, err := g.Enroll(t.Context(), req(tt.edit)); code(err) != tt.want {
			t.Errorf("%s: Enroll = %v, want %s", name, err, tt.want)
		}
	}
	first, err := g.Enroll(t.Context(), req(func(*agentv1.EnrollRequest) {}))
	if err != nil {
		t.Fatal(err)
	}
	again, err := g.Enroll(t.Context(), req(func(*agentv1.EnrollRequest) {}))
	if err != nil || again.AgentId != first.AgentId || !bytes.Equal(again.Chain[0], first.Chain[0]) {
		t.Errorf("same token and CSR: %v, %v, want the first answer", again.GetAgentId(), err)
	}
	_, err = g.Enroll(t.Context(), req(func(m *agentv1.EnrollRequest) { m.Csr = gatewaytest.CSR(t, gatewaytest.NewKey(t)) }))
	if code(err) != errs.TokenUsed {
		t.Errorf("same token, other CSR: %v, want token-used", err)
	}
	events, err := g.Store.Events(t.Context(), store.EventFilter{SiteIDs: []string{"site_1"}, Name: "enrolment.refused"})
	if err != nil || len(events) != 1 || !strings.Contains(events[0].BodyJSON, `"alarm":true`) {
		t.Errorf("alarm events = %+v, %v, want one", events, err)
	}
	// The token is over after its time.
	late, err := g.Enrol.NewToken(t.Context(), agentv1.Role_ROLE_SITE, "site_1", "", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	lj, err := trust.ParseJoin(late)
	if err != nil {
		t.Fatal(err)
	}
	g.Clock.Add(time.Hour)
	_, err = g.Enroll(t.Context(), req(func(m *agentv1.EnrollRequest) {
		m.Credential = &agentv1.EnrollRequest_Token{Token: string(lj.Token.Reveal())}
	}))
	if code(err) != errs.Expired {
		t.Errorf("late token: %v, want expired", err)
	}
	if data, err := os.ReadFile(filepath.Join(g.Dir, "gateway.db")); err != nil || bytes.Contains(data, j.Token.Reveal()) {
		t.Errorf("the database holds the token (or %v)", err)
	}
}

func flip(b []byte) []byte {
	b = bytes.Clone(b)
	b[len(b)-1] ^= 1
	return b
}

func TestEnrolByVoucher(t *testing.T) {
	g := gatewaytest.New(t)
	box, other := g.Site("site_1"), g.Site("site_2")
	until := time.Now().Add(time.Hour)
	if err := g.Enrol.OpenWindow(t.Context(), "site_1", "node_1", "win_1", "deploy", until); err != nil {
		t.Fatal(err)
	}
	if err := g.Enrol.OpenWindow(t.Context(), "site_1", "node_1", "win_old", "deploy", time.Now().Add(-time.Minute)); err != nil {
		t.Fatal(err)
	}
	if err := g.Enrol.OpenWindow(t.Context(), "site_1", "node_2", "win_1", "deploy", until); errs.CodeOf(err) != errs.DuplicateMismatch {
		t.Errorf("OpenWindow(same id, other machine) = %v, want duplicate-mismatch", err)
	}
	voucher := func(edit func(*agentv1.Voucher)) *agentv1.Voucher {
		v := &agentv1.Voucher{MachineId: "node_1", WindowId: "win_1", Purpose: "deploy", BootNonce: make([]byte, 16), IssuedAtMs: time.Now().UnixMilli(), NotAfterMs: until.UnixMilli()}
		rand.Read(v.BootNonce)
		edit(v)
		return v
	}
	same := func(*agentv1.Voucher) {}
	enrol := func(v *agentv1.SignedVoucher, csr []byte, role agentv1.Role) (*agentv1.EnrollResponse, error) {
		return g.Enroll(t.Context(), &agentv1.EnrollRequest{Credential: &agentv1.EnrollRequest_Voucher{Voucher: v}, Csr: csr, Role: role})
	}
	csr := gatewaytest.CSR(t, gatewaytest.NewKey(t))
	damaged := box.Voucher(voucher(same))
	damaged.Payload = flip(damaged.Payload)
	foreign := other.Voucher(voucher(same))
	pretended := other.Voucher(voucher(same))
	pretended.SiteAgentId = box.ID
	for name, tt := range map[string]struct {
		voucher *agentv1.SignedVoucher
		role    agentv1.Role
		want    errs.Code
	}{
		"wrong role":           {box.Voucher(voucher(same)), agentv1.Role_ROLE_NODE, errs.RoleMismatch},
		"no window":            {box.Voucher(voucher(func(v *agentv1.Voucher) { v.WindowId = "win_9" })), agentv1.Role_ROLE_RAMDISK, errs.NotEnrolled},
		"closed window":        {box.Voucher(voucher(func(v *agentv1.Voucher) { v.WindowId = "win_old" })), agentv1.Role_ROLE_RAMDISK, errs.Expired},
		"other machine":        {box.Voucher(voucher(func(v *agentv1.Voucher) { v.MachineId = "node_2" })), agentv1.Role_ROLE_RAMDISK, errs.WrongAgent},
		"other purpose":        {box.Voucher(voucher(func(v *agentv1.Voucher) { v.Purpose = "inspect" })), agentv1.Role_ROLE_RAMDISK, errs.WrongAgent},
		"over":                 {box.Voucher(voucher(func(v *agentv1.Voucher) { v.IssuedAtMs, v.NotAfterMs = 1, 2 })), agentv1.Role_ROLE_RAMDISK, errs.Expired},
		"flipped byte":         {damaged, agentv1.Role_ROLE_RAMDISK, errs.SignatureInvalid},
		"another site's box":   {foreign, agentv1.Role_ROLE_RAMDISK, errs.WrongAgent},
		"another box's key":    {pretended, agentv1.Role_ROLE_RAMDISK, errs.SignatureInvalid},
		"no box of this house": {&agentv1.SignedVoucher{SiteAgentId: "ag_x", Payload: damaged.Payload, Signature: damaged.Signature}, agentv1.Role_ROLE_RAMDISK, errs.NotEnrolled},
		"nothing":              {nil, agentv1.Role_ROLE_RAMDISK, errs.NotEnrolled},
	} {
		if _, err := enrol(tt.voucher, csr, tt.role); code(err) != tt.want {
			t.Errorf("%s: Enroll = %v, want %s", name, err, tt.want)
		}
	}
	good := box.Voucher(voucher(same))
	key := gatewaytest.NewKey(t)
	csr = gatewaytest.CSR(t, key)
	first, err := enrol(good, csr, agentv1.Role_ROLE_RAMDISK)
	if err != nil || first.MachineId != "node_1" {
		t.Fatalf("Enroll = %v, %v", first, err)
	}
	again, err := enrol(good, csr, agentv1.Role_ROLE_RAMDISK)
	if err != nil || again.AgentId != first.AgentId {
		t.Errorf("same voucher and CSR: %v, %v, want %s", again.GetAgentId(), err, first.AgentId)
	}
	if _, err := enrol(good, gatewaytest.CSR(t, gatewaytest.NewKey(t)), agentv1.Role_ROLE_RAMDISK); code(err) != errs.TokenUsed {
		t.Errorf("same voucher, other CSR: %v, want token-used", err)
	}
	// A ramdisk's incarnation is its boot; the next boot's identity replaces this one.
	ram := g.Adopt(first, key, agentv1.Role_ROLE_RAMDISK)
	s := ram.Connect()
	id := submit(t, g, commands.Spec{AgentID: ram.ID, Kind: "image.stream"})
	if p, _, err := envelope.Open(s.Command(ram), ram.Bundle); err != nil || p.Incarnation != ram.BootID {
		t.Errorf("incarnation = %q, %v, want %q", p.GetIncarnation(), err, ram.BootID)
	}
	if _, err := enrol(box.Voucher(voucher(same)), gatewaytest.CSR(t, gatewaytest.NewKey(t)), agentv1.Role_ROLE_RAMDISK); err != nil {
		t.Fatal(err)
	}
	if c, _ := s.End(); c.GetCode() != string(errs.Superseded) {
		t.Errorf("older ramdisk's session ended with %v, want superseded", c)
	}
	if out := wait(t, g, id); out.Err == nil || out.Err.Code != errs.Superseded {
		t.Errorf("older ramdisk's command: %+v, want superseded", out)
	}
	if c := submitErr(t, g, commands.Spec{AgentID: ram.ID, Kind: "image.stream"}); c != errs.Superseded {
		t.Errorf("Submit to the older ramdisk = %q, want superseded", c)
	}
	if _, err := ram.Dial(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Hello{Hello: ram.Hello()}}).End(); code(err) != errs.Superseded {
		t.Errorf("older ramdisk connects: %v, want superseded", err)
	}
	agents, err := g.Store.Agents(t.Context(), store.AgentFilter{WindowID: "win_1", State: store.AgentActive})
	if err != nil || len(agents) != 1 {
		t.Errorf("active agents of the window = %+v, %v, want one", agents, err)
	}
}

func TestOnlyCertificatesOfAgentsCall(t *testing.T) {
	g := gatewaytest.New(t)
	box := g.Site("site_1")
	stranger := gatewaytest.New(t).Site("site_1")
	locate := func(h *http.Client) error {
		_, err := agentv1connect.NewArtifactServiceClient(h, g.URL).Locate(t.Context(), connect.NewRequest(&agentv1.LocateRequest{Ref: "none"}))
		return err
	}
	if err := locate(box.HTTP()); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("with the certificate: %v, want not found", err)
	}
	if err := locate(g.Client(nil)); code(err) != errs.NotEnrolled {
		t.Errorf("without a certificate: %v, want not-enrolled", err)
	}
	foreign := *box
	foreign.Key, foreign.Leaf, foreign.Answer = stranger.Key, stranger.Leaf, stranger.Answer
	if err := locate(foreign.HTTP()); err == nil || connect.CodeOf(err) == connect.CodeNotFound {
		t.Errorf("with another gateway's certificate: %v, want a refused handshake", err)
	}
	// Signed by the CA, but never recorded as issued.
	der, err := g.Keys.Authority.IssueAgent(box.ID, &stranger.Key.PublicKey, time.Now(), time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	forged := *box
	forged.Key, forged.Leaf = stranger.Key, mustParse(t, der)
	if err := locate(forged.HTTP()); code(err) != errs.NotEnrolled {
		t.Errorf("with an unrecorded certificate: %v, want not-enrolled", err)
	}
	s := box.Connect()
	if err := g.Revoke(t.Context(), box.ID); err != nil {
		t.Fatal(err)
	}
	if c, _ := s.End(); c.GetCode() != string(errs.Revoked) {
		t.Errorf("revoked session ended with %v", c)
	}
	if err := locate(box.HTTP()); code(err) != errs.Revoked {
		t.Errorf("revoked: %v, want revoked", err)
	}
}

func TestRenew(t *testing.T) {
	g := gatewaytest.New(t)
	box := g.Site("site_1")
	renew := func(csr []byte) (*agentv1.RenewResponse, error) {
		res, err := agentv1connect.NewEnrolmentServiceClient(box.HTTP(), g.URL).Renew(t.Context(), connect.NewRequest(&agentv1.RenewRequest{Csr: csr}))
		if err != nil {
			return nil, err
		}
		return res.Msg, nil
	}
	half := time.Until(box.Leaf.NotAfter) / 2
	if after := time.Until(time.UnixMilli(box.Answer.RenewAfterMs)); after < half-time.Minute || after > half*13/10 {
		t.Errorf("renew_after is in %v, want about half of the life %v", after, 2*half)
	}
	// Past its end: only Renew is left; past the grace nothing is.
	g.Clock.Add(91 * 24 * time.Hour)
	if _, err := box.Dial(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Hello{Hello: box.Hello()}}).End(); code(err) != errs.Expired {
		t.Errorf("session with a lapsed certificate: %v, want expired", err)
	}
	csr := gatewaytest.CSR(t, box.Key)
	res, err := renew(csr)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := renew(csr); err != nil || !bytes.Equal(again.Chain[0], res.Chain[0]) {
		t.Errorf("Renew(same CSR) = %v, want the same leaf", err)
	}
	old := box.Leaf
	box.Leaf = mustParse(t, res.Chain[0])
	box.Connect()
	box.Leaf = old
	g.Clock.Add(30 * 24 * time.Hour)
	if _, err := renew(csr); err == nil {
		t.Error("Renew past the grace succeeded")
	}
}

func TestCreditsAndOrder(t *testing.T) {
	g := gatewaytest.New(t)
	box := g.Site("site_1")
	s := box.Connect(func(h *agentv1.Hello) { h.Lanes = map[string]uint32{"power": 2, "query": 1} })
	var ids []string
	for range 3 {
		ids = append(ids, submit(t, g, powerOn(box.ID)))
	}
	query := powerOn(box.ID)
	query.Kind = "bmc.query"
	ids = append(ids, submit(t, g, query))
	got := map[string]bool{}
	for range 3 {
		got[commandID(t, s.Command(box))] = true
	}
	if !got[ids[0]] || !got[ids[1]] || !got[ids[3]] {
		t.Errorf("sent %v, want the first two of power %v and the query", got, ids)
	}
	s.Quiet(100 * time.Millisecond)
	s.Result(ids[1], nil)
	if f := s.Next(); f.GetResultAck().GetCommandId() != ids[1] {
		t.Fatalf("frame = %v, want the result's ack", f)
	}
	if id := commandID(t, s.Command(box)); id != ids[2] {
		t.Errorf("sent %s, want %s", id, ids[2])
	}
	more := submit(t, g, powerOn(box.ID))
	s.Quiet(100 * time.Millisecond)
	s.Send(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Credit{Credit: &agentv1.Credit{Lanes: map[string]uint32{"power": 3}}}})
	if id := commandID(t, s.Command(box)); id != more {
		t.Errorf("sent %s, want %s", id, more)
	}
}

func commandID(t *testing.T, c *agentv1.SignedCommand) string {
	t.Helper()
	p := &agentv1.CommandPayload{}
	if err := proto.Unmarshal(c.Payload, p); err != nil {
		t.Fatal(err)
	}
	return p.CommandId
}

func TestUndeliveredIsSentAgain(t *testing.T) {
	g := gatewaytest.New(t)
	box := g.Site("site_1")
	s := box.Connect()
	id := submit(t, g, powerOn(box.ID))
	first := s.Command(box)
	s.Cut() // the agent never journaled it
	s = box.Connect()
	if again := s.Command(box); !proto.Equal(again, first) {
		t.Errorf("sent again as %v, want the very same bytes", again)
	}
	s.Ack(id)
	eventually(t, "ack", func() bool {
		c, err := g.Store.Command(t.Context(), id)
		return err == nil && c.State == store.CommandReceived
	})
	s.Cut()
	// Held by the agent: not sent again.
	s = box.Connect(func(h *agentv1.Hello) { h.Open = []*agentv1.OpenCommand{{CommandId: id, State: "started"}} })
	s.Quiet(100 * time.Millisecond)
	s.Fail(id, &agentv1.Error{Code: "bmc-error", Message: "busy", Retryable: true})
	if out := wait(t, g, id); out.Err == nil || *out.Err != (errs.Error{Code: errs.BmcError, Message: "busy", Retryable: true}) {
		t.Errorf("outcome = %+v, want bmc-error", out.Err)
	}
}

func TestLostJournal(t *testing.T) {
	g := gatewaytest.New(t)
	box := g.Site("site_1")
	s := box.Connect(func(h *agentv1.Hello) { h.Lanes = map[string]uint32{"power": 1} })
	sent := submit(t, g, powerOn(box.ID))
	s.Command(box)
	queued := submit(t, g, powerOn(box.ID))
	s.Cut()
	box.JournalEpoch = "journal-2"
	s = box.Connect()
	if out := wait(t, g, sent); out.Err == nil || out.Err.Code != errs.Interrupted {
		t.Errorf("command handed to the lost journal: %+v, want interrupted", out.Err)
	}
	p, _, err := envelope.Open(s.Command(box), box.Bundle)
	if err != nil || p.CommandId != queued || p.Incarnation != "journal-2" {
		t.Errorf("command = %v, %v, want %s for journal-2", p, err, queued)
	}
}

func TestDeadlines(t *testing.T) {
	g := gatewaytest.New(t)
	box := g.Site("site_1")
	s := box.Connect(func(h *agentv1.Hello) { h.Lanes = map[string]uint32{"power": 1} })
	spec := powerOn(box.ID)
	spec.Timeout = time.Minute
	out := submit(t, g, spec)
	s.Command(box)
	stuck := submit(t, g, spec)
	g.Clock.Add(90 * time.Second)
	submit(t, g, powerOn(box.ID)) // pokes the sweep, whose timer runs on real time
	if o := wait(t, g, stuck); o.Err == nil || o.Err.Code != errs.Expired {
		t.Errorf("undelivered command: %+v, want expired", o.Err)
	}
	if c, err := g.Store.Command(t.Context(), out); err != nil || c.State == store.CommandDone {
		t.Errorf("delivered command = %s, %v, want it still open", c.State, err)
	}
	g.Clock.Add(90 * time.Second)
	submit(t, g, powerOn(box.ID))
	if o := wait(t, g, out); o.Err == nil || o.Err.Code != errs.Interrupted {
		t.Errorf("command without a result: %+v, want interrupted", o.Err)
	}
}

func TestCancel(t *testing.T) {
	g := gatewaytest.New(t)
	box := g.Site("site_1")
	s := box.Connect(func(h *agentv1.Hello) { h.Lanes = map[string]uint32{"power": 1} })
	sent := submit(t, g, powerOn(box.ID))
	s.Command(box)
	queued := submit(t, g, powerOn(box.ID))
	for _, id := range []string{queued, sent, sent} {
		if err := g.Commands.Cancel(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	if out := wait(t, g, queued); out.Err == nil || out.Err.Code != errs.Cancelled {
		t.Errorf("queued command: %+v, want cancelled", out.Err)
	}
	if f := s.Next(); f.GetCancel().GetCommandId() != sent {
		t.Fatalf("frame = %v, want Cancel", f)
	}
	s.Quiet(50 * time.Millisecond)
	s.Result(sent, []byte("too late to cancel"))
	if out := wait(t, g, sent); out.Err != nil {
		t.Errorf("outcome = %+v, want the agent's", out)
	}
}

func TestSubmitIsIdempotent(t *testing.T) {
	g := gatewaytest.New(t)
	box := g.Site("site_1")
	box.Connect()
	spec := powerOn(box.ID)
	spec.ID = "wf_1.power.0"
	for range 2 {
		if id := submit(t, g, spec); id != spec.ID {
			t.Errorf("Submit = %q, want %q", id, spec.ID)
		}
	}
	spec.Args = &bmcv1.BmcOperationRequest{Operation: "power.setPower", ArgsJson: `["off"]`}
	if c := submitErr(t, g, spec); c != errs.DuplicateMismatch {
		t.Errorf("Submit(same id, other args) = %q, want duplicate-mismatch", c)
	}
	for name, tt := range map[string]struct {
		edit func(*commands.Spec)
		want errs.Code
	}{
		"unknown agent": {func(s *commands.Spec) { s.AgentID = "ag_none" }, errs.NotEnrolled},
		"unknown kind":  {func(s *commands.Spec) { s.Kind = "bmc.dance" }, errs.UnknownKind},
		"another lane":  {func(s *commands.Spec) { s.Lane = "query" }, errs.InvalidPayload},
		"another role":  {func(s *commands.Spec) { s.Kind, s.Lane = "image.stream", "" }, errs.RoleMismatch},
		"a literal":     {func(s *commands.Spec) { s.SecretRefs = []string{"hunter2"} }, errs.InvalidPayload},
		"over a day":    {func(s *commands.Spec) { s.Timeout = 25 * time.Hour }, errs.InvalidPayload},
		"odd id":        {func(s *commands.Spec) { s.ID = "../../x" }, errs.InvalidPayload},
	} {
		spec := powerOn(box.ID)
		tt.edit(&spec)
		if c := submitErr(t, g, spec); c != tt.want {
			t.Errorf("%s: Submit = %q, want %q", name, c, tt.want)
		}
	}
}

func TestEvents(t *testing.T) {
	g := gatewaytest.Make(t)
	var mu sync.Mutex
	var heard []uint64
	g.Prepare = func(gw *gateway.Gateway) {
		gw.Sessions.OnEvent(func(_ context.Context, _ string, e *agentv1.Event) {
			mu.Lock()
			defer mu.Unlock()
			heard = append(heard, e.Seq)
		})
	}
	g.Start()
	box := g.Site("site_1")
	s := box.Connect()
	event := func(seq uint64) *agentv1.Event {
		return &agentv1.Event{Seq: seq, Name: "pxe.stage", Class: "telemetry", AtMs: 1, BodyJson: []byte(`{"n":1}`)}
	}
	ackUntil := func(s *gatewaytest.Session, want uint64) {
		t.Helper()
		for acked := uint64(0); acked != want; {
			f := s.Next().GetEventAck()
			if f == nil || f.Seq > want || f.Seq < acked {
				t.Fatalf("ack = %v, want up to %d", f, want)
			}
			acked = f.Seq
		}
	}
	for seq := uint64(1); seq <= 5; seq++ {
		s.Event(event(seq))
	}
	ackUntil(s, 5)
	s.Event(event(4)) // a repeat
	ackUntil(s, 5)
	bad := event(9) // a gap, and nothing that can be kept
	bad.BodyJson = []byte(`{`)
	s.Event(bad)
	ackUntil(s, 9)
	s.Cut()
	s = box.Connect()
	if s.Welcome.AckedEventSeq != 9 {
		t.Errorf("Welcome acks %d, want 9", s.Welcome.AckedEventSeq)
	}
	s.Cut()
	box.EventEpoch = "events-2"
	s = box.Connect()
	if s.Welcome.AckedEventSeq != 0 {
		t.Errorf("Welcome of a new epoch acks %d, want 0", s.Welcome.AckedEventSeq)
	}
	s.Event(event(1))
	ackUntil(s, 1)
	events, err := g.Store.Events(t.Context(), store.EventFilter{SiteIDs: []string{"site_0", "site_1"}, AgentID: box.ID, Name: "pxe.stage"})
	if err != nil || len(events) != 6 {
		t.Errorf("%d events kept, %v, want 6", len(events), err)
	}
	eventually(t, "hooks", func() bool { mu.Lock(); defer mu.Unlock(); return len(heard) == 7 })
}

// TestWordsOfAgentsCanBeListed has an agent send what protobuf cannot carry as
// text. What it said is listed to people: one such row would fail every list.
func TestWordsOfAgentsCanBeListed(t *testing.T) {
	g := gatewaytest.New(t)
	box := g.Site("site_1")
	s := box.Connect()
	s.Event(&agentv1.Event{Seq: 1, Name: "machine.hardware", Class: "state", AtMs: 1, BodyJson: []byte("{\"a\":\"\xff\"}")})
	if f := s.Next().GetEventAck(); f.GetSeq() != 1 {
		t.Fatalf("ack = %v, want 1", f)
	}
	events, err := g.Store.Events(t.Context(), store.EventFilter{AgentID: box.ID, SiteIDs: []string{"site_1"}})
	if err != nil {
		t.Fatal(err)
	}
	refused := false
	for _, e := range events {
		refused = refused || e.Name == "event.refused"
		if !utf8.ValidString(e.Name + e.Key + e.BodyJSON) {
			t.Errorf("event kept as %q", e.BodyJSON)
		}
	}
	if !refused {
		t.Error("no event tells of the refusal")
	}

	id := submit(t, g, powerOn(box.ID))
	s.Command(box)
	s.Ack(id)
	long := "x" + strings.Repeat("é", 1<<20)
	s.Send(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Progress{Progress: &agentv1.CommandProgress{CommandId: id, Phase: "p", Message: long}}})
	eventually(t, "progress", func() bool { return g.Commands.Progress(id) != "" })
	if text := g.Commands.Progress(id); !utf8.ValidString(text) {
		t.Errorf("progress ends in half a letter: %q", text[len(text)-4:])
	}
	s.Fail(id, &agentv1.Error{Code: "bmc-error", Message: long})
	if out := wait(t, g, id); out.Err == nil || !utf8.ValidString(out.Err.Message) {
		t.Error("the error's message ends in half a letter")
	}
}

func TestOneSessionPerAgent(t *testing.T) {
	g := gatewaytest.New(t)
	box := g.Site("site_1")
	first := box.Connect()
	second := box.Connect()
	if c, _ := first.End(); c.GetCode() != string(errs.Superseded) {
		t.Errorf("older session of the same boot ended with %v, want superseded", c)
	}
	if second.Welcome.SessionEpoch <= first.Welcome.SessionEpoch {
		t.Errorf("session epochs %d, %d do not rise", first.Welcome.SessionEpoch, second.Welcome.SessionEpoch)
	}
	second.Quiet(50 * time.Millisecond)
	if !g.Sessions.Online(box.ID) {
		t.Error("Online = false with a session")
	}

	// A reboot is a new boot_id and fine; the old one coming back is a clone.
	box.BootID = "boot-2"
	third := box.Connect()
	second.End()
	clone := *box
	clone.BootID = "boot-1"
	c, _ := clone.Dial(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Hello{Hello: clone.Hello()}}).End()
	if c.GetCode() != string(errs.IdentityCloned) {
		t.Errorf("a boot that came back: %v, want identity-cloned", c)
	}
	if c, _ := third.End(); c.GetCode() != string(errs.IdentityCloned) {
		t.Errorf("the other box: %v, want identity-cloned", c)
	}
	if _, err := box.Dial(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Hello{Hello: box.Hello()}}).End(); code(err) != errs.IdentityCloned {
		t.Errorf("held box connects: %v, want identity-cloned", err)
	}
	events, err := g.Store.Events(t.Context(), store.EventFilter{Name: "identity.cloned"})
	if err != nil || len(events) != 1 {
		t.Errorf("alarms = %+v, %v, want one", events, err)
	}
	if err := g.Store.SetAgentState(t.Context(), box.ID, store.AgentActive); err != nil {
		t.Fatal(err)
	}
	box.Connect()
}

func TestHelloIsChecked(t *testing.T) {
	g := gatewaytest.New(t)
	box := g.Site("site_1")
	for name, tt := range map[string]struct {
		edit func(*agentv1.Hello)
		want errs.Code
	}{
		"other agent":      {func(h *agentv1.Hello) { h.AgentId = "ag_other" }, errs.WrongAgent},
		"other role":       {func(h *agentv1.Hello) { h.Role = agentv1.Role_ROLE_NODE }, errs.RoleMismatch},
		"protocol 2 only":  {func(h *agentv1.Hello) { h.ProtocolMin, h.ProtocolMax = 2, 2 }, errs.ProtocolUnsupported},
		"no boot_id":       {func(h *agentv1.Hello) { h.BootId = "" }, errs.InvalidPayload},
		"no journal_epoch": {func(h *agentv1.Hello) { h.JournalEpoch = "" }, errs.InvalidPayload},
		"a long version":   {func(h *agentv1.Hello) { h.Version = strings.Repeat("1", 1<<20) }, errs.InvalidPayload},
		"a long driver": {func(h *agentv1.Hello) {
			h.Drivers = []*agentv1.AdvertisedDriver{{Id: "acme", Version: "1", Capabilities: []string{strings.Repeat("x", 1<<20)}}}
		}, errs.InvalidPayload},
	} {
		hello := box.Hello()
		tt.edit(hello)
		c, _ := box.Dial(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Hello{Hello: hello}}).End()
		if c.GetCode() != string(tt.want) {
			t.Errorf("%s: Close = %v, want %s", name, c, tt.want)
		}
	}
	if c, _ := box.Dial(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Heartbeat{Heartbeat: &agentv1.Heartbeat{}}}).End(); c.GetCode() != string(errs.InvalidPayload) {
		t.Errorf("no Hello: Close = %v, want invalid-payload", c)
	}
}

func TestSilenceEndsASession(t *testing.T) {
	g := gatewaytest.Make(t)
	g.Timing = sessions.Timing{Heartbeat: 50 * time.Millisecond, Dead: 600 * time.Millisecond, Send: time.Second}
	g.Start()
	box := g.Site("site_1")
	s := box.Connect()
	end := time.Now().Add(1200 * time.Millisecond)
	for seq := uint64(1); time.Now().Before(end); seq++ {
		s.Send(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Heartbeat{Heartbeat: &agentv1.Heartbeat{Seq: seq}}})
		time.Sleep(50 * time.Millisecond)
	}
	if !g.Sessions.Online(box.ID) {
		t.Error("a session with heartbeats ended")
	}
	if c, _ := s.End(); c.GetCode() != string(errs.Timeout) {
		t.Errorf("Close = %v, want timeout", c)
	}
	eventually(t, "offline", func() bool { return !g.Sessions.Online(box.ID) })
}

// TestPeerThatDoesNotRead fills the stream's window: the session must end by
// itself, and must not hold up the one that takes over.
func TestPeerThatDoesNotRead(t *testing.T) {
	g := gatewaytest.Make(t)
	g.Timing = sessions.Timing{Heartbeat: time.Second, Dead: time.Minute, Send: 3 * time.Second}
	g.Start()
	box := g.Site("site_1")
	deaf := agentv1connect.NewSessionServiceClient(box.HTTP(), g.URL).Connect(t.Context())
	if err := deaf.Send(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Hello{Hello: box.Hello()}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "online", func() bool { return g.Sessions.Online(box.ID) })
	spec := powerOn(box.ID)
	noise := make([]byte, 1500<<10) // random: frames are compressed
	rand.Read(noise)
	spec.Args = &bmcv1.BmcOperationRequest{ArgsJson: hex.EncodeToString(noise)}
	for range 8 {
		submit(t, g, spec)
	}
	eventually(t, "offline", func() bool { return !g.Sessions.Online(box.ID) })
	s := box.Connect()
	for range 8 {
		s.Command(box) // all came, those of the lost session too
	}
}

// TestLargeFramesWaitAtTheirSender has an agent send large events faster than
// they are taken: they stay on its side of the line, not in the gateway's memory.
func TestLargeFramesWaitAtTheirSender(t *testing.T) {
	g := gatewaytest.Make(t)
	free := make(chan struct{})
	g.Prepare = func(gw *gateway.Gateway) {
		gw.Sessions.OnEvent(func(context.Context, string, *agentv1.Event) { <-free })
	}
	g.Start()
	s := g.Site("site_1").Connect()
	const events = 20
	var sent atomic.Int32
	go func() {
		for seq := range uint64(events) {
			if s.Stream.Send(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Event{Event: &agentv1.Event{
				Seq: seq + 1, Name: "pxe.stage", Class: "telemetry", BodyJson: bytes.Repeat([]byte("1"), 4<<20)}}}) != nil {
				return
			}
			sent.Add(1)
		}
	}()
	time.Sleep(3 * time.Second)
	if n := sent.Load(); n > events/2 {
		t.Errorf("%d of %d events of 4 MiB have left their sender while none is taken", n, events)
	}
	close(free)
	eventually(t, "the rest", func() bool { return sent.Load() == events })
}

func TestNewTokenRefuses(t *testing.T) {
	g := gatewaytest.New(t)
	for name, tt := range map[string]struct {
		role          agentv1.Role
		site, machine string
		ttl           time.Duration
		ok            bool
	}{
		"site":              {agentv1.Role_ROLE_SITE, "site_1", "", time.Hour, true},
		"node":              {agentv1.Role_ROLE_NODE, "site_1", "node_1", time.Hour, true},
		"ramdisk":           {agentv1.Role_ROLE_RAMDISK, "site_1", "node_1", time.Hour, false},
		"site and machine":  {agentv1.Role_ROLE_SITE, "site_1", "node_1", time.Hour, false},
		"node of nothing":   {agentv1.Role_ROLE_NODE, "site_1", "", time.Hour, false},
		"no site":           {agentv1.Role_ROLE_SITE, "", "", time.Hour, false},
		"no time":           {agentv1.Role_ROLE_SITE, "site_1", "", 0, false},
		"nearly for ever":   {agentv1.Role_ROLE_SITE, "site_1", "", 1000 * 24 * time.Hour, false},
		"role of no member": {agentv1.Role(9), "site_1", "", time.Hour, false},
	} {
		if _, err := g.Enrol.NewToken(t.Context(), tt.role, tt.site, tt.machine, tt.ttl); (err == nil) != tt.ok {
			t.Errorf("%s: NewToken = %v, want allowed %v", name, err, tt.ok)
		}
	}
	join, err := g.Enrol.NewToken(t.Context(), agentv1.Role_ROLE_NODE, "site_1", "node_1", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	node := g.Join(join, agentv1.Role_ROLE_NODE)
	if node.Answer.MachineId != "node_1" {
		t.Errorf("node's machine = %q, want node_1", node.Answer.MachineId)
	}
	node.Connect()
}

func TestArtifacts(t *testing.T) {
	g := gatewaytest.New(t)
	box := g.Site("site_1")
	plain := make([]byte, 9<<20) // three chunks once packed: random bytes do not shrink
	rand.Read(plain)
	enc, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	packed := enc.EncodeAll(plain, nil)
	a, err := g.Artifacts.Import(t.Context(), "node", "amd64", "raw.zst", bytes.NewReader(packed))
	if err != nil {
		t.Fatal(err)
	}
	if sum := sha256.Sum256(packed); a.SHA256 != hex.EncodeToString(sum[:]) {
		t.Errorf("sha256 = %s", a.SHA256)
	}
	if sum := sha256.Sum256(plain); a.UnpackedSHA256 != hex.EncodeToString(sum[:]) || a.UnpackedSizeBytes != uint64(len(plain)) {
		t.Errorf("unpacked = %s, %d bytes", a.UnpackedSHA256, a.UnpackedSizeBytes)
	}
	client := agentv1connect.NewArtifactServiceClient(box.HTTP(), g.URL)
	var loc *agentv1.LocateResponse
	for _, ref := range []string{"node", a.SHA256} {
		res, err := client.Locate(t.Context(), connect.NewRequest(&agentv1.LocateRequest{Ref: ref, Arch: "amd64"}))
		if err != nil || res.Msg.Sha256 != a.SHA256 {
			t.Fatalf("Locate(%s) = %v, %v", ref, res, err)
		}
		loc = res.Msg
	}
	if _, err := client.Locate(t.Context(), connect.NewRequest(&agentv1.LocateRequest{Ref: "node", Arch: "arm64"})); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("Locate(other arch) = %v, want not found", err)
	}
	get := func(h *http.Client, path, ranges string) (int, []byte) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, g.URL+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if ranges != "" {
			req.Header.Set("Range", ranges)
		}
		res, err := h.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		body, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		return res.StatusCode, body
	}
	if status, body := get(box.HTTP(), loc.Urls[0], ""); status != 200 || !bytes.Equal(body, packed) {
		t.Errorf("GET = %d, %d bytes", status, len(body))
	}
	if status, body := get(box.HTTP(), loc.Urls[0], "bytes=5000000-"); status != 206 || !bytes.Equal(body, packed[5000000:]) {
		t.Errorf("GET with a range = %d, %d bytes", status, len(body))
	}
	_, list := get(box.HTTP(), loc.Urls[0]+"/chunks", "")
	if sum := sha256.Sum256(list); hex.EncodeToString(sum[:]) != loc.ChunksSha256 || len(list) != 3*32 {
		t.Errorf("chunk list of %d bytes does not fit its digest", len(list))
	}
	for i := 0; i < 3; i++ {
		chunk := packed[i*int(loc.ChunkSizeBytes) : min((i+1)*int(loc.ChunkSizeBytes), len(packed))]
		if sum := sha256.Sum256(chunk); !bytes.Equal(sum[:], list[i*32:(i+1)*32]) {
			t.Errorf("chunk %d does not fit its digest", i)
		}
	}
	for _, path := range []string{"/artifacts/" + strings.Repeat("0", 64), "/artifacts/..%2fca.key", "/artifacts/"} {
		if status, _ := get(box.HTTP(), path, ""); status != 404 {
			t.Errorf("GET %s = %d, want 404", path, status)
		}
	}
	if status, _ := get(g.Client(nil), loc.Urls[0], ""); status != 403 {
		t.Errorf("GET without a certificate = %d, want 403", status)
	}
	for name, tt := range map[string]struct {
		name, format string
		data         []byte
	}{
		"not zstd":    {"x", "raw.zst", plain[:1000]},
		"cut off":     {"x", "raw.zst", packed[:len(packed)-10]},
		"trailing":    {"x", "raw.zst", append(bytes.Clone(packed), "tail"...)},
		"empty":       {"x", "raw.zst", nil},
		"empty disc":  {"x", "raw", nil},
		"other form":  {"x", "qcow2", packed},
		"odd name":    {"../x", "raw.zst", packed},
		"digest-like": {a.SHA256, "raw.zst", packed},
	} {
		if _, err := g.Artifacts.Import(t.Context(), tt.name, "amd64", tt.format, bytes.NewReader(tt.data)); errs.CodeOf(err) != errs.InvalidArgs {
			t.Errorf("%s: Import = %v, want invalid-args", name, err)
		}
	}
	if files, err := os.ReadDir(filepath.Join(g.Dir, "artifacts")); err != nil || len(files) != 2 {
		t.Errorf("%d files kept, %v, want the artifact and its list", len(files), err)
	}
	// A disc is kept as it is.
	disc, err := g.Artifacts.Import(t.Context(), "rescue.iso", "amd64", "raw", bytes.NewReader(plain[:1000]))
	sum := sha256.Sum256(plain[:1000])
	if want := hex.EncodeToString(sum[:]); err != nil || disc.SHA256 != want || disc.UnpackedSHA256 != want || disc.SizeBytes != 1000 || disc.UnpackedSizeBytes != 1000 {
		t.Errorf("Import of a disc = %+v, %v, want its own digest twice", disc, err)
	}
}

func TestOneGatewayPerFolder(t *testing.T) {
	g := gatewaytest.New(t)
	if _, err := gateway.New(g.Dir, gateway.Options{Log: g.Log}); err == nil || !strings.Contains(err.Error(), "another gateway") {
		t.Errorf("second New = %v, want a refusal", err)
	}
}

func mustParse(t *testing.T, der []byte) *x509.Certificate {
	t.Helper()
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}
