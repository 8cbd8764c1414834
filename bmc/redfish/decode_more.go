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
)

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
	s = strings.Join(strings.Fields(printable(s)), " ")
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
			id: printable(m.text("MessageId")), text: printable(m.text("Message")),
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
