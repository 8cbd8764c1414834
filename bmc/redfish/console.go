package redfish

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	bmclib "github.com/bmc-toolbox/bmclib/v2"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// consoleOpening bounds what comes before the first byte of a console.
const consoleOpening = 40 * time.Second

// openBMCConsoles are where OpenBMC's web service has the host's console, the
// newest first.
var openBMCConsoles = []string{"/console/default", "/console0"}

// Open carries the serial console that the BMC has in its HTTPS service, until
// either side ends.
func (m *machine) Open(ctx *driver.Context, stream io.ReadWriter) error {
	return m.with(ctx, func(_ *bmclib.Client, p *provider) error { return p.console(ctx, stream) })
}

// Take is Open: everybody who has such a console open shares it, so that there is
// no session to end.
func (m *machine) Take(ctx *driver.Context, stream io.ReadWriter) error { return m.Open(ctx, stream) }

func (p *provider) console(ctx context.Context, stream io.ReadWriter) error {
	w, err := p.openConsole(ctx)
	if err != nil {
		return err
	}
	return w.carry(ctx, stream)
}

func (p *provider) openConsole(ctx context.Context) (*webSocket, error) {
	ctx, done := context.WithTimeoutCause(ctx, consoleOpening, errs.Retry(errs.Unreachable, "the BMC did not open its console within %v", consoleOpening))
	defer done()
	w, err := p.reachConsole(ctx)
	if err != nil && ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return w, err
}

func (p *provider) reachConsole(ctx context.Context) (*webSocket, error) {
	s, err := p.find(ctx)
	if err != nil {
		return nil, err
	}
	_, manager, err := p.manager(ctx)
	if err != nil {
		return nil, err
	}
	offer := readConsole(s.object, manager)
	if err := offer.refusal(); err != nil {
		return nil, err
	}
	for _, path := range openBMCConsoles {
		w, a, err := p.upgrade(ctx, path)
		switch {
		case err != nil || w != nil:
			return w, err
		case a.status != http.StatusNotFound && a.status != http.StatusMethodNotAllowed:
			return nil, consoleRefused(a)
		}
	}
	return nil, offer.nowhere("the BMC has no console in its web service")
}

// upgrade asks for the WebSocket at path; a session that has ended is opened again
// once. Neither a socket nor an error: the answer says why.
func (p *provider) upgrade(ctx context.Context, path string) (*webSocket, *answer, error) {
	auth, err := p.authorise(ctx, nil)
	if err != nil {
		return nil, nil, err
	}
	w, a, err := p.dialConsole(ctx, path, auth)
	if err != nil || w != nil || a.status != http.StatusUnauthorized || auth.token == "" || p.spent {
		return w, a, err
	}
	before := auth
	if auth, err = p.authorise(ctx, before); err != nil {
		return nil, nil, err
	}
	w, a, err = p.dialConsole(ctx, path, auth)
	if p.spent = err == nil && w == nil && a.status == http.StatusUnauthorized; p.spent {
		p.dismiss(ctx, before) // it was not the session's fault, which may be open still
	}
	return w, a, err
}

// upgraded marks a request that may leave /redfish/ for this path.
type upgraded struct{}

// dialConsole makes one attempt. The socket has a connection of its own, beside
// those that the other calls share.
func (c *conn) dialConsole(ctx context.Context, path string, auth *auth) (*webSocket, *answer, error) {
	client, err := newClient(c.target, c.legacy)
	if err != nil {
		return nil, nil, err
	}
	address := url.URL{Scheme: "https", Host: c.target.address, Path: path}
	req, err := http.NewRequestWithContext(context.WithValue(ctx, upgraded{}, path), http.MethodGet, address.String(), nil)
	if err != nil {
		return nil, nil, errs.New(errs.BmcError, "make a request: %v", err)
	}
	key := offerSocket(req.Header)
	secret := auth.token
	if secret != "" {
		req.Header.Set("X-Auth-Token", secret)
	} else {
		secret = c.revealed()
		req.SetBasicAuth(c.target.username, secret)
	}
	resp, err := client.Do(req)
	if err != nil {
		client.CloseIdleConnections()
		return nil, nil, c.failure(ctx, request{method: http.MethodGet, path: path}, err, false)
	}
	if resp.StatusCode == http.StatusSwitchingProtocols {
		w, err := acceptSocket(resp, key, secret)
		return w, nil, err
	}
	defer client.CloseIdleConnections()
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxHeader))
	if err != nil {
		return nil, nil, c.failure(ctx, request{method: http.MethodGet, path: path}, err, true)
	}
	if strings.Contains(string(data), secret) {
		data = nil // what it says would end up in an error
	}
	return nil, &answer{status: resp.StatusCode, header: resp.Header, body: data}, nil
}

