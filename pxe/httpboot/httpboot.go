// Package httpboot is what machines fetch over HTTP: iPXE itself, their script, the ramdisk and their artifacts.
//
// Paths: /boot/<mac>/script.ipxe and /boot/<mac>/snponly.efi for a machine
// that starts, /boot/<mac>/<token>/{vmlinuz,ramdisk.img,boot.img} for the boot
// that its script began, /artifacts/<sha256> for what runs there. A client is
// the machine that holds its address's lease; it gets its own things only.
package httpboot

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base32"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/pxe/assign"
	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/pxev1"
	"github.com/better-compute/site-appliance/pxe/script"
)

// The names of the files of one boot.
const (
	scriptName = "script.ipxe"
	kernelName = "vmlinuz"
	initrdName = "ramdisk.img"
	bootName   = "boot.img"
)

// Config is what the handler needs. All functions must be safe for concurrent use.
type Config struct {
	// Base is "http://host[:port]" of the box as machines see it.
	Base string
	// Holder is the MAC that the DHCP server gave an address to.
	Holder func(netip.Addr) (mac string, ok bool)
	// ByMAC is the assignment; the MAC is lower-case with colons.
	ByMAC   func(mac string) (*pxev1.Machine, bool)
	Files   files.Source
	Cmdline string
	// Boot makes the initrd that is appended for one boot of the machine.
	Boot func(context.Context, *pxev1.Machine) ([]byte, error)
	// Artifacts opens a stored artifact.
	Artifacts func(ctx context.Context, sha256 string) (io.ReadSeekCloser, int64, error)
	// Stage is told what a machine has fetched; it must not block.
	Stage func(mac string, m *pxev1.Machine, stage, detail string)
	Now   func() time.Time
	Log   *slog.Logger
}

// ScriptURL is where the machine with this MAC finds its script.
func ScriptURL(base, mac string) string { return base + "/boot/" + dashed(mac) + "/" + scriptName }

// LoaderURL is where UEFI HTTP boot finds iPXE.
func LoaderURL(base, mac string) string { return base + "/boot/" + dashed(mac) + "/" + decide.UEFIFile }

// dashed has no colons: they are legal in a path, but not every firmware's parser knows.
func dashed(mac string) string { return strings.ReplaceAll(mac, ":", "-") }

// Handler serves the paths of the package comment and nothing else.
type Handler struct {
	cfg    Config
	boots  boots
	stages stages
}

// New makes the handler.
func New(cfg Config) *Handler {
	return &Handler{cfg: cfg, boots: boots{byToken: make(map[string]*boot)}}
}

func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
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
	m, ok := h.cfg.ByMAC(mac)
	if !ok {
		h.denied(w, r, http.StatusNotFound, "the machine is unknown")
		return
	}
	// Never through a ServeMux: it answers "//" with a redirect, which EDK2 does not survive.
	parts := split(r.URL.Path)
	switch {
	case len(parts) == 2 && parts[0] == "artifacts":
		h.artifact(w, r, m, parts[1])
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
	if other, ok := h.cfg.ByMAC(named.String()); !ok || other.MachineId != m.MachineId {
		h.denied(w, r, http.StatusForbidden, "the path is another machine's")
		return
	}
	switch mac = named.String(); {
	case len(parts) == 4:
		h.bootFile(w, r, mac, m, parts[2], parts[3])
	case parts[2] == scriptName:
		h.script(w, r, mac, m)
	case parts[2] == decide.UEFIFile:
		h.loader(w, r, mac, m)
	default:
		h.denied(w, r, http.StatusNotFound, "no such path")
	}
}

// split cuts a path at slashes and forgives doubled ones, which firmware makes.
func split(path string) []string {
	return strings.FieldsFunc(path, func(r rune) bool { return r == '/' })
}

func (h *Handler) decide(m *pxev1.Machine, c decide.Client) decide.Decision {
	return decide.Decide(decide.Request{Machine: m, Client: c, Now: h.cfg.Now()})
}

func (h *Handler) loader(w http.ResponseWriter, r *http.Request, mac string, m *pxev1.Machine) {
	d := h.decide(m, decide.UEFIHTTP)
	if d.Action != decide.Chain {
		h.denied(w, r, http.StatusNotFound, d.Reason)
		return
	}
	if h.file(w, r, files.UEFILoader) {
		h.stage(r, mac, m, "http-loader", "")
	}
}

func (h *Handler) script(w http.ResponseWriter, r *http.Request, mac string, m *pxev1.Machine) {
	d := h.decide(m, decide.IPXE)
	var text string
	switch d.Action {
	case decide.LocalDisk:
		text = script.LocalDisk()
	case decide.Ramdisk:
		base := h.cfg.Base + "/boot/" + dashed(mac) + "/" + h.boots.begin(m, h.cfg.Now()) + "/"
		var err error
		text, err = script.Ramdisk{
			Kernel: base + kernelName, Initrd: base + initrdName, Boot: base + bootName,
			Again: ScriptURL(h.cfg.Base, mac), Cmdline: h.cfg.Cmdline,
		}.Script()
		if err != nil {
			h.cfg.Log.Error("boot script not made", "mac", mac, "err", err)
			refuse(w, http.StatusInternalServerError, "no script")
			return
		}
	default:
		h.denied(w, r, http.StatusNotFound, d.Reason)
		return
	}
	w.Header().Set("Cache-Control", "no-store")
	h.content(w, r, "text/plain; charset=utf-8", strings.NewReader(text))
	h.stage(r, mac, m, "script", d.Action.String()+": "+d.Reason)
}

