package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/computev1/computev1connect"
	"github.com/better-compute/site-appliance/appliance/base/printable"
)

// clientEnv names the file with a client's settings, where --client does not.
const clientEnv = "BETTER_COMPUTE_CLIENT"

// clientSettings say how to reach a gateway. Paths are relative to their file.
type clientSettings struct {
	url, caFile, tokenFile, tenant string
}

// parseClient reads lines of key = "value" strictly; # begins a comment line.
func parseClient(name string, data []byte) (clientSettings, error) {
	s := clientSettings{tenant: "default"}
	into := map[string]*string{"url": &s.url, "ca_file": &s.caFile, "token_file": &s.tokenFile, "tenant": &s.tenant}
	seen := map[string]bool{}
	n := 0
	for line := range strings.Lines(string(data)) {
		n++
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		key, quoted, ok := strings.Cut(line, "=")
		key = strings.TrimSpace(key)
		value, err := strconv.Unquote(strings.TrimSpace(quoted))
		switch {
		case !ok || err != nil:
			return clientSettings{}, fmt.Errorf("%s:%d: want key = \"value\"", name, n)
		case into[key] == nil:
			return clientSettings{}, fmt.Errorf("%s:%d: unknown key %q", name, n, key)
		case seen[key]:
			return clientSettings{}, fmt.Errorf("%s:%d: key %q is given twice", name, n, key)
		}
		seen[key] = true
		*into[key] = value
	}
	for _, key := range []string{"url", "ca_file", "token_file"} {
		if *into[key] == "" {
			return clientSettings{}, fmt.Errorf("%s: key %q is missing", name, key)
		}
	}
	if u, err := url.Parse(s.url); err != nil || u.Scheme != "https" || u.Host == "" {
		return clientSettings{}, fmt.Errorf("%s: url %q: want https://HOST:PORT", name, s.url)
	}
	dir := filepath.Dir(name)
	for _, path := range []*string{&s.caFile, &s.tokenFile} {
		if !filepath.IsAbs(*path) {
			*path = filepath.Join(dir, *path)
		}
	}
	return s, nil
}

// client talks to a gateway's API.
type client struct {
	http    *http.Client
	url     string
	tenant  string
	options []connect.ClientOption
}

// dial reads the settings; it connects at the first call.
func dial(file, tenant string) (*client, error) {
	if file == "" {
		file = os.Getenv(clientEnv)
	}
	if file == "" {
		file = "client.toml"
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read client settings (--client FILE or $%s): %w", clientEnv, err)
	}
	settings, err := parseClient(file, data)
	if err != nil {
		return nil, fmt.Errorf("read client settings: %w", err)
	}
	ca, err := os.ReadFile(settings.caFile)
	if err != nil {
		return nil, fmt.Errorf("read the gateway's CA: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("read the gateway's CA: %s holds no certificate", settings.caFile)
	}
	token, err := os.ReadFile(settings.tokenFile)
	if err != nil {
		return nil, fmt.Errorf("read the API token: %w", err)
	}
	bearer := "Bearer " + strings.TrimSpace(string(token))
	if tenant == "" {
		tenant = settings.tenant
	}
	return &client{
		url: strings.TrimSuffix(settings.url, "/"), tenant: tenant,
		http: &http.Client{
			Transport: &http.Transport{
				TLSClientConfig:     &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS13},
				ForceAttemptHTTP2:   true,
				TLSHandshakeTimeout: 15 * time.Second,
			},
			CheckRedirect: func(*http.Request, []*http.Request) error { return errors.New("the gateway does not redirect") },
		},
		options: []connect.ClientOption{connect.WithInterceptors(&authorize{bearer})},
	}, nil
}

// authorize puts the token on every call.
type authorize struct{ bearer string }

func (a *authorize) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		req.Header().Set("Authorization", a.bearer)
		return next(ctx, req)
	}
}

func (a *authorize) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, spec)
		conn.RequestHeader().Set("Authorization", a.bearer)
		return conn
	}
}

func (a *authorize) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

func (c *client) sites() computev1connect.SiteServiceClient {
	return computev1connect.NewSiteServiceClient(c.http, c.url, c.options...)
}
func (c *client) pools() computev1connect.PoolServiceClient {
	return computev1connect.NewPoolServiceClient(c.http, c.url, c.options...)
}
func (c *client) secrets() computev1connect.SecretServiceClient {
	return computev1connect.NewSecretServiceClient(c.http, c.url, c.options...)
}
func (c *client) metal() computev1connect.MetalServiceClient {
	return computev1connect.NewMetalServiceClient(c.http, c.url, c.options...)
}
func (c *client) pxe() computev1connect.PxeServiceClient {
	return computev1connect.NewPxeServiceClient(c.http, c.url, c.options...)
}
func (c *client) drivers() computev1connect.DriverServiceClient {
	return computev1connect.NewDriverServiceClient(c.http, c.url, c.options...)
}
func (c *client) placement() computev1connect.PlacementServiceClient {
	return computev1connect.NewPlacementServiceClient(c.http, c.url, c.options...)
}
func (c *client) workflows() computev1connect.WorkflowServiceClient {
	return computev1connect.NewWorkflowServiceClient(c.http, c.url, c.options...)
}
func (c *client) artifacts() computev1connect.ArtifactServiceClient {
	return computev1connect.NewArtifactServiceClient(c.http, c.url, c.options...)
}
func (c *client) isos() computev1connect.IsoServiceClient {
	return computev1connect.NewIsoServiceClient(c.http, c.url, c.options...)
}
func (c *client) boots() computev1connect.BootServiceClient {
	return computev1connect.NewBootServiceClient(c.http, c.url, c.options...)
}
func (c *client) grants() computev1connect.GrantServiceClient {
	return computev1connect.NewGrantServiceClient(c.http, c.url, c.options...)
}
func (c *client) events() computev1connect.EventServiceClient {
	return computev1connect.NewEventServiceClient(c.http, c.url, c.options...)
}

