package secretstore

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

func newTest(t *testing.T) (*store.Store, func(key byte) *Service) {
	t.Helper()
	st, err := store.Open(filepath.Join(t.TempDir(), "gateway.db"), time.Now)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	})
	return st, func(key byte) *Service {
		s, err := New(st, bytes.Repeat([]byte{key}, 32), slog.New(slog.NewTextHandler(io.Discard, nil)))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
}

func TestPutGet(t *testing.T) {
	st, with := newTest(t)
	s := with(1)
	ref, err := s.Put(t.Context(), "default", "rack1/bmc", secret.New([]byte("calvin")))
	if err != nil || ref != "secret://default/rack1/bmc" {
		t.Fatalf("Put = %q, %v", ref, err)
	}
	if got, err := s.Get(t.Context(), ref); err != nil || string(got.Reveal()) != "calvin" {
		t.Errorf("Get = %q, %v, want calvin", got.Reveal(), err)
	}
	sealed, err := st.Secret(t.Context(), ref)
	if err != nil || bytes.Contains(sealed, []byte("calvin")) {
		t.Errorf("stored = %q, %v, want it sealed", sealed, err)
	}
	if _, err := with(2).Get(t.Context(), ref); err == nil {
		t.Error("Get with another key succeeded")
	}
	// A row under another name does not open, nor does a changed one.
	if err := st.PutSecret(t.Context(), "secret://default/moved", sealed); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(t.Context(), "secret://default/moved"); err == nil {
		t.Error("Get of a moved row succeeded")
	}
	sealed[len(sealed)-1] ^= 1
	if err := st.PutSecret(t.Context(), ref, sealed); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(t.Context(), ref); err == nil {
		t.Error("Get of a changed row succeeded")
	}
	if err := s.Delete(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(t.Context(), ref); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("Get after Delete = %v, want ErrNotFound", err)
	}
}

func TestRef(t *testing.T) {
	for _, tt := range []struct {
		tenant, name string
		ok           bool
	}{
		{"default", "bmc", true}, {"default", "a/b.c_d-E9", true}, {"", "bmc", false}, {"default", "", false},
		{"a/b", "bmc", false}, {"default", "../x", false}, {"default", "a//b", false}, {"default", "a b", false}, {"default", "a\nb", false}, {"default", strings.Repeat("x", 129), false},
	} {
		ref, err := Ref(tt.tenant, tt.name)
		if (err == nil) != tt.ok {
			t.Errorf("Ref(%q, %q) = %q, %v, want allowed %v", tt.tenant, tt.name, ref, err, tt.ok)
		}
		if err == nil {
			if tenant, err := TenantOf(ref); err != nil || tenant != tt.tenant {
				t.Errorf("TenantOf(%q) = %q, %v", ref, tenant, err)
			}
		}
	}
	for _, ref := range []string{"", "secret://", "secret://x", "hunter2", "secret://x/", "https://x/y"} {
		if tenant, err := TenantOf(ref); err == nil {
			t.Errorf("TenantOf(%q) = %q, want an error", ref, tenant)
		}
	}
}

func TestPutBounds(t *testing.T) {
	_, with := newTest(t)
	for _, n := range []int{0, MaxBytes + 1} {
		if _, err := with(1).Put(t.Context(), "default", "x", secret.New(make([]byte, n))); errs.CodeOf(err) != errs.InvalidArgs {
			t.Errorf("Put(%d bytes) = %v, want invalid-args", n, err)
		}
	}
}

func FuzzTenantOf(f *testing.F) {
	f.Add("secret://default/bmc")
	f.Add("secret:///")
	f.Fuzz(func(t *testing.T, ref string) {
		tenant, err := TenantOf(ref)
		if err == nil && !strings.HasPrefix(ref, "secret://"+tenant+"/") {
			t.Errorf("TenantOf(%q) = %q", ref, tenant)
		}
	})
}

// TestPendingRef: each credential has one place for a new password, which nobody
// else can put anything in.
func TestPendingRef(t *testing.T) {
	a, err := PendingRef("secret://acme/bmc-1")
	if err != nil {
		t.Fatal(err)
	}
	b, err := PendingRef("secret://acme/bmc-2")
	if err != nil {
		t.Fatal(err)
	}
	if a == b || !Pending(a) || Pending("secret://acme/bmc-1") || Pending("secret://rotation/bmc-1") {
		t.Errorf("PendingRef() = %s and %s", a, b)
	}
	if tenant, err := TenantOf(a); err != nil || tenant != "acme" {
		t.Errorf("TenantOf(%s) = %s, %v", a, tenant, err)
	}
	if _, err := PendingRef("hunter2"); err == nil {
		t.Error("PendingRef(a literal) succeeded")
	}
	_, with := newTest(t)
	s := with(1)
	if _, err := s.Put(t.Context(), "acme", strings.TrimPrefix(a, "secret://acme/"), secret.New([]byte("x"))); errs.CodeOf(err) != errs.InvalidArgs {
		t.Errorf("Put(a pending password) = %v, want invalid-args", err)
	}
}
