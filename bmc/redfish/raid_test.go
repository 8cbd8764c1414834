package redfish

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/plugins/metal"
)

func (b *bench) layout() (metal.Layout, error) {
	b.t.Helper()
	raw, err := b.do("raid", "getLayout")
	return into[metal.Layout](b.t, raw), err
}

func drivesOf(numbers ...int) []string {
	var list []string
	for _, n := range numbers {
		list = append(list, fmt.Sprintf("RIG-DISK-%04d", n))
	}
	return list
}

func layoutOf(volumes ...metal.Volume) metal.Layout {
	return metal.Layout{Volumes: append([]metal.Volume{}, volumes...)}
}

func TestRAID(t *testing.T) {
	for _, faults := range [][]bmctest.Fault{
		nil, {bmctest.VolumesOldTypes}, {bmctest.TaskVanishes}, {bmctest.TaskMonitorOnly}, {bmctest.TaskInLocation}, {bmctest.TaskUnnamed}, {bmctest.ForeignLocation},
		{bmctest.MembersPaged}, {bmctest.SlashNeeded}, {bmctest.AbsoluteLinks}, {bmctest.SuccessAsError}, {bmctest.EtagOnActions},
		{bmctest.FailsAfter.Times(1)}, {bmctest.DropsAfter.Times(1)}, {bmctest.ResetsAfter.Times(1)},
	} {
		t.Run(fmt.Sprint(faults), func(t *testing.T) {
			r, b := rig(t)
			if got, err := b.layout(); err != nil || len(got.Volumes) != 0 {
				t.Fatalf("getLayout = %+v, %v, want none", got, err)
			}
			r.SetFaults(faults...)
			system := metal.Volume{Name: "system", Level: "1", Drives: drivesOf(1, 2)}
			if got, err := b.applied("raid", "applyLayout", layoutOf(system)); err != nil || got.RebootNeeded {
				t.Fatalf("applyLayout = %+v, %v", got, err)
			}
			got, err := b.layout()
			want := metal.Volume{Name: "system", Level: "1", Drives: drivesOf(1, 2), Controller: "1", SizeBytes: 960_197_124_096}
			if err != nil || len(got.Volumes) != 1 || fmt.Sprint(got.Volumes[0]) != fmt.Sprint(want) {
				t.Fatalf("getLayout = %+v, %v, want %+v", got, err, want)
			}
			// The same again is nothing to do, also in the drives' other order and by
			// their ids.
			for _, same := range []metal.Layout{layoutOf(system), got, layoutOf(metal.Volume{Name: "system", Level: "1", Drives: []string{"2", "1"}})} {
				if _, err := b.applied("raid", "applyLayout", same); err != nil {
					t.Errorf("applyLayout(%+v) = %v", same, err)
				}
			}
			if log := logged(r, "volume"); !slices.Equal(log, []string{"volume create RAID1 system drives 1,2"}) {
				t.Fatalf("the BMC saw %q, want one volume made", log)
			}
			// One more leaves the first alone.
			data := metal.Volume{Name: "data", Level: "0", Drives: drivesOf(3)}
			if _, err := b.applied("raid", "applyLayout", layoutOf(system, data)); err != nil {
				t.Fatal(err)
			}
			// Others than the wanted ones go first, so that their drives are free.
			whole := metal.Volume{Name: "system", Level: "5", Drives: drivesOf(1, 2, 4)}
			if _, err := b.applied("raid", "applyLayout", layoutOf(data, whole)); err != nil {
				t.Fatal(err)
			}
			if _, err := b.applied("raid", "applyLayout", layoutOf()); err != nil {
				t.Fatal(err)
			}
			log := []string{
				"volume create RAID1 system drives 1,2", "volume create RAID0 data drives 3", "volume delete system", "volume create RAID5 system drives 1,2,4",
				"volume delete data", "volume delete system",
			}
			if got := logged(r, "volume"); !slices.Equal(got, log) {
				t.Errorf("the BMC saw %q, want %q", got, log)
			}
		})
	}
}

