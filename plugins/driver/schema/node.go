package schema

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/big"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// node is one schema, read.
type node struct {
	never  bool // the schema false
	secret bool
	mark   form // x-bc.kind
	ref    *node

	types        []string
	enum         []any
	allowed      map[string]bool // enum's values, canonical
	constant     *any
	constantText string
	format       string
	pattern      matcher
	length       span

	minimum, maximum, above, under, multipleOf *big.Rat

	properties map[string]*node
	byPattern  []keyed
	additional *node
	names      *node
	required   []string
	needs      map[string][]string
	dependent  map[string]*node
	keys       span

	prefix      []*node
	rest        *node
	items       span
	unique      bool
	contains    *node
	minContains *int
	contained   span

	allOf, anyOf, oneOf        []*node
	not, when, then, otherwise *node
}

type keyed struct {
	pattern matcher
	node    *node
}

// span bounds a count.
type span struct {
	least int
	most  *int
}

func (s span) holds(n int) bool { return n >= s.least && (s.most == nil || n <= *s.most) }

func (s span) want(what string) string {
	switch {
	case s.most == nil:
		return fmt.Sprintf("want at least %d %s", s.least, what)
	case s.least == 0:
		return fmt.Sprintf("want at most %d %s", *s.most, what)
	}
	return fmt.Sprintf("want %d to %d %s", s.least, *s.most, what)
}

// here are the schemas that judge the same place as n.
func (n *node) here() []*node {
	list := slices.Concat([]*node{n.ref, n.not, n.when, n.then, n.otherwise}, n.allOf, n.anyOf, n.oneOf)
	for _, name := range slices.Sorted(maps.Keys(n.dependent)) {
		list = append(list, n.dependent[name])
	}
	return slices.DeleteFunc(list, func(n *node) bool { return n == nil })
}

// circles reports whether n comes back to itself without going down; state is 1
// while a node is on the way, 2 once it is known to be free of that.
func (n *node) circles(state map[*node]int) bool {
	switch state[n] {
	case 1:
		return true
	case 2:
		return false
	}
	state[n] = 1
	for _, sub := range n.here() {
		if sub.circles(state) {
			return true
		}
	}
	state[n] = 2
	return false
}

// isSecret also looks through references and allOf; seen keeps it from looking
// at a node again.
func (n *node) isSecret(seen map[*node]bool) bool {
	if seen[n] {
		return false
	}
	seen[n] = true
	return n.secret || n.ref != nil && n.ref.isSecret(seen) ||
		slices.ContainsFunc(n.allOf, func(sub *node) bool { return sub.isSecret(seen) })
}

// judgement is one walk over a configuration.
type judgement struct {
	// steps are left before the walk is given up: references that branch can
	// make a few lines of schema judge one place for ever.
	steps int
	spent bool
}

// problem is one fault: where, and what may stand there.
type problem struct{ path, want string }

func (p problem) String() string {
	if p.path == "" {
		return p.want
	}
	return p.path + ": " + p.want
}

// maxProblems bounds what one judgement collects.
const maxProblems = 64

// path is a place in a configuration. Nothing below a secret has a name.
type path struct {
	text   string
	hidden bool
}

func (p path) key(name string) path {
	if p.hidden {
		return p
	}
	if p.text == "" {
		return path{clip(name), false}
	}
	return path{p.text + "." + clip(name), false}
}

func (p path) index(i int) path {
	if p.hidden {
		return p
	}
	return path{p.text + "[" + strconv.Itoa(i) + "]", false}
}

// judge adds to found what is wrong with v. It quotes the schema and the names
// of keys, and never what the configuration holds.
func (j *judgement) judge(n *node, v any, at path, found []problem) []problem {
	j.steps--
	if j.steps < 0 || len(found) >= maxProblems {
		j.spent = j.spent || j.steps < 0
		return found
	}
	at.hidden = at.hidden || n.secret
	say := func(want string) { found = append(found, problem{at.text, want}) }
	if n.never {
		say("want nothing here")
		return found
	}
	if n.ref != nil {
		found = j.judge(n.ref, v, at, found)
	}
	if len(n.types) > 0 && !slices.ContainsFunc(n.types, func(t string) bool { return is(t, v) }) {
		say("want " + n.noun())
		// What else there is would say it again in other words.
		return found
	}
	if n.allowed != nil && !n.allowed[canonical(v)] {
		say("want " + choice(n.enum))
	}
	if n.constant != nil && n.constantText != canonical(v) {
		say("want " + shownValue(*n.constant))
	}
	switch v := v.(type) {
	case string:
		found = n.judgeText(v, at, found)
	case json.Number:
		found = n.judgeNumber(v, at, found)
	case []any:
		found = j.judgeList(n, v, at, found)
	case object:
		found = j.judgeObject(n, v, at, found)
	}
	return j.judgeTogether(n, v, at, found)
}

// fits judges without a word about it.
func (j *judgement) fits(n *node, v any) bool { return len(j.judge(n, v, path{}, nil)) == 0 }

