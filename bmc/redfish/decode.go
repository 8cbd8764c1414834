package redfish

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"net"
	"regexp"
	"strconv"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/printable"
)

// object is a JSON object of which only what is asked for is decoded: a field
// of the wrong type, common on BMCs, counts as absent and spoils nothing else.
type object map[string]json.RawMessage

// maxDepth is how deep JSON may nest; real answers stay under twenty.
const maxDepth = 64

func parseObject(data []byte) (object, error) {
	data = bytes.TrimPrefix(bytes.TrimSpace(data), []byte("\xef\xbb\xbf"))
	if tooDeep(data) {
		return nil, errs.New(errs.BmcError, "the BMC's answer nests deeper than %d levels", maxDepth)
	}
	var o object
	if err := json.Unmarshal(data, &o); err != nil || o == nil {
		return nil, errs.New(errs.BmcError, "the BMC's answer is not a JSON object")
	}
	return o, nil
}

// tooDeep counts brackets outside of strings, before anything is built of them.
func tooDeep(data []byte) bool {
	depth, quoted := 0, false
	for i := 0; i < len(data); i++ {
		switch c := data[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{' || c == '[':
			if depth++; depth > maxDepth {
				return true
			}
		case c == '}' || c == ']':
			depth--
		}
	}
	return false
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

// objects are the objects of an array; what else it holds is left out.
func (o object) objects(key string) []object {
	var raw []json.RawMessage
	if json.Unmarshal(o[key], &raw) != nil {
		return nil
	}
	var out []object
	for _, r := range raw {
		var inner object
		if json.Unmarshal(r, &inner) == nil && inner != nil {
			out = append(out, inner)
		}
	}
	return out
}

// boolean is a field's value, and whether it is one.
func (o object) boolean(key string) (value, ok bool) {
	var b *bool
	if json.Unmarshal(o[key], &b) != nil || b == nil {
		return false, false
	}
	return *b, true
}

// number is a field's value, and whether it is one.
func (o object) number(key string) (value float64, ok bool) {
	var n *float64
	if json.Unmarshal(o[key], &n) != nil || n == nil {
		return 0, false
	}
	return *n, true
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

// pick is the first of words that allowed holds, as the BMC spells it. A BMC
// that does not say what it allows is taken at the standard's word.
func pick[S ~string](allowed []string, words ...S) (string, bool) {
	if allowed == nil {
		return string(words[0]), true
	}
	for _, word := range words {
		for _, a := range allowed {
			if strings.EqualFold(a, string(word)) {
				return a, true
			}
		}
	}
	return "", false
}

// maxReason is how much of a BMC's own words goes into an error.
const maxReason = 200

// legible makes a BMC's words safe to print and short. Nothing that it said goes
// home without it: what stands in a serial number may end in a terminal.
func legible(s string) string { return printable.Excerpt(s, ' ', maxReason) }

// link is the path that a reference names; empty: none, or none that is followed.
func (c *conn) link(o object, key string) string {
	return c.path(o.object(key).text("@odata.id"))
}

// path is the one that an identifier stands for; empty: none.
func (c *conn) path(id string) string {
	if id == "" {
		return ""
	}
	path, err := c.resource(id)
	if err != nil {
		return ""
	}
	return path
}

// count is a whole number from 0 up to most; anything else is 0.
func (o object) count(key string, most float64) uint64 {
	v, ok := o.number(key)
	if !ok || v < 0 || v > most || v != math.Trunc(v) {
		return 0
	}
	return uint64(v)
}

// scalars are the values of an object that are text, numbers or booleans, the
// numbers to the last digit.
func (o object) scalars(key string) map[string]any {
	out := map[string]any{}
	for name, raw := range o.object(key) {
		if strings.Contains(name, "@") {
			continue
		}
		if v := scalar(raw); v != nil {
			out[name] = v
		}
	}
	return out
}

// scalar is text, a number or a boolean; nil: something else.
func scalar(raw json.RawMessage) any {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	var v any
	if dec.Decode(&v) != nil {
		return nil
	}
	switch v.(type) {
	case string, bool, json.Number:
		return v
	}
	return nil
}

// blanks are what makers write where they know nothing.
var blanks = map[string]bool{
	"": true, "-": true, "n/a": true, "na": true, "none": true, "null": true, "unknown": true, "empty": true,
	"not available": true, "not specified": true, "not provided": true, "no dimm": true,
	"to be filled by o.e.m.": true, "default string": true, "0x": true,
}

// word is a text for people: printable, trimmed, and empty for what says nothing.
func (o object) word(key string) string { return word(o.text(key)) }

func word(s string) string {
	s = strings.Join(strings.Fields(legible(s)), " ")
	if blanks[strings.ToLower(s)] {
		return ""
	}
	return s
}

// first is the first that says anything.
func first(words ...string) string {
	for _, w := range words {
		if w != "" {
			return w
		}
	}
	return ""
}

var uuidForm = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)

// uuid is a UUID in lower case; empty for what is none, or says nothing.
func (o object) uuid(key string) string {
	s := strings.ToLower(strings.TrimSpace(o.text(key)))
	if !uuidForm.MatchString(s) || strings.Trim(s, "0-") == "" || strings.Trim(s, "f-") == "" {
		return ""
	}
	return s
}

var bareMAC = regexp.MustCompile(`^[0-9A-Fa-f]{12}$`)

// mac is an address of 6 bytes in lower case with colons, however the BMC
// writes it; empty for what is none.
func mac(s string) string {
	s = strings.TrimSpace(s)
	if bareMAC.MatchString(s) {
		var parts []string
		for i := 0; i < len(s); i += 2 {
			parts = append(parts, s[i:i+2])
		}
		s = strings.Join(parts, ":")
	}
	hw, err := net.ParseMAC(s)
	if err != nil || len(hw) != 6 {
		return ""
	}
	text := hw.String()
	if text == "00:00:00:00:00:00" || text == "ff:ff:ff:ff:ff:ff" {
		return ""
	}
	return text
}

// missing says whether a resource stands for an empty slot.
func (o object) missing() bool {
	return strings.EqualFold(o.object("Status").text("State"), "Absent")
}

// health is ok, warning or critical, or what the BMC says of the state where it
// says nothing of the health.
func (o object) health() string {
	status := o.object("Status")
	h := strings.ToLower(status.word("Health"))
	if state := strings.ToLower(status.word("State")); h == "" && state != "enabled" {
		return state
	}
	return h
}

// bare says whether a collection's member is a reference alone.
func (o object) bare() bool {
	for key := range o {
		if !strings.HasPrefix(key, "@") && key != "Id" && key != "Name" {
			return false
		}
	}
	return true
}

// lastPart is the name at the end of a path.
func lastPart(path string) string {
	path = strings.TrimSuffix(path, "/")
	return path[strings.LastIndexByte(path, '/')+1:]
}

func digits(s string) bool {
	_, err := strconv.ParseUint(s, 10, 64)
	return err == nil
}

// message is one of an answer's @Message.ExtendedInfo or a task's Messages.
type message struct {
	id, text, severity string
	args               []string
}

func (o object) messages(key string) []message {
	var out []message
	for _, m := range o.objects(key) {
		out = append(out, message{
			id: legible(m.text("MessageId")), text: legible(m.text("Message")),
			severity: strings.ToLower(first(m.text("MessageSeverity"), m.text("Severity"))),
			args:     m.texts("MessageArgs"),
		})
	}
	return out
}

// allMessages are those of an answer, of its error and of its properties.
func (o object) allMessages() []message {
	out := append(o.object("error").messages("@Message.ExtendedInfo"), o.messages("@Message.ExtendedInfo")...)
	for key := range o {
		if strings.HasSuffix(key, "@Message.ExtendedInfo") && key != "@Message.ExtendedInfo" {
			out = append(out, o.messages(key)...)
		}
	}
	return out
}

// is says whether the message is one of the registry's names, whatever the
// registry's version is.
func (m message) is(names ...string) bool {
	tail := m.id[strings.LastIndexByte(m.id, '.')+1:]
	for _, name := range names {
		if strings.EqualFold(tail, name) {
			return true
		}
	}
	return false
}

// critical: some BMCs call even a success that.
func (m message) critical() bool {
	return (m.severity == "critical" || m.severity == "fatal") && !m.is("Success", "NoError", "Created")
}

// say is the message for a person.
func (m message) say() string { return first(strings.TrimSpace(m.text), m.id, "no reason given") }

// answerOf is the answer behind an error; nil: none.
func answerOf(err error) *answer {
	var r *refusal
	if !errors.As(err, &r) {
		return nil
	}
	return r.answer
}
