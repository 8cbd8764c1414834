package metal

import (
	"cmp"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/secretstore"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// Kinds are the command kinds that metal brings.
func Kinds() []module.Kind {
	site, ramdisk := []agentv1.Role{agentv1.Role_ROLE_SITE}, []agentv1.Role{agentv1.Role_ROLE_RAMDISK}
	return []module.Kind{
		{Name: "bmc.query", Lane: "query", Timeout: time.Minute, RetrySafe: true, Roles: site},
		{Name: "bmc.boot", Lane: "power", Timeout: 2 * time.Minute, RetrySafe: true, Roles: site},
		{Name: "bmc.power", Lane: "power", Timeout: 2 * time.Minute, Destructive: true, Roles: site},
		{Name: "bmc.confirm", Lane: "query", Timeout: 30 * time.Second, RetrySafe: true, Roles: site},
		{Name: "bmc.console", Lane: "proxy", Timeout: 8 * time.Hour, Roles: site},
		{Name: "site.httpProxy", Lane: "proxy", Timeout: 30 * time.Second, Roles: site},
		{Name: "bmc.media", Lane: "provision", Timeout: 5 * time.Minute, RetrySafe: true, Roles: site},
		{Name: "bmc.bios", Lane: "provision", Timeout: 30 * time.Minute, Destructive: true, Roles: site},
		{Name: "bmc.raid", Lane: "provision", Timeout: 30 * time.Minute, Destructive: true, Roles: site},
		{Name: "bmc.rotate", Lane: "provision", Timeout: 2 * time.Minute, Destructive: true, Roles: site},
		{Name: "bmc.firmware", Lane: "transfer", Timeout: time.Hour, Destructive: true, Roles: site},
		{Name: "bmc.bind", Lane: "power", Timeout: 30 * time.Second, Destructive: true, Roles: site},
		{Name: "pxe.assign", Lane: "provision", Timeout: 30 * time.Second, RetrySafe: true, Destructive: true, Roles: site},
		{Name: "image.stream", Lane: "transfer", Timeout: time.Hour, Destructive: true, Roles: ramdisk},
	}
}

// relay is one operation that the machine's BMC driver is asked for by a typed
// command.
type relay struct {
	step, operation, kind string
	// parse judges the operation's one argument; nil: it takes none.
	parse   func(json.RawMessage) error
	timeout time.Duration // zero: the kind's own
}

// relayed are the registered steps, and all that Operate can ask for. Steps of
// concerns that a profile may bind to any driver have names of their own: there
// bios.applySettings stays the profile's driver's.
var relayed = []relay{
	{"power.getPower", GetPower, Query, nil, 0},
	{"power.setPower", SetPower, "bmc.power", good(metal.ParseAction), 0},
	{"management.getBootDevice", "management.getBootDevice", Query, nil, 0},
	{"management.setBootDevice", SetBootDevice, "bmc.boot", good(metal.ParseBootDevice), 0},
	{"management.resetBmc", "management.resetBmc", "bmc.power", nil, 0},
	{"management.getEventLog", "management.getEventLog", Query, nil, 0},
	{"management.getSecureBoot", "management.getSecureBoot", Query, nil, 0},
	{"management.setSecureBoot", "management.setSecureBoot", "bmc.boot", good(metal.ParseSecureBoot), 0},
	{"inspect.inspect", "inspect.inspect", Query, nil, 3 * time.Minute},
	{"media.insert", "virtual-media.insert", "bmc.media", parseISO, 0},
	{"media.eject", "virtual-media.eject", "bmc.media", nil, 0},
	{"media.status", "virtual-media.status", Query, nil, 0},
	{"bmc-bios.getSettings", "bios.getSettings", Query, nil, 0},
	{"bmc-bios.applySettings", "bios.applySettings", "bmc.bios", good(metal.ParseSettings), 0},
	{"bmc-bios.resetSettings", "bios.resetSettings", "bmc.bios", nil, 0},
	{"bmc-raid.getLayout", "raid.getLayout", Query, nil, 0},
	{"bmc-raid.applyLayout", "raid.applyLayout", "bmc.raid", good(metal.ParseLayout), 0},
	{"bmc-firmware.list", "firmware.list", Query, nil, 0},
	{"bmc-firmware.update", "firmware.update", "bmc.firmware", parseUpdate, 0},
	{"bmc-credentials.rotate", Rotation, "bmc.rotate", nil, 0},
}

func good[T any](parse func(json.RawMessage) (T, error)) func(json.RawMessage) error {
	return func(raw json.RawMessage) error {
		_, err := parse(raw)
		return err
	}
}

// artifactForm is a reference to what the site has for its BMCs, by name or digest.
var artifactForm = regexp.MustCompile(`^artifact://[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`)

// parseISO takes a URL, or an artifact that the machine's site serves to the BMC.
func parseISO(raw json.RawMessage) error {
	var ref string
	if json.Unmarshal(raw, &ref) == nil && artifactForm.MatchString(ref) {
		return nil
	}
	return good(metal.ParseISO)(raw)
}

// parseUpdate takes an artifact in the place of the URL, as parseISO does.
func parseUpdate(raw json.RawMessage) error {
	var fields map[string]json.RawMessage
	var ref string
	if json.Unmarshal(raw, &fields) == nil && json.Unmarshal(fields["url"], &ref) == nil && artifactForm.MatchString(ref) {
		fields["url"] = json.RawMessage(`"https://artifact.invalid/"`)
		out, err := json.Marshal(fields)
		if err != nil {
			return err
		}
		raw = out
	}
	return good(metal.ParseFirmwareUpdate)(raw)
}

// arguments reads and judges them as the driver will. Errors have code invalid-args.
func (r relay) arguments(raw json.RawMessage) (driver.Args, error) {
	most := 0
	if r.parse != nil {
		most = 1
	}
	if len(raw) > maxArguments {
		return nil, errs.New(errs.InvalidArgs, "%d bytes of arguments: limit %d", len(raw), maxArguments)
	}
	args, err := driver.ParseArgs(raw)
	switch {
	case err != nil:
		return nil, err
	case len(args) != most:
		return nil, errs.New(errs.InvalidArgs, "%d arguments: want %d", len(args), most)
	case most == 1:
		err = r.parse(args[0])
	}
	return args, err
}

// maxArguments is what a box takes of one operation's.
const maxArguments = 1 << 20

// command is the operation as it is sent.
func (r relay) command(b store.BMC, args driver.Args) (Command, error) {
	text := ""
	refs := secretRefs(b)
	if r.operation == Rotation {
		pending, err := secretstore.PendingRef(b.CredentialsRef)
		if err != nil {
			return Command{}, errs.New(errs.InvalidConfig, "%s: the machine's BMC has no credential", Rotation)
		}
		arg, err := json.Marshal(map[string]string{string(metal.NewPassword): pending})
		if err != nil {
			return Command{}, err
		}
		args, refs = driver.Args{arg}, append(refs, pending)
	}
	if len(args) > 0 {
		raw, err := json.Marshal(args)
		if err != nil {
			return Command{}, fmt.Errorf("encode arguments: %w", err)
		}
		text = string(raw)
	}
	timeout := r.timeout
	if r.operation == SetPower && b.Driver == Manual {
		timeout = manualTimeout
	}
	kinds := Kinds()
	kind := kinds[slices.IndexFunc(kinds, func(k module.Kind) bool { return k.Name == r.kind })]
	return Command{Kind: r.kind, Lane: kind.Lane, Args: operation(b, r.operation, text), SecretRefs: refs, Timeout: cmp.Or(timeout, kind.Timeout), RetrySafe: kind.RetrySafe}, nil
}

// Operate is the command for one operation of a machine's BMC driver; query says
// that it only asks. An operation or arguments that cannot be sent are INVALID_INPUT.
func Operate(b store.BMC, operation, argsJSON string) (c Command, query bool, err error) {
	i := slices.IndexFunc(relayed, func(r relay) bool { return r.operation == operation })
	switch {
	case i < 0:
		return Command{}, false, apierr.Invalid("operation %.80q is none of %s", operation, strings.Join(Operations(), ", "))
	case operation == Rotation:
		return Command{}, false, apierr.Invalid("%s has a call of its own: the gateway makes the new password", Rotation)
	}
	args, err := relayed[i].arguments(json.RawMessage(argsJSON))
	if err != nil {
		return Command{}, false, apierr.Invalid("%s: %s", operation, errs.From(err).Message)
	}
	c, err = relayed[i].command(b, args)
	return c, relayed[i].kind == Query, err
}

// Operations are what Operate takes, sorted.
func Operations() []string {
	var names []string
	for _, r := range relayed {
		if r.operation != Rotation {
			names = append(names, r.operation)
		}
	}
	slices.Sort(names)
	return names
}

// RotateCommand gives the BMC's account the password that waits under the
// credential's pending reference.
func RotateCommand(b store.BMC) (Command, error) {
	return relayed[slices.IndexFunc(relayed, func(r relay) bool { return r.operation == Rotation })].command(b, nil)
}

// BindCommand ties a BMC's address at its box to these from now on.
func BindCommand(b store.BMC, protected bool) Command {
	return Command{Kind: "bmc.bind", Lane: "power", Timeout: 30 * time.Second, Args: &bmcv1.BmcBindRequest{
		Driver: b.Driver, Address: b.Address, CredentialsRef: b.CredentialsRef, TlsSpkiSha256: b.TLSSPKISHA256, Protected: protected,
	}}
}

// Steps are the registered steps that metal brings: they reach the machine's
// own BMC through its site's agent, by typed commands, whatever a profile binds.
func Steps() []module.Step {
	var steps []module.Step
	for _, r := range relayed {
		check := func(with json.RawMessage) (driver.Args, error) {
			args, err := r.arguments(with)
			if err != nil {
				return nil, errs.New(errs.InvalidConfig, "%s: with: %s", r.step, errs.From(err).Message)
			}
			return args, nil
		}
		steps = append(steps, module.Step{
			ID: r.step, Kind: r.kind, On: module.OnSite, Timeout: r.timeout,
			Check: func(with json.RawMessage) error {
				_, err := check(with)
				return err
			},
			Command: func(m store.Machine, with json.RawMessage) (module.Command, error) {
				args, err := check(with)
				if err != nil {
					return module.Command{}, err
				}
				return r.command(m.BMC, args)
			},
			Result: func(result []byte) (json.RawMessage, error) {
				var answer bmcv1.BmcOperationResult
				if err := proto.Unmarshal(result, &answer); err != nil {
					return nil, errs.New(errs.InvalidPayload, "read the answer to %s: %v", r.kind, err)
				}
				if answer.ResultJson == "" {
					return nil, nil
				}
				return json.RawMessage(answer.ResultJson), nil
			},
		})
	}
	return steps
}
