// Package relay runs bmc.* operations on a site: on the built-in drivers, or on
// a hosted plugin, with the credential that belongs to the BMC.
package relay

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/bmc/breaker"
	"github.com/better-compute/site-appliance/bmc/release"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// Call is one operation for a hosted driver.
type Call struct {
	Driver, Concern, Operation string
	// Config is {address, tlsSpkiSha256, options}; Args a JSON array of the
	// positional arguments, or the single argument.
	Config, Args json.RawMessage
	// Secrets are username and password, and a rotation's newPassword.
	Secrets        map[string]secret.Value
	IdempotencyKey string
	Traceparent    string
	TargetNodeID   string
	Deadline       time.Time
	Progress       func(phase, message string, done, total uint64)
}

// Invoker runs calls on hosted drivers.
type Invoker interface {
	// Invoke answers the result's JSON. Without a driver that serves the call's
	// concern it answers unsupported-driver and invokes nothing.
	Invoke(ctx context.Context, call Call) (json.RawMessage, error)
	// RetrySafe says whether the driver lists the operation as one that may run
	// twice; known is false where no such driver is hosted.
	RetrySafe(driver, concern, operation string) (safe, known bool)
}

// Media turns an artifact's reference, artifact://NAME-or-SHA256, into an https
// URL that the BMC can fetch until release is called.
type Media interface {
	Offer(ctx context.Context, bmcAddress, ref string) (url string, release func(), err error)
	// Forget ends the offers to the BMC of before this process began, whose
	// releases nobody has.
	Forget(bmcAddress string)
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
	// Secrets fetches what the command lists, by reference. It is called only when
	// the address may have this credential.
	Secrets  func(ctx context.Context, refs ...string) (map[string]secret.Value, error)
	Progress func(phase, message string, done, total uint64)
	// Release gives up the command's place while it goes on; nil: it has none.
	Release func()
}

// Options are what a relay works with.
type Options struct {
	Book *addressbook.Book
	// BuiltIn are the drivers in this process. Their ids are never a plugin's.
	BuiltIn []*driver.Definition
	// Plugins may be nil: then there are the built-in drivers alone.
	Plugins Invoker
	// Media may be nil: then a reference to an artifact is invalid-args.
	Media Media
	Log   *slog.Logger
	// Now is the breaker's clock; nil: time.Now.
	Now func() time.Time
	// Knock opens and closes a connection to a BMC that speaks over TCP; nil: a
	// net.Dialer does.
	Knock func(ctx context.Context, address string) error
}

// Relay runs operations. It is safe for concurrent use; order and exclusion per
// BMC are its caller's.
type Relay struct {
	book    *addressbook.Book
	builtIn map[string]*driver.Definition
	plugins Invoker
	media   *mounts
	breaker *breaker.Breaker
	knock   func(ctx context.Context, address string) error
	log     *slog.Logger
}

// New makes a relay.
func New(o Options) *Relay {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Knock == nil {
		o.Knock = knock
	}
	r := &Relay{knock: o.Knock, book: o.Book, builtIn: map[string]*driver.Definition{}, plugins: o.Plugins, media: newMounts(o.Media), breaker: breaker.New(o.Now), log: o.Log}
	for _, d := range o.BuiltIn {
		r.builtIn[d.ID()] = d
	}
	return r
}

// Check is the package's Check, with what this site knows of driver and BMC: an
// operation is retry-safe only where its driver says so too, and on a protected
// machine whatever counts always needs grants.
func (r *Relay) Check(kind string, op *bmcv1.BmcOperationRequest) (Operation, error) {
	o, err := Check(kind, op)
	if err != nil {
		return Operation{}, err
	}
	// A query changes nothing, whatever its driver forgot to say.
	if kind != Query {
		safe, known := r.retrySafe(op)
		switch {
		case slices.Contains(withoutCredential, op.GetDriver()):
			o.RetrySafe = safe && known
		case known:
			o.RetrySafe = o.RetrySafe && safe
		}
	}
	o.Always = o.Always || o.Counts && r.book.Protected(o.Key)
	return o, nil
}

