package conformance_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1/driverv1connect"
	"github.com/better-compute/site-appliance/plugins/conformance"
	"github.com/better-compute/site-appliance/plugins/conformance/reference"
	"github.com/better-compute/site-appliance/plugins/sdk"
)

// inProcess names the rules that are broken by how the process starts, listens
// and ends; the others are broken by what tampers alters on the wire.
var inProcess = []string{
	"cookie.missing", "cookie.wrong", "host.certificate", "environment.bare",
	"handshake.first", "handshake.length", "handshake.fields", "handshake.protocol",
	"socket.place", "socket.kind", "socket.folder", "socket.limit", "socket.ready", "listen.only",
	"certificate.key", "certificate.self", "certificate.clock", "certificate.fresh", "certificate.served",
	"tls.version", "tls.protocol", "client.none", "client.other", "client.reissued", "client.cleartext",
	"connection.again", "connection.garbage", "connection.silent",
	"end.sigterm", "end.stdin", "end.sigint", "end.orphan", "end.call", "end.callstdin", "log.json", "log.driver",
	"message.request", "message.large",
}

func breakerIDs() []string { return append(slices.Collect(maps.Keys(tampers())), inProcess...) }

// breaker is a plugin that keeps every rule but one.
func breaker(broken string) int {
	is := func(id string) bool { return id == broken }
	switch cookie := os.Getenv(bcx.CookieVariable); {
	case cookie == bcx.Cookie:
	case cookie == "" && is("cookie.missing"), cookie != "" && is("cookie.wrong"):
		return 0
	default:
		fmt.Fprintln(os.Stderr, "I am a plugin")
		return 1
	}
	if is("environment.bare") && os.Getenv("HOME") == "" {
		return 1
	}
	block, _ := pem.Decode([]byte(os.Getenv(bcx.ClientCertVariable)))
	if block == nil && !is("host.certificate") {
		return 1
	}
	var host *x509.Certificate
	if block != nil {
		var err error
		if host, err = x509.ParseCertificate(block.Bytes); err != nil {
			return 1
		}
	}
	dir := os.Getenv(bcx.SocketDirVariable)
	path := filepath.Join(dir, "x.sock")
	if is("socket.place") {
		path = filepath.Join(dir, "deep", "x.sock")
		_ = os.Mkdir(filepath.Join(dir, "deep"), 0o700)
	}
	cert := certificate(broken)
	// With a second certificate the handshake shows one and TLS serves the other.
	shown := cert.Certificate[0]
	if is("certificate.served") {
		shown = certificate("").Certificate[0]
	}
	line := fmt.Sprintf("bcx|1|unix|%s|grpc|%s\n", path, base64.RawStdEncoding.EncodeToString(shown))
	if len(path) > bcx.MaxSocketPath {
		if is("socket.limit") {
			fmt.Print(line)
			_, _ = io.Copy(io.Discard, os.Stdin)
		}
		return 1
	}
	switch broken {
	case "handshake.first":
		line = "acme driver 1.0\n" + line
	case "handshake.length":
		line = strings.TrimSuffix(line, "\n") + strings.Repeat("A", bcx.MaxHandshake) + "\n"
	case "handshake.fields":
		line = strings.Replace(line, "|grpc|", "|netrpc|", 1)
	case "handshake.protocol":
		line = strings.Replace(line, "bcx|1|", "bcx|2|", 1)
	case "log.json":
		fmt.Fprintln(os.Stderr, "acme driver starts")
	}
	if is("socket.ready") {
		fmt.Print(line)
		_, _ = io.Copy(io.Discard, os.Stdin)
		return 0
	}
	if is("socket.kind") {
		if err := os.Symlink(filepath.Join(dir, "real.sock"), path); err != nil {
			return 1
		}
		path = filepath.Join(dir, "real.sock")
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return 1
	}
	if is("listen.only") {
		other, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return 1
		}
		defer other.Close()
	}
	if is("socket.folder") {
		_ = os.Chmod(dir, 0o755)
	}

	log := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	if is("log.driver") {
		log = slog.New(slog.DiscardHandler)
	}
	d, err := reference.Driver()
	if err != nil {
		return 1
	}
	handler, err := sdk.NewHandler(sdk.Options{PluginVersion: "test", Log: log}, d)
	if err != nil {
		return 1
	}
	limit := bcx.MaxMessage
	switch broken {
	case "message.request":
		limit = 64 << 20
	case "message.large":
		limit = 8 << 20
	}
	mux := http.NewServeMux()
	tampering := tampers()[broken]
	if is("stuck") {
		// A stream that has neither its error nor its end.
		tampering = opens(func(m *driverv1.InvokeRequest) { m.ArgsJson = "" })
	}
	if is("tardy") {
		// The right word, once the operation that ignores its deadline is over.
		tampering = tamper{send: func(c *tampered, m any, send func(any) error) error {
			if r, ok := m.(*driverv1.InvokeResponse); ok && r.GetError().GetCode() == "timeout" {
				time.Sleep(3 * time.Second)
			}
			return send(m)
		}}
	}
	mux.Handle(driverv1connect.NewDriverPluginHandler(handler, connect.WithReadMaxBytes(limit), connect.WithInterceptors(tampering)))
	protocols := new(http.Protocols)
	protocols.SetHTTP2(true)
	protocols.SetHTTP1(is("tls.protocol"))
	server := &http.Server{Handler: mux, TLSConfig: serverTLS(broken, cert, host), Protocols: protocols, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelInfo)}
	if strings.HasPrefix(broken, "connection.") {
		listener = &narrow{Listener: listener, broken: broken}
	}
	if is("client.cleartext") {
		listener = alsoClear(listener, mux)
	}
	// A signal may come as soon as the handshake is out.
	ended := make(chan string, 4)
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGPIPE)
	go server.ServeTLS(listener, "", "")
	fmt.Print(line)

	go func() {
		for s := range signals {
			if s == syscall.SIGTERM && !is("end.sigterm") || s == syscall.SIGINT && is("end.sigint") {
				ended <- "signal"
			}
		}
	}()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		if is("end.orphan") {
			if _, err := fmt.Fprintln(os.Stderr, `{"msg":"the host is gone"}`); err != nil {
				// Who waits for a reader waits for ever.
				select {}
			}
		}
		if !is("end.stdin") {
			ended <- "stdin"
		}
	}()
	why := <-ended
	if is("end.call") && why == "signal" || is("end.callstdin") && why == "stdin" {
		return 0
	}
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Second)
	defer cancel()
	_ = server.Shutdown(ctx)
	return 0
}

