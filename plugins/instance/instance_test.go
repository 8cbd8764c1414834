package instance_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
	"github.com/better-compute/site-appliance/plugins/instance"
)

// shelf keeps instances in memory.
type shelf struct{ all []instance.Status }

func (s *shelf) List(*driver.Context) ([]instance.Status, error) { return s.all, nil }

func (s *shelf) Apply(_ *driver.Context, spec instance.Spec) error {
	if spec.Name == "broken" {
		return errs.New("image-missing", "there is no image")
	}
	status := instance.Status{ID: spec.ID, State: instance.Running, Message: string(spec.Config), Generation: spec.Generation}
	if i := slices.IndexFunc(s.all, func(o instance.Status) bool { return o.ID == spec.ID }); i >= 0 {
		s.all[i] = status
		return nil
	}
	s.all = append(s.all, status)
	return nil
}

func (s *shelf) Remove(_ *driver.Context, id string) error {
	s.all = slices.DeleteFunc(s.all, func(o instance.Status) bool { return o.ID == id })
	return nil
}

func define(t testing.TB) *driver.Definition {
	t.Helper()
	s := &shelf{}
	d, err := driver.Define(driver.Spec[struct{}]{
		ID: "acme-run", Version: "1.0.0", RunsOn: "node", RetrySafe: instance.RetrySafe(),
		Parse: func(json.RawMessage) (struct{}, error) { return struct{}{}, nil },
	}, driver.Implement(instance.RuntimeKind(), func(struct{}, *driver.Context) (instance.Runtime, error) { return s, nil }))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestOperations(t *testing.T) {
	d := define(t)
	ctx, _ := drivertest.Context(t, t.Context(), nil)
	for _, tt := range []struct {
		operation, args, want string
		code                  errs.Code
	}{
		{"list", ``, `[]`, ""},
		{"list", `[1]`, "", errs.InvalidArgs},
		{"apply", `{"id":"inst_1","name":"web","generation":3,"config":{"image":"a"}}`, `null`, ""},
		{"apply", `{"id":"inst_1","name":"web","generation":4,"config":{"image":"b"}}`, `null`, ""},
		{"apply", `{"id":"inst_2","name":"broken","generation":1,"config":{}}`, "", "image-missing"},
		{"list", ``, `[{"id":"inst_1","state":"running","message":"{\"image\":\"b\"}","generation":4}]`, ""},
		{"apply", `{"id":"../etc","name":"web"}`, "", errs.InvalidArgs},
		{"apply", `{"id":"","name":"web"}`, "", errs.InvalidArgs},
		{"apply", `{"ID":"inst_1"}`, "", errs.InvalidArgs},
		{"apply", `{"id":"inst_1","image":"a"}`, "", errs.InvalidArgs},
		{"apply", `{"id":"inst_1","name":"` + strings.Repeat("a", 254) + `"}`, "", errs.InvalidArgs},
		{"apply", `{"id":"inst_1","generation":-1}`, "", errs.InvalidArgs},
		{"apply", ``, "", errs.InvalidArgs},
		{"remove", `"a/b"`, "", errs.InvalidArgs},
		{"remove", `7`, "", errs.InvalidArgs},
		{"remove", ``, "", errs.InvalidArgs},
		{"remove", `"inst_1"`, `null`, ""},
		{"remove", `"inst_1"`, `null`, ""},
		{"list", ``, `[]`, ""},
		{"snapshot", `"inst_1"`, "", errs.UnsupportedOperation},
	} {
		got, err := d.Invoke(ctx, "runtime", tt.operation, nil, json.RawMessage(tt.args))
		if string(got) != tt.want || errs.CodeOf(err) != tt.code {
			t.Errorf("runtime.%s(%s) = %s, %v, want %s %s", tt.operation, tt.args, got, err, tt.want, tt.code)
		}
	}
	for _, op := range []string{"list", "apply", "remove"} {
		if !d.IsRetrySafe("runtime", op) {
			t.Errorf("RetrySafe() leaves out runtime.%s", op)
		}
	}
}

// elsewhere is a process that serves d, or answers everything with raw.
type elsewhere struct {
	d   *driver.Definition
	raw string
}

func (e elsewhere) Invoke(ctx *driver.Context, kind, operation string, config, args json.RawMessage) (json.RawMessage, error) {
	if e.raw != "" {
		return json.RawMessage(e.raw), nil
	}
	return e.d.Invoke(ctx, kind, operation, config, args)
}

func (e elsewhere) Stream(*driver.Context, string, string, json.RawMessage, json.RawMessage, io.ReadWriter) error {
	return errors.New("no streams")
}
func (e elsewhere) Validate(*driver.Context, json.RawMessage) error { return nil }
func (e elsewhere) Health(context.Context) error                    { return nil }

func TestProxy(t *testing.T) {
	d := define(t)
	ctx, _ := drivertest.Context(t, t.Context(), nil)
	use := func(raw string) instance.Runtime {
		remote, err := driver.Remote(d.Manifest(), elsewhere{d, raw})
		if err != nil {
			t.Fatal(err)
		}
		r, err := driver.Use(remote, instance.RuntimeKind(), json.RawMessage(`{}`), ctx)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	r := use("")
	if err := r.Apply(ctx, instance.Spec{ID: "i1", Name: "web", Generation: 2, Config: json.RawMessage(`{}`)}); err != nil {
		t.Errorf("Apply() = %v", err)
	}
	if err := r.Apply(ctx, instance.Spec{ID: "i2", Name: "broken"}); errs.CodeOf(err) != "image-missing" {
		t.Errorf("Apply(broken) = %v, want image-missing", err)
	}
	got, err := r.List(ctx)
	if want := []instance.Status{{ID: "i1", State: "running", Message: "{}", Generation: 2}}; err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("List() = %v, %v, want %v", got, err, want)
	}
	if err := r.Remove(ctx, "i1"); err != nil {
		t.Errorf("Remove() = %v", err)
	}
	if got, err := r.List(ctx); err != nil || len(got) != 0 {
		t.Errorf("List() after Remove = %v, %v, want none", got, err)
	}
	for _, raw := range []string{`{}`, `[{"id":"i1","state":"odd"}]`, `[{"id":"../x","state":"running"}]`, `"none"`} {
		if got, err := use(raw).List(ctx); errs.CodeOf(err) != errs.DriverError {
			t.Errorf("List() answered with %s = %v, %v, want driver-error", raw, got, err)
		}
	}
}

func FuzzParseSpec(f *testing.F) {
	f.Add([]byte(`{"id":"inst_1","name":"web","generation":3,"config":{"image":"a"}}`))
	f.Add([]byte(`{"id":"a/../b","config":null}`))
	f.Add([]byte(`{"id":"a","generation":1e3}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		s, err := instance.ParseSpec(in)
		if err != nil {
			if errs.CodeOf(err) != errs.InvalidArgs {
				t.Errorf("ParseSpec(%q) = %v, want invalid-args", in, err)
			}
			return
		}
		if s.ID == "" || strings.ContainsAny(s.ID, "/\x00\n ") || s.ID[0] == '.' {
			t.Errorf("ParseSpec(%q).ID = %q", in, s.ID)
		}
	})
}