// What cannot be is refused before anything is deleted.
func TestRAIDRefuses(t *testing.T) {
	r, b := rig(t)
	if _, err := b.do("raid", "applyLayout", layoutOf(metal.Volume{Name: "kept", Level: "1", Drives: drivesOf(1, 2)})); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		volume metal.Volume
		code   errs.Code
		says   string
	}{
		{metal.Volume{Name: "v", Level: "0", Drives: []string{"RIG-DISK-0009"}}, errs.InvalidArgs, `no drive "RIG-DISK-0009"`},
		{metal.Volume{Name: "v", Level: "0", Drives: []string{"Disk 1"}, Controller: "2"}, errs.InvalidArgs, "at controller 2"},
		{metal.Volume{Name: "v", Level: "1", Drives: []string{"RIG-DISK-0001", "1"}}, errs.InvalidArgs, "another name"},
		{metal.Volume{Name: "v", Level: "50", Drives: []string{"1", "2", "3", "4", "5", "6"}}, errs.InvalidArgs, `no drive "5"`},
	} {
		if _, err := b.do("raid", "applyLayout", layoutOf(tt.volume)); errs.CodeOf(err) != tt.code || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("applyLayout(%+v) = %v, want %s with %q", tt.volume, err, tt.code, tt.says)
		}
	}
	if log := logged(r, "volume"); len(log) != 1 {
		t.Errorf("the BMC saw %q, want no change", log)
	}
	arrays := []array{{id: "1", collection: "/redfish/v1/V", levels: []string{"RAID0"}, drives: []disk{{"/redfish/v1/D/1", []string{"a"}}, {"/redfish/v1/D/2", []string{"b"}}}},
		{id: "2", collection: "/redfish/v1/W", drives: []disk{{"/redfish/v1/E/1", []string{"a"}}, {"/redfish/v1/E/2", []string{"c"}}}}, {id: "3", drives: []disk{{"/redfish/v1/F/1", []string{"f"}}}}}
	for _, tt := range []struct {
		volume metal.Volume
		says   string
	}{
		{metal.Volume{Level: "0", Drives: []string{"a"}}, "several drives"}, {metal.Volume{Level: "0", Drives: []string{"b", "c"}}, "different controllers"},
		{metal.Volume{Level: "1", Drives: []string{"b", "a"}, Controller: "1"}, "does not offer level 1"}, {metal.Volume{Level: "0", Drives: []string{"f"}}, "makes no volumes"},
		{metal.Volume{Level: "0", Drives: []string{"a"}, Controller: "2"}, ""}, {metal.Volume{Level: "0"}, "no drives"},
	} {
		if _, err := place(arrays, layoutOf(tt.volume)); (tt.says == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), tt.says) {
			t.Errorf("place(%+v) = %v, want %q", tt.volume, err, tt.says)
		}
	}
}

// An error says what was done before it and what was not begun.
func TestRAIDErrorsSayWhatWasDone(t *testing.T) {
	for _, tt := range []struct {
		fault bmctest.Fault
		code  errs.Code
	}{
		{bmctest.TaskCritical, errs.BmcError}, {bmctest.TaskException, errs.BmcError}, {bmctest.DropsBefore, errs.Interrupted}, {bmctest.FailsBefore, errs.BmcError}, {bmctest.VolumesReadOnly, errs.BmcError},
	} {
		r, b := rig(t)
		b.hasty()
		a, c := metal.Volume{Name: "a", Level: "0", Drives: drivesOf(1)}, metal.Volume{Name: "c", Level: "0", Drives: drivesOf(3)}
		if _, err := b.do("raid", "applyLayout", layoutOf(a)); err != nil {
			t.Fatal(err)
		}
		r.SetFaults(tt.fault)
		_, err := b.do("raid", "applyLayout", layoutOf(a, metal.Volume{Name: "b", Level: "0", Drives: drivesOf(2)}, c))
		if errs.CodeOf(err) != tt.code || !strings.Contains(err.Error(), "create volume b: ") || !strings.Contains(err.Error(), "done: nothing; not begun: create volume c") {
			t.Errorf("%s: applyLayout = %v, want %s and what was done", tt.fault, err, tt.code)
		}
		made := 0
		for _, l := range logged(r, "volume create RAID0 b") {
			_ = l
			made++
		}
		if made > 1 {
			t.Errorf("%s: the volume was asked for %d times", tt.fault, made)
		}
	}
	err := account(errs.New(errs.BmcError, "no"), step{make: &metal.Volume{Name: "x"}}, []string{"delete volume a", "create volume b"}, nil)
	if want := "bmc-error: create volume x: no; done: delete volume a, create volume b"; err.Error() != want {
		t.Errorf("account() = %q, want %q", err, want)
	}
}

