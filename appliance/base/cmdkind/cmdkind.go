// Package cmdkind says what the commands to sites and ramdisks are called, in
// which lane each waits, and what it carries: to the gateway, which sends them, and
// to the boxes, which serve them.
package cmdkind

import "slices"

// The kinds, as noun.verb.
const (
	Query    = "bmc.query"
	Boot     = "bmc.boot"
	Power    = "bmc.power"
	Media    = "bmc.media"
	BIOS     = "bmc.bios"
	RAID     = "bmc.raid"
	Rotate   = "bmc.rotate"
	Firmware = "bmc.firmware"
	Console  = "bmc.console"
	Bind     = "bmc.bind"
	Confirm  = "bmc.confirm"
	Proxy    = "site.httpProxy"
	Assign   = "pxe.assign"
	Explain  = "pxe.explain"
	Stream   = "image.stream"
	Fetch    = "artifact.fetch"
	Wipe     = "disk.wipe"
)

// Kind is one command kind.
type Kind struct {
	Name, Lane string
	// RetrySafe says that whatever it carries may run twice without harm.
	RetrySafe bool
	// Operations are the BMC drivers' that it carries, all that it may. A kind
	// without any has a message of its own.
	Operations []string
}

// kinds carry each operation once; one that stands in none is carried by none.
var kinds = []Kind{
	{Query, "query", true, []string{
		"power.getPower", "management.getBootDevice", "management.getEventLog", "management.getSecureBoot",
		"inspect.inspect", "firmware.list", "bios.getSettings", "raid.getLayout", "virtual-media.status",
	}},
	{Boot, "power", true, []string{"management.setBootDevice", "management.setSecureBoot"}},
	{Power, "power", false, []string{"power.setPower", "management.resetBmc"}},
	{Media, "provision", true, []string{"virtual-media.insert", "virtual-media.eject"}},
	{BIOS, "provision", false, []string{"bios.applySettings", "bios.resetSettings"}},
	{RAID, "provision", false, []string{"raid.applyLayout"}},
	{Rotate, "provision", false, []string{"credentials.rotate"}},
	{Firmware, "transfer", false, []string{"firmware.update"}},
	{Console, "proxy", false, []string{"console.open"}},
	{Bind, "power", false, nil},
	{Confirm, "query", true, nil},
	{Proxy, "proxy", false, nil},
	{Assign, "provision", true, nil},
	{Explain, "query", true, nil},
	{Stream, "transfer", false, nil},
	{Fetch, "transfer", true, nil},
	{Wipe, "transfer", false, nil},
}

// All are the kinds.
func All() []Kind {
	all := slices.Clone(kinds)
	for i := range all {
		all[i].Operations = slices.Clone(all[i].Operations)
	}
	return all
}

// Named is the kind of that name.
func Named(name string) (Kind, bool) {
	i := slices.IndexFunc(kinds, func(k Kind) bool { return k.Name == name })
	if i < 0 {
		return Kind{}, false
	}
	return All()[i], true
}

// Lane is the named kind's; empty: there is no such kind.
func Lane(name string) string {
	k, _ := Named(name)
	return k.Lane
}

// Of is the name of the kind that carries an operation; empty: none does.
func Of(operation string) string {
	for _, k := range kinds {
		if slices.Contains(k.Operations, operation) {
			return k.Name
		}
	}
	return ""
}
