package site

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent"
	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/pxe/assign"
	"github.com/better-compute/site-appliance/pxe/attempts"
	"github.com/better-compute/site-appliance/pxe/boots"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// TestExplain asks by the command kind what machines would get: one that boots, one
// whose window is over, and one that nobody knows.
func TestExplain(t *testing.T) {
	dir := t.TempDir()
	s := &site{Config: Config{NetbootDir: filepath.Join(dir, "netboot")}}
	for _, name := range []string{files.UEFILoader, files.BIOSLoader} {
		path := filepath.Join(s.NetbootDir, name)
		if os.MkdirAll(filepath.Dir(path), 0o755) != nil || os.WriteFile(path, []byte("x"), 0o644) != nil {
			t.Fatal("the boot files are not made")
		}
	}
	var err error
	if s.assign, err = assign.Open(filepath.Join(dir, "assignments")); err != nil {
		t.Fatal(err)
	}
	if s.boots, err = boots.Open(filepath.Join(dir, "boots"), s.assign.Window); err != nil {
		t.Fatal(err)
	}
	if s.agent, err = agent.New(agent.Config{Role: agentv1.Role_ROLE_SITE, StateDir: filepath.Join(dir, "agent"), Log: slog.New(slog.DiscardHandler)}); err != nil {
		t.Fatal(err)
	}
	const known, ended, stranger = "52:54:00:00:00:01", "52:54:00:00:00:02", "52:54:00:00:00:03"
	window := func(id, mac string, until time.Duration) *pxev1.Machine {
		return &pxev1.Machine{MachineId: id, Macs: []string{mac}, Action: pxev1.Action_ACTION_RAMDISK, Purpose: "deploy", WindowId: "w_" + id, WindowUntilMs: time.Now().Add(until).UnixMilli()}
	}
	if _, err := s.assign.Apply(&pxev1.AssignRequest{Version: 1, Machines: []*pxev1.Machine{window("a", known, time.Hour), window("b", ended, -time.Hour)}}); err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	s.attempts.Add(known, "enp2s0", attempts.Step{At: now.Add(-time.Minute), Stage: "dhcp", Client: "pxe uefi-x64", Detail: "agent: assigned", Begins: true})
	s.attempts.Add(known, "enp2s0", attempts.Step{At: now, Stage: "tftp", Detail: "snponly.efi"})
	s.syslog.Add(known, true, "<30>hello", now)

	kind := explainKind(s.explain)
	explain := func(mac string) (*pxev1.ExplainResult, error) {
		args, err := proto.Marshal(&pxev1.ExplainRequest{Mac: mac})
		if err != nil {
			t.Fatal(err)
		}
		op, err := kind.Decode(args)
		if err != nil {
			return nil, err
		}
		if op.Destructive || !op.RetrySafe {
			t.Errorf("operation = %+v, want one that changes nothing", op)
		}
		data, err := kind.Run(t.Context(), dispatch.Call{Operation: op})
		if err != nil {
			return nil, err
		}
		out := &pxev1.ExplainResult{}
		return out, proto.Unmarshal(data, out)
	}
	for _, tt := range []struct {
		asked, mac, machine string
		client, want        string // the answer to a client: protocol, action, file, and words of the reason
		attempts, syslog    int
		waits               string
	}{
		{"52-54-00-00-00-01", known, "a", "pxe uefi-x64", "tftp agent snponly.efi: assigned to the ramdisk for deploy", 1, 1, "after tftp: the boot program starts"},
		{known, known, "a", "http-boot uefi-x64", "http agent /boot/<mac>/snponly.efi: assigned to the ramdisk", 1, 1, ""},
		{known, known, "a", "ipxe bios", "http agent /boot/<mac>/script.ipxe: assigned to the ramdisk", 1, 1, ""},
		{known, known, "a", "pxe uefi-arm64", "dhcp deny : the box has no grub/grubnetaa64.efi", 1, 1, ""},
		{ended, ended, "b", "pxe uefi-x64", "dhcp local-disk by no-answer : the boot window w_b has ended", 0, 0, "it was not heard in the last hour"},
		{ended, ended, "b", "http-boot uefi-x64", "dhcp local-disk by 404 : the boot window w_b has ended", 0, 0, ""},
		{ended, ended, "b", "ipxe uefi-x64", "http local-disk by exit /boot/<mac>/script.ipxe: the boot window", 0, 0, ""},
		{stranger, stranger, "", "pxe bios", "dhcp deny : the machine is unknown", 0, 0, "first DHCP request"},
		{stranger, stranger, "", "ipxe uefi-x64", "dhcp deny : the machine is unknown", 0, 0, ""},
	} {
		got, err := explain(tt.asked)
		if err != nil {
			t.Fatalf("%s: %v", tt.asked, err)
		}
		if got.Mac != tt.mac || got.MachineId != tt.machine || len(got.Attempts) != tt.attempts || len(got.Syslog) != tt.syslog || !strings.Contains(got.WaitsFor, tt.waits) {
			t.Errorf("%s: %v, want machine %q, %d attempts, %d lines and waiting for %q", tt.asked, got, tt.machine, tt.attempts, tt.syslog, tt.waits)
		}
		found := ""
		for _, a := range got.Answers {
			if a.Client == tt.client {
				found = a.Protocol + " " + a.Action + " " + a.File + ": " + a.Reason
			}
		}
		if !strings.HasPrefix(found, tt.want) {
			t.Errorf("%s, %s: %q, want %q", tt.asked, tt.client, found, tt.want)
		}
	}
	for _, wrong := range []string{"", "nobody", "52:54:00:00:00:00:00:01"} {
		if _, err := explain(wrong); errs.CodeOf(err) != errs.InvalidArgs {
			t.Errorf("explain %q: %v, want %s", wrong, err, errs.InvalidArgs)
		}
	}
}
