// Package invoke is the command kind driver.invoke on an agent: it judges an
// invocation, finds its secrets, and has a hosted driver run it.
package invoke

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"log/slog"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/agent/grants"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/invocation"
	"github.com/better-compute/site-appliance/plugins/driver/schema"
	"github.com/better-compute/site-appliance/plugins/host"
)

// Host runs drivers.
type Host interface {
	// Drivers are what it hosts; they do not change.
	Drivers() []driver.Manifest
	Invoke(ctx context.Context, c host.Call) (json.RawMessage, error)
}

// Book knows which credential belongs to which address.
type Book interface {
	Check(addr, pin, credRef, driver string) error
	Bind(addr, pin, credRef, driver string) (learned bool, err error)
	Forget(addr, driver string) error
	Guard(text, pin, credRef string) error
	// Named are the known addresses that text may name, in plain form.
	Named(text string) []string
	// Protected is told an address in plain form.
	Protected(addr string) bool
	// Suspect says that protections were lost: any field may name a BMC that had one.
	Suspect() bool
}

// Options are what an agent's driver.invoke works with.
type Options struct {
	// Host is the agent's plugin host; nil: every driver is unsupported-driver.
	Host Host
	// Book is a site's; nil: the agent keeps none.
	Book Book
	// MachineID is the machine that the agent itself is, if it is one; nil: it is none.
	MachineID func() string
	// Protected says whether destructive work on a machine always needs grants; nil:
	// on none.
	Protected func(machineID string) bool
	Log       *slog.Logger
}

// New makes the kind for an agent of any role. A driver whose configuration
// schema cannot be read is logged and left out.
func New(o Options) dispatch.Kind {
	i := &invoker{options: o}
	if o.Host != nil {
		for _, m := range o.Host.Drivers() {
			d := hosted{manifest: m}
			if len(m.ConfigSchema) > 0 {
				var err error
				if d.schema, err = schema.Read(m.ConfigSchema); err != nil {
					if o.Log != nil {
						o.Log.Error("driver takes no invocations: its configuration schema cannot be read", "driver", m.ID, "err", err)
					}
					continue
				}
			}
			i.drivers = append(i.drivers, d)
		}
	}
	return dispatch.Kind{
		Name: invocation.Kind, Lane: "provision",
		Roles:  []agentv1.Role{agentv1.Role_ROLE_NODE, agentv1.Role_ROLE_SITE, agentv1.Role_ROLE_RAMDISK},
		Decode: i.decode, Check: i.check, Run: i.run, Recover: again,
	}
}

type invoker struct {
	options Options
	drivers []hosted
}

type hosted struct {
	manifest driver.Manifest
	schema   *schema.Schema // nil: any configuration
}

// find is the hosted driver of that id whose kinds hold the concern.
func (i *invoker) find(r invocation.Request) (hosted, bool) {
	n := slices.IndexFunc(i.drivers, func(d hosted) bool {
		return d.manifest.ID == r.Driver && slices.Contains(d.manifest.Kinds, r.Concern)
	})
	if n < 0 {
		return hosted{}, false
	}
	return i.drivers[n], true
}

// decode judges what the payload alone can tell.
func (i *invoker) decode(args []byte) (dispatch.Operation, error) {
	r, err := invocation.Parse(args)
	if err != nil {
		return dispatch.Operation{}, err
	}
	op := dispatch.Operation{Name: r.Name(), Action: r.Action(), Destructive: true, Counts: counts(r), Value: r}
	if d, ok := i.find(r); ok {
		op.RetrySafe = d.manifest.IsRetrySafe(r.Concern, r.Operation)
	}
	return op, nil
}

// check wants the invocation and its signed envelope to speak of the same step
// and machine, and queues commands by machine.
func (i *invoker) check(p *agentv1.CommandPayload, op dispatch.Operation) (dispatch.Operation, error) {
	r := op.Value.(invocation.Request)
	for _, f := range []struct {
		name string
		same bool
	}{
		{"workflowId", r.WorkflowID == p.GetWorkflowId()}, {"stepId", r.StepID == p.GetStepId()},
		{"attempt", r.Attempt == p.GetAttempt()}, {"targetNodeId", r.TargetNodeID == p.GetTargetNodeId()},
	} {
		if !f.same {
			return op, errs.New(errs.InvalidPayload, "%s of the invocation is not the command's", f.name)
		}
	}
	op.Key = invocation.Kind + " " + r.TargetNodeID
	if op.Counts {
		i.touches(r, &op)
	}
	return op, nil
}

// harmless are the operations that need nobody's grant: queries, and what leaves
// a running machine running. Whatever is not here counts.
var harmless = []string{
	"power.getPower", "management.getBootDevice", "management.setBootDevice", "management.getEventLog",
	"management.getSecureBoot", "management.setSecureBoot", "virtual-media.insert", "virtual-media.eject", "virtual-media.status",
	"inspect.inspect", "firmware.list", "bios.getSettings", "raid.getLayout", "runtime.list",
}

