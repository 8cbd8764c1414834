package main

import (
	"cmp"
	"context"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/api/computev1/computev1connect"
)

// desk is a MetalService that writes down what it is asked and answers as told.
type desk struct {
	computev1connect.UnimplementedMetalServiceHandler
	mu     sync.Mutex
	asked  []string
	answer string                          // of queries
	driver string                          // of the machine's BMC; none: redfish
	states []*computev1.GetCommandResponse // of the command, one a look; the last stays
}

func (d *desk) note(format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.asked = append(d.asked, fmt.Sprintf(format, args...))
}

func (d *desk) Operate(_ context.Context, req *connect.Request[computev1.OperateRequest]) (*connect.Response[computev1.OperateResponse], error) {
	d.note("%s %s%s", req.Msg.Machine, req.Msg.Operation, req.Msg.ArgsJson)
	if d.answer != "" {
		return connect.NewResponse(&computev1.OperateResponse{CommandId: "cmd_1", ResultJson: d.answer}), nil
	}
	return connect.NewResponse(&computev1.OperateResponse{CommandId: "cmd_1"}), nil
}

func (d *desk) GetCommand(_ context.Context, req *connect.Request[computev1.GetCommandRequest]) (*connect.Response[computev1.GetCommandResponse], error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	state := d.states[0]
	if len(d.states) > 1 {
		d.states = d.states[1:]
	}
	return connect.NewResponse(state), nil
}

func (d *desk) SetPower(_ context.Context, req *connect.Request[computev1.SetPowerRequest]) (*connect.Response[computev1.SetPowerResponse], error) {
	d.note("%s power %s", req.Msg.Machine, req.Msg.Action)
	return connect.NewResponse(&computev1.SetPowerResponse{CommandId: "cmd_1"}), nil
}

func (d *desk) Get(context.Context, *connect.Request[computev1.GetMachineRequest]) (*connect.Response[computev1.GetMachineResponse], error) {
	return connect.NewResponse(&computev1.GetMachineResponse{Machine: &computev1.Machine{Name: "m1", Protected: true,
		Bmc: &computev1.Bmc{Driver: cmp.Or(d.driver, "redfish"), Address: "10.0.0.5", CredentialsRef: "secret://acme/a", TlsSpkiSha256: "ab", DriverOptionsJson: "{}"}}}), nil
}

func (d *desk) List(context.Context, *connect.Request[computev1.ListMachinesRequest]) (*connect.Response[computev1.ListMachinesResponse], error) {
	return connect.NewResponse(&computev1.ListMachinesResponse{Items: []*computev1.Machine{
		{Name: "m1", Id: "node_1", State: "enrolled", Protected: true}, {Name: "m2", Id: "node_2", State: "enrolled", PowerAsked: "off"}, {Name: "m3", Id: "node_3", State: "enrolled"},
	}}), nil
}

func (d *desk) RotateCredentials(_ context.Context, req *connect.Request[computev1.RotateCredentialsRequest]) (*connect.Response[computev1.RotateCredentialsResponse], error) {
	d.note("%s rotate", req.Msg.Machine)
	return connect.NewResponse(&computev1.RotateCredentialsResponse{CommandId: "cmd_1"}), nil
}

func (d *desk) RebindBmc(_ context.Context, req *connect.Request[computev1.RebindBmcRequest]) (*connect.Response[computev1.RebindBmcResponse], error) {
	b := req.Msg.Bmc
	d.note("%s rebind %v %s %s %s %q %q protected %v", req.Msg.Machine, b != nil, b.GetDriver(), b.GetAddress(), b.GetCredentialsRef(), b.GetTlsSpkiSha256(), b.GetDriverOptionsJson(), req.Msg.Protected)
	return connect.NewResponse(&computev1.RebindBmcResponse{CommandId: "cmd_1"}), nil
}

// deskCLI runs the program against a desk.
func deskCLI(t *testing.T, d *desk) func(stdin string, args ...string) (out, notes string, err error) {
	t.Helper()
	mux := http.NewServeMux()
	mux.Handle(computev1connect.NewMetalServiceHandler(d))
	server := httptest.NewUnstartedServer(mux)
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(server.Close)
	dir := t.TempDir()
	for name, data := range map[string]string{
		"ca.pem": string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})), "token": "x",
		"client.toml": fmt.Sprintf("url = %q\nca_file = \"ca.pem\"\ntoken_file = \"token\"\ntenant = \"acme\"\n", server.URL),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return func(stdin string, args ...string) (string, string, error) {
		var out, notes buffer
		args = append(args, "--client", filepath.Join(dir, "client.toml"))
		err := dispatch(t.Context(), "better-compute", commands(), append([]string{"metal"}, args...), stdio{strings.NewReader(stdin), &out, &notes})
		return out.String(), notes.String(), err
	}
}

