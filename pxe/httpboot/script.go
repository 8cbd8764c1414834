package httpboot

import (
	"net/http"
	"strings"

	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/pxev1"
	"github.com/better-compute/site-appliance/pxe/script"
)

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

func (h *Handler) text(w http.ResponseWriter, r *http.Request, text string) {
	w.Header().Set("Cache-Control", "no-store")
	content(w, r, "text/plain; charset=utf-8", strings.NewReader(text), int64(len(text)))
}
