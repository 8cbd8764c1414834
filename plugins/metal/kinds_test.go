package metal_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// machine implements every operation of every kind and notes what it was told.
type machine struct{ told []string }

func (m *machine) note(operation string, args ...any) {
	raw, err := json.Marshal(args)
	m.told = append(m.told, fmt.Sprint(operation, " ", string(raw), " ", err))
}

func (m *machine) GetPower(*driver.Context) (metal.PowerState, error) { return metal.PowerOn, nil }
func (m *machine) SetPower(_ *driver.Context, a metal.PowerAction) error {
	m.note("setPower", a)
	return nil
}

func (m *machine) SetBootDevice(_ *driver.Context, b metal.BootDevice) error {
	m.note("setBootDevice", b)
	return nil
}

func (m *machine) GetBootDevice(*driver.Context) (metal.BootDevice, error) {
	return metal.BootDevice{Device: metal.DevicePXE, EFI: true}, nil
}

func (m *machine) ResetBMC(*driver.Context) error { m.note("resetBmc"); return nil }

func (m *machine) GetEventLog(*driver.Context) ([]metal.LogEntry, error) {
	return []metal.LogEntry{{ID: "1", Severity: "critical", Message: "fan 3 stopped"}}, nil
}

func (m *machine) GetSecureBoot(*driver.Context) (metal.SecureBootState, error) {
	return metal.SecureBootState{Enabled: true, Mode: "user"}, nil
}

func (m *machine) SetSecureBoot(_ *driver.Context, s metal.SecureBoot) error {
	m.note("setSecureBoot", s)
	return nil
}
func (m *machine) Insert(_ *driver.Context, iso string) error { m.note("insert", iso); return nil }
func (m *machine) Eject(*driver.Context) error                { m.note("eject"); return nil }

func (m *machine) Status(*driver.Context) (metal.Media, error) {
	return metal.Media{Inserted: true, Image: "https://a/b.iso"}, nil
}

func (m *machine) Inspect(*driver.Context) (metal.Inspection, error) {
	return metal.Inspection{Source: "redfish", Serial: "S1"}, nil
}

func (m *machine) GetSettings(*driver.Context) (metal.Settings, error) {
	return metal.Settings{"BootMode": "Uefi", "Big": json.Number("9007199254740993"), "Quiet": true}, nil
}

func (m *machine) ApplySettings(_ *driver.Context, s metal.Settings) (metal.Applied, error) {
	m.note("applySettings", s)
	return metal.Applied{RebootNeeded: true}, nil
}

func (m *machine) ResetSettings(*driver.Context) (metal.Applied, error) {
	m.note("resetSettings")
	return metal.Applied{RebootNeeded: true}, nil
}

func (m *machine) GetLayout(*driver.Context) (metal.Layout, error) {
	return metal.Layout{Volumes: []metal.Volume{{Name: "os", Level: "1", Drives: []string{"a", "b"}}}}, nil
}

func (m *machine) ApplyLayout(_ *driver.Context, l metal.Layout) (metal.Applied, error) {
	m.note("applyLayout", l)
	return metal.Applied{}, nil
}

func (m *machine) ListFirmware(*driver.Context) ([]metal.Firmware, error) {
	return []metal.Firmware{{Component: "bmc", Version: "2.1"}}, nil
}

func (m *machine) UpdateFirmware(ctx *driver.Context, u metal.FirmwareUpdate) (metal.Applied, error) {
	m.note("update", u)
	ctx.Emit(driver.Progress{Phase: "update", Done: 1, Total: 2})
	return metal.Applied{RebootNeeded: true}, nil
}

func (m *machine) Rotate(ctx *driver.Context, r metal.Rotation) error {
	_, err := ctx.Secrets.Resolve(ctx, metal.NewPassword)
	m.note("rotate", r)
	return err
}

func (m *machine) Open(_ *driver.Context, stream io.ReadWriter) error {
	_, err := io.WriteString(stream, "login: ")
	return err
}

func (m *machine) Prepare(_ *driver.Context, b metal.BootPlan) error {
	m.note("prepare", b)
	return nil
}
func (m *machine) Clear(_ *driver.Context, b metal.BootTarget) error { m.note("clear", b); return nil }

func (m *machine) Deploy(_ *driver.Context, s metal.DeploySpec) (metal.Deployed, error) {
	m.note("deploy", s)
	return metal.Deployed{Disk: "/dev/sda", SHA256: s.Image.SHA256, BytesWritten: s.Image.SizeBytes}, nil
}