// retrySafe is what the driver says of its operation.
func (r *Relay) retrySafe(op *bmcv1.BmcOperationRequest) (safe, known bool) {
	concern, name := split(op.GetOperation())
	if d, ok := r.builtIn[op.GetDriver()]; ok {
		return d.IsRetrySafe(concern, name), true
	}
	if r.plugins == nil {
		return false, false
	}
	return r.plugins.RetrySafe(op.GetDriver(), concern, name)
}

// BuiltIn reports whether a driver lives in this process.
func (r *Relay) BuiltIn(id string) bool { return r.builtIn[id] != nil }

// Bind ties an address to what a signed rebinding says, for good, or forgets it.
func (r *Relay) Bind(req *bmcv1.BmcBindRequest) error {
	checked, err := CheckBind(req)
	if err != nil {
		return err
	}
	if req.GetForget() {
		if err := r.book.Remove(req.GetAddress(), req.GetDriver()); err != nil {
			return err
		}
		r.breaker.Reset(checked.Key)
		r.log.Info("BMC forgotten", "address", checked.Key)
		return nil
	}
	if err := r.book.Rebind(req.GetAddress(), req.GetTlsSpkiSha256(), req.GetCredentialsRef(), req.GetDriver(), req.GetProtected()); err != nil {
		return err
	}
	r.breaker.Reset(checked.Key)
	r.log.Info("BMC bound anew", "address", checked.Key, "driver", req.GetDriver(), "pinned", req.GetTlsSpkiSha256() != "", "protected", req.GetProtected())
	return nil
}

// Prepared is an operation that may go out: its BMC is known by this credential,
// and was asked not to wait for longer. End must be called, once, with how it ended.
type Prepared struct {
	Call
	// Address is the BMC's host:port.
	Address string
	end     func(error) error
}

// End settles what the operation taught, and gives its error a code.
func (p *Prepared) End(err error) error { return p.end(err) }

// Prepare checks an operation, its binding and its breaker, and fetches its
// credential, in this order. Its errors have codes.
func (r *Relay) Prepare(ctx context.Context, req Request) (*Prepared, error) {
	checked, err := Check(req.Kind, req.Op)
	if err != nil {
		return nil, err
	}
	op := req.Op
	if err := r.serves(op); err != nil {
		return nil, err
	}
	p := &Prepared{Address: checked.Key}
	if p.Call, err = call(ctx, req); err != nil {
		return nil, err
	}
	newPassword := ""
	if op.GetOperation() == rotation {
		args, err := arguments(op.GetArgsJson())
		if err != nil {
			return nil, err
		}
		if newPassword, p.Args, err = takeNewPassword(op.GetCredentialsRef(), args); err != nil {
			return nil, err
		}
	}
	// The binding is judged before the credential is fetched, and kept before it
	// is used.
	if err := r.book.Check(op.GetAddress(), op.GetTlsSpkiSha256(), op.GetCredentialsRef(), op.GetDriver()); err != nil {
		return nil, err
	}
	report, err := r.breaker.Ask(checked.Key)
	if err != nil {
		return nil, err
	}
	fail := func(err error) (*Prepared, error) {
		report(err)
		return nil, err
	}
	if p.Secrets, err = credentials(ctx, req, newPassword); err != nil {
		return fail(err)
	}
	learned, err := r.book.Bind(op.GetAddress(), op.GetTlsSpkiSha256(), op.GetCredentialsRef(), op.GetDriver())
	if err != nil {
		return fail(err)
	}
	if learned {
		r.log.Info("BMC bound to its credential", "address", checked.Key, "driver", op.GetDriver(), "pinned", op.GetTlsSpkiSha256() != "", "command", req.CommandID)
	}
	safe, _ := r.retrySafe(op)
	p.end = func(err error) error {
		if err == nil {
			report(nil)
			return nil
		}
		failure := failed(ctx, err, safe)
		var broke interface{ OfPlugin() }
		if errors.As(err, &broke) || op.GetOperation() == firmwareUpdate && failure.Code == errs.Unreachable {
			// The plugin, or perhaps the image's server: that says nothing of the BMC.
			report(breaker.ErrNothingLearned)
		} else {
			report(failure)
		}
		if learned && addressbook.NothingSent(failure.Code) {
			if err := r.book.Forget(op.GetAddress(), op.GetDriver()); err != nil {
				r.log.Warn("BMC's binding stays though nothing was sent", "address", checked.Key, "error", err)
			}
		}
		if broke != nil {
			return &pluginFailure{failure}
		}
		return failure
	}
	return p, nil
}

