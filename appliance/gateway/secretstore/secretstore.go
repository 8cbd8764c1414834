// Package secretstore keeps secrets encrypted, and hands them to agents whose
// command in flight lists them.
package secretstore

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/agentv1/agentv1connect"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/gateway/caller"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

// MaxBytes bounds a secret.
const MaxBytes = 64 << 10

// Service is safe for concurrent use.
type Service struct {
	store *store.Store
	box   cipher.AEAD
	log   *slog.Logger
}

var _ agentv1connect.SecretServiceHandler = (*Service)(nil)

// New makes the service; key is 32 bytes and lies apart from the database.
func New(st *store.Store, key []byte, log *slog.Logger) (*Service, error) {
	if len(key) != 32 {
		return nil, fmt.Errorf("secret store: key of %d bytes, want 32", len(key))
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, fmt.Errorf("secret store: %w", err)
	}
	box, err := cipher.NewGCM(block)
	if err != nil {
		return nil, fmt.Errorf("secret store: %w", err)
	}
	return &Service{store: st, box: box, log: log}, nil
}

// Ref is the reference of a tenant's secret: secret://<tenant>/<name>. Names
// are up to 128 of a-z, A-Z, 0-9, '.', '_', '-', with '/' between parts.
func Ref(tenant, name string) (string, error) {
	if !wordy(tenant) {
		return "", errs.New(errs.InvalidArgs, "tenant %q cannot stand in a secret reference", tenant)
	}
	for _, part := range strings.Split(name, "/") {
		if !wordy(part) {
			return "", errs.New(errs.InvalidArgs, "secret name %q: want parts of a-z, A-Z, 0-9, '.', '_' and '-'", name)
		}
	}
	if len(name) > 128 {
		return "", errs.New(errs.InvalidArgs, "secret name of %d bytes, at most 128", len(name))
	}
	return "secret://" + tenant + "/" + name, nil
}

func wordy(s string) bool {
	return len(s) > 0 && len(s) <= 128 && s != "." && s != ".." && strings.IndexFunc(s, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '.' && r != '_' && r != '-'
	}) < 0
}

// TenantOf is the tenant that a reference belongs to.
func TenantOf(ref string) (string, error) {
	rest, ok := strings.CutPrefix(ref, "secret://")
	tenant, name, slash := strings.Cut(rest, "/")
	if !ok || !slash {
		return "", errs.New(errs.InvalidArgs, "want a reference of the form secret://<tenant>/<name>")
	}
	if _, err := Ref(tenant, name); err != nil {
		return "", err
	}
	return tenant, nil
}

// pendingPrefix begins the names of passwords that no log-in has proved yet.
// Nobody puts a secret under such a name but a rotation.
const pendingPrefix = "rotation/"

// PendingRef is where a credential's new password waits until a log-in with it
// proves it: one place for each credential, so that there are never two.
func PendingRef(credentialsRef string) (string, error) {
	tenant, err := TenantOf(credentialsRef)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256([]byte(credentialsRef))
	return Ref(tenant, pendingPrefix+hex.EncodeToString(sum[:16]))
}

// Pending reports whether a reference is of the form that PendingRef makes.
func Pending(ref string) bool {
	tenant, err := TenantOf(ref)
	return err == nil && strings.HasPrefix(ref, "secret://"+tenant+"/"+pendingPrefix)
}

// Put encrypts and keeps a secret, replacing an older value.
func (s *Service) Put(ctx context.Context, tenant, name string, value secret.Value) (ref string, err error) {
	ref, err = Ref(tenant, name)
	if err != nil {
		return "", err
	}
	if Pending(ref) {
		return "", errs.New(errs.InvalidArgs, "secret name %q: names that begin with %s are the gateway's own", name, pendingPrefix)
	}
	if n := len(value.Reveal()); n == 0 || n > MaxBytes {
		return "", errs.New(errs.InvalidArgs, "secret of %d bytes: want 1 to %d", n, MaxBytes)
	}
	if err := s.store.PutSecret(ctx, ref, s.Seal(ref, value)); err != nil {
		return "", fmt.Errorf("keep %s: %w", ref, err)
	}
	return ref, nil
}