func (h *Handler) bootFile(w http.ResponseWriter, r *http.Request, mac string, m *pxev1.Machine, token, name string) {
	if d := h.decide(m, decide.IPXE); d.Action != decide.Ramdisk {
		h.denied(w, r, http.StatusNotFound, d.Reason)
		return
	}
	b := h.boots.find(token, m)
	if b == nil {
		h.denied(w, r, http.StatusForbidden, "the token is not of a boot that runs")
		return
	}
	switch name {
	case kernelName:
		if h.file(w, r, files.Kernel) {
			h.stage(r, mac, m, "kernel", "")
		}
	case initrdName:
		if h.file(w, r, files.Initrd) {
			h.stage(r, mac, m, "initrd", "")
		}
	case bootName:
		data, err := b.initrd(r.Context(), m, h.cfg.Boot)
		if err != nil {
			h.cfg.Log.Error("boot archive not made", "mac", mac, "machine", m.MachineId, "err", err)
			refuse(w, http.StatusServiceUnavailable, "try again")
			return
		}
		w.Header().Set("Cache-Control", "no-store")
		h.content(w, r, "application/octet-stream", bytes.NewReader(data))
		h.stage(r, mac, m, "boot", "window "+m.WindowId)
	default:
		h.denied(w, r, http.StatusNotFound, "no such path")
	}
}

func (h *Handler) artifact(w http.ResponseWriter, r *http.Request, m *pxev1.Machine, digest string) {
	if d := h.decide(m, decide.Agent); d.Action != decide.Ramdisk {
		h.denied(w, r, http.StatusForbidden, d.Reason)
		return
	}
	listed := false
	for _, a := range m.Artifacts {
		listed = listed || a == digest
	}
	if !listed || !assign.ValidDigest(digest) {
		h.denied(w, r, http.StatusForbidden, "the artifact is not in the machine's assignment")
		return
	}
	f, _, err := h.cfg.Artifacts(r.Context(), digest)
	if err != nil {
		h.cfg.Log.Warn("artifact not served", "machine", m.MachineId, "sha256", digest, "err", err)
		refuse(w, http.StatusServiceUnavailable, "the artifact is not available now")
		return
	}
	defer f.Close()
	w.Header().Set("ETag", `"`+digest+`"`)
	h.content(w, r, "application/octet-stream", f)
}

// file serves a boot program and says whether it did.
func (h *Handler) file(w http.ResponseWriter, r *http.Request, name string) bool {
	f, err := h.cfg.Files.Open(name)
	if err != nil {
		h.cfg.Log.Error("boot file not served", "file", name, "err", err)
		refuse(w, http.StatusServiceUnavailable, "the file is not available")
		return false
	}
	defer f.Close()
	var body io.ReadSeeker = f
	if name == files.Initrd {
		body = pad(f, f.Size(), 4)
	}
	h.content(w, r, "application/octet-stream", body)
	return true
}

// stallTimeout ends a response whose client takes nothing for that long.
const stallTimeout = time.Minute

// content serves Range, HEAD and Content-Length, for as long as the client takes bytes.
func (h *Handler) content(w http.ResponseWriter, r *http.Request, kind string, body io.ReadSeeker) {
	w.Header().Set("Content-Type", kind)
	rc := http.NewResponseController(w)
	http.ServeContent(w, r, "", time.Time{}, &paced{ReadSeeker: body, alive: func() {
		// Errors: a writer without deadlines, as in tests, has no stall to end.
		_ = rc.SetWriteDeadline(time.Now().Add(stallTimeout))
	}})
}

// paced moves the deadline on with each piece that is read to be sent.
type paced struct {
	io.ReadSeeker
	alive func()
}

func (p *paced) Read(b []byte) (int, error) {
	p.alive()
	return p.ReadSeeker.Read(b)
}

// stage tells of whole fetches only: a HEAD or a resumed Range is no new stage.
func (h *Handler) stage(r *http.Request, mac string, m *pxev1.Machine, stage, detail string) {
	if r.Method == http.MethodGet && r.Header.Get("Range") == "" && h.stages.more(mac, h.cfg.Now()) {
		h.cfg.Stage(mac, m, stage, detail)
	}
}

func (h *Handler) denied(w http.ResponseWriter, r *http.Request, status int, reason string) {
	h.cfg.Log.Info("HTTP request refused", "client", r.RemoteAddr, "path", cut(r.URL.Path, 200), "status", status, "reason", reason)
	refuse(w, status, reason)
}

func refuse(w http.ResponseWriter, status int, reason string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	fmt.Fprintln(w, reason)
}

func cut(s string, most int) string { return s[:min(len(s), most)] }

// newToken has 160 random bits in lower-case letters and digits.
func newToken() string {
	var b [20]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand ends the program instead
	return strings.ToLower(base32.StdEncoding.EncodeToString(b[:]))
}
