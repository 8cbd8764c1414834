package grants

import (
	"encoding/json"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/grants"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/image/imagev1"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/invocation"
	"github.com/better-compute/site-appliance/plugins/metal"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// Subject is what a command does, as its agent will see it: a grant that covers
// another one would only be refused there.
type Subject struct {
	Kind, Operation, Action string
	// Targets are sorted and distinct.
	Targets   []string
	Artifacts []string
	// Also are targets that the box may find in it beside Targets, if it knows them.
	Also []string
}

// The kinds that are not read as an operation on a BMC.
const (
	bindKind   = cmdkind.Bind
	assignKind = cmdkind.Assign
	streamKind = cmdkind.Stream
	wipeKind   = cmdkind.Wipe
)

// readers read the arguments of the kinds that grants are for. machine is the
// agent's own, for one that is a machine.
var readers = map[string]func(p *agentv1.CommandPayload, machine string) (Subject, bool){
	bindKind: func(p *agentv1.CommandPayload, _ string) (Subject, bool) {
		var req bmcv1.BmcBindRequest
		if proto.Unmarshal(p.GetArgs(), &req) != nil {
			return Subject{}, false
		}
		target, ok := bmc(req.GetAddress(), req.GetDriver())
		return Subject{Operation: "bind", Action: addressbook.BindAction(req.GetProtected(), req.GetForget()), Targets: []string{target}}, ok
	},
	assignKind: func(p *agentv1.CommandPayload, _ string) (Subject, bool) {
		var req pxev1.AssignRequest
		if proto.Unmarshal(p.GetArgs(), &req) != nil {
			return Subject{}, false
		}
		// The box counts what changes. A command with a target is sent for that
		// machine's sake, whatever else the snapshot holds.
		s := Subject{Operation: assignKind}
		for _, m := range req.GetMachines() {
			if m.GetAction() != pxev1.Action_ACTION_LOCAL_DISK && (p.GetTargetNodeId() == "" || p.GetTargetNodeId() == m.GetMachineId()) {
				s.Targets = append(s.Targets, grants.Machine(m.GetMachineId()))
				s.Artifacts = append(s.Artifacts, m.GetArtifacts()...)
				for _, a := range []string{m.GetIso().GetSha256(), m.GetKernel().GetSha256(), m.GetKernel().GetInitrdSha256()} {
					if a != "" {
						s.Artifacts = append(s.Artifacts, a)
					}
				}
			}
		}
		return s, len(s.Targets) > 0
	},
	streamKind: func(p *agentv1.CommandPayload, machine string) (Subject, bool) {
		var req imagev1.StreamRequest
		if proto.Unmarshal(p.GetArgs(), &req) != nil || machine == "" {
			return Subject{}, false
		}
		return Subject{Operation: streamKind, Targets: []string{grants.Machine(machine)}, Artifacts: []string{req.GetSha256()}}, true
	},
	wipeKind: func(_ *agentv1.CommandPayload, machine string) (Subject, bool) {
		return Subject{Operation: wipeKind, Targets: []string{grants.Machine(machine)}}, machine != ""
	},
	invocation.Kind: func(p *agentv1.CommandPayload, machine string) (Subject, bool) {
		r, err := invocation.Parse(p.GetArgs())
		if err != nil {
			return Subject{}, false
		}
		s := Subject{Operation: r.Name(), Action: r.Action()}
		if r.TargetNodeID != "" {
			machine = r.TargetNodeID
		}
		if machine != "" {
			s.Targets = append(s.Targets, grants.Machine(machine))
		}
		if target, ok := bmc(r.Address(), r.Driver); ok {
			s.Targets = append(s.Targets, target)
		}
		for _, raw := range []json.RawMessage{r.Config, r.Args} {
			var v any
			if json.Unmarshal(raw, &v) == nil {
				s.Also = append(s.Also, addresses(v)...)
			}
		}
		return s, len(s.Targets) > 0
	},
}

// addresses are the texts of a JSON value that can be a BMC's address.
func addresses(v any) (out []string) {
	switch v := v.(type) {
	case string:
		for _, id := range []string{"ipmi", "redfish"} {
			if target, ok := bmc(v, id); ok {
				out = append(out, target)
			}
		}
	case []any:
		for _, e := range v {
			out = append(out, addresses(e)...)
		}
	case map[string]any:
		for _, e := range v {
			out = append(out, addresses(e)...)
		}
	}
	return out
}

// Describe says what a command does; ok is false for a kind that no grant is for,
// and for arguments that its agent would refuse.
func Describe(p *agentv1.CommandPayload, machine string) (s Subject, ok bool) {
	if read := readers[p.GetKind()]; read != nil {
		s, ok = read(p, machine)
	} else if operates(p.GetKind()) {
		s, ok = operation(p)
	}
	if !ok {
		return Subject{}, false
	}
	s.Kind = p.GetKind()
	var err error
	s.Targets, err = grants.Sorted(s.Targets)
	return s, err == nil
}

// operates reports whether a kind is for a BMC.
func operates(kind string) bool { return strings.HasPrefix(kind, "bmc.") }

// operation reads one operation on a BMC.
func operation(p *agentv1.CommandPayload) (Subject, bool) {
	var req bmcv1.BmcOperationRequest
	if proto.Unmarshal(p.GetArgs(), &req) != nil {
		return Subject{}, false
	}
	target, ok := bmc(req.GetAddress(), req.GetDriver())
	args, err := driver.ParseArgs([]byte(req.GetArgsJson()))
	if !ok || err != nil {
		return Subject{}, false
	}
	s := Subject{Operation: req.GetOperation(), Targets: []string{target}}
	if len(args) != 1 {
		return s, true
	}
	switch req.GetOperation() {
	case "power.setPower":
		if action, err := metal.ParseAction(args[0]); err == nil {
			s.Action = string(action)
		}
	case "firmware.update":
		var file struct {
			SHA256 string `json:"sha256"`
		}
		if json.Unmarshal(args[0], &file) == nil && file.SHA256 != "" {
			s.Artifacts = []string{file.SHA256}
		}
	}
	return s, true
}

// bmc is the target of an address, in the form that boxes count by.
func bmc(address, driverID string) (target string, ok bool) {
	plain, err := addressbook.Normalise(address, driverID)
	return grants.BMC(plain), err == nil
}
