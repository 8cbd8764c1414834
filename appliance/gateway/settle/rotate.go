package settle

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/secretstore"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// RotateKind is the command kind that changes a BMC's password.
const RotateKind = cmdkind.Rotate

// The reasons by which a rotation is refused before anything is sent.
const (
	Shared     errs.Code = "credential-shared"
	InProgress errs.Code = "rotation-in-progress"
)

// classes are what a new password is made of: nothing that a shell, a file of one
// word, a URL or a BMC's web page reads as anything else, and no two that look
// alike. Its 16 bytes fit IPMI 1.5's limit too.
var classes = []string{"ABCDEFGHJKLMNPQRSTUVWXYZ", "abcdefghijkmnpqrstuvwxyz", "23456789", "-_."}

const passwordBytes = 16

// NewPassword is 16 characters with at least one of each class, a letter first:
// what BMC policies ask for. It has more than 90 bits.
func NewPassword() secret.Value {
	all := strings.Join(classes, "")
	for {
		out := make([]byte, passwordBytes)
		for i := range out {
			n, err := rand.Int(rand.Reader, big.NewInt(int64(len(all))))
			if err != nil {
				panic(err) // crypto/rand does not fail
			}
			out[i] = all[n.Int64()]
		}
		if fits(string(out)) {
			return secret.New(out)
		}
	}
}

func fits(password string) bool {
	for _, class := range classes {
		if !strings.ContainsAny(password, class) {
			return false
		}
	}
	return strings.ContainsAny(password[:1], classes[0]+classes[1])
}

// Begin prepares a rotation that is about to be sent: its new password is kept,
// sealed, under its own reference, or the one that waits there is taken again.
// A credential of several machines is refused: one of them would have the new
// password and the others the old.
func (s *Service) Begin(ctx context.Context, spec commands.Spec, args []byte) (over func(), err error) {
	req := &bmcv1.BmcOperationRequest{}
	if err := proto.Unmarshal(args, req); err != nil {
		return nil, errs.New(errs.InvalidPayload, "read the rotation: %v", err)
	}
	ref := req.GetCredentialsRef()
	pending, err := secretstore.PendingRef(ref)
	if err != nil {
		return nil, err
	}
	if got := newPasswordOf(req.GetArgsJson()); got != pending {
		return nil, errs.New(errs.InvalidArgs, "a rotation's new password is the gateway's to make")
	}
	m, err := s.c.Store.MachineByID(ctx, spec.TargetNodeID)
	if err != nil {
		return nil, err
	}
	if err := s.Alone(ctx, m, ref); err != nil {
		return nil, err
	}
	over = s.start(spec.ID)
	password := s.c.Password()
	defer password.Wipe()
	err = s.c.Store.BeginRotation(ctx, store.Rotation{
		CredentialsRef: ref, PendingRef: pending, TenantID: m.TenantID, MachineID: m.ID, CommandID: spec.ID,
	}, s.c.Secrets.Seal(pending, password))
	if err != nil {
		over()
	}
	if errors.Is(err, store.ErrConflict) {
		return nil, errs.New(InProgress, "the credential %s is being rotated", ref)
	}
	return over, err
}

// Alone refuses a credential that machines share.
func (s *Service) Alone(ctx context.Context, m store.Machine, ref string) error {
	all, err := s.c.Store.MachinesByCredential(ctx, m.TenantID, ref)
	if err != nil {
		return err
	}
	if len(all) > 1 {
		var names []string
		for _, one := range all {
			names = append(names, one.Name)
		}
		return errs.New(Shared, "machines %s share %s: give each a credential of its own first (secret put, metal rebind)", strings.Join(names, ", "), ref)
	}
	return nil
}

func newPasswordOf(argsJSON string) string {
	args, err := driver.ParseArgs([]byte(argsJSON))
	var fields struct {
		NewPassword string `json:"newPassword"`
	}
	if err != nil || len(args) != 1 || json.Unmarshal(args[0], &fields) != nil {
		return ""
	}
	return fields.NewPassword
}

// verdict is what an attempt's end says about the BMC's password.
type verdict int

const (
	unclear  verdict = iota // either may hold
	proved                  // the new one logs in
	notTried                // the attempt changed nothing
	refused                 // the old one logs in, and the BMC does not take the new one
)

