package redfish

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmctest"
)

// soakCodes are what an operation may fail with.
var soakCodes = []errs.Code{
	errs.BmcError, errs.Unreachable, errs.Timeout, errs.Interrupted, errs.UnsupportedOperation, errs.PinMismatch, errs.TLSUnsupported,
	errs.PasswordChangeRequired, errs.CredentialsUnavailable, errs.CredentialsUnchanged, errs.SessionLimit, errs.BootOnceOnly, errs.MediaUntrusted, errs.InvalidArgs, errs.Unavailable,
}

// harmless say that nothing was done.
var harmless = []errs.Code{
	errs.UnsupportedOperation, errs.PinMismatch, errs.TLSUnsupported, errs.PasswordChangeRequired, errs.CredentialsUnavailable, errs.InvalidArgs, errs.SessionLimit,
}

// powerLines are the lines of the rig's log that each power action may leave, in
// this order, each once. Graceful and hard never stand in for each other.
var powerLines = map[string][][]string{
	"on": {{"on"}}, "off": {{"off"}}, "soft": {{"soft"}}, "cycle": {{"cycle"}, {"off", "on"}}, "reset": {{"reset"}}, "nmi": {{"nmi"}},
}

// judge says what is wrong with a step. It looks at nothing but the step.
func judge(s soakStep) (wrong []string) {
	say := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	var e *errs.Error
	if s.err != nil && (!errors.As(s.err, &e) || !slices.Contains(soakCodes, e.Code) || e.Message == "") {
		say("the error has no code that it may have")
	}
	// Where nothing is or ever was wrong, all succeeds, unless the machine cannot.
	if s.clean && len(s.faults) == 0 && s.err != nil && !cannot(s) {
		say("it fails though nothing is wrong with the BMC")
	}
	text := fmt.Sprint(s.err, s.told, string(s.result))
	for _, secret := range []string{s.before.password, s.after.password, s.fresh} {
		if secret != "" && strings.Contains(text, secret) {
			say("it tells a password")
		}
	}
	if strings.ContainsFunc(text, func(r rune) bool { return r < ' ' && r != '\n' && r != '\t' || r == 0x7f }) || strings.Contains(text, `\u001b`) {
		say("it tells an escape sequence")
	}
	judgeEffects(s, say)
	switch code := errs.CodeOf(s.err); {
	case slices.Contains(harmless, code) && len(s.effects) > 0:
		say("it says that it did nothing, and did %q", s.effects)
	case code == errs.BootOnceOnly && (s.after.boot.Persistent || s.after.boot.Device != s.args[0].(device).Device):
		say("the boot device is not as it says")
	case code == errs.CredentialsUnchanged && s.after.password != s.before.password:
		say("the password is not as it says")
	}
	if s.err == nil {
		judgeSuccess(s, say)
	}
	if s.operation != "credentials.rotate" && s.before.password != s.after.password {
		say("the password changed")
	}
	return wrong
}

// cannot is what fails on a BMC that does right.
func cannot(s soakStep) bool {
	if s.operation != "power.setPower" {
		return false
	}
	// A machine without power cannot be cycled, reset or interrupted.
	return !s.before.on && slices.Contains([]string{"cycle", "reset", "nmi"}, s.args[0].(string))
}

func verb(line string) string {
	if strings.HasPrefix(line, "graceful restart") {
		return "graceful restart"
	}
	word, _, _ := strings.Cut(line, " ")
	return word
}

func count(lines []string, prefix string) (n int) {
	for _, l := range lines {
		if strings.HasPrefix(l, prefix) {
			n++
		}
	}
	return n
}

// judgeEffects holds what the rig did against what was asked of it.
func judgeEffects(s soakStep, say func(string, ...any)) {
	var power []string
	for _, l := range s.effects {
		// With a manager in the first one's place, the second is the only system.
		if strings.HasPrefix(l, "second: ") && !s.has(bmctest.ManagerAsSystem) {
			say("another system of the BMC was changed: %s", l)
		}
		if strings.HasPrefix(l, "failed: ") {
			continue
		}
		switch v := verb(l); v {
		case "on", "off", "soft", "cycle", "reset", "graceful restart", "nmi":
			power = append(power, v)
		case "manager":
			if s.operation != "management.resetBmc" {
				say("the BMC was restarted")
			}
		case "password":
			if s.operation != "credentials.rotate" {
				say("the password was changed")
			}
		case "media":
			if !strings.HasPrefix(s.operation, "virtual-media.") || s.operation == "virtual-media.status" {
				say("media was changed: %s", l)
			}
		case "bootdev":
			// A power action may set again what it made the BMC forget.
			if s.operation != "management.setBootDevice" && s.operation != "power.setPower" {
				say("the boot device was changed: %s", l)
			}
		case "secure":
			if s.operation != "management.setSecureBoot" {
				say("secure boot was changed: %s", l)
			}
		case "log":
			say("the event log was cleared")
		}
	}
	var allowed [][]string
	if s.operation == "power.setPower" {
		allowed = powerLines[s.args[0].(string)]
	}
	fits := len(power) == 0
	for _, list := range allowed {
		fits = fits || len(power) <= len(list) && slices.Equal(power, list[:len(power)])
	}
	if !fits {
		say("it did %q", power)
	}
	// What is never repeated: each is this step's alone in all of the log.
	for _, one := range []struct{ operation, line string }{
		{"firmware.update", "firmware BIOS " + s.mark}, {"raid.applyLayout", "volume create RAID1 " + s.mark + " "},
	} {
		if n := count(s.whole, one.line); s.operation == one.operation && n > 1 {
			say("%q was done %d times", one.line, n)
		}
	}
	if n := count(s.effects, "manager reset"); n > 1 {
		say("the BMC was restarted %d times", n)
	}
	if n := count(s.effects, "password changed"); n > 1 && !lossy(s) {
		say("the password was changed %d times", n)
	}
	if n := count(s.effects, "media insert"); n > 1 && !lossy(s) {
		say("the disc was inserted %d times", n)
	}
}

