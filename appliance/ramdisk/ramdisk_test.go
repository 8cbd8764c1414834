package ramdisk

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent"
	"github.com/better-compute/site-appliance/appliance/agent/agenttest"
	"github.com/better-compute/site-appliance/appliance/agent/bootinfo"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/site/config"
	"github.com/better-compute/site-appliance/image/gpt"
	"github.com/better-compute/site-appliance/image/imagev1"
	"github.com/better-compute/site-appliance/plugins/metal"
	"github.com/better-compute/site-appliance/pxe/mandate"
	"github.com/better-compute/site-appliance/pxe/pxev1"

	dgpt "github.com/diskfs/go-diskfs/partition/gpt"
)

const mib = 1 << 20

func sum(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}

// newImage is a small image with a partition table, raw and stored.
func newImage(t *testing.T) (raw, stored []byte) {
	t.Helper()
	const size = 12 * mib
	f, err := os.Create(filepath.Join(t.TempDir(), "raw"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	table := &dgpt.Table{ProtectiveMBR: true, LogicalSectorSize: 512, PhysicalSectorSize: 512, Partitions: []*dgpt.Partition{
		{Index: 1, Start: 2048, Size: size - 2*mib, Type: dgpt.EFISystemPartition, Name: "esp"},
	}}
	if err := table.Write(f, size); err != nil {
		t.Fatal(err)
	}
	raw = make([]byte, size)
	if _, err := f.ReadAt(raw, 0); err != nil {
		t.Fatal(err)
	}
	rand.NewChaCha8([32]byte{1}).Read(raw[2*mib : 9*mib])
	enc, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer enc.Close()
	return raw, enc.EncodeAll(raw, nil)
}

// machine is a fake /sys, /proc and /dev.
type machine struct{ sys, proc, dev string }

func (m machine) write(t *testing.T, root, name, text string) {
	t.Helper()
	path := filepath.Join(root, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func newMachine(t *testing.T) machine {
	m := machine{t.TempDir(), t.TempDir(), t.TempDir()}
	m.write(t, m.sys, "class/net/eth0/address", "52:54:00:AA:00:01\n")
	m.write(t, m.sys, "class/net/eth0/type", "1\n")
	m.write(t, m.sys, "class/net/eth0/speed", "1000\n")
	m.write(t, m.sys, "class/net/eth0/device/vendor", "0x1af4\n")
	m.write(t, m.proc, "meminfo", "MemTotal:        1024 kB\nMemFree: 1 kB\n")
	for _, d := range []struct{ name, serial string }{{"vda", "DISK0001"}, {"vdb", "TWIN"}, {"vdc", "TWIN"}} {
		m.write(t, m.sys, "block/"+d.name+"/size", fmt.Sprint(80*mib/512))
		m.write(t, m.sys, "block/"+d.name+"/serial", d.serial+"\n")
		m.write(t, m.sys, "block/"+d.name+"/device/vendor", "0x1af4\n")
	}
	m.write(t, m.dev, "vda", "")
	if err := os.Truncate(filepath.Join(m.dev, "vda"), 80*mib); err != nil {
		t.Fatal(err)
	}
	return m
}

// lab is a gateway, a box that signs vouchers and serves one artifact, and a
// ramdisk agent in session.
type lab struct {
	machine
	raw, stored []byte
	served      []byte // what the box really gives
	session     *agenttest.Session
	gateway     *agenttest.Gateway
	purpose     string      // of the signed assignment
	id          string      // of the machine
	posts       chan string // what the box was told
}

func run(t *testing.T, f func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- f(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case <-ended:
		case <-time.After(20 * time.Second):
			t.Error("an agent does not end")
		}
	})
}

func newLab(t *testing.T, prepare ...func(*lab)) *lab {
	t.Helper()
	l := &lab{machine: newMachine(t), gateway: agenttest.Start(t), purpose: "deploy", id: "node_1", posts: make(chan string, 100)}
	for _, f := range prepare {
		f(l)
	}
	l.raw, l.stored = newImage(t)
	l.served = l.stored
	log := slog.New(slog.DiscardHandler)
	box, err := agent.New(agent.Config{Role: agentv1.Role_ROLE_SITE, Join: l.gateway.Join("site-token"), Log: log})
	if err != nil {
		t.Fatal(err)
	}
	run(t, box.Run)
	l.gateway.Session(1)
	voucher, err := box.SignVoucher(&agentv1.Voucher{MachineId: l.id, BootNonce: []byte("0123456789abcdef"), WindowId: "w1", Purpose: "deploy",
		IssuedAtMs: time.Now().UnixMilli(), NotAfterMs: time.Now().Add(time.Hour).UnixMilli()})
	if err != nil {
		t.Fatal(err)
	}
	encoded, err := proto.Marshal(voucher)
	if err != nil {
		t.Fatal(err)
	}
	artifacts := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if what, ok := strings.CutPrefix(req.URL.Path, "/boot/mac/token/"); ok && req.Method == http.MethodPost {
			l.posts <- what
			http.Error(w, "no report fails anything", http.StatusServiceUnavailable)
			return
		}
		if req.URL.Path != "/artifacts/"+sum(l.stored) {
			http.NotFound(w, req)
			return
		}
		http.ServeContent(w, req, "", time.Time{}, bytes.NewReader(l.served))
	}))
	t.Cleanup(artifacts.Close)
	assignment, err := mandate.Sign(signer{l.gateway.Authority.Command}, &pxev1.Assignment{MachineId: l.id, Purpose: l.purpose, WindowId: "w1"})
	if err != nil {
		t.Fatal(err)
	}
	join := l.gateway.Join("unused")
	boot, err := json.Marshal(bootinfo.Info{
		MachineID: l.id, SiteID: agenttest.SiteID, GatewayURLs: []string{l.gateway.URL}, Via: l.gateway.Addr(),
		CASPKI: join.CASPKI[:], RootSet: join.RootSet[:], Artifacts: artifacts.URL + "/artifacts", Voucher: encoded,
		Assignment: assignment, Report: artifacts.URL + "/boot/mac/token/",
	})
	if err != nil {
		t.Fatal(err)
	}
	l.write(t, l.dev, "boot.json", string(boot))
	run(t, func(ctx context.Context) error {
		return Run(ctx, Config{BootFile: filepath.Join(l.dev, "boot.json"), Sys: l.sys, Proc: l.proc, Dev: l.dev, Version: "test", Log: log})
	})
	l.session = l.gateway.Session(2)
	return l
}

