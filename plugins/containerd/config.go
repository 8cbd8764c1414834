package containerd

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver/schema"
)

// config is how this node's containerd is reached and what it is asked for.
type config struct {
	Address     string `json:"address"`
	Namespace   string `json:"namespace"`
	Handler     string `json:"handler"`
	Snapshotter string `json:"snapshotter"`
	LogDir      string `json:"log_dir"`
	Pull        string `json:"pull"`
}

// Whether a missing image is fetched.
const (
	pullMissing = "missing"
	pullNever   = "never"
)

func manifest() (*schema.Schema, error) {
	return schema.New(schema.Fields{
		"address": schema.String().Pattern(`^/.{1,106}$`).Default("/run/containerd/containerd.sock").Describe("containerd's socket"),
		"namespace": schema.String().Pattern(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?$`).Default("better-compute").
			Describe("containerd's namespace for the instances"),
		"handler": schema.String().Pattern(`^io\.containerd\.[a-z0-9-]+\.v[0-9]+$`).Default("io.containerd.runc.v2").
			Describe("the runtime handler, such as io.containerd.runc.v2 or io.containerd.kata.v2"),
		"snapshotter": schema.String().Pattern(`^[a-z0-9-]{1,64}$`).Default("overlayfs").Describe("containerd's snapshotter"),
		"log_dir":     schema.String().Pattern(`^/.*$`).Optional().Describe("folder for the instances' output; without it the output is dropped"),
		"pull":        schema.Enum(pullMissing, pullNever).Default(pullMissing).Describe("whether an image that is not there is pulled"),
	})
}

// spec is what one instance runs.
type spec struct {
	// Image is a reference such as docker.io/library/nginx:1.27.
	Image string `json:"image"`
	// Args replaces the image's command, behind its entry point.
	Args []string          `json:"args"`
	Env  map[string]string `json:"env"`
	// Restart is "always" (the default), "on-failure" or "never".
	Restart string `json:"restart"`
	// StopTimeout is the time between SIGTERM and the end, such as "30s"; 10 s when empty.
	StopTimeout string `json:"stop_timeout"`
	// HostNetwork shares the node's network; without it there is none but loopback.
	HostNetwork    bool    `json:"host_network"`
	MemoryMaxBytes int64   `json:"memory_max_bytes"`
	PidsMax        int64   `json:"pids_max"`
	CPUMax         float64 `json:"cpu_max"`
}

const (
	always    = "always"
	onFailure = "on-failure"
	never     = "never"
)

const (
	maxSpec        = 256 << 10
	maxWords       = 256
	maxText        = 64 << 10
	defaultStop    = 10 * time.Second
	longestStop    = 5 * time.Minute
	smallestMemory = 4 << 20
	maxCPUs        = 4096
	cpuPeriod      = 100_000 // µs
)

var (
	envName  = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)
	imageRef = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}$`)
)

// parseSpec reads an instance's configuration strictly and applies defaults;
// its errors are invalid-args.
func parseSpec(raw json.RawMessage) (spec, error) {
	s, err := readSpec(raw)
	if err != nil {
		return spec{}, errs.New(errs.InvalidArgs, "instance configuration: %v", err)
	}
	return s, nil
}

func readSpec(raw []byte) (spec, error) {
	var s spec
	if len(raw) > maxSpec {
		return s, errors.New("it is too long")
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	if err := d.Decode(&s); err != nil {
		return s, err
	}
	if _, err := d.Token(); err != io.EOF {
		return s, errors.New("something follows it")
	}
	switch {
	case !imageRef.MatchString(s.Image):
		return s, errors.New("image: want a reference such as docker.io/library/nginx:1.27")
	case len(s.Args) > maxWords || slices.ContainsFunc(s.Args, bad):
		return s, errors.New("args: too many, too long, or with a zero byte")
	case len(s.Env) > maxWords:
		return s, errors.New("env: too many variables")
	case s.MemoryMaxBytes < 0 || s.MemoryMaxBytes > 0 && s.MemoryMaxBytes < smallestMemory:
		return s, fmt.Errorf("memory_max_bytes: want at least %d, or 0 for no limit", smallestMemory)
	case s.PidsMax < 0 || s.CPUMax < 0 || s.CPUMax > maxCPUs || s.CPUMax > 0 && s.CPUMax < 0.01:
		return s, errors.New("pids_max, cpu_max: want at least one task, a hundredth of a processor, or 0 for no limit")
	}
	for name, value := range s.Env {
		if !envName.MatchString(name) || bad(value) {
			return s, errors.New("env: want names of letters, digits and _, and values without zero bytes")
		}
	}
	switch s.Restart {
	case "":
		s.Restart = always
	case always, onFailure, never:
	default:
		return s, errors.New("restart: want " + always + ", " + onFailure + " or " + never)
	}
	if _, err := parseStop(s.StopTimeout); err != nil {
		return s, err
	}
	return s, nil
}

func bad(s string) bool { return len(s) > maxText || strings.IndexByte(s, 0) >= 0 }

func parseStop(text string) (time.Duration, error) {
	if text == "" {
		return defaultStop, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 || d > longestStop {
		return 0, fmt.Errorf("stop_timeout: want a duration such as 30s, at most %s", longestStop)
	}
	return d, nil
}

// environment is the spec's variables as NAME=value, sorted.
func (s spec) environment() []string {
	var all []string
	for name, value := range s.Env {
		all = append(all, name+"="+value)
	}
	slices.Sort(all)
	return all
}

// output is where an instance's output goes; empty: nowhere.
func (c config) output(id string) string {
	if c.LogDir == "" {
		return ""
	}
	return path.Join(c.LogDir, id+".log")
}
