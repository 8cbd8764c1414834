package httpboot

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/printable"
	"github.com/better-compute/site-appliance/pxe/assign"
	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/pxev1"
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

// asset is one file of a boot: one of the box's, a stored artifact, or neither, the
// archive that is made for this boot.
type asset struct {
	name, stage        string
	file, digest, kind string
	// last: whoever gets it boots.
	last bool
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

// file serves a file of the box's and says whether it did.
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
		if r.Context().Err() == nil { // or the client has left, as iPXE does to ask again
			h.cfg.Log.Warn("artifact not served", "machine", m.MachineId, "sha256", digest, "err", err)
			h.tell(mac, m, "missing", printable.ASCII(fmt.Sprintf("artifact %s: %v", digest, err), maxDetail))
		}
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
	p, ok := body.(Pieces)
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

// content serves Range, HEAD and Content-Length.
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
	if f := files.Plain(body); f != nil {
		body = f
	}
	http.ServeContent(w, r, "", time.Time{}, body)
}