// certificate is the plugin's own.
func certificate(broken string) tls.Certificate {
	curve := elliptic.P256()
	if broken == "certificate.key" {
		curve = elliptic.P384()
	}
	key, err := ecdsa.GenerateKey(curve, rand.Reader)
	if err != nil {
		panic(err)
	}
	if broken == "certificate.fresh" {
		if key, err = ecdsa.ParseRawPrivateKey(curve, bytes.Repeat([]byte{7}, 32)); err != nil {
			panic(err)
		}
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "bcx"}, DNSNames: []string{"bcx"},
		NotBefore: time.Unix(0, 0), NotAfter: time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC),
	}
	if broken == "certificate.clock" {
		template.NotBefore, template.NotAfter = time.Now(), time.Now().AddDate(1, 0, 0)
	}
	signer := key
	if broken == "certificate.self" {
		if signer, err = ecdsa.GenerateKey(curve, rand.Reader); err != nil {
			panic(err)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), signer)
	if err != nil {
		panic(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func serverTLS(broken string, cert tls.Certificate, host *x509.Certificate) *tls.Config {
	c := &tls.Config{
		Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS13, NextProtos: []string{"h2"}, ClientAuth: tls.RequestClientCert,
	}
	switch broken {
	case "tls.version":
		c.MinVersion = tls.VersionTLS12
	case "tls.protocol":
		c.NextProtos = []string{"h2", "http/1.1"}
	}
	c.VerifyConnection = func(cs tls.ConnectionState) error {
		if host == nil {
			return nil
		}
		if len(cs.PeerCertificates) == 0 {
			if broken == "client.none" {
				return nil
			}
			return errors.New("no certificate")
		}
		peer := cs.PeerCertificates[0]
		sameKey := bytes.Equal(peer.RawSubjectPublicKeyInfo, host.RawSubjectPublicKeyInfo)
		switch {
		case bytes.Equal(peer.Raw, host.Raw):
			return nil
		case sameKey && broken == "client.reissued", !sameKey && broken == "client.other":
			return nil
		}
		return errors.New("another certificate")
	}
	return c
}

// narrow accepts connections as a plugin that thinks of one well-behaved host only.
type narrow struct {
	net.Listener
	broken string
	taken  int
}

func (n *narrow) Accept() (net.Conn, error) {
	for {
		c, err := n.Listener.Accept()
		if err != nil {
			return nil, err
		}
		n.taken++
		switch n.broken {
		case "connection.again":
			if n.taken > 1 {
				c.Close()
				continue
			}
		case "connection.silent":
			r := bufio.NewReader(c)
			if _, err := r.Peek(1); err != nil {
				continue
			}
			return peeked{c, r}, nil
		case "connection.garbage":
			if n.taken > 1 {
				return peeked{c, bufio.NewReader(&fatal{Conn: c})}, nil
			}
		}
		return c, nil
	}
}

// fatal ends the process when the first byte is none of TLS.
type fatal struct {
	net.Conn
	begun bool
}

func (f *fatal) Read(b []byte) (int, error) {
	n, err := f.Conn.Read(b)
	if n > 0 && !f.begun && b[0] == 'g' {
		os.Exit(1)
	}
	f.begun = f.begun || n > 0
	return n, err
}

// alsoClear serves cleartext HTTP/2 beside TLS, by a connection's first byte.
func alsoClear(l net.Listener, handler http.Handler) net.Listener {
	ended := make(chan struct{})
	encrypted, clear := &queue{l, make(chan net.Conn), ended}, &queue{l, make(chan net.Conn), ended}
	go func() {
		defer close(ended)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				r := bufio.NewReader(c)
				first, err := r.Peek(1)
				if err != nil {
					c.Close()
					return
				}
				to := encrypted
				if first[0] == 'P' {
					to = clear
				}
				to.conns <- peeked{c, r}
			}()
		}
	}()
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	go (&http.Server{Handler: handler, Protocols: protocols}).Serve(clear)
	return encrypted
}