func (l *lab) request() *imagev1.StreamRequest {
	return &imagev1.StreamRequest{
		Format: "raw.zst", Sha256: sum(l.stored), SizeBytes: uint64(len(l.stored)), UnpackedSha256: sum(l.raw), UnpackedSizeBytes: uint64(len(l.raw)),
		Disk: &imagev1.DiskSelector{Serial: "DISK0001"},
		Seed: &imagev1.Seed{InstanceId: "wf_1", Hostname: "node-1", SshAuthorizedKeys: []string{"ssh-ed25519 AAAA a"}, NodeJoinRef: "secret://t/node-join"},
	}
}

func (l *lab) command(t *testing.T, id string, req *imagev1.StreamRequest) *agentv1.CommandResult {
	t.Helper()
	args, err := proto.Marshal(req)
	if err != nil {
		t.Fatal(err)
	}
	var refs []string
	if ref := req.GetSeed().GetNodeJoinRef(); ref != "" {
		refs = []string{ref}
	}
	l.session.Command(&agentv1.CommandPayload{CommandId: id, Kind: StreamKind, Lane: "transfer", Args: args, SecretRefs: refs, TargetNodeId: l.id})
	return l.session.Result(id)
}

func TestImageStream(t *testing.T) {
	l := newLab(t)
	join := l.gateway.Join("node-token").Encode()
	l.gateway.Secrets["secret://t/node-join"] = []byte(join)
	if role := l.session.Hello.GetRole(); role != agentv1.Role_ROLE_RAMDISK {
		t.Errorf("role = %v", role)
	}

	event := l.session.Event(HardwareEvent, "node_1")
	var hardware metal.Inspection
	if err := json.Unmarshal(event.GetBodyJson(), &hardware); err != nil {
		t.Fatal(err)
	}
	if hardware.Source != "ramdisk" || len(hardware.Drives) != 3 || hardware.Drives[0] != (metal.Drive{Name: "vda", Serial: "DISK0001", SizeBytes: 80 * mib}) ||
		len(hardware.NICs) != 1 || hardware.NICs[0] != (metal.NIC{MAC: "52:54:00:aa:00:01", Name: "eth0", Speed: 1000}) {
		t.Errorf("hardware = %+v", hardware)
	}

	for _, tt := range []struct {
		name   string
		change func(*imagev1.StreamRequest)
		want   errs.Code
		says   string
	}{
		{"missing disk", func(r *imagev1.StreamRequest) { r.Disk.Serial = "GONE" }, errs.InvalidArgs, "no disk has serial"},
		{"ambiguous disk", func(r *imagev1.StreamRequest) { r.Disk.Serial = "TWIN" }, errs.InvalidArgs, "2 disks have serial"},
		{"too large", func(r *imagev1.StreamRequest) { r.UnpackedSizeBytes = 81 * mib }, errs.NoSpace, "has 83886080 bytes"},
		{"not at the box", func(r *imagev1.StreamRequest) { r.Sha256 = sum(nil) }, errs.Unreachable, "404"},
		{"unpacked digest", func(r *imagev1.StreamRequest) { r.UnpackedSha256 = sum(nil) }, errs.DigestMismatch, "unpacked form"},
		{"unknown secret", func(r *imagev1.StreamRequest) { r.Seed.NodeJoinRef = "secret://t/other" }, errs.CredentialsUnavailable, ""},
		{"format", func(r *imagev1.StreamRequest) { r.Format = "qcow2" }, errs.UnsupportedOperation, "raw.zst"},
		{"host name", func(r *imagev1.StreamRequest) { r.Seed.Hostname = "a b" }, errs.InvalidArgs, "host name"},
	} {
		req := l.request()
		tt.change(req)
		got := l.command(t, "cmd_"+strings.ReplaceAll(tt.name, " ", "_"), req).GetError()
		if got.GetCode() != string(tt.want) || !strings.Contains(got.GetMessage(), tt.says) {
			t.Errorf("%s: %v, want %s with %q", tt.name, got, tt.want, tt.says)
		}
	}

	// It takes driver.invoke, and hosts no driver.
	l.session.Command(&agentv1.CommandPayload{CommandId: "cmd_invoke", Kind: "driver.invoke", Lane: "provision", WorkflowId: "wf_1", StepId: "main.0",
		Args: []byte(`{"workflowId":"wf_1","stepId":"main.0","attempt":0,"args":{"concern":"power","operation":"getPower","driver":"acme"}}`)})
	if got := l.session.Result("cmd_invoke").GetError(); got.GetCode() != string(errs.UnsupportedDriver) || !strings.Contains(got.GetMessage(), "no hosted driver acme implements power") {
		t.Errorf("driver.invoke: %v, want %s", got, errs.UnsupportedDriver)
	}

	result := l.command(t, "cmd_good", l.request())
	var got imagev1.StreamResult
	if result.GetError() != nil || proto.Unmarshal(result.GetResult(), &got) != nil {
		t.Fatalf("result = %v", result)
	}
	if got.Sha256 != sum(l.stored) || got.UnpackedSha256 != sum(l.raw) || got.BytesWritten != uint64(len(l.raw)) || got.Disk != filepath.Join(l.dev, "vda") {
		t.Errorf("result = %v", &got)
	}
	disk, err := os.ReadFile(got.Disk)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(disk[mib:len(l.raw)-mib], l.raw[mib:len(l.raw)-mib]) {
		t.Error("the disk differs from the image")
	}
	table, err := gpt.Parse(disk, 512)
	if err != nil || len(table.Partitions()) != 2 {
		t.Fatalf("partitions: %v", err)
	}
	p := table.Partitions()[1]
	cidata := disk[p.First*512 : (p.Last+1)*512]
	if !bytes.Contains(cidata, []byte(join)) || !bytes.Contains(cidata, []byte(`"hostname": "node-1"`)) {
		t.Error("the seed lacks the join string or the host name")
	}
	for _, f := range l.session.Frames() {
		if text := f.String(); strings.Contains(text, join) || strings.Contains(text, "node-token") {
			t.Errorf("a frame holds the join string: %.200s", text)
		}
	}

	// The box gives other bytes: the machine must not boot what is left.
	l.served = bytes.Clone(l.stored)
	l.served[len(l.served)/2] ^= 1
	if got := l.command(t, "cmd_flipped", l.request()).GetError(); got.GetCode() != string(errs.DigestMismatch) {
		t.Errorf("flipped byte: %v, want %s", got, errs.DigestMismatch)
	}
	if disk, err = os.ReadFile(got.Disk); err != nil {
		t.Fatal(err)
	}
	if _, err := gpt.Parse(disk, 512); err == nil {
		t.Error("the disk still has a partition table")
	}
}