// judge reads an attempt's end. What nobody has listed is unclear: a password
// that may be the BMC's is never thrown away.
func judge(err *errs.Error) verdict {
	if err == nil {
		return proved
	}
	switch err.Code {
	// The arguments were good when the command was made: it is the new password
	// that the BMC does not take, told to who had logged in with the old one.
	case errs.CredentialsUnchanged, errs.InvalidArgs:
		return refused
	case errs.UnknownKind, errs.RoleMismatch, errs.WrongAgent, errs.WrongIncarnation, errs.Expired,
		errs.SignatureRequired, errs.SignatureInvalid, errs.KeyUnknown, errs.QuorumRequired, errs.GrantInvalid, errs.LaneFull,
		errs.InvalidPayload, errs.OperationNotAllowed, errs.BindingMismatch,
		errs.UnsupportedDriver, errs.UnsupportedOperation, errs.InvalidConfig, errs.InvalidAddress,
		errs.CredentialsUnavailable, errs.PinUnsupported, errs.Unavailable:
		return notTried
	}
	return unclear
}

// rotation takes one credential's rotation further. wait is when it is tried
// again; zero: not by itself.
func (s *Service) rotation(ctx context.Context, r store.Rotation) (open bool, wait time.Duration, err error) {
	if !r.Flying {
		if r.Next.IsZero() {
			return false, 0, nil
		}
		if wait := r.Next.Sub(s.c.Store.Now()); wait > 0 {
			return false, wait, nil
		}
		return s.resume(ctx, r)
	}
	outcome, open, err := s.ended(ctx, r.CommandID)
	if err != nil || open {
		return open, 0, err
	}
	m, err := s.c.Store.MachineByID(ctx, r.MachineID)
	if err != nil {
		return false, 0, err
	}
	v := judge(outcome)
	if v == proved {
		if err = s.prove(ctx, r); err == nil {
			s.audit(ctx, m, "credentials.rotated", map[string]string{"credentials": r.CredentialsRef, "command": r.CommandID})
			return false, 0, nil
		}
		if ctx.Err() != nil {
			return false, 0, err // after a restart the command says the same
		}
		s.c.Log.Error("a proved password does not fit into its credential: it is kept aside", "credentials", r.CredentialsRef, "err", err)
		outcome, v = errs.New(errs.Internal, "the BMC has the new password, but the credential %s cannot take it: %v", r.CredentialsRef, err), unclear
	}
	details := map[string]string{"credentials": r.CredentialsRef, "command": r.CommandID, "code": string(outcome.Code), "pending": "kept"}
	if v == refused || v == notTried && !r.Unclear {
		details["pending"] = "dropped"
		s.audit(ctx, m, "credentials.rotation-failed", details)
		return false, 0, s.c.Store.DropRotation(ctx, r.CredentialsRef, r.CommandID)
	}
	r.Unclear, r.ErrorCode, r.ErrorMessage = true, string(outcome.Code), outcome.Message
	// Whoever cancelled it did not ask for another attempt.
	if r.Attempts < maxAttempts && outcome.Code != errs.Cancelled {
		wait = min(s.c.Pause<<(r.Attempts-1), maxPause)
		r.Next = s.c.Store.Now().Add(wait)
	}
	s.audit(ctx, m, "credentials.rotation-failed", details)
	return false, wait, s.c.Store.KeepRotation(ctx, r)
}

// prove makes the pending password the credential's.
func (s *Service) prove(ctx context.Context, r store.Rotation) error {
	const tries = 3 // a person may put another credential in between
	for n := 1; ; n++ {
		before, err := s.c.Store.Secret(ctx, r.CredentialsRef)
		if err != nil {
			return fmt.Errorf("read %s: %w", r.CredentialsRef, err)
		}
		sealed, err := s.withPending(ctx, r, before)
		if err != nil {
			return err
		}
		err = s.c.Store.ProveRotation(ctx, r.CredentialsRef, r.CommandID, before, sealed)
		if !errors.Is(err, store.ErrConflict) || n == tries {
			return err
		}
	}
}

