package conformance

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1/driverv1connect"
)

// startRules are about the start of a plugin and its connection.
func startRules() []Rule {
	return []Rule{
		{ID: "cookie.missing", Statement: "without BCX_MAGIC_COOKIE it says on stderr that it is a plugin and exits with 1", check: without(bcx.CookieVariable)},
		{ID: "cookie.wrong", Statement: "another cookie is no cookie", check: func(r *run) error {
			return r.refusesToStart(func(env []string, _ string) []string { return set(env, bcx.CookieVariable, "something else") })
		}},
		{ID: "host.certificate", Statement: "without a certificate in BCX_CLIENT_CERT it serves nobody", check: func(r *run) error {
			return r.mustNotServe(func(env []string, _ string) []string { return set(env, bcx.ClientCertVariable, "nonsense") })
		}},
		{ID: "environment.bare", Statement: "PATH and the three BCX variables are all that it needs", check: func(r *run) error {
			p, err := r.launch(nil)
			if err == nil {
				_, err = r.firstLine(p)
			}
			return err
		}},
		{ID: "handshake.first", Statement: "the first line on stdout is the handshake", check: onLine(func(line []byte, _ string) error {
			if !bytes.HasPrefix(line, []byte("bcx|")) {
				return fmt.Errorf("the first line is %.80q", line)
			}
			return nil
		})},
		{ID: "handshake.length", Statement: "the handshake line has at most 8 KiB and ends in a newline", check: onLine(func(line []byte, _ string) error {
			if !bytes.HasSuffix(line, []byte("\n")) || len(line) > bcx.MaxHandshake {
				return fmt.Errorf("no newline in the first %d bytes", bcx.MaxHandshake)
			}
			return nil
		})},
		{ID: "handshake.fields", Statement: "the handshake is bcx|1|unix|<socket>|grpc|<certificate>", check: onLine(func(line []byte, _ string) error {
			f := fields(line)
			if len(f) != 6 || f[0] != "bcx" || f[2] != "unix" || f[4] != "grpc" {
				return fmt.Errorf("the line has the fields %.20q", f)
			}
			return nil
		})},
		{ID: "handshake.protocol", Statement: "the handshake names protocol 1", check: onLine(func(line []byte, _ string) error {
			if f := fields(line); len(f) < 2 || f[1] != "1" {
				return fmt.Errorf("the line has the fields %.20q", f)
			}
			return nil
		})},
		{ID: "socket.place", Statement: "the socket lies directly in BCX_SOCKET_DIR", check: onLine(func(line []byte, dir string) error {
			f := fields(line)
			if len(f) < 4 || filepath.Clean(f[3]) != f[3] || filepath.Dir(f[3]) != dir {
				return fmt.Errorf("the socket of %.200q is not in %s", line, dir)
			}
			return nil
		})},
		{ID: "socket.kind", Statement: "what the handshake names is a socket of the plugin's own user", check: onLine(isSocket)},
		{ID: "socket.folder", Statement: "BCX_SOCKET_DIR keeps its mode 0700", check: onLine(func(_ []byte, dir string) error {
			st, err := os.Stat(dir)
			if err != nil {
				return err
			}
			if st.Mode().Perm() != 0o700 {
				return fmt.Errorf("the folder's mode is %v", st.Mode().Perm())
			}
			return nil
		})},
		{ID: "socket.limit", Statement: "a socket path of more than 107 bytes is refused, not cut", check: func(r *run) error {
			return r.mustNotServe(func(env []string, dir string) []string {
				long := filepath.Join(dir, strings.Repeat("d", bcx.MaxSocketPath))
				_ = os.Mkdir(long, 0o700)
				return set(env, bcx.SocketDirVariable, long)
			})
		}},
		{ID: "socket.ready", Statement: "the socket takes connections once the handshake is out", check: onLine(func(line []byte, _ string) error {
			f := fields(line)
			if len(f) < 4 {
				return errors.New("no handshake")
			}
			c, err := net.Dial("unix", f[3])
			if err != nil {
				return err
			}
			return c.Close()
		})},
		{ID: "listen.only", Statement: "it listens on that socket and nowhere else", check: listensOnly},
		{ID: "certificate.key", Statement: "its certificate has a P-256 key", check: onCertificate(func(c *x509.Certificate) error {
			if k, ok := c.PublicKey.(*ecdsa.PublicKey); !ok || k.Curve != elliptic.P256() {
				return fmt.Errorf("the key is a %T", c.PublicKey)
			}
			return nil
		})},
		{ID: "certificate.self", Statement: "its certificate is signed by its own key", check: onCertificate(func(c *x509.Certificate) error {
			return c.CheckSignature(c.SignatureAlgorithm, c.RawTBSCertificate, c.Signature)
		})},
		{ID: "certificate.clock", Statement: "its certificate holds from 1970 to 9999, since clocks step", check: onCertificate(func(c *x509.Certificate) error {
			if c.NotBefore.After(time.Unix(0, 0)) || c.NotAfter.Year() < 9999 {
				return fmt.Errorf("it holds from %v to %v", c.NotBefore, c.NotAfter)
			}
			return nil
		})},
		{ID: "certificate.fresh", Statement: "each start has a key of its own", check: func(r *run) error {
			a, err := r.fresh()
			if err != nil {
				return err
			}
			b, err := r.fresh()
			if err != nil {
				return err
			}
			ca, err := x509.ParseCertificate(a.handshake.Certificate)
			if err != nil {
				return err
			}
			cb, err := x509.ParseCertificate(b.handshake.Certificate)
			if err != nil {
				return err
			}
			if bytes.Equal(ca.RawSubjectPublicKeyInfo, cb.RawSubjectPublicKeyInfo) {
				return errors.New("two starts have the same key")
			}
			return nil
		}},
		{ID: "certificate.served", Statement: "it serves exactly the certificate of its handshake", check: func(r *run) error {
			return r.talk(func(c *tls.Config) {}, func(*tls.Conn) error { return nil })
		}},
		{ID: "tls.version", Statement: "TLS 1.3 and nothing older", check: func(r *run) error {
			if err := r.talk(func(c *tls.Config) { c.MinVersion = tls.VersionTLS13 }, func(*tls.Conn) error { return nil }); err != nil {
				return err
			}
			err := r.talk(func(c *tls.Config) { c.MinVersion, c.MaxVersion = tls.VersionTLS12, tls.VersionTLS12 }, func(*tls.Conn) error { return nil })
			if err == nil {
				return errors.New("a host that speaks TLS 1.2 only got through")
			}
			return nil
		}},
		{ID: "tls.protocol", Statement: "HTTP/2 by ALPN, and not HTTP/1.1", check: func(r *run) error {
			err := r.talk(func(c *tls.Config) { c.NextProtos = []string{"h2", "http/1.1"} }, func(c *tls.Conn) error {
				if p := c.ConnectionState().NegotiatedProtocol; p != "h2" {
					return fmt.Errorf("it chose %q where h2 was offered", p)
				}
				return nil
			})
			if err != nil {
				return err
			}
			chosen := ""
			_ = r.talk(func(c *tls.Config) { c.NextProtos = []string{"http/1.1"} }, func(c *tls.Conn) error {
				chosen = c.ConnectionState().NegotiatedProtocol
				return nil
			})
			if chosen == "http/1.1" {
				return errors.New("it takes HTTP/1.1")
			}
			return nil
		}},
		{ID: "client.none", Statement: "a host without a certificate is refused", check: func(r *run) error {
			return r.refused(nil)
		}},
		{ID: "client.other", Statement: "a host with a certificate of another key is refused", check: func(r *run) error {
			other, err := newIdentity()
			if err != nil {
				return err
			}
			return r.refused(other)
		}},
		{ID: "client.reissued", Statement: "another certificate of the host's own key is refused", check: func(r *run) error {
			other, err := r.self.reissued()
			if err != nil {
				return err
			}
			return r.refused(other)
		}},
		{ID: "connection.again", Statement: "a host that drops its connection can make another", check: func(r *run) error {
			p, err := r.alive()
			if err != nil {
				return err
			}
			p.conn.transport.CloseIdleConnections()
			return r.answers(p)
		}},
		{ID: "connection.garbage", Statement: "bytes that are no TLS end that connection and nothing else", check: func(r *run) error {
			p, err := r.alive()
			if err != nil {
				return err
			}
			c, err := net.Dial("unix", p.handshake.Socket)
			if err != nil {
				return err
			}
			defer c.Close()
			if _, err := io.WriteString(c, strings.Repeat("garbage\x00\xff\n", 100)); err != nil {
				return err
			}
			_ = c.SetReadDeadline(time.Now().Add(r.o.Patience))
			if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
				return errors.New("the connection stays open")
			}
			return r.answers(p)
		}},
		{ID: "connection.silent", Statement: "a connection that says nothing holds up no other", check: func(r *run) error {
			p, err := r.fresh()
			if err != nil {
				return err
			}
			c, err := net.Dial("unix", p.handshake.Socket)
			if err != nil {
				return err
			}
			defer c.Close()
			return r.answers(p)
		}},
		{ID: "client.cleartext", Statement: "HTTP/2 without TLS is refused", check: func(r *run) error {
			p, err := r.plugin()
			if err != nil {
				return err
			}
			protocols := new(http.Protocols)
			protocols.SetUnencryptedHTTP2(true)
			transport := &http.Transport{Protocols: protocols, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", p.handshake.Socket)
			}}
			defer transport.CloseIdleConnections()
			client := driverv1connect.NewDriverPluginClient(&http.Client{Transport: transport}, "http://bcx", connect.WithGRPC())
			ctx, cancel := r.wait()
			defer cancel()
			if _, err := client.Describe(ctx, connect.NewRequest(&driverv1.DescribeRequest{})); err == nil {
				return errors.New("a call of Describe was answered in the clear")
			}
			return nil
		}},
	}
}

