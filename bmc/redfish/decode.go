package redfish

import (
	"bytes"
	"encoding/json"
	"strings"
	"unicode"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// object is a JSON object of which only what is asked for is decoded: a field
// of the wrong type, common on BMCs, counts as absent and spoils nothing else.
type object map[string]json.RawMessage

func parseObject(data []byte) (object, error) {
	data = bytes.TrimPrefix(bytes.TrimSpace(data), []byte("\xef\xbb\xbf"))
	var o object
	if err := json.Unmarshal(data, &o); err != nil || o == nil {
		return nil, errs.New(errs.BmcError, "the BMC's answer is not a JSON object")
	}
	return o, nil
}

func (o object) text(key string) string {
	var s string
	if json.Unmarshal(o[key], &s) != nil {
		return ""
	}
	return s
}

func (o object) texts(key string) []string {
	var raw []json.RawMessage
	if json.Unmarshal(o[key], &raw) != nil {
		return nil
	}
	var out []string
	for _, r := range raw {
		var s string
		if json.Unmarshal(r, &s) == nil && s != "" {
			out = append(out, s)
		}
	}
	return out
}

func (o object) object(key string) object {
	var inner object
	if json.Unmarshal(o[key], &inner) != nil {
		return nil
	}
	return inner
}

// links are the @odata.id values of an array of references.
func (o object) links(key string) []string {
	var members []json.RawMessage
	if json.Unmarshal(o[key], &members) != nil {
		return nil
	}
	var out []string
	for _, m := range members {
		var member object
		if json.Unmarshal(m, &member) == nil && member.text("@odata.id") != "" {
			out = append(out, member.text("@odata.id"))
		}
	}
	return out
}

// system is what we need of a ComputerSystem.
type system struct {
	path    string
	etag    string
	power   string   // as the BMC says it
	kind    string   // SystemType; empty: not said
	reset   string   // target of the reset action; empty: none
	resets  []string // allowed reset types; nil: not said
	boot    object
	targets []string // allowed boot targets; nil: not said
	enables []string // allowed values of BootSourceOverrideEnabled; nil: not said
}

func parseSystem(path string, data []byte) (*system, error) {
	o, err := parseObject(data)
	if err != nil {
		return nil, err
	}
	s := &system{path: path, etag: o.text("@odata.etag"), power: o.text("PowerState"), kind: o.text("SystemType"), boot: o.object("Boot")}
	action := o.object("Actions").object("#ComputerSystem.Reset")
	if target := action.text("target"); target != "" {
		if s.reset, err = resource(target); err != nil {
			return nil, err
		}
	}
	s.resets = action.texts("ResetType@Redfish.AllowableValues")
	s.targets = s.boot.texts("BootSourceOverrideTarget@Redfish.AllowableValues")
	s.enables = s.boot.texts("BootSourceOverrideEnabled@Redfish.AllowableValues")
	return s, nil
}

// powerState is on, off or unknown.
func (s *system) powerState() string {
	switch strings.ToLower(s.power) {
	case "on", "paused":
		return "on"
	case "off":
		return "off"
	}
	return "unknown"
}

// bootTargets are our devices in Redfish's words, the standard one first.
var bootTargets = map[string][]string{
	"none":  {"None"},
	"pxe":   {"Pxe"},
	"disk":  {"Hdd"},
	"cdrom": {"Cd", "CD/DVD"},
	"bios":  {"BiosSetup"},
}

// otherDevice stands for a target that we have no word for.
const otherDevice = "other"

// bootDevice is the override in force.
func (s *system) bootDevice() BootDevice {
	enabled, target := s.boot.text("BootSourceOverrideEnabled"), s.boot.text("BootSourceOverrideTarget")
	if enabled == "" || strings.EqualFold(enabled, "Disabled") || target == "" || strings.EqualFold(target, "None") {
		return BootDevice{Device: "none"}
	}
	dev := BootDevice{
		Device:     otherDevice,
		Persistent: strings.EqualFold(enabled, "Continuous"),
		EFI:        strings.EqualFold(s.boot.text("BootSourceOverrideMode"), "UEFI"),
	}
	for device, words := range bootTargets {
		for _, word := range words {
			if strings.EqualFold(word, target) {
				dev.Device = device
			}
		}
	}
	return dev
}

// pick is the first of words that allowed holds, as the BMC spells it. A BMC
// that does not say what it allows is taken at the standard's word.
func pick(allowed []string, words ...string) (string, bool) {
	if allowed == nil {
		return words[0], true
	}
	for _, word := range words {
		for _, a := range allowed {
			if strings.EqualFold(a, word) {
				return a, true
			}
		}
	}
	return "", false
}

// reason is what an error answer says to a person.
func reason(data []byte) string {
	o, err := parseObject(data)
	if err != nil {
		return ""
	}
	inner := o.object("error")
	var infos []object
	if json.Unmarshal(inner["@Message.ExtendedInfo"], &infos) == nil {
		for _, info := range infos {
			if m := info.text("Message"); m != "" {
				return printable(m)
			}
		}
	}
	return printable(inner.text("message"))
}

// maxReason is how much of a BMC's own words goes into an error.
const maxReason = 200

// printable makes a BMC's words safe to print and short.
func printable(s string) string {
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
	if runes := []rune(s); len(runes) > maxReason {
		return string(runes[:maxReason]) + "..."
	}
	return s
}
