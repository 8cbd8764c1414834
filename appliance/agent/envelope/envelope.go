// Package envelope seals and opens signed commands: Ed25519 over a domain and
// the payload's bytes as received, checked before anything is parsed.
package envelope

import (
	"crypto/ed25519"
	"crypto/sha256"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// Domain separates a command's signature from every other use of the key.
const Domain = "bettercompute.command.v1\x00"

// MaxPayloadBytes bounds a command's payload.
const MaxPayloadBytes = 4 << 20

// MaxLife is the longest that a command may be valid.
const MaxLife = 24 * time.Hour

// Signer holds one command key, in this process or in another one.
type Signer interface {
	// KeyID is the lower-case hex SHA-256 of the public key.
	KeyID() string
	// Sign is the Ed25519 signature of msg.
	Sign(msg []byte) ([]byte, error)
}

// Keys finds a command key of the trust bundle in force.
type Keys interface {
	CommandKey(id string) (ed25519.PublicKey, bool)
}

// Seal encodes and signs a payload. It refuses one that no agent would take.
func Seal(s Signer, p *agentv1.CommandPayload) (*agentv1.SignedCommand, error) {
	if err := check(p); err != nil {
		return nil, err
	}
	payload, err := proto.MarshalOptions{Deterministic: true}.Marshal(p)
	if err != nil {
		return nil, fmt.Errorf("encode command %s: %w", p.GetCommandId(), err)
	}
	if len(payload) > MaxPayloadBytes {
		return nil, errs.New(errs.InvalidPayload, "payload of %d bytes is over %d", len(payload), MaxPayloadBytes)
	}
	signature, err := s.Sign(message(payload))
	if err != nil {
		return nil, fmt.Errorf("sign command %s: %w", p.GetCommandId(), err)
	}
	return &agentv1.SignedCommand{Payload: payload, KeyId: s.KeyID(), Signature: signature}, nil
}

// Open verifies and parses a command. The digest is the SHA-256 of the payload
// bytes; it is returned with every error too. Codes: signature-required,
// key-unknown, signature-invalid, invalid-payload.
func Open(c *agentv1.SignedCommand, keys Keys) (*agentv1.CommandPayload, [32]byte, error) {
	payload := c.GetPayload()
	digest := sha256.Sum256(payload)
	if len(payload) > MaxPayloadBytes {
		return nil, digest, errs.New(errs.InvalidPayload, "payload of %d bytes is over %d", len(payload), MaxPayloadBytes)
	}
	if len(c.GetSignature()) == 0 || c.GetKeyId() == "" {
		return nil, digest, errs.New(errs.SignatureRequired, "the command carries no signature")
	}
	key, ok := keys.CommandKey(c.GetKeyId())
	if !ok || len(key) != ed25519.PublicKeySize {
		return nil, digest, errs.New(errs.KeyUnknown, "key %.16s… is no command key of the trust bundle in force", c.GetKeyId())
	}
	if !ed25519.Verify(key, message(payload), c.GetSignature()) {
		return nil, digest, errs.New(errs.SignatureInvalid, "the command's signature does not fit its payload")
	}
	p := new(agentv1.CommandPayload)
	if err := StrictUnmarshal(payload, p); err != nil {
		return nil, digest, err
	}
	if err := check(p); err != nil {
		return nil, digest, err
	}
	return p, digest, nil
}

func message(payload []byte) []byte {
	return append([]byte(Domain), payload...)
}

// check is what both ends ask of a payload whatever the agent's state is.
func check(p *agentv1.CommandPayload) error {
	life := time.Duration(p.GetNotAfterMs()-p.GetIssuedAtMs()) * time.Millisecond
	switch {
	case !validID(p.GetCommandId()):
		return errs.New(errs.InvalidPayload, "command_id must be 1 to 128 of a-z, 0-9, '_', '-' and '.'")
	case p.GetKind() == "":
		return errs.New(errs.InvalidPayload, "kind is missing")
	case p.GetAgentId() == "":
		return errs.New(errs.InvalidPayload, "agent_id is missing")
	case p.GetIssuedAtMs() <= 0 || p.GetNotAfterMs() <= p.GetIssuedAtMs():
		return errs.New(errs.InvalidPayload, "not_after must lie after issued_at")
	case p.GetNotAfterMs()-p.GetIssuedAtMs() > MaxLife.Milliseconds():
		return errs.New(errs.InvalidPayload, "not_after lies %s after issued_at; at most %s", life, MaxLife)
	}
	return nil
}

func validID(id string) bool {
	if len(id) == 0 || len(id) > 128 {
		return false
	}
	for _, c := range []byte(id) {
		switch {
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9', c == '_', c == '-', c == '.':
		default:
			return false
		}
	}
	return true
}