// A BMC that numbers its volumes anew does not get another one deleted for it: not
// by the next step, and not by the repeat of one whose answer was lost.
func TestRAIDRenumbered(t *testing.T) {
	for _, faults := range [][]bmctest.Fault{{bmctest.VolumesRenumbered}, {bmctest.VolumesRenumbered, bmctest.DropsAfter.Times(1)}} {
		r, b := rig(t)
		var all []metal.Volume
		for i, name := range []string{"a", "b", "c"} {
			all = append(all, metal.Volume{Name: name, Level: "0", Drives: drivesOf(i + 1)})
		}
		if _, err := b.do("raid", "applyLayout", layoutOf(all...)); err != nil {
			t.Fatal(err)
		}
		r.SetFaults(faults...)
		_, err := b.do("raid", "applyLayout", layoutOf(all[2]))
		if errs.CodeOf(err) != errs.BmcError || !strings.Contains(err.Error(), "delete volume b: another volume, c, is at ") || !strings.Contains(err.Error(), "nothing was deleted") || !strings.Contains(err.Error(), "done: delete volume a") {
			t.Errorf("%v: applyLayout = %v, want what is at the volume's path now", faults, err)
		}
		if log := logged(r, "volume delete"); !slices.Equal(log, []string{"volume delete a"}) {
			t.Errorf("%v: the BMC saw %q, want the first volume's end alone", faults, log)
		}
		// From what there is now it goes on.
		if _, err := b.do("raid", "applyLayout", layoutOf(all[2])); err != nil {
			t.Errorf("%v: applyLayout again = %v", faults, err)
		}
		if got, err := b.layout(); err != nil || len(got.Volumes) != 1 || got.Volumes[0].Name != "c" {
			t.Errorf("%v: getLayout = %+v, %v, want c", faults, got, err)
		}
	}
	o, _ := parseObject([]byte(`{"UUID":"AB-1","Identifiers":[{"DurableName":"EUI.2"},{"DurableName":""}]}`))
	if v, ok := (&provider{conn: &conn{}}).volume("/redfish/v1/V/1", o, array{}); !ok || !slices.Equal(v.ids, []string{"eui.2", "ab-1"}) {
		t.Errorf("identifiers = %q, want both", v.ids)
	}
	seen := volume{Volume: metal.Volume{Name: "v", Level: "0", SizeBytes: 5}, drives: []string{"d"}, ids: []string{"u1"}}
	for name, change := range map[string]func(*volume){
		"name": func(v *volume) { v.Name = "w" }, "level": func(v *volume) { v.Level = "1" }, "size": func(v *volume) { v.SizeBytes = 6 },
		"drives": func(v *volume) { v.drives = nil }, "identifiers": func(v *volume) { v.ids = []string{"u2"} },
	} {
		now := seen
		if change(&now); now.same(seen) || !seen.same(seen) {
			t.Errorf("a volume of another %s is taken for the same", name)
		}
	}
}

// A controller that makes volumes at the next boot only is not waited for.
func TestRAIDAtBoot(t *testing.T) {
	r, b := rig(t, bmctest.VolumesAtBoot)
	if got, err := b.applied("raid", "applyLayout", layoutOf(metal.Volume{Name: "v", Level: "0", Drives: drivesOf(1)})); err != nil || !got.RebootNeeded {
		t.Fatalf("applyLayout = %+v, %v, want a reboot", got, err)
	}
	if _, err := b.do("power", "setPower", "on"); err != nil {
		t.Fatal(err)
	}
	if got, err := b.layout(); err != nil || len(got.Volumes) != 1 {
		t.Errorf("getLayout after the boot = %+v, %v; the BMC saw %q", got, err, r.Log())
	}
}

// A step that undoes one before it is found out at the end.
func TestRAIDIsReadAgainAtTheEnd(t *testing.T) {
	for _, loses := range []bool{false, true} {
		var names []string
		_, b := serve(t, map[string]http.HandlerFunc{
			systemGet:             say(`{"Storage":{"@odata.id":"/redfish/v1/S"}}`),
			"GET /redfish/v1/S":   say(`{"Members":[{"@odata.id":"/redfish/v1/S/1"}]}`),
			"GET /redfish/v1/S/1": say(`{"Id":"1","Volumes":{"@odata.id":"/redfish/v1/V"},"Drives":[{"@odata.id":"/redfish/v1/D/1"},{"@odata.id":"/redfish/v1/D/2"}]}`),
			"GET /redfish/v1/D/1": say(`{"Id":"1"}`),
			"GET /redfish/v1/D/2": say(`{"Id":"2"}`),
			"GET /redfish/v1/V": func(w http.ResponseWriter, _ *http.Request) {
				var members []string
				for _, name := range names {
					members = append(members, `{"@odata.id":"/redfish/v1/V/`+name+`"}`)
				}
				fmt.Fprintf(w, `{"Members":[%s]}`, strings.Join(members, ","))
			},
			"POST /redfish/v1/V": func(w http.ResponseWriter, r *http.Request) {
				var in struct{ Name string }
				decodeBody(r, &in)
				if loses {
					names = nil
				}
				names = append(names, in.Name)
				w.WriteHeader(http.StatusCreated)
			},
			"GET /redfish/v1/V/1": say(`{"Id":"1","Name":"1","RAIDType":"RAID0","Links":{"Drives":[{"@odata.id":"/redfish/v1/D/1"}]}}`),
			"GET /redfish/v1/V/2": say(`{"Id":"2","Name":"2","RAIDType":"RAID0","Links":{"Drives":[{"@odata.id":"/redfish/v1/D/2"}]}}`),
		})
		both := layoutOf(metal.Volume{Name: "1", Level: "0", Drives: []string{"1"}}, metal.Volume{Name: "2", Level: "0", Drives: []string{"2"}})
		_, err := b.hasty().do("raid", "applyLayout", both)
		if !loses && err != nil || loses && (errs.CodeOf(err) != errs.BmcError || !strings.Contains(err.Error(), "create volume 1 is left to do")) {
			t.Errorf("applyLayout at a BMC that loses a volume (%v) = %v", loses, err)
		}
	}
}