func (j *judgement) judgeTogether(n *node, v any, at path, found []problem) []problem {
	for _, sub := range n.allOf {
		found = j.judge(sub, v, at, found)
	}
	if len(n.anyOf) > 0 {
		var all []problem
		if !slices.ContainsFunc(n.anyOf, func(sub *node) bool {
			some := j.judge(sub, v, at, nil)
			all = append(all, some...)
			return len(some) == 0
		}) {
			found = append(found, all[:min(len(all), maxProblems)]...)
		}
	}
	if len(n.oneOf) > 0 {
		var all []problem
		fit := 0
		for _, sub := range n.oneOf {
			if some := j.judge(sub, v, at, nil); len(some) == 0 {
				fit++
			} else {
				all = append(all, some...)
			}
		}
		switch {
		case fit == 0:
			found = append(found, all[:min(len(all), maxProblems)]...)
		case fit > 1:
			found = append(found, problem{at.text, "fits several alternatives: want one"})
		}
	}
	if n.not != nil && j.fits(n.not, v) {
		found = append(found, problem{at.text, "is excluded"})
	}
	if n.when != nil {
		if branch := map[bool]*node{true: n.then, false: n.otherwise}[j.fits(n.when, v)]; branch != nil {
			found = j.judge(branch, v, at, found)
		}
	}
	return found
}

func (n *node) judgeText(text string, at path, found []problem) []problem {
	if count := utf8.RuneCountInString(text); !n.length.holds(count) {
		found = append(found, problem{at.text, n.length.want("characters")})
	}
	valid := n.pattern == nil || n.pattern.MatchString(text)
	switch n.format {
	case "uri":
		valid = valid && validURI(text)
	case "url":
		valid = valid && validURI(text) && urlMatcher{}.MatchString(text)
	case "duration":
		valid = valid && (durationMatcher{}.MatchString(text) || validISO(text))
	}
	if !valid {
		found = append(found, problem{at.text, "want " + n.noun()})
	}
	return found
}

func (n *node) judgeNumber(v json.Number, at path, found []problem) []problem {
	if n.minimum == nil && n.maximum == nil && n.above == nil && n.under == nil && n.multipleOf == nil {
		return found
	}
	r, ok := rational(v)
	switch {
	case !ok:
		return append(found, problem{at.text, "want a number"})
	case n.minimum != nil && r.Cmp(n.minimum) < 0, n.maximum != nil && r.Cmp(n.maximum) > 0:
		found = append(found, problem{at.text, "want " + n.noun()})
	case n.above != nil && r.Cmp(n.above) <= 0:
		found = append(found, problem{at.text, "want more than " + shownRat(n.above)})
	case n.under != nil && r.Cmp(n.under) >= 0:
		found = append(found, problem{at.text, "want less than " + shownRat(n.under)})
	}
	if n.multipleOf != nil && !new(big.Rat).Quo(r, n.multipleOf).IsInt() {
		found = append(found, problem{at.text, "want a multiple of " + shownRat(n.multipleOf)})
	}
	return found
}

func (j *judgement) judgeList(n *node, list []any, at path, found []problem) []problem {
	if !n.items.holds(len(list)) {
		found = append(found, problem{at.text, n.items.want("items")})
	}
	for i, item := range list {
		switch {
		case i < len(n.prefix):
			found = j.judge(n.prefix[i], item, at.index(i), found)
		case n.rest != nil:
			found = j.judge(n.rest, item, at.index(i), found)
		}
	}
	if n.unique {
		seen := map[string]int{}
		for i, item := range list {
			text := canonical(item)
			if first, twice := seen[text]; twice {
				found = append(found, problem{at.text, fmt.Sprintf("want items that differ: %d and %d are the same", first, i)})
				break
			}
			seen[text] = i
		}
	}
	if n.contains != nil {
		count, want := 0, n.contained
		want.least = 1
		if n.minContains != nil {
			want.least = *n.minContains
		}
		for _, item := range list {
			if j.fits(n.contains, item) {
				count++
			}
		}
		if !want.holds(count) {
			found = append(found, problem{at.text, want.want("items of a certain form")})
		}
	}
	return found
}