// pluginFailure is a failure of the plugin, and not of the BMC that it speaks to.
type pluginFailure struct{ err *errs.Error }

func (f *pluginFailure) Error() string { return f.err.Error() }

// Unwrap gives the error its code.
func (f *pluginFailure) Unwrap() error { return f.err }

// OfPlugin tells whoever learns about targets from errors.
func (f *pluginFailure) OfPlugin() {}

// serves refuses a driver that is nowhere, before anything is learned or fetched.
func (r *Relay) serves(op *bmcv1.BmcOperationRequest) error {
	if r.BuiltIn(op.GetDriver()) || r.plugins != nil {
		return nil
	}
	concern, _ := split(op.GetOperation())
	return errs.New(errs.UnsupportedDriver, "no hosted driver %s implements %s", op.GetDriver(), concern)
}

// call is the operation as drivers get it, without secrets. The options are
// nested, so that they can override neither address nor pin.
func call(ctx context.Context, req Request) (Call, error) {
	op := req.Op
	config, err := json.Marshal(struct {
		Address string          `json:"address"`
		Pin     string          `json:"tlsSpkiSha256,omitempty"`
		Options json.RawMessage `json:"options,omitempty"`
	}{op.GetAddress(), strings.ToLower(op.GetTlsSpkiSha256()), json.RawMessage(op.GetDriverOptionsJson())})
	if err != nil {
		return Call{}, errs.New(errs.InvalidPayload, "encode the driver's configuration: %v", err)
	}
	args := json.RawMessage(op.GetArgsJson())
	if len(args) == 0 {
		args = json.RawMessage("[]")
	}
	concern, name := split(op.GetOperation())
	deadline, _ := ctx.Deadline()
	if !req.Deadline.IsZero() && (deadline.IsZero() || req.Deadline.Before(deadline)) {
		deadline = req.Deadline
	}
	return Call{
		Driver: op.GetDriver(), Concern: concern, Operation: name, Config: config, Args: args,
		IdempotencyKey: req.CommandID, Traceparent: req.Traceparent, TargetNodeID: req.TargetNodeID, Deadline: deadline, Progress: req.Progress,
	}, nil
}

// Do runs one operation. Its errors have codes.
func (r *Relay) Do(ctx context.Context, req Request) (*bmcv1.BmcOperationResult, error) {
	if req.Kind == Console {
		return nil, errs.New(errs.UnsupportedOperation, "%s is a stream", Console)
	}
	if !req.Deadline.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, req.Deadline)
		defer cancel()
	}
	p, err := r.Prepare(ctx, req)
	if err != nil {
		return nil, err
	}
	result, err := r.run(ctx, req, p)
	if err := p.End(err); err != nil {
		return nil, err
	}
	return &bmcv1.BmcOperationResult{ResultJson: string(result)}, nil
}

// run has the driver do it, with what the BMC is to fetch at hand.
func (r *Relay) run(ctx context.Context, req Request, p *Prepared) (json.RawMessage, error) {
	settle, err := r.media.offer(ctx, p)
	if err != nil {
		return nil, err
	}
	result, err := r.invoke(ctx, req, p)
	settle(err)
	return result, err
}

