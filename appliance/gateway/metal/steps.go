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
	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/secretstore"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// kinds are the command kinds that metal brings. Lanes, and what may run twice,
// are the same to the boxes.
var kinds = []struct {
	name        string
	timeout     time.Duration
	destructive bool
	role        agentv1.Role
}{
	{cmdkind.Query, time.Minute, false, agentv1.Role_ROLE_SITE},
	{cmdkind.Boot, 2 * time.Minute, false, agentv1.Role_ROLE_SITE},
	{cmdkind.Power, 2 * time.Minute, true, agentv1.Role_ROLE_SITE},
	{cmdkind.Confirm, 30 * time.Second, false, agentv1.Role_ROLE_SITE},
	{cmdkind.Explain, 30 * time.Second, false, agentv1.Role_ROLE_SITE},
	{cmdkind.Console, 8 * time.Hour, false, agentv1.Role_ROLE_SITE},
	{cmdkind.Proxy, 30 * time.Second, false, agentv1.Role_ROLE_SITE},
	{cmdkind.Media, 5 * time.Minute, false, agentv1.Role_ROLE_SITE},
	{cmdkind.BIOS, 30 * time.Minute, true, agentv1.Role_ROLE_SITE},
	{cmdkind.RAID, 30 * time.Minute, true, agentv1.Role_ROLE_SITE},
	{cmdkind.Rotate, 2 * time.Minute, true, agentv1.Role_ROLE_SITE},
	{cmdkind.Firmware, time.Hour, true, agentv1.Role_ROLE_SITE},
	{cmdkind.Bind, 30 * time.Second, true, agentv1.Role_ROLE_SITE},
	{cmdkind.Assign, 30 * time.Second, true, agentv1.Role_ROLE_SITE},
	{cmdkind.Fetch, 4 * time.Hour, false, agentv1.Role_ROLE_SITE},
	{cmdkind.Stream, time.Hour, true, agentv1.Role_ROLE_RAMDISK},
	{cmdkind.Wipe, 20 * time.Hour, true, agentv1.Role_ROLE_RAMDISK},
}

// Kinds are the command kinds that metal brings.
func Kinds() []module.Kind {
	var out []module.Kind
	for _, k := range kinds {
		shared, _ := cmdkind.Named(k.name)
		out = append(out, module.Kind{
			Name: k.name, Lane: shared.Lane, Timeout: k.timeout, RetrySafe: shared.RetrySafe, Destructive: k.destructive, Roles: []agentv1.Role{k.role},
		})
	}
	return out
}

// CommandOf is a command of one of metal's kinds that says nothing yet.
func CommandOf(kind string) Command {
	for _, k := range Kinds() {
		if k.Name == kind {
			return Command{Kind: k.Name, Lane: k.Lane, Timeout: k.Timeout, RetrySafe: k.RetrySafe}
		}
	}
	return Command{Kind: kind}
}

// toBMC asks a machine's BMC driver for one operation.
func toBMC(b store.BMC, name, args string) Command {
	c := CommandOf(cmdkind.Of(name))
	c.Args, c.SecretRefs = operation(b, name, args), secretRefs(b)
	if name == SetPower && b.Driver == Manual {
		c.Timeout = manualTimeout
	}
	return c
}

// relay is one operation that the machine's BMC driver is asked for by a typed
// command.
type relay struct {
	step, operation string
	// parse judges the operation's one argument; nil: it takes none.
	parse   func(json.RawMessage) error
	timeout time.Duration // zero: the kind's own
}

// relayed are the registered steps, and all that Operate can ask for. Steps of
// concerns that a profile may bind to any driver have names of their own: there
// bios.applySettings stays the profile's driver's.
var relayed = []relay{
	{"power.getPower", GetPower, nil, 0},
	{"power.setPower", SetPower, good(metal.ParseAction), 0},
	{"management.getBootDevice", "management.getBootDevice", nil, 0},
	{"management.setBootDevice", SetBootDevice, good(metal.ParseBootDevice), 0},
	{"management.resetBmc", "management.resetBmc", nil, 0},
	{"management.getEventLog", "management.getEventLog", nil, 0},
	{"management.getSecureBoot", "management.getSecureBoot", nil, 0},
	{"management.setSecureBoot", "management.setSecureBoot", good(metal.ParseSecureBoot), 0},
	{"inspect.inspect", "inspect.inspect", nil, 3 * time.Minute},
	{"media.insert", "virtual-media.insert", parseISO, 0},
	{"media.eject", "virtual-media.eject", nil, 0},
	{"media.status", "virtual-media.status", nil, 0},
	{"bmc-bios.getSettings", "bios.getSettings", nil, 0},
	{"bmc-bios.applySettings", "bios.applySettings", good(metal.ParseSettings), 0},
	{"bmc-bios.resetSettings", "bios.resetSettings", nil, 0},
	{"bmc-raid.getLayout", "raid.getLayout", nil, 0},
	{"bmc-raid.applyLayout", "raid.applyLayout", good(metal.ParseLayout), 0},
	{"bmc-firmware.list", "firmware.list", nil, 0},
	{"bmc-firmware.update", "firmware.update", parseUpdate, 0},
	{"bmc-credentials.rotate", Rotation, nil, 0},
}

func good[T any](parse func(json.RawMessage) (T, error)) func(json.RawMessage) error {
	return func(raw json.RawMessage) error {
		_, err := parse(raw)
		return err
	}
}

// artifactForm is a reference to what the site has for its BMCs, by name or digest.
var artifactForm = regexp.MustCompile(`^` + metal.ArtifactScheme + `[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`)

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
	var pending []string
	if r.operation == Rotation {
		ref, err := secretstore.PendingRef(b.CredentialsRef)
		if err != nil {
			return Command{}, errs.New(errs.InvalidConfig, "%s: the machine's BMC has no credential", Rotation)
		}
		arg, err := json.Marshal(map[string]string{string(metal.NewPassword): ref})
		if err != nil {
			return Command{}, err
		}
		args, pending = driver.Args{arg}, []string{ref}
	}
	if len(args) > 0 {
		raw, err := json.Marshal(args)
		if err != nil {
			return Command{}, fmt.Errorf("encode arguments: %w", err)
		}
		text = string(raw)
	}
	c := toBMC(b, r.operation, text)
	c.SecretRefs = append(c.SecretRefs, pending...)
	c.Timeout = cmp.Or(r.timeout, c.Timeout)
	return c, nil
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
	return c, c.Kind == Query, err
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
	c := CommandOf(cmdkind.Bind)
	c.Args = &bmcv1.BmcBindRequest{
		Driver: b.Driver, Address: b.Address, CredentialsRef: b.CredentialsRef, TlsSpkiSha256: b.TLSSPKISHA256, Protected: protected,
	}
	return c
}

// ForgetCommand has a box forget an address of its book.
func ForgetCommand(b store.BMC) Command {
	c := CommandOf(cmdkind.Bind)
	c.Args = &bmcv1.BmcBindRequest{Driver: b.Driver, Address: b.Address, Forget: true}
	return c
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
		kind := cmdkind.Of(r.operation)
		steps = append(steps, module.Step{
			ID: r.step, Kind: kind, On: module.OnSite, Timeout: r.timeout,
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
					return nil, errs.New(errs.InvalidPayload, "read the answer to %s: %v", kind, err)
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
