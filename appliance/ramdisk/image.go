package ramdisk

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strconv"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/agent/grants"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/image/imagev1"
	"github.com/better-compute/site-appliance/image/stream"
	"github.com/better-compute/site-appliance/image/stream/blockdev"
	"github.com/better-compute/site-appliance/image/stream/seed"
)

// StreamKind is the command kind that writes an image.
const StreamKind = cmdkind.Stream

// Where the node's agent finds its configuration on the written machine.
const (
	joinPath   = "/etc/bcd/join"
	configPath = "/etc/bcd/config.toml"
)

// imager serves image.stream.
type imager struct {
	sys, dev  string
	artifacts *url.URL
	via       string
	client    *http.Client
	machine   string       // the machine's id
	orders    *orders      // what this boot is for
	report    string       // the URL prefix of posts to the box; empty: none
	retry     stream.Retry // the default when zero
	log       *slog.Logger
}

func (m *imager) kind() dispatch.Kind {
	return dispatch.Kind{
		Name: StreamKind, Lane: cmdkind.Lane(StreamKind), Roles: []agentv1.Role{agentv1.Role_ROLE_RAMDISK},
		Decode: decodeStream, Run: m.run,
		Check: func(p *agentv1.CommandPayload, op dispatch.Operation) (dispatch.Operation, error) {
			if err := m.orders.allow(StreamKind, m.machine); err != nil {
				return op, err
			}
			return m.check(p, op)
		},
		// A reboot loses the journal with the memory, and the half-written disk
		// does not boot: what was started is interrupted.
		Recover: func(context.Context, dispatch.Call) dispatch.Verdict { return dispatch.Interrupted() },
	}
}

// decodeStream reads a StreamRequest strictly. One disk takes one image at a time.
func decodeStream(args []byte) (dispatch.Operation, error) {
	var req imagev1.StreamRequest
	if err := envelope.StrictUnmarshal(args, &req); err != nil {
		return dispatch.Operation{}, err
	}
	const most = 1 << 62
	switch {
	case req.Format != "raw.zst":
		return dispatch.Operation{}, errs.New(errs.UnsupportedOperation, "image format %q: only raw.zst is served", req.Format)
	case req.Disk.GetSerial() == "":
		return dispatch.Operation{}, errs.New(errs.InvalidArgs, "the disk's serial is missing")
	case req.SizeBytes == 0 || req.SizeBytes > most || req.UnpackedSizeBytes == 0 || req.UnpackedSizeBytes > most:
		return dispatch.Operation{}, errs.New(errs.InvalidArgs, "an image of %d bytes stored and %d unpacked", req.SizeBytes, req.UnpackedSizeBytes)
	}
	if s := req.Seed; s != nil {
		check := seed.Seed{InstanceID: s.InstanceId, Hostname: s.Hostname, SSHAuthorizedKeys: s.SshAuthorizedKeys}
		if err := check.Check(); err != nil {
			return dispatch.Operation{}, err
		}
	}
	return dispatch.Operation{Name: "image.stream", Key: "disk " + req.Disk.Serial, Destructive: true, Counts: true, Artifacts: []string{req.Sha256}, Value: &req}, nil
}

// check says whose disk it is, and whether anything is lost with it: a machine
// that holds something is overwritten only by a grant.
func (m *imager) check(_ *agentv1.CommandPayload, op dispatch.Operation) (dispatch.Operation, error) {
	op.Targets = []string{grants.Machine(m.machine)}
	op.Always = m.deployed()
	return op, nil
}

func (m *imager) run(ctx context.Context, c dispatch.Call) ([]byte, error) {
	req, ok := c.Operation.Value.(*imagev1.StreamRequest)
	if !ok {
		return nil, errs.New(errs.Internal, "image.stream: the operation carries %T", c.Operation.Value)
	}
	disks, err := blockdev.List(m.sys, m.dev)
	if err != nil {
		return nil, err
	}
	disk, err := blockdev.Find(disks, req.Disk.Serial)
	if err != nil {
		return nil, err
	}
	job := stream.Job{
		Source:    stream.HTTP{Client: m.client, URL: m.artifacts.JoinPath(req.Sha256).String()},
		SizeBytes: int64(req.SizeBytes), SHA256: req.Sha256,
		UnpackedSizeBytes: int64(req.UnpackedSizeBytes), UnpackedSHA256: req.UnpackedSha256,
		Disk: disk.Path, Retry: m.retry, Log: m.log,
		Progress: func(phase string, done, total uint64) {
			c.Progress(phase, fmt.Sprintf("%s %s", phase, disk.Name), done, total)
		},
	}
	if req.Seed != nil {
		if job.Seed, err = m.seed(ctx, c, req.Seed); err != nil {
			return nil, err
		}
	}
	m.log.Info("image stream starts", "disk", disk.String(), "sha256", req.Sha256, "bytes", req.UnpackedSizeBytes)
	m.post(ctx, "progress", "image stream starts")
	result, err := stream.Run(ctx, job)
	if err != nil {
		m.log.Error("image stream failed", "disk", disk.Name, "err", err)
		return nil, err
	}
	// The box sends the machine to its disk from now on, line or no line.
	m.post(ctx, "done", "image written to "+disk.Name)
	m.log.Info("image stream done: the disk was read back and holds the image", "disk", disk.Name, "bytes", result.BytesWritten)
	return proto.Marshal(&imagev1.StreamResult{
		Disk: disk.Path, Sha256: result.SHA256, UnpackedSha256: result.UnpackedSHA256, BytesWritten: uint64(result.BytesWritten),
	})
}

// seed resolves the join string and puts it where the node's agent looks for it.
func (m *imager) seed(ctx context.Context, c dispatch.Call, from *imagev1.Seed) (*seed.Seed, error) {
	s := &seed.Seed{InstanceID: from.InstanceId, Hostname: from.Hostname, SSHAuthorizedKeys: from.SshAuthorizedKeys}
	if from.NodeJoinRef == "" {
		return s, nil
	}
	values, err := c.Secrets(ctx, from.NodeJoinRef)
	if err != nil {
		return nil, fmt.Errorf("resolve the node's join string: %w", err)
	}
	join, found := values[from.NodeJoinRef]
	if !found || join.Empty() {
		return nil, errs.New(errs.CredentialsUnavailable, "the node's join string is not there")
	}
	if _, err := trust.ParseJoin(string(join.Reveal())); err != nil {
		return nil, errs.New(errs.InvalidArgs, "the node's %v", err)
	}
	config, err := nodeConfig(m.via)
	if err != nil {
		return nil, err
	}
	s.Files = []seed.File{
		{Path: joinPath, Content: join, Mode: "0600"},
		{Path: configPath, Content: secret.New(config), Mode: "0600"},
	}
	return s, nil
}

// nodeConfig is the config.toml of a node that reaches the gateway by the same
// way as this ramdisk.
func nodeConfig(via string) ([]byte, error) {
	text := "join_file = " + strconv.Quote(joinPath) + "\n"
	if via != "" {
		host, port, err := net.SplitHostPort(via)
		if err != nil || host == "" || port == "" {
			return nil, errs.New(errs.InvalidConfig, "the box handed over %q as its own address: want host:port", via)
		}
		for _, r := range via {
			// TOML and Go quote these alike, and no address needs more.
			if r < 0x21 || r > 0x7e || r == '"' || r == '\\' {
				return nil, errs.New(errs.InvalidConfig, "the box handed over %q as its own address", via)
			}
		}
		text += "\n[gateway]\nvia = \"" + via + "\"\n"
	}
	return []byte(text), nil
}
