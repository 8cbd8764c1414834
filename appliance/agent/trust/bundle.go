// Package trust says whom an agent obeys: trust bundles signed by roots, the
// join string that pins them, the TLS pin, and the vouchers of a boot window.
package trust

import (
	"cmp"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

const (
	bundleDomain = "bettercompute.bundle.v1\x00"
	rootsDomain  = "bettercompute.roots.v1\x00"

	maxBundleBytes = 1 << 20
	maxKeys        = 64
)

// KeyID is the lower-case hex SHA-256 of the public key.
func KeyID(key ed25519.PublicKey) string {
	sum := sha256.Sum256(key)
	return hex.EncodeToString(sum[:])
}

// RootSetHash is what a join string pins: the set of root keys, in no order,
// with the number of them that must sign.
func RootSetHash(roots [][]byte, threshold uint32) [32]byte {
	sorted := slices.Clone(roots)
	slices.SortFunc(sorted, slices.Compare)
	sorted = slices.CompactFunc(sorted, slices.Equal)
	h := sha256.New()
	h.Write([]byte(rootsDomain))
	h.Write(binary.BigEndian.AppendUint32(nil, threshold))
	for _, root := range sorted {
		h.Write(binary.BigEndian.AppendUint32(nil, uint32(len(root))))
		h.Write(root)
	}
	return [32]byte(h.Sum(nil))
}

// SignBundle encodes a bundle and signs it with each key. It refuses a bundle
// that no agent would take for its shape; thresholds are judged by verifiers.
func SignBundle(payload *agentv1.TrustBundle, keys ...ed25519.PrivateKey) (*agentv1.SignedBundle, error) {
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(payload)
	if err != nil {
		return nil, fmt.Errorf("encode trust bundle: %w", err)
	}
	if _, err := parse(&agentv1.SignedBundle{Payload: data}); err != nil {
		return nil, err
	}
	return AddBundleSignatures(&agentv1.SignedBundle{Payload: data}, keys...), nil
}

// AddBundleSignatures returns a copy of s that keys have signed too, so that
// roots can sign one after the other, each where it is kept.
func AddBundleSignatures(s *agentv1.SignedBundle, keys ...ed25519.PrivateKey) *agentv1.SignedBundle {
	signed := proto.CloneOf(s)
	for _, key := range keys {
		signed.Signatures = append(signed.Signatures, &agentv1.Signature{
			KeyId:     KeyID(key.Public().(ed25519.PublicKey)),
			Signature: ed25519.Sign(key, bundleMessage(signed.GetPayload())),
		})
	}
	return signed
}

func bundleMessage(payload []byte) []byte {
	return append([]byte(bundleDomain), payload...)
}

// Bundle is a trust bundle that was verified. It does not change.
type Bundle struct {
	raw     *agentv1.SignedBundle
	content *agentv1.TrustBundle
	command map[string]ed25519.PublicKey
	cas     []*x509.Certificate
}

// VerifyFirst takes the bundle of an enrolment: its root set must be the
// pinned one, and a threshold of distinct roots must have signed it.
func VerifyFirst(rootSet [32]byte, s *agentv1.SignedBundle, now time.Time) (*Bundle, error) {
	// The payload names the roots that must have signed it, so it is parsed
	// first; only the pinned hash gives those roots any weight.
	b, err := parse(s)
	if err != nil {
		return nil, err
	}
	if RootSetHash(b.content.GetRoots(), b.content.GetRootThreshold()) != rootSet {
		return nil, errs.New(errs.KeyUnknown, "the trust bundle's roots are not the ones that the join string pins")
	}
	if err := b.signedBy(b.content); err != nil {
		return nil, err
	}
	if err := b.fresh(now); err != nil {
		return nil, err
	}
	return b, nil
}

// VerifyNext takes the successor of b: signed by a threshold of b's roots and
// of its own, with the next version.
func (b *Bundle) VerifyNext(s *agentv1.SignedBundle, now time.Time) (*Bundle, error) {
	next, err := b.VerifyMissed(s)
	if err != nil {
		return nil, err
	}
	if err := next.fresh(now); err != nil {
		return nil, err
	}
	return next, nil
}

// VerifyMissed is VerifyNext for a bundle that others follow: it may have run
// out while the box was dark, and is still the only way to those.
func (b *Bundle) VerifyMissed(s *agentv1.SignedBundle) (*Bundle, error) {
	next, err := parse(s)
	if err != nil {
		return nil, err
	}
	if err := next.signedBy(b.content); err != nil {
		return nil, fmt.Errorf("old roots: %w", err)
	}
	if err := next.signedBy(next.content); err != nil {
		return nil, fmt.Errorf("new roots: %w", err)
	}
	if next.Version() != b.Version()+1 {
		return nil, errs.New(errs.InvalidPayload, "trust bundle version %d follows %d; versions rise by one", next.Version(), b.Version())
	}
	return next, nil
}

// Restore takes a bundle that this agent verified and stored before: its own
// roots' signatures are checked again, expiry is not, so that a box that was
// dark for long can still be handed the bundles that it missed.
func Restore(s *agentv1.SignedBundle) (*Bundle, error) {
	b, err := parse(s)
	if err != nil {
		return nil, err
	}
	if err := b.signedBy(b.content); err != nil {
		return nil, err
	}
	return b, nil
}

// PeekVersion is the version that s claims, 0 if it does not parse. Nothing is
// verified: it serves to skip bundles that an agent has already.
func PeekVersion(s *agentv1.SignedBundle) uint64 {
	if b, err := parse(s); err == nil {
		return b.Version()
	}
	return 0
}

// signedBy counts the distinct roots of by that signed b.
func (b *Bundle) signedBy(by *agentv1.TrustBundle) error {
	msg := bundleMessage(b.raw.GetPayload())
	good := map[string]bool{}
	for _, root := range by.GetRoots() {
		id := KeyID(root)
		for _, s := range b.raw.GetSignatures() {
			if s.GetKeyId() == id && ed25519.Verify(root, msg, s.GetSignature()) {
				good[id] = true
			}
		}
	}
	if len(good) < int(by.GetRootThreshold()) {
		return errs.New(errs.SignatureInvalid, "trust bundle version %d is signed by %d of its roots; %d are needed", b.Version(), len(good), by.GetRootThreshold())
	}
	return nil
}

// fresh judges expiry; a bundle that is not valid yet is left alone, since a
// box's clock may stand in the past.
func (b *Bundle) fresh(now time.Time) error {
	if until := time.UnixMilli(b.content.GetValidUntilMs()); !now.Before(until) {
		return errs.New(errs.Expired, "trust bundle version %d was valid until %s", b.Version(), until.UTC().Format(time.RFC3339))
	}
	return nil
}

// parse checks shape alone: no signature is looked at.
func parse(s *agentv1.SignedBundle) (*Bundle, error) {
	if len(s.GetPayload()) == 0 || len(s.GetPayload()) > maxBundleBytes {
		return nil, errs.New(errs.InvalidPayload, "trust bundle of %d bytes; 1 to %d are allowed", len(s.GetPayload()), maxBundleBytes)
	}
	if len(s.GetSignatures()) > maxKeys {
		return nil, errs.New(errs.InvalidPayload, "trust bundle with %d signatures; at most %d", len(s.GetSignatures()), maxKeys)
	}
	c := new(agentv1.TrustBundle)
	if err := envelope.StrictUnmarshal(s.GetPayload(), c); err != nil {
		return nil, fmt.Errorf("trust bundle: %w", err)
	}
	bad := func(format string, args ...any) (*Bundle, error) {
		return nil, errs.New(errs.InvalidPayload, "trust bundle: "+format, args...)
	}
	for _, set := range []struct {
		name string
		keys [][]byte
	}{{"roots", c.GetRoots()}, {"command_keys", c.GetCommandKeys()}, {"approver_keys", c.GetApproverKeys()}, {"release_keys", c.GetReleaseKeys()}} {
		if err := checkKeys(set.keys); err != nil {
			return bad("%s: %v", set.name, err)
		}
	}
	thresholds := []struct {
		name      string
		threshold uint32
		keys      int
		needed    bool
	}{
		{"root_threshold", c.GetRootThreshold(), len(c.GetRoots()), true},
		{"approver_threshold", c.GetApproverThreshold(), len(c.GetApproverKeys()), len(c.GetApproverKeys()) > 0},
		{"release_threshold", c.GetReleaseThreshold(), len(c.GetReleaseKeys()), len(c.GetReleaseKeys()) > 0},
	}
	for _, t := range thresholds {
		if int(t.threshold) > t.keys || (t.needed && t.threshold == 0) {
			return bad("%s is %d of %d keys", t.name, t.threshold, t.keys)
		}
	}
	switch {
	case c.GetVersion() == 0:
		return bad("version is missing")
	case c.GetValidUntilMs() <= c.GetIssuedAtMs():
		return bad("valid_until must lie after issued_at")
	case len(c.GetCommandKeys()) == 0:
		return bad("command_keys is empty")
	case len(c.GetGatewayCas()) == 0 || len(c.GetGatewayCas()) > maxKeys:
		return bad("%d gateway_cas; 1 to %d are allowed", len(c.GetGatewayCas()), maxKeys)
	case len(c.GetGatewayUrls()) == 0 || len(c.GetGatewayUrls()) > maxKeys:
		return bad("%d gateway_urls; 1 to %d are allowed", len(c.GetGatewayUrls()), maxKeys)
	}
	b := &Bundle{raw: proto.CloneOf(s), content: c, command: map[string]ed25519.PublicKey{}}
	for _, u := range c.GetGatewayUrls() {
		if err := CheckURL(u); err != nil {
			return bad("%v", err)
		}
	}
	for _, der := range c.GetGatewayCas() {
		ca, err := x509.ParseCertificate(der)
		if err != nil {
			return bad("gateway CA: %v", err)
		}
		if !ca.IsCA {
			return bad("gateway CA %q is no CA certificate", ca.Subject)
		}
		b.cas = append(b.cas, ca)
	}
	for _, key := range c.GetCommandKeys() {
		b.command[KeyID(key)] = key
	}
	return b, nil
}

func checkKeys(keys [][]byte) error {
	if len(keys) > maxKeys {
		return fmt.Errorf("%d keys; at most %d", len(keys), maxKeys)
	}
	seen := map[string]bool{}
	for i, key := range keys {
		if len(key) != ed25519.PublicKeySize {
			return fmt.Errorf("key %d has %d bytes, not %d", i, len(key), ed25519.PublicKeySize)
		}
		if seen[string(key)] {
			return fmt.Errorf("key %d stands there twice", i)
		}
		seen[string(key)] = true
	}
	return nil
}

// Version rises by one with each bundle.
func (b *Bundle) Version() uint64 { return b.content.GetVersion() }

// CommandKey finds a key that may sign commands, by its KeyID.
func (b *Bundle) CommandKey(id string) (ed25519.PublicKey, bool) {
	key, ok := b.command[id]
	return key, ok
}

// CAs holds the CAs that sign gateway and agent certificates.
func (b *Bundle) CAs() *x509.CertPool {
	pool := x509.NewCertPool()
	for _, ca := range b.cas {
		pool.AddCert(ca)
	}
	return pool
}

// CASPKI is the SPKI of the first CA, the one to pin: a bundle has at least one.
func (b *Bundle) CASPKI() [32]byte { return SPKI(b.cas[0]) }

// URLs are the gateway's, in the order in which to try them.
func (b *Bundle) URLs() []string { return slices.Clone(b.content.GetGatewayUrls()) }

// Raw is the bundle as it was signed; callers do not change it.
func (b *Bundle) Raw() *agentv1.SignedBundle { return b.raw }

// RootSet is the RootSetHash of the bundle's roots.
func (b *Bundle) RootSet() [32]byte {
	return RootSetHash(b.content.GetRoots(), b.content.GetRootThreshold())
}

// ApproverKey finds a key that may approve grants, by its KeyID.
func (b *Bundle) ApproverKey(id string) (ed25519.PublicKey, bool) {
	for _, key := range b.content.GetApproverKeys() {
		if KeyID(key) == id {
			return key, true
		}
	}
	return nil, false
}

// Approvers are the KeyIDs of those who may approve grants, sorted.
func (b *Bundle) Approvers() []string {
	var ids []string
	for _, key := range b.content.GetApproverKeys() {
		ids = append(ids, KeyID(key))
	}
	slices.Sort(ids)
	return ids
}

// ApproverThreshold is how many approvers must sign a grant.
func (b *Bundle) ApproverThreshold() int { return int(b.content.GetApproverThreshold()) }

// The quorum policy of a bundle that says nothing else.
const (
	defaultTargets10m = 5
	defaultTargets24h = 20
)

// QuorumTargets are the numbers of distinct targets, within 10 minutes and within
// 24 hours, from which on grants are needed.
func (b *Bundle) QuorumTargets() (in10m, in24h int) {
	q := b.content.GetQuorum()
	return int(cmp.Or(q.GetTargets_10M(), defaultTargets10m)), int(cmp.Or(q.GetTargets_24H(), defaultTargets24h))
}

// QuorumInForce reports whether destructive work needs people's grants: from
// two approver keys on.
func (b *Bundle) QuorumInForce() bool { return len(b.content.GetApproverKeys()) >= 2 }