type queue struct {
	net.Listener
	conns chan net.Conn
	ended chan struct{}
}

func (q *queue) Accept() (net.Conn, error) {
	select {
	case c := <-q.conns:
		return c, nil
	case <-q.ended:
		return nil, net.ErrClosed
	}
}

type peeked struct {
	net.Conn
	r *bufio.Reader
}

func (p peeked) Read(b []byte) (int, error) { return p.r.Read(b) }

// tamper alters messages on their way. Its fields may be nil.
type tamper struct {
	in, out func(message any)
	// send stands in for the sending of one message.
	send func(c *tampered, message any, send func(any) error) error
	// receive stands in for the end of a receive.
	receive func(c *tampered, message any, err error) error
	context func(ctx context.Context, procedure string) context.Context
	around  func(next func() error) error
}

// tampered is one call's connection.
type tampered struct {
	connect.StreamingHandlerConn
	tamper
	cancel   context.CancelFunc
	request  *driverv1.InvokeRequest
	received int
	kept     []any
}

func (t tamper) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		if t.in != nil {
			t.in(req.Any())
		}
		res, err := next(ctx, req)
		if err == nil && t.out != nil {
			t.out(res.Any())
		}
		return res, err
	}
}

func (t tamper) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (t tamper) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		if t.context != nil {
			ctx = t.context(ctx, conn.Spec().Procedure)
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		c := &tampered{StreamingHandlerConn: conn, tamper: t, cancel: cancel}
		if t.around != nil {
			return t.around(func() error { return next(ctx, c) })
		}
		return next(ctx, c)
	}
}

