package redfish

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net"
	"net/http"
	"net/netip"
	"net/textproto"
	"net/url"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// maxImage is the largest firmware image.
const maxImage = 2 << 30

// image is firmware that was fetched and has the digest that was asked for.
type image struct {
	file *os.File
	size int64
	name string
}

func (i *image) close() { _ = i.file.Close() }

// fetch gets the image into a file without a name, so that nothing is sent to a
// BMC before all of it is proven. limit is the BMC's own; 0: not said.
func fetch(ctx *driver.Context, o Options, u metal.FirmwareUpdate, limit uint64) (*image, error) {
	file, err := os.CreateTemp(o.Spool, "firmware-*")
	if err != nil {
		return nil, errs.New(errs.NoSpace, "keep the firmware image: %v", err)
	}
	i := &image{file: file, name: imageName(u.URL)}
	_ = os.Remove(file.Name())
	if err := i.fill(ctx, o, u, limit); err != nil {
		i.close()
		return nil, err
	}
	return i, nil
}

func (i *image) fill(ctx *driver.Context, o Options, u metal.FirmwareUpdate, limit uint64) error {
	ctx.Emit(driver.Progress{Phase: "fetch", Message: "fetching the image"})
	source, err := open(ctx, o, u.URL)
	if err != nil {
		return err
	}
	defer source.Close()
	most := int64(maxImage)
	if limit > 0 && limit < maxImage {
		most = int64(limit)
	}
	hash := sha256.New()
	i.size, err = io.Copy(io.MultiWriter(i.file, hash), io.LimitReader(source, most+1))
	var disk *os.PathError
	switch {
	case errors.As(err, &disk):
		return errs.New(errs.NoSpace, "keep the firmware image: %v", disk.Err)
	case err != nil:
		return notFetched(err)
	case i.size > most:
		return errs.New(errs.InvalidArgs, "the firmware image is larger than %d bytes", most)
	}
	if got := hex.EncodeToString(hash.Sum(nil)); got != u.SHA256 {
		return errs.New(errs.DigestMismatch, "the firmware image at the URL has SHA-256 %s, not %s: nothing was sent to the BMC", got, u.SHA256)
	}
	return nil
}

// open reads an image from what the site serves, or from its URL.
func open(ctx context.Context, o Options, address string) (io.ReadCloser, error) {
	if o.Own != nil {
		if own, err := o.Own(ctx, address); own != nil || err != nil {
			return own, err
		}
	}
	dialer := &net.Dialer{Timeout: dialTimeout, Control: func(_, to string, _ syscall.RawConn) error {
		at, err := netip.ParseAddrPort(to)
		if err != nil {
			return err
		}
		if o.Refuse == nil {
			return nil
		}
		if why := o.Refuse(at.Addr()); why != "" {
			return errs.New(errs.InvalidArgs, "fetch the firmware image: %s %s", at.Addr(), why)
		}
		return nil
	}}
	client := &http.Client{
		Transport: &http.Transport{
			DialContext: dialer.DialContext, TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: o.Roots}, DisableKeepAlives: true,
		},
		CheckRedirect: func(r *http.Request, via []*http.Request) error {
			if len(via) > 5 || via[0].URL.Scheme == "https" && r.URL.Scheme != "https" {
				return errors.New("a redirect that is not followed")
			}
			return nil
		},
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, errs.New(errs.InvalidArgs, "firmware image: %v", cause(err))
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, notFetched(err)
	}
	if resp.StatusCode != http.StatusOK {
		_ = resp.Body.Close()
		return nil, errs.New(errs.InvalidArgs, "fetch the firmware image: status %d", resp.StatusCode)
	}
	return resp.Body, nil
}

func notFetched(err error) error {
	if own := new(errs.Error); errors.As(err, &own) {
		return own
	}
	return errs.Retry(errs.Unreachable, "fetch the firmware image: %v", cause(err))
}

