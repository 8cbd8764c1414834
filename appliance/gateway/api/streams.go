package api

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"hash"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/placement"
	"github.com/better-compute/site-appliance/appliance/gateway/secretstore"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/appliance/gateway/tunnel"
)

// Tunnels pairs people's streams with what agents open for their commands.
type Tunnels interface {
	Expect(commandID string) (*tunnel.Ticket, error)
}

const (
	// outcomeWithin is how long a command may take to tell its outcome after its tunnel
	// ended, and to be told that nobody waits any more.
	outcomeWithin = 10 * time.Second
	// maxHead bounds what comes before the body of a proxied answer.
	maxHead = 256 << 10
	// streamChunk bounds the bytes of one message to a person.
	streamChunk = 32 << 10
)

// bounded ends ctx with the caller's token: a stream outlives the check at its start.
func bounded(ctx context.Context, now time.Time) (context.Context, context.CancelFunc) {
	p, ok := ctx.Value(principalKey{}).(principal)
	if !ok || p.token.Expires.IsZero() {
		return context.WithCancel(ctx)
	}
	return context.WithTimeoutCause(ctx, p.token.Expires.Sub(now), apierr.Unauthenticated("the bearer token has expired"))
}

// throughTunnel sends one command and has use carry its bytes; the command's
// outcome is answered. When use returns an error, or the person leaves, the
// command is cancelled.
func (a *API) throughTunnel(ctx context.Context, spec commands.Spec, started func(id string), use func(conn *tunnel.Conn) error) (result []byte, err error) {
	if a.Tunnels == nil || a.CancelCommand == nil {
		return nil, errs.New(errs.UnsupportedOperation, "this gateway carries no streams")
	}
	spec.ID = a.Store.NewID("cmd")
	ticket, err := a.Tunnels.Expect(spec.ID)
	if err != nil {
		return nil, err
	}
	defer ticket.Close()
	if _, err := a.Commands.Submit(ctx, spec); err != nil {
		return nil, err
	}
	ended := false
	defer func() {
		if ended {
			return
		}
		late, cancel := context.WithTimeout(context.WithoutCancel(ctx), outcomeWithin)
		defer cancel()
		if err := a.CancelCommand(late, spec.ID); err != nil {
			a.Log.Warn("command not cancelled", "command", spec.ID, "err", err)
		}
	}()
	started(spec.ID)

	type end struct {
		outcome commands.Outcome
		err     error
	}
	waiting, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	done := make(chan end, 1)
	go func() {
		o, err := a.Commands.Wait(waiting, spec.ID)
		done <- end{o, err}
	}()
	outcome := func(e end) ([]byte, error) {
		ended = true
		switch {
		case e.err != nil:
			return nil, e.err
		case e.outcome.Err != nil:
			return nil, e.outcome.Err
		}
		return e.outcome.Result, nil
	}
	var conn *tunnel.Conn
	select {
	case conn = <-ticket.Opened():
	case e := <-done:
		result, err := outcome(e)
		if err == nil {
			err = errs.New(errs.Internal, "the command ended without its tunnel")
		}
		return result, err
	case <-ticket.Ended():
		return nil, ticket.Why()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	used := make(chan error, 1)
	go func() { used <- use(conn) }()
	select {
	case err = <-used:
	case <-ctx.Done():
		// What use waits for ends with the tunnel.
		conn.CloseWith(errs.New(errs.Cancelled, "the person left"))
		<-used
		return nil, context.Cause(ctx)
	}
	if err == nil {
		conn.CloseWith(nil)
	} else {
		conn.CloseWith(errs.From(err))
	}
	select {
	case <-ticket.Ended():
		return nil, ticket.Why() // the gateway stops
	default:
	}
	timer := time.NewTimer(outcomeWithin)
	defer timer.Stop()
	select {
	case e := <-done:
		result, oerr := outcome(e)
		// The command knows better why its tunnel ended.
		if oerr != nil {
			return nil, oerr
		}
		return result, err
	case <-timer.C:
	case <-ctx.Done():
	}
	if err == nil {
		err = errs.Retry(errs.Unreachable, "the bytes ended, and the command told no outcome")
	}
	return nil, err
}

// box is the site's agent, which must be there now.
func (a *API) box(ctx context.Context, siteID string) (store.Agent, error) {
	box, enrolled, err := a.siteAgent(ctx, siteID)
	switch {
	case err != nil:
		return store.Agent{}, err
	case !enrolled:
		return store.Agent{}, errs.Retry(errs.Unavailable, "the site's box has not enrolled yet")
	case !a.Online(box.ID):
		return store.Agent{}, errs.Retry(errs.Unavailable, "the site's box is offline")
	}
	return box, nil
}

// Console carries a machine's serial console, until either side leaves.
func (s metalService) Console(ctx context.Context, stream *connect.BidiStream[computev1.ConsoleRequest, computev1.ConsoleResponse]) error {
	first, err := stream.Receive()
	if err != nil {
		return apierr.Invalid("no request came")
	}
	open := first.GetOpen()
	if open == nil {
		return apierr.Invalid("the first request must open the console")
	}
	if err := checkTenant(ctx, open.TenantId); err != nil {
		return err
	}
	ctx, cancel := bounded(ctx, s.Store.Now())
	defer cancel()
	m, err := s.Store.Machine(ctx, open.TenantId, open.Machine)
	if err != nil {
		return err
	}
	box, err := s.box(ctx, m.SiteID)
	if err != nil {
		return err
	}
	labels, err := s.Store.AgentLabels(ctx, box.ID)
	if err != nil {
		return err
	}
	c, err := metal.ConsoleCommand(m, placement.Kinds(labels, m.BMC.Driver), open.Takeover, open.HistoryBytes)
	if err != nil {
		return err
	}
	var id string
	_, err = s.throughTunnel(ctx, commands.Spec{AgentID: box.ID, TargetNodeID: m.ID, Kind: c.Kind, Lane: c.Lane, Args: c.Args, SecretRefs: c.SecretRefs, Timeout: c.Timeout, Traceparent: traceparent()},
		func(command string) {
			id = command
			s.audit(ctx, m.SiteID, m.ID, "console.requested", map[string]string{"command": id, "takeover": strconv.FormatBool(open.Takeover)})
		},
		func(conn *tunnel.Conn) error {
			// The empty message says that the console is open.
			if err := stream.Send(&computev1.ConsoleResponse{}); err != nil {
				return err
			}
			// It ends with the handler at the latest, and then with the stream.
			go fromPerson(stream, conn)
			return toPerson(conn, func(data []byte) error { return stream.Send(&computev1.ConsoleResponse{Data: data}) })
		})
	s.audit(ctx, m.SiteID, m.ID, "console.left", map[string]string{"command": id, "code": string(errs.CodeOf(err))})
	return err
}

// fromPerson hands on what a person types, and closes when the person leaves.
func fromPerson(stream *connect.BidiStream[computev1.ConsoleRequest, computev1.ConsoleResponse], conn *tunnel.Conn) {
	for {
		m, err := stream.Receive()
		if err == nil {
			if _, ok := m.Request.(*computev1.ConsoleRequest_Data); !ok {
				conn.CloseWith(errs.New(errs.InvalidArgs, "a request after the first must be data"))
				return
			}
			_, err = conn.Write(m.GetData())
		}
		if err != nil {
			conn.CloseWith(nil)
			return
		}
	}
}

// toPerson sends what comes through the tunnel until it ends; a plain end is nil.
func toPerson(conn io.Reader, send func([]byte) error) error {
	buf := make([]byte, streamChunk)
	for {
		n, err := conn.Read(buf)
		if n > 0 {
			if err := send(buf[:n]); err != nil {
				return errs.New(errs.Cancelled, "the person left: %v", err)
			}
		}
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrClosedPipe):
			return nil
		case err != nil:
			return err
		}
	}
}

