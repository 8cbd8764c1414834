package redfish

import (
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"

	bmclib "github.com/bmc-toolbox/bmclib/v2"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// GetSettings reads the firmware settings in force, as the BMC shows them.
func (m *machine) GetSettings(ctx *driver.Context) (s metal.Settings, err error) {
	err = m.with(ctx, func(_ *bmclib.Client, p *provider) error {
		b, err := p.bios(ctx)
		s = b.shown()
		return err
	})
	return s, err
}

// ApplySettings changes these settings at the machine's next boot.
func (m *machine) ApplySettings(ctx *driver.Context, s metal.Settings) (done metal.Applied, err error) {
	err = m.with(ctx, func(_ *bmclib.Client, p *provider) error {
		done, err = p.applySettings(ctx, s)
		return err
	})
	return done, err
}

// ResetSettings takes all settings back to the maker's at the next boot.
func (m *machine) ResetSettings(ctx *driver.Context) (done metal.Applied, err error) {
	err = m.with(ctx, func(_ *bmclib.Client, p *provider) error {
		done, err = p.resetSettings(ctx)
		return err
	})
	return done, err
}

// bios is a Bios resource and its settings object.
type bios struct {
	path, pending string // pending: where changes go
	separate      bool   // pending is a resource of its own
	current       map[string]any
	next          map[string]any // what pending shows
	resource      object
	applyTimes    []string // nil: not said
	messages      string   // of the settings that were applied last
}

// shown are the attributes in force. Some BMCs show them in the settings
// object alone.
func (b bios) shown() metal.Settings {
	if len(b.current) == 0 {
		return metal.Settings(b.next)
	}
	return metal.Settings(b.current)
}

// bios reads both. A BMC without is unsupported-operation.
func (p *provider) bios(ctx context.Context) (bios, error) {
	s, err := p.find(ctx)
	if err != nil {
		return bios{}, err
	}
	path := p.link(s.object, "Bios")
	if path == "" {
		return bios{}, errs.New(errs.UnsupportedOperation, "the BMC has no firmware settings")
	}
	o, err := p.part(ctx, path, "firmware settings")
	if err != nil {
		return bios{}, err
	}
	b := bios{path: path, pending: path, resource: o, current: o.scalars("Attributes")}
	settings := o.object("@Redfish.Settings")
	b.messages = string(settings["Messages"])
	b.applyTimes = settings.texts("SupportedApplyTimes")
	named := p.link(settings, "SettingsObject")
	// Some BMCs have the settings object where it always is, and do not say so.
	pending := first(named, strings.TrimSuffix(path, "/")+"/Settings")
	switch o, err := p.get(ctx, pending); {
	case err == nil && (named != "" || o["Attributes"] != nil):
		b.pending, b.separate, b.next = pending, true, o.scalars("Attributes")
		if b.applyTimes == nil {
			b.applyTimes = o.object("@Redfish.SettingsApplyTime").texts("ApplyTime@Redfish.AllowableValues")
		}
	case err != nil && (named != "" || fatal(ctx, err)):
		return bios{}, err
	}
	if !b.separate {
		b.next = b.current
	}
	if len(b.current) == 0 && len(b.next) == 0 {
		return bios{}, errs.New(errs.UnsupportedOperation, "the BMC shows no firmware settings")
	}
	return b, nil
}

// wanted are those of s that the next boot would not bring by itself, and
// whether any of the others waits for that boot.
func (b bios) wanted(s metal.Settings) (changes map[string]any, waiting bool) {
	changes = map[string]any{}
	// A settings object that lists less lists what is pending, whatever the
	// other one shows already.
	partial := b.separate && len(b.next) < len(b.current)
	for name, value := range s {
		now, shown := b.current[name]
		next, listed := b.next[name]
		pending := listed
		if !pending {
			next, pending = now, shown
		}
		switch {
		case !pending || !same(next, value):
			changes[name] = value
		case len(b.current) > 0 && !same(now, value), listed && partial:
			waiting = true
		}
	}
	return changes, waiting
}

// same compares values; numbers by what they are worth.
func same(a, b any) bool {
	x, isNumber := a.(json.Number)
	y, both := b.(json.Number)
	if !isNumber || !both {
		return a == b
	}
	if x == y {
		return true
	}
	i, errX := strconv.ParseFloat(string(x), 64)
	j, errY := strconv.ParseFloat(string(y), 64)
	const exact = 1 << 53
	return errX == nil && errY == nil && i == j && i < exact && i > -exact
}

// check refuses what the BMC does not have, before anything is sent.
func (b bios) check(s metal.Settings, known map[string]attribute) error {
	for _, name := range slices.Sorted(maps.Keys(s)) {
		shown, has := b.current[name]
		if !has {
			shown, has = b.next[name]
		}
		a, registered := known[name]
		switch {
		case !has && !registered:
			return errs.New(errs.InvalidArgs, "the BMC has no setting %q; bios.getSettings names them", name)
		case registered && a.readOnly:
			return errs.New(errs.InvalidArgs, "setting %q cannot be written", name)
		case has && kind(shown) != kind(s[name]):
			return errs.New(errs.InvalidArgs, "setting %q is %s, not %s", name, kind(shown), kind(s[name]))
		}
		if text, ok := s[name].(string); ok && len(a.values) > 0 && !slices.Contains(a.values, text) {
			return errs.New(errs.InvalidArgs, "setting %q: %q is not among its values: %s", name, text, legible(strings.Join(a.values, ", ")))
		}
	}
	return nil
}

func kind(v any) string {
	switch v.(type) {
	case bool:
		return "true or false"
	case json.Number:
		return "a number"
	}
	return "text"
}

const applyTime = "OnReset"

func (p *provider) applySettings(ctx context.Context, s metal.Settings) (metal.Applied, error) {
	b, err := p.bios(ctx)
	if err != nil {
		return metal.Applied{}, err
	}
	known, err := p.registry(ctx, b)
	if err != nil {
		return metal.Applied{}, err
	}
	if err := b.check(s, known); err != nil {
		return metal.Applied{}, err
	}
	changes, waiting := b.wanted(s)
	if len(changes) == 0 {
		if waiting && !slices.Contains(b.applyTimes, applyTime) {
			// Perhaps an earlier call was interrupted before it made the job.
			err = p.dellJob(ctx, b, &answer{}, true)
		}
		return metal.Applied{RebootNeeded: waiting}, err
	}
	a, err := p.writeSettings(ctx, b, changes)
	if err != nil && !unclear(err) {
		return metal.Applied{}, err
	}
	if err == nil {
		if err := refused(a); err != nil {
			return metal.Applied{}, err
		}
		if _, err := p.follow(ctx, a, job{doing: "apply firmware settings", atBoot: true, silent: true}); err != nil {
			return metal.Applied{}, err
		}
	}
	if !b.separate && err == nil {
		// Nothing shows what is pending here.
		p.log.Info("the BMC accepted firmware settings and cannot show them before the next boot")
		return metal.Applied{RebootNeeded: true}, nil
	}
	if failed := p.proveSettings(ctx, b, changes); failed != nil {
		if err != nil {
			return metal.Applied{}, err
		}
		return metal.Applied{}, failed
	}
	if a == nil {
		a = &answer{} // lost
	}
	if err := p.dellJob(ctx, b, a, err != nil); err != nil {
		return metal.Applied{}, err
	}
	return metal.Applied{RebootNeeded: true}, nil
}

// writeSettings writes the settings object. A BMC that refuses to be told when
// gets the values alone.
func (p *provider) writeSettings(ctx context.Context, b bios, changes map[string]any) (*answer, error) {
	plain := map[string]any{"Attributes": changes}
	if !slices.Contains(b.applyTimes, applyTime) {
		a, err := p.write(ctx, http.MethodPatch, b.pending, plain)
		return a, settingsError(err)
	}
	timed := maps.Clone(plain)
	timed["@Redfish.SettingsApplyTime"] = map[string]string{"@odata.type": "#Settings.v1_1_0.PreferredApplyTime", "ApplyTime": applyTime}
	a, err := p.write(ctx, http.MethodPatch, b.pending, timed)
	if statusOf(err) != http.StatusBadRequest || readOnly(answerOf(err)) != "" {
		return a, settingsError(err)
	}
	a, err = p.write(ctx, http.MethodPatch, b.pending, plain)
	return a, settingsError(err)
}

// propertyFaults are the messages that blame a value of the request.
var propertyFaults = []string{
	"PropertyNotWritable", "PropertyUnknown", "PropertyValueNotInList", "PropertyValueTypeError", "PropertyValueFormatError",
	"PropertyValueOutOfRange", "PropertyValueIncorrect", "PropertyValueError", "PropertyValueConflict", "AttributeNotWritable",
}

// readOnly is what an answer says against a value of the request; empty: nothing.
func readOnly(a *answer) string {
	if a == nil {
		return ""
	}
	for _, m := range a.object().allMessages() {
		if m.is(propertyFaults...) && !strings.Contains(strings.Join(append(m.args, m.text), " "), "ApplyTime") {
			return m.say()
		}
	}
	return ""
}

// settingsError makes what a BMC says against a value invalid-args.
func settingsError(err error) error {
	if why := readOnly(answerOf(err)); why != "" && statusOf(err)/100 == 4 {
		return errs.New(errs.InvalidArgs, "the BMC refuses a setting: %s", legible(why))
	}
	return err
}

// refused finds what a success says against a value.
func refused(a *answer) error {
	if why := readOnly(a); why != "" {
		return errs.New(errs.InvalidArgs, "the BMC refuses a setting: %s", legible(why))
	}
	return nil
}

// proveSettings reads the changes back where they wait. What the Bios resource
// shows says nothing: some BMCs show there at once what is pending.
func (p *provider) proveSettings(ctx context.Context, before bios, changes map[string]any) error {
	missing := ""
	ok, err := p.until(ctx, p.timing.settle, func(ctx context.Context) (bool, error) {
		b, err := p.bios(ctx)
		if err != nil {
			return false, err
		}
		if why := b.blamed(before); why != "" {
			return false, errs.New(errs.InvalidArgs, "the BMC refuses a setting: %s", legible(why))
		}
		missing = ""
		for _, name := range slices.Sorted(maps.Keys(changes)) {
			if v, has := b.next[name]; !has || !same(v, changes[name]) {
				missing = name
				return false, nil
			}
		}
		return true, nil
	})
	switch {
	case ok:
		return nil
	case err != nil:
		return err
	}
	return errs.New(errs.BmcError, "the BMC accepted the settings and does not show %q as pending", missing)
}

// blamed is what the results of the settings say that they did not say before.
func (b bios) blamed(before bios) string {
	if b.messages == before.messages {
		return ""
	}
	for _, m := range b.resource.object("@Redfish.Settings").messages("Messages") {
		if m.is(propertyFaults...) || m.severity == "critical" {
			return m.say()
		}
	}
	return ""
}
