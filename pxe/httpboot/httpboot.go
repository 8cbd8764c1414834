// Package httpboot is what machines fetch over HTTP: boot programs, their script, what it boots and their artifacts.
//
// Paths: /boot/<mac>/script.ipxe and /boot/<mac>/<boot program> for a machine
// that starts, /grub/… and /grub.cfg… for what GRUB reads as it starts,
// /boot/<mac>/<token>/<file> for the boot that its script, GRUB's configuration or DHCP
// began, /artifacts/<sha256> for what runs there, and two that take a POST,
// /boot/<mac>/<token>/progress and done. A client is the machine that holds its
// address's lease; it gets its own things only.
package httpboot

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/pxe/boots"
	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/grub"
	"github.com/better-compute/site-appliance/pxe/limit"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// Booting is one boot of a machine into the ramdisk.
type Booting struct {
	Machine *pxev1.Machine
	// Base is "http://host[:port]" of the box as the machine reaches it.
	Base string
	// Report is the URL prefix of its posts: "done" and "progress" follow.
	Report string
}

// Config is what the handler needs. All functions must be safe for concurrent use.
type Config struct {
	// Holder is the MAC that the DHCP server gave an address to.
	Holder func(netip.Addr) (mac string, ok bool)
	// CountsFor is whom an address counts for among connections and in the log: Holder's, empty for
	// nobody's, and whether somebody vouches for that machine. Nil: each by itself.
	CountsFor func(netip.Addr) (machine string, known bool)
	// Request is all that is known of who asks, but for its Program; the MAC is
	// lower-case with colons.
	Request func(mac string) decide.Request
	Counts  *boots.Store
	Files   files.Source
	// Cmdline is the ramdisk kernel's command line, and ARM64Cmdline the one on arm64.
	Cmdline, ARM64Cmdline string
	// Boot makes the initrd that is appended for one boot of the machine.
	Boot func(context.Context, Booting) ([]byte, error)
	// Artifacts opens a stored artifact.
	Artifacts func(ctx context.Context, sha256 string) (io.ReadSeekCloser, int64, error)
	// Stage is told what a machine has fetched, reported or missed. It must not block but
	// for the word that a machine is done, which is to outlive a power cut.
	Stage func(mac string, m *pxev1.Machine, stage, detail string)
	// Syslog says whether scripts name the box as their syslog server.
	Syslog bool
	Now    func() time.Time
	Log    *slog.Logger
}

// Handler serves the paths of the package comment and nothing else.
type Handler struct {
	cfg    Config
	boots  running
	stages limit.Minute
	// refusals and refused are what is logged of one client, and of all that are not known.
	refusals, refused limit.Minute
	// posts and strange are the reports taken of one machine, and of all that nobody enrolled.
	posts, strange limit.Minute
	returns        returns
	listening      listening
}

// listening are the connections of each of a handler's listeners.
type listening struct {
	mu  sync.Mutex
	all []*capped
}

// resets has Reset break off these connections too, until done.
func (h *Handler) resets(c *capped) (done func()) {
	h.listening.mu.Lock()
	defer h.listening.mu.Unlock()
	h.listening.all = append(h.listening.all, c)
	return func() {
		h.listening.mu.Lock()
		defer h.listening.mu.Unlock()
		h.listening.all = slices.DeleteFunc(h.listening.all, func(other *capped) bool { return other == c })
	}
}

// Reset breaks off what a machine, by its MAC, had open before a time at the address
// that it is given; at any, where another server gives it. GRUB's own HTTP client begins
// with the same port at each start, and does not survive what the kernel would answer
// for a connection that it thinks is open.
func (h *Handler) Reset(mac string, at netip.Addr, before time.Time) {
	h.listening.mu.Lock()
	defer h.listening.mu.Unlock()
	for _, c := range h.listening.all {
		gone := c.reset(mac, at, before)
		for _, conn := range gone {
			go conn.breakOff()
		}
		if len(gone) > 0 {
			h.cfg.Log.Debug("HTTP connections of a machine that starts again broken off", "mac", mac, "connections", len(gone))
		}
	}
}

