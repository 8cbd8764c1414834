package conformance

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1/driverv1connect"
)

// run is one pass over the rules.
type run struct {
	ctx  context.Context
	argv []string
	o    Options
	self *identity

	// shared takes the calls of all rules that need no start of their own.
	shared *process
	// extra are the processes of the rule that is being checked.
	extra []*process
	// served keeps whether the plugin serves the driver DriverID.
	served *bool
}

// process is one start of the plugin.
type process struct {
	cmd   *exec.Cmd
	dir   string
	stdin io.WriteCloser
	// out and err are our ends of its stdout and stderr.
	out, err *os.File
	exited   chan struct{}
	ended    error

	line  chan []byte // the first line of stdout, cut at the limit
	drain sync.WaitGroup

	mu     sync.Mutex
	stderr bytes.Buffer

	handshake bcx.Handshake
	conn      *conn
}

// conn is a connection to a plugin under one certificate.
type conn struct {
	driverv1connect.DriverPluginClient
	transport *http.Transport
	dials     atomic.Int32
}

// keepStderr bounds what is kept of a plugin's stderr.
const keepStderr = 1 << 20

// environment is all that a host must give a plugin.
func (r *run) environment(dir string) []string {
	return append([]string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		bcx.CookieVariable + "=" + bcx.Cookie,
		bcx.SocketDirVariable + "=" + dir,
		bcx.ClientCertVariable + "=" + r.self.pem(),
	}, r.o.Env...)
}

// launch executes the plugin; change may alter its environment.
func (r *run) launch(change func(env []string, dir string) []string) (*process, error) {
	dir, err := os.MkdirTemp("", "bcx")
	if err != nil {
		return nil, fmt.Errorf("make socket folder: %w", err)
	}
	p := &process{dir: dir, exited: make(chan struct{}), line: make(chan []byte, 1)}
	env := r.environment(dir)
	if change != nil {
		env = change(env, dir)
	}
	p.cmd = exec.Command(r.argv[0], r.argv[1:]...)
	p.cmd.Env = env
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.start(); err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	r.extra = append(r.extra, p)
	return p, nil
}

func (p *process) start() error {
	stdin, err := p.cmd.StdinPipe()
	if err != nil {
		return err
	}
	p.stdin = stdin
	var theirs [2]*os.File
	if p.out, theirs[0], err = os.Pipe(); err != nil {
		return err
	}
	if p.err, theirs[1], err = os.Pipe(); err != nil {
		return err
	}
	p.cmd.Stdout, p.cmd.Stderr = theirs[0], theirs[1]
	err = p.cmd.Start()
	theirs[0].Close()
	theirs[1].Close()
	if err != nil {
		p.out.Close()
		p.err.Close()
		return fmt.Errorf("start the plugin: %w", err)
	}
	p.drain.Go(p.readOut)
	p.drain.Go(p.readErr)
	go func() {
		p.ended = p.cmd.Wait()
		close(p.exited)
	}()
	return nil
}

func (p *process) readOut() {
	r := bufio.NewReaderSize(p.out, bcx.MaxHandshake+1)
	line, _ := r.ReadSlice('\n')
	p.line <- bytes.Clone(line)
	_, _ = io.Copy(io.Discard, r)
}

func (p *process) readErr() {
	buf := make([]byte, 4096)
	for {
		n, err := p.err.Read(buf)
		p.mu.Lock()
		if p.stderr.Len() < keepStderr {
			p.stderr.Write(buf[:n])
		}
		p.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// said is what the plugin wrote on stderr so far.
func (p *process) said() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stderr.String()
}

// firstLine waits for the first line of stdout.
func (r *run) firstLine(p *process) ([]byte, error) {
	ctx, cancel := r.wait()
	defer cancel()
	select {
	case line := <-p.line:
		if len(line) == 0 {
			return nil, fmt.Errorf("stdout ended without a handshake line%s", p.hint())
		}
		return line, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("no handshake line in %v%s", r.o.Patience, p.hint())
	}
}

// hint is the last thing that a plugin said, for the reason of a failure.
func (p *process) hint() string {
	lines := strings.Split(strings.TrimSpace(p.said()), "\n")
	if last := lines[len(lines)-1]; last != "" {
		return fmt.Sprintf("; it said %.200q", last)
	}
	return ""
}

// fresh starts the plugin and connects to it.
func (r *run) fresh() (*process, error) {
	p, err := r.launch(nil)
	if err != nil {
		return nil, err
	}
	line, err := r.firstLine(p)
	if err != nil {
		return nil, err
	}
	if p.handshake, err = bcx.ParseHandshake(line, p.dir); err != nil {
		return nil, err
	}
	p.conn = p.dial(&r.self.Certificate)
	return p, nil
}

// plugin is the shared process, started anew if it ended.
func (r *run) plugin() (*process, error) {
	if r.shared != nil && !r.shared.gone() {
		return r.shared, nil
	}
	p, err := r.fresh()
	if err != nil {
		return nil, err
	}
	r.extra = slices.DeleteFunc(r.extra, func(e *process) bool { return e == p })
	if r.shared != nil {
		r.extra = append(r.extra, r.shared)
	}
	r.shared = p
	return p, nil
}

func (p *process) gone() bool {
	select {
	case <-p.exited:
		return true
	default:
		return false
	}
}

// dial makes a connection under cert, or under none.
func (p *process) dial(cert *tls.Certificate) *conn {
	protocols := new(http.Protocols)
	protocols.SetHTTP2(true)
	c := &conn{}
	c.transport = &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			c.dials.Add(1)
			return new(net.Dialer).DialContext(ctx, "unix", p.handshake.Socket)
		},
		TLSClientConfig: p.tls(cert), Protocols: protocols, DisableCompression: true, TLSHandshakeTimeout: bcx.StartTimeout,
	}
	c.DriverPluginClient = driverv1connect.NewDriverPluginClient(&http.Client{Transport: prompt{c.transport}}, "https://bcx", connect.WithGRPC())
	return c
}

