package schema

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Read takes a JSON Schema of draft 2020-12. It stands alone: a reference that
// leaves it is refused, and nothing is loaded. Its patterns are regular
// expressions that Go knows. Of formats, uri, url and duration are judged. The
// keywords unevaluatedProperties, unevaluatedItems and $dynamicRef are refused:
// what nothing here judges must not look judged.
func Read(raw json.RawMessage) (*Schema, error) {
	s, err := read(raw)
	if err != nil {
		return nil, fmt.Errorf("configuration schema: %w", err)
	}
	return s, nil
}

func read(raw json.RawMessage) (*Schema, error) {
	if len(raw) > MaxBytes {
		return nil, fmt.Errorf("%d bytes, limit %d", len(raw), MaxBytes)
	}
	document, err := decode(raw)
	if err != nil {
		return nil, err
	}
	r := &reader{root: document, nodes: map[string]*node{}, anchors: map[string]*node{}}
	root, err := r.node("#", document)
	if err != nil {
		return nil, err
	}
	if err := r.resolve(); err != nil {
		return nil, err
	}
	s := &Schema{raw: slices.Clone(raw), root: root, defaults: map[string]json.RawMessage{}}
	r.markSecrets()
	properties := object(nil)
	if top, ok := document.(map[string]any); ok {
		properties, _ = top["properties"].(map[string]any)
	}
	for _, name := range slices.Sorted(maps.Keys(root.properties)) {
		if root.properties[name].secret {
			s.secrets = append(s.secrets, name)
		}
		if p, ok := properties[name].(map[string]any); ok {
			if v, there := p["default"]; there {
				if s.defaults[name], err = json.Marshal(v); err != nil {
					return nil, fmt.Errorf("default of %s: %w", clip(name), err)
				}
			}
		}
	}
	return s, nil
}

type object = map[string]any

// reader turns a document into nodes.
type reader struct {
	root any
	// nodes are by their place in the document, such as #/properties/a.
	nodes   map[string]*node
	anchors map[string]*node
	// refs are resolved at the end: they may point forward.
	refs []reference
}

type reference struct {
	from     *node
	at, text string
}

func (r *reader) resolve() error {
	// A target that no keyword led to is read now, and may add references.
	for i := 0; i < len(r.refs); i++ {
		ref := r.refs[i]
		to, err := r.target(ref.text)
		if err != nil {
			return fmt.Errorf("%s: $ref %q: %w", ref.at, clip(ref.text), err)
		}
		ref.from.ref = to
	}
	state := map[*node]int{}
	for _, place := range slices.Sorted(maps.Keys(r.nodes)) {
		if r.nodes[place].circles(state) {
			return fmt.Errorf("%s: a reference leads back to itself", clip(place))
		}
	}
	return nil
}

// markSecrets marks also what is secret by a reference or one of allOf.
func (r *reader) markSecrets() {
	var secrets []*node
	for _, n := range r.nodes {
		if n.isSecret(map[*node]bool{}) {
			secrets = append(secrets, n)
		}
	}
	for _, n := range secrets {
		n.secret = true
	}
}

func (r *reader) target(text string) (*node, error) {
	fragment, local := strings.CutPrefix(text, "#")
	if !local {
		return nil, errors.New("want a reference inside the schema, #/…")
	}
	fragment, err := url.PathUnescape(fragment)
	if err != nil {
		return nil, errors.New("is not a fragment")
	}
	if fragment != "" && fragment[0] != '/' {
		if n, ok := r.anchors[fragment]; ok {
			return n, nil
		}
		return nil, errors.New("there is no such anchor")
	}
	at, v := "#", r.root
	for i, step := range strings.Split(fragment, "/") {
		if i == 0 {
			continue
		}
		name := strings.NewReplacer("~1", "/", "~0", "~").Replace(step)
		switch in := v.(type) {
		case object:
			sub, ok := in[name]
			if !ok {
				return nil, errors.New("leads nowhere")
			}
			v = sub
		case []any:
			n, err := strconv.ParseUint(name, 10, 31)
			if err != nil || n >= uint64(len(in)) {
				return nil, errors.New("leads nowhere")
			}
			v = in[n]
		default:
			return nil, errors.New("leads nowhere")
		}
		at += "/" + escape(name)
	}
	return r.node(at, v)
}

