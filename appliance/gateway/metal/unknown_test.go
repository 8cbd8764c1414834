package metal

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// TestAssignUnknown: what boxes are told of machines that no snapshot names.
func TestAssignUnknown(t *testing.T) {
	const mac, uuid, awaited = "52:54:00:00:00:0a", "4c4c4544-0042-3010-8056-b4c04f303232", "564d9ac5-0a2d-4b6e-9c1d-0c2b3f4a5e6d"
	now := time.UnixMilli(1_000_000)
	inspect := store.Unknown{Inspect: true, WindowID: "win_1", WindowUntil: now.Add(time.Hour)}
	with := func(edit func(*store.Unknown)) store.Unknown { u := inspect; edit(&u); return u }
	machines := []store.Machine{
		{ID: "node_1", ProductUUID: awaited}, {ID: "node_2", ProductUUID: "00000000-0000-0000-0000-000000000000"}, {ID: "node_3"},
		{ID: "node_4", ProductUUID: "11111111-0042-3010-8056-b4c04f303232", MACs: []string{"52:54:00:00:00:04"}},
	}
	for title, tt := range map[string]struct {
		unknown  store.Unknown
		machines []store.Machine
		want     string // window and expected ones; empty: left alone
	}{
		"left alone":                    {store.Unknown{}, machines, ""},
		"no window yet":                 {with(func(u *store.Unknown) { u.WindowID = "" }), nil, ""},
		"a window that is over":         {with(func(u *store.Unknown) { u.WindowUntil = now }), nil, ""},
		"all of them":                   {inspect, machines, "win_1"},
		"expected ones":                 {with(func(u *store.Unknown) { u.Expected = []string{uuid, mac} }), nil, "win_1 " + uuid + " " + mac},
		"and enrolled ones without MAC": {with(func(u *store.Unknown) { u.Expected = []string{mac} }), machines, "win_1 " + mac + " " + awaited},
		"no more than a box takes":      {with(func(u *store.Unknown) { u.Expected = slices.Repeat([]string{mac}, MaxExpected) }), machines, "win_1" + strings.Repeat(" "+mac, MaxExpected)},
	} {
		got := AssignCommand(store.Snapshot{Version: 1, Machines: tt.machines, Unknown: tt.unknown}, now).Args.(*pxev1.AssignRequest).Unknown
		var said []string
		if got != nil {
			said = []string{got.WindowId}
			if !got.Inspect || got.WindowUntilMs != inspect.WindowUntil.UnixMilli() {
				t.Errorf("%s: %v", title, got)
			}
		}
		for _, e := range got.GetExpected() {
			said = append(said, e.Mac+e.ProductUuid)
		}
		if text := strings.Join(said, " "); text != tt.want {
			t.Errorf("%s: unknown = %.300q, want %.300q", title, text, tt.want)
		}
	}
}