// call makes one call and takes the answer out of its wrapping.
func call[Req, Res any](ctx context.Context, f func(context.Context, *connect.Request[Req]) (*connect.Response[Res], error), req *Req) (*Res, error) {
	res, err := f(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, plain(err)
	}
	return res.Msg, nil
}

// plain is what a person reads: the gateway's message begins with its own code.
func plain(err error) error {
	var ce *connect.Error
	if errors.As(err, &ce) && connect.IsWireError(err) {
		return &callError{ce}
	}
	if connect.CodeOf(err) == connect.CodeCanceled {
		return fmt.Errorf("interrupted: what was sent may still be done, better-compute events shows it (%w)", err)
	}
	return err
}

// callError prints without the transport's code, and keeps it.
type callError struct{ wire *connect.Error }

func (e *callError) Error() string { return e.wire.Message() }
func (e *callError) Unwrap() error { return e.wire }

// flags is a flag set that lets options stand before and behind the arguments,
// with those that every call of the API has.
type flags struct {
	*flag.FlagSet
	std                          stdio
	usage, about, client, tenant string
	json                         bool
	needed                       []string
}

func newFlags(usage string, std stdio) *flags {
	f := &flags{FlagSet: flag.NewFlagSet(usage, flag.ContinueOnError), usage: usage, std: std}
	f.SetOutput(io.Discard) // parse says what is to be said
	return f
}

// newCall is newFlags with the options of a call.
func newCall(usage string, std stdio) *flags {
	f := newFlags(usage, std)
	f.StringVar(&f.client, "client", "", "`file` with the client's settings (default $"+clientEnv+", else ./client.toml)")
	f.StringVar(&f.tenant, "tenant", "", "tenant (default: the settings', else \"default\")")
	f.BoolVar(&f.json, "json", false, "print the answer as JSON")
	return f
}

// help prints what the command does and every option.
func (f *flags) help() {
	fmt.Fprintf(f.std.out, "usage: better-compute %s\n", f.usage)
	if f.about != "" {
		fmt.Fprintf(f.std.out, "\n%s\n\n", f.about)
	}
	f.SetOutput(f.std.out)
	f.PrintDefaults()
}

// parse wants low to high arguments. Its error is flag.ErrHelp where help was
// asked for and printed.
func (f *flags) parse(args []string, low, high int) ([]string, error) {
	var out []string
	for {
		if err := f.Parse(args); errors.Is(err, flag.ErrHelp) {
			f.help()
			return nil, err
		} else if err != nil {
			return nil, fmt.Errorf("%w; usage: better-compute %s", err, f.usage)
		}
		rest := f.Args()
		if len(rest) == 0 {
			break
		}
		if n := len(args) - len(rest); n > 0 && args[n-1] == "--" {
			out = append(out, rest...)
			break
		}
		out, args = append(out, rest[0]), rest[1:]
	}
	if len(out) < low || len(out) > high {
		return nil, fmt.Errorf("usage: better-compute %s", f.usage)
	}
	var missing []string
	for _, name := range f.needed {
		if f.Lookup(name).Value.String() == "" {
			missing = append(missing, "--"+name)
		}
	}
	if len(missing) > 0 {
		return nil, fmt.Errorf("missing: %s; usage: better-compute %s", strings.Join(missing, ", "), f.usage)
	}
	return out, nil
}

// need names options that parse refuses to do without.
func (f *flags) need(names ...string) { f.needed = names }

// begin parses and reads the client's settings.
func (f *flags) begin(args []string, low, high int) ([]string, *client, error) {
	rest, err := f.parse(args, low, high)
	if err != nil {
		return nil, nil, err
	}
	c, err := dial(f.client, f.tenant)
	return rest, c, err
}

// strings collects a flag that may be given several times.
type stringList []string

func (l *stringList) String() string     { return strings.Join(*l, ",") }
func (l *stringList) Set(s string) error { *l = append(*l, s); return nil }

// printJSON prints a message as indented JSON.
func printJSON(w io.Writer, m proto.Message) error {
	data, err := protojson.MarshalOptions{Multiline: true, Indent: "  ", UseProtoNames: true}.Marshal(m)
	if err != nil {
		return fmt.Errorf("print: %w", err)
	}
	_, err = fmt.Fprintf(w, "%s\n", data)
	return err
}

// printTable prints rows under a head, in columns.
func printTable(w io.Writer, head string, rows [][]string) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, strings.ReplaceAll(head, " ", "\t"))
	for _, row := range rows {
		for i, cell := range row {
			row[i] = clean(cell)
		}
		fmt.Fprintln(tw, strings.Join(row, "\t"))
	}
	return tw.Flush()
}

// clean keeps what a far end said from steering the terminal.
func clean(s string) string {
	if s == "" {
		return "-"
	}
	return printable.Text(s, '·')
}

func clock(ms int64) string {
	if ms == 0 {
		return "-"
	}
	return time.UnixMilli(ms).UTC().Format("2006-01-02T15:04:05.000Z")
}

// readInput reads a file, or standard input for "" and "-", of at most limit bytes.
func readInput(std stdio, path string, limit int64) ([]byte, error) {
	in := std.in
	if path != "" && path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		in = f
	}
	data, err := io.ReadAll(io.LimitReader(in, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(data)) > limit {
		return nil, fmt.Errorf("the input is longer than %d bytes", limit)
	}
	return data, nil
}
