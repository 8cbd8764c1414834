package drivertest_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
	"github.com/better-compute/site-appliance/plugins/external"
	"github.com/better-compute/site-appliance/plugins/host"
	"github.com/better-compute/site-appliance/plugins/host/hosttest"
)

func TestMain(m *testing.M) {
	hosttest.Shim()
	os.Exit(m.Run())
}

// compile builds a fixture of testdata as a module of its own, outside this
// one, as a third party would; edit changes its source first. It answers the
// binary's path, or what the compiler said.
func compile(t *testing.T, fixture string, edit func(string) string) (binary, said string) {
	t.Helper()
	repository, err := filepath.Abs("../../..")
	if err != nil {
		t.Fatal(err)
	}
	read := func(path string) string {
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(raw)
	}
	dir := t.TempDir()
	// The same requirements as this module, so that nothing is fetched.
	_, requirements, _ := strings.Cut(read(filepath.Join(repository, "go.mod")), "\n")
	requirements, _, _ = strings.Cut(requirements, "\ntool (")
	module := "module example.com/fixture\n" + requirements + fmt.Sprintf(
		"\nrequire github.com/better-compute/site-appliance v0.0.0\nreplace github.com/better-compute/site-appliance => %s\n", repository)
	for name, content := range map[string]string{
		"go.mod": module, "go.sum": read(filepath.Join(repository, "go.sum")), "main.go": edit(read(filepath.Join("testdata", fixture, "main.go"))),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	binary = filepath.Join(dir, "fixture")
	cmd := exec.Command("go", "build", "-mod=mod", "-trimpath", "-o", binary, ".")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOPROXY=off", "GOFLAGS=", "GOWORK=off")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", string(out)
	}
	return binary, ""
}

func asIs(source string) string { return source }

// TestKindsNeedTheirPackage: this package declares no kind, so a program that
// imports only it cannot say power or runtime, and the same program can once it
// imports the packages that declare them.
func TestKindsNeedTheirPackage(t *testing.T) {
	binary, said := compile(t, "kinds", asIs)
	if said != "" {
		t.Fatalf("the program that imports the kinds does not compile:\n%s", said)
	}
	out, err := exec.Command(binary).CombinedOutput()
	if want := "[power] unsupported-driver: driver acme does not implement \"runtime\"\n"; err != nil || string(out) != want {
		t.Errorf("the program printed %q, %v, want %q", out, err, want)
	}

	without := func(source string) string {
		for _, p := range []string{"instance", "metal"} {
			source = strings.Replace(source, "\t\"github.com/better-compute/site-appliance/plugins/"+p+"\"\n", "", 1)
		}
		return source
	}
	for name, tt := range map[string]struct {
		edit func(string) string
		want []string
	}{
		"only the driver package": {without, []string{"undefined: metal", "undefined: instance"}},
		"kinds of the driver package": {func(source string) string {
			return strings.NewReplacer("metal.", "driver.", "instance.", "driver.").Replace(without(source))
		}, []string{"undefined: driver.PowerKind", "undefined: driver.RuntimeKind"}},
		"half a kind": {func(source string) string {
			return strings.Replace(source, ") SetPower(", ") SetPowers(", 1)
		}, []string{"*machine does not implement metal.Power (missing method SetPower)"}},
		"another signature": {func(source string) string {
			return strings.Replace(source, "a metal.PowerAction) error", "a string) error", 1)
		}, []string{"wrong type for method SetPower"}},
	} {
		_, said := compile(t, "kinds", tt.edit)
		for _, want := range tt.want {
			if !strings.Contains(said, want) {
				t.Errorf("%s: the compiler said %q, want %q", name, said, want)
			}
		}
	}
}