// lossy says that an answer can be lost: what does no harm twice may be sent again.
func lossy(s soakStep) bool {
	return s.has(bmctest.DropsAfter, bmctest.ResetsAfter, bmctest.FailsAfter, bmctest.AnswersLate)
}

// judgeSuccess holds a success against the truth.
func judgeSuccess(s soakStep, say func(string, ...any)) {
	switch s.operation {
	case "power.getPower":
		var got string
		_ = json.Unmarshal(s.result, &got)
		want := map[bool]string{true: "on", false: "off"}[s.before.on]
		if got != want && !(got == "unknown" && s.has(bmctest.PowerShownLate)) {
			say("it says %q of a machine that is %s", got, want)
		}
	case "power.setPower":
		action := s.args[0].(string)
		want, seen := map[string]bool{"on": true, "off": false, "soft": false, "cycle": true, "reset": true}[action]
		if seen && s.after.on != want {
			say("it succeeded, and the machine is on: %v", s.after.on)
		}
		acted := slices.ContainsFunc(s.effects, func(l string) bool { return verb(l) != "bootdev" })
		idle := action == "on" && s.before.on || (action == "off" || action == "soft") && !s.before.on
		// That a reset did not happen is seen by nobody but the rig.
		if !acted && !idle && !s.has(bmctest.PowerIgnored) {
			say("it succeeded and did nothing")
		}
		if acted && idle {
			say("the machine was so already")
		}
	case "management.setBootDevice":
		want := s.args[0].(device)
		if s.has(bmctest.BootSettings) {
			return // it waits in the settings object
		}
		switch {
		case want.Device == "none":
			if s.after.enabled != "Disabled" && s.after.boot.Device != "none" {
				say("it succeeded, and the override is there")
			}
		case s.after.boot.Device != want.Device:
			say("it succeeded with another device")
		case s.after.boot.Persistent != want.Persistent:
			say("it succeeded for every boot, or for one")
		case s.after.boot.EFI != want.EFI && !s.has(bmctest.BootModeRefused):
			say("it succeeded with another mode")
		}
	case "virtual-media.insert":
		if s.after.media != s.mark {
			say("it succeeded, and the drive holds %q", s.after.media)
		}
	case "virtual-media.eject":
		if s.after.media != "" {
			say("it succeeded, and the drive holds %q", s.after.media)
		}
	case "credentials.rotate":
		if s.after.password != s.fresh {
			say("it succeeded, and the new password does not hold")
		}
	case "firmware.update", "raid.applyLayout", "bios.applySettings":
		line := map[string]string{"firmware.update": "firmware BIOS ", "raid.applyLayout": "volume create RAID1 ", "bios.applySettings": "bios set AdminPhone="}[s.operation] + s.mark
		var a struct{ RebootNeeded bool }
		_ = json.Unmarshal(s.result, &a)
		if count(s.whole, line) == 0 && !a.RebootNeeded {
			say("it succeeded, needs no boot, and nothing was done")
		}
	case "inspect.inspect":
		if !json.Valid(s.result) || !strings.Contains(string(s.result), "{") {
			say("its result is no object")
		}
	}
}

