package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/klauspost/compress/zstd"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/agentv1/agentv1connect"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/image/imagev1"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// place is a site in memory: a box, and a machine that boots what it is told.
type place struct {
	t    *testing.T
	ctx  context.Context
	wg   sync.WaitGroup
	join trust.Join

	mu       sync.Mutex
	box      *peer
	assigned *pxev1.AssignRequest
	power    string
	device   string
	disk     string
	nodeJoin string
	stop     context.CancelFunc // of the machine's agent
	end      func()             // of all of it
	log      []string
	telling  []*agentv1.Event // what the box says after its next result
	told     uint64
}

// peer is an agent of the smallest kind that speaks the line for real.
type peer struct {
	id     string
	role   agentv1.Role
	key    *ecdsa.PrivateKey
	bundle *trust.Bundle
	http   *http.Client
	base   string
}

func (p *place) peer(role agentv1.Role, join trust.Join, credential func(*agentv1.EnrollRequest)) (*peer, error) {
	base := join.URLs[0]
	u, err := url.Parse(base)
	if err != nil {
		return nil, err
	}
	client := func(certificates ...tls.Certificate) *http.Client {
		c := trust.PinnedTLS(join.CASPKI, u.Hostname(), func(time.Time) time.Time { return time.Now() })
		c.Certificates = certificates
		return &http.Client{Transport: &http.Transport{TLSClientConfig: c, ForceAttemptHTTP2: true}}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		return nil, err
	}
	req := &agentv1.EnrollRequest{Csr: csr, Role: role, SiteId: join.SiteID, ProtocolMin: 1, ProtocolMax: 1, Nonce: []byte("nonce")}
	credential(req)
	res, err := agentv1connect.NewEnrolmentServiceClient(client(), base).Enroll(p.ctx, connect.NewRequest(req))
	if err != nil {
		return nil, fmt.Errorf("enrol: %w", err)
	}
	bundle, err := trust.VerifyFirst(join.RootSet, res.Msg.Bundle, time.Now())
	if err != nil {
		return nil, err
	}
	return &peer{id: res.Msg.AgentId, role: role, key: key, bundle: bundle, base: base,
		http: client(tls.Certificate{Certificate: res.Msg.Chain, PrivateKey: key})}, nil
}

// hold keeps a session and runs the commands that come, until ctx ends.
func (p *place) hold(ctx context.Context, a *peer, run func(context.Context, *peer, *agentv1.CommandPayload) proto.Message, events ...*agentv1.Event) {
	p.wg.Go(func() {
		stream := agentv1connect.NewSessionServiceClient(a.http, a.base).Connect(ctx)
		// Ending the context alone leaves the stream up while nothing is sent.
		p.wg.Go(func() { <-ctx.Done(); stream.CloseRequest() })
		send := func(f *agentv1.AgentFrame) bool { return stream.Send(f) == nil }
		lanes := map[string]uint32{"query": 64, "power": 64, "provision": 16, "transfer": 4}
		send(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Hello{Hello: &agentv1.Hello{AgentId: a.id, Role: a.role, BootId: "boot-" + a.id, JournalEpoch: "journal-" + a.id,
			ProtocolMin: 1, ProtocolMax: 1, Version: "test", Lanes: lanes, EventEpoch: "events-" + a.id, EventNextSeq: 1}}})
		for {
			f, err := stream.Receive()
			if err != nil {
				return
			}
			switch frame := f.Frame.(type) {
			case *agentv1.GatewayFrame_Welcome:
				for _, e := range events {
					send(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Event{Event: e}})
				}
			case *agentv1.GatewayFrame_Heartbeat:
				send(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Heartbeat{Heartbeat: &agentv1.Heartbeat{Seq: 1, Echo: frame.Heartbeat.Seq}}})
			case *agentv1.GatewayFrame_Close:
				return
			case *agentv1.GatewayFrame_Command:
				payload, _, err := envelope.Open(frame.Command, a.bundle)
				if err != nil {
					p.t.Errorf("command: %v", err)
					return
				}
				send(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Ack{Ack: &agentv1.CommandAck{CommandId: payload.CommandId}}})
				result, err := proto.Marshal(run(ctx, a, payload))
				if err != nil {
					p.t.Errorf("result: %v", err)
				}
				send(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Result{Result: &agentv1.CommandResult{CommandId: payload.CommandId, Outcome: &agentv1.CommandResult_Result{Result: result}}}})
				p.mu.Lock()
				telling := p.telling
				if a.role == agentv1.Role_ROLE_SITE {
					p.telling = nil
				} else {
					telling = nil
				}
				p.mu.Unlock()
				for _, e := range telling {
					send(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Event{Event: e}})
				}
			}
		}
	})
}