// counts says whether people's grants are needed where quorum is in force.
func counts(r invocation.Request) bool {
	if r.Name() != "power.setPower" {
		return !slices.Contains(harmless, r.Name())
	}
	args, err := driver.ParseArgs(r.Args)
	var action string
	return err != nil || len(args) != 1 || json.Unmarshal(args[0], &action) != nil || action != "on"
}

// always are the operations that need a grant for a single machine too: what they
// overwrite nobody brings back, and only the driver knows whether anything was there.
var always = []string{"firmware.update", "raid.applyLayout", "deploy.deploy"}

// touches says what a destructive invocation touches: the machine that it is for,
// the one that the agent is, every BMC that it names, and where it names none its configuration, whatever that
// leads to. A machine's id is only what its sender says.
func (i *invoker) touches(r invocation.Request, op *dispatch.Operation) {
	machines := []string{r.TargetNodeID}
	if i.options.MachineID != nil {
		// Whatever it says, it happens here: a grant for another machine is none.
		machines = append(machines, i.options.MachineID())
	}
	for n, machine := range machines {
		if machine != "" && !slices.Contains(machines[:n], machine) {
			op.Targets = append(op.Targets, grants.Machine(machine))
			op.Always = op.Always || i.options.Protected != nil && i.options.Protected(machine)
		}
	}
	op.Always = op.Always || i.options.Book != nil && i.options.Book.Suspect()
	named := i.named(r)
	for _, address := range named {
		op.Targets = append(op.Targets, grants.BMC(address))
		op.Always = op.Always || i.options.Book != nil && i.options.Book.Protected(address)
	}
	if len(named) == 0 && len(r.Config) > 0 {
		sum := sha256.Sum256(r.Config)
		op.Targets = append(op.Targets, "config:"+hex.EncodeToString(sum[:8]))
	}
	op.Always = op.Always || slices.Contains(always, r.Name())
	op.Artifacts = brings(r)
}

