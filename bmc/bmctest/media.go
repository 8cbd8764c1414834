package bmctest

import (
	"bytes"
	"context"
	"io"
	"net/http"
)

// mediaBytes is how much of a medium a BMC reads when the machine has no Drive.
const mediaBytes = 1 << 20

// Drive is a Machine that takes virtual media.
type Drive interface {
	// InsertMedium puts a medium into the machine's drive: "cdrom" or "usb".
	InsertMedium(ctx context.Context, drive string, image io.Reader) error
	EjectMedium(ctx context.Context, drive string) error
}

// slot is a virtual drive; Redfish's mu guards it.
type slot struct {
	image    string
	inserted bool
	late     int
	old      *slot
}

// slotKinds are the drives by their ids.
var slotKinds = map[string]struct {
	name, drive string
	types       []string
}{
	"CD1":  {"Virtual CD", "cdrom", []string{"CD", "DVD"}},
	"USB1": {"Virtual USB", "usb", []string{"USBStick", "Floppy"}},
}

// Media is the URL in the CD drive, "" when it is empty.
func (r *Redfish) Media() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.slots["CD1"]; s != nil && s.inserted {
		return s.image
	}
	return ""
}

var mediaRoutes = mediaTable()

func mediaTable() map[string]handler {
	table := map[string]handler{}
	for _, owner := range []string{manager, system} {
		here := func(h handler) handler {
			return func(x *exchange) reply {
				if _, known := slotKinds[x.req.PathValue("slot")]; !known && x.req.PathValue("slot") != "" || (owner == system) != x.r.faulty(MediaUnderSystem) {
					return missing()
				}
				return h(x)
			}
		}
		folder := owner + "/VirtualMedia"
		table["GET "+folder] = here(func(x *exchange) reply {
			return x.collection("VirtualMediaCollection", "Virtual Media", folder+"/USB1", folder+"/CD1")
		})
		table["GET "+folder+"/{slot}"] = here(func(x *exchange) reply { return showSlot(x, folder) })
		table["PATCH "+folder+"/{slot}"] = here(patchSlot)
		table["POST "+folder+"/{slot}/Actions/VirtualMedia.InsertMedia"] = here(func(x *exchange) reply {
			if x.r.faulty(MediaPatchOnly) {
				return missing()
			}
			return insertMedia(x)
		})
		table["POST "+folder+"/{slot}/Actions/VirtualMedia.EjectMedia"] = here(func(x *exchange) reply {
			if x.r.faulty(MediaPatchOnly) {
				return missing()
			}
			return ejectMedia(x)
		})
	}
	return table
}

func showSlot(x *exchange, folder string) reply {
	id := x.req.PathValue("slot")
	kind := slotKinds[id]
	x.r.mu.Lock()
	defer x.r.mu.Unlock()
	s := x.r.slots[id]
	if s == nil {
		s = &slot{}
	}
	if s.late > 0 {
		if !x.inside {
			s.late--
		}
		s = s.old
	}
	o := resource(folder+"/"+id, "#VirtualMedia.v1_4_0.VirtualMedia", kind.name, object{
		"MediaTypes": kind.types, "Image": nil, "ImageName": nil, "Inserted": s.inserted, "ConnectedVia": "NotConnected", "WriteProtected": true, "VerifyCertificate": true,
	})
	if s.image != "" {
		o["Image"], o["ImageName"] = s.image, "medium"
	}
	if s.inserted || s.image != "" {
		o["ConnectedVia"] = "URI"
	}
	if !x.r.faults.on(MediaPatchOnly) {
		path := folder + "/" + id + "/Actions/VirtualMedia."
		o["Actions"] = object{"#VirtualMedia.InsertMedia": object{"target": path + "InsertMedia"}, "#VirtualMedia.EjectMedia": object{"target": path + "EjectMedia"}}
	}
	return ok(o)
}

// mediaRequest is what an insert may say.
type mediaRequest struct {
	Image                *string
	Inserted             *bool
	WriteProtected       *bool
	UserName, Password   *string
	TransferMethod       *string
	TransferProtocolType *string
	MediaType            *string
}

