package envelope_test

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

type key struct{ private ed25519.PrivateKey }

func newKey(seed byte) key {
	return key{ed25519.NewKeyFromSeed([]byte(strings.Repeat(string(rune('a'+seed)), 32)))}
}

func (k key) public() ed25519.PublicKey { return k.private.Public().(ed25519.PublicKey) }
func (k key) KeyID() string {
	sum := sha256.Sum256(k.public())
	return hex.EncodeToString(sum[:])
}
func (k key) Sign(msg []byte) ([]byte, error) { return ed25519.Sign(k.private, msg), nil }
func (k key) CommandKey(id string) (ed25519.PublicKey, bool) {
	return k.public(), id == k.KeyID()
}

func payload() *agentv1.CommandPayload {
	return &agentv1.CommandPayload{
		CommandId: "cmd_1", Kind: "bmc.power", AgentId: "ag_1", Incarnation: "e1", Lane: "power",
		IssuedAtMs: 1000, NotAfterMs: 2000, Args: []byte("args"),
	}
}

func TestSealOpen(t *testing.T) {
	k := newKey(0)
	want := payload()
	c, err := envelope.Seal(k, want)
	if err != nil {
		t.Fatal(err)
	}
	got, digest, err := envelope.Open(c, k)
	if err != nil {
		t.Fatalf("Open(sealed) = %v, want nil", err)
	}
	if !proto.Equal(got, want) {
		t.Errorf("Open(sealed) = %v, want %v", got, want)
	}
	if digest != sha256.Sum256(c.Payload) {
		t.Errorf("Open(sealed) digest = %x, want that of the payload", digest)
	}
}

func TestOpenRefuses(t *testing.T) {
	k, other := newKey(0), newKey(1)
	resign := func(c *agentv1.SignedCommand) {
		c.Signature = ed25519.Sign(k.private, append([]byte(envelope.Domain), c.Payload...))
	}
	for name, test := range map[string]struct {
		change func(c *agentv1.SignedCommand)
		want   errs.Code
	}{
		"nothing changed":       {func(c *agentv1.SignedCommand) {}, ""},
		"no signature":          {func(c *agentv1.SignedCommand) { c.Signature = nil }, errs.SignatureRequired},
		"no key id":             {func(c *agentv1.SignedCommand) { c.KeyId = "" }, errs.SignatureRequired},
		"other key's id":        {func(c *agentv1.SignedCommand) { c.KeyId = other.KeyID() }, errs.KeyUnknown},
		"flipped signature bit": {func(c *agentv1.SignedCommand) { c.Signature[3] ^= 1 }, errs.SignatureInvalid},
		"short signature":       {func(c *agentv1.SignedCommand) { c.Signature = c.Signature[:10] }, errs.SignatureInvalid},
		"flipped payload bit":   {func(c *agentv1.SignedCommand) { c.Payload[len(c.Payload)-1] ^= 1 }, errs.SignatureInvalid},
		"other key":             {func(c *agentv1.SignedCommand) { c.Signature, _ = other.Sign(c.Payload) }, errs.SignatureInvalid},
		"no domain": {func(c *agentv1.SignedCommand) {
			c.Signature = ed25519.Sign(k.private, c.Payload)
		}, errs.SignatureInvalid},
		"unknown field": {func(c *agentv1.SignedCommand) {
			c.Payload = protowire.AppendVarint(protowire.AppendTag(c.Payload, 999, protowire.VarintType), 1)
			resign(c)
		}, errs.InvalidPayload},
		"not a message": {func(c *agentv1.SignedCommand) { c.Payload = []byte{0xff}; resign(c) }, errs.InvalidPayload},
		"too large": {func(c *agentv1.SignedCommand) {
			c.Payload = make([]byte, envelope.MaxPayloadBytes+1)
			resign(c)
		}, errs.InvalidPayload},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := envelope.Seal(k, payload())
			if err != nil {
				t.Fatal(err)
			}
			test.change(c)
			p, _, err := envelope.Open(c, k)
			if got := errs.CodeOf(err); got != test.want {
				t.Errorf("Open = %v, want code %q", err, test.want)
			}
			if (p != nil) != (test.want == "") {
				t.Errorf("Open payload = %v with error %v", p, err)
			}
		})
	}
	if _, _, err := envelope.Open(nil, k); errs.CodeOf(err) != errs.SignatureRequired {
		t.Errorf("Open(nil) = %v, want signature-required", err)
	}
}