// resolve fetches a secret by reference, as the command allows.
func (p *place) resolve(ctx context.Context, a *peer, command, ref string) string {
	res, err := agentv1connect.NewSecretServiceClient(a.http, a.base).Resolve(ctx, connect.NewRequest(&agentv1.ResolveRequest{Refs: []string{ref}, CommandId: command}))
	if err != nil {
		p.t.Errorf("resolve %s: %v", ref, err)
		return ""
	}
	return string(res.Msg.Values[ref])
}

func (p *place) runBox(ctx context.Context, a *peer, c *agentv1.CommandPayload) proto.Message {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c.Kind == "pxe.assign" {
		p.assigned = &pxev1.AssignRequest{}
		p.take(c.Args, p.assigned)
		p.log = append(p.log, "assign "+p.assigned.Machines[0].Action.String())
		return &pxev1.AssignResult{Version: p.assigned.Version}
	}
	if c.Kind == "artifact.fetch" {
		req := &pxev1.FetchRequest{}
		p.take(c.Args, req)
		p.log = append(p.log, "fetch "+strings.Join(req.Sha256, " "))
		return &pxev1.FetchResult{Bytes: 1}
	}
	op := &bmcv1.BmcOperationRequest{}
	p.take(c.Args, op)
	if got := p.resolve(ctx, a, c.CommandId, op.CredentialsRef); !strings.Contains(got, "hunter2") {
		p.t.Errorf("%s got credential %q", c.Kind, got)
	}
	answer := "null"
	switch op.Operation {
	case "power.getPower":
		answer = `"` + p.power + `"`
	case "power.setPower":
		p.power = strings.Trim(op.ArgsJson, `["]`)
		p.log = append(p.log, "power "+p.power)
		p.boot()
	case "virtual-media.insert":
		p.log = append(p.log, "insert "+op.ArgsJson)
	case "management.setBootDevice":
		var d []struct{ Device string }
		if err := json.Unmarshal([]byte(op.ArgsJson), &d); err != nil || len(d) != 1 {
			p.t.Errorf("setBootDevice %s: %v", op.ArgsJson, err)
			break
		}
		p.device = d[0].Device
		p.log = append(p.log, "boot "+p.device)
	}
	return &bmcv1.BmcOperationResult{ResultJson: answer}
}

func (p *place) take(args []byte, m proto.Message) {
	if err := envelope.StrictUnmarshal(args, m); err != nil {
		p.t.Errorf("arguments: %v", err)
	}
}

