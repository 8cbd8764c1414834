// Package httpboot is what machines fetch over HTTP: boot programs, their script, what it boots and their artifacts.
//
// Paths: /boot/<mac>/script.ipxe and /boot/<mac>/<boot program> for a machine
// that starts, /boot/<mac>/<token>/<file> for the boot that its script or DHCP
// began, /artifacts/<sha256> for what runs there, and two that take a POST,
// /boot/<mac>/<token>/progress and done. A client is the machine that holds its
// address's lease; it gets its own things only.
package httpboot

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base32"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/pxe/assign"
	"github.com/better-compute/site-appliance/pxe/boots"
	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/grub"
	"github.com/better-compute/site-appliance/pxe/limit"
	"github.com/better-compute/site-appliance/pxe/pxev1"
	"github.com/better-compute/site-appliance/pxe/script"
)

// The names of the files of one boot.
const (
	scriptName = "script.ipxe"
	kernelName = "vmlinuz"
	initrdName = "ramdisk.img"
	bootName   = "boot.img"
	// Those of an assigned kernel and unified kernel image.
	otherKernelName = "kernel"
	otherInitrdName = "initrd.img"
	ukiName         = "boot.efi"
	isoSuffix       = ".iso"
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
	// Stage is told what a machine has fetched; it must not block.
	Stage func(mac string, m *pxev1.Machine, stage, detail string)
	// Syslog says whether scripts name the box as their syslog server.
	Syslog bool
	Now    func() time.Time
	Log    *slog.Logger
}

// ScriptURL is where the machine with this MAC finds its script.
func ScriptURL(base, mac string) string { return base + "/boot/" + dashed(mac) + "/" + scriptName }

// LoaderURL is where HTTP boot finds its boot program.
func LoaderURL(base, mac, file string) string { return base + "/boot/" + dashed(mac) + "/" + file }

// dashed has no colons: they are legal in a path, but not every firmware's parser knows.
func dashed(mac string) string { return strings.ReplaceAll(mac, ":", "-") }

// Handler serves the paths of the package comment and nothing else.
type Handler struct {
	cfg    Config
	boots  running
	stages limit.Minute
	// refusals and refused are what is logged of one client and of all.
	refusals, refused limit.Minute
	returns           returns
}

// New makes the handler.
func New(cfg Config) *Handler {
	return &Handler{cfg: cfg, boots: running{byToken: make(map[string]*boot)},
		stages: limit.Minute{Most: perMinute}, refusals: limit.Minute{Most: perMinute}, refused: limit.Minute{Most: 16 * perMinute}}
}

// ImageURL is where firmware finds what it boots by itself: a disc image or a
// unified kernel image.
func (h *Handler) ImageURL(base, mac string, m *pxev1.Machine, a decide.Action) string {
	name := ukiName
	if a == decide.HTTPISO || a == decide.SanbootISO {
		name = isoName(m)
	}
	return base + "/boot/" + dashed(mac) + "/" + h.boots.same(m, h.cfg.Now(), decide.HTTPBoot) + "/" + name
}