// consoleRefused is an answer that is no socket.
func consoleRefused(a *answer) error {
	switch {
	case a.status == http.StatusUnauthorized:
		return errs.New(errs.BmcError, "open the console: the BMC refuses the Redfish session, though it is a new one: its firmware may open the console for its own web interface only; bind the machine's kind console to ipmi-sol where it serves IPMI")
	case a.status == http.StatusForbidden:
		return errs.New(errs.BmcError, "open the console: the BMC does not permit it to this account, which needs the right to the host console: %s", a.reason())
	case a.status/100 == 2:
		return errs.New(errs.BmcError, "open the console: the BMC answers %d, and not with a WebSocket", a.status)
	}
	return statusError("open the console", a)
}

// consoleOffer is what a BMC says of its serial console.
type consoleOffer struct {
	openBMC bool
	off     bool     // its service is switched off
	types   []string // ways to it, sorted; empty: none said
}

// readConsole reads the system's SerialConsole, and the older one of its manager.
func readConsole(system, manager object) consoleOffer {
	o := consoleOffer{openBMC: marked(system) || marked(manager)}
	add := func(name string) {
		known := slices.ContainsFunc(o.types, func(t string) bool { return strings.EqualFold(t, name) })
		if name = legible(name); name != "" && !known && len(o.types) < 8 {
			o.types = append(o.types, name)
		}
	}
	for _, holder := range []object{system, manager} {
		serial := holder.object("SerialConsole")
		on, said := serial.boolean("ServiceEnabled")
		if o.off = o.off || said && !on; said && !on {
			continue
		}
		for _, t := range serial.texts("ConnectTypesSupported") {
			add(t)
		}
		for _, t := range []string{"IPMI", "SSH", "Telnet"} {
			if on, _ := serial.object(t).boolean("ServiceEnabled"); on {
				add(t)
			}
		}
	}
	slices.Sort(o.types)
	return o
}

// marked reports whether a resource is OpenBMC's: its own additions, or its name
// for the model of a manager.
func marked(o object) bool {
	for name := range o.object("Oem") {
		if strings.EqualFold(name, "OpenBmc") {
			return true
		}
	}
	return strings.EqualFold(o.text("Model"), "OpenBmc")
}

// refusal says why there is nothing to open; nil: there may be.
func (o consoleOffer) refusal() error {
	switch {
	case o.off && len(o.types) == 0:
		return errs.New(errs.UnsupportedOperation, "the BMC's serial console is switched off (SerialConsole, ServiceEnabled)")
	case !o.openBMC:
		return o.nowhere("the BMC is no OpenBMC, which alone has a console in its web service")
	}
	return nil
}

// nowhere says which other ways there are, and which of them has a driver.
func (o consoleOffer) nowhere(why string) error {
	said := "it names no other way to its serial console"
	if len(o.types) > 0 {
		said = "its serial console is reached by " + strings.Join(o.types, ", ")
	}
	hint := "none of them is served here: neither SSH nor Telnet is"
	switch {
	case slices.ContainsFunc(o.types, func(t string) bool { return strings.EqualFold(t, "IPMI") }):
		hint = "enroll the machine with --driver console=ipmi-sol for IPMI; SSH and Telnet consoles are not served"
	case len(o.types) == 0:
		hint = "where the BMC serves IPMI's, enroll the machine with --driver console=ipmi-sol; SSH and Telnet consoles are not served"
	}
	return errs.New(errs.UnsupportedOperation, "%s; %s; %s", why, said, hint)
}