// boot stops the machine's agent, and starts what a machine with power boots.
func (p *place) boot() {
	if p.stop != nil {
		p.stop()
		p.stop = nil
	}
	if p.power != "on" {
		return
	}
	device := p.device
	p.device = "disk"
	ctx, stop := context.WithCancel(p.ctx)
	p.stop = stop
	if device == "pxe" && p.assigned.Machines[0].Action == pxev1.Action_ACTION_RAMDISK {
		m := p.assigned.Machines[0]
		voucher, err := trust.SignVoucher(p.box.key, p.box.id, &agentv1.Voucher{MachineId: m.MachineId, BootNonce: bytes.Repeat([]byte{7}, 32), WindowId: m.WindowId, Purpose: m.Purpose,
			IssuedAtMs: time.Now().UnixMilli(), NotAfterMs: min(m.WindowUntilMs, time.Now().Add(time.Hour).UnixMilli())})
		if err != nil {
			p.t.Errorf("voucher: %v", err)
			return
		}
		p.start(ctx, agentv1.Role_ROLE_RAMDISK, p.join, func(r *agentv1.EnrollRequest) { r.Credential = &agentv1.EnrollRequest_Voucher{Voucher: voucher} },
			&agentv1.Event{Seq: 1, AtMs: time.Now().UnixMilli(), Name: "machine.hardware", Class: "state", Key: m.MachineId, BodyJson: []byte(`{"source":"ramdisk","serial":"SN1"}`)})
		return
	}
	if m := p.assigned.GetMachines(); device == "pxe" && m[0].Action != pxev1.Action_ACTION_LOCAL_DISK {
		stage := map[pxev1.Action]string{pxev1.Action_ACTION_ISO: "iso", pxev1.Action_ACTION_KERNEL: "initrd", pxev1.Action_ACTION_UKI: "uki"}[m[0].Action]
		body, err := json.Marshal(map[string]string{"mac": m[0].Macs[0], "machine_id": m[0].MachineId, "stage": stage, "detail": "window " + m[0].WindowId})
		if err != nil {
			p.t.Errorf("event: %v", err)
		}
		p.told++
		p.telling = append(p.telling, &agentv1.Event{Seq: p.told, AtMs: time.Now().UnixMilli(), Name: "pxe.stage", Class: "telemetry", Key: m[0].Macs[0], BodyJson: body})
		return
	}
	if p.disk != "" {
		join, err := trust.ParseJoin(p.nodeJoin)
		if err != nil {
			p.t.Errorf("node join string: %v", err)
			return
		}
		p.start(ctx, agentv1.Role_ROLE_NODE, join, func(r *agentv1.EnrollRequest) {
			r.Credential = &agentv1.EnrollRequest_Token{Token: string(join.Token.Reveal())}
		})
	}
}

// start has the machine enrol after a while, as machines do.
func (p *place) start(ctx context.Context, role agentv1.Role, join trust.Join, credential func(*agentv1.EnrollRequest), events ...*agentv1.Event) {
	p.wg.Go(func() {
		a, err := p.peer(role, join, credential)
		if err != nil {
			p.t.Errorf("%v: %v", role, err)
			return
		}
		p.hold(ctx, a, p.runMachine, events...)
	})
}

func (p *place) runMachine(ctx context.Context, a *peer, c *agentv1.CommandPayload) proto.Message {
	if c.Kind == "disk.wipe" {
		req, res := &imagev1.WipeRequest{}, &imagev1.WipeResult{}
		p.take(c.Args, req)
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, d := range req.Disks {
			p.log = append(p.log, "wipe "+d.Serial)
			res.Disks = append(res.Disks, &imagev1.WipedDisk{Disk: "sda", Serial: d.Serial, Method: "discard"})
		}
		return res
	}
	stream := &imagev1.StreamRequest{}
	p.take(c.Args, stream)
	join := p.resolve(ctx, a, c.CommandId, stream.Seed.NodeJoinRef)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.disk, p.nodeJoin = stream.Sha256, join
	p.log = append(p.log, "stream to "+stream.Disk.Serial+" as "+stream.Seed.Hostname)
	return &imagev1.StreamResult{Disk: "sda", Sha256: stream.Sha256, UnpackedSha256: stream.UnpackedSha256, BytesWritten: stream.UnpackedSizeBytes}
}