// TestOwnKind serves a kind that no package of this module knows, from a
// program outside it, and calls it through the plugin host.
func TestOwnKind(t *testing.T) {
	binary, said := compile(t, "cooling", asIs)
	if said != "" {
		t.Fatalf("the program with a kind of its own does not compile:\n%s", said)
	}
	content, err := os.ReadFile(binary)
	if err != nil {
		t.Fatal(err)
	}
	dir := hosttest.NewDir(t)
	dir.Add("acme-fans", content)
	config := dir.Config()
	// A uid of its own, and what rests on it, needs root.
	config.Sandbox = os.Geteuid() == 0
	h := hosttest.Start(t, config)
	drivers := h.Drivers()
	if len(drivers) != 1 || drivers[0].Key() != "driver:acme-fans@1.0.0" || !slices.Equal(drivers[0].Kinds, []string{"acme-cooling"}) {
		t.Fatalf("Drivers() = %+v, want acme-fans with acme-cooling", drivers)
	}
	const ref = "secret://root/fans"
	invoke := func(operation, config, args string, progress func(string, string, uint64, uint64)) (string, error) {
		raw, err := h.Invoke(t.Context(), host.Call{
			Driver: "acme-fans", Kind: "acme-cooling", Operation: operation, Config: json.RawMessage(config), Args: json.RawMessage(args),
			Secrets: map[string]secret.Value{ref: secret.New([]byte("swordfish"))}, Deadline: time.Now().Add(time.Minute), Progress: progress,
		})
		return string(raw), err
	}
	const key = `{"key":"` + ref + `"}`
	var steps []string
	for _, tt := range []struct {
		operation, config, args, want string
		code                          errs.Code
	}{
		{"getFanCurve", key, "", "[20,40]", ""},
		{"setFanCurve", key, "[[10,30,80]]", "null", ""},
		{"getFanCurve", key, "[]", "[10,30,80]", ""},
		{"setFanCurve", key, "[[10,81]]", "", "too-fast"},
		{"setFanCurve", `{"key":"` + ref + `","most":90}`, "[[10,81]]", "null", ""},
		{"setFanCurve", key, `["fast"]`, "", "bad-curve"},
		{"setFanCurve", `{"key":"secret://root/other"}`, "[[10]]", "", errs.CredentialsUnavailable},
		{"setFanCurve", `{"key":"` + ref + `","most":101}`, "[[10]]", "", errs.InvalidConfig},
		{"getFanCurve", key, "[1]", "", errs.InvalidArgs},
		{"spin", key, "", "", errs.UnsupportedOperation},
	} {
		got, err := invoke(tt.operation, tt.config, tt.args, func(phase, _ string, _, _ uint64) { steps = append(steps, phase) })
		if got != tt.want || errs.CodeOf(err) != tt.code {
			t.Errorf("%s(%s) with %s = %s, %v, want %s %s", tt.operation, tt.args, tt.config, got, err, tt.want, tt.code)
		}
		if err != nil && strings.Contains(err.Error(), "swordfish") {
			t.Errorf("%s failed and told the secret: %v", tt.operation, err)
		}
	}
	if len(steps) != 2 || steps[0] != "fans" {
		t.Errorf("progress = %v, want one step of each curve that was set", steps)
	}
}

// cooling is the kind as a host of the third party's would declare it, with a
// proxy for the driver in its own process.
type cooling interface {
	GetFanCurve(*driver.Context) ([]int, error)
	SetFanCurve(*driver.Context, []int) error
}

type coolingProxy struct{ i *driver.Implementation }

func (p coolingProxy) GetFanCurve(ctx *driver.Context) ([]int, error) {
	return driver.Answer[[]int](p.i.On(ctx).Call("getFanCurve"))
}

func (p coolingProxy) SetFanCurve(ctx *driver.Context, curve []int) error {
	_, err := p.i.On(ctx).Call("setFanCurve", curve).Await()
	return err
}

// TestOwnKindByProxy uses the same plugin through the control plane's host: as
// a Go value of the kind, and by the names of its operations.
func TestOwnKindByProxy(t *testing.T) {
	binary, said := compile(t, "cooling", asIs)
	if said != "" {
		t.Fatalf("the program with a kind of its own does not compile:\n%s", said)
	}
	sum, err := external.SHA256File(binary)
	if err != nil {
		t.Fatal(err)
	}
	plugin := external.New(external.Options{Command: []string{binary}, SHA256: sum, Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
	drivers, err := plugin.Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := plugin.Close(); err != nil {
			t.Errorf("Close() = %v", err)
		}
	})
	ctx, recorder := drivertest.Context(t, t.Context(), map[string]string{"secret://root/fans": "swordfish"})
	config := json.RawMessage(`{"key":"secret://root/fans"}`)
	kind := driver.Kind[cooling]{Name: "acme-cooling", Proxy: func(i *driver.Implementation) cooling { return coolingProxy{i} }}
	fans, err := driver.Use(drivers[0], kind, config, ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := fans.SetFanCurve(ctx, []int{5, 50}); err != nil {
		t.Errorf("SetFanCurve() = %v", err)
	}
	if n := len(recorder.Progress()); n != 1 {
		t.Errorf("SetFanCurve() emitted %d steps, want 1", n)
	}
	if got, err := fans.GetFanCurve(ctx); err != nil || !slices.Equal(got, []int{5, 50}) {
		t.Errorf("GetFanCurve() = %v, %v, want [5 50]", got, err)
	}
	if err := fans.SetFanCurve(ctx, []int{99}); errs.CodeOf(err) != "too-fast" {
		t.Errorf("SetFanCurve(99) = %v, want too-fast", err)
	}

	i, err := drivers[0].Implementation("acme-cooling", config, ctx)
	if err != nil {
		t.Fatal(err)
	}
	call, steps := i.Call("setFanCurve", []int{6}), 0
	for p, err := range call.Progress() {
		if err != nil || p.Phase != "fans" {
			t.Errorf("Progress() yielded %v, %v", p, err)
		}
		steps++
	}
	if raw, err := call.Result(); steps != 1 || err != nil || string(raw) != "null" || len(recorder.Progress()) != 1 {
		t.Errorf("iterated: %d steps, %s, %v, and %d emitted in all, want 1, null and 1", steps, raw, err, len(recorder.Progress()))
	}
	if _, err := driver.Use(drivers[0], kind, json.RawMessage(`{"key":"secret://root/fans","most":0}`), ctx); errs.CodeOf(err) != errs.InvalidConfig {
		t.Errorf("Use(most 0) = %v, want invalid-config", err)
	}
}