func fields(line []byte) []string {
	return strings.Split(strings.TrimSuffix(string(line), "\n"), "|")
}

func set(env []string, name, value string) []string {
	env = slices.DeleteFunc(env, func(e string) bool { return strings.HasPrefix(e, name+"=") })
	return append(env, name+"="+value)
}

func without(name string) func(*run) error {
	return func(r *run) error {
		return r.refusesToStart(func(env []string, _ string) []string {
			return slices.DeleteFunc(env, func(e string) bool { return strings.HasPrefix(e, name+"=") })
		})
	}
}

// refusesToStart wants what a person sees who starts a plugin by hand.
func (r *run) refusesToStart(change func([]string, string) []string) error {
	p, err := r.launch(change)
	if err != nil {
		return err
	}
	if err := r.stopped(p); err != nil {
		return err
	}
	if code := p.cmd.ProcessState.ExitCode(); code != 1 {
		return fmt.Errorf("it ended with code %d: want 1", code)
	}
	p.drain.Wait()
	if line := <-p.line; bytes.HasPrefix(line, []byte("bcx|")) {
		return fmt.Errorf("it printed a handshake: %.80q", line)
	}
	if !strings.Contains(strings.ToLower(p.said()), "plugin") {
		return fmt.Errorf("stderr does not say that it is a plugin: %.200q", p.said())
	}
	return nil
}