// New makes the handler.
func New(cfg Config) *Handler {
	if cfg.CountsFor == nil {
		cfg.CountsFor = byAddress
	}
	return &Handler{cfg: cfg, boots: running{byToken: make(map[string]*boot)}, stages: limit.Minute{Most: perMinute},
		refusals: limit.Minute{Most: perMinute}, refused: limit.Minute{Most: ofStrangers},
		posts: limit.Minute{Most: perMinute}, strange: limit.Minute{Most: ofStrangers}}
}

func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if grub.Asks(r.UserAgent()) {
		w = &forGRUB{ResponseWriter: w}
	}
	// Never through a ServeMux: it answers "//" with a redirect, which EDK2 does not survive.
	parts := split(r.URL.Path)
	post := r.Method == http.MethodPost && len(parts) == 4 && parts[0] == "boot" && (parts[3] == "done" || parts[3] == "progress")
	if r.Method != http.MethodGet && r.Method != http.MethodHead && !post {
		w.Header().Set("Allow", "GET, HEAD")
		refuse(w, http.StatusMethodNotAllowed, "only GET and HEAD are served")
		return
	}
	client, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		refuse(w, http.StatusForbidden, "no lease")
		return
	}
	mac, ok := h.cfg.Holder(client.Addr().Unmap())
	if !ok {
		h.denied(w, r, http.StatusForbidden, "the address holds no lease")
		return
	}
	if named, ok := grub.ConfigPath(parts); ok {
		h.grubConfig(w, r, mac, named)
		return
	}
	if grub.Asks(r.UserAgent()) && grub.IsList(parts) {
		h.text(w, r, "")
		return
	}
	ask := h.cfg.Request(mac)
	m := ask.Assigned()
	if m == nil {
		h.denied(w, r, http.StatusNotFound, decide.Decide(with(ask, decide.Client{Program: decide.IPXE, Arch: decide.X64})).Reason)
		return
	}
	switch {
	case len(parts) == 2 && parts[0] == "artifacts":
		h.artifact(w, r, ask, mac, m, parts[1])
		return
	case len(parts) < 3 || len(parts) > 4 || parts[0] != "boot":
		h.denied(w, r, http.StatusNotFound, "no such path")
		return
	}
	named, err := net.ParseMAC(parts[1])
	if err != nil {
		h.denied(w, r, http.StatusNotFound, "no such path")
		return
	}
	if named.String() != mac {
		ask = h.cfg.Request(named.String())
		if other := ask.Assigned(); other == nil || other.MachineId != m.MachineId {
			h.denied(w, r, http.StatusForbidden, "the path is another machine's")
			return
		}
	}
	switch mac = named.String(); {
	case post:
		h.post(w, r, mac, m, parts[2], parts[3])
	case len(parts) == 4:
		h.bootFile(w, r, ask, mac, m, parts[2], parts[3])
	case parts[2] == scriptName:
		h.script(w, r, ask, mac, m)
	default:
		h.loader(w, r, ask, mac, m, parts[2])
	}
}

func with(ask decide.Request, c decide.Client) decide.Request {
	if c.Arch == decide.OtherArch {
		c.Arch = ask.Client.Arch
	}
	ask.Client = c
	return ask
}

func (h *Handler) denied(w http.ResponseWriter, r *http.Request, status int, reason string) {
	level := slog.LevelInfo
	if strings.HasSuffix(r.URL.Path, "/"+files.Autoexec) || !h.logs(r) {
		level = slog.LevelDebug
	}
	h.cfg.Log.Log(r.Context(), level, "HTTP request refused", "client", r.RemoteAddr, "path", cut(r.URL.Path, 200), "status", status, "reason", reason)
	refuse(w, status, reason)
}

// logs says whether one more refusal of a client is logged.
func (h *Handler) logs(r *http.Request) bool {
	at, _ := netip.ParseAddrPort(r.RemoteAddr)
	client, known := h.cfg.CountsFor(at.Addr().Unmap())
	return h.refusals.More(client, h.cfg.Now()) && (known || h.refused.More("", h.cfg.Now()))
}

func refuse(w http.ResponseWriter, status int, reason string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	fmt.Fprintln(w, reason)
}

func cut(s string, most int) string { return s[:min(len(s), most)] }
