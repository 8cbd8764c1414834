package redfish

import (
	"context"
	"net/http"
	"path"
	"slices"
	"strings"

	bmclib "github.com/bmc-toolbox/bmclib/v2"
	"github.com/bmc-toolbox/bmclib/v2/bmc"
	schemas "github.com/stmcginnis/gofish/redfish"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

var _ bmc.VirtualMediaSetter = (*provider)(nil)

// Insert puts an image into the machine's virtual CD drive.
func (m *machine) Insert(ctx *driver.Context, iso string) error {
	return m.with(ctx, func(c *bmclib.Client, p *provider) error {
		p.tell("media", "inserting an image")
		_, err := c.SetVirtualMedia(ctx, string(schemas.CDMediaType), iso)
		return err
	})
}

// Eject empties the machine's virtual CD drives.
func (m *machine) Eject(ctx *driver.Context) error {
	return m.with(ctx, func(c *bmclib.Client, p *provider) error {
		p.tell("media", "ejecting")
		_, err := c.SetVirtualMedia(ctx, string(schemas.CDMediaType), "")
		return err
	})
}

// Status says what is in the machine's virtual CD drive.
func (m *machine) Status(ctx *driver.Context) (status metal.Media, err error) {
	err = m.with(ctx, func(_ *bmclib.Client, p *provider) error {
		slots, err := p.slots(ctx)
		if err != nil {
			return err
		}
		for _, s := range slots {
			if s.inserted() {
				status = metal.Media{Inserted: true, Image: s.image()}
				break
			}
		}
		return nil
	})
	return status, err
}

// slot is one virtual drive.
type slot struct {
	object
	path, insert, eject string // targets; empty: no such action
}

// inserted goes by Inserted where there is one: some leave the image's name
// behind when it is ejected.
func (s *slot) inserted() bool {
	if is, said := s.boolean("Inserted"); said {
		return is
	}
	return s.text("Image") != "" && !strings.EqualFold(s.text("ConnectedVia"), "NotConnected")
}

// image is what the slot shows, for people: without what logs in to its server.
func (s *slot) image() string {
	shown, _, _ := strings.Cut(s.text("Image"), "?")
	scheme, rest, found := strings.Cut(shown, "//")
	if !found {
		scheme, rest = "", shown
	} else {
		scheme += "//"
	}
	server, path, _ := strings.Cut(rest, "/")
	if at := strings.LastIndexByte(server, '@'); at >= 0 {
		rest = server[at+1:] + "/" + path
	}
	return legible(scheme + rest)
}

// drive reports whether CDs and DVDs go in.
func (s *slot) drive() bool {
	types := s.texts("MediaTypes")
	for _, t := range types {
		if strings.EqualFold(t, "CD") || strings.EqualFold(t, "DVD") {
			return true
		}
	}
	name := strings.ToLower(s.text("Id") + " " + s.text("Name") + " " + path.Base(s.path))
	return len(types) == 0 && (strings.Contains(name, "cd") || strings.Contains(name, "dvd"))
}

// shows reports whether what is in the slot can be the image at url: BMCs leave
// the scheme out, or all but the file's name, or everything.
func (s *slot) shows(url string) bool {
	shown := s.text("Image")
	if shown == "" {
		shown = s.text("ImageName")
	}
	if shown == "" {
		return true
	}
	return s.holds(url) || path.Base(shown) == path.Base(url)
}

// holds reports whether the slot says that it has the very image at url.
func (s *slot) holds(url string) bool {
	shown := s.text("Image")
	_, bare, _ := strings.Cut(url, "://")
	return shown == url || shown != "" && shown == bare
}

// slots are the virtual CD drives of the system, or of its manager.
func (p *provider) slots(ctx context.Context) ([]*slot, error) {
	s, err := p.find(ctx)
	if err != nil {
		return nil, err
	}
	found, err := p.slotsOf(ctx, s.object)
	if err != nil || len(found) > 0 {
		return found, err
	}
	_, manager, err := p.manager(ctx)
	if err != nil {
		return nil, err
	}
	if found, err = p.slotsOf(ctx, manager); err == nil && len(found) == 0 {
		err = errs.New(errs.UnsupportedOperation, "the BMC has no virtual CD drive")
	}
	return found, err
}

func (p *provider) slotsOf(ctx context.Context, owner object) ([]*slot, error) {
	id := owner.object("VirtualMedia").text("@odata.id")
	if id == "" {
		return nil, nil
	}
	collection, err := p.resource(id)
	if err != nil {
		return nil, err
	}
	var found []*slot
	err = p.pages(ctx, collection, func(o object) error {
		for _, member := range o.objects("Members") {
			one, err := p.slotOf(ctx, member)
			if err != nil {
				return err
			}
			if one.drive() {
				found = append(found, one)
			}
			if len(found) > 16 {
				return errs.New(errs.BmcError, "the BMC lists more than 16 virtual drives")
			}
		}
		return nil
	})
	if absent(err) {
		return nil, nil
	}
	return found, err
}

// slotOf is a member of the collection, which some BMCs write out in it.
func (p *provider) slotOf(ctx context.Context, member object) (*slot, error) {
	at, err := p.resource(member.text("@odata.id"))
	if err != nil {
		return nil, err
	}
	if member["MediaTypes"] == nil && member["Inserted"] == nil {
		if member, err = p.get(ctx, at); err != nil {
			return nil, err
		}
	}
	s := &slot{object: member, path: at}
	for _, action := range []struct {
		name string
		into *string
	}{{"#VirtualMedia.InsertMedia", &s.insert}, {"#VirtualMedia.EjectMedia", &s.eject}} {
		if id := member.object("Actions").object(action.name).text("target"); id != "" {
			if *action.into, err = p.resource(id); err != nil {
				return nil, err
			}
		}
	}
	return s, nil
}

// again reads the slot anew.
func (p *provider) again(ctx context.Context, s *slot) (*slot, error) {
	o, err := p.get(ctx, s.path)
	if err != nil {
		return nil, err
	}
	now := *s
	now.object = o
	return &now, nil
}

// SetVirtualMedia inserts the image at url, or ejects where url is empty.
func (p *provider) SetVirtualMedia(ctx context.Context, _ string, url string) (bool, error) {
	slots, err := p.slots(ctx)
	if err != nil {
		return false, err
	}
	if url == "" {
		for _, s := range slots {
			if err := p.ejectFrom(ctx, s); err != nil {
				return false, err
			}
		}
		return true, nil
	}
	for _, s := range slots {
		if s.inserted() && s.holds(url) {
			return true, nil
		}
	}
	if err := p.ejectFrom(ctx, slots[0]); err != nil {
		return false, err
	}
	err = p.insertInto(ctx, slots[0], url)
	return err == nil, err
}

// insertions are the ways in which BMCs want to be told of an image, the
// standard's plainest first; none of them asks for less verification.
func insertions(s *slot, url string) []plan {
	scheme, _, _ := strings.Cut(url, "://")
	protocol := strings.ToUpper(scheme)
	if protocol == "SMB" {
		protocol = "CIFS"
	}
	minimal := map[string]any{"Image": url}
	usual := map[string]any{"Image": url, "Inserted": true, "WriteProtected": true}
	full := map[string]any{"Image": url, "Inserted": true, "WriteProtected": true, "TransferProtocolType": protocol, "TransferMethod": "Stream"}
	blank := map[string]any{"Image": url, "Inserted": true, "WriteProtected": true, "TransferProtocolType": protocol, "TransferMethod": "Stream", "UserName": "", "Password": ""}
	var plans []plan
	if s.insert != "" {
		for _, body := range []map[string]any{minimal, usual, full, blank} {
			plans = append(plans, plan{method: http.MethodPost, path: s.insert, body: body})
		}
	}
	for _, body := range []map[string]any{{"Image": url, "Inserted": true}, full, minimal, blank} {
		plans = append(plans, plan{method: http.MethodPatch, path: s.path, body: body})
	}
	return plans
}

// ejections are the ways to empty a slot.
func ejections(s *slot) []plan {
	var plans []plan
	if s.eject != "" {
		plans = append(plans, plan{method: http.MethodPost, path: s.eject, body: map[string]any{}})
	}
	for _, body := range []map[string]any{{"Image": nil, "Inserted": false}, {"Image": nil}, {"Inserted": false}, {"Image": ""}} {
		plans = append(plans, plan{method: http.MethodPatch, path: s.path, body: body})
	}
	return plans
}

// plan is one way to ask for something.
type plan struct {
	method, path string
	body         any
}

// firstTaken tries one plan after another until one is taken. Only an answer that
// the request itself is wrong leads on; the error is then the first's.
func (p *provider) firstTaken(ctx context.Context, plans []plan) (*answer, error) {
	var first error
	for _, one := range plans {
		a, err := p.change(ctx, one.method, one.path, one.body, true)
		if err == nil || !objected(err) || untrusted(err.Error()) {
			return a, err
		}
		if first == nil {
			first = err
		}
	}
	return nil, first
}

func (p *provider) insertInto(ctx context.Context, s *slot, url string) error {
	a, err := p.firstTaken(ctx, insertions(s, url))
	switch {
	case err != nil && untrusted(err.Error()):
		return errs.New(errs.MediaUntrusted, "the BMC does not trust the certificate of the image's server: %s", errs.From(err).Message)
	case err != nil && errs.CodeOf(err) != errs.Interrupted:
		return err
	}
	shown := p.settled(ctx, s, func(now *slot) bool { return now.inserted() && now.shows(url) }, func(ctx context.Context) error { return p.fetchFailed(ctx, a) })
	if err != nil && shown != nil {
		return err // the answer was lost, and nothing shows that it was done
	}
	return shown
}

func (p *provider) ejectFrom(ctx context.Context, s *slot) error {
	if !s.inserted() {
		return nil
	}
	_, err := p.firstTaken(ctx, ejections(s))
	if err != nil && !objected(err) && errs.CodeOf(err) != errs.Interrupted {
		return err
	}
	shown := p.settled(ctx, s, func(now *slot) bool { return !now.inserted() }, nil)
	if err != nil && shown != nil {
		return err
	}
	return shown
}

// settled reads the slot until it is as it should be. failed tells of a failure
// that the slot does not show.
func (p *provider) settled(ctx context.Context, s *slot, good func(*slot) bool, failed func(context.Context) error) error {
	waiting, cancel := patience(ctx, p.timing.media)
	defer cancel()
	for {
		now, err := p.again(waiting, s)
		switch {
		case err != nil && waiting.Err() == nil:
			return err
		case err == nil && good(now):
			return nil
		case err == nil:
			s = now
			if failed != nil {
				if err := failed(waiting); err != nil {
					return err
				}
			}
		}
		if sleep(waiting, p.timing.tick) {
			continue
		}
		if errs.CodeOf(ctx.Err()) == errs.Cancelled {
			return errs.New(errs.Cancelled, "the operation was cancelled before the virtual drive was verified")
		}
		return errs.New(errs.BmcError, "the BMC accepted the change of its virtual drive and does not show it: inserted %v, image %s", s.inserted(), s.image())
	}
}

// fetchFailed looks at the task that a names, if it names one, for the reason why
// an image does not come.
func (p *provider) fetchFailed(ctx context.Context, a *answer) error {
	if a == nil || a.status != http.StatusAccepted {
		return nil
	}
	id := a.header.Get("Location")
	if id == "" {
		id = a.object().text("@odata.id")
	}
	at, err := p.resource(id)
	if err != nil {
		return nil
	}
	o, err := p.get(ctx, at)
	if err != nil {
		return nil // some tasks are gone as soon as they end
	}
	state, status := o.text("TaskState"), o.text("TaskStatus")
	if !slices.Contains([]string{"Exception", "Killed", "Cancelled"}, state) && !strings.EqualFold(status, "Critical") {
		return nil
	}
	text := state
	for _, m := range o.objects("Messages") {
		if m.text("Message") != "" {
			text = m.text("Message")
		}
	}
	if untrusted(text) {
		return errs.New(errs.MediaUntrusted, "the BMC does not trust the certificate of the image's server: %s", legible(text))
	}
	return errs.New(errs.BmcError, "the BMC could not insert the image: %s", legible(text))
}

// untrusted reports whether a BMC's words say that it cannot verify the server
// that it fetches from. There is no identifier for it in the standard.
func untrusted(text string) bool {
	text = strings.ToLower(text)
	for _, word := range []string{"certificate", "x509", "ssl", "tls handshake", "untrusted", "unable to verify"} {
		if strings.Contains(text, word) {
			return true
		}
	}
	return false
}

// absent reports whether a resource is not there.
func absent(err error) bool { return statusOf(err) == http.StatusNotFound }