// mustNotServe wants a plugin to end with an error and without a handshake.
func (r *run) mustNotServe(change func([]string, string) []string) error {
	p, err := r.launch(change)
	if err != nil {
		return err
	}
	ctx, cancel := r.wait()
	defer cancel()
	select {
	case line := <-p.line:
		if bytes.HasPrefix(line, []byte("bcx|")) {
			return fmt.Errorf("it printed a handshake: %.80q", line)
		}
	case <-ctx.Done():
		return fmt.Errorf("it still runs after %v", r.o.Patience)
	}
	if err := r.stopped(p); err != nil {
		return err
	}
	if p.cmd.ProcessState.ExitCode() == 0 {
		return errors.New("it ended with code 0")
	}
	return nil
}

// stopped waits for the process to end, whatever its code.
func (r *run) stopped(p *process) error {
	ctx, cancel := r.wait()
	defer cancel()
	select {
	case <-p.exited:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("it still runs after %v", r.o.Patience)
	}
}

func onLine(check func(line []byte, dir string) error) func(*run) error {
	return func(r *run) error {
		p, err := r.launch(nil)
		if err != nil {
			return err
		}
		line, err := r.firstLine(p)
		if err != nil {
			return err
		}
		return check(line, p.dir)
	}
}

func onCertificate(check func(*x509.Certificate) error) func(*run) error {
	return onLine(func(line []byte, _ string) error {
		f := fields(line)
		der, err := base64.RawStdEncoding.Strict().DecodeString(f[len(f)-1])
		if err != nil {
			return fmt.Errorf("the certificate is not raw base64: %w", err)
		}
		c, err := x509.ParseCertificate(der)
		if err != nil {
			return fmt.Errorf("read the certificate: %w", err)
		}
		return check(c)
	})
}