func TestRAIDWithoutVolumes(t *testing.T) {
	for name, tt := range map[string]struct {
		change map[string]http.HandlerFunc
		code   errs.Code
	}{
		"nothing":        {map[string]http.HandlerFunc{systemGet: say(`{}`)}, errs.UnsupportedOperation},
		"dead links":     {map[string]http.HandlerFunc{systemGet: say(`{"Storage":{"@odata.id":"/redfish/v1/S"},"SimpleStorage":{"@odata.id":"/redfish/v1/SS"}}`)}, errs.UnsupportedOperation},
		"simple storage": {map[string]http.HandlerFunc{systemGet: say(`{"SimpleStorage":{"@odata.id":"/redfish/v1/SS"}}`), "GET /redfish/v1/SS": say(`{"Members":[]}`)}, ""},
		"an adapter": {map[string]http.HandlerFunc{
			systemGet:             say(`{"Storage":{"@odata.id":"/redfish/v1/S"}}`),
			"GET /redfish/v1/S":   say(`{"Members":[{"@odata.id":"/redfish/v1/S/1"}]}`),
			"GET /redfish/v1/S/1": say(`{"Id":"1","Volumes":{"@odata.id":"/redfish/v1/V"}}`),
		}, ""},
		"raw disks": {map[string]http.HandlerFunc{
			systemGet:             say(`{"Storage":{"@odata.id":"/redfish/v1/S"}}`),
			"GET /redfish/v1/S":   say(`{"Members":[{"@odata.id":"/redfish/v1/S/1"}]}`),
			"GET /redfish/v1/S/1": say(`{"Id":"1","Volumes":{"@odata.id":"/redfish/v1/V"}}`),
			"GET /redfish/v1/V":   say(`{"Members":[{"@odata.id":"/redfish/v1/V/1"}]}`),
			"GET /redfish/v1/V/1": say(`{"Id":"1","VolumeType":"RawDevice"}`),
		}, ""},
		// A layout that is not whole is none.
		"a volume that fails": {map[string]http.HandlerFunc{
			systemGet:             say(`{"Storage":{"@odata.id":"/redfish/v1/S"}}`),
			"GET /redfish/v1/S":   say(`{"Members":[{"@odata.id":"/redfish/v1/S/1"}]}`),
			"GET /redfish/v1/S/1": say(`{"Id":"1","Volumes":{"@odata.id":"/redfish/v1/V"}}`),
			"GET /redfish/v1/V":   say(`{"Members":[{"@odata.id":"/redfish/v1/V/1"}]}`),
		}, errs.BmcError},
	} {
		_, b := serve(t, tt.change)
		if got, err := b.layout(); errs.CodeOf(err) != tt.code || len(got.Volumes) != 0 {
			t.Errorf("%s: getLayout = %+v, %v, want none, code %q", name, got, err, tt.code)
		}
	}
}

func TestRAIDLevels(t *testing.T) {
	p := &provider{conn: &conn{}}
	for body, want := range map[string]string{
		`{"RAIDType":"RAID1"}`: "1", `{"RAIDType":"RAID10"}`: "10", `{"VolumeType":"Mirrored"}`: "1", `{"VolumeType":"SpannedMirrors"}`: "10", `{"RAIDType":"RAID6TP"}`: "6TP",
		`{"RAIDType":7,"VolumeType":"StripedWithParity"}`: "5", `{}`: "unknown",
	} {
		o, _ := parseObject([]byte(body))
		if v, ok := p.volume("/redfish/v1/V/1", o, array{}); !ok || v.Level != want {
			t.Errorf("level of %s = %q, %v, want %q", body, v.Level, ok, want)
		}
	}
	// Sizes are rounded by controllers, and another size is another volume.
	for _, tt := range []struct {
		have, want uint64
		same       bool
	}{{1000, 0, true}, {1000, 1000, true}, {1005, 1000, true}, {1100, 1000, false}, {500, 1000, false}} {
		v := volume{Volume: metal.Volume{Name: "v", Level: "0", SizeBytes: tt.have}, drives: []string{"d"}}
		if got := as(v, placed{Volume: metal.Volume{Name: "v", Level: "0", SizeBytes: tt.want}, drives: []string{"d"}}); got != tt.same {
			t.Errorf("a volume of %d as one of %d = %v, want %v", tt.have, tt.want, got, tt.same)
		}
	}
}
