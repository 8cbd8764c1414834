// Package relay runs bmc.* operations on a site: on the built-in Redfish
// driver, or on a hosted plugin, with the credential that belongs to the BMC.
package relay

import (
	"context"
	"encoding/json"
	"log/slog"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/bmc/redfish"
)

// Call is one operation for a hosted driver.
type Call struct {
	Driver, Concern, Operation string
	// Config is {address, tlsSpkiSha256, options}; Args a JSON array of the
	// positional arguments, or the single argument.
	Config, Args json.RawMessage
	// Secrets are username and password.
	Secrets        map[string]secret.Value
	IdempotencyKey string
	Traceparent    string
	TargetNodeID   string
	Deadline       time.Time
	Progress       func(phase, message string, done, total uint64)
}

// Invoker runs a call on the hosted driver that serves its concern, and answers
// the result's JSON. Without such a driver it answers unsupported-driver and
// invokes nothing.
type Invoker interface {
	Invoke(ctx context.Context, call Call) (json.RawMessage, error)
}

// Request is one operation of a command.
type Request struct {
	Kind         string
	Op           *bmcv1.BmcOperationRequest
	CommandID    string
	TargetNodeID string
	Traceparent  string
	// Deadline is the command's not_after; zero: none but ctx's.
	Deadline time.Time
	// Credentials fetches username and password by the operation's reference. It
	// is called only when the address may have this credential.
	Credentials func(ctx context.Context) (map[string]secret.Value, error)
	Progress    func(phase, message string, done, total uint64)
}

// Options are what a relay works with. Plugins may be nil: then redfish is the
// only driver.
type Options struct {
	Book    *addressbook.Book
	Plugins Invoker
	Log     *slog.Logger
}

// Relay runs operations. It is safe for concurrent use; order and exclusion per
// BMC are its caller's.
type Relay struct {
	book    *addressbook.Book
	plugins Invoker
	log     *slog.Logger
}

// New makes a relay.
func New(o Options) *Relay {
	log := o.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Relay{book: o.Book, plugins: o.Plugins, log: log}
}

// Do runs one operation. Its errors have codes.
func (r *Relay) Do(ctx context.Context, req Request) (*bmcv1.BmcOperationResult, error) {
	checked, err := Check(req.Kind, req.Op)
	if err != nil {
		return nil, err
	}
	op := req.Op
	if !req.Deadline.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, req.Deadline)
		defer cancel()
	}
	run, err := r.choose(op)
	if err != nil {
		return nil, err
	}
	// The binding is judged before the credential is fetched, and kept before it
	// is used.
	if err := r.book.Check(op.GetAddress(), op.GetTlsSpkiSha256(), op.GetCredentialsRef(), op.GetDriver()); err != nil {
		return nil, err
	}
	login, err := credentials(ctx, req)
	if err != nil {
		return nil, err
	}
	learned, err := r.book.Bind(op.GetAddress(), op.GetTlsSpkiSha256(), op.GetCredentialsRef(), op.GetDriver())
	if err != nil {
		return nil, err
	}
	if learned {
		r.log.Info("BMC bound to its credential", "address", checked.Key, "driver", op.GetDriver(), "pinned", op.GetTlsSpkiSha256() != "", "command", req.CommandID)
	}
	result, err := run(ctx, req, checked.Key, login)
	if err != nil {
		failure := failed(ctx, err)
		if learned && addressbook.NothingSent(failure.Code) {
			if err := r.book.Forget(op.GetAddress(), op.GetDriver()); err != nil {
				r.log.Warn("BMC's binding stays though nothing was sent", "address", checked.Key, "error", err)
			}
		}
		return nil, failure
	}
	return &bmcv1.BmcOperationResult{ResultJson: string(result)}, nil
}

type runner func(ctx context.Context, req Request, address string, login map[string]secret.Value) (json.RawMessage, error)

// choose finds who runs the operation, before anything is learned or fetched.
func (r *Relay) choose(op *bmcv1.BmcOperationRequest) (runner, error) {
	if op.GetDriver() == redfishDriver {
		return builtIn(op.GetOperation())
	}
	if r.plugins == nil {
		concern, _ := split(op.GetOperation())
		return nil, errs.New(errs.UnsupportedDriver, "no hosted driver %s implements %s", op.GetDriver(), concern)
	}
	return r.invoke, nil
}

// credentials fetches username and password, and nothing else is passed on.
func credentials(ctx context.Context, req Request) (map[string]secret.Value, error) {
	if req.Credentials == nil {
		return nil, errs.New(errs.CredentialsUnavailable, "there is no way to fetch the credential")
	}
	all, err := req.Credentials(ctx)
	if err != nil {
		if own := errs.From(err); own.Code != errs.Internal {
			return nil, own
		}
		return nil, errs.Retry(errs.CredentialsUnavailable, "fetch the credential: %v", err)
	}
	login := make(map[string]secret.Value, 2)
	for _, name := range []string{"username", "password"} {
		value := all[name]
		if value.Empty() {
			return nil, errs.New(errs.CredentialsUnavailable, "the credential has no %s", name)
		}
		login[name] = value
	}
	return login, nil
}