// prompt cancels a request at once. Once the answer has begun, http.Transport
// itself looks at the request's context only when the request's body has ended.
type prompt struct{ *http.Transport }

func (t prompt) RoundTrip(req *http.Request) (*http.Response, error) {
	if body := req.Body; body != nil {
		context.AfterFunc(req.Context(), func() { _ = body.Close() })
	}
	return t.Transport.RoundTrip(req)
}

func (p *process) tls(cert *tls.Certificate) *tls.Config {
	config := &tls.Config{
		NextProtos: []string{"h2"}, ServerName: "bcx",
		// The rule is the leaf's bytes, which VerifyConnection compares.
		InsecureSkipVerify: true,
		VerifyConnection: func(cs tls.ConnectionState) error {
			if len(cs.PeerCertificates) == 0 || !bytes.Equal(cs.PeerCertificates[0].Raw, p.handshake.Certificate) {
				return errOtherCertificate
			}
			return nil
		},
	}
	if cert != nil {
		config.Certificates = []tls.Certificate{*cert}
	}
	return config
}

var errOtherCertificate = errors.New("the plugin serves another certificate than its handshake line shows")

func (c *conn) describe(ctx context.Context) (*driverv1.DescribeResponse, error) {
	answer, err := c.Describe(ctx, connect.NewRequest(&driverv1.DescribeRequest{}))
	if err != nil {
		return nil, fmt.Errorf("call Describe: %w", slow(ctx, err))
	}
	return answer.Msg, nil
}

// wait bounds one wait for the plugin. It is no deadline of the context's, which
// gRPC would tell the plugin: what a plugin keeps is the one in the request.
func (r *run) wait() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(r.ctx)
	timer := time.AfterFunc(r.o.Patience, func() { cancel(errPatience) })
	return ctx, func() {
		timer.Stop()
		cancel(nil)
	}
}

var errPatience = errors.New("the plugin did not answer in time")

// end waits for the process to end by itself with code 0.
func (r *run) end(p *process) error {
	timer := time.NewTimer(bcx.ShutdownGrace)
	defer timer.Stop()
	select {
	case <-p.exited:
	case <-timer.C:
		return fmt.Errorf("it still runs after %v", bcx.ShutdownGrace)
	case <-r.ctx.Done():
		return r.ctx.Err()
	}
	if p.ended != nil {
		return fmt.Errorf("it ended with %w%s", p.ended, p.hint())
	}
	return nil
}

// destroy ends the process, its group and its folder.
func (p *process) destroy() {
	if p.conn != nil {
		p.conn.transport.CloseIdleConnections()
	}
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	<-p.exited
	p.stdin.Close()
	// What it started may hold the pipes open.
	p.out.Close()
	p.err.Close()
	p.drain.Wait()
	os.RemoveAll(p.dir)
}

func (r *run) sweep() {
	for _, p := range r.extra {
		p.destroy()
	}
	r.extra = nil
}

func (r *run) close() {
	r.sweep()
	if r.shared != nil {
		r.shared.destroy()
		r.shared = nil
	}
}

// needsDriver skips what a plugin without the driver DriverID cannot show.
func (r *run) needsDriver() error {
	if r.served == nil {
		p, err := r.plugin()
		if err != nil {
			return err
		}
		ctx, cancel := r.wait()
		defer cancel()
		d, err := p.conn.describe(ctx)
		if err != nil {
			return err
		}
		served := false
		for _, x := range d.GetDrivers() {
			if x.GetManifest().GetId() == DriverID {
				for _, k := range x.GetManifest().GetKinds() {
					served = served || k == DriverID
				}
			}
		}
		r.served = &served
	}
	if !*r.served {
		return errSkip("the plugin serves no driver " + DriverID + " of that kind")
	}
	return nil
}

// slow is err, or that patience ran out where that is its reason.
func slow(ctx context.Context, err error) error {
	if err != nil && errors.Is(context.Cause(ctx), errPatience) {
		return errPatience
	}
	return err
}