// The judge finds each wrong that it is there for.
func TestSoakJudge(t *testing.T) {
	same := truth{on: true, password: "secret-old"}
	off := truth{password: "secret-old"}
	for name, tt := range map[string]struct {
		s    soakStep
		want string // empty: nothing is wrong
	}{
		"right":             {soakStep{operation: "power.getPower", before: same, after: same, result: json.RawMessage(`"on"`)}, ""},
		"wrong reading":     {soakStep{operation: "power.getPower", before: same, after: same, result: json.RawMessage(`"off"`)}, `it says "off"`},
		"no code":           {soakStep{operation: "power.getPower", before: same, after: same, faults: []bmctest.Fault{bmctest.NotJSON}, err: errors.New("x")}, "no code"},
		"internal":          {soakStep{operation: "power.getPower", before: same, after: same, faults: []bmctest.Fault{bmctest.NotJSON}, err: errs.New(errs.Internal, "x")}, "no code"},
		"fails for nothing": {soakStep{operation: "power.getPower", clean: true, before: same, after: same, err: errs.New(errs.BmcError, "x")}, "nothing is wrong with the BMC"},
		"typed":             {soakStep{operation: "power.getPower", before: same, after: same, err: errs.New(errs.BmcError, "x")}, ""},
		"tells a password":  {soakStep{operation: "power.getPower", before: same, after: same, err: errs.New(errs.BmcError, "it said secret-old")}, "tells a password"},
		"tells an escape":   {soakStep{operation: "inspect.inspect", before: same, after: same, result: json.RawMessage(`{"serial":"\u001b[2J"}`)}, "escape"},
		"twice":             {soakStep{operation: "power.setPower", args: []any{"cycle"}, before: same, after: same, effects: []string{"cycle none", "cycle none"}}, `it did ["cycle" "cycle"]`},
		"twice and failed":  {soakStep{operation: "power.setPower", args: []any{"reset"}, before: same, after: same, effects: []string{"reset none", "reset none"}, err: errs.New(errs.Interrupted, "x")}, `it did ["reset" "reset"]`},
		"off and on":        {soakStep{operation: "power.setPower", args: []any{"cycle"}, before: same, after: same, effects: []string{"off", "on none"}}, ""},
		"on and off":        {soakStep{operation: "power.setPower", args: []any{"cycle"}, before: same, after: same, effects: []string{"on none", "off"}}, "it did"},
		"soft for hard":     {soakStep{operation: "power.setPower", args: []any{"off"}, before: same, after: off, effects: []string{"soft"}}, `it did ["soft"]`},
		"hard for soft":     {soakStep{operation: "power.setPower", args: []any{"soft"}, before: same, after: off, effects: []string{"off"}}, `it did ["off"]`},
		"graceful restart":  {soakStep{operation: "power.setPower", args: []any{"reset"}, before: same, after: same, effects: []string{"graceful restart none"}}, "it did"},
		"a claim":           {soakStep{operation: "power.setPower", args: []any{"off"}, before: same, after: same}, "the machine is on"},
		"nothing done":      {soakStep{operation: "power.setPower", args: []any{"reset"}, before: same, after: same}, "did nothing"},
		"a query that acts": {soakStep{operation: "power.getPower", before: same, after: off, result: json.RawMessage(`"on"`), effects: []string{"off"}}, "it did"},
		"another system":    {soakStep{operation: "power.setPower", args: []any{"off"}, before: same, after: same, effects: []string{"second: ForceOff"}, err: errs.New(errs.BmcError, "x")}, "another system"},
		"firmware twice":    {soakStep{operation: "firmware.update", mark: "2.7", before: same, after: same, whole: []string{"firmware BIOS 2.7", "off", "firmware BIOS 2.7"}, err: errs.New(errs.Interrupted, "x")}, "2 times"},
		"firmware claimed":  {soakStep{operation: "firmware.update", mark: "2.7", before: same, after: same, result: json.RawMessage(`{"rebootNeeded":false}`)}, "nothing was done"},
		"wrong disc":        {soakStep{operation: "virtual-media.insert", mark: "https://a/b.iso", before: same, after: same}, "the drive holds"},
		"wrong boot":        {soakStep{operation: "management.setBootDevice", args: []any{device{Device: "pxe"}}, before: same, after: same}, "another device"},
		"quiet downgrade":   {soakStep{operation: "management.setBootDevice", args: []any{device{"pxe", true, true}}, before: same, after: truth{on: true, password: "secret-old", boot: device{"pxe", false, true}}}, "for one"},
		"untrue downgrade":  {soakStep{operation: "management.setBootDevice", args: []any{device{"pxe", true, true}}, before: same, after: same, err: errs.New(errs.BootOnceOnly, "x")}, "not as it says"},
		"untrue refusal":    {soakStep{operation: "power.setPower", args: []any{"off"}, before: same, after: off, effects: []string{"off"}, err: errs.New(errs.UnsupportedOperation, "x")}, "it says that it did nothing"},
		"untrue unchanged":  {soakStep{operation: "credentials.rotate", fresh: "new-pass", before: same, after: truth{on: true, password: "new-pass"}, err: errs.New(errs.CredentialsUnchanged, "x")}, "not as it says"},
		"password lost":     {soakStep{operation: "credentials.rotate", fresh: "new-pass", before: same, after: same}, "does not hold"},
		"password moved":    {soakStep{operation: "power.getPower", before: same, after: truth{on: true, password: "other-one"}, result: json.RawMessage(`"on"`)}, "the password changed"},
		"log cleared":       {soakStep{operation: "management.getEventLog", before: same, after: same, effects: []string{"log cleared"}}, "cleared"},
	} {
		got := judge(tt.s)
		if tt.want == "" && len(got) > 0 || tt.want != "" && !slices.ContainsFunc(got, func(w string) bool { return strings.Contains(w, tt.want) }) {
			t.Errorf("%s: judge = %q, want %q", name, got, tt.want)
		}
	}
}
