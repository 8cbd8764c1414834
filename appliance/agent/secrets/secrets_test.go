package secrets_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/agent/secrets"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

type fake struct {
	values map[string][]byte
	err    error
}

func (f fake) Resolve(_ context.Context, r *connect.Request[agentv1.ResolveRequest]) (*connect.Response[agentv1.ResolveResponse], error) {
	if f.err != nil {
		return nil, f.err
	}
	return connect.NewResponse(&agentv1.ResolveResponse{Values: f.values}), nil
}

func TestResolve(t *testing.T) {
	const a, b = "secret://t/a", "secret://t/b"
	both := fake{values: map[string][]byte{a: []byte("hunter2"), b: []byte("other")}}
	got, err := secrets.Resolve(t.Context(), both, "cmd_1", []string{a, b})
	if err != nil || string(got[a].Reveal()) != "hunter2" || len(got) != 2 {
		t.Errorf("Resolve = %d values, %v; want both", len(got), err)
	}
	if text := fmt.Sprintf("%v %+v", got, got); strings.Contains(text, "hunter2") {
		t.Errorf("resolved secrets print as %s", text)
	}
	for name, test := range map[string]struct {
		client    fake
		retryable bool
	}{
		"missing":   {fake{values: map[string][]byte{a: []byte("x")}}, false},
		"empty":     {fake{values: map[string][]byte{a: []byte("x"), b: {}}}, false},
		"refused":   {fake{err: connect.NewError(connect.CodePermissionDenied, errors.New("not listed"))}, false},
		"line down": {fake{err: connect.NewError(connect.CodeUnavailable, errors.New("no route"))}, true},
	} {
		_, err := secrets.Resolve(t.Context(), test.client, "cmd_1", []string{a, b})
		if e := errs.From(err); e == nil || e.Code != errs.CredentialsUnavailable || e.Retryable != test.retryable {
			t.Errorf("%s: Resolve = %v, want credentials-unavailable, retryable %v", name, err, test.retryable)
		}
	}
}