var plainName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,100}$`)

// imageName is the file's name, which some BMCs tell images apart by.
func imageName(address string) string {
	if u, err := url.Parse(address); err == nil && plainName.MatchString(path.Base(u.Path)) {
		return path.Base(u.Path)
	}
	return "firmware.bin"
}

// way is a rung of the ladder.
type way struct {
	name  string
	begin func(context.Context, *image) (*answer, error)
	// after says whether it is worth a try after this refusal; nil: always.
	after func(*answer) bool
}

// ways are how this BMC takes firmware, the best one first: it is pushed, or
// the BMC fetches it.
func (p *provider) ways(ctx context.Context, service object, u metal.FirmwareUpdate, c component) ([]way, error) {
	var list []way
	targets := []string{}
	if c.path != "" {
		targets = append(targets, c.path)
	}
	if id := service.text("MultipartHttpPushUri"); id != "" {
		at, err := p.pushPath(id)
		if err != nil {
			return nil, err
		}
		push := func(targets []string) func(context.Context, *image) (*answer, error) {
			return func(ctx context.Context, i *image) (*answer, error) { return p.push(ctx, at, targets, i) }
		}
		list = append(list, way{name: "pushing the image to the BMC", begin: push(targets)})
		if len(targets) > 0 {
			// An image goes over the wire once more only where its target is what the
			// BMC does not like.
			list = append(list, way{name: "pushing the image to the BMC, for whatever it is", begin: push([]string{}), after: func(a *answer) bool {
				return strings.Contains(strings.ToLower(string(a.body)), "target")
			}})
		}
	}
	action := service.object("Actions").object("#UpdateService.SimpleUpdate")
	if id := action.text("target"); id != "" {
		at, err := p.resource(id)
		if err != nil {
			return nil, err
		}
		scheme, _, _ := strings.Cut(u.URL, "://")
		protocol := strings.ToUpper(scheme)
		protocols, err := p.allowed(ctx, action, "TransferProtocol")
		if err != nil {
			return nil, err
		}
		forms := []map[string]any{
			{"ImageURI": u.URL, "TransferProtocol": protocol, "Targets": targets},
			{"ImageURI": u.URL, "TransferProtocol": protocol},
		}
		if len(targets) == 0 {
			forms = forms[1:]
		}
		for _, form := range forms {
			if protocols != nil && !slices.Contains(protocols, protocol) {
				break
			}
			name := "having the BMC fetch the image"
			if form["Targets"] == nil {
				name += ", for whatever it is"
			}
			list = append(list, way{name: name, begin: func(ctx context.Context, _ *image) (*answer, error) {
				return p.write(ctx, http.MethodPost, at, form)
			}})
		}
	}
	if len(list) == 0 {
		return nil, errs.New(errs.UnsupportedOperation, "the BMC takes firmware neither by multipart push nor by fetching it over %s", strings.SplitN(u.URL, ":", 2)[0])
	}
	return list, nil
}

// pushPath is the path that images are pushed to. Unlike all other paths it may
// be outside of /redfish/, on the BMC itself.
func (p *provider) pushPath(id string) (string, error) {
	if at, err := p.resource(id); err == nil {
		return at, nil
	}
	u, err := url.Parse(id)
	if err != nil || u.Scheme != "" || u.Host != "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" ||
		!strings.HasPrefix(id, "/") || strings.HasPrefix(id, "//") || strings.ContainsAny(u.Path, "\\%?#") || path.Clean(u.Path) != strings.TrimSuffix(u.Path, "/") {
		return "", errs.New(errs.BmcError, "the BMC names a place for images that is not its own: %s", legible(id))
	}
	return u.Path, nil
}

// pushed marks a request that may leave /redfish/ for this path.
type pushed struct{}

// push sends the image once. Only a BMC that has forgotten the session, and so
// has taken nothing, gets it again under a new one.
func (p *provider) push(ctx context.Context, at string, targets []string, i *image) (*answer, error) {
	head, tail, contentType, err := envelope(targets, i.name)
	if err != nil {
		return nil, err
	}
	header := http.Header{"Content-Type": {contentType}}
	ctx = context.WithValue(ctx, pushed{}, at)
	for again := false; ; again = true {
		if _, err := i.file.Seek(0, io.SeekStart); err != nil {
			return nil, errs.New(errs.Internal, "read the firmware image: %v", err)
		}
		body := &counted{next: io.MultiReader(bytes.NewReader(head), io.LimitReader(i.file, i.size), bytes.NewReader(tail)), total: int64(len(head)+len(tail)) + i.size, emit: p.emit}
		a, err := p.upload(ctx, http.MethodPost, at, body, body.total, header)
		switch {
		case err != nil:
			return nil, err
		case a.status/100 == 2:
			return a, nil
		case a.status != http.StatusUnauthorized || again:
			return nil, statusError("push the firmware image", a)
		}
		if _, err := p.authorise(ctx, p.current()); err != nil {
			return nil, err
		}
	}
}

// envelope is what stands before and after the image in a multipart body.
func envelope(targets []string, name string) (head, tail []byte, contentType string, err error) {
	parameters, err := json.Marshal(map[string]any{"Targets": targets})
	if err != nil {
		return nil, nil, "", errs.New(errs.Internal, "encode update parameters: %v", err)
	}
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	part, err := w.CreatePart(textproto.MIMEHeader{
		"Content-Disposition": {`form-data; name="UpdateParameters"`}, "Content-Type": {"application/json"},
	})
	if err == nil {
		_, err = part.Write(parameters)
	}
	if err == nil {
		_, err = w.CreatePart(textproto.MIMEHeader{
			"Content-Disposition": {fmt.Sprintf(`form-data; name="UpdateFile"; filename="%s"`, name)}, "Content-Type": {"application/octet-stream"},
		})
	}
	head = bytes.Clone(b.Bytes())
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		return nil, nil, "", errs.New(errs.Internal, "encode update: %v", err)
	}
	return head, b.Bytes()[len(head):], w.FormDataContentType(), nil
}

// counted tells how much of a body was read, each twentieth.
type counted struct {
	next        io.Reader
	read, total int64
	told        int64
	emit        func(driver.Progress)
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.next.Read(b)
	c.read += int64(n)
	if c.emit != nil && (c.read-c.told >= c.total/20 || c.read == c.total && c.told < c.total) {
		c.told = c.read
		c.emit(driver.Progress{Phase: "upload", Message: "pushing the image to the BMC", Done: uint64(c.read), Total: uint64(c.total)})
	}
	return n, err
}
