package site

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"path/filepath"
	"reflect"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/site/config"
	"github.com/better-compute/site-appliance/appliance/site/firewall"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/bmc/relay"
	"github.com/better-compute/site-appliance/pxe/assign"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

func kindNamed(t *testing.T, kinds []dispatch.Kind, name string) dispatch.Kind {
	t.Helper()
	for _, k := range kinds {
		if k.Name == name {
			return k
		}
	}
	t.Fatalf("no kind %s", name)
	return dispatch.Kind{}
}

func TestBMCKinds(t *testing.T) {
	book, err := addressbook.Open("")
	if err != nil {
		t.Fatal(err)
	}
	kinds := BMCKinds(relay.New(relay.Options{Book: book}))
	op := func(operation, args string) []byte {
		out, _ := proto.Marshal(&bmcv1.BmcOperationRequest{
			Driver: "ipmi", Address: "10.0.0.5", CredentialsRef: "secret://default/bmc", Operation: operation, ArgsJson: args,
		})
		return out
	}
	for _, tt := range []struct {
		kind, operation, args string
		code                  errs.Code
		destructive, safe     bool
	}{
		{"bmc.query", "power.getPower", "", "", false, true},
		{"bmc.query", "power.setPower", `["off"]`, errs.OperationNotAllowed, false, false},
		{"bmc.power", "power.setPower", `["on"]`, "", false, false},
		{"bmc.power", "power.setPower", `["off"]`, "", true, false},
		{"bmc.power", "power.getPower", "", errs.OperationNotAllowed, false, false},
		{"bmc.boot", "management.setBootDevice", `[{"device":"pxe"}]`, "", false, true},
		{"bmc.media", "virtual-media.eject", "", "", false, true},
		{"bmc.bios", "bios.resetSettings", "", "", true, false},
		{"bmc.raid", "raid.applyLayout", `[{"volumes":[]}]`, "", true, false},
		{"bmc.rotate", "credentials.rotate", `[{"newPassword":"secret://default/next"}]`, "", true, false},
		{"bmc.rotate", "credentials.rotate", `[{"newPassword":"literal"}]`, errs.InvalidPayload, false, false},
		{"bmc.firmware", "firmware.update", `[{}]`, "", true, false},
	} {
		got, err := kindNamed(t, kinds, tt.kind).Decode(op(tt.operation, tt.args))
		if errs.CodeOf(err) != tt.code {
			t.Errorf("%s %s %s: code %q (%v), want %q", tt.kind, tt.operation, tt.args, errs.CodeOf(err), err, tt.code)
			continue
		}
		if err == nil && (got.Destructive != tt.destructive || got.Counts != tt.destructive || got.RetrySafe != tt.safe || got.Key == "") {
			t.Errorf("%s %s %s = %+v, want destructive %v, retry-safe %v and a queue key", tt.kind, tt.operation, tt.args, got, tt.destructive, tt.safe)
		}
	}
	unknown := append(op("power.getPower", ""), 0xf8, 0x7f, 1) // a field that nobody defined
	if _, err := kinds[0].Decode(unknown); errs.CodeOf(err) != errs.InvalidPayload {
		t.Errorf("an unknown field: %v, want invalid-payload", err)
	}
}

func TestRecover(t *testing.T) {
	for _, safe := range []bool{true, false} {
		want := dispatch.Interrupted()
		if safe {
			want = dispatch.Rerun()
		}
		got := repeatIfSafe(context.Background(), dispatch.Call{Operation: dispatch.Operation{RetrySafe: safe}})
		if !reflect.DeepEqual(got, want) {
			t.Errorf("repeatIfSafe(retry-safe %v) = %+v, want %+v", safe, got, want)
		}
	}

	store, err := assign.Open(filepath.Join(t.TempDir(), "assignments"))
	if err != nil {
		t.Fatal(err)
	}
	kind := assignKind(store, func(string, string, string, any) {})
	call := func(version uint64) dispatch.Call {
		return dispatch.Call{Payload: &agentv1.CommandPayload{}, Operation: dispatch.Operation{Value: &pxev1.AssignRequest{Version: version}}}
	}
	if _, err := kind.Run(context.Background(), call(3)); err != nil {
		t.Fatal(err)
	}
	// Interrupted after it took effect, and before.
	result, _ := proto.Marshal(&pxev1.AssignResult{Version: 3})
	if got := kind.Recover(context.Background(), call(3)); !reflect.DeepEqual(got, dispatch.Done(result)) {
		t.Errorf("Recover of the version in force = %+v, want done", got)
	}
	if got := kind.Recover(context.Background(), call(4)); !reflect.DeepEqual(got, dispatch.Rerun()) {
		t.Errorf("Recover of a newer version = %+v, want rerun", got)
	}
}

func TestRules(t *testing.T) {
	cfg := &config.Site{LAN: []config.LAN{
		{Address: netip.MustParsePrefix("10.0.0.1/24"), DHCP: "authoritative"},
		{Address: netip.MustParsePrefix("10.1.0.1/24")},
		{Address: netip.MustParsePrefix("10.2.0.1/24")},
	}}
	got := rules(cfg, ports{uplink: "up0", lans: map[int]lan{0: {cfg.LAN[0], "lan0"}, 1: {cfg.LAN[1], "bmc0"}}})
	home := firewall.Home{Network: netip.MustParsePrefix("10.2.0.0/24")}
	if len(got.Homes) != 3 || got.Homes[2] != home || got.Homes[1].Interface != "bmc0" {
		t.Errorf("homes = %+v, want each LAN's, and the missing one's without an interface", got.Homes)
	}
	if got.Uplink != "up0" || len(got.LANs) != 2 {
		t.Fatalf("rules = %+v", got)
	}
	if l := got.LANs[0]; !l.DHCP || !l.TFTP || !l.HTTP || !l.Passthrough || !l.Media {
		t.Errorf("a LAN that boots machines = %+v, want all services open", l)
	}
	if l := got.LANs[1]; l.DHCP || l.TFTP || l.HTTP || !l.Media {
		t.Errorf("a LAN without DHCP = %+v, want no boot service open", l)
	}
}

// A service that ends, or panics, starts again later and later; the others run on.
func TestSupervise(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(context.Background())
		var starts []time.Duration
		var steady atomic.Int32
		begin := time.Now()
		done := make(chan error)
		go func() {
			done <- supervise(ctx, slog.New(slog.DiscardHandler), map[string]func(context.Context) error{
				"flaky": func(context.Context) error {
					starts = append(starts, time.Since(begin))
					if len(starts)%2 == 0 {
						panic("boom")
					}
					return errors.New("ended")
				},
				"steady": func(ctx context.Context) error {
					steady.Add(1)
					<-ctx.Done()
					return ctx.Err()
				},
			})
		}()
		time.Sleep(8 * time.Second)
		cancel()
		if err := <-done; err != nil {
			t.Errorf("supervise = %v", err)
		}
		want := []time.Duration{0, time.Second, 3 * time.Second, 7 * time.Second}
		if len(starts) != len(want) {
			t.Fatalf("started at %v, want %v", starts, want)
		}
		for i := range want {
			if starts[i] != want[i] {
				t.Errorf("start %d at %v, want %v", i, starts[i], want[i])
			}
		}
		if got := steady.Load(); got != 1 {
			t.Errorf("the steady service started %d times, want once", got)
		}
	})
}
