// Package grants is people's approval of what is destructive: what a grant says,
// who signed it, which targets it holds, and whether a command needs one.
package grants

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// Domain separates an approver's signature from every other use of the key.
const Domain = "bettercompute.grant.v1\x00"

// Bounds of one grant.
const (
	// MaxLife is the longest that a grant may hold. What a box forgets of grants
	// when it loses its memory is bounded by it.
	MaxLife = 7 * 24 * time.Hour
	// MaxTargets is two of each machine that a site has at most.
	MaxTargets = 8192
	// MaxUses bounds the uses of each target.
	MaxUses = 1000

	maxBytes      = 64 << 10
	maxSignatures = 64
	maxOperations = 64
	maxArtifacts  = 64
	maxReason     = 1 << 10
	maxTarget     = 320
)

// The prefixes of what a grant can name.
const (
	bmcPrefix     = "bmc:"
	machinePrefix = "machine:"
)

// BMC is the target of a BMC, by its address in plain form.
func BMC(address string) string { return bmcPrefix + address }

// Machine is the target of a machine, by its id.
func Machine(id string) string { return machinePrefix + id }

// nameable reports whether a grant can hold the target.
func nameable(target string) bool {
	rest, ok := strings.CutPrefix(target, bmcPrefix)
	if !ok {
		rest, ok = strings.CutPrefix(target, machinePrefix)
	}
	return ok && rest != "" && len(target) <= maxTarget &&
		!strings.ContainsFunc(target, func(r rune) bool { return r <= ' ' || r > '~' })
}

// Sorted is targets in the order of a tree, each once; it refuses what no grant
// can name.
func Sorted(targets []string) ([]string, error) {
	for _, t := range targets {
		if !nameable(t) {
			return nil, errs.New(errs.GrantInvalid, "target %.80q: want bmc:HOST:PORT or machine:ID", t)
		}
	}
	out := slices.Clone(targets)
	slices.Sort(out)
	out = slices.Compact(out)
	if len(out) == 0 || len(out) > MaxTargets {
		return nil, errs.New(errs.GrantInvalid, "%d targets; 1 to %d are allowed", len(out), MaxTargets)
	}
	return out, nil
}

// Encode checks a grant and makes the bytes that approvers sign.
func Encode(g *agentv1.Grant) ([]byte, error) {
	payload, err := proto.MarshalOptions{Deterministic: true}.Marshal(g)
	if err != nil {
		return nil, fmt.Errorf("encode grant: %w", err)
	}
	if _, err := Parse(payload); err != nil {
		return nil, err
	}
	return payload, nil
}

// Parse reads a grant's bytes strictly. What no box takes is grant-invalid.
func Parse(payload []byte) (*agentv1.Grant, error) {
	bad := func(format string, args ...any) (*agentv1.Grant, error) {
		return nil, errs.New(errs.GrantInvalid, "grant: "+format, args...)
	}
	if len(payload) == 0 || len(payload) > maxBytes {
		return bad("%d bytes; 1 to %d are allowed", len(payload), maxBytes)
	}
	g := new(agentv1.Grant)
	if err := envelope.StrictUnmarshal(payload, g); err != nil {
		return bad("%s", errs.From(err).Message)
	}
	life := g.GetNotAfterMs() - g.GetNotBeforeMs()
	switch {
	case !plainID(g.GetGrantId()):
		return bad("grant_id: want 1 to 128 of a-z, 0-9 and _")
	case !plainID(g.GetSiteId()):
		return bad("site_id: want 1 to 128 of a-z, 0-9 and _")
	case len(g.GetOperations()) == 0 || len(g.GetOperations()) > maxOperations:
		return bad("%d operations; 1 to %d are allowed", len(g.GetOperations()), maxOperations)
	case len(g.GetTargetsRoot()) != sha256.Size:
		return bad("targets_root has %d bytes, not %d", len(g.GetTargetsRoot()), sha256.Size)
	case g.GetTargetCount() == 0 || g.GetTargetCount() > MaxTargets:
		return bad("%d targets; 1 to %d are allowed", g.GetTargetCount(), MaxTargets)
	case g.GetUsesPerTarget() == 0 || g.GetUsesPerTarget() > MaxUses:
		return bad("%d uses of each target; 1 to %d are allowed", g.GetUsesPerTarget(), MaxUses)
	case g.GetNotBeforeMs() <= 0 || life <= 0 || life > MaxLife.Milliseconds():
		return bad("it must end after it begins, and within %s", MaxLife)
	case !readable(g.GetReason()):
		return bad("reason: want one line of 1 to %d bytes", maxReason)
	case len(g.GetArtifactSha256()) > maxArtifacts:
		return bad("%d artifacts; at most %d", len(g.GetArtifactSha256()), maxArtifacts)
	}
	for _, a := range g.GetArtifactSha256() {
		if !isDigest(a) {
			return bad("artifact %.80q: want 64 lower-case hex digits", a)
		}
	}
	for _, o := range g.GetOperations() {
		if !word(o.GetKind(), false) || !word(o.GetOperation(), false) || !word(o.GetAction(), true) {
			return bad("operation %.80q of kind %.80q, action %.80q: want words of letters, digits, '.', '-' and '_'", o.GetOperation(), o.GetKind(), o.GetAction())
		}
	}
	return g, nil
}