func TestSealRefuses(t *testing.T) {
	k := newKey(0)
	for name, test := range map[string]struct {
		change func(p *agentv1.CommandPayload)
		bad    bool
	}{
		"nothing changed":  {func(p *agentv1.CommandPayload) {}, false},
		"24 hours":         {func(p *agentv1.CommandPayload) { p.NotAfterMs = p.IssuedAtMs + 86_400_000 }, false},
		"over 24 hours":    {func(p *agentv1.CommandPayload) { p.NotAfterMs = p.IssuedAtMs + 86_400_001 }, true},
		"ends at once":     {func(p *agentv1.CommandPayload) { p.NotAfterMs = p.IssuedAtMs }, true},
		"no id":            {func(p *agentv1.CommandPayload) { p.CommandId = "" }, true},
		"id with a slash":  {func(p *agentv1.CommandPayload) { p.CommandId = "../x" }, true},
		"id of a workflow": {func(p *agentv1.CommandPayload) { p.CommandId = "wf_1.power-on.2" }, false},
		"no kind":          {func(p *agentv1.CommandPayload) { p.Kind = "" }, true},
		"no agent":         {func(p *agentv1.CommandPayload) { p.AgentId = "" }, true},
	} {
		p := payload()
		test.change(p)
		if _, err := envelope.Seal(k, p); (errs.CodeOf(err) == errs.InvalidPayload) != test.bad {
			t.Errorf("%s: Seal = %v, want refused %v", name, err, test.bad)
		}
	}
}

func TestStrictUnmarshalLooksInside(t *testing.T) {
	unknown := protowire.AppendVarint(protowire.AppendTag(nil, 99, protowire.VarintType), 1)
	machine, err := proto.Marshal(&pxev1.Machine{MachineId: "node_1"})
	if err != nil {
		t.Fatal(err)
	}
	nest := func(inner []byte) []byte {
		return protowire.AppendBytes(protowire.AppendTag(nil, 2, protowire.BytesType), inner)
	}
	if err := envelope.StrictUnmarshal(nest(machine), new(pxev1.AssignRequest)); err != nil {
		t.Errorf("StrictUnmarshal(known fields) = %v, want nil", err)
	}
	if err := envelope.StrictUnmarshal(nest(append(machine, unknown...)), new(pxev1.AssignRequest)); errs.CodeOf(err) != errs.InvalidPayload {
		t.Errorf("StrictUnmarshal(unknown field in a list) = %v, want invalid-payload", err)
	}
	frame := protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), unknown)
	if err := envelope.StrictUnmarshal(frame, new(agentv1.AgentFrame)); errs.CodeOf(err) != errs.InvalidPayload {
		t.Errorf("StrictUnmarshal(unknown field in a oneof) = %v, want invalid-payload", err)
	}
}

func FuzzOpen(f *testing.F) {
	k := newKey(0)
	c, err := envelope.Seal(k, payload())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(c.Payload)
	f.Add([]byte{})
	f.Add([]byte{0x0a, 0xff})
	f.Fuzz(func(t *testing.T, data []byte) {
		signature, _ := k.Sign(append([]byte(envelope.Domain), data...))
		p, _, err := envelope.Open(&agentv1.SignedCommand{Payload: data, KeyId: k.KeyID(), Signature: signature}, k)
		if (p == nil) == (err == nil) {
			t.Errorf("Open(%x) = %v, %v", data, p, err)
		}
	})
}