func isSocket(line []byte, _ string) error {
	f := fields(line)
	if len(f) < 4 {
		return errors.New("no handshake")
	}
	st, err := os.Lstat(f[3])
	if err != nil {
		return err
	}
	if st.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("%s has the mode %v", f[3], st.Mode())
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok && int(sys.Uid) != os.Geteuid() {
		return fmt.Errorf("%s belongs to uid %d", f[3], sys.Uid)
	}
	return nil
}

// talk opens a TLS connection to a plugin and hands it to check.
func (r *run) talk(change func(*tls.Config), check func(*tls.Conn) error) error {
	p, err := r.plugin()
	if err != nil {
		return err
	}
	raw, err := net.Dial("unix", p.handshake.Socket)
	if err != nil {
		return err
	}
	defer raw.Close()
	config := p.tls(&r.self.Certificate)
	change(config)
	ctx, cancel := r.wait()
	defer cancel()
	c := tls.Client(raw, config)
	if err := c.HandshakeContext(ctx); err != nil {
		return fmt.Errorf("TLS handshake: %w", err)
	}
	// The server speaks first in HTTP/2: what it refuses shows here.
	_ = c.SetReadDeadline(time.Now().Add(r.o.Patience))
	if _, err := io.WriteString(c, http2Preface); err != nil {
		return fmt.Errorf("open HTTP/2: %w", err)
	}
	if _, err := c.Read(make([]byte, 1)); err != nil {
		return fmt.Errorf("open HTTP/2: %w", err)
	}
	return check(c)
}

// http2Preface is how a client opens HTTP/2: its magic and an empty SETTINGS frame.
const http2Preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"

// refused wants Describe answered to the host, and not to another one.
func (r *run) refused(other *identity) error {
	p, err := r.plugin()
	if err != nil {
		return err
	}
	ctx, cancel := r.wait()
	defer cancel()
	if _, err := p.conn.describe(ctx); err != nil {
		return fmt.Errorf("the host itself is refused: %w", err)
	}
	var cert *tls.Certificate
	if other != nil {
		cert = &other.Certificate
	}
	c := p.dial(cert)
	defer c.transport.CloseIdleConnections()
	if _, err := c.describe(ctx); err == nil {
		return errors.New("a call of Describe was answered")
	} else if ctx.Err() != nil {
		return errors.New("the connection was neither answered nor ended")
	}
	return nil
}

// answers wants Describe answered on a new connection.
func (r *run) answers(p *process) error {
	c := p.dial(&r.self.Certificate)
	defer c.transport.CloseIdleConnections()
	ctx, cancel := r.wait()
	defer cancel()
	_, err := c.describe(ctx)
	return err
}

