package ramdisk

import (
	"crypto/ed25519"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/agenttest"
	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/agent/grants"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// TestDeployed: a machine with anything at an end of a built-in disk is overwritten
// by a grant alone, and one whose disk cannot be looked at is, too.
func TestDeployed(t *testing.T) {
	const size = 80 * mib
	for name, tt := range map[string]struct {
		change func(t *testing.T, m machine)
		want   bool
	}{
		"blank":                       {func(*testing.T, machine) {}, false},
		"something in the middle":     {func(t *testing.T, m machine) { put(t, m, "vda", size/2) }, false},
		"a boot sector":               {func(t *testing.T, m machine) { put(t, m, "vda", 510) }, true},
		"a partition table":           {func(t *testing.T, m machine) { put(t, m, "vda", 512) }, true},
		"a file system":               {func(t *testing.T, m machine) { put(t, m, "vda", 64<<10) }, true},
		"the table's copy":            {func(t *testing.T, m machine) { put(t, m, "vda", size-512) }, true},
		"the other disk":              {func(t *testing.T, m machine) { put(t, m, "vdb", 512) }, true},
		"a disk that is pulled out":   {func(t *testing.T, m machine) { put(t, m, "vdb", 512); m.write(t, m.sys, "block/vdb/removable", "1\n") }, false},
		"a disk that is not readable": {func(t *testing.T, m machine) { remove(t, m, "vdb") }, true},
		"a disk that ends early":      {func(t *testing.T, m machine) { truncate(t, m, "vdb", size-1) }, true},
		"no list of disks":            {func(t *testing.T, m machine) { m.write(t, m.sys, "other", ""); moveAway(t, m) }, true},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			for _, disk := range []string{"vdb", "vdc"} {
				m.write(t, m.dev, disk, "")
				truncate(t, m, disk, size)
			}
			tt.change(t, m)
			i := &imager{sys: m.sys, dev: m.dev, machine: "node_1"}
			op, err := i.check(nil, dispatch.Operation{Counts: true})
			if err != nil || op.Always != tt.want || !op.Counts || !slices.Equal(op.Targets, []string{"machine:node_1"}) {
				t.Errorf("check = %+v, %v, want always %v for machine:node_1", op, err, tt.want)
			}
		})
	}
}

func put(t *testing.T, m machine, disk string, at int64) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(m.dev, disk), os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteAt([]byte{1}, at)
	}
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
}

func truncate(t *testing.T, m machine, disk string, size int64) {
	t.Helper()
	if err := os.Truncate(filepath.Join(m.dev, disk), size); err != nil {
		t.Fatal(err)
	}
}

func remove(t *testing.T, m machine, disk string) {
	t.Helper()
	if err := os.Remove(filepath.Join(m.dev, disk)); err != nil {
		t.Fatal(err)
	}
}

func moveAway(t *testing.T, m machine) {
	t.Helper()
	if err := os.Rename(filepath.Join(m.sys, "block"), filepath.Join(m.sys, "gone")); err != nil {
		t.Fatal(err)
	}
}

// TestDeployedMachineNeedsGrant streams over a deployed machine: refused without
// people's grant, and by theirs once for each use, with the image that they named.
func TestDeployedMachineNeedsGrant(t *testing.T) {
	people := []ed25519.PrivateKey{ed25519.NewKeyFromSeed(make([]byte, 32)), ed25519.NewKeyFromSeed(slices.Repeat([]byte{1}, 32))}
	l := newLab(t, func(l *lab) {
		content := l.gateway.Content(2, l.gateway.URL)
		content.ApproverThreshold = 2
		for _, key := range people {
			content.ApproverKeys = append(content.ApproverKeys, key.Public().(ed25519.PublicKey))
		}
		l.gateway.AddBundle(content)
		for _, disk := range []string{"vdb", "vdc"} {
			l.write(t, l.dev, disk, "")
			truncate(t, l.machine, disk, 80*mib)
		}
	})
	l.session.Event("bundle.applied", "2")
	l.gateway.Secrets["secret://t/node-join"] = []byte(l.gateway.Join("node-token").Encode())
	args, err := proto.Marshal(l.request())
	if err != nil {
		t.Fatal(err)
	}
	grant := func(id, artifact, machine string) *agentv1.GrantCitation {
		targets := []string{grants.Machine(machine)}
		payload, err := grants.Encode(&agentv1.Grant{
			GrantId: id, SiteId: agenttest.SiteID, Operations: []*agentv1.GrantOperation{{Kind: StreamKind, Operation: StreamKind}},
			TargetsRoot: grants.Root(targets), TargetCount: 1, ArtifactSha256: []string{artifact}, UsesPerTarget: 1, Reason: "a new image",
			NotBeforeMs: time.Now().Add(-time.Minute).UnixMilli(), NotAfterMs: time.Now().Add(time.Hour).UnixMilli(),
		})
		if err != nil {
			t.Fatal(err)
		}
		c := &agentv1.GrantCitation{Grant: &agentv1.SignedGrant{Payload: payload}, Targets: []*agentv1.TargetProof{grants.Prove(targets, 0)}}
		for _, key := range people {
			c.Grant.Signatures = append(c.Grant.Signatures, grants.Sign(key, payload))
		}
		return c
	}
	stream := func(id string, c *agentv1.GrantCitation, want errs.Code, says string) {
		t.Helper()
		l.session.Command(&agentv1.CommandPayload{CommandId: id, Kind: StreamKind, Lane: "transfer", Args: args, SecretRefs: []string{"secret://t/node-join"}, TargetNodeId: "node_1", Grant: c})
		got := l.session.Result(id).GetError()
		if got.GetCode() != string(want) || !strings.Contains(got.GetMessage(), says) {
			t.Errorf("%s: %v, want %q with %q", id, got, want, says)
		}
	}
	sha := sum(l.stored)
	stream("blank", nil, "", "")
	stream("deployed", nil, errs.QuorumRequired, "better-compute grant propose --allow image.stream:image.stream")
	stream("other_image", grant("grant_1", sum(nil), "node_1"), errs.GrantInvalid, "does not allow the artifact")
	stream("other_machine", grant("grant_2", sha, "node_2"), errs.GrantInvalid, "is not cited for the target machine:node_1")
	good := grant("grant_3", sha, "node_1")
	stream("granted", good, "", "")
	stream("once_more", good, errs.GrantInvalid, "used up")
}