func escape(name string) string { return strings.NewReplacer("~", "~0", "/", "~1").Replace(name) }

// node reads the schema at a place.
func (r *reader) node(at string, v any) (*node, error) {
	if n, ok := r.nodes[at]; ok {
		return n, nil
	}
	n := &node{}
	r.nodes[at] = n
	switch v := v.(type) {
	case bool:
		n.never = !v
		return n, nil
	case object:
		for _, key := range slices.Sorted(maps.Keys(v)) {
			if err := r.keyword(n, at, key, v[key]); err != nil {
				return nil, err
			}
		}
		return n, nil
	}
	return nil, fmt.Errorf("%s: want a schema: an object, true or false", clip(at))
}

// keyword reads one keyword. Those that nothing is known about are notes.
func (r *reader) keyword(n *node, at, key string, v any) (err error) {
	wrong := func(want string) error { return fmt.Errorf("%s: %s: want %s", clip(at), key, want) }
	at += "/" + escape(key)
	switch key {
	case "$schema":
		if v != dialect && v != dialect+"#" {
			return wrong(dialect)
		}
	case "$id", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$vocabulary", "unevaluatedProperties", "unevaluatedItems":
		return fmt.Errorf("%s is not supported here", clip(at))
	case "$anchor":
		text, ok := v.(string)
		if !ok || !anchorForm.MatchString(text) {
			return wrong("a name")
		}
		if _, twice := r.anchors[text]; twice {
			return wrong("a name that no other has")
		}
		r.anchors[text] = n
	case "$ref":
		text, ok := v.(string)
		if !ok {
			return wrong("text")
		}
		r.refs = append(r.refs, reference{n, clip(at), text})
	case "title", "description", "$comment", "contentEncoding", "contentMediaType":
		if _, ok := v.(string); !ok {
			return wrong("text")
		}
	case "deprecated", "readOnly", "writeOnly", "uniqueItems":
		b, ok := v.(bool)
		if !ok {
			return wrong("true or false")
		}
		switch key {
		case "writeOnly":
			n.secret = n.secret || b
		case "uniqueItems":
			n.unique = b
		}
	case "x-bc":
		mark, _ := v.(object)
		kind, _ := mark["kind"].(string)
		n.mark = form(kind)
		n.secret = n.secret || n.mark == kindSecret
	case "examples":
		if _, ok := v.([]any); !ok {
			return wrong("a list")
		}
	case "format":
		text, ok := v.(string)
		if !ok {
			return wrong("text")
		}
		n.format = text
	case "type":
		return r.types(n, v, wrong)
	case "enum":
		list, ok := v.([]any)
		if !ok {
			return wrong("a list")
		}
		n.allowed, n.enum = map[string]bool{}, list
		for _, item := range list {
			n.allowed[canonical(item)] = true
		}
	case "const":
		n.constant, n.constantText = &v, canonical(v)
	case "pattern":
		if n.pattern, err = pattern(v); err != nil {
			return wrong(err.Error())
		}
	case "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains":
		count, ok := whole(v)
		if !ok || count.Sign() < 0 {
			return wrong("a whole number that is not negative")
		}
		limit := math.MaxInt
		if count.IsInt64() {
			limit = int(count.Int64())
		}
		switch key {
		case "minLength":
			n.length.least = limit
		case "maxLength":
			n.length.most = &limit
		case "minItems":
			n.items.least = limit
		case "maxItems":
			n.items.most = &limit
		case "minProperties":
			n.keys.least = limit
		case "maxProperties":
			n.keys.most = &limit
		case "minContains":
			n.minContains = &limit
		case "maxContains":
			n.contained.most = &limit
		}
	case "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf":
		number, ok := rational(v)
		if !ok || key == "multipleOf" && number.Sign() <= 0 {
			return wrong("a number, for multipleOf one above 0")
		}
		switch key {
		case "minimum":
			n.minimum = number
		case "maximum":
			n.maximum = number
		case "exclusiveMinimum":
			n.above = number
		case "exclusiveMaximum":
			n.under = number
		default:
			n.multipleOf = number
		}
	case "required":
		if n.required, err = words(v); err != nil {
			return wrong(err.Error())
		}
	case "dependentRequired":
		m, ok := v.(object)
		if !ok {
			return wrong("an object")
		}
		n.needs = map[string][]string{}
		for name, list := range m {
			if n.needs[name], err = words(list); err != nil {
				return wrong(err.Error())
			}
		}
	case "properties":
		n.properties, err = r.named(at, v)
	case "dependentSchemas":
		n.dependent, err = r.named(at, v)
	case "$defs", "definitions":
		_, err = r.named(at, v)
	case "patternProperties":
		byPattern, err := r.named(at, v)
		if err != nil {
			return err
		}
		for _, expr := range slices.Sorted(maps.Keys(byPattern)) {
			p, err := pattern(expr)
			if err != nil {
				return wrong(err.Error())
			}
			n.byPattern = append(n.byPattern, keyed{p, byPattern[expr]})
		}
	case "allOf", "anyOf", "oneOf", "prefixItems":
		list, ok := v.([]any)
		if !ok || len(list) == 0 {
			return wrong("a list of schemas that is not empty")
		}
		var subs []*node
		for i, item := range list {
			sub, err := r.node(at+"/"+strconv.Itoa(i), item)
			if err != nil {
				return err
			}
			subs = append(subs, sub)
		}
		switch key {
		case "allOf":
			n.allOf = subs
		case "anyOf":
			n.anyOf = subs
		case "oneOf":
			n.oneOf = subs
		default:
			n.prefix = subs
		}
	case "not":
		n.not, err = r.node(at, v)
	case "if":
		n.when, err = r.node(at, v)
	case "then":
		n.then, err = r.node(at, v)
	case "else":
		n.otherwise, err = r.node(at, v)
	case "items":
		n.rest, err = r.node(at, v)
	case "contains":
		n.contains, err = r.node(at, v)
	case "additionalProperties":
		n.additional, err = r.node(at, v)
	case "propertyNames":
		n.names, err = r.node(at, v)
	case "contentSchema":
		_, err = r.node(at, v)
	}
	return err
}

