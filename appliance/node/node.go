// Package node is the role of a deployed machine: it joins with the string that
// its seed holds, keeps the line home, hosts driver plugins, and runs instances.
package node

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/hosting"
	"github.com/better-compute/site-appliance/appliance/invoke"
	"github.com/better-compute/site-appliance/appliance/node/instances"
	"github.com/better-compute/site-appliance/appliance/node/process"
	"github.com/better-compute/site-appliance/appliance/site/config"
)

// Config is what bcd node is started with.
type Config struct {
	// ConfigFile is config.toml.
	ConfigFile string
	// StateDir keeps identity, journal and events.
	StateDir string
	// Sys is "/sys" when empty.
	Sys string
	// Shim is the argv prefix of the plugin shim, Gate that of the gate in front
	// of processes; nil: bcd's own words for them.
	Shim, Gate []string
	// Every is how often runtimes are looked at without a reason; 0: as instances has it.
	Every time.Duration

	Version string
	Build   time.Time
	// Dial opens connections to the gateway; nil: a net.Dialer.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	Log  *slog.Logger
}

// maxJoin bounds the join file.
const maxJoin = 64 << 10

// How bcd is called to become a plugin, and the gate of an instance.
const (
	ShimWord = "bcx-shim"
	GateWord = "instance-gate"
)

// processRuntime is the id of the runtime that every node has.
const processRuntime = "process"

// Run joins if need be, and serves until ctx ends. Instances outlive it.
func Run(ctx context.Context, c Config) error {
	if c.Sys == "" {
		c.Sys = "/sys"
	}
	if c.Shim == nil {
		c.Shim = []string{"/proc/self/exe", ShimWord}
	}
	if c.Gate == nil {
		c.Gate = []string{"/proc/self/exe", GateWord}
	}
	cfg, err := config.LoadNode(c.ConfigFile)
	if err != nil {
		return err
	}
	if v := cfg.Gateway.Via; v != "" {
		if host, port, err := net.SplitHostPort(v); err != nil || host == "" || port == "" {
			return errs.New(errs.InvalidConfig, "%s: gateway.via = %q: want host:port", c.ConfigFile, v)
		}
	}
	runtimes, err := runtimeConfigs(cfg)
	if err != nil {
		return errs.New(errs.InvalidConfig, "%s: %v", c.ConfigFile, err)
	}
	if c.StateDir == "" {
		return errs.New(errs.InvalidConfig, "a node needs a state folder")
	}
	join, err := readJoin(cfg.JoinFile, c.Log)
	if err != nil {
		return err
	}
	plugins, err := hosting.Start(ctx, cfg.Plugins, hosting.Options{Shim: c.Shim, Log: c.Log.With("part", "plugins")})
	if err != nil {
		return err
	}
	defer plugins.Close()
	processes, err := process.Open(process.Options{
		Dir: filepath.Join(c.StateDir, "processes"), Cgroup: cgroupOf(cfg.Instances), Gate: c.Gate, Log: c.Log.With("part", "processes"),
	})
	if err != nil {
		return err
	}
	defer processes.Close()

	all := instances.Hosted(plugins, []string{processRuntime}, runtimes, c.Log.With("part", "instances"))
	all[processRuntime] = processes
	var a *agent.Agent
	itself := func() string {
		if a == nil {
			return "" // it starts, and takes up what its journal left open
		}
		return a.MachineID()
	}
	converger, err := instances.Open(instances.Config{
		File: filepath.Join(c.StateDir, "instances.json"), Runtimes: all, Every: c.Every,
		Backoff: backoff.Policy{Min: time.Second, Max: time.Minute, Rand: func() float64 { return 0.5 + rand.Float64()/2 }},
		Log:     c.Log.With("part", "instances"),
		Emit:    func(name, class, key string, body any) error { return a.Emit(name, class, key, body) },
	})
	if err != nil {
		return err
	}
	a, err = agent.New(agent.Config{
		Role: agentv1.Role_ROLE_NODE, StateDir: c.StateDir, Join: join, Via: cfg.Gateway.Via, Dial: c.Dial,
		Version: c.Version, Build: c.Build, ProductUUID: productUUID(c.Sys), MACs: macs(c.Sys), Log: c.Log,
		Drivers: hosting.Advertised(plugins), Capabilities: converger.Capabilities(),
		Kinds: append(converger.Kinds(), invoke.New(invoke.Options{Host: plugins, MachineID: itself, Log: c.Log.With("part", "invoke")})),
	})
	if err != nil {
		return fmt.Errorf("start the agent: %w", err)
	}
	if join == nil && a.AgentID() == "" {
		// The agent would try for ever with nothing in its hands.
		return errs.New(errs.NotEnrolled, "%s: the node has no identity yet, and join_file %q is not there", c.ConfigFile, cfg.JoinFile)
	}
	c.Log.Info("node agent starts", "agent", a.AgentID(), "site", a.SiteID(), "machine", a.MachineID(), "via", cfg.Gateway.Via, "capabilities", converger.Capabilities())
	// What is wanted runs whether or not the line is up. The agent ends last: it
	// keeps what the converger has to tell.
	line, hangUp := context.WithCancel(context.WithoutCancel(ctx))
	defer hangUp()
	ended := make(chan error, 1)
	go func() { ended <- a.Run(line) }()
	work, stop := context.WithCancel(ctx)
	defer stop()
	converged := make(chan error, 1)
	go func() { converged <- converger.Run(work) }()
	select {
	case err = <-ended:
		stop()
		<-converged
	case <-ctx.Done():
		<-converged
		hangUp()
		err = <-ended
	}
	return err
}