// Seal encrypts a secret as the store keeps it. The reference is bound in, so
// that a row cannot be moved to another name.
func (s *Service) Seal(ref string, value secret.Value) []byte {
	nonce := make([]byte, s.box.NonceSize())
	rand.Read(nonce)
	return s.box.Seal(nonce, nonce, value.Reveal(), []byte(ref))
}

// Get decrypts a secret; store.ErrNotFound where there is none.
func (s *Service) Get(ctx context.Context, ref string) (secret.Value, error) {
	sealed, err := s.store.Secret(ctx, ref)
	if err != nil {
		return secret.Value{}, fmt.Errorf("read %s: %w", ref, err)
	}
	return s.Unseal(ref, sealed)
}

// Unseal decrypts what Seal made for the reference.
func (s *Service) Unseal(ref string, sealed []byte) (secret.Value, error) {
	n := s.box.NonceSize()
	if len(sealed) < n {
		return secret.Value{}, fmt.Errorf("read %s: the row is damaged", ref)
	}
	plain, err := s.box.Open(nil, sealed[:n], sealed[n:], []byte(ref))
	if err != nil {
		return secret.Value{}, fmt.Errorf("read %s: wrong key or damaged row: %w", ref, err)
	}
	return secret.New(plain), nil
}

// Has reports whether there is a secret under the reference.
func (s *Service) Has(ctx context.Context, ref string) (bool, error) {
	_, err := s.store.Secret(ctx, ref)
	if errors.Is(err, store.ErrNotFound) {
		return false, nil
	}
	return err == nil, err
}

// Delete forgets a secret; an unknown one is no error.
func (s *Service) Delete(ctx context.Context, ref string) error {
	return s.store.DeleteSecret(ctx, ref)
}

// Resolve answers an agent: only references that its own command lists, and
// only while that command is in flight. Whatever is wrong,
// the code is credentials-unavailable.
func (s *Service) Resolve(ctx context.Context, req *connect.Request[agentv1.ResolveRequest]) (*connect.Response[agentv1.ResolveResponse], error) {
	agent, err := caller.From(ctx)
	if err != nil {
		return nil, caller.Error(err)
	}
	values, err := s.resolve(ctx, agent.ID, req.Msg)
	if err != nil {
		s.log.Warn("secrets refused", "agent", agent.ID, "command", req.Msg.CommandId, "err", err)
		return nil, caller.Error(err)
	}
	return connect.NewResponse(&agentv1.ResolveResponse{Values: values}), nil
}

func (s *Service) resolve(ctx context.Context, agentID string, req *agentv1.ResolveRequest) (map[string][]byte, error) {
	c, err := s.store.Command(ctx, req.CommandId)
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return nil, errs.Retry(errs.CredentialsUnavailable, "the gateway cannot read its store")
	}
	inFlight := err == nil && c.AgentID == agentID && (c.State == store.CommandSent || c.State == store.CommandReceived) && s.store.Now().Before(c.NotAfter)
	if !inFlight {
		return nil, errs.New(errs.CredentialsUnavailable, "no command %.64q of this agent is in flight", req.CommandId)
	}
	if len(req.Refs) == 0 || len(req.Refs) > 32 {
		return nil, errs.New(errs.CredentialsUnavailable, "%d references in one call: want 1 to 32", len(req.Refs))
	}
	values := map[string][]byte{}
	for _, ref := range req.Refs {
		if !slices.Contains(c.SecretRefs, ref) {
			return nil, errs.New(errs.CredentialsUnavailable, "command %s does not list reference %.128q", c.ID, ref)
		}
		value, err := s.Get(ctx, ref)
		if errors.Is(err, store.ErrNotFound) {
			return nil, errs.New(errs.CredentialsUnavailable, "there is no secret %s", ref)
		}
		if err != nil {
			s.log.Error("read secret", "ref", ref, "err", err)
			return nil, errs.New(errs.CredentialsUnavailable, "secret %s cannot be read", ref)
		}
		values[ref] = value.Reveal()
	}
	return values, nil
}