func (j *judgement) judgeObject(n *node, m object, at path, found []problem) []problem {
	if !n.keys.holds(len(m)) {
		found = append(found, problem{at.text, n.keys.want("keys")})
	}
	for _, name := range n.required {
		if _, there := m[name]; !there {
			found = append(found, problem{at.key(name).text, "is missing"})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(m)) {
		v, below := m[name], at.key(name)
		if n.names != nil && !j.fits(n.names, name) {
			found = append(found, problem{below.text, "is no key for here"})
		}
		for _, other := range n.needs[name] {
			if _, there := m[other]; !there {
				found = append(found, problem{at.key(other).text, "is missing beside " + clip(name)})
			}
		}
		if sub := n.dependent[name]; sub != nil {
			found = j.judge(sub, m, at, found)
		}
		sub, known := n.properties[name]
		if known {
			found = j.judge(sub, v, below, found)
		}
		for _, k := range n.byPattern {
			j.steps--
			if k.pattern.MatchString(name) {
				known = true
				found = j.judge(k.node, v, below, found)
			}
		}
		switch {
		case known || n.additional == nil:
		case n.additional.never:
			found = append(found, problem{below.text, n.unknown()})
		default:
			found = j.judge(n.additional, v, below, found)
		}
	}
	return found
}

func (n *node) unknown() string {
	if len(n.properties) == 0 {
		return "unknown key"
	}
	return "unknown key: want " + oneOf(slices.Sorted(maps.Keys(n.properties)))
}

// noun says what n allows, by the most that is known of it.
func (n *node) noun() string {
	switch n.mark {
	case kindURL:
		return "an absolute URL such as https://host/path"
	case kindDuration:
		return `a duration such as "30s" or "1m30s"`
	case kindSecret:
		return "a secret reference, secret://<tenant>/<name>"
	}
	if n.enum != nil {
		return choice(n.enum)
	}
	names := make([]string, 0, len(n.types))
	for _, t := range n.types {
		names = append(names, map[string]string{
			"array": "a list", "boolean": "true or false", "integer": "a whole number", "null": "null", "number": "a number", "object": "an object", "string": "text",
		}[t])
	}
	text := oneOf(names)
	if text == "" {
		text = "a value"
	}
	switch {
	case n.minimum != nil && n.maximum != nil:
		text += " from " + shownRat(n.minimum) + " to " + shownRat(n.maximum)
	case n.minimum != nil:
		text += " of at least " + shownRat(n.minimum)
	case n.maximum != nil:
		text += " of at most " + shownRat(n.maximum)
	}
	if n.pattern != nil {
		text += " that matches " + clip(n.pattern.String())
	}
	if n.format != "" {
		text += " of the format " + clip(n.format)
	}
	return text
}

func is(name string, v any) bool {
	switch v := v.(type) {
	case nil:
		return name == "null"
	case bool:
		return name == "boolean"
	case string:
		return name == "string"
	case []any:
		return name == "array"
	case object:
		return name == "object"
	case json.Number:
		if name == "integer" {
			_, ok := whole(v)
			return ok
		}
		return name == "number"
	}
	return false
}

func rational(v any) (*big.Rat, bool) {
	n, ok := v.(json.Number)
	if !ok {
		return nil, false
	}
	return new(big.Rat).SetString(n.String())
}

// whole is v as a whole number; 1.0 and 1e3 are whole.
func whole(v any) (*big.Int, bool) {
	if n, ok := v.(json.Number); ok && !strings.ContainsAny(n.String(), ".eE") {
		return new(big.Int).SetString(n.String(), 10)
	}
	r, ok := rational(v)
	if !ok || !r.IsInt() {
		return nil, false
	}
	return r.Num(), true
}

// canonical is a text that two values share exactly if JSON Schema holds them
// for equal: numbers by what they stand for, objects in any order.
func canonical(v any) string {
	var b strings.Builder
	write(&b, v)
	return b.String()
}

func write(b *strings.Builder, v any) {
	switch v := v.(type) {
	case nil:
		b.WriteByte('n')
	case bool:
		b.WriteString(strconv.FormatBool(v))
	case string:
		b.WriteString(strconv.Quote(v))
	case json.Number:
		if r, ok := rational(v); ok {
			b.WriteString(r.RatString())
		}
	case []any:
		b.WriteByte('[')
		for _, item := range v {
			write(b, item)
			b.WriteByte(',')
		}
		b.WriteByte(']')
	case object:
		b.WriteByte('{')
		for _, name := range slices.Sorted(maps.Keys(v)) {
			b.WriteString(strconv.Quote(name))
			b.WriteByte(':')
			write(b, v[name])
			b.WriteByte(',')
		}
		b.WriteByte('}')
	}
}

func validURI(text string) bool {
	u, err := url.Parse(text)
	if err != nil || !u.IsAbs() {
		return false
	}
	if host := u.Hostname(); strings.Contains(host, ":") {
		a, err := netip.ParseAddr(host)
		return err == nil && a.Zone() == "" && strings.HasPrefix(u.Host, "[")
	}
	return true
}

func choice(values []any) string {
	texts := make([]string, 0, len(values))
	for _, v := range values {
		texts = append(texts, shownValue(v))
	}
	return oneOf(texts)
}

func shownValue(v any) string {
	if text, ok := v.(string); ok {
		return clip(text)
	}
	raw, err := json.Marshal(v)
	if err != nil {
		return "another value"
	}
	return clip(string(raw))
}

func shownRat(r *big.Rat) string { return clip(r.RatString()) }

func oneOf(texts []string) string {
	switch {
	case len(texts) == 0:
		return ""
	case len(texts) == 1:
		return texts[0]
	case len(texts) > 40:
		texts = append(slices.Clone(texts[:40]), "…")
	}
	last := len(texts) - 1
	return strings.Join(texts[:last], ", ") + " or " + texts[last]
}

func clip(s string) string {
	if len(s) <= 80 {
		return s
	}
	return strings.ToValidUTF8(s[:80], "") + "…"
}