// proving are the headers that say who asks.
var proving = []string{"Authorization", "Cookie", "X-Api-Key", "X-Auth-Token"}

// ownSecret wants a reference to a secret of the tenant that is there.
func (a *API) ownSecret(ctx context.Context, tenantID, ref string) error {
	tenant, err := secretstore.TenantOf(ref)
	switch {
	case err != nil:
		return apierr.Invalid("a header's value is no reference secret://<tenant>/<name>")
	case tenant != tenantID:
		return apierr.Denied("a header names another tenant's secret")
	}
	switch has, err := a.Secrets.Has(ctx, ref); {
	case err != nil:
		return err
	case !has:
		return apierr.Invalid("there is no secret %s", ref)
	}
	return nil
}

// HttpProxy makes one HTTP request at a site.
func (s siteService) HttpProxy(ctx context.Context, req *connect.Request[computev1.SiteHttpProxyRequest], stream *connect.ServerStream[computev1.SiteHttpProxyResponse]) error {
	in := req.Msg
	if err := checkTenant(ctx, in.TenantId); err != nil {
		return err
	}
	ctx, cancel := bounded(ctx, s.Store.Now())
	defer cancel()
	site, err := s.Store.Site(ctx, in.TenantId, in.Site)
	if err != nil {
		return err
	}
	box, err := s.box(ctx, site.ID)
	if err != nil {
		return err
	}
	request := &agentv1.HttpProxyRequest{Method: in.Method, Url: in.Url, Body: in.Body, Redirects: in.Redirects, TlsSpkiSha256: in.TlsSpkiSha256}
	var refs []string
	for _, h := range in.Headers {
		request.Headers = append(request.Headers, &agentv1.HttpHeader{Name: h.GetName(), Value: h.GetValue()})
		switch ref := h.GetValue(); {
		case strings.HasPrefix(ref, "secret://"):
			if err := s.ownSecret(ctx, in.TenantId, ref); err != nil {
				return err
			}
			refs = append(refs, ref)
		case slices.Contains(proving, http.CanonicalHeaderKey(h.GetName())):
			// A command is written down: no secret may be in it.
			return apierr.Invalid("header %s: want a reference to a secret, secret://<tenant>/<name>", h.GetName())
		}
	}
	sum, sent := sha256.New(), uint64(0)
	var id string
	raw, err := s.throughTunnel(ctx, commands.Spec{AgentID: box.ID, Kind: cmdkind.Proxy, Args: request, SecretRefs: refs, Traceparent: traceparent()},
		func(command string) { id = command },
		func(conn *tunnel.Conn) error {
			head, err := readHead(conn)
			if err != nil {
				return err
			}
			answer := &computev1.SiteHttpProxyResponse{Status: head.Status}
			for _, h := range head.Headers {
				answer.Headers = append(answer.Headers, &computev1.SiteHttpHeader{Name: h.GetName(), Value: h.GetValue()})
			}
			if err := stream.Send(answer); err != nil {
				return errs.New(errs.Cancelled, "the person left: %v", err)
			}
			return toPerson(conn, func(data []byte) error {
				sum.Write(data)
				sent += uint64(len(data))
				return stream.Send(&computev1.SiteHttpProxyResponse{Data: data})
			})
		})
	s.audit(ctx, site.ID, "", "site.proxied", map[string]string{"command": id, "method": in.Method, "url": auditURL(in.Url), "code": string(errs.CodeOf(err))})
	if err != nil {
		return err
	}
	return checkBody(raw, sent, sum)
}