func TestOperateVerbs(t *testing.T) {
	done := []*computev1.GetCommandResponse{{State: "done", ResultJson: "null"}}
	layout := filepath.Join(t.TempDir(), "layout.json")
	if err := os.WriteFile(layout, []byte("{\"volumes\": []}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	const digest = "E3B0C44298FC1C149AFBF4C8996FB92427AE41E4649B934CA495991B7852B855"
	for _, tt := range []struct {
		args, stdin string
		answer      string
		asked, out  string // out: a part of what is printed
		err         string
	}{
		{args: "inspect-bmc m1", answer: `{"serial":"A\u001b[2J"}`, asked: "m1 inspect.inspect", out: `"serial": "A\u001b[2J"`},
		{args: "boot m1", answer: `{"device":"pxe","persistent":true,"efi":true}`, asked: "m1 management.getBootDevice", out: "pxe efi persistent"},
		{args: "boot m1 --efi", err: "the device is missing"},
		{args: "event-log m1", answer: "[{\"id\":\"7\",\"severity\":\"critical\",\"message\":\"fan\\u001b[31m\"}]", asked: "m1 management.getEventLog", out: "fan·[31m"},
		{args: "media m1", answer: `{"inserted":false}`, asked: "m1 virtual-media.status", out: `"inserted": false`},
		{args: "media m1 insert artifact://rescue", asked: `m1 virtual-media.insert["artifact://rescue"]`},
		{args: "media m1 insert", err: "the image is missing"},
		{args: "media m1 eject", asked: "m1 virtual-media.eject"},
		{args: "media m1 eject now", err: "one argument too many"},
		{args: "media m1 burn", err: "want status, insert, eject"},
		{args: "bios m1", answer: `{"BootMode":"Uefi"}`, asked: "m1 bios.getSettings", out: "Uefi"},
		{args: `bios m1 apply BootMode=Uefi Boots=3 Quiet=true Name="3" Empty=`, asked: `m1 bios.applySettings[{"BootMode":"Uefi","Boots":3,"Empty":"","Name":"3","Quiet":true}]`},
		{args: "bios m1 apply --file -", stdin: `{"A": 1}`, asked: `m1 bios.applySettings[{"A":1}]`},
		{args: "bios m1 apply", err: "no setting is given"},
		{args: "bios m1 apply A", err: "want KEY=VALUE"},
		{args: "bios m1 apply A=1 A=2", err: "given twice"},
		{args: "bios m1 apply A=1 --file -", stdin: "{}", err: "not both"},
		{args: "bios m1 reset", asked: "m1 bios.resetSettings"},
		{args: "raid m1", answer: `{"volumes":[]}`, asked: "m1 raid.getLayout", out: "volumes"},
		{args: "raid m1 apply " + layout, asked: `m1 raid.applyLayout[{"volumes":[]}]`},
		{args: "raid m1 apply -", stdin: "nonsense", err: "holds no JSON"},
		{args: "raid m1 apply", err: "volumes that are not in it are deleted"},
		{args: "firmware m1", answer: `[{"component":"BIOS","version":"2.1"}]`, asked: "m1 firmware.list", out: "BIOS       2.1"},
		{args: "firmware m1 update --component BIOS --url https://x/a --sha256 " + digest, asked: `m1 firmware.update[{"component":"BIOS","sha256":"` + strings.ToLower(digest) + `","url":"https://x/a"}]`},
		{args: "firmware m1 update --component BIOS", err: "--component, --url and --sha256 are needed"},
		{args: "secure-boot m1", answer: `{"enabled":true}`, asked: "m1 management.getSecureBoot", out: "true"},
		{args: "secure-boot m1 off", asked: `m1 management.setSecureBoot[{"enabled":false}]`},
		{args: "bmc-reset m1", asked: "m1 management.resetBmc"},
		{args: "bmc-reset m1 --no-wait", asked: "m1 management.resetBmc", out: "cmd_1\n"},
		{args: "rotate m1", asked: "m1 rotate"},
		{args: "rebind m1 --credentials b --pin none", asked: `m1 rebind true redfish 10.0.0.5 secret://acme/b "" "{}" protected true`},
		{args: "rebind m1 --driver ipmi --address 10.0.0.9 --options none", asked: `m1 rebind true ipmi 10.0.0.9 secret://acme/a "ab" "" protected true`},
		{args: "rebind m1", err: "nothing is given that would change"},
		{args: "protect m1", asked: `m1 rebind false    "" "" protected true`},
		{args: "unprotect m1", asked: `m1 rebind false    "" "" protected false`},
		{args: "command cmd_1", out: "done"},
	} {
		d := &desk{answer: tt.answer, states: done}
		out, _, err := deskCLI(t, d)(tt.stdin, strings.Fields(tt.args)...)
		if (err != nil) != (tt.err != "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("metal %s = %v, want %q", tt.args, err, tt.err)
		}
		if got := strings.Join(d.asked, "; "); got != tt.asked || !strings.Contains(out, tt.out) || strings.ContainsRune(out, 0x1b) {
			t.Errorf("metal %s asked %q and printed %q, want %q and %q", tt.args, got, out, tt.asked, tt.out)
		}
	}
}

// TestFollowCommand: progress is printed as it comes, once, and a command that
// failed is an error that says what can be done.
func TestFollowCommand(t *testing.T) {
	d := &desk{states: []*computev1.GetCommandResponse{
		{State: "queued"}, {State: "received", Progress: "flash\x1b[2J: 10 of 20"}, {State: "received", Progress: "flash\x1b[2J: 10 of 20"},
		{State: "done", ResultJson: `{"rebootNeeded":true}`},
	}}
	run := deskCLI(t, d)
	out, notes, err := run("", "bios", "m1", "reset")
	if err != nil || !strings.Contains(out, `"rebootNeeded": true`) || strings.Count(notes, "flash·[2J: 10 of 20") != 1 || !strings.Contains(notes, "command cmd_1") {
		t.Errorf("printed %q and %q, %v", out, notes, err)
	}
	d.states = []*computev1.GetCommandResponse{{State: "done", ErrorCode: "quorum-required", ErrorMessage: "needs\x1b people"}}
	if _, _, err := run("", "bios", "m1", "reset"); err == nil || !strings.Contains(err.Error(), "quorum-required: needs· people (command cmd_1)") {
		t.Errorf("a command that needs a grant = %v", err)
	}
	d.states = []*computev1.GetCommandResponse{{State: "done", ErrorCode: "unreachable", ErrorMessage: "no answer"}}
	for verb, pending := range map[string]bool{"rotate": true, "bmc-reset": false} {
		if _, _, err := run("", verb, "m1"); err == nil || strings.Contains(err.Error(), "stays pending") != pending {
			t.Errorf("metal %s that ended unclear = %v, want that something is pending %v", verb, err, pending)
		}
	}
	out, _, err = run("", "command", "cmd_1", "--wait", "--json")
	if err == nil || !strings.Contains(out, `"error_code"`) {
		t.Errorf("command --json printed %q, %v", out, err)
	}
}

// TestFirmwareInstalledAlready: an update with nothing to do says so, and any other
// does not.
func TestFirmwareInstalledAlready(t *testing.T) {
	for result, says := range map[string]bool{`{"rebootNeeded":false,"alreadyInstalled":true}`: true, `{"rebootNeeded":false}`: false, `null`: false} {
		run := deskCLI(t, &desk{states: []*computev1.GetCommandResponse{{State: "done", ResultJson: result}}})
		_, notes, err := run("", "firmware", "m1", "update", "--component", "BIOS", "--url", "artifact://bios", "--sha256", strings.Repeat("a", 64), "--version", "2.1")
		if err != nil || strings.Contains(notes, "installed already") != says {
			t.Errorf("an update that ended with %s prints %q, %v", result, notes, err)
		}
	}
}

// TestPowerByPeople: a person is said to be asked once the box has asked, and what
// nobody is asked for is an error.
func TestPowerByPeople(t *testing.T) {
	for _, tt := range []struct {
		name   string
		states []*computev1.GetCommandResponse
		notes  string
		err    string
	}{
		{"asked", []*computev1.GetCommandResponse{{State: "queued"}, {State: "received", Progress: "asked: somebody"}}, "a person is asked: power cycle of m1 (command cmd_1)", ""},
		{"refused", []*computev1.GetCommandResponse{{State: "received"}, {State: "done", ErrorCode: "unsupported-operation", ErrorMessage: "not by people"}}, "", "unsupported-operation: not by people"},
		{"done at once", []*computev1.GetCommandResponse{{State: "done", ResultJson: "null"}}, "power cycle: done", ""},
	} {
		d := &desk{driver: "manual", states: tt.states}
		_, notes, err := deskCLI(t, d)("", "power", "m1", "cycle")
		if (err != nil) != (tt.err != "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%s: metal power = %v, want %q", tt.name, err, tt.err)
		}
		if !strings.Contains(notes, tt.notes) || tt.err != "" && strings.Contains(notes, "a person is asked") {
			t.Errorf("%s: printed %q, want %q", tt.name, notes, tt.notes)
		}
	}
}

// TestListShowsProtectionAndAskedPower: what stands in the way of a machine's work
// is in the list, not only in the machine's own view.
func TestListShowsProtectionAndAskedPower(t *testing.T) {
	run := deskCLI(t, &desk{})
	out, _, err := run("", "list")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out), "\n")
	for i, want := range []string{"PROTECTED POWER-ASKED", "yes -", "- off", "- -"} {
		if i >= len(lines) || !strings.HasSuffix(strings.Join(strings.Fields(lines[i]), " "), want) {
			t.Errorf("metal list = %q, want line %d to end with %q", out, i, want)
		}
	}
	out, _, err = run("", "list", "--json")
	if words := strings.Join(strings.Fields(out), " "); err != nil || !strings.Contains(words, `"protected": true`) || !strings.Contains(words, `"power_asked": "off"`) {
		t.Errorf("metal list --json = %q, %v", out, err)
	}
}