// named are the BMCs of an invocation, in plain form: its own address, known or
// not, and whatever else of configuration and arguments names a known one.
func (i *invoker) named(r invocation.Request) []string {
	var out []string
	if plain, err := addressbook.Normalise(r.Address(), r.Driver); err == nil {
		out = append(out, plain)
	}
	if i.options.Book != nil {
		for _, raw := range []json.RawMessage{r.Config, r.Args} {
			var v any
			if json.Unmarshal(raw, &v) == nil {
				if fields, ok := v.(map[string]any); ok && len(out) > 0 {
					delete(fields, "address") // it stands there, with its driver's own port
				}
				texts(v, func(s string) { out = append(out, i.options.Book.Named(s)...) })
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// texts are all texts of a JSON value, names included.
func texts(v any, each func(string)) {
	switch v := v.(type) {
	case string:
		each(v)
	case []any:
		for _, e := range v {
			texts(e, each)
		}
	case map[string]any:
		for name, e := range v {
			each(name)
			texts(e, each)
		}
	}
}

// brings are the digests that an update or a deployment says.
func brings(r invocation.Request) []string {
	args, err := driver.ParseArgs(r.Args)
	if err != nil || len(args) != 1 {
		return nil
	}
	var said struct {
		SHA256 string `json:"sha256"`
		Image  struct {
			SHA256 string `json:"sha256"`
		} `json:"image"`
	}
	if json.Unmarshal(args[0], &said) != nil {
		return nil
	}
	switch r.Name() {
	case "firmware.update":
		return slices.DeleteFunc([]string{said.SHA256}, func(s string) bool { return s == "" })
	case "deploy.deploy":
		return slices.DeleteFunc([]string{said.Image.SHA256}, func(s string) bool { return s == "" })
	}
	return nil
}

// again repeats after a restart what may be repeated.
func again(_ context.Context, c dispatch.Call) dispatch.Verdict {
	if c.Operation.RetrySafe {
		return dispatch.Rerun()
	}
	return dispatch.Interrupted()
}

// run has the driver do it. What an error leaves undone by then is the driver's
// to say: nothing is invoked before every check has passed.
func (i *invoker) run(ctx context.Context, c dispatch.Call) ([]byte, error) {
	r := c.Operation.Value.(invocation.Request)
	d, ok := i.find(r)
	if !ok {
		return nil, errs.New(errs.UnsupportedDriver, "no hosted driver %s implements %s", r.Driver, r.Concern)
	}
	if slices.Contains(d.manifest.StreamOperations, r.Name()) {
		return nil, errs.New(errs.UnsupportedOperation, "%s of driver %s is a stream: a command cannot carry it", r.Name(), r.Driver)
	}
	if len(r.Config) == 0 {
		r.Config = json.RawMessage("{}")
	}
	if d.schema != nil {
		if err := d.schema.Check(r.Config); err != nil {
			return nil, err
		}
	}
	use, err := uses(d, r)
	if err != nil {
		return nil, err
	}
	if err := i.judge(use, r); err != nil {
		return nil, err
	}
	secrets, err := use.deliver(ctx, c)
	if err != nil {
		return nil, err
	}
	learned := false
	if i.options.Book != nil && use.address != "" && use.credential != "" {
		if learned, err = i.options.Book.Bind(use.address, use.pin, use.credential, r.Driver); err != nil {
			return nil, err
		}
	}
	result, err := i.options.Host.Invoke(ctx, host.Call{
		Driver: r.Driver, Kind: r.Concern, Operation: r.Operation, Config: r.Config, Args: r.Args, Secrets: secrets,
		IdempotencyKey: c.Payload.GetCommandId(), Traceparent: c.Payload.GetTraceparent(), TargetNodeID: r.TargetNodeID,
		Deadline: c.Deadline, Progress: c.Progress,
	})
	if err != nil {
		if learned && addressbook.NothingSent(errs.CodeOf(err)) {
			if ferr := i.options.Book.Forget(use.address, r.Driver); ferr != nil {
				return nil, errs.New(errs.CodeOf(err), "%s (and the address book keeps a use that sent nothing: %v)", errs.From(err).Message, ferr)
			}
		}
		return nil, err
	}
	// Text that is not UTF-8 could be kept, but never be listed.
	if !json.Valid(result) || !utf8.Valid(result) {
		return nil, errs.New(errs.DriverError, "driver %s answered what is not JSON", r.Driver)
	}
	return result, nil
}

// use is what an invocation does with credentials.
type use struct {
	address, pin string
	// refs are all that is fetched; marked are those that the schema knows, which
	// are delivered as they are, and login is the one that delivers username and
	// password, or empty.
	refs, marked []string
	login        string
	// credential stands for refs in the address book.
	credential string
}

// uses finds the references of a configuration: those of fields that the
// schema marks as secret, and "credentials". Only its own fields count.
func uses(d hosted, r invocation.Request) (use, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(r.Config, &fields); err != nil {
		return use{}, errs.New(errs.InvalidConfig, "configuration is not a JSON object")
	}
	text := func(name string) string {
		var s string
		if json.Unmarshal(fields[name], &s) != nil {
			return ""
		}
		return s
	}
	// An address book knows hosts and ports, not what lies behind them.
	u := use{address: r.Address(), pin: text("tlsSpkiSha256")}
	if d.schema != nil {
		for _, name := range d.schema.SecretFields() {
			if ref := text(name); schema.IsRef(ref) {
				u.marked = append(u.marked, ref)
			}
		}
	}
	u.refs = slices.Clone(u.marked)
	if ref := text("credentials"); schema.IsRef(ref) {
		u.login = ref
		u.refs = append(u.refs, ref)
	}
	slices.Sort(u.refs)
	u.refs = slices.Compact(u.refs)
	// Usually the one reference that a BMC has, as the relay knows it.
	u.credential = strings.Join(u.refs, " ")
	return u, nil
}

// judge keeps every address that the box knows to its own credential and pin,
// whatever field of the configuration or the arguments names it, before any
// secret is fetched.
func (i *invoker) judge(u use, r invocation.Request) error {
	if i.options.Book == nil || u.credential == "" {
		return nil
	}
	if u.address != "" {
		if err := i.options.Book.Check(u.address, u.pin, u.credential, r.Driver); err != nil {
			return err
		}
	}
	var fields map[string]any
	if err := json.Unmarshal(r.Config, &fields); err != nil {
		return errs.New(errs.InvalidConfig, "configuration is not a JSON object")
	}
	if u.address != "" {
		delete(fields, "address") // judged above, with its driver's own port
	}
	var args any
	if len(r.Args) > 0 {
		if err := json.Unmarshal(r.Args, &args); err != nil {
			return errs.New(errs.InvalidArgs, "arguments are not JSON")
		}
	}
	return guard(i.options.Book, u, []any{fields, args})
}

func guard(book Book, u use, v any) error {
	switch v := v.(type) {
	case string:
		return book.Guard(v, u.pin, u.credential)
	case []any:
		for _, e := range v {
			if err := guard(book, u, e); err != nil {
				return err
			}
		}
	case map[string]any:
		for name, e := range v {
			if err := book.Guard(name, u.pin, u.credential); err != nil {
				return err
			}
			if err := guard(book, u, e); err != nil {
				return err
			}
		}
	}
	return nil
}

// deliver fetches what the driver gets: each reference under itself, and a
// credential's username and password under these names.
func (u use) deliver(ctx context.Context, c dispatch.Call) (map[string]secret.Value, error) {
	if len(u.refs) == 0 {
		return nil, nil
	}
	values, err := c.Secrets(ctx, u.refs...)
	if err != nil {
		return nil, err
	}
	out := map[string]secret.Value{}
	for _, ref := range u.refs {
		value, ok := values[ref]
		if !ok {
			return nil, errs.New(errs.CredentialsUnavailable, "the secret %s was not handed over", ref)
		}
		if slices.Contains(u.marked, ref) {
			out[ref] = value
		}
	}
	if u.login == "" {
		return out, nil
	}
	username, password, ok := secret.Login(values[u.login])
	if !ok || username.Empty() || password.Empty() {
		if slices.Contains(u.marked, u.login) {
			return out, nil // a secret of another form, which the driver resolves by its reference
		}
		return nil, errs.New(errs.CredentialsUnavailable, "%s is no JSON object with username and password", u.login)
	}
	out["username"], out["password"] = username, password
	return out, nil
}
