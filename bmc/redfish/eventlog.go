package redfish

import (
	"context"
	"slices"
	"strings"
	"time"

	bmclib "github.com/bmc-toolbox/bmclib/v2"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

const (
	// maxEntries is how many of the newest lines of a log go home.
	maxEntries = 200
	// maxServices is how many logs of one BMC are looked at.
	maxServices = 16
)

// GetEventLog answers the newest lines of the machine's event log. It goes past
// bmclib's own call, whose lines of text have lost time and severity.
func (m *machine) GetEventLog(ctx *driver.Context) (entries []metal.LogEntry, err error) {
	err = m.with(ctx, func(_ *bmclib.Client, p *provider) error {
		entries, err = p.eventLog(ctx)
		return err
	})
	return entries, err
}

// eventLog reads the log that holds the machine's hardware events.
func (p *provider) eventLog(ctx context.Context) ([]metal.LogEntry, error) {
	service, err := p.logService(ctx)
	if err != nil {
		return nil, err
	}
	id := service.object("Entries").text("@odata.id")
	if id == "" {
		return nil, errs.New(errs.BmcError, "the BMC's event log has no entries to read")
	}
	path, err := p.resource(id)
	if err != nil {
		return nil, err
	}
	var entries []metal.LogEntry
	var links []string // of entries that the collection only names
	err = p.pages(ctx, path, func(o object) error {
		for _, member := range o.objects("Members") {
			if member["Message"] != nil || member["Created"] != nil || member["EntryType"] != nil {
				entries = append(entries, logEntry(member))
			} else if id := member.text("@odata.id"); id != "" {
				links = append(links, id)
			}
		}
		entries = newest(entries)
		return nil
	})
	if err != nil {
		return nil, err
	}
	// Which end of a list of bare links is the newer one is not said, most begin
	// with the oldest.
	for _, id := range links[max(0, len(links)-maxEntries):] {
		at, err := p.resource(id)
		if err != nil {
			return nil, err
		}
		o, err := p.get(ctx, at)
		if absent(err) {
			continue // the log went on meanwhile
		}
		if err != nil {
			return nil, err
		}
		entries = append(entries, logEntry(o))
	}
	return newest(entries), nil
}

// newest sorts by time, the oldest first, and keeps the end. Entries without a
// time stay where the BMC has them.
func newest(entries []metal.LogEntry) []metal.LogEntry {
	if !slices.ContainsFunc(entries, func(e metal.LogEntry) bool { return e.Time == nil }) {
		slices.SortStableFunc(entries, func(a, b metal.LogEntry) int { return a.Time.Compare(*b.Time) })
	}
	return entries[max(0, len(entries)-maxEntries):]
}

// logEntry reads one entry.
func logEntry(o object) metal.LogEntry {
	e := metal.LogEntry{ID: legible(o.text("Id")), Message: legible(o.text("Message")), Severity: severity(o)}
	if e.Message == "" {
		e.Message = legible(o.text("Name"))
	}
	if t, err := time.Parse(time.RFC3339, o.text("Created")); err == nil {
		e.Time = &t
	}
	if e.Sensor = legible(o.text("SensorType")); e.Sensor == "" {
		e.Sensor = legible(o.text("OemSensorType"))
	}
	return e
}

// severity is ok, warning or critical, and empty where the BMC says another or none.
func severity(o object) string {
	text := o.text("Severity")
	if text == "" {
		text = o.text("MessageSeverity")
	}
	switch text = strings.ToLower(text); text {
	case "ok", "warning", "critical":
		return text
	case "informational", "info":
		return "ok"
	}
	return ""
}

// logService is the log to read of all that system and manager have: the System
// Event Log before another log of events.
func (p *provider) logService(ctx context.Context) (object, error) {
	s, err := p.find(ctx)
	if err != nil {
		return nil, err
	}
	services, err := p.logServices(ctx, s.object)
	if err != nil {
		return nil, err
	}
	if len(services) == 0 || rank(services[0]) < rankSEL {
		_, manager, err := p.manager(ctx)
		if err != nil {
			return nil, err
		}
		more, err := p.logServices(ctx, manager)
		if err != nil {
			return nil, err
		}
		services = append(services, more...)
	}
	if len(services) == 0 {
		return nil, errs.New(errs.UnsupportedOperation, "the BMC has no event log")
	}
	slices.SortStableFunc(services, func(a, b object) int { return rank(b) - rank(a) })
	return services[0], nil
}

const rankSEL = 3

// rank is how likely a service is the log of the machine's hardware.
func rank(service object) int {
	id := strings.ToLower(service.text("Id"))
	switch {
	case strings.EqualFold(service.text("LogEntryType"), "SEL"), id == "sel", id == "iml":
		return rankSEL
	case strings.Contains(strings.ToLower(service.text("Name")), "event log"), strings.Contains(id, "event"):
		return 2
	case strings.Contains(id, "audit"), strings.Contains(id, "fault"), strings.Contains(id, "lc"):
		return 0
	}
	return 1
}

func (p *provider) logServices(ctx context.Context, owner object) ([]object, error) {
	id := owner.object("LogServices").text("@odata.id")
	if id == "" {
		return nil, nil
	}
	collection, err := p.resource(id)
	if err != nil {
		return nil, err
	}
	members, err := p.members(ctx, collection)
	if absent(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var services []object
	for _, path := range members[:min(len(members), maxServices)] {
		o, err := p.get(ctx, path)
		if absent(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if o["Entries"] != nil {
			services = append(services, o)
		}
	}
	slices.SortStableFunc(services, func(a, b object) int { return rank(b) - rank(a) })
	return services, nil
}
