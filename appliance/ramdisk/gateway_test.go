package ramdisk

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent"
	"github.com/better-compute/site-appliance/appliance/agent/bootinfo"
	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/gatewaytest"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// TestGatewayRestrains: the orders that a real gateway signs into the assignment it
// sends to its box reach the ramdisk, which does what they say and no more, by
// commands of that same gateway. A box that hands over none, or those of another
// window, has nothing written.
func TestGatewayRestrains(t *testing.T) {
	for name, tt := range map[string]struct {
		purpose string
		hand    func(signed []byte) []byte // what the box makes of them
		want    errs.Code
		says    string
	}{
		"deploy":            {"deploy", bytes.Clone, "", ""},
		"inspect":           {"inspect", bytes.Clone, errs.OperationNotAllowed, "booted for"},
		"left out":          {"deploy", func([]byte) []byte { return nil }, errs.OperationNotAllowed, "no signed assignment"},
		"changed by a byte": {"deploy", func(b []byte) []byte { b[len(b)-1] ^= 1; return b }, errs.SignatureInvalid, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHome(t)
			m := h.assign(t, tt.purpose)
			if len(m.Assignment) == 0 {
				t.Fatal("the gateway signed nothing into the assignment")
			}
			m.Assignment = tt.hand(bytes.Clone(m.Assignment))
			agentID := h.boot(t, m)
			req := &lab{machine: h.machine, raw: h.raw, stored: h.stored}
			args := req.request()
			args.Seed = nil
			out := h.send(t, commands.Spec{AgentID: agentID, TargetNodeID: "node_1", Kind: StreamKind, Args: args})
			code, message := errs.Code(""), ""
			if out.Err != nil {
				code, message = out.Err.Code, out.Err.Message
			}
			if code != tt.want || !strings.Contains(message, tt.says) {
				t.Errorf("image.stream for %s = %q: %s, want %q with %q", tt.purpose, code, message, tt.want, tt.says)
			}
		})
	}
}

// home is a real gateway, a box's agent that takes assignments, and a machine.
type home struct {
	machine
	raw, stored []byte
	g           *gatewaytest.Gateway
	box         *agent.Agent
	assigned    chan *pxev1.AssignRequest
	until       time.Time
}

func newHome(t *testing.T) *home {
	t.Helper()
	h := &home{machine: newMachine(t), g: gatewaytest.New(t), assigned: make(chan *pxev1.AssignRequest, 1), until: time.Now().Add(time.Hour)}
	h.raw, h.stored = newImage(t)
	text, err := h.g.Enrol.NewToken(t.Context(), agentv1.Role_ROLE_SITE, "site_1", "", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	join, err := trust.ParseJoin(text)
	if err != nil {
		t.Fatal(err)
	}
	h.box, err = agent.New(agent.Config{Role: agentv1.Role_ROLE_SITE, StateDir: t.TempDir(), Join: &join, Log: slog.New(slog.DiscardHandler), Kinds: []dispatch.Kind{{
		Name: cmdkind.Assign, Lane: cmdkind.Lane(cmdkind.Assign), Roles: []agentv1.Role{agentv1.Role_ROLE_SITE},
		Decode: func(args []byte) (dispatch.Operation, error) {
			req := &pxev1.AssignRequest{}
			return dispatch.Operation{Name: cmdkind.Assign, Value: req}, proto.Unmarshal(args, req)
		},
		Run: func(_ context.Context, c dispatch.Call) ([]byte, error) {
			h.assigned <- c.Operation.Value.(*pxev1.AssignRequest)
			return nil, nil
		},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	run(t, h.box.Run)
	h.await(t, "the box to come home", func() bool { return h.box.AgentID() != "" && h.g.Sessions.Online(h.box.AgentID()) })
	return h
}

func (h *home) await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(60 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

func (h *home) send(t *testing.T, spec commands.Spec) commands.Outcome {
	t.Helper()
	id, err := h.g.Commands.Submit(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	out, err := h.g.Commands.Wait(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// assign has the gateway send the box what the machine is to boot.
func (h *home) assign(t *testing.T, purpose string) *pxev1.Machine {
	t.Helper()
	if err := h.g.Enrol.OpenWindow(t.Context(), "site_1", "node_1", "win_1", purpose, h.until); err != nil {
		t.Fatal(err)
	}
	m := &pxev1.Machine{MachineId: "node_1", Macs: []string{"52:54:00:aa:00:01"}, Action: pxev1.Action_ACTION_RAMDISK, Purpose: purpose, WindowId: "win_1", WindowUntilMs: h.until.UnixMilli()}
	if out := h.send(t, commands.Spec{AgentID: h.box.AgentID(), Kind: cmdkind.Assign, Args: &pxev1.AssignRequest{Version: 1, Machines: []*pxev1.Machine{m}}}); out.Err != nil {
		t.Fatal(out.Err)
	}
	return (<-h.assigned).Machines[0]
}

// boot runs the machine's ramdisk with what a box hands over, and returns its agent.
func (h *home) boot(t *testing.T, m *pxev1.Machine) string {
	t.Helper()
	voucher, err := h.box.SignVoucher(&agentv1.Voucher{MachineId: m.MachineId, BootNonce: []byte("0123456789abcdef"), WindowId: m.WindowId, Purpose: m.Purpose,
		IssuedAtMs: time.Now().UnixMilli(), NotAfterMs: m.WindowUntilMs})
	if err != nil {
		t.Fatal(err)
	}
	encoded, err := proto.Marshal(voucher)
	if err != nil {
		t.Fatal(err)
	}
	artifacts := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path != "/artifacts/"+sum(h.stored) {
			http.NotFound(w, req)
			return
		}
		http.ServeContent(w, req, "", time.Time{}, bytes.NewReader(h.stored))
	}))
	t.Cleanup(artifacts.Close)
	address, err := url.Parse(h.g.URL)
	if err != nil {
		t.Fatal(err)
	}
	bundle := h.box.Bundle()
	ca, roots := bundle.CASPKI(), bundle.RootSet()
	info, err := json.Marshal(bootinfo.Info{
		MachineID: m.MachineId, SiteID: "site_1", GatewayURLs: bundle.URLs(), Via: address.Host, CASPKI: ca[:], RootSet: roots[:],
		Artifacts: artifacts.URL + "/artifacts", Voucher: encoded, Assignment: m.Assignment,
	})
	if err != nil {
		t.Fatal(err)
	}
	h.write(t, h.dev, "boot.json", string(info))
	run(t, func(ctx context.Context) error {
		return Run(ctx, Config{BootFile: filepath.Join(h.dev, "boot.json"), Sys: h.sys, Proc: h.proc, Dev: h.dev, Version: "test", Log: slog.New(slog.DiscardHandler)})
	})
	id := ""
	h.await(t, "the ramdisk to come home", func() bool {
		agents, err := h.g.Store.Agents(t.Context(), store.AgentFilter{})
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range agents {
			if a.Role == agentv1.Role_ROLE_RAMDISK && h.g.Sessions.Online(a.ID) {
				id = a.ID
			}
		}
		return id != ""
	})
	return id
}
