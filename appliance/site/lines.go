package site

import (
	"context"
	"encoding/json"
	"io"
	"net/netip"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/agent/outbox"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/site/config"
	"github.com/better-compute/site-appliance/appliance/site/console"
	"github.com/better-compute/site-appliance/appliance/site/httpproxy"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/bmc/relay"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/host"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// consoleOpenWithin bounds one opening of a console.
const consoleOpenWithin = 45 * time.Second

// streamer opens a hosted driver's stream.
type streamer interface {
	Stream(ctx context.Context, c host.Call) (io.ReadWriteCloser, error)
}

// consoleOpening is the argument of bmc.console's operation.
type consoleOpening struct {
	Takeover     bool `json:"takeover"`
	HistoryBytes int  `json:"historyBytes"`
}

// readOpening reads args_json: nothing, or one object.
func readOpening(text string) (o consoleOpening, err error) {
	args, err := driver.ParseArgs([]byte(text))
	if err != nil {
		return o, err
	}
	if err := args.Expect(1); err != nil {
		return o, err
	}
	if len(args) == 1 {
		if err := driver.StrictJSON(args[0], &o, "takeover", "historyBytes"); err != nil {
			return o, errs.New(errs.InvalidArgs, "open: %v", err)
		}
	}
	if o.HistoryBytes < 0 || o.HistoryBytes > console.HistoryBytes {
		return o, errs.New(errs.InvalidArgs, "historyBytes %d: want 0 to %d", o.HistoryBytes, console.HistoryBytes)
	}
	return o, nil
}

// consoleKind carries the serial console of a BMC through the command's tunnel. It
// holds its place in the BMC's queue only while it opens.
func consoleKind(r *relay.Relay, plugins streamer, desk *console.Desk, emit func(name, class, key string, body any) error) dispatch.Kind {
	return dispatch.Kind{
		Name: relay.Console, Lane: cmdkind.Lane(relay.Console), Roles: siteOnly,
		Decode: func(args []byte) (dispatch.Operation, error) {
			op, err := decodeBMC(r, relay.Console, args)
			if err != nil {
				return dispatch.Operation{}, err
			}
			if _, err := readOpening(op.Value.(*bmcv1.BmcOperationRequest).ArgsJson); err != nil {
				return dispatch.Operation{}, err
			}
			op.RetrySafe = false
			return op, nil
		},
		Run: func(ctx context.Context, call dispatch.Call) ([]byte, error) {
			req := call.Operation.Value.(*bmcv1.BmcOperationRequest)
			opening, err := readOpening(req.ArgsJson)
			if err != nil {
				return nil, err
			}
			if r.BuiltIn(req.Driver) && !r.Streams(req) {
				return nil, errs.New(errs.UnsupportedOperation, "driver %s has no serial console: where the BMC serves IPMI's, bind the machine's kind console to ipmi-sol", req.Driver)
			}
			report, err := desk.Serve(ctx, console.Session{
				BMC: call.Operation.Key, Command: call.Payload.CommandId, Takeover: opening.Takeover, History: opening.HistoryBytes,
				Open: func(ctx context.Context, takeover bool) (io.ReadWriteCloser, error) {
					return openConsole(ctx, r, plugins, call, takeover)
				},
				Line: func(ctx context.Context) (io.ReadWriteCloser, error) {
					call.Release()
					return call.Tunnel(ctx)
				},
				Audit: func(name string, details map[string]string) error {
					return emit(name, outbox.Audit, call.Payload.CommandId, details)
				},
			})
			if err != nil {
				return nil, err
			}
			result, err := json.Marshal(report)
			if err != nil {
				return nil, err
			}
			return proto.Marshal(&bmcv1.BmcOperationResult{ResultJson: string(result)})
		},
	}
}

// openConsole opens the driver's stream with the credential that belongs to the
// BMC. The end of ctx ends the opening; what is open, only Close ends, so that the
// driver can free the serial port.
func openConsole(ctx context.Context, r *relay.Relay, plugins streamer, call dispatch.Call, takeover bool) (io.ReadWriteCloser, error) {
	ctx, done := context.WithTimeout(ctx, consoleOpenWithin)
	defer done()
	p, err := r.Prepare(ctx, requestOf(relay.Console, call))
	if err != nil {
		return nil, err
	}
	c := p.Call
	c.Args, c.Progress = json.RawMessage("[]"), nil
	c.Deadline, _ = ctx.Deadline()
	if takeover {
		if c.Args, err = json.Marshal([]metal.ConsoleOpening{{Takeover: true}}); err != nil {
			return nil, err
		}
	}
	inner, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	s, err := streamOf(inner, r, plugins, c)
	if err == nil && !stop() {
		_ = s.Close()
		err = context.Cause(ctx)
	}
	if err := p.End(err); err != nil {
		cancel()
		return nil, err
	}
	return &stream{s, sync.OnceFunc(cancel)}, nil
}

// streamOf opens the stream where the driver lives.
func streamOf(ctx context.Context, r *relay.Relay, plugins streamer, c relay.Call) (io.ReadWriteCloser, error) {
	if r.BuiltIn(c.Driver) {
		return r.Stream(ctx, c)
	}
	return plugins.Stream(ctx, hostCall(c))
}

// stream frees its context at its end.
type stream struct {
	io.ReadWriteCloser
	free func()
}

func (s *stream) Close() error {
	defer s.free()
	return s.ReadWriteCloser.Close()
}

// proxyKind makes one HTTP request at the site. The answer's body goes through the
// command's tunnel.
func proxyKind(p *httpproxy.Proxy) dispatch.Kind {
	return dispatch.Kind{
		Name: cmdkind.Proxy, Lane: cmdkind.Lane(cmdkind.Proxy), Roles: siteOnly,
		Decode: func(args []byte) (dispatch.Operation, error) {
			req := &agentv1.HttpProxyRequest{}
			if err := envelope.StrictUnmarshal(args, req); err != nil {
				return dispatch.Operation{}, err
			}
			if err := httpproxy.Check(req); err != nil {
				return dispatch.Operation{}, err
			}
			return dispatch.Operation{Name: "site.httpProxy", Value: req}, nil
		},
		Run: func(ctx context.Context, call dispatch.Call) ([]byte, error) {
			line := func(ctx context.Context) (io.ReadWriteCloser, error) {
				call.Release()
				return call.Tunnel(ctx)
			}
			result, err := p.Do(ctx, call.Operation.Value.(*agentv1.HttpProxyRequest), call.Secrets, line)
			if err != nil {
				return nil, err
			}
			return proto.Marshal(result)
		},
	}
}

// lineKinds are the kinds whose bytes go through tunnels.
func (s *site) lineKinds(cfg *config.Site, r *relay.Relay, plugins streamer, book *addressbook.Book) []dispatch.Kind {
	desk := console.New(console.Options{Log: s.Log.With("part", "console")})
	proxy := httpproxy.New(httpproxy.Options{
		Book: book, Networks: func() []netip.Prefix { return lanNetworks(cfg) }, Roots: s.authorities(cfg), Log: s.Log.With("part", "proxy"),
	})
	emit := func(name, class, key string, body any) error { return s.agent.Emit(name, class, key, body) }
	return []dispatch.Kind{consoleKind(r, plugins, desk, emit), proxyKind(proxy)}
}

// lanNetworks are the networks that the configuration gives the LANs.
func lanNetworks(cfg *config.Site) []netip.Prefix {
	var out []netip.Prefix
	for _, l := range cfg.LAN {
		out = append(out, l.Address.Masked())
	}
	return out
}