// runtimeConfigs are the tables of [runtimes] as the JSON that drivers take.
func runtimeConfigs(cfg *config.Node) (map[string]json.RawMessage, error) {
	out := map[string]json.RawMessage{}
	for id, table := range cfg.Runtimes {
		if id == processRuntime {
			return nil, fmt.Errorf("runtimes.%s: this runtime takes no configuration", id)
		}
		data, err := json.Marshal(table)
		if err != nil {
			return nil, fmt.Errorf("runtimes.%s: %w", id, err)
		}
		out[id] = data
	}
	return out, nil
}

// cgroupOf is the folder of the processes' cgroups; empty: none.
func cgroupOf(i config.Instances) string {
	if i.Cgroup == "off" {
		return ""
	}
	return cmp.Or(i.Cgroup, process.DefaultCgroup())
}

// readJoin gives nil without an error when there is no file: an enrolled node
// needs none.
func readJoin(path string, log *slog.Logger) (*trust.Join, error) {
	if path == "" {
		return nil, nil
	}
	st, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the join string: %w", err)
	}
	if st.Size() > maxJoin {
		return nil, errs.New(errs.InvalidConfig, "read the join string: %s has %d bytes", path, st.Size())
	}
	if st.Mode().Perm()&0o077 != 0 {
		log.Warn("the join string can be read by others than root", "file", path, "mode", st.Mode().Perm().String())
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the join string: %w", err)
	}
	join, err := trust.ParseJoin(string(text))
	if err != nil {
		return nil, errs.New(errs.InvalidConfig, "%s: %v", path, err)
	}
	return &join, nil
}

// productUUID and macs are labels for people, never an identity.
func productUUID(sys string) string {
	b, err := os.ReadFile(filepath.Join(sys, "class/dmi/id/product_uuid"))
	if err != nil {
		return ""
	}
	return strings.ToLower(strings.TrimSpace(string(b)))
}

func macs(sys string) []string {
	ports, err := filepath.Glob(filepath.Join(sys, "class/net/*/device"))
	if err != nil {
		return nil
	}
	var out []string
	for _, p := range ports {
		b, err := os.ReadFile(filepath.Join(filepath.Dir(p), "address"))
		if mac := strings.ToLower(strings.TrimSpace(string(b))); err == nil && mac != "" {
			out = append(out, mac)
		}
	}
	return out
}
