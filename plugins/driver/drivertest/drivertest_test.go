package drivertest_test

import (
	"context"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
)

func TestContext(t *testing.T) {
	limited, cancel := context.WithDeadline(t.Context(), time.Now().Add(time.Hour))
	defer cancel()
	ctx, recorder := drivertest.Context(t, limited, map[string]string{"username": "root"})
	if v, err := ctx.Secrets.Resolve(ctx, "username"); err != nil || string(v.Reveal()) != "root" {
		t.Errorf("Resolve(username) = %q, %v, want root", v.Reveal(), err)
	}
	if _, err := ctx.Secrets.Resolve(ctx, "password"); errs.CodeOf(err) != errs.CredentialsUnavailable {
		t.Errorf("Resolve(password) = %v, want credentials-unavailable", err)
	}
	if _, ok := ctx.Deadline(); !ok {
		t.Error("the context lost its deadline")
	}
	ctx.Log.Info("this goes to the test's output")
	ctx.Emit(driver.Progress{Phase: "a"})
	ctx.Emit(driver.Progress{Phase: "b"})
	got := recorder.Progress()
	if len(got) != 2 || got[0].Phase != "a" || got[1].Phase != "b" {
		t.Errorf("Progress() = %v, want a and b", got)
	}
	got[0].Phase = "changed"
	if recorder.Progress()[0].Phase != "a" {
		t.Error("changing what Progress answered changed the record")
	}
	cancel()
	if ctx.Err() == nil {
		t.Error("the call went on after its context ended")
	}
}