// invoke runs the operation on a hosted plugin. The options are nested, so that
// they can override neither address nor pin.
func (r *Relay) invoke(ctx context.Context, req Request, _ string, login map[string]secret.Value) (json.RawMessage, error) {
	op := req.Op
	config, err := json.Marshal(struct {
		Address string          `json:"address"`
		Pin     string          `json:"tlsSpkiSha256,omitempty"`
		Options json.RawMessage `json:"options,omitempty"`
	}{op.GetAddress(), strings.ToLower(op.GetTlsSpkiSha256()), json.RawMessage(op.GetDriverOptionsJson())})
	if err != nil {
		return nil, errs.New(errs.InvalidPayload, "encode the driver's configuration: %v", err)
	}
	args := json.RawMessage(op.GetArgsJson())
	if len(args) == 0 {
		args = json.RawMessage("[]")
	}
	concern, name := split(op.GetOperation())
	deadline, _ := ctx.Deadline()
	result, err := r.plugins.Invoke(ctx, Call{
		Driver: op.GetDriver(), Concern: concern, Operation: name, Config: config, Args: args, Secrets: login,
		IdempotencyKey: req.CommandID, Traceparent: req.Traceparent, TargetNodeID: req.TargetNodeID, Deadline: deadline, Progress: req.Progress,
	})
	if err != nil {
		return nil, err
	}
	// What is not UTF-8 could not travel home.
	if !json.Valid(result) || !utf8.Valid(result) {
		return nil, errs.New(errs.BmcError, "driver %s answered what is not JSON", op.GetDriver())
	}
	return result, nil
}

// builtIn is the Redfish driver's part of operation.
func builtIn(operation string) (runner, error) {
	type work func(ctx context.Context, t redfish.Target, args []json.RawMessage) (any, error)
	operations := map[string]work{
		"power.getPower": func(ctx context.Context, t redfish.Target, args []json.RawMessage) (any, error) {
			if len(args) != 0 {
				return nil, errs.New(errs.InvalidArgs, "getPower takes no arguments")
			}
			return redfish.PowerState(ctx, t)
		},
		"power.setPower": func(ctx context.Context, t redfish.Target, args []json.RawMessage) (any, error) {
			var action string
			if len(args) != 1 || strict(args[0], &action) != nil {
				return nil, errs.New(errs.InvalidArgs, "setPower takes one action")
			}
			return nil, redfish.SetPower(ctx, t, action)
		},
		"management.setBootDevice": func(ctx context.Context, t redfish.Target, args []json.RawMessage) (any, error) {
			var dev redfish.BootDevice
			if len(args) != 1 || strict(args[0], &dev) != nil {
				return nil, errs.New(errs.InvalidArgs, "setBootDevice takes {device, persistent, efi}")
			}
			return nil, redfish.SetBootDevice(ctx, t, dev)
		},
		"management.getBootDevice": func(ctx context.Context, t redfish.Target, args []json.RawMessage) (any, error) {
			if len(args) != 0 {
				return nil, errs.New(errs.InvalidArgs, "getBootDevice takes no arguments")
			}
			return redfish.GetBootDevice(ctx, t)
		},
	}
	do, known := operations[operation]
	if !known {
		return nil, errs.New(errs.UnsupportedOperation, "driver redfish does not implement %s", operation)
	}
	return func(ctx context.Context, req Request, address string, login map[string]secret.Value) (json.RawMessage, error) {
		scheme, _, found := strings.Cut(req.Op.GetAddress(), "://")
		if found && !strings.EqualFold(scheme, "https") {
			return nil, errs.New(errs.InvalidAddress, "driver redfish speaks https only, not %s", scheme)
		}
		args, err := positional(req.Op.GetArgsJson())
		if err != nil {
			return nil, err
		}
		result, err := do(ctx, redfish.Target{
			Address: address, Pin: req.Op.GetTlsSpkiSha256(),
			Username: string(login["username"].Reveal()), Password: login["password"],
		}, args)
		if err != nil {
			return nil, err
		}
		return json.Marshal(result)
	}, nil
}

// failed gives an error its code: a driver's own is kept, and what happened
// because the operation's time was over is a timeout.
func failed(ctx context.Context, err error) *errs.Error {
	failure := errs.From(err)
	if failure.Code == errs.Internal && ctx.Err() != nil {
		return errs.From(ctx.Err())
	}
	return failure
}
