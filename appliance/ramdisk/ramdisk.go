// Package ramdisk is the role of a network-booted machine: it reports the
// hardware it finds and writes images to the disks it is told.
package ramdisk

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent"
	"github.com/better-compute/site-appliance/appliance/agent/bootinfo"
	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/agent/outbox"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/invoke"
	"github.com/better-compute/site-appliance/plugins/metal"
	"github.com/better-compute/site-appliance/pxe/mandate"
)

// HardwareEvent carries a metal.Inspection; its key is the machine's id.
const HardwareEvent = "machine.hardware"

// lookAgain spaces the looks at the hardware: controllers and links take their time.
const lookAgain = 15 * time.Second

// Config is what bcd ramdisk is started with.
type Config struct {
	// BootFile is the box's boot.json.
	BootFile string
	// StateDir lies in memory: it outlives the process, so that a restarted agent
	// is the same one, and ends with the boot. Empty: nothing outlives the process.
	StateDir string
	// Sys, Proc and Dev are "/sys", "/proc" and "/dev" when empty.
	Sys, Proc, Dev string

	Version string
	Build   time.Time
	// Dial opens connections to the gateway; nil: a net.Dialer.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	Log  *slog.Logger
}

// Run enrols with the box's voucher and serves until ctx ends. A reboot is a new agent.
func Run(ctx context.Context, c Config) error {
	for _, d := range []struct {
		path  *string
		value string
	}{{&c.Sys, "/sys"}, {&c.Proc, "/proc"}, {&c.Dev, "/dev"}} {
		if *d.path == "" {
			*d.path = d.value
		}
	}
	data, err := os.ReadFile(c.BootFile)
	if err != nil {
		return fmt.Errorf("read what the box handed over: %w", err)
	}
	boot, err := bootinfo.Parse(data)
	if err != nil {
		return err
	}
	artifacts, err := artifactBase(boot.Artifacts)
	if err != nil {
		return err
	}
	hardware, unread := look(c, "")
	var macs []string
	for _, n := range hardware.NICs {
		macs = append(macs, n.MAC)
	}
	var a *agent.Agent
	booted := &orders{assignment: boot.Assignment, voucher: boot.Voucher, bundle: func() *trust.Bundle { return a.Bundle() }}
	images := &imager{orders: booted, report: boot.Report, sys: c.Sys, dev: c.Dev, artifacts: artifacts, via: boot.Via, client: plainClient(), machine: boot.MachineID, log: c.Log}
	config := agent.Config{
		Role: agentv1.Role_ROLE_RAMDISK, StateDir: c.StateDir, Boot: &boot, Dial: c.Dial, Version: c.Version, Build: c.Build,
		ProductUUID: hardware.ProductUUID, MACs: macs, Log: c.Log,
	}
	// A machine that nobody enrolled reports its hardware; whoever asks it for more is refused.
	if !strings.HasPrefix(boot.MachineID, mandate.StrangerPrefix) {
		config.Capabilities = []string{"image.stream/raw.zst", "disk.wipe"}
		config.Kinds = []dispatch.Kind{images.kind(), images.wipeKind(), invoke.New(invoke.Options{MachineID: func() string { return boot.MachineID }, Log: c.Log})}
	}
	a, err = agent.New(config)
	if err != nil {
		return fmt.Errorf("start the agent: %w", err)
	}
	c.Log.Info("ramdisk agent starts", "machine", boot.MachineID, "site", boot.SiteID, "via", boot.Via)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var owned sync.WaitGroup
	defer owned.Wait()
	defer cancel()
	owned.Go(func() { report(ctx, c, a, boot.MachineID, hardware, unread) })
	return a.Run(ctx)
}

// emitter is the part of an agent that report uses.
type emitter interface {
	Emit(name, class, key string, body any) error
}

// report sends the hardware, and sends it again when it has changed.
func report(ctx context.Context, c Config, to emitter, machine string, hardware metal.Inspection, unread string) {
	tick := time.NewTicker(lookAgain)
	defer tick.Stop()
	var sent string
	for {
		text, err := json.Marshal(hardware)
		if err == nil && string(text) != sent {
			if err = to.Emit(HardwareEvent, outbox.State, machine, hardware); err == nil {
				sent = string(text)
				c.Log.Info("hardware reported", "drives", len(hardware.Drives), "nics", len(hardware.NICs), "product_uuid", hardware.ProductUUID)
			}
		}
		if err != nil {
			c.Log.Error("hardware is not reported", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			hardware, unread = look(c, unread)
		}
	}
}

// look inspects, and logs what could not be read unless that was known before.
func look(c Config, known string) (metal.Inspection, string) {
	hardware, err := Inspect(c.Sys, c.Proc, c.Dev)
	if err == nil {
		return hardware, ""
	}
	if err.Error() != known {
		c.Log.Warn("some of the hardware is not known", "err", err)
	}
	return hardware, err.Error()
}

// artifactBase checks the box's URL prefix.
func artifactBase(prefix string) (*url.URL, error) {
	u, err := url.Parse(prefix)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("parse %s: artifacts = %q: want an http URL", bootinfo.Path, prefix)
	}
	return u, nil
}

// plainClient fetches from the box. What it brings is checked by digest; it
// goes nowhere else than it was told.
func plainClient() *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			// A slow uplink keeps even the first byte back; the stream has its own
			// limit for silence.
			DialContext:        (&net.Dialer{Timeout: 10 * time.Second}).DialContext,
			DisableCompression: true,
			ReadBufferSize:     256 << 10,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return errors.New("the box redirects; that is refused") },
	}
}