// withPending is the credential with the pending password, all else as it was.
func (s *Service) withPending(ctx context.Context, r store.Rotation, before []byte) ([]byte, error) {
	row, err := s.c.Store.Secret(ctx, r.PendingRef)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", r.PendingRef, err)
	}
	pending, err := s.c.Secrets.Unseal(r.PendingRef, row)
	if err != nil {
		return nil, err
	}
	defer pending.Wipe()
	old, err := s.c.Secrets.Unseal(r.CredentialsRef, before)
	if err != nil {
		return nil, err
	}
	defer old.Wipe()
	fields := map[string]json.RawMessage{}
	if json.Unmarshal(old.Reveal(), &fields) != nil || fields == nil {
		return nil, errors.New("it is no JSON object with username and password")
	}
	if fields["password"], err = json.Marshal(string(pending.Reveal())); err != nil {
		return nil, err
	}
	plain, err := json.Marshal(fields)
	if err != nil {
		return nil, err
	}
	fresh := secret.New(plain)
	defer fresh.Wipe()
	return s.c.Secrets.Seal(r.CredentialsRef, fresh), nil
}

// resume sends a rotation with an unclear end once more, as it was: its driver
// tries both passwords.
func (s *Service) resume(ctx context.Context, r store.Rotation) (open bool, wait time.Duration, err error) {
	id, err := s.again(ctx, r)
	if err == nil {
		s.c.Log.Info("a rotation with an unclear end is tried again", "credentials", r.CredentialsRef, "command", id)
		return false, 0, nil // its start woke the loop
	}
	if ctx.Err() != nil {
		return false, 0, err
	}
	if errs.CodeOf(err) != errs.Unavailable {
		s.c.Log.Warn("a rotation with an unclear end is not tried again now", "credentials", r.CredentialsRef, "err", err)
	}
	if err := s.c.Store.PostponeRotation(ctx, r.CredentialsRef, s.c.Store.Now().Add(every)); err != nil && !errors.Is(err, store.ErrConflict) {
		return false, 0, err
	}
	return false, every, nil
}

func (s *Service) again(ctx context.Context, r store.Rotation) (id string, err error) {
	m, err := s.c.Store.MachineByID(ctx, r.MachineID)
	if err != nil {
		return "", err
	}
	box, err := s.box(ctx, m.SiteID)
	if err != nil {
		return "", err
	}
	last, err := s.c.Store.Command(ctx, r.CommandID)
	if err != nil {
		return "", err
	}
	p := &agentv1.CommandPayload{}
	if err := proto.Unmarshal(last.Signed.GetPayload(), p); err != nil {
		return "", err
	}
	return s.c.Commands.Submit(ctx, commands.Spec{
		AgentID: box, TargetNodeID: m.ID, Kind: RotateKind, Raw: p.GetArgs(), SecretRefs: p.GetSecretRefs(), Traceparent: p.GetTraceparent(),
	})
}

// Doubtful reports whether a credential's rotation ended unclear, so that a
// log-in that fails may be its doing. One that a person cancelled is theirs.
func (s *Service) Doubtful(ctx context.Context, credentialsRef string) bool {
	r, err := s.c.Store.Rotation(ctx, credentialsRef)
	return err == nil && r.Unclear && r.ErrorCode != string(errs.Cancelled)
}

// Settle has an unclear rotation tried again now, and waits until it is settled,
// its attempt ended unclear again, or ctx ends. settled is true when one password
// is known to hold.
func (s *Service) Settle(ctx context.Context, credentialsRef string) (settled bool) {
	if err := s.c.Store.HurryRotation(ctx, credentialsRef); err != nil && !errors.Is(err, store.ErrConflict) {
		return false
	}
	s.wake()
	before := -1
	for {
		s.mu.Lock()
		looked := s.settled
		s.mu.Unlock()
		r, err := s.c.Store.Rotation(ctx, credentialsRef)
		switch {
		case errors.Is(err, store.ErrNotFound):
			return true
		case err != nil:
			return false
		case before < 0:
			before = r.Attempts
			if r.Flying {
				before-- // this attempt is the one to wait for
			}
		case !r.Flying && (r.Attempts > before || r.Next.After(s.c.Store.Now())):
			return false
		}
		select {
		case <-ctx.Done():
			return false
		case <-looked:
		}
	}
}