// endRules are about how a plugin ends and what it logs.
func endRules() []Rule {
	return []Rule{
		{ID: "end.sigterm", Statement: "SIGTERM ends it with code 0 within 5 s", check: func(r *run) error {
			p, err := r.alive()
			if err != nil {
				return err
			}
			if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
				return err
			}
			return r.end(p)
		}},
		{ID: "end.stdin", Statement: "the end of stdin ends it with code 0 within 5 s", check: func(r *run) error {
			p, err := r.alive()
			if err != nil {
				return err
			}
			p.stdin.Close()
			return r.end(p)
		}},
		{ID: "end.sigint", Statement: "SIGINT does not end it: the host decides", check: func(r *run) error {
			p, err := r.alive()
			if err != nil {
				return err
			}
			if err := p.cmd.Process.Signal(syscall.SIGINT); err != nil {
				return err
			}
			ctx, cancel := r.wait()
			defer cancel()
			// A signal is taken at the next return to the process; several calls give it the time.
			for range 10 {
				if _, err := p.conn.describe(ctx); err != nil {
					return err
				}
				time.Sleep(10 * time.Millisecond)
			}
			return nil
		}},
		{ID: "end.orphan", Statement: "it ends when its host is gone and nobody reads its pipes", check: func(r *run) error {
			p, err := r.alive()
			if err != nil {
				return err
			}
			p.conn.transport.CloseIdleConnections()
			p.out.Close()
			p.err.Close()
			p.stdin.Close()
			timer := time.NewTimer(bcx.ShutdownGrace)
			defer timer.Stop()
			select {
			case <-p.exited:
				return nil
			case <-timer.C:
				return fmt.Errorf("it still runs after %v", bcx.ShutdownGrace)
			}
		}},
		{ID: "end.call", Statement: "SIGTERM lets a call in flight end", Driver: true, check: func(r *run) error {
			return r.endDuring(func(p *process) error { return p.cmd.Process.Signal(syscall.SIGTERM) })
		}},
		{ID: "end.callstdin", Statement: "the end of stdin lets a call in flight end", Driver: true, check: func(r *run) error {
			return r.endDuring(func(p *process) error { return p.stdin.Close() })
		}},
		{ID: "log.json", Statement: "what it writes on stderr is JSON, an object a line", check: func(r *run) error {
			p, err := r.alive()
			if err != nil {
				return err
			}
			p.stdin.Close()
			if err := r.stopped(p); err != nil {
				return err
			}
			p.drain.Wait()
			for line := range strings.Lines(p.said()) {
				var object map[string]any
				if json.Unmarshal([]byte(line), &object) != nil {
					return fmt.Errorf("a line is %.200q", line)
				}
			}
			return nil
		}},
		{ID: "log.driver", Statement: "what a driver logs arrives on stderr as a JSON line", Driver: true, check: func(r *run) error {
			const message = "a line of the conformance suite"
			p, err := r.plugin()
			if err != nil {
				return err
			}
			if _, err := r.result("log", `["`+message+`"]`); err != nil {
				return err
			}
			ctx, cancel := r.wait()
			defer cancel()
			for {
				for line := range strings.Lines(p.said()) {
					var object map[string]any
					if strings.Contains(line, message) && json.Unmarshal([]byte(line), &object) == nil {
						return nil
					}
				}
				select {
				case <-ctx.Done():
					return errors.New("no JSON line with the message came")
				case <-time.After(5 * time.Millisecond):
				}
			}
		}},
	}
}

// alive is a process of the rule's own that has answered once.
func (r *run) alive() (*process, error) {
	p, err := r.fresh()
	if err != nil {
		return nil, err
	}
	ctx, cancel := r.wait()
	defer cancel()
	_, err = p.conn.describe(ctx)
	return p, err
}

func (r *run) endDuring(stop func(*process) error) error {
	p, err := r.alive()
	if err != nil {
		return err
	}
	stopped := false
	// Long enough for a signal to arrive on a busy machine, and well within the grace.
	a := r.call(p, request("sleep", `[1500]`), func(*driverv1.Progress) {
		if !stopped {
			stopped = true
			err = stop(p)
		}
	})
	if err != nil {
		return err
	}
	if !stopped {
		return errors.New("the operation said nothing before it ended")
	}
	if err := a.is(`"slept"`); err != nil {
		return err
	}
	p.conn.transport.CloseIdleConnections()
	return r.end(p)
}
