package keys

import (
	"crypto/ecdsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/gateway/signer"
)

// Set is what a running gateway uses. It holds no root key.
type Set struct {
	Authority *Authority
	Command   *signer.File
	// Store encrypts secrets at rest: 32 bytes.
	Store []byte
	// Bundles holds every trust bundle, the oldest first, so that an agent
	// that was away can be handed each in turn.
	Bundles []*agentv1.SignedBundle
	// Current is the newest one.
	Current *trust.Bundle
}

// Load reads a gateway's folder and checks that its parts belong together.
func Load(dir string, now time.Time) (*Set, error) {
	s, err := load(dir, now)
	if err != nil {
		return nil, fmt.Errorf("load gateway keys: %w", err)
	}
	return s, nil
}

func load(dir string, now time.Time) (*Set, error) {
	s := &Set{}
	var err error
	if s.Authority, err = loadAuthority(filepath.Join(dir, CAKeyFile), filepath.Join(dir, CACertFile)); err != nil {
		return nil, err
	}
	if s.Command, err = signer.Load(filepath.Join(dir, CommandFile)); err != nil {
		return nil, err
	}
	block, err := readPEM(filepath.Join(dir, StoreFile), storePEM)
	if err != nil {
		return nil, err
	}
	if s.Store = block; len(s.Store) != 32 {
		return nil, fmt.Errorf("%s: key of %d bytes, want 32", StoreFile, len(s.Store))
	}
	if err := s.loadBundles(dir, now); err != nil {
		return nil, err
	}
	if _, ok := s.Current.CommandKey(s.Command.KeyID()); !ok {
		return nil, fmt.Errorf("%s is not a command key of trust bundle %d: agents would obey nothing that it signs", CommandFile, s.Current.Version())
	}
	if _, err := s.Authority.cert.Verify(x509.VerifyOptions{Roots: s.Current.CAs(), CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err != nil {
		return nil, fmt.Errorf("%s is not a CA of trust bundle %d: %w", CACertFile, s.Current.Version(), err)
	}
	return s, nil
}

// loadBundles reads bundle files from the oldest on. The oldest one vouches
// for itself, as it does in a join string; each next one must follow from it.
func (s *Set) loadBundles(dir string, now time.Time) error {
	names, err := filepath.Glob(filepath.Join(dir, "bundle-*.pb"))
	if err != nil {
		return err
	}
	slices.Sort(names)
	for i, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		signed := &agentv1.SignedBundle{}
		if err := proto.Unmarshal(data, signed); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		// An old bundle may have run out; the newest may not.
		at := now
		if i < len(names)-1 {
			at = time.UnixMilli(0)
		}
		var next *trust.Bundle
		if s.Current == nil {
			if next, err = trust.Restore(signed); err == nil && len(names) == 1 {
				next, err = trust.VerifyFirst(next.RootSet(), signed, at)
			}
		} else {
			next, err = s.Current.VerifyNext(signed, at)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		s.Bundles, s.Current = append(s.Bundles, signed), next
	}
	if s.Current == nil {
		return errors.New("no trust bundle: make keys with gateway init")
	}
	return nil
}

// After lists the bundles that an agent with this version lacks, in order.
func (s *Set) After(version uint64) []*agentv1.SignedBundle {
	oldest := s.Current.Version() - uint64(len(s.Bundles)) + 1
	if version+1 <= oldest {
		return s.Bundles
	}
	return s.Bundles[min(version+1-oldest, uint64(len(s.Bundles))):]
}

func readPEM(path, kind string) ([]byte, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if kind != "CERTIFICATE" && st.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%s may be read by others (mode %04o): chmod 600", path, st.Mode().Perm())
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(text)
	if block == nil || block.Type != kind {
		return nil, fmt.Errorf("%s holds no PEM block %q", path, kind)
	}
	return block.Bytes, nil
}

func loadAuthority(keyPath, certPath string) (*Authority, error) {
	keyDER, err := readPEM(keyPath, "PRIVATE KEY")
	if err != nil {
		return nil, err
	}
	certDER, err := readPEM(certPath, "CERTIFICATE")
	if err != nil {
		return nil, err
	}
	parsed, err := x509.ParsePKCS8PrivateKey(keyDER)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", keyPath, err)
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("%s is not an ECDSA key", keyPath)
	}
	cert, err := x509.ParseCertificate(certDER)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", certPath, err)
	}
	if !key.PublicKey.Equal(cert.PublicKey) {
		return nil, fmt.Errorf("%s and %s do not belong together", keyPath, certPath)
	}
	return &Authority{key: key, cert: cert}, nil
}
