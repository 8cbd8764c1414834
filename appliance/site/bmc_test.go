package site

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/site/config"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/bmc/relay"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

func openBook(t *testing.T) *addressbook.Book {
	t.Helper()
	book, err := addressbook.Open("")
	if err != nil {
		t.Fatal(err)
	}
	return book
}

// TestBMCLanes: every kind of the relay is served, in its own lane.
func TestBMCLanes(t *testing.T) {
	kinds := BMCKinds(relay.New(relay.Options{Book: openBook(t)}))
	for name, lane := range map[string]string{
		"bmc.query": "query", "bmc.boot": "power", "bmc.power": "power", "bmc.media": "provision", "bmc.bios": "provision",
		"bmc.raid": "provision", "bmc.rotate": "provision", "bmc.firmware": "transfer", "bmc.bind": "power",
	} {
		if k := kindNamed(t, kinds, name); k.Lane != lane || !slices.Equal(k.Roles, siteOnly) || k.Recover == nil {
			t.Errorf("kind %s is in lane %q for %v, want lane %q for sites, with a recovery", name, k.Lane, k.Roles, lane)
		}
	}
}

// TestBuiltInDrivers: the drivers that need no plugin are all there, and a
// machine without a BMC is asked of a person by way of the relay, who gives up
// the command's place for it.
func TestBuiltInDrivers(t *testing.T) {
	s := &site{Config: Config{Log: slog.New(slog.DiscardHandler)}}
	own, _, logOut, err := s.builtIn(&config.Site{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer logOut()
	var ids []string
	for _, d := range own {
		ids = append(ids, d.ID())
	}
	slices.Sort(ids)
	if got := strings.Join(ids, " "); got != "manual redfish wol" {
		t.Errorf("built-in drivers = %s", got)
	}
}

// TestBindKind: the target and the need of grants are told, and a repeat does no harm.
func TestBindKind(t *testing.T) {
	book := openBook(t)
	k := kindNamed(t, BMCKinds(relay.New(relay.Options{Book: book})), "bmc.bind")
	args, err := proto.Marshal(&bmcv1.BmcBindRequest{Driver: "ipmi", Address: "10.0.0.5", CredentialsRef: "secret://root/a", Protected: true})
	if err != nil {
		t.Fatal(err)
	}
	op, err := k.Decode(args)
	if err != nil || !op.Counts || !op.Always || !op.Destructive || !op.RetrySafe || !slices.Equal(op.Targets, []string{"bmc:10.0.0.5:623"}) {
		t.Fatalf("Decode() = %+v, %v", op, err)
	}
	if _, err := k.Run(t.Context(), dispatch.Call{Operation: op}); err != nil {
		t.Fatal(err)
	}
	if !book.Protected("10.0.0.5:623") {
		t.Error("the BMC is not protected")
	}
	if _, err := k.Decode(append(args, 0xf8, 0x7f, 1)); errs.CodeOf(err) != errs.InvalidPayload {
		t.Errorf("an unknown field: %v, want invalid-payload", err)
	}
}

// account is the password of a BMC whose driver is the built-in one.
type account struct {
	password string
	log      []string
	fail     error
}

// Rotate does as the built-in driver does: the new password first.
func (a *account) Rotate(ctx *driver.Context, _ metal.Rotation) error {
	old, err := ctx.Secrets.Resolve(ctx, "password")
	if err != nil {
		return err
	}
	fresh, err := ctx.Secrets.Resolve(ctx, metal.NewPassword)
	if err != nil {
		return err
	}
	if a.fail != nil {
		return a.fail
	}
	switch a.password {
	case string(fresh.Reveal()):
		a.log = append(a.log, "has it")
	case string(old.Reveal()):
		a.log = append(a.log, "changed")
		a.password = string(fresh.Reveal())
	default:
		return errs.New(errs.BmcError, "neither password")
	}
	return nil
}

func rotating(t *testing.T, id string, a *account) *relay.Relay {
	t.Helper()
	d, err := driver.Define(driver.Spec[string]{
		ID: id, Version: "1.0.0", RunsOn: "site", Parse: func(json.RawMessage) (string, error) { return "", nil },
	}, driver.Implement(metal.CredentialsKind(), func(string, *driver.Context) (metal.Credentials, error) { return a, nil }))
	if err != nil {
		t.Fatal(err)
	}
	return relay.New(relay.Options{Book: openBook(t), BuiltIn: []*driver.Definition{d}})
}

// TestRotationRecovers: after an interruption the built-in driver's rotation is
// brought to its end, whichever password holds; while the line is not there yet
// it is waited for. Another driver's is interrupted.
func TestRotationRecovers(t *testing.T) {
	for name, tt := range map[string]struct {
		driver, password string
		lost             int // how often the line is not there
		refuse, fail     error
		want, log        string
	}{
		"before the change":       {driver: "redfish", password: "old", want: "done", log: "changed"},
		"after the change":        {driver: "redfish", password: "new", want: "done", log: "has it"},
		"the line comes later":    {driver: "redfish", password: "new", lost: 3, want: "done", log: "has it"},
		"neither":                 {driver: "redfish", password: "other", want: "interrupted"},
		"the BMC does not answer": {driver: "redfish", password: "old", fail: errs.Retry(errs.Unreachable, "x"), want: "interrupted"},
		"the gateway forgot":      {driver: "redfish", password: "old", refuse: errs.New(errs.CredentialsUnavailable, "gone"), want: "interrupted"},
		"another driver's":        {driver: "acme", password: "old", want: "interrupted"},
		"the line never comes":    {driver: "redfish", password: "old", lost: 1 << 20, want: "interrupted"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := &account{password: tt.password, fail: tt.fail}
				k := kindNamed(t, BMCKinds(rotating(t, tt.driver, a)), "bmc.rotate")
				args, err := proto.Marshal(&bmcv1.BmcOperationRequest{Driver: tt.driver, Address: "10.0.0.5", CredentialsRef: "secret://root/a",
					Operation: "credentials.rotate", ArgsJson: `[{"newPassword":"secret://root/next"}]`})
				if err != nil {
					t.Fatal(err)
				}
				op, err := k.Decode(args)
				if err != nil {
					t.Fatal(err)
				}
				lost := tt.lost
				ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
				defer cancel()
				verdict := k.Recover(ctx, dispatch.Call{
					Payload: &agentv1.CommandPayload{CommandId: "cmd_1"}, Operation: op, Deadline: time.Now().Add(time.Hour),
					Secrets: func(_ context.Context, refs ...string) (map[string]secret.Value, error) {
						if lost--; lost >= 0 {
							return nil, errs.Retry(errs.CredentialsUnavailable, "no line yet")
						}
						if tt.refuse != nil {
							return nil, tt.refuse
						}
						if !slices.Equal(refs, []string{"secret://root/a", "secret://root/next"}) {
							return nil, fmt.Errorf("asked for %q", refs)
						}
						return map[string]secret.Value{refs[0]: secret.New([]byte(`{"username":"u","password":"old"}`)), refs[1]: secret.New([]byte("new"))}, nil
					},
				})
				if verdict.String() != tt.want || strings.Join(a.log, " ") != tt.log {
					t.Errorf("Recover() = %s after %q, want %s after %q", verdict, a.log, tt.want, tt.log)
				}
			})
		})
	}
}
