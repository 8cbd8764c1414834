package redfish

import (
	"context"
	"net/http"
	"slices"
	"strings"

	bmclib "github.com/bmc-toolbox/bmclib/v2"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/release"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// updatePath is the standard's, for the roots that do not name what is there.
const updatePath = "/redfish/v1/UpdateService"

// ListFirmware reads the inventory of the update service.
func (m *machine) ListFirmware(ctx *driver.Context) (list []metal.Firmware, err error) {
	err = m.with(ctx, func(_ *bmclib.Client, p *provider) error {
		service, err := p.updateService(ctx)
		if err != nil {
			return err
		}
		found, err := p.inventory(ctx, service)
		if found == nil && err == nil {
			err = unsupported("firmware inventory")
		}
		list = told(found)
		return err
	})
	return list, err
}

// UpdateFirmware brings one component to what the URL holds.
func (m *machine) UpdateFirmware(ctx *driver.Context, u metal.FirmwareUpdate) (done metal.Applied, err error) {
	over, err := m.updates(u.Component)
	if err != nil {
		return metal.Applied{}, err
	}
	defer over()
	err = m.with(ctx, func(_ *bmclib.Client, p *provider) error {
		done, err = p.updateFirmware(ctx, m.pool.options, u)
		return err
	})
	return done, err
}

// component is an entry of the inventory.
type component struct {
	path, id, name, version string
	fixed                   bool // it says that it cannot be updated
}

// known is the component's name for people and arguments. Some BMCs number
// their entries, and some have the version in the id.
func (c component) known(all []component) string {
	same := 0
	for _, other := range all {
		if other.name == c.name {
			same++
		}
	}
	_, tail, _ := strings.Cut(c.id, "__")
	switch versioned := c.version != "" && strings.Contains(c.id, c.version); {
	case versioned && tail != "":
		return tail
	case (versioned || digits(c.id)) && c.name != "" && same == 1:
		return c.name
	}
	return first(c.id, c.name)
}

// is says whether the component is called that.
func (c component) is(name string, all []component) bool {
	return strings.EqualFold(c.known(all), name) || strings.EqualFold(c.id, name) || strings.EqualFold(c.name, name)
}

// components are the entries of an inventory for what is installed; some list
// beside it what was, or could be.
func components(c *conn, list []object) []component {
	out := []component{}
	for _, o := range list {
		x := component{path: c.path(o.text("@odata.id")), id: o.word("Id"), name: o.word("Name"), version: o.word("Version")}
		if x.id == "" {
			x.id = word(lastPart(x.path))
		}
		if strings.HasPrefix(x.id, "Previous-") || strings.HasPrefix(x.id, "Available-") || x.id == "" && x.name == "" {
			continue
		}
		updateable, said := o.boolean("Updateable")
		x.fixed = said && !updateable
		out = append(out, x)
	}
	return out
}

// told is what a list and an inspection answer.
func told(all []component) []metal.Firmware {
	var list []metal.Firmware
	for _, c := range all {
		if c.version != "" {
			list = append(list, metal.Firmware{Component: c.known(all), Version: c.version})
		}
	}
	return list
}

func (p *provider) updateService(ctx context.Context) (object, error) {
	return p.part(ctx, p.collection("UpdateService", updatePath), "update service")
}

// inventory is what the service lists; nil: it has no inventory.
func (p *provider) inventory(ctx context.Context, service object) ([]component, error) {
	path := p.link(service, "FirmwareInventory")
	if path == "" {
		return nil, nil
	}
	root, err := p.root(ctx)
	if err != nil {
		return nil, err
	}
	s := &survey{p: p, log: p.log, expand: expansion(root)}
	list := s.all(ctx, path)
	switch {
	case s.lost != nil:
		return nil, s.lost
	case absent(s.failed):
		return nil, nil
	case s.failed != nil:
		return nil, s.failed
	}
	return components(p.conn, list), nil
}

// findComponent finds one component by name.
func findComponent(all []component, name string) (component, error) {
	var found []component
	for _, c := range all {
		if c.is(name, all) {
			found = append(found, c)
		}
	}
	switch {
	case len(found) == 1:
		return found[0], nil
	case len(found) == 0:
		return component{}, errs.New(errs.InvalidArgs, "the BMC has no firmware component %q; firmware.list names them", name)
	}
	for _, c := range found {
		if c.known(all) == name {
			return c, nil
		}
	}
	return component{}, errs.New(errs.InvalidArgs, "%d firmware components are called %q: use the name that a list gives", len(found), name)
}

// version is what a component shows now; empty: nothing.
func (p *provider) version(ctx context.Context, name string) (string, error) {
	service, err := p.updateService(ctx)
	if err != nil {
		return "", err
	}
	all, err := p.inventory(ctx, service)
	if err != nil || all == nil {
		return "", err
	}
	c, err := findComponent(all, name)
	return c.version, err
}

func (p *provider) updateFirmware(ctx *driver.Context, o Options, u metal.FirmwareUpdate) (metal.Applied, error) {
	service, err := p.updateService(ctx)
	if err != nil {
		return metal.Applied{}, err
	}
	if enabled, said := service.boolean("ServiceEnabled"); said && !enabled {
		return metal.Applied{}, errs.New(errs.BmcError, "the BMC's update service is switched off")
	}
	all, err := p.inventory(ctx, service)
	if err != nil {
		return metal.Applied{}, err
	}
	now := component{}
	if all != nil {
		if now, err = findComponent(all, u.Component); err != nil {
			return metal.Applied{}, err
		}
	} else if u.Version != "" {
		return metal.Applied{}, errs.New(errs.UnsupportedOperation, "the BMC has no firmware inventory, so that no version can be read back")
	}
	switch {
	case now.fixed:
		return metal.Applied{}, errs.New(errs.UnsupportedOperation, "the BMC does not update component %q", u.Component)
	case u.Version != "" && strings.EqualFold(now.version, u.Version):
		ctx.Log.Info("the component has this version already", "component", u.Component, "version", u.Version)
		return metal.Applied{AlreadyInstalled: true}, nil
	}
	ways, err := p.ways(ctx, service, u, now)
	if err != nil {
		return metal.Applied{}, err
	}
	image, err := fetch(ctx, o, u, service.count("MaxImageSizeBytes", maxBytes))
	if err != nil {
		return metal.Applied{}, err
	}
	defer image.close()
	began := p.offer(ctx, ways, image)
	return p.finish(ctx, u, now, began)
}

// beginning is how an update was begun: the BMC's answer, or what went wrong.
type beginning struct {
	answer *answer
	err    error
}

// offer goes down the ladder until the BMC takes the update. Only a refusal that
// is for good leads to the next rung.
func (p *provider) offer(ctx *driver.Context, ways []way, image *image) beginning {
	var s beginning
	for _, w := range ways {
		if last := answerOf(s.err); last != nil && w.after != nil && !w.after(last) {
			continue
		}
		ctx.Emit(driver.Progress{Phase: "update", Message: w.name})
		s.answer, s.err = w.begin(ctx, image)
		if s.err == nil || !slices.Contains(refusals, statusOf(s.err)) {
			return s
		}
		ctx.Log.Info("the BMC refuses a way to update", "way", w.name, "reason", s.err.Error())
	}
	return s
}

// refusals are the answers that say that nothing was begun, and nothing would
// be if it were asked again.
var refusals = []int{
	http.StatusBadRequest, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusNotAcceptable, http.StatusLengthRequired,
	http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType, http.StatusUnprocessableEntity, http.StatusNotImplemented,
}

// finish follows an update to its end and reads the version back. An update
// whose beginning is unclear is looked for, and never begun again.
func (p *provider) finish(ctx *driver.Context, u metal.FirmwareUpdate, before component, s beginning) (metal.Applied, error) {
	end := outcome{unseen: true}
	switch {
	case s.err == nil:
		release.Place(ctx)
		var err error
		if end, err = p.follow(ctx, s.answer, job{doing: "update firmware " + u.Component, atBoot: true}); err != nil {
			return metal.Applied{}, err
		}
	case !unclear(s.err):
		return metal.Applied{}, s.err
	}
	if end.waits {
		return metal.Applied{RebootNeeded: true}, nil
	}
	if u.Version == "" && !end.unseen {
		return metal.Applied{RebootNeeded: wantsReboot(end.notes)}, nil
	}
	shown := ""
	// A BMC that got new firmware itself restarts, and shows it after a while.
	ok, last := p.until(ctx, 15*p.timing.settle, func(ctx context.Context) (bool, error) {
		v, err := p.version(ctx, u.Component)
		if err != nil {
			return false, err
		}
		shown = v
		if u.Version == "" {
			return v != before.version, nil
		}
		return strings.EqualFold(v, u.Version), nil
	})
	switch {
	case ok:
		return metal.Applied{}, nil
	case s.err != nil:
		return metal.Applied{}, errs.New(errs.CodeOf(s.err), "%s; the component shows version %q, and nothing was sent again", errs.From(s.err).Message, shown)
	case last != nil:
		return metal.Applied{}, errs.New(errs.CodeOf(last), "the update was taken, and the version cannot be read back: %s", errs.From(last).Message)
	case wantsReboot(end.notes):
		return metal.Applied{RebootNeeded: true}, nil
	case end.unseen:
		return metal.Applied{}, errs.New(errs.BmcError, "the BMC lost sight of its own update, and the component shows version %q", shown)
	}
	return metal.Applied{}, errs.New(errs.BmcError, "the BMC says that the update is complete, and the component shows version %q, not %q", shown, u.Version)
}

// wantsReboot says whether the messages of a job ask for a reset of the machine.
func wantsReboot(notes []message) bool {
	for _, m := range notes {
		if m.is("ResetRequired", "ResetRecommended", "SystemResetRequired", "RebootRequired", "AwaitToActivate") {
			return true
		}
	}
	return false
}