// readHead reads what stands before the body: a length and a HttpProxyResult
// with status and headers.
func readHead(r io.Reader) (*agentv1.HttpProxyResult, error) {
	var size [4]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return nil, headError(err)
	}
	n := binary.BigEndian.Uint32(size[:])
	if n > maxHead {
		return nil, errs.New(errs.InvalidPayload, "the answer's head has %d bytes, limit %d", n, maxHead)
	}
	data := make([]byte, n)
	if _, err := io.ReadFull(r, data); err != nil {
		return nil, headError(err)
	}
	head := &agentv1.HttpProxyResult{}
	if err := proto.Unmarshal(data, head); err != nil {
		return nil, errs.New(errs.InvalidPayload, "the answer's head: %v", err)
	}
	return head, nil
}

func headError(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errs.New(errs.InvalidPayload, "the tunnel ended before the answer's head")
	}
	return err
}

// checkBody compares what went out with what the box says that it sent.
func checkBody(raw []byte, sent uint64, sum hash.Hash) error {
	result := &agentv1.HttpProxyResult{}
	if err := proto.Unmarshal(raw, result); err != nil {
		return errs.New(errs.InvalidPayload, "the command's result: %v", err)
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != result.BodySha256 || sent != result.BodyBytes {
		return errs.New(errs.DigestMismatch, "the body of %d bytes is not the one of %d bytes that the box sent", sent, result.BodyBytes)
	}
	return nil
}

// auditURL is a URL without what may be secret in it: user, query and fragment.
func auditURL(text string) string {
	u, err := url.Parse(text)
	if err != nil {
		return ""
	}
	return (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String()
}