var plainName = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}$`)

// isoName ends as firmware wants a disc image's URL to end.
func isoName(m *pxev1.Machine) string {
	name := strings.TrimSuffix(m.GetIso().GetName(), isoSuffix)
	if !plainName.MatchString(name) {
		name = "disc"
	}
	return name + isoSuffix
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

// split cuts a path at slashes and forgives doubled ones, which firmware makes.
func split(path string) []string {
	return strings.FieldsFunc(path, func(r rune) bool { return r == '/' })
}

// baseOf is how the client reached the box: by what it names as the host, or where
// its connection ends.
func baseOf(r *http.Request) string {
	if a, err := netip.ParseAddrPort(r.Host); err == nil && plain(a.Addr()) {
		return Base(a)
	}
	if a, err := netip.ParseAddr(bare(r.Host)); err == nil && plain(a) {
		return Base(netip.AddrPortFrom(a, 80))
	}
	if local, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr); ok {
		a := local.AddrPort()
		return Base(netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port()))
	}
	return "http://" + r.Host
}

// Base is how the URLs begin of who reaches the box at an address.
func Base(at netip.AddrPort) string {
	switch {
	case at.Port() != 80:
		return "http://" + at.String()
	case at.Addr().Is6():
		return "http://[" + at.Addr().String() + "]"
	}
	return "http://" + at.Addr().String()
}

// plain says whether an address can stand in a URL as it is.
func plain(a netip.Addr) bool { return a.Zone() == "" && !a.Is4In6() }

// bare is a URL's host without the brackets of an IPv6 address.
func bare(host string) string {
	if inner, ok := strings.CutPrefix(host, "["); ok {
		if inner, ok = strings.CutSuffix(inner, "]"); ok && strings.Contains(inner, ":") {
			return inner
		}
	}
	return host
}

func with(ask decide.Request, c decide.Client) decide.Request {
	if c.Arch == decide.OtherArch {
		c.Arch = ask.Client.Arch
	}
	ask.Client = c
	return ask
}

func (h *Handler) loader(w http.ResponseWriter, r *http.Request, ask decide.Request, mac string, m *pxev1.Machine, name string) {
	d, ok := decide.Fetchable(ask, name)
	if !ok {
		h.denied(w, r, http.StatusNotFound, d.Reason)
		return
	}
	if h.file(w, r, d.Loader) {
		h.stage(r, mac, m, "http-loader", name)
	}
}

func (h *Handler) script(w http.ResponseWriter, r *http.Request, ask decide.Request, mac string, m *pxev1.Machine) {
	ask.Returned = h.returns.recent(mac, h.cfg.Now())
	d := decide.Decide(with(ask, decide.Client{Program: decide.IPXE}))
	if d.Action == decide.LocalDisk {
		if r.Method == http.MethodGet {
			h.returns.add(mac, h.cfg.Now())
		}
		text := script.LocalDisk()
		if d.Exit == decide.Sanboot {
			text = script.FirstDisk()
		}
		h.text(w, r, text)
		h.stage(r, mac, m, "script", d.Action.String()+": "+d.Reason)
		return
	}
	if !d.Action.Boots() {
		h.denied(w, r, http.StatusNotFound, d.Reason)
		return
	}
	text, err := h.write(r, mac, m, ask.Client.Arch, d)
	if err != nil {
		h.cfg.Log.Error("boot script not made", "mac", mac, "err", err)
		refuse(w, http.StatusInternalServerError, "no script")
		return
	}
	h.text(w, r, text)
	h.stage(r, mac, m, "script", d.Action.String()+": "+d.Reason)
}

// write makes the script that carries an action out.
func (h *Handler) write(r *http.Request, mac string, m *pxev1.Machine, arch decide.Arch, d decide.Decision) (string, error) {
	home := baseOf(r)
	around := script.Around{AgainBefore: home + "/boot/", AgainAfter: "/" + scriptName}
	if h.cfg.Syslog {
		around.Syslog = hostOf(home)
	}
	at := home + bootPath(mac, h.boots.begin(m, h.cfg.Now(), decide.IPXE))
	switch d.Action {
	case decide.Kernel:
		k := script.Kernel{Around: around, Kernel: at + otherKernelName, Cmdline: m.GetKernel().GetCmdline()}
		if m.GetKernel().GetInitrdSha256() != "" {
			k.Initrd = at + otherInitrdName
		}
		return k.Script()
	case decide.UKI:
		return script.UKI{Around: around, Image: at + ukiName}.Script()
	case decide.SanbootISO, decide.HTTPISO:
		return script.Sanboot{Around: around, Image: at + isoName(m), Told: "This machine is " + d.Reason}.Script()
	}
	return script.Ramdisk{Around: around, Kernel: at + kernelName, Initrd: at + initrdName, Boot: at + bootName, Cmdline: h.cmdline(arch)}.Script()
}

func (h *Handler) cmdline(arch decide.Arch) string {
	if arch == decide.ARM64 {
		return h.cfg.ARM64Cmdline
	}
	return h.cfg.Cmdline
}

// bootPath is where the files of a boot are, over TFTP too.
func bootPath(mac, token string) string { return "/boot/" + dashed(mac) + "/" + token + "/" }

// hostOf is the address of a base URL.
func hostOf(base string) netip.Addr {
	host := strings.TrimPrefix(base, "http://")
	if a, err := netip.ParseAddrPort(host); err == nil {
		return a.Addr()
	}
	a, _ := netip.ParseAddr(bare(host))
	return a
}

func (h *Handler) text(w http.ResponseWriter, r *http.Request, text string) {
	w.Header().Set("Cache-Control", "no-store")
	content(w, r, "text/plain; charset=utf-8", strings.NewReader(text), int64(len(text)))
}

// bootFile serves a file of a boot that was begun.
func (h *Handler) bootFile(w http.ResponseWriter, r *http.Request, ask decide.Request, mac string, m *pxev1.Machine, token, name string) {
	b, p, status, why := h.find(ask, m, token, name)
	if why != "" {
		h.denied(w, r, status, why)
		return
	}
	if h.cfg.Now().Sub(b.began) < patience {
		w.Header().Set("Retry-After", retryAfter)
	}
	first := p.last && r.Method == http.MethodGet && h.count(b, m)
	served := false
	switch {
	case p.file != "":
		served = h.file(w, r, p.file)
	case p.digest != "":
		served = h.stored(w, r, mac, m, p.digest, p.kind, !first)
	default:
		served = h.archive(w, r, mac, m, b)
	}
	if !served {
		return
	}
	if first && r.Header.Get("Range") != "" { // a drive is read piece by piece
		h.tell(mac, m, p.stage, "window "+m.WindowId)
		return
	}
	h.stage(r, mac, m, p.stage, "window "+m.WindowId)
}

// asset is one file of a boot: a boot program's, a stored artifact, or neither, the
// archive that is made for this boot.
type asset struct {
	name, stage        string
	file, digest, kind string
	// last: whoever gets it boots.
	last bool
}

// find is the asset that a boot has under a name; why: none. The boot's own count is
// no reason to stop it half-way.
func (h *Handler) find(ask decide.Request, m *pxev1.Machine, token, name string) (b *boot, p asset, status int, why string) {
	b = h.boots.find(token, m)
	client := decide.Client{Program: decide.IPXE}
	if b != nil {
		client.Program = b.program
		if b.isCounted() {
			ask.Boots--
		}
	}
	d := decide.Decide(with(ask, client))
	if !d.Action.Boots() {
		// What firmware boots by itself has no iPXE; the name says so.
		if d = decide.Decide(with(ask, decide.Client{Program: decide.HTTPBoot})); d.Action != decide.HTTPISO && d.Action != decide.UKI {
			return nil, p, http.StatusNotFound, d.Reason
		}
	}
	if b == nil {
		return nil, p, http.StatusForbidden, "the token is not of a boot that runs"
	}
	for _, p := range assets(d.Action, ask.Client.Arch, m) {
		if p.name == name {
			return b, p, 0, ""
		}
	}
	return nil, p, http.StatusNotFound, "no such path"
}

// assets are the files of a boot.
func assets(a decide.Action, arch decide.Arch, m *pxev1.Machine) []asset {
	k := m.GetKernel()
	switch a {
	case decide.RunAgent:
		kernel, initrd := files.Kernel, files.Initrd
		if arch == decide.ARM64 {
			kernel, initrd = files.ARM64Kernel, files.ARM64Initrd
		}
		return []asset{{name: kernelName, stage: "kernel", file: kernel}, {name: initrdName, stage: "initrd", file: initrd}, {name: bootName, stage: "boot", last: true}}
	case decide.Kernel:
		if k.GetInitrdSha256() == "" {
			return []asset{{name: otherKernelName, stage: "kernel", digest: k.GetSha256(), kind: binary, last: true}}
		}
		return []asset{{name: otherKernelName, stage: "kernel", digest: k.GetSha256(), kind: binary}, {name: otherInitrdName, stage: "initrd", digest: k.GetInitrdSha256(), kind: binary, last: true}}
	case decide.UKI:
		return []asset{{name: ukiName, stage: "uki", digest: k.GetSha256(), kind: "application/efi", last: true}}
	case decide.SanbootISO, decide.HTTPISO:
		return []asset{{name: isoName(m), stage: "iso", digest: m.GetIso().GetSha256(), kind: "application/vnd.efi-iso", last: true}}
	}
	return nil
}

// count says whether the boot is counted now, before its last file goes out.
func (h *Handler) count(b *boot, m *pxev1.Machine) bool {
	if !b.count() {
		return false
	}
	if err := h.cfg.Counts.Booted(m.MachineId, m.WindowId); err != nil {
		h.cfg.Log.Error("a boot is counted in memory only", "machine", m.MachineId, "err", err)
	}
	return true
}

const binary = "application/octet-stream"

func (h *Handler) archive(w http.ResponseWriter, r *http.Request, mac string, m *pxev1.Machine, b *boot) bool {
	data, err := h.mint(r.Context(), baseOf(r), mac, m, b)
	if err != nil {
		refuse(w, http.StatusServiceUnavailable, "try again")
		return false
	}
	w.Header().Set("Cache-Control", "no-store")
	content(w, r, binary, bytes.NewReader(data), int64(len(data)))
	return true
}

// mint is the archive of one boot, made when it is first asked for.
func (h *Handler) mint(ctx context.Context, home, mac string, m *pxev1.Machine, b *boot) ([]byte, error) {
	data, err := b.initrd(ctx, func(ctx context.Context) ([]byte, error) {
		return h.cfg.Boot(ctx, Booting{Machine: m, Base: home, Report: home + bootPath(mac, h.cfg.Counts.Token(m.MachineId, m.WindowId))})
	})
	if err != nil {
		h.cfg.Log.Error("boot archive not made", "mac", mac, "machine", m.MachineId, "err", err)
	}
	return data, err
}

// While a boot is young, what cannot be had now is to be asked for again, which
// iPXE does by itself; after that its script has its turn.
const (
	patience   = 2 * time.Minute
	retryAfter = "5" // seconds
)

// stored serves an artifact of the assignment, and with on whatever blocks of it
// are asked for next.
func (h *Handler) stored(w http.ResponseWriter, r *http.Request, mac string, m *pxev1.Machine, digest, kind string, on bool) bool {
	f, size, err := h.cfg.Artifacts(r.Context(), digest)
	if err == nil {
		defer f.Close()
		err = firstBytes(r, f, size)
	}
	if err != nil {
		if coded := new(errs.Error); errors.As(err, &coded) && !coded.Retryable {
			w.Header().Del("Retry-After")
		}
		h.cfg.Log.Warn("artifact not served", "machine", m.MachineId, "sha256", digest, "err", err)
		h.tell(mac, m, "missing", printable(fmt.Sprintf("artifact %s: %v", digest, err)))
		refuse(w, http.StatusServiceUnavailable, "the artifact is not available now")
		return false
	}
	w.Header().Set("ETag", `"`+digest+`"`)
	w.Header().Set("Content-Type", kind)
	if !on || !drives(w, r, f, size) {
		content(w, r, kind, f, size)
	}
	return true
}

// firstBytes waits for those of an answer: once it has begun, an answer can only
// break off.
func firstBytes(r *http.Request, body io.Seeker, size int64) error {
	p, ok := body.(pieces)
	s := spanOf(r.Header.Get("Range"), size)
	if !ok || r.Method != http.MethodGet || s.kind == beyond || size == 0 {
		return nil
	}
	if _, err := p.Seek(s.first, io.SeekStart); err != nil {
		return err
	}
	if _, _, _, err := p.Next(1); err != nil {
		return err
	}
	_, err := p.Seek(0, io.SeekStart)
	return err
}

func (h *Handler) artifact(w http.ResponseWriter, r *http.Request, ask decide.Request, mac string, m *pxev1.Machine, digest string) {
	if d := decide.Decide(with(ask, decide.Client{Program: decide.Agent})); d.Action != decide.RunAgent {
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
	h.stored(w, r, mac, m, digest, binary, true)
}

// maxReport bounds a post's body.
const maxReport = 4 << 10

// post takes a machine's report. Its token is of the machine and the window, so
// that it holds when the box was restarted meanwhile.
func (h *Handler) post(w http.ResponseWriter, r *http.Request, mac string, m *pxev1.Machine, token, what string) {
	if !h.cfg.Counts.Holds(token, m.MachineId, m.WindowId) {
		h.denied(w, r, http.StatusForbidden, "the token is not of the machine's boot window")
		return
	}
	// A report that breaks off is one all the same.
	body, _ := io.ReadAll(http.MaxBytesReader(w, r.Body, maxReport))
	if what == "done" {
		if err := h.cfg.Counts.Done(m.MachineId, m.WindowId); err != nil {
			h.cfg.Log.Error("what a machine has done is not kept", "machine", m.MachineId, "err", err)
			refuse(w, http.StatusServiceUnavailable, "try again")
			return
		}
	}
	h.tell(mac, m, what, printable(string(body)))
	w.WriteHeader(http.StatusNoContent)
}

func printable(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return -1
		}
		return r
	}, s)
	return cut(s, 200)
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
	size := f.Size()
	if (name == files.Initrd || name == files.ARM64Initrd) && size%4 != 0 {
		padded := pad(f, size, 4)
		body, size = padded, padded.total
	}
	content(w, r, binary, body, size)
	return true
}

// content serves Range, HEAD and Content-Length, for as long as the client takes bytes.
func content(w http.ResponseWriter, r *http.Request, kind string, body io.ReadSeeker, size int64) {
	w.Header().Del("Retry-After")
	w.Header().Set("Content-Type", kind)
	if v := r.Header.Get("Range"); v != "" {
		r = r.Clone(r.Context())
		r.Header.Del("Range")
		if said := spanOf(v, size).header(size); said != "" {
			r.Header.Set("Range", said)
		}
	}
	// A plain file goes to the connection as it is, which hands it to the kernel.
	if f, ok := body.(interface{ Plain() *os.File }); ok {
		body = f.Plain()
	}
	http.ServeContent(w, r, "", time.Time{}, body)
}

// stage tells of whole fetches only: a HEAD or a resumed Range is no new stage.
func (h *Handler) stage(r *http.Request, mac string, m *pxev1.Machine, stage, detail string) {
	if r.Method == http.MethodGet && r.Header.Get("Range") == "" {
		h.tell(mac, m, stage, detail)
	}
}

func (h *Handler) tell(mac string, m *pxev1.Machine, stage, detail string) {
	if h.stages.More(mac, h.cfg.Now()) {
		h.cfg.Stage(mac, m, stage, detail)
	}
}

func (h *Handler) denied(w http.ResponseWriter, r *http.Request, status int, reason string) {
	level := slog.LevelInfo
	if client, _, _ := net.SplitHostPort(r.RemoteAddr); !h.refusals.More(client, h.cfg.Now()) || !h.refused.More("", h.cfg.Now()) {
		level = slog.LevelDebug
	}
	h.cfg.Log.Log(r.Context(), level, "HTTP request refused", "client", r.RemoteAddr, "path", cut(r.URL.Path, 200), "status", status, "reason", reason)
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