func (c *tampered) Receive(m any) error {
	err := c.StreamingHandlerConn.Receive(m)
	c.received++
	if r, ok := m.(*driverv1.InvokeRequest); ok && err == nil {
		c.request = proto.Clone(r).(*driverv1.InvokeRequest)
	}
	if err == nil && c.in != nil {
		c.in(m)
	}
	if c.receive != nil {
		return c.receive(c, m, err)
	}
	return err
}

func (c *tampered) Send(m any) error {
	if c.out != nil {
		c.out(m)
	}
	if c.send != nil {
		return c.send(c, m, c.StreamingHandlerConn.Send)
	}
	return c.StreamingHandlerConn.Send(m)
}

// The makers of tampers: what is altered, by its type.
func invokes(f func(*driverv1.InvokeRequest), operations ...string) tamper {
	return tamper{in: func(m any) {
		if r, ok := m.(*driverv1.InvokeRequest); ok && (len(operations) == 0 || slices.Contains(operations, r.Operation)) {
			f(r)
		}
	}}
}

func opens(f func(*driverv1.InvokeRequest)) tamper {
	return tamper{in: func(m any) {
		if r, ok := m.(*driverv1.StreamRequest); ok && r.GetOpen() != nil {
			f(r.GetOpen())
		}
	}}
}

func validating(f func(*driverv1.ValidateRequest)) tamper {
	return tamper{in: func(m any) {
		if r, ok := m.(*driverv1.ValidateRequest); ok {
			f(r)
		}
	}}
}

func validated(f func(*driverv1.ValidateResponse)) tamper {
	return tamper{out: func(m any) {
		if r, ok := m.(*driverv1.ValidateResponse); ok {
			f(r)
		}
	}}
}

func describes(f func(*driverv1.DescribeResponse)) tamper {
	return tamper{out: func(m any) {
		if r, ok := m.(*driverv1.DescribeResponse); ok {
			f(r)
		}
	}}
}

func manifests(f func(*driverv1.DescribedDriver)) tamper {
	return describes(func(r *driverv1.DescribeResponse) { f(r.Drivers[0]) })
}

func results(f func(*driverv1.Result)) tamper {
	return tamper{out: func(m any) {
		if r, ok := m.(*driverv1.InvokeResponse); ok && r.GetResult() != nil {
			f(r.GetResult())
		}
	}}
}

func failures(message string, f func(*driverv1.Error)) tamper {
	return tamper{out: func(m any) {
		if r, ok := m.(*driverv1.InvokeResponse); ok && strings.HasPrefix(r.GetError().GetMessage(), message) && r.GetError() != nil {
			f(r.GetError())
		}
	}}
}

func streams(f func(*driverv1.StreamResponse)) tamper {
	return tamper{out: func(m any) {
		if r, ok := m.(*driverv1.StreamResponse); ok {
			f(r)
		}
	}}
}

// deaf hides from one procedure's operations that their call ended.
func deaf(procedure string) func(context.Context, string) context.Context {
	return func(ctx context.Context, called string) context.Context {
		if called == procedure {
			return context.WithoutCancel(ctx)
		}
		return ctx
	}
}

// also names what a breaker cannot but break beside its own rule.
var also = map[string][]string{
	"describe.drivers": {"invoke.driver", "invoke.kind", "invoke.operation"}, // they call the first driver
	"manifest.builtin": {"invoke.operation"},                                 // they call the driver by the id it gives
	"result.once":      {"result.null"},                                      // nothing can be read from two results
	"stream.open":      {"stream.bytes", "stream.close", "stream.again", "stream.fail", "stream.cancel"},
}

