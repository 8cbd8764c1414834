// Package mandate signs and verifies what one machine's ramdisk is there for, so that whoever boots it cannot widen that.
package mandate

import (
	"crypto/ed25519"
	"encoding/hex"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

const (
	domain   = "bettercompute.assignment.v1\x00"
	maxBytes = 4 << 10
)

// Signer holds a command key.
type Signer interface {
	// KeyID is the lower-case hex SHA-256 of the public key.
	KeyID() string
	Sign(msg []byte) ([]byte, error)
}

// Sign encodes and signs a.
func Sign(s Signer, a *pxev1.Assignment) ([]byte, error) {
	payload, err := proto.MarshalOptions{Deterministic: true}.Marshal(a)
	if err != nil {
		return nil, fmt.Errorf("encode assignment: %w", err)
	}
	id, err := hex.DecodeString(s.KeyID())
	if err != nil {
		return nil, fmt.Errorf("the key's id: %w", err)
	}
	signature, err := s.Sign(append([]byte(domain), payload...))
	if err != nil {
		return nil, fmt.Errorf("sign assignment: %w", err)
	}
	return proto.MarshalOptions{Deterministic: true}.Marshal(&pxev1.SignedAssignment{Payload: payload, KeyId: id, Signature: signature})
}

// Verify takes an encoded SignedAssignment whose key is one that find knows.
// Machine, window and time are the caller's to judge.
func Verify(data []byte, find func(keyID string) (ed25519.PublicKey, bool)) (*pxev1.Assignment, error) {
	if len(data) == 0 || len(data) > maxBytes {
		return nil, errs.New(errs.InvalidPayload, "assignment of %d bytes; 1 to %d are allowed", len(data), maxBytes)
	}
	var signed pxev1.SignedAssignment
	if err := proto.Unmarshal(data, &signed); err != nil {
		return nil, errs.New(errs.InvalidPayload, "assignment: %v", err)
	}
	key, ok := find(hex.EncodeToString(signed.KeyId))
	if !ok {
		return nil, errs.New(errs.KeyUnknown, "the assignment is signed by %x, which is no command key", signed.KeyId)
	}
	if !ed25519.Verify(key, append([]byte(domain), signed.Payload...), signed.Signature) {
		return nil, errs.New(errs.SignatureInvalid, "the assignment's signature is not its command key's")
	}
	a := new(pxev1.Assignment)
	if err := proto.Unmarshal(signed.Payload, a); err != nil {
		return nil, errs.New(errs.InvalidPayload, "assignment: %v", err)
	}
	return a, nil
}

// Claims is what an encoded SignedAssignment says, by whomever it is signed.
func Claims(data []byte) (*pxev1.Assignment, error) {
	signed, a := new(pxev1.SignedAssignment), new(pxev1.Assignment)
	if err := proto.Unmarshal(data, signed); err != nil {
		return nil, errs.New(errs.InvalidPayload, "assignment: %v", err)
	}
	if err := proto.Unmarshal(signed.Payload, a); err != nil {
		return nil, errs.New(errs.InvalidPayload, "assignment: %v", err)
	}
	return a, nil
}

// StrangerPrefix begins the id of a machine that nobody enrolled; the twelve digits of
// its MAC follow.
const StrangerPrefix = "mac-"

// allowed are the command kinds that destroy, by purpose.
var allowed = map[string]map[string]bool{
	"inspect": {},
	"deploy":  {"image.stream": true, "disk.wipe": true},
	"wipe":    {"disk.wipe": true},
}

// Allows says whether a ramdisk that is there for purpose may run a command kind that destroys.
func Allows(purpose, kind string) bool { return allowed[purpose][kind] }