func (m *machine) ApplyConfig(_ *driver.Context, wanted json.RawMessage) (metal.Applied, error) {
	m.note("apply", wanted)
	return metal.Applied{}, nil
}

func (m *machine) GetConfig(*driver.Context) (json.RawMessage, error) {
	return json.RawMessage(`{"mig":true}`), nil
}

// bare implements the required operations only: what it embeds hides nothing else.
type (
	bareManagement struct{ metal.Management }
	bareMedia      struct{ metal.VirtualMedia }
	bareBIOS       struct{ metal.BIOS }
	bareConfig     struct{ metal.Configurator }
)

func define(t testing.TB, m *machine, bare bool) *driver.Definition {
	t.Helper()
	d, err := driver.Define(driver.Spec[struct{}]{
		ID: "acme", Version: "1.0.0", RunsOn: "site", RetrySafe: metal.RetrySafe(),
		Parse: func(json.RawMessage) (struct{}, error) { return struct{}{}, nil },
	}, parts(m, bare)...)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func part[T any](k driver.Kind[T], full T, few T, bare bool) driver.Part[struct{}] {
	if bare {
		full = few
	}
	return driver.Implement(k, func(struct{}, *driver.Context) (T, error) { return full, nil })
}

func parts(m *machine, bare bool) []driver.Part[struct{}] {
	return []driver.Part[struct{}]{
		part[metal.Power](metal.PowerKind(), m, m, bare),
		part[metal.Management](metal.ManagementKind(), m, bareManagement{m}, bare),
		part[metal.VirtualMedia](metal.VirtualMediaKind(), m, bareMedia{m}, bare),
		part[metal.Inspector](metal.InspectKind(), m, m, bare),
		part[metal.BIOS](metal.BIOSKind(), m, bareBIOS{m}, bare),
		part[metal.RAID](metal.RAIDKind(), m, m, bare),
		part[metal.FirmwareManager](metal.FirmwareKind(), m, m, bare),
		part[metal.Credentials](metal.CredentialsKind(), m, m, bare),
		part[metal.Console](metal.ConsoleKind(), m, m, bare),
		part[metal.Boot](metal.BootKind(), m, m, bare),
		part[metal.Deployer](metal.DeployKind(), m, m, bare),
		part[metal.Configurator](metal.ConfigKind(), m, bareConfig{m}, bare),
	}
}

const (
	digest = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	good   = ""
	bad    = errs.InvalidArgs
)

// calls are the operations' arguments, each allowed thing beside what is not.
var calls = []struct {
	operation, args string
	code            errs.Code
	want            string // the result, for allowed ones
}{
	{"power.getPower", `[]`, good, `"on"`},
	{"power.getPower", `[1]`, bad, ""},
	{"power.setPower", `["cycle"]`, good, `null`},
	{"power.setPower", `["nmi"]`, good, `null`},
	{"power.setPower", `["explode"]`, bad, ""},
	{"power.setPower", `[]`, bad, ""},
	{"power.setPower", `["on","off"]`, bad, ""},
	{"management.setBootDevice", `{"device":"pxe","efi":true}`, good, `null`},
	{"management.setBootDevice", `{"device":"floppy"}`, bad, ""},
	{"management.getBootDevice", ``, good, `{"device":"pxe","persistent":false,"efi":true}`},
	{"management.resetBmc", ``, good, `null`},
	{"management.resetBmc", `["cold"]`, bad, ""},
	{"management.getEventLog", ``, good, `[{"id":"1","severity":"critical","message":"fan 3 stopped"}]`},
	{"management.getSecureBoot", ``, good, `{"enabled":true,"mode":"user"}`},
	{"management.setSecureBoot", `{"enabled":false}`, good, `null`},
	{"management.setSecureBoot", `{"enabled":null}`, bad, ""},
	{"management.setSecureBoot", `{}`, bad, ""},
	{"management.setSecureBoot", `true`, bad, ""},
	{"management.setSecureBoot", `{"enabled":true,"mode":"setup"}`, bad, ""},
	{"virtual-media.insert", `"https://10.0.0.1/a.iso"`, good, `null`},
	{"virtual-media.insert", `"nfs://10.0.0.1/a.iso"`, good, `null`},
	{"virtual-media.insert", `"file:///etc/shadow"`, bad, ""},
	{"virtual-media.insert", `"https://user:hunter2@10.0.0.1/a.iso"`, bad, ""},
	{"virtual-media.insert", `"a.iso"`, bad, ""},
	{"virtual-media.insert", `7`, bad, ""},
	{"virtual-media.insert", ``, bad, ""},
	{"virtual-media.eject", ``, good, `null`},
	{"virtual-media.eject", `["now"]`, bad, ""},
	{"virtual-media.status", ``, good, `{"inserted":true,"image":"https://a/b.iso"}`},
	{"inspect.inspect", ``, good, `{"source":"redfish","serial":"S1"}`},
	{"bios.getSettings", ``, good, `{"Big":9007199254740993,"BootMode":"Uefi","Quiet":true}`},
	{"bios.applySettings", `{"BootMode":"Uefi","Count":3,"Quiet":false}`, good, `{"rebootNeeded":true}`},
	{"bios.applySettings", `{}`, bad, ""},
	{"bios.applySettings", `{"a":null}`, bad, ""},
	{"bios.applySettings", `{"a":{"b":1}}`, bad, ""},
	{"bios.applySettings", `{"":1}`, bad, ""},
	{"bios.applySettings", `"BootMode"`, bad, ""},
	{"bios.resetSettings", ``, good, `{"rebootNeeded":true}`},
	{"raid.getLayout", ``, good, `{"volumes":[{"name":"os","level":"1","drives":["a","b"]}]}`},
	{"raid.applyLayout", `{"volumes":[{"name":"os","level":"1","drives":["a","b"]},{"name":"data","level":"5","drives":["c","d","e"]}]}`, good, `{"rebootNeeded":false}`},
	{"raid.applyLayout", `{"volumes":[{"name":"os","level":"1","drives":["a","b"],"sizeBytes":5},{"name":"data","level":"0","drives":["a","b"],"sizeBytes":5}]}`, good, `{"rebootNeeded":false}`},
	{"raid.applyLayout", `{"volumes":[]}`, good, `{"rebootNeeded":false}`},
	{"raid.applyLayout", `{}`, bad, ""},
	{"raid.applyLayout", `{"volumes":null}`, bad, ""},
	{"raid.applyLayout", `{"volumes":[{"name":"os","level":"1","drives":["a"]}]}`, bad, ""},
	{"raid.applyLayout", `{"volumes":[{"name":"os","level":"10","drives":["a","b","c","d","e"]}]}`, bad, ""},
	{"raid.applyLayout", `{"volumes":[{"name":"os","level":"2","drives":["a","b"]}]}`, bad, ""},
	{"raid.applyLayout", `{"volumes":[{"name":"os","level":"1","drives":["a","a"]}]}`, bad, ""},
	{"raid.applyLayout", `{"volumes":[{"name":"os","level":"1","drives":["a","b"]},{"name":"data","level":"0","drives":["b"]}]}`, bad, ""},
	{"raid.applyLayout", `{"volumes":[{"name":"os","level":"0","drives":["a"]},{"name":"os","level":"0","drives":["b"]}]}`, bad, ""},
	{"firmware.list", ``, good, `[{"component":"bmc","version":"2.1"}]`},
	{"firmware.update", `{"component":"bmc","url":"https://a/fw.bin","sha256":"` + digest + `","version":"2.2"}`, good, `{"rebootNeeded":true}`},
	{"firmware.update", `{"component":"bmc","url":"ftp://a/fw.bin","sha256":"` + digest + `"}`, bad, ""},
	{"firmware.update", `{"component":"bmc","url":"https://a/fw.bin","sha256":"` + strings.ToUpper(digest) + `"}`, bad, ""},
	{"firmware.update", `{"component":"bmc","url":"https://a/fw.bin"}`, bad, ""},
	{"firmware.update", `{"url":"https://a/fw.bin","sha256":"` + digest + `"}`, bad, ""},
	{"credentials.rotate", ``, good, `null`},
	{"credentials.rotate", `{"username":"root"}`, good, `null`},
	{"credentials.rotate", `{"username":"root","newPassword":"hunter2"}`, bad, ""},
	{"credentials.rotate", `"hunter2"`, bad, ""},
	{"boot.prepare", `{"macs":["52:54:00:12:34:56"],"purpose":"deploy"}`, good, `null`},
	{"boot.prepare", `{"macs":["52:54:00:12:34:56"],"purpose":"fun"}`, bad, ""},
	{"boot.prepare", `{"macs":["52-54-00-12-34-56"],"purpose":"deploy"}`, bad, ""},
	{"boot.prepare", `{"macs":["52:54:00:12:34:5A"],"purpose":"deploy"}`, bad, ""},
	{"boot.prepare", `{"macs":["52:54:00:12:34:56","52:54:00:12:34:56"],"purpose":"deploy"}`, bad, ""},
	{"boot.prepare", `{"macs":[],"purpose":"deploy"}`, bad, ""},
	{"boot.clear", `{"macs":["52:54:00:12:34:56"]}`, good, `null`},
	{"boot.clear", ``, bad, ""},
	{"deploy.deploy", `{"image":{"format":"raw","sha256":"` + digest + `","sizeBytes":9},"disk":{"serial":"S1"}}`, good, `{"disk":"/dev/sda","sha256":"` + digest + `","bytesWritten":9}`},
	{"deploy.deploy", `{"image":{"format":"qcow2","sha256":"` + digest + `","sizeBytes":9},"disk":{"serial":"S1"}}`, bad, ""},
	{"deploy.deploy", `{"image":{"format":"raw.zst","sha256":"` + digest + `","sizeBytes":9},"disk":{"serial":"S1"}}`, bad, ""},
	{"deploy.deploy", `{"image":{"format":"raw.zst","sha256":"` + digest + `","sizeBytes":9,"unpackedSha256":"` + digest + `","unpackedSizeBytes":20},"disk":{"serial":"S1"}}`, good, `{"disk":"/dev/sda","sha256":"` + digest + `","bytesWritten":9}`},
	{"deploy.deploy", `{"image":{"format":"raw","sha256":"` + digest + `","sizeBytes":0},"disk":{"serial":"S1"}}`, bad, ""},
	{"deploy.deploy", `{"image":{"format":"raw","sha256":"` + digest + `","sizeBytes":9},"disk":{}}`, bad, ""},
	{"deploy.deploy", `{"image":{"format":"raw","sha256":"` + digest + `","sizeBytes":9,"url":"http://u@a/"},"disk":{"serial":"S1"}}`, bad, ""},
	{"config.apply", `{"mig":true}`, good, `{"rebootNeeded":false}`},
	{"config.apply", `true`, bad, ""},
	{"config.apply", `null`, bad, ""},
	{"config.get", ``, good, `{"mig":true}`},
}

// optional are the operations that a driver may leave out.
var optional = []string{
	"management.getBootDevice", "management.resetBmc", "management.getEventLog", "management.getSecureBoot", "management.setSecureBoot",
	"virtual-media.status", "bios.resetSettings", "config.get",
}

func TestOperations(t *testing.T) {
	for _, bare := range []bool{false, true} {
		d := define(t, &machine{}, bare)
		if got := d.Manifest().Kinds; !slices.Equal(got, metal.Kinds()) {
			t.Errorf("Kinds() = %v, want those that there are, %v", metal.Kinds(), got)
		}
		for _, tt := range calls {
			ctx, _ := drivertest.Context(t, t.Context(), map[string]string{"newPassword": "swordfish"})
			code, want := tt.code, tt.want
			if bare && slices.Contains(optional, tt.operation) {
				code, want = errs.UnsupportedOperation, ""
			}
			kind, operation, _ := strings.Cut(tt.operation, ".")
			got, err := d.Invoke(ctx, kind, operation, nil, json.RawMessage(tt.args))
			if errs.CodeOf(err) != code || string(got) != want {
				t.Errorf("%s(%s), bare %v = %s, %v, want %s %s", tt.operation, tt.args, bare, got, err, want, code)
			}
			if err != nil && strings.Contains(err.Error(), "hunter2") {
				t.Errorf("%s(%s) tells a secret: %v", tt.operation, tt.args, err)
			}
		}
	}
}

func TestRetrySafe(t *testing.T) {
	d := define(t, &machine{}, false)
	for _, tt := range calls {
		kind, operation, _ := strings.Cut(tt.operation, ".")
		reads := strings.HasPrefix(operation, "get") || slices.Contains([]string{"list", "inspect", "status"}, operation)
		if reads && !d.IsRetrySafe(kind, operation) {
			t.Errorf("RetrySafe() leaves out %s, which reads", tt.operation)
		}
	}
	for _, op := range []string{
		"power.setPower", "firmware.update", "credentials.rotate", "bios.applySettings", "bios.resetSettings", "raid.applyLayout", "management.resetBmc", "deploy.deploy",
	} {
		if slices.Contains(metal.RetrySafe(), op) {
			t.Errorf("RetrySafe() holds %s", op)
		}
	}
	if got, want := metal.RetrySafe("power", "virtual-media"), []string{"power.getPower", "virtual-media.eject", "virtual-media.insert", "virtual-media.status"}; !slices.Equal(got, want) {
		t.Errorf("RetrySafe(power, virtual-media) = %v, want %v", got, want)
	}
	metal.RetrySafe()[0] = "power.setPower"
	if slices.Contains(metal.RetrySafe(), "power.setPower") {
		t.Error("changing what RetrySafe answered changed it")
	}
}

// loop stands for another process that serves d.
type loop struct{ d *driver.Definition }

func (l loop) Invoke(ctx *driver.Context, kind, operation string, config, args json.RawMessage) (json.RawMessage, error) {
	return l.d.Invoke(ctx, kind, operation, config, args)
}

func (l loop) Stream(ctx *driver.Context, kind, operation string, config, args json.RawMessage, stream io.ReadWriter) error {
	return l.d.Stream(ctx, kind, operation, config, args, stream)
}

func (l loop) Validate(ctx *driver.Context, config json.RawMessage) error {
	return l.d.Validate(ctx, config)
}
func (l loop) Health(ctx context.Context) error { return l.d.Health(ctx) }

func use[T any](t *testing.T, d *driver.Definition, k driver.Kind[T], ctx *driver.Context) T {
	t.Helper()
	v, err := driver.Use(d, k, json.RawMessage(`{}`), ctx)
	if err != nil {
		t.Fatalf("Use(%s) = %v", k.Name, err)
	}
	return v
}

// TestProxies calls every operation by its Go method, of an implementation here
// and of one behind a process border: both must say and do the same.
func TestProxies(t *testing.T) {
	run := func(d *driver.Definition, m *machine) string {
		ctx, recorder := drivertest.Context(t, t.Context(), map[string]string{"newPassword": "swordfish"})
		var said []string
		say := func(v any, err error) {
			raw, encode := json.Marshal(v)
			said = append(said, fmt.Sprint(string(raw), err, encode))
		}
		do := func(err error) { say(nil, err) }
		power := use(t, d, metal.PowerKind(), ctx)
		say(power.GetPower(ctx))
		do(power.SetPower(ctx, metal.ActionSoft))
		management := use(t, d, metal.ManagementKind(), ctx)
		do(management.SetBootDevice(ctx, metal.BootDevice{Device: metal.DeviceDisk, Persistent: true}))
		say(management.(metal.BootDeviceGetter).GetBootDevice(ctx))
		do(management.(metal.BMCResetter).ResetBMC(ctx))
		say(management.(metal.EventLogGetter).GetEventLog(ctx))
		say(management.(metal.SecureBootGetter).GetSecureBoot(ctx))
		do(management.(metal.SecureBootSetter).SetSecureBoot(ctx, metal.SecureBoot{Enabled: true}))
		media := use(t, d, metal.VirtualMediaKind(), ctx)
		do(media.Insert(ctx, "https://a/b.iso"))
		do(media.Eject(ctx))
		say(media.(metal.MediaStatuser).Status(ctx))
		say(use(t, d, metal.InspectKind(), ctx).Inspect(ctx))
		bios := use(t, d, metal.BIOSKind(), ctx)
		say(bios.GetSettings(ctx))
		say(bios.ApplySettings(ctx, metal.Settings{"a": "b"}))
		say(bios.(metal.SettingsResetter).ResetSettings(ctx))
		raid := use(t, d, metal.RAIDKind(), ctx)
		say(raid.GetLayout(ctx))
		say(raid.ApplyLayout(ctx, metal.Layout{Volumes: []metal.Volume{}}))
		firmware := use(t, d, metal.FirmwareKind(), ctx)
		say(firmware.ListFirmware(ctx))
		say(firmware.UpdateFirmware(ctx, metal.FirmwareUpdate{Component: "bmc", URL: "https://a/b", SHA256: digest}))
		do(use(t, d, metal.CredentialsKind(), ctx).Rotate(ctx, metal.Rotation{Username: "root"}))
		var screen bytes.Buffer
		do(use(t, d, metal.ConsoleKind(), ctx).Open(ctx, &screen))
		say(screen.String(), nil)
		boot := use(t, d, metal.BootKind(), ctx)
		do(boot.Prepare(ctx, metal.BootPlan{MACs: []string{"52:54:00:12:34:56"}, Purpose: "inspect"}))
		do(boot.Clear(ctx, metal.BootTarget{MACs: []string{"52:54:00:12:34:56"}}))
		say(use(t, d, metal.DeployKind(), ctx).Deploy(ctx, metal.DeploySpec{
			Image: metal.DeployImage{Format: "raw", SHA256: digest, SizeBytes: 5}, Disk: metal.DeployDisk{Serial: "S1"},
		}))
		config := use(t, d, metal.ConfigKind(), ctx)
		say(config.ApplyConfig(ctx, json.RawMessage(`{"mig":true}`)))
		say(config.(metal.ConfigGetter).GetConfig(ctx))
		return strings.Join(append(append(said, m.told...), fmt.Sprint(recorder.Progress())), "\n")
	}
	here, there := &machine{}, &machine{}
	served := define(t, there, false)
	remote, err := driver.Remote(served.Manifest(), loop{served})
	if err != nil {
		t.Fatal(err)
	}
	want := run(define(t, here, false), here)
	if got := run(remote, there); got != want {
		t.Errorf("over a proxy:\n%s\n\nin process:\n%s", got, want)
	}
	if strings.Contains(want, "invalid-") || strings.Contains(want, "unsupported-") {
		t.Errorf("an operation failed:\n%s", want)
	}

	// What a driver left out, its proxy says.
	few := define(t, &machine{}, true)
	remote, err = driver.Remote(few.Manifest(), loop{few})
	if err != nil {
		t.Fatal(err)
	}
	ctx, _ := drivertest.Context(t, t.Context(), nil)
	if _, err := use(t, remote, metal.ManagementKind(), ctx).(metal.EventLogGetter).GetEventLog(ctx); errs.CodeOf(err) != errs.UnsupportedOperation {
		t.Errorf("GetEventLog of a driver without it = %v, want unsupported-operation", err)
	}
}

// answers stands for a process that answers every call alike.
type answers struct {
	loop
	raw string
}

func (a answers) Invoke(*driver.Context, string, string, json.RawMessage, json.RawMessage) (json.RawMessage, error) {
	return json.RawMessage(a.raw), nil
}

// TestStrangeAnswers: what another process says is not taken on trust.
func TestStrangeAnswers(t *testing.T) {
	ctx, _ := drivertest.Context(t, t.Context(), nil)
	for _, raw := range []string{`"purple"`, `7`, `null`, `{"device":"floppy"}`, `[]`} {
		d, err := driver.Remote(define(t, &machine{}, false).Manifest(), answers{raw: raw})
		if err != nil {
			t.Fatal(err)
		}
		if s, err := use(t, d, metal.PowerKind(), ctx).GetPower(ctx); errs.CodeOf(err) != errs.DriverError {
			t.Errorf("GetPower() answered with %s = %q, %v, want driver-error", raw, s, err)
		}
		if b, err := use(t, d, metal.ManagementKind(), ctx).(metal.BootDeviceGetter).GetBootDevice(ctx); errs.CodeOf(err) != errs.DriverError {
			t.Errorf("GetBootDevice() answered with %s = %v, %v, want driver-error", raw, b, err)
		}
	}
}

// FuzzArguments hands arbitrary arguments to every operation: they run, or are
// refused as arguments.
func FuzzArguments(f *testing.F) {
	for _, tt := range calls {
		f.Add(tt.operation, []byte(tt.args))
	}
	d := define(f, &machine{}, false)
	f.Fuzz(func(t *testing.T, name string, args []byte) {
		ctx, _ := drivertest.Context(nil, t.Context(), map[string]string{"newPassword": "swordfish"})
		kind, operation, _ := strings.Cut(name, ".")
		result, err := d.Invoke(ctx, kind, operation, nil, args)
		switch code := errs.CodeOf(err); code {
		case "":
			if !json.Valid(result) {
				t.Errorf("%s(%q) = %q, want JSON", name, args, result)
			}
		case errs.InvalidArgs, errs.UnsupportedOperation, errs.UnsupportedDriver:
			if len(err.Error()) > 1000 {
				t.Errorf("%s(%q): an error of %d bytes", name, args, len(err.Error()))
			}
		default:
			t.Errorf("%s(%q) = %v", name, args, err)
		}
	})
}
