// Package config reads gateway.toml: which modules a gateway has, and what they
// know about hardware, drivers and procedures.
package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/BurntSushi/toml"

	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/plugins/driver/binding"
)

// File is the name of the configuration in a gateway's folder.
const File = "gateway.toml"

// Config is gateway.toml.
type Config struct {
	// Modules are what the gateway is made of; unset: all of them.
	Modules          []string                   `toml:"modules"`
	HardwareProfiles map[string]HardwareProfile `toml:"hardware_profiles"`
	// BMCDrivers are the operations, <concern>.<operation>, of BMC drivers by id.
	BMCDrivers      map[string][]string `toml:"bmc_drivers"`
	ExternalDrivers []ExternalDriver    `toml:"external_drivers"`
	Profiles        map[string]Profile  `toml:"profiles"`
}

// HardwareProfile is what machines of one make share.
type HardwareProfile struct {
	Description string                     `toml:"description"`
	Drivers     map[string]binding.Binding `toml:"drivers"`
	BIOS        Object                     `toml:"bios"`
	RAID        Object                     `toml:"raid"`
}

// ExternalDriver is a plugin that the control plane itself runs.
type ExternalDriver struct {
	// Command is an argv; its first word is an absolute path.
	Command []string `toml:"command"`
	// SHA256 pins the program, or the script of an interpreter.
	SHA256        string            `toml:"sha256"`
	Env           map[string]string `toml:"env"`
	StartTimeout  Duration          `toml:"start_timeout"`
	CallTimeout   Duration          `toml:"call_timeout"`
	ShutdownGrace Duration          `toml:"shutdown_grace"`
}

// Profile is a procedure.
type Profile struct {
	Description string                     `toml:"description"`
	Drivers     map[string]binding.Binding `toml:"drivers"`
	Steps       []Step                     `toml:"steps"`
}

// Step is one step of a procedure.
type Step struct {
	Uses    string   `toml:"uses"`
	On      string   `toml:"on"`
	With    Value    `toml:"with"`
	Timeout Duration `toml:"timeout"`
}

// Object is a table as a JSON object.
type Object json.RawMessage

// UnmarshalTOML takes a table.
func (o *Object) UnmarshalTOML(v any) error {
	if _, ok := v.(map[string]any); !ok {
		return errors.New("want a table")
	}
	raw, err := binding.FromTOML(v)
	*o = Object(raw)
	return err
}

// Value is any value as JSON.
type Value json.RawMessage

// UnmarshalTOML takes what JSON can say.
func (o *Value) UnmarshalTOML(v any) error {
	raw, err := binding.FromTOML(v)
	*o = Value(raw)
	return err
}

// Duration is a time such as "90s".
type Duration time.Duration

// UnmarshalText reads a positive duration.
func (d *Duration) UnmarshalText(text []byte) error {
	got, err := time.ParseDuration(string(text))
	if err != nil || got <= 0 {
		return fmt.Errorf("%.40q: want a duration over zero such as \"90s\"", text)
	}
	*d = Duration(got)
	return nil
}

// The modules that modules may name.
const (
	Metal     = "metal"
	Provision = "provision"
)

// Default is what a gateway without a gateway.toml has.
func Default() *Config { return &Config{Modules: []string{Metal, Provision}} }

// Load reads the configuration of a gateway's folder; where there is none the
// default stands.
func Load(dir string) (*Config, error) {
	path := filepath.Join(dir, File)
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return Default(), nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the gateway's configuration: %w", err)
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size() > maxBytes {
		return nil, tooLarge(path)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the gateway's configuration: %w", err)
	}
	return Parse(path, data)
}

// Bounds: what a file over them is, is no configuration.
const (
	maxBytes    = 1 << 20
	maxLine     = 64 << 10
	maxDepth    = 32
	maxKey      = 512
	maxProfiles = 256
	maxExternal = 64
	maxWords    = 64
	maxEnv      = 64
)

