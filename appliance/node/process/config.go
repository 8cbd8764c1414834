package process

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os/user"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// Config is what an instance of this runtime runs.
type Config struct {
	// Argv begins with an absolute path; no shell and no search is involved.
	Argv []string `json:"argv"`
	// Env is all of the environment beside PATH (which it may replace) and the
	// runtime's own marks. It is no place for secrets.
	Env map[string]string `json:"env"`
	// Dir is the working directory, "/" when empty.
	Dir string `json:"dir"`
	// User is a name or a number; empty: the agent's own.
	User string `json:"user"`
	// Restart is "always" (the default), "on-failure" or "never".
	Restart string `json:"restart"`
	// StopTimeout is what the process may take to end after SIGTERM, such as
	// "30s"; 10 s when empty.
	StopTimeout string `json:"stop_timeout"`
	Limits      Limits `json:"limits"`
}

// Limits are a cgroup's; 0: none.
type Limits struct {
	MemoryMaxBytes int64 `json:"memory_max_bytes"`
	PidsMax        int64 `json:"pids_max"`
	// CPUMax is in processors: 1.5 is one and a half.
	CPUMax float64 `json:"cpu_max"`
}

// The restart policies.
const (
	always    = "always"
	onFailure = "on-failure"
	never     = "never"
)

const (
	maxConfig   = 256 << 10
	maxArgv     = 256
	maxEnv      = 256
	maxText     = 64 << 10
	defaultStop = 10 * time.Second
	longestStop = 10 * time.Minute
	defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	maxCPUs     = 4096
	// The gate in front of the program lives within the limits too: with less
	// than its share, which is about half of these, no program ever starts.
	smallestMemory = 8 << 20
	smallestPids   = 8
)

var envName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)

// ParseConfig reads an instance's configuration strictly and applies defaults.
// Its errors are invalid-config.
func ParseConfig(raw json.RawMessage) (Config, error) {
	c, err := parse(raw)
	if err != nil {
		return Config{}, errs.New(errs.InvalidConfig, "process: %v", err)
	}
	return c, nil
}

func parse(raw []byte) (Config, error) {
	var c Config
	if len(raw) > maxConfig {
		return c, errors.New("the configuration is too long")
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	if err := d.Decode(&c); err != nil {
		return c, err
	}
	if _, err := d.Token(); err != io.EOF {
		return c, errors.New("something follows the configuration")
	}
	switch {
	case len(c.Argv) == 0:
		return c, errors.New("argv is missing")
	case len(c.Argv) > maxArgv:
		return c, errors.New("argv has more than " + strconv.Itoa(maxArgv) + " words")
	case !path.IsAbs(c.Argv[0]) || path.Clean(c.Argv[0]) != c.Argv[0]:
		return c, errors.New("argv[0]: want an absolute path in its shortest form")
	case len(c.Env) > maxEnv:
		return c, errors.New("env has more than " + strconv.Itoa(maxEnv) + " variables")
	case c.Dir != "" && (!path.IsAbs(c.Dir) || bad(c.Dir)):
		return c, errors.New("dir: want an absolute path")
	case len(c.User) > 64 || bad(c.User):
		return c, errors.New("user: want a name or a number")
	}
	if slices.ContainsFunc(c.Argv, bad) {
		return c, errors.New("argv: a word holds a zero byte or is too long")
	}
	for name, value := range c.Env {
		if !envName.MatchString(name) || strings.HasPrefix(name, "BC_") || bad(value) {
			return c, errors.New("env: want names of letters, digits and _, none beginning with BC_, and values without zero bytes")
		}
	}
	switch c.Restart {
	case "":
		c.Restart = always
	case always, onFailure, never:
	default:
		return c, errors.New("restart: want " + always + ", " + onFailure + " or " + never)
	}
	if _, err := c.stopTimeout(); err != nil {
		return c, err
	}
	if c.Dir == "" {
		c.Dir = "/"
	}
	l := c.Limits
	if l.MemoryMaxBytes < 0 || l.MemoryMaxBytes > 0 && l.MemoryMaxBytes < smallestMemory || l.PidsMax < 0 || l.PidsMax > 0 && l.PidsMax < smallestPids || l.CPUMax < 0 || l.CPUMax > maxCPUs || l.CPUMax > 0 && l.CPUMax < 0.01 {
		return c, fmt.Errorf("limits: want at least %d MiB of memory, %d tasks, a hundredth of a processor, or 0 for no limit", smallestMemory>>20, smallestPids)
	}
	return c, nil
}

func bad(s string) bool { return len(s) > maxText || strings.IndexByte(s, 0) >= 0 }

func (c Config) stopTimeout() (time.Duration, error) {
	if c.StopTimeout == "" {
		return defaultStop, nil
	}
	d, err := time.ParseDuration(c.StopTimeout)
	if err != nil || d < 0 || d > longestStop {
		return 0, errors.New("stop_timeout: want a duration such as 30s, at most " + longestStop.String())
	}
	return d, nil
}

// environment is what the process gets, sorted.
func (c Config) environment(id, run string) []string {
	env := map[string]string{"PATH": defaultPath}
	maps.Copy(env, c.Env)
	env["BC_INSTANCE"], env[runMark] = id, run
	var out []string
	for name, value := range env {
		out = append(out, name+"="+value)
	}
	slices.Sort(out)
	return out
}

// credential is nil for the agent's own user.
func (c Config) credential(euid int) (*syscall.Credential, error) {
	if c.User == "" {
		return nil, nil
	}
	u, err := user.Lookup(c.User)
	if err != nil {
		if u, err = user.LookupId(c.User); err != nil {
			return nil, errs.New(errs.InvalidConfig, "process: there is no user %q here", c.User)
		}
	}
	uid, uerr := strconv.ParseUint(u.Uid, 10, 32)
	gid, gerr := strconv.ParseUint(u.Gid, 10, 32)
	if err := errors.Join(uerr, gerr); err != nil {
		return nil, errs.New(errs.InvalidConfig, "process: user %q: %v", c.User, err)
	}
	if int(uid) == euid {
		return nil, nil
	}
	if euid != 0 {
		return nil, errs.New(errs.OperationNotAllowed, "process: only root can run an instance as user %q", c.User)
	}
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
}