func TestDecodeRefusesUnknownFields(t *testing.T) {
	args, err := proto.Marshal(&imagev1.StreamRequest{Format: "raw.zst", SizeBytes: 1, UnpackedSizeBytes: 1, Disk: &imagev1.DiskSelector{Serial: "A"}})
	if err != nil {
		t.Fatal(err)
	}
	if op, err := decodeStream(args); err != nil || op.Key != "disk A" || !op.Destructive || op.RetrySafe {
		t.Errorf("decodeStream() = %+v, %v", op, err)
	}
	if _, err := decodeStream(append(args, 0xf8, 0x07, 0x01)); errs.CodeOf(err) != errs.InvalidPayload {
		t.Errorf("decodeStream(unknown field) = %v, want %s", err, errs.InvalidPayload)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte("\x0a\x07raw.zst"))
	f.Fuzz(func(_ *testing.T, args []byte) { decodeStream(args) })
}

func TestNodeConfigIsReadByTheNode(t *testing.T) {
	for _, via := range []string{"", "10.0.0.1:7443", "[fd00::1]:7443"} {
		text, err := nodeConfig(via)
		if err != nil {
			t.Fatal(err)
		}
		got, err := config.ParseNode("config.toml", text)
		if err != nil || got.JoinFile != joinPath || got.Gateway.Via != via {
			t.Errorf("nodeConfig(%q) is read as %+v, %v", via, got, err)
		}
	}
	for _, via := range []string{"nowhere", "a\"b:1", "a\nb:1", ":1", "h:"} {
		if _, err := nodeConfig(via); errs.CodeOf(err) != errs.InvalidConfig {
			t.Errorf("nodeConfig(%q) = %v, want %s", via, err, errs.InvalidConfig)
		}
	}
}

func TestRunRefusesABadBootFile(t *testing.T) {
	dir := t.TempDir()
	good := bootinfo.Info{MachineID: "m", GatewayURLs: []string{"https://h"}, CASPKI: make([]byte, 32), RootSet: make([]byte, 32), Voucher: []byte{1}, Artifacts: "http://h/artifacts"}
	bad := good
	bad.Artifacts = "ftp://h"
	for name, info := range map[string]*bootinfo.Info{"absent": nil, "empty": {}, "no http": &bad} {
		path := filepath.Join(dir, name)
		if info != nil {
			text, err := json.Marshal(info)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, text, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := Run(t.Context(), Config{BootFile: path, Log: slog.New(slog.DiscardHandler)}); err == nil {
			t.Errorf("%s: Run() succeeded", name)
		}
	}
}