// newPlace adds a site, and has its box come online.
func newPlace(t *testing.T, c *cli) *place {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	p := &place{t: t, ctx: ctx, power: "off", device: "disk", end: stop}
	end := p.end
	p.end = func() { end(); p.wg.Wait() }
	join, err := trust.ParseJoin(c.run("", "site", "add", "lab"))
	if err != nil {
		t.Fatal(err)
	}
	p.join = join
	p.box, err = p.peer(agentv1.Role_ROLE_SITE, join, func(r *agentv1.EnrollRequest) {
		r.Credential = &agentv1.EnrollRequest_Token{Token: string(join.Token.Reveal())}
	})
	if err != nil {
		t.Fatal(err)
	}
	p.hold(ctx, p.box, p.runBox)
	c.run("", "pool", "add", "metal", "--site", "lab")
	c.run(`{"username":"root","password":"hunter2"}`, "secret", "put", "bmc")
	for deadline := time.Now().Add(10 * time.Second); !strings.Contains(c.run("", "site", "list"), "online"); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the box is never online")
		}
	}
	return p
}

// enroll adds the one machine.
func (p *place) enroll(c *cli, name, driver string) {
	p.t.Helper()
	c.run("", "metal", "enroll", name, "--pool", "metal", "--driver", driver, "--address", "192.0.2.7", "--credentials", "bmc", "--mac", "52:54:00:00:00:01")
}

// TestOverTheLine: the command line drives a machine through a gateway with
// real TLS, enrolment, signatures, sessions and secrets; only the site is made up.
func TestOverTheLine(t *testing.T) {
	c := newCLI(t)
	defer func() { c.halt() }()
	p := newPlace(t, c)
	join := p.join
	defer p.end()
	p.enroll(c, "m1", "ipmi")

	if out := c.run("", "metal", "power", "m1"); out != "off" {
		t.Errorf("metal power = %q, want off", out)
	}
	c.run("", "metal", "power", "m1", "on")
	if out := c.run("", "metal", "power", "m1"); out != "on" {
		t.Errorf("metal power = %q, want on", out)
	}

	out := c.run("", "metal", "inspect", "m1", "--wait")
	if !strings.Contains(out, "hardware.wait") {
		t.Errorf("metal inspect --wait = %q", out)
	}
	if out := c.run("", "metal", "show", "m1"); !strings.Contains(out, "inspected") || !strings.Contains(out, `"serial":"SN1"`) {
		t.Errorf("metal show = %q", out)
	}

	image := filepath.Join(t.TempDir(), "node.raw.zst")
	writer, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(image, writer.EncodeAll(bytes.Repeat([]byte("disk"), 1<<18), nil), 0o600); err != nil {
		t.Fatal(err)
	}
	c.run("", "artifact", "import", image, "--name", "node", "--arch", "amd64")
	p.mu.Lock()
	p.log = nil
	p.mu.Unlock()
	out = c.run("", "metal", "deploy", "m1", "--image", "node", "--disk-serial", "S1", "--hostname", "web-1", "--wait")
	if !strings.Contains(out, "node.wait") {
		t.Errorf("metal deploy --wait = %q", out)
	}
	want := []string{"assign ACTION_RAMDISK", "boot pxe", "power on", "stream to S1 as web-1", "assign ACTION_LOCAL_DISK", "power off", "boot disk", "power on"}
	p.mu.Lock()
	if !slices.Equal(p.log, want) {
		t.Errorf("the site saw %q, want %q", p.log, want)
	}
	nodeJoin := p.nodeJoin
	p.mu.Unlock()
	if out := c.run("", "metal", "list"); !strings.Contains(out, "deployed") || !strings.Contains(out, "node online") {
		t.Errorf("metal list = %q", out)
	}
	if out := c.run("", "events", "--site", "lab"); !strings.Contains(out, "workflow.ended") || !strings.Contains(out, "power.set") {
		t.Errorf("events = %q", out)
	}
	for _, secret := range []string{"hunter2", nodeJoin, string(join.Token.Reveal())} {
		if strings.Contains(c.log.String(), secret) {
			t.Errorf("the log holds a secret")
		}
	}
}