// tampers break a rule each, by what they alter on the wire.
func tampers() map[string]tamper {
	var one sync.Mutex
	var versions int
	remembered := map[string]string{}
	good := false
	return map[string]tamper{
		"describe.protocol": describes(func(r *driverv1.DescribeResponse) { r.Protocol = 2 }),
		"describe.drivers":  describes(func(r *driverv1.DescribeResponse) { r.Drivers = nil }),
		"describe.once":     describes(func(r *driverv1.DescribeResponse) { r.Drivers = append(r.Drivers, r.Drivers[0]) }),
		"describe.stable": describes(func(r *driverv1.DescribeResponse) {
			versions++
			r.Drivers[0].Manifest.Version = fmt.Sprintf("1.0.%d", versions)
		}),
		"manifest.form": manifests(func(d *driverv1.DescribedDriver) { d.Manifest.Version = "" }),
		"manifest.operations": manifests(func(d *driverv1.DescribedDriver) {
			d.Manifest.RetrySafeOperations = append(d.Manifest.RetrySafeOperations, "power.getPower")
		}),
		"manifest.schema":  manifests(func(d *driverv1.DescribedDriver) { d.Manifest.ConfigSchemaJson = `{"type":7}` }),
		"manifest.builtin": manifests(func(d *driverv1.DescribedDriver) { d.Manifest.Id = "redfish" }),
		"health.answer": {out: func(m any) {
			if h, ok := m.(*driverv1.HealthResponse); ok {
				h.Status = driverv1.HealthResponse_STATUS_NOT_SERVING
			}
		}},

		"invoke.driver":    invokes(func(m *driverv1.InvokeRequest) { m.Driver = conformance.DriverID }),
		"invoke.kind":      invokes(func(m *driverv1.InvokeRequest) { m.Kind = conformance.DriverID }),
		"invoke.operation": invokes(func(m *driverv1.InvokeRequest) { m.Operation = "nothing" }, "noSuchOperation"),
		"validate.driver": validating(func(m *driverv1.ValidateRequest) {
			if m.Driver != conformance.DriverID {
				m.Driver = conformance.DriverID
			}
		}),

		"args.array": invokes(func(m *driverv1.InvokeRequest) {
			if strings.HasPrefix(m.ArgsJson, `["a"`) {
				m.ArgsJson = "[" + m.ArgsJson + "]"
			}
		}, "echo"),
		"args.single": invokes(func(m *driverv1.InvokeRequest) {
			if !strings.HasPrefix(m.ArgsJson, "[") {
				m.ArgsJson = ""
			}
		}, "echo"),
		"args.absent": invokes(func(m *driverv1.InvokeRequest) {
			if m.ArgsJson == "" {
				m.ArgsJson = `[{}]`
			}
		}, "echo"),
		"args.trailing": invokes(func(m *driverv1.InvokeRequest) { m.ArgsJson = strings.Replace(m.ArgsJson, ",null]", ",0]", 1) }),
		"args.json": invokes(func(m *driverv1.InvokeRequest) {
			if m.ArgsJson == "[1" {
				m.ArgsJson = "[1]"
			}
		}),
		"result.json": results(func(r *driverv1.Result) {
			if strings.Contains(r.ResultJson, "ä") {
				r.ResultJson = "ok: " + r.ResultJson
			}
		}),
		"result.null": {send: func(c *tampered, m any, send func(any) error) error {
			if r, ok := m.(*driverv1.InvokeResponse); ok && c.request.GetOperation() == "nothing" {
				r.GetResult().ResultJson = ""
			}
			return send(m)
		}},
		"result.once": {send: func(c *tampered, m any, send func(any) error) error {
			if err := send(m); err != nil || c.request.GetOperation() != "nothing" {
				return err
			}
			return send(m)
		}},
		"progress.order": {out: func(m any) {
			if r, ok := m.(*driverv1.InvokeResponse); ok && r.GetProgress().GetDone() == 3 {
				r.GetProgress().Done = 2
			}
		}},
		"progress.live": {send: func(c *tampered, m any, send func(any) error) error {
			if r, ok := m.(*driverv1.InvokeResponse); ok && r.GetProgress() != nil && strings.HasPrefix(c.request.GetArgsJson(), `"live`) {
				c.kept = append(c.kept, m)
				return nil
			}
			for _, k := range c.kept {
				if err := send(k); err != nil {
					return err
				}
			}
			return send(m)
		}},
		"call.parallel": {around: func(next func() error) error {
			one.Lock()
			defer one.Unlock()
			return next()
		}},
		"call.context": invokes(func(m *driverv1.InvokeRequest) { m.TargetNodeId = "" }),
		"call.cancel":  {context: deaf(driverv1connect.DriverPluginInvokeProcedure)},
		"deadline.kept": invokes(func(m *driverv1.InvokeRequest) {
			if m.ArgsJson == "[600000]" {
				m.DeadlineMs = 0
			}
		}, "sleep"),
		"deadline.ignored": invokes(func(m *driverv1.InvokeRequest) { m.DeadlineMs = 0 }, "ignoreDeadline"),
		"deadline.past": invokes(func(m *driverv1.InvokeRequest) {
			if m.DeadlineMs < time.Now().Add(-time.Second).UnixMilli() {
				m.DeadlineMs = 0
			}
		}, "sleep"),
		"deadline.none": invokes(func(m *driverv1.InvokeRequest) {
			if m.ArgsJson == "[0]" {
				m.DeadlineMs = max(m.DeadlineMs, 1)
			}
		}, "sleep"),
		// What a timer of 31 bits makes of a deadline years away.
		"deadline.far": invokes(func(m *driverv1.InvokeRequest) {
			if time.Until(time.UnixMilli(m.DeadlineMs)) > 25*24*time.Hour {
				m.DeadlineMs = time.Now().UnixMilli()
			}
		}),
		"secret.delivered": invokes(func(m *driverv1.InvokeRequest) { m.Secrets = nil }),
		"secret.undelivered": invokes(func(m *driverv1.InvokeRequest) {
			if m.Secrets != nil {
				m.Secrets["secret://root/other"] = "from elsewhere"
			}
		}),
		"secret.scope": invokes(func(m *driverv1.InvokeRequest) {
			maps.Copy(remembered, m.Secrets)
			m.Secrets = remembered
		}, "secret"),
		"error.own":       failures("fan 3", func(e *driverv1.Error) { e.Code = "driver-error" }),
		"error.plain":     failures("the fan fell off", func(e *driverv1.Error) { e.Message = "something went wrong" }),
		"error.compute":   failures("no fan", func(e *driverv1.Error) { e.Code = "INVALID_CONFIG" }),
		"error.form":      failures("fan 4", func(e *driverv1.Error) { e.Code = "Fan Stuck" }),
		"error.unsafe":    failures("later", func(e *driverv1.Error) { e.Retryable = true }),
		"error.retrysafe": failures("", func(e *driverv1.Error) { e.Retryable = false }),
		"config.parsed":   invokes(func(m *driverv1.InvokeRequest) { m.ConfigJson = strings.Replace(m.ConfigJson, `:5`, `:6`, 1) }),
		"config.defaults": results(func(r *driverv1.Result) { r.ResultJson = strings.Replace(r.ResultJson, `"hello"`, `""`, 1) }),
		"config.types":    invokes(func(m *driverv1.InvokeRequest) { m.ConfigJson = strings.Replace(m.ConfigJson, `:7`, `:"7"`, 1) }),
		"config.unknown": invokes(func(m *driverv1.InvokeRequest) {
			m.ConfigJson = strings.Replace(m.ConfigJson, "greetings", "greeting", 1)
		}),
		"config.json": invokes(func(m *driverv1.InvokeRequest) {
			if m.ConfigJson == "{" {
				m.ConfigJson = "{}"
			}
		}),
		"validate.good": {
			in: func(m any) {
				if v, ok := m.(*driverv1.ValidateRequest); ok {
					good = strings.Contains(v.ConfigJson, "hi")
				}
			},
			out: func(m any) {
				if v, ok := m.(*driverv1.ValidateResponse); ok && good {
					v.Error = &driverv1.Error{Code: "driver-error"}
				}
			},
		},
		"validate.bad": validated(func(r *driverv1.ValidateResponse) {
			if r.GetError().GetCode() == "invalid-config" {
				r.Error = nil
			}
		}),
		"validate.live": validating(func(m *driverv1.ValidateRequest) {
			if strings.Contains(m.ConfigJson, "token") {
				m.ConfigJson = "{}"
			}
		}),
		"validate.deadline": validating(func(m *driverv1.ValidateRequest) { m.DeadlineMs = 0 }),
		"message.result": {out: func(m any) {
			if r, ok := m.(*driverv1.InvokeResponse); ok && strings.HasPrefix(r.GetError().GetMessage(), "the result has") {
				r.Event = &driverv1.InvokeResponse_Result{Result: &driverv1.Result{ResultJson: `"` + strings.Repeat("x", bcx.MaxMessage) + `"`}}
			}
		}},
		"print.harmless": {send: func(c *tampered, m any, send func(any) error) error {
			if c.request.GetOperation() == "print" {
				os.Exit(1)
			}
			return send(m)
		}},

		"stream.listed": manifests(func(d *driverv1.DescribedDriver) { d.StreamOperations = nil }),
		"stream.open": streams(func(r *driverv1.StreamResponse) {
			if d, ok := r.GetFrame().(*driverv1.StreamResponse_Data); ok && len(d.Data) == 0 {
				d.Data = []byte("welcome")
			}
		}),
		"stream.bytes": streams(func(r *driverv1.StreamResponse) {
			if d, ok := r.GetFrame().(*driverv1.StreamResponse_Data); ok {
				d.Data = bytes.ReplaceAll(d.Data, []byte{'\n'}, []byte{'\r'})
			}
		}),
		"stream.close": {send: func(_ *tampered, m any, send func(any) error) error {
			if r, ok := m.(*driverv1.StreamResponse); ok && r.GetClose() != nil {
				return nil
			}
			return send(m)
		}},
		"stream.first": {receive: func(c *tampered, m any, err error) error {
			if r, ok := m.(*driverv1.StreamRequest); ok && len(r.GetData()) > 0 && c.received == 1 {
				r.Frame = &driverv1.StreamRequest_Open{Open: &driverv1.InvokeRequest{
					Driver: conformance.DriverID, Kind: conformance.DriverID, Operation: "pipe",
				}}
			}
			return err
		}},
		"stream.again": {receive: func(c *tampered, m any, err error) error {
			if r, ok := m.(*driverv1.StreamRequest); ok && r.GetOpen() != nil && c.received > 1 {
				r.Frame = &driverv1.StreamRequest_Close{}
			}
			return err
		}},
		"stream.driver":    opens(func(m *driverv1.InvokeRequest) { m.Driver = conformance.DriverID }),
		"stream.operation": opens(func(m *driverv1.InvokeRequest) { m.Operation = "pipe" }),
		"stream.invoke":    invokes(func(m *driverv1.InvokeRequest) { m.Operation = "nothing" }, "pipe"),
		"stream.config":    opens(func(m *driverv1.InvokeRequest) { m.ConfigJson = "{}" }),
		"stream.args":      opens(func(m *driverv1.InvokeRequest) { m.ArgsJson = strings.TrimSuffix(m.ArgsJson, "{") }),
		"stream.refuse": streams(func(r *driverv1.StreamResponse) {
			if r.GetError().GetCode() == "line-busy" {
				r.Frame = &driverv1.StreamResponse_Data{}
			}
		}),
		"stream.fail": streams(func(r *driverv1.StreamResponse) {
			if r.GetError().GetCode() == "line-lost" {
				r.Frame = &driverv1.StreamResponse_Close{}
			}
		}),
		"stream.deadline": opens(func(m *driverv1.InvokeRequest) { m.DeadlineMs = 0 }),
		"stream.lifetime": {receive: func(c *tampered, m any, err error) error {
			if r, ok := m.(*driverv1.StreamRequest); ok && r.GetOpen().GetDeadlineMs() != 0 && r.GetOpen().GetArgsJson() == "" {
				time.AfterFunc(time.Until(time.UnixMilli(r.GetOpen().GetDeadlineMs())), c.cancel)
			}
			return err
		}},
		"stream.cancel": {context: deaf(driverv1connect.DriverPluginStreamProcedure), receive: func(_ *tampered, m any, err error) error {
			if _, ok := m.(*driverv1.StreamRequest); ok && err != nil {
				return io.EOF
			}
			return err
		}},
	}
}