func plainID(id string) bool {
	return len(id) > 0 && len(id) <= 128 && !strings.ContainsFunc(id, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '_'
	})
}

func word(s string, optional bool) bool {
	return (optional || s != "") && len(s) <= 128 && !strings.ContainsFunc(s, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("._-", r)
	})
}

// readable wants a line that a person can read as it is: nothing that steers a
// terminal, or turns the direction of what stands around it.
func readable(s string) bool {
	return strings.TrimSpace(s) != "" && len(s) <= maxReason && utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
}

// isDigest reports whether s is a SHA-256 in lower-case hex.
func isDigest(s string) bool {
	raw, err := hex.DecodeString(s)
	return err == nil && len(raw) == sha256.Size && strings.ToLower(s) == s
}

func message(payload []byte) []byte { return append([]byte(Domain), payload...) }

// Sign is an approver's signature of a grant's bytes.
func Sign(key ed25519.PrivateKey, payload []byte) *agentv1.Signature {
	return &agentv1.Signature{
		KeyId: trust.KeyID(key.Public().(ed25519.PublicKey)), Signature: ed25519.Sign(key, message(payload)),
	}
}

// Approvers are those whose signatures count: a trust bundle's.
type Approvers interface {
	ApproverKey(id string) (ed25519.PublicKey, bool)
	ApproverThreshold() int
}

// Signed judges one signature of a grant's bytes: key-unknown, signature-invalid.
func Signed(a Approvers, payload []byte, s *agentv1.Signature) error {
	key, ok := a.ApproverKey(s.GetKeyId())
	if !ok {
		return errs.New(errs.KeyUnknown, "key %.16s… is no approver's in the trust bundle in force", s.GetKeyId())
	}
	if !ed25519.Verify(key, message(payload), s.GetSignature()) {
		return errs.New(errs.SignatureInvalid, "the signature by key %.16s… does not fit the grant", s.GetKeyId())
	}
	return nil
}

// Approved wants the signatures of enough different approvers.
func Approved(a Approvers, s *agentv1.SignedGrant) error {
	if len(s.GetSignatures()) > maxSignatures {
		return errs.New(errs.GrantInvalid, "the grant has %d signatures; at most %d", len(s.GetSignatures()), maxSignatures)
	}
	good := map[string]bool{}
	var faults string
	for _, one := range s.GetSignatures() {
		if err := Signed(a, s.GetPayload(), one); err != nil {
			faults += "; " + errs.From(err).Message
			continue
		}
		good[one.GetKeyId()] = true
	}
	if need := max(a.ApproverThreshold(), 1); len(good) < need {
		return errs.New(errs.GrantInvalid, "the grant is signed by %d different approvers of the trust bundle in force; %d are needed%s", len(good), need, faults)
	}
	return nil
}