var (
	anchorForm = regexp.MustCompile(`^[A-Za-z_][-A-Za-z0-9._]*$`)
	typeNames  = []string{"array", "boolean", "integer", "null", "number", "object", "string"}
)

func (r *reader) types(n *node, v any, wrong func(string) error) error {
	list, ok := v.([]any)
	if !ok {
		list = []any{v}
	}
	for _, item := range list {
		text, _ := item.(string)
		if !slices.Contains(typeNames, text) || slices.Contains(n.types, text) {
			return wrong(oneOf(typeNames) + ", each once")
		}
		n.types = append(n.types, text)
	}
	if len(n.types) == 0 {
		return wrong("a type")
	}
	return nil
}

func (r *reader) named(at string, v any) (map[string]*node, error) {
	m, ok := v.(object)
	if !ok {
		return nil, fmt.Errorf("%s: want an object of schemas", clip(at))
	}
	nodes := map[string]*node{}
	for _, name := range slices.Sorted(maps.Keys(m)) {
		sub, err := r.node(at+"/"+escape(name), m[name])
		if err != nil {
			return nil, err
		}
		nodes[name] = sub
	}
	return nodes, nil
}

// pattern is a regular expression as JSON Schema means it: it matches anywhere.
func pattern(v any) (matcher, error) {
	text, ok := v.(string)
	switch {
	case !ok:
		return nil, errors.New("a regular expression")
	case text == urlPattern:
		return urlMatcher{}, nil
	case text == durationPattern:
		return durationMatcher{}, nil
	}
	p, err := regexp.Compile(text)
	if err != nil {
		return nil, fmt.Errorf("a regular expression that Go knows, without look-around and back-references: %s", clip(err.Error()))
	}
	return p, nil
}

func words(v any) ([]string, error) {
	list, ok := v.([]any)
	if !ok {
		return nil, errors.New("a list of words")
	}
	texts := []string{}
	for _, item := range list {
		text, ok := item.(string)
		if !ok || slices.Contains(texts, text) {
			return nil, errors.New("a list of words, each once")
		}
		texts = append(texts, text)
	}
	return texts, nil
}