func tooLarge(name string) error {
	return fmt.Errorf("%s has over %d bytes: this is no configuration", name, maxBytes)
}

// Parse is Load on bytes; name stands in errors, which name the line. A key
// that nobody reads is an error.
func Parse(name string, data []byte) (*Config, error) {
	if err := bounds(name, data); err != nil {
		return nil, err
	}
	c := &Config{}
	meta, err := toml.Decode(string(data), c)
	var perr toml.ParseError
	switch {
	case errors.As(err, &perr):
		if perr.LastKey != "" {
			return nil, fmt.Errorf("%s:%d: %.100s: %s", name, perr.Position.Line, perr.LastKey, strings.TrimPrefix(perr.Message, "toml: "))
		}
		return nil, fmt.Errorf("%s:%d: %s", name, perr.Position.Line, perr.Message)
	case err != nil:
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	for _, key := range meta.Undecoded() {
		if !free(key) {
			return nil, fmt.Errorf("%s:%d: unknown key %.100q", name, lineOf(string(data), key), key.String())
		}
	}
	if !meta.IsDefined("modules") {
		c.Modules = Default().Modules
	}
	if err := c.check(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return c, nil
}

// bounds keeps what is no configuration from the parser, which recurses.
func bounds(name string, data []byte) error {
	if len(data) > maxBytes {
		return tooLarge(name)
	}
	line, length, depth, dots := 1, 0, 0, 0
	for _, c := range data {
		length++
		switch c {
		case '\n':
			line, length, dots = line+1, 0, 0
		case '[', '{':
			depth++
		case ']', '}':
			depth = max(0, depth-1)
		case '.':
			dots++
		}
		if length > maxLine || depth > maxDepth || dots > maxKey {
			return fmt.Errorf("%s:%d: a line too long, or nested too deep: this is no configuration", name, line)
		}
	}
	return nil
}

// free reports whether a key lies inside of a value that is anybody's own: the
// decoder does not count the keys of tables in arrays there.
func free(key toml.Key) bool {
	at := func(i int, names ...string) bool { return len(key) > i+1 && slices.Contains(names, key[i]) }
	switch key[0] {
	case "hardware_profiles":
		return at(2, "bios", "raid") || at(2, "drivers") && at(4, "config")
	case "profiles":
		return at(2, "drivers") && at(4, "config") || at(2, "steps") && at(3, "with")
	}
	return false
}

// lineOf finds the line on which key is set: the last part, under the header of
// the rest; else, in inline tables, the first line that sets a key of the name.
func lineOf(text string, key toml.Key) int {
	table, last := strings.Join(key[:len(key)-1], "."), key[len(key)-1]
	inline := regexp.MustCompile(`(^|[\s.{,"'])` + regexp.QuoteMeta(last) + `["']?\s*[=.]`)
	current, line, other := "", 0, 0
	for l := range strings.SplitSeq(text, "\n") {
		line++
		l = strings.TrimSpace(l)
		if strings.HasPrefix(l, "[") {
			current = strings.Trim(l[:strings.LastIndex(l, "]")+1], "[] ")
			if current == key.String() {
				return line
			}
			continue
		}
		name, _, ok := strings.Cut(l, "=")
		if ok && current == table && strings.Trim(strings.TrimSpace(name), `"'`) == last {
			return line
		}
		if other == 0 && inline.MatchString(l) {
			other = line
		}
	}
	return other
}

var (
	digestForm = regexp.MustCompile(`^[0-9a-f]{64}$`)
	envForm    = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)
)

func (c *Config) check() error {
	for i, name := range c.Modules {
		switch {
		case name != Metal && name != Provision:
			return fmt.Errorf("modules: unknown module %.80q: want %s or %s", name, Metal, Provision)
		case slices.Contains(c.Modules[:i], name):
			return fmt.Errorf("modules: %s is there twice", name)
		}
	}
	switch {
	case !c.Has(Metal) && len(c.HardwareProfiles) > 0:
		return fmt.Errorf("hardware_profiles: they are the module %s's, which modules leaves out", Metal)
	case !c.Has(Metal) && len(c.BMCDrivers) > 0:
		return fmt.Errorf("bmc_drivers: they are the module %s's, which modules leaves out", Metal)
	case !c.Has(Provision) && len(c.Profiles) > 0:
		return fmt.Errorf("profiles: they are the module %s's, which modules leaves out", Provision)
	case len(c.HardwareProfiles) > maxProfiles || len(c.Profiles) > maxProfiles || len(c.BMCDrivers) > maxProfiles:
		return fmt.Errorf("hardware_profiles, bmc_drivers and profiles: at most %d each", maxProfiles)
	case len(c.ExternalDrivers) > maxExternal:
		return fmt.Errorf("external_drivers: at most %d", maxExternal)
	}
	if _, err := metal.New(c.MetalOptions()); err != nil {
		var known *apierr.Error
		if errors.As(err, &known) {
			return errors.New(known.Message) // whoever loads the file says its code
		}
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(c.Profiles)) {
		if err := binding.Check(c.Profiles[name].Drivers); err != nil {
			return fmt.Errorf("profiles.%.80s.drivers: %w", name, err)
		}
	}
	for i, d := range c.ExternalDrivers {
		if err := d.check(); err != nil {
			return fmt.Errorf("external_drivers %d: %w", i+1, err)
		}
	}
	return nil
}

func (d ExternalDriver) check() error {
	switch {
	case len(d.Command) == 0 || len(d.Command) > maxWords:
		return fmt.Errorf("command has %d words: want 1 to %d", len(d.Command), maxWords)
	case !filepath.IsAbs(d.Command[0]):
		return fmt.Errorf("command %.120q: want an absolute path", d.Command[0])
	case !digestForm.MatchString(d.SHA256):
		return errors.New("sha256: want 64 lower-case hex digits: a plugin without a pin is not run")
	case len(d.Env) > maxEnv:
		return fmt.Errorf("env: at most %d", maxEnv)
	}
	for _, word := range d.Command {
		if strings.ContainsRune(word, 0) {
			return errors.New("command holds a zero byte")
		}
	}
	for _, name := range slices.Sorted(maps.Keys(d.Env)) {
		if !envForm.MatchString(name) || strings.HasPrefix(name, "BCX_") || strings.ContainsRune(d.Env[name], 0) {
			return fmt.Errorf("env %.80q: want a name of letters, digits and underscores that does not begin with BCX_", name)
		}
	}
	return nil
}

// Has reports whether the gateway has a module.
func (c *Config) Has(module string) bool { return slices.Contains(c.Modules, module) }

// MetalOptions are metal's part.
func (c *Config) MetalOptions() metal.Options {
	o := metal.Options{HardwareProfiles: map[string]metal.HardwareProfile{}, BMCDrivers: c.BMCDrivers}
	for name, p := range c.HardwareProfiles {
		o.HardwareProfiles[name] = metal.HardwareProfile{Description: p.Description, Drivers: p.Drivers, BIOS: json.RawMessage(p.BIOS), RAID: json.RawMessage(p.RAID)}
	}
	return o
}

// ModuleProfiles are the procedures, by name.
func (c *Config) ModuleProfiles() []module.Profile {
	var profiles []module.Profile
	for _, name := range slices.Sorted(maps.Keys(c.Profiles)) {
		p := c.Profiles[name]
		out := module.Profile{Name: name, Description: p.Description, Drivers: binding.Resolve(p.Drivers)}
		for _, s := range p.Steps {
			out.Steps = append(out.Steps, module.ProfileStep{Uses: s.Uses, On: s.On, With: json.RawMessage(s.With), Timeout: time.Duration(s.Timeout)})
		}
		profiles = append(profiles, out)
	}
	return profiles
}