func patchSlot(x *exchange) reply {
	if !x.r.faulty(MediaPatchOnly) {
		return fail(http.StatusMethodNotAllowed, "Base.1.8.OperationNotAllowed", "The actions are what inserts and ejects.")
	}
	body := new(bytes.Buffer)
	x.req.Body = io.NopCloser(io.TeeReader(x.req.Body, body))
	var in mediaRequest
	if bad := x.decode(&in); bad != nil {
		return *bad
	}
	if in.Image == nil || *in.Image == "" || in.Inserted != nil && !*in.Inserted {
		return ejectMedia(x)
	}
	x.req.Body = io.NopCloser(body)
	return insertMedia(x)
}

func insertMedia(x *exchange) reply {
	r, id := x.r, x.req.PathValue("slot")
	var in mediaRequest
	if bad := x.decode(&in); bad != nil {
		return *bad
	}
	extras := in.Inserted != nil || in.WriteProtected != nil || in.UserName != nil || in.Password != nil || in.TransferMethod != nil || in.TransferProtocolType != nil || in.MediaType != nil
	r.mu.Lock()
	s := r.slots[id]
	occupied := s != nil && s.inserted
	r.mu.Unlock()
	switch {
	case in.Image == nil || *in.Image == "":
		return fail(http.StatusBadRequest, "Base.1.8.ActionParameterMissing", "The Image is missing.")
	case r.faulty(MediaImageOnly) && extras:
		return fail(http.StatusBadRequest, "Base.1.8.ActionParameterUnknown", "Image is the only parameter.")
	case r.faulty(MediaWantsCredentials) && (in.UserName == nil || in.Password == nil):
		return fail(http.StatusBadRequest, "Base.1.8.ActionParameterMissing", "UserName and Password are missing.")
	case r.faulty(MediaWantsTransfer) && (in.TransferMethod == nil || in.TransferProtocolType == nil):
		return fail(http.StatusBadRequest, "Base.1.8.ActionParameterMissing", "TransferMethod and TransferProtocolType are missing.")
	case in.TransferMethod != nil && *in.TransferMethod != "Stream", in.TransferProtocolType != nil && *in.TransferProtocolType != "HTTPS":
		return refuse("The transfer is not one that the drive has.")
	case r.faulty(MediaOccupiedFails) && occupied:
		return fail(http.StatusBadRequest, "Base.1.8.ResourceInUse", "The drive holds a medium.")
	}
	drive, limit := r.machine.(Drive)
	size := int64(mediaBytes)
	if limit {
		size = 16 << 30
	}
	content, err := r.fetch(x.req.Context(), *in.Image, size)
	if err != nil {
		return unfetched(err)
	}
	if r.strike(MediaIgnored) {
		return done()
	}
	if limit {
		if err := drive.InsertMedium(x.req.Context(), slotKinds[id].drive, bytes.NewReader(content)); err != nil {
			return fail(http.StatusInternalServerError, "Base.1.8.InternalError", err.Error())
		}
	}
	r.mu.Lock()
	if r.slots == nil {
		r.slots = map[string]*slot{}
	}
	fresh := &slot{image: *in.Image, inserted: true}
	if r.faults.on(MediaShownLate) {
		fresh.old, fresh.late = &slot{}, lateReads
	}
	r.slots[id] = fresh
	r.mu.Unlock()
	r.note("media insert %s", *in.Image)
	return done()
}

func ejectMedia(x *exchange) reply {
	r, id := x.r, x.req.PathValue("slot")
	r.mu.Lock()
	s := r.slots[id]
	if s == nil || !s.inserted {
		r.mu.Unlock()
		if r.faulty(MediaEjectEmptyFails) {
			return fail(http.StatusBadRequest, "Base.1.8.ResourceMissing", "The drive is empty.")
		}
		return done()
	}
	r.slots[id] = &slot{}
	if r.faults.on(MediaEjectLeavesImage) {
		r.slots[id].image = s.image
	}
	r.mu.Unlock()
	r.note("media eject")
	if drive, has := r.machine.(Drive); has {
		if err := drive.EjectMedium(x.req.Context(), slotKinds[id].drive); err != nil {
			r.note("failed: %v", err)
			return fail(http.StatusInternalServerError, "Base.1.8.InternalError", err.Error())
		}
	}
	return done()
}
