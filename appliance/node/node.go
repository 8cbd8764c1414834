// Package node is the role of a deployed machine: it joins with the string that
// its seed holds, and keeps the line home.
package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
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

	Version string
	Build   time.Time
	// Dial opens connections to the gateway; nil: a net.Dialer.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	Log  *slog.Logger
}

// maxJoin bounds the join file.
const maxJoin = 64 << 10

// Run joins if need be, and serves until ctx ends. No command kind of a node is
// served yet: the agent refuses each by name.
func Run(ctx context.Context, c Config) error {
	if c.Sys == "" {
		c.Sys = "/sys"
	}
	cfg, err := config.LoadNode(c.ConfigFile)
	if err != nil {
		return err
	}
	if cfg.Plugins.Dir != "" {
		return errs.New(errs.InvalidConfig, "%s: plugins.dir is set, but this version hosts no plugins on a node", c.ConfigFile)
	}
	if v := cfg.Gateway.Via; v != "" {
		if host, port, err := net.SplitHostPort(v); err != nil || host == "" || port == "" {
			return errs.New(errs.InvalidConfig, "%s: gateway.via = %q: want host:port", c.ConfigFile, v)
		}
	}
	if c.StateDir == "" {
		return errs.New(errs.InvalidConfig, "a node needs a state folder")
	}
	join, err := readJoin(cfg.JoinFile, c.Log)
	if err != nil {
		return err
	}
	a, err := agent.New(agent.Config{
		Role: agentv1.Role_ROLE_NODE, StateDir: c.StateDir, Join: join, Via: cfg.Gateway.Via, Dial: c.Dial,
		Version: c.Version, Build: c.Build, ProductUUID: productUUID(c.Sys), MACs: macs(c.Sys), Log: c.Log,
	})
	if err != nil {
		return fmt.Errorf("start the agent: %w", err)
	}
	if join == nil && a.AgentID() == "" {
		// The agent would try for ever with nothing in its hands.
		return errs.New(errs.NotEnrolled, "%s: the node has no identity yet, and join_file %q is not there", c.ConfigFile, cfg.JoinFile)
	}
	c.Log.Info("node agent starts", "agent", a.AgentID(), "site", a.SiteID(), "machine", a.MachineID(), "via", cfg.Gateway.Via)
	return a.Run(ctx)
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
