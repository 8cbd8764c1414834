package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
)

// maxRequestBody is what fits into a command.
const maxRequestBody = 512 << 10

func siteHTTP(ctx context.Context, args []string, std stdio) error {
	f := newCall("site http NAME URL [--method METHOD] [--header 'NAME: VALUE' …] [--body FILE] [--redirects N] [--pin HEX] [--include]", std)
	f.about = "Makes one HTTP request from the site's box to a host of its LANs that is no BMC, and prints the answer's body."
	var headers stringList
	method := f.String("method", "", "`method` (default: GET, with --body POST)")
	body := f.String("body", "", "`file` with the request's body; - is standard input")
	redirects := f.Uint("redirects", 0, "follow as many `redirects`; at most 5")
	pin := f.String("pin", "", "`hex` SHA-256 of the server's public key")
	include := f.Bool("include", false, "print status and headers before the body")
	f.Var(&headers, "header", "`header`, 'NAME: VALUE'; may be given several times. One that proves who asks, such as Authorization, holds a reference secret://TENANT/NAME to the whole value")
	rest, c, err := f.begin(args, 2, 2)
	if err != nil {
		return err
	}
	req := &computev1.SiteHttpProxyRequest{TenantId: c.tenant, Site: rest[0], Url: rest[1], Method: *method, Redirects: uint32(*redirects), TlsSpkiSha256: *pin}
	for _, h := range headers {
		name, value, ok := strings.Cut(h, ":")
		if !ok {
			return fmt.Errorf("--header %s: want NAME: VALUE", clean(name))
		}
		req.Headers = append(req.Headers, &computev1.SiteHttpHeader{Name: strings.TrimSpace(name), Value: strings.TrimSpace(value)})
	}
	if *body != "" {
		if req.Body, err = readInput(std, *body, maxRequestBody); err != nil {
			return fmt.Errorf("read the body: %w", err)
		}
	}
	switch {
	case req.Method != "":
	case *body != "":
		req.Method = "POST"
	default:
		req.Method = "GET"
	}
	stream, err := c.sites().HttpProxy(ctx, connect.NewRequest(req))
	if err != nil {
		return plain(err)
	}
	defer stream.Close()
	out := std.out
	if isTerminal(out) {
		out = cleaner{out}
	}
	status, first := uint32(0), true
	for stream.Receive() {
		m := stream.Msg()
		if first {
			status, first = m.Status, false
			if *include {
				fmt.Fprintf(std.out, "HTTP %d\n", m.Status)
				for _, h := range m.Headers {
					fmt.Fprintf(std.out, "%s: %s\n", clean(h.GetName()), clean(h.GetValue()))
				}
				fmt.Fprintln(std.out)
			}
		}
		if _, err := out.Write(m.Data); err != nil {
			return err
		}
	}
	if err := stream.Err(); err != nil {
		return plain(err)
	}
	if status >= 400 {
		return fmt.Errorf("the server answered %d", status)
	}
	return nil
}

// cleaner keeps what a far end said from steering the terminal; lines stay.
type cleaner struct{ w io.Writer }

func (c cleaner) Write(p []byte) (int, error) {
	plain := strings.Map(func(r rune) rune {
		if r < ' ' && r != '\n' && r != '\t' || r == 0x7f || r >= 0x80 && r < 0xa0 || r == utf8.RuneError {
			return '.'
		}
		return r
	}, string(p))
	if _, err := io.WriteString(c.w, plain); err != nil {
		return 0, err
	}
	return len(p), nil
}
