package httpboot

import (
	"io"
	"net/http"

	"github.com/better-compute/site-appliance/appliance/base/printable"
	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

const (
	// perMinute is how many stages of one MAC are told of in a minute, how many refusals
	// of one client are logged and how many reports of one machine are taken: several
	// boots' worth. A machine in a loop must not fill the box's events, the line and
	// the gateway's disk.
	perMinute = 64
	// ofStrangers is how many of those refusals and reports there are of all together
	// that nobody vouches for: one host can make them up, each with an address of its own.
	ofStrangers = 8 * perMinute
	// mostMACs bounds what is remembered: more than an assignment's machines use.
	mostMACs = 8192
)

// maxReport bounds a post's body, and maxDetail what is told of it.
const (
	maxReport = 4 << 10
	maxDetail = 200
)

// post takes a machine's report. Its token is of the machine and the window, so
// that it holds when the box was restarted meanwhile.
func (h *Handler) post(w http.ResponseWriter, r *http.Request, mac string, m *pxev1.Machine, token, what string) {
	if !h.cfg.Counts.Holds(token, m.MachineId, m.WindowId) {
		h.denied(w, r, http.StatusForbidden, "the token is not of the machine's boot window")
		return
	}
	// Each may cost an event and a write to disk.
	if now := h.cfg.Now(); !h.posts.More(m.MachineId, now) || decide.IsStranger(m.MachineId) && !h.strange.More("", now) {
		h.denied(w, r, http.StatusTooManyRequests, "too many reports in a minute")
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
	if detail := printable.ASCII(string(body), maxDetail); what == "done" {
		h.cfg.Stage(mac, m, what, detail) // however much the machine told before
	} else {
		h.tell(mac, m, what, detail)
	}
	w.WriteHeader(http.StatusNoContent)
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
