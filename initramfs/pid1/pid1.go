// Package pid1 is the first process of a box, of a network-booted machine and
// of a deployed node: it brings the machine up step by step, says so on every
// console, and keeps bcd running. It never exits.
package pid1

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/better-compute/site-appliance/initramfs/console"
	"github.com/better-compute/site-appliance/initramfs/disk"
	"github.com/better-compute/site-appliance/initramfs/module"
	"github.com/better-compute/site-appliance/initramfs/supervise"
	"github.com/better-compute/site-appliance/initramfs/survive"
)

// Role is what the machine is, from /etc/bc/role.
type Role string

// Roles.
const (
	Site    Role = "site"
	Ramdisk Role = "ramdisk"
	Node    Role = "node"
)

// ParseRole reads the role file's content.
func ParseRole(text string) (Role, error) {
	r := Role(strings.TrimSpace(text))
	if r != Site && r != Ramdisk && r != Node {
		return "", fmt.Errorf("role %q: want site, ramdisk or node", r)
	}
	return r, nil
}

// Paths in the running system.
const (
	rolePath      = "/etc/bc/role"
	loadPath      = "/etc/bc/modules"
	rescuePath    = "/etc/bc/rescue"
	runDir        = "/run/bc"
	sitePath      = "/run/bc/site.toml"
	networkPath   = "/run/bc/network.json"
	problemsPath  = "/run/bc/problems"
	dataDir       = "/data"
	stateDir      = "/data/bcd"
	pluginsDir    = "/usr/lib/bcx"
	pluginsCgroup = "/sys/fs/cgroup/bcx"
	ownDir        = "/data/bc-init"
	configDir     = "/config"
	nodeConfig    = "/etc/bcd/config.toml"
	bootPath      = "/etc/bc/boot.json"
)

// Program is the build that runs.
type Program struct {
	Version string
	Build   time.Time
}

// boot is the state of the one run that there is.
type boot struct {
	Program
	role    Role
	cmdline []string
	began   time.Time

	console  *console.Console
	children *supervise.Children

	modules   *module.Loader
	modulesMu sync.Mutex

	// alive is when the steps or the loop last made progress, for the watchdog.
	alive    atomic.Int64
	ready    bool
	readyMu  sync.Mutex
	problems []string
	problemM sync.Mutex

	disk     disk.Disk
	hasDisk  bool
	hasData  bool
	ident    string
	hostname string
}

// Run is PID 1. It returns never: it ends in a restart or a power-off.
func Run(p Program) {
	b := &boot{Program: p, began: time.Now()}
	end := restart
	func() {
		defer func() {
			if r := recover(); r != nil {
				b.say("panic: %v\n%s", r, debug.Stack())
			}
		}()
		end = b.run()
	}()
	b.shutdown(end)
	// Not reached unless the kernel refuses; going back would panic it, which
	// restarts as well, but later.
	select {}
}

// uptime is the time since the kernel started.
func (b *boot) uptime() time.Duration {
	data, err := os.ReadFile("/proc/uptime")
	if err == nil {
		if f := strings.Fields(string(data)); len(f) > 0 {
			if d, err := time.ParseDuration(f[0] + "s"); err == nil {
				return d
			}
		}
	}
	return time.Since(b.began)
}

// say puts one line on every console.
func (b *boot) say(format string, args ...any) {
	line := fmt.Sprintf("bc-init: "+format, args...)
	if b.console == nil {
		fmt.Println(line)
		return
	}
	fmt.Fprintln(b.console, line)
}

// step runs one step, says how it ended, and goes on either way.
func (b *boot) step(name string, run func() error) (err error) {
	b.alive.Store(int64(b.uptime()))
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v", r)
		}
		b.alive.Store(int64(b.uptime()))
		if err != nil {
			b.problem(name, err)
			return
		}
		b.say("%s: ok (t=%.1fs)", name, b.uptime().Seconds())
	}()
	return run()
}

// problem says what went wrong, one line for each thing, and keeps it for
// bcd to send home.
func (b *boot) problem(name string, err error) {
	for line := range strings.SplitSeq(err.Error(), "\n") {
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		b.say("%s: failed: %s", name, line)
		b.note(name, line)
	}
}

// note keeps one line for bcd to send home. The same line counts once.
func (b *boot) note(name, line string) {
	text := name + ": " + line
	b.problemM.Lock()
	defer b.problemM.Unlock()
	if slices.Contains(b.problems, text) || len(b.problems) >= 64 {
		return
	}
	b.problems = append(b.problems, text)
	if err := os.WriteFile(problemsPath, []byte(strings.Join(b.problems, "\n")+"\n"), 0o644); err != nil && !errors.Is(err, os.ErrNotExist) {
		b.say("keep problems: %v", err)
	}
}

// has reports whether a word is on the kernel's command line.
func (b *boot) has(word string) bool { return slices.Contains(b.cmdline, word) }

// guard runs f and, should it panic, says so and runs it again.
func (b *boot) guard(ctx context.Context, name string, f func()) {
	survive.Run(ctx, name, b.say, f)
}

// serviceArgs is how bcd is started.
func serviceArgs(role Role, hasData bool, ident string) []string {
	state := ""
	if hasData {
		state = stateDir
	}
	switch role {
	case Site:
		args := []string{"/bin/bcd", "site", "--config", sitePath, "--state", state,
			"--plugins", pluginsDir, "--plugins-cgroup", pluginsCgroup, "--problems", problemsPath}
		if ident != "" {
			args = append(args, "--identity", ident)
		}
		return args
	case Node:
		return []string{"/bin/bcd", "node", "--config", nodeConfig, "--state", state}
	}
	return []string{"/bin/bcd", "ramdisk", "--boot", bootPath, "--state", "/run/bcd"}
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// words splits a file of names, one a line.
func words(path string) []string {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	return strings.Fields(string(data))
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func readTrim(path string) string {
	data, err := os.ReadFile(filepath.Clean(path))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}
