package metal

import (
	"slices"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/pxe/productuuid"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// MaxExpected is what a box takes.
const MaxExpected = 4096

// unknown is what a snapshot says about machines that it does not name; nil: they
// are left alone. Outside of a window there is nothing to boot them for. Where some
// are expected, so are the enrolled ones that nobody knows a MAC of.
func unknown(u store.Unknown, machines []store.Machine, now time.Time) *pxev1.Unknown {
	if !u.Inspect || u.WindowID == "" || !u.WindowUntil.After(now) {
		return nil
	}
	out := &pxev1.Unknown{Inspect: true, WindowId: u.WindowID, WindowUntilMs: u.WindowUntil.UnixMilli()}
	for _, who := range u.Expected {
		e := &pxev1.Expected{ProductUuid: who}
		if strings.Contains(who, ":") {
			e = &pxev1.Expected{Mac: who}
		}
		out.Expected = append(out.Expected, e)
	}
	for _, m := range machines {
		if len(out.Expected) == 0 || len(out.Expected) == MaxExpected {
			break
		}
		if len(m.MACs) == 0 && !productuuid.None(m.ProductUUID) && !slices.Contains(u.Expected, m.ProductUUID) {
			out.Expected = append(out.Expected, &pxev1.Expected{ProductUuid: m.ProductUUID})
		}
	}
	return out
}