func (r *Relay) invoke(ctx context.Context, req Request, p *Prepared) (json.RawMessage, error) {
	if d, ok := r.builtIn[p.Driver]; ok {
		return r.inside(ctx, req, d, p.Call)
	}
	result, err := r.plugins.Invoke(ctx, p.Call)
	if err != nil {
		return nil, err
	}
	// What is not UTF-8 could not travel home.
	if !json.Valid(result) || !utf8.Valid(result) {
		return nil, errs.New(errs.BmcError, "driver %s answered what is not JSON", p.Driver)
	}
	return result, nil
}

// inside calls a driver in this process. Its fault is its call's.
func (r *Relay) inside(ctx context.Context, req Request, d *driver.Definition, c Call) (result json.RawMessage, err error) {
	defer r.caught(c, &err)
	if req.Release != nil {
		ctx = release.With(ctx, req.Release)
	}
	return d.Invoke(r.contextOf(ctx, c), c.Concern, c.Operation, c.Config, c.Args)
}

// caught makes an error of a fault in a driver's code; it is deferred.
func (r *Relay) caught(c Call, err *error) {
	if fault := recover(); fault != nil {
		r.log.Error("a driver's code failed", "driver", c.Driver, "operation", c.Concern+"."+c.Operation, "fault", fault)
		*err = errs.New(errs.DriverError, "the code of driver %s failed", c.Driver)
	}
}

// contextOf is a call as a driver of this process gets it.
func (r *Relay) contextOf(ctx context.Context, c Call) *driver.Context {
	var emit func(driver.Progress)
	if c.Progress != nil {
		emit = func(p driver.Progress) { c.Progress(p.Phase, p.Message, p.Done, p.Total) }
	}
	dc := driver.NewContext(ctx, driver.Delivered(c.Secrets), r.log.With("driver", c.Driver), emit)
	dc.IdempotencyKey, dc.Traceparent, dc.TargetNodeID = c.IdempotencyKey, c.Traceparent, c.TargetNodeID
	return dc
}

// credentials fetches username and password, and a rotation's new password by
// its own reference. Nothing else is passed on.
func credentials(ctx context.Context, req Request, newPassword string) (map[string]secret.Value, error) {
	ref := req.Op.GetCredentialsRef()
	if ref == "" {
		return nil, nil
	}
	if req.Secrets == nil {
		return nil, errs.New(errs.CredentialsUnavailable, "there is no way to fetch the credential")
	}
	refs := []string{ref}
	if newPassword != "" {
		refs = append(refs, newPassword)
	}
	values, err := req.Secrets(ctx, refs...)
	if err != nil {
		if own := errs.From(err); own.Code != errs.Internal {
			return nil, own
		}
		return nil, errs.Retry(errs.CredentialsUnavailable, "fetch the credential: %v", err)
	}
	username, password, ok := secret.Login(values[ref])
	if !ok {
		return nil, errs.New(errs.CredentialsUnavailable, "%s is no JSON object with username and password", ref)
	}
	login := map[string]secret.Value{"username": username, "password": password}
	if newPassword != "" {
		login[string(metal.NewPassword)] = values[newPassword]
	}
	for name, value := range login {
		if value.Empty() {
			return nil, errs.New(errs.CredentialsUnavailable, "the credential has no %s", name)
		}
	}
	return login, nil
}

// failed gives an error its code: a driver's own is kept, and what happened
// because the operation's time was over is a timeout. That a repeat may help is
// believed only of an operation that the driver lists as safe to repeat; while a
// plugin restarts nothing ran.
func failed(ctx context.Context, err error, safe bool) *errs.Error {
	failure := errs.From(err)
	if failure.Code == errs.Internal && ctx.Err() != nil {
		failure = errs.From(ctx.Err())
	}
	if failure.Retryable && !safe && failure.Code != errs.Unavailable {
		failure = errs.New(failure.Code, "%s", failure.Message)
	}
	return failure
}
