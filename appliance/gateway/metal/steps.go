package metal

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// Kinds are the command kinds that metal brings.
func Kinds() []module.Kind {
	site, ramdisk := []agentv1.Role{agentv1.Role_ROLE_SITE}, []agentv1.Role{agentv1.Role_ROLE_RAMDISK}
	return []module.Kind{
		{Name: "bmc.query", Lane: "query", Timeout: time.Minute, RetrySafe: true, Roles: site},
		{Name: "bmc.boot", Lane: "power", Timeout: 2 * time.Minute, RetrySafe: true, Roles: site},
		{Name: "bmc.power", Lane: "power", Timeout: 2 * time.Minute, Destructive: true, Roles: site},
		{Name: "bmc.media", Lane: "provision", Timeout: 5 * time.Minute, RetrySafe: true, Roles: site},
		{Name: "pxe.assign", Lane: "provision", Timeout: 30 * time.Second, RetrySafe: true, Destructive: true, Roles: site},
		{Name: "image.stream", Lane: "transfer", Timeout: time.Hour, Destructive: true, Roles: ramdisk},
	}
}

// relayed are the registered steps: each relays one operation of the machine's
// BMC driver as a typed command.
var relayed = []struct {
	id, operation, kind string
	arguments           int // most positional arguments
	required            int
	timeout             time.Duration
}{
	{"power.getPower", "power.getPower", "bmc.query", 0, 0, 0},
	{"power.setPower", "power.setPower", "bmc.power", 1, 1, 0},
	{"management.getBootDevice", "management.getBootDevice", "bmc.query", 0, 0, 0},
	{"management.setBootDevice", "management.setBootDevice", "bmc.boot", 1, 1, 0},
	{"management.resetBmc", "management.resetBmc", "bmc.power", 0, 0, 0},
	{"management.getEventLog", "management.getEventLog", "bmc.query", 0, 0, 0},
	{"management.getSecureBoot", "management.getSecureBoot", "bmc.query", 0, 0, 0},
	{"management.setSecureBoot", "management.setSecureBoot", "bmc.boot", 1, 1, 0},
	{"inspect.inspect", "inspect.inspect", "bmc.query", 0, 0, 3 * time.Minute},
	{"media.insert", "virtual-media.insert", "bmc.media", 1, 1, 0},
	{"media.eject", "virtual-media.eject", "bmc.media", 0, 0, 0},
	{"media.status", "virtual-media.status", "bmc.query", 0, 0, 0},
}

// Steps are the registered steps that metal brings: they reach the machine's
// own BMC through its site's agent, by typed commands, whatever a profile binds.
func Steps() []module.Step {
	kinds := Kinds()
	var steps []module.Step
	for _, r := range relayed {
		safe := kinds[slices.IndexFunc(kinds, func(k module.Kind) bool { return k.Name == r.kind })].RetrySafe
		check := func(with json.RawMessage) error {
			args, err := driver.ParseArgs(with)
			switch {
			case err != nil:
				return errs.New(errs.InvalidConfig, "%s: with: %s", r.id, errs.From(err).Message)
			case len(args) < r.required || len(args) > r.arguments:
				return errs.New(errs.InvalidConfig, "%s: with holds %d arguments: want %d", r.id, len(args), r.arguments)
			}
			if r.operation == SetPower {
				var action string
				if json.Unmarshal(args[0], &action) != nil || !slices.Contains(actions, action) {
					return errs.New(errs.InvalidConfig, "%s: want one of %s", r.id, strings.Join(actions, ", "))
				}
			}
			return nil
		}
		steps = append(steps, module.Step{
			ID: r.id, Kind: r.kind, On: module.OnSite, Timeout: r.timeout, Check: check,
			Command: func(m store.Machine, with json.RawMessage) (module.Command, error) {
				if err := check(with); err != nil {
					return module.Command{}, err
				}
				args, err := driver.ParseArgs(with)
				if err != nil {
					return module.Command{}, err
				}
				text := ""
				if len(args) > 0 {
					raw, err := json.Marshal(args)
					if err != nil {
						return module.Command{}, fmt.Errorf("encode arguments: %w", err)
					}
					text = string(raw)
				}
				return module.Command{
					Kind: r.kind, Args: operation(m.BMC, r.operation, text), SecretRefs: []string{m.BMC.CredentialsRef}, Timeout: r.timeout, RetrySafe: safe,
				}, nil
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

// actions are what power.setPower takes.
var actions = []string{"on", "off", "soft", "cycle", "reset", "nmi"}
