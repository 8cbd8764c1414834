package redfish

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"strings"

	"github.com/bmc-toolbox/bmclib/v2/bmc"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
)

const (
	providerName = "better-compute-redfish"

	rootPath     = "/redfish/v1/"
	sessionsPath = "/redfish/v1/SessionService/Sessions"
	systemsPath  = "/redfish/v1/Systems"
	managersPath = "/redfish/v1/Managers"
)

// provider is a bmclib provider: one call's use of the connection to one BMC.
type provider struct {
	*conn
	emit func(driver.Progress)
	log  *slog.Logger
	// restricted accepts a log-in that can do nothing but change its password.
	restricted bool
	// bounded: the call has a deadline of its own.
	bounded bool
	// spent: a new log-in was refused too, so that this call makes no other.
	spent bool
	etags map[string]string // of what this call has read, by path
	taken int               // bytes of what it has read
}

// What bmclib asks its providers for.
var (
	_ bmc.Opener                   = (*provider)(nil)
	_ bmc.Closer                   = (*provider)(nil)
	_ bmc.PowerStateGetter         = (*provider)(nil)
	_ bmc.PowerSetter              = (*provider)(nil)
	_ bmc.BootDeviceSetter         = (*provider)(nil)
	_ bmc.BootDeviceOverrideGetter = (*provider)(nil)
)

// Name is the provider's, in bmclib's registry.
func (p *provider) Name() string { return providerName }

// Open logs in, unless the connection's log-in of an earlier call still holds.
func (p *provider) Open(ctx context.Context) error {
	a, err := p.authorise(ctx, nil)
	if err != nil {
		return err
	}
	if a.limited && !p.restricted {
		return passwordError()
	}
	return nil
}

// Close leaves the log-in to the next call; the pool ends it.
func (p *provider) Close(context.Context) error { return nil }

// tell says to whoever waits for the call what it is at.
func (p *provider) tell(phase, message string) {
	if p.emit != nil {
		p.emit(driver.Progress{Phase: phase, Message: message})
	}
	if p.log != nil {
		p.log.Info("BMC operation", "phase", phase, "address", p.target.address, "what", message)
	}
}

// send makes one request and reads a bounded answer. path may have a query after
// a question mark. A session that the BMC has forgotten is opened once again.
func (p *provider) send(ctx context.Context, method, path string, body []byte, header http.Header) (*answer, error) {
	return p.request(ctx, request{method: method, path: path, body: body, header: header})
}

// upload is send for a body that is read once, of length bytes (-1: not known).
// Its session is proven first, for such a body cannot be sent again.
func (p *provider) upload(ctx context.Context, method, path string, body io.Reader, length int64, header http.Header) (*answer, error) {
	if _, err := p.get(ctx, p.systems()); err != nil {
		return nil, err
	}
	return p.request(ctx, request{method: method, path: path, stream: body, length: length, header: header})
}

func (p *provider) request(ctx context.Context, r request) (*answer, error) {
	r.path, r.query, _ = strings.Cut(r.path, "?")
	send := p.spelt
	if r.method == http.MethodGet {
		send = p.patiently
	}
	var err error
	if r.auth, err = p.authorise(ctx, nil); err != nil {
		return nil, err
	}
	a, err := send(ctx, r)
	if err != nil || a.status != http.StatusUnauthorized || r.auth.token == "" || p.spent || r.stream != nil {
		return a, err
	}
	before := r.auth
	if r.auth, err = p.authorise(ctx, before); err != nil {
		return nil, err
	}
	a, err = send(ctx, r)
	if p.spent = err == nil && a.status == http.StatusUnauthorized; p.spent {
		// It was not the session's fault, which may be open still.
		p.dismiss(ctx, before)
	}
	return a, err
}

// maxTaken is how much one call reads: a BMC whose every resource is as large as
// one may be would fill the memory.
const maxTaken = 64 << 20

// get reads one resource.
func (p *provider) get(ctx context.Context, path string) (object, error) {
	if p.taken > maxTaken {
		return nil, errs.New(errs.BmcError, "the BMC's answers to one operation have more than %d bytes", maxTaken)
	}
	a, err := p.send(ctx, http.MethodGet, path, nil, nil)
	if err != nil {
		return nil, err
	}
	p.taken += len(a.body)
	if a.status != http.StatusOK {
		return nil, statusError("read "+path, a)
	}
	o, err := parseObject(a.body)
	if err != nil {
		return nil, err
	}
	p.remember(path, a, o)
	return o, nil
}

// remember keeps the ETag of what was read.
func (p *provider) remember(path string, a *answer, o object) {
	etag := a.header.Get("ETag")
	if etag == "" {
		etag = o.text("@odata.etag")
	}
	if p.etags == nil || len(p.etags) > 256 {
		p.etags = map[string]string{}
	}
	p.etags[path] = etag
}

const (
	maxPages   = 64
	maxMembers = 2048
)

// members are the links of a collection, of all its pages.
func (p *provider) members(ctx context.Context, path string) ([]string, error) {
	var all []string
	err := p.pages(ctx, path, func(o object) error {
		for _, id := range o.links("Members") {
			member, err := p.resource(id)
			if err != nil {
				return err
			}
			all = append(all, member)
		}
		if len(all) > maxMembers {
			return errs.New(errs.BmcError, "%s has more than %d members", path, maxMembers)
		}
		return nil
	})
	return all, err
}

// pages reads a collection page by page, each page once.
func (p *provider) pages(ctx context.Context, path string, visit func(object) error) error {
	seen := map[string]bool{}
	for next := path; next != ""; {
		if seen[next] || len(seen) == maxPages {
			return errs.New(errs.BmcError, "%s has pages without an end", path)
		}
		seen[next] = true
		o, err := p.get(ctx, next)
		if err != nil {
			return err
		}
		if err := visit(o); err != nil {
			return err
		}
		if next = o.text("Members@odata.nextLink"); next == "" {
			break
		}
		page, query, err := p.page(next)
		if err != nil {
			return err
		}
		if next = page; query != "" {
			next += "?" + query
		}
	}
	return nil
}
