package keys

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
)

// publicPrefix begins an approver's public key as text.
const publicPrefix = "bca1."

// NewApprover makes an approver's key in a new file, which stays with its owner,
// and returns the public key.
func NewApprover(path string) (ed25519.PublicKey, error) {
	public, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make approver key: %w", err)
	}
	text, err := privatePEM(key)
	if err == nil {
		err = create(path, text, 0o600)
	}
	if err == nil {
		err = atomicfile.SyncDir(filepath.Dir(path))
	}
	if err != nil {
		return nil, fmt.Errorf("make approver key: %w", err)
	}
	return public, nil
}

// ReadPrivate reads an Ed25519 key that only its owner may read.
func ReadPrivate(path string) (ed25519.PrivateKey, error) {
	der, err := readPEM(path, "PRIVATE KEY")
	if err != nil {
		return nil, fmt.Errorf("read key: %w", err)
	}
	parsed, err := x509.ParsePKCS8PrivateKey(der)
	if err != nil {
		return nil, fmt.Errorf("read key %s: %w", path, err)
	}
	key, ok := parsed.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("read key: %s is not an Ed25519 key", path)
	}
	return key, nil
}

// PublicText is a public key as people hand it on.
func PublicText(key ed25519.PublicKey) string {
	return publicPrefix + base64.RawURLEncoding.EncodeToString(key)
}

// ParsePublic reads PublicText. A private key that somebody mistook for it is
// refused without being repeated.
func ParsePublic(text string) (ed25519.PublicKey, error) {
	text = strings.TrimSpace(text)
	if block, _ := pem.Decode([]byte(text)); block != nil {
		return nil, errors.New("that is a key file; what is wanted is the line bca1.… that approver keygen printed")
	}
	encoded, ok := strings.CutPrefix(text, publicPrefix)
	raw, err := base64.RawURLEncoding.Strict().DecodeString(encoded)
	if !ok || err != nil || len(raw) != ed25519.PublicKeySize {
		return nil, errors.New("want an approver's public key, the line bca1.… that approver keygen printed")
	}
	return raw, nil
}

// Bundle reads the newest trust bundle of a gateway's folder, of which it needs
// the bundle files alone.
func Bundle(dir string, now time.Time) (*trust.Bundle, *agentv1.TrustBundle, error) {
	s := &Set{}
	if err := s.loadBundles(dir, now); err != nil {
		return nil, nil, fmt.Errorf("read trust bundles: %w", err)
	}
	content := &agentv1.TrustBundle{}
	if err := proto.Unmarshal(s.Current.Raw().GetPayload(), content); err != nil {
		return nil, nil, fmt.Errorf("read trust bundles: %w", err)
	}
	return s.Current, content, nil
}

// NextBundle makes the folder's next trust bundle of the newest one, changed by
// edit and signed by roots, and returns its file.
func NextBundle(dir string, roots []ed25519.PrivateKey, edit func(*agentv1.TrustBundle) error, now time.Time) (path string, err error) {
	current, content, err := Bundle(dir, now)
	if err != nil {
		return "", err
	}
	if err := edit(content); err != nil {
		return "", err
	}
	content.Version++
	content.IssuedAtMs, content.ValidUntilMs = now.UnixMilli(), now.Add(bundleLife).UnixMilli()
	signed, err := trust.SignBundle(content, roots...)
	if err != nil {
		return "", fmt.Errorf("sign trust bundle: %w", err)
	}
	// As every agent will see it.
	if _, err := current.VerifyNext(signed, now); err != nil {
		return "", fmt.Errorf("sign trust bundle: %w", err)
	}
	data, err := proto.Marshal(signed)
	if err != nil {
		return "", fmt.Errorf("sign trust bundle: %w", err)
	}
	path = filepath.Join(dir, bundleFile(content.Version))
	if err := create(path, data, 0o600); err != nil {
		return "", fmt.Errorf("keep trust bundle: %w", err)
	}
	return path, atomicfile.SyncDir(dir)
}

// AddApprovers adds keys. threshold is how many must agree; 0: as it is, or two
// once there are two.
func AddApprovers(b *agentv1.TrustBundle, keys []ed25519.PublicKey, threshold uint32) error {
	if len(b.ApproverKeys) < 2 && threshold == 0 {
		b.ApproverThreshold = 0 // of one there was nothing to choose
	}
	for _, key := range keys {
		if slices.ContainsFunc(b.ApproverKeys, func(have []byte) bool { return string(have) == string(key) }) {
			return fmt.Errorf("approver %s is in the trust bundle already", trust.KeyID(key))
		}
		b.ApproverKeys = append(b.ApproverKeys, key)
	}
	return setThreshold(b, threshold)
}

// RemoveApprovers removes keys by their key ids, or by what they begin with.
func RemoveApprovers(b *agentv1.TrustBundle, ids []string, threshold uint32) error {
	for _, id := range ids {
		var at []int
		for i, key := range b.ApproverKeys {
			if len(id) >= 8 && strings.HasPrefix(trust.KeyID(key), id) {
				at = append(at, i)
			}
		}
		if len(at) != 1 {
			return fmt.Errorf("approver %q: %d keys of the trust bundle have an id that begins so, want one (at least 8 digits)", id, len(at))
		}
		b.ApproverKeys = slices.Delete(b.ApproverKeys, at[0], at[0]+1)
	}
	return setThreshold(b, threshold)
}

func setThreshold(b *agentv1.TrustBundle, threshold uint32) error {
	n := uint32(len(b.ApproverKeys))
	switch {
	case n == 0 && threshold == 0:
		b.ApproverThreshold = 0
	case threshold > n:
		return fmt.Errorf("threshold %d is more than the %d approvers", threshold, n)
	case threshold > 0:
		b.ApproverThreshold = threshold
	case b.ApproverThreshold == 0:
		b.ApproverThreshold = min(2, n)
	case b.ApproverThreshold > n:
		return fmt.Errorf("%d approvers are left, and %d must agree: say --threshold", n, b.ApproverThreshold)
	}
	return nil
}
