package bmctest

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

const (
	storagePath = system + "/Storage/1"
	volumesPath = storagePath + "/Volumes"
	drivesPath  = storagePath + "/Drives"

	driveCount = 4
	driveBytes = 960_197_124_096
)

// storageState is the one controller's; Redfish's mu guards it.
type storageState struct {
	volumes []volume
	made    int // volumes ever
}

type volume struct {
	id     int
	name   string
	raid   string
	bytes  int64
	drives []int
}

// raids are the levels of the controller: drives needed at least, type in old
// words, share of the drives that is capacity.
var raids = map[string]struct {
	drives int
	old    string
	usable func(n int64) int64
}{
	"RAID0":  {1, "NonRedundant", func(n int64) int64 { return n }},
	"RAID1":  {2, "Mirrored", func(int64) int64 { return 1 }},
	"RAID5":  {3, "StripedWithParity", func(n int64) int64 { return n - 1 }},
	"RAID6":  {4, "SpannedStripesWithParity", func(n int64) int64 { return n - 2 }},
	"RAID10": {4, "SpannedMirrors", func(n int64) int64 { return n / 2 }},
}

var storageRoutes = map[string]handler{
	"GET " + system + "/Storage": func(x *exchange) reply { return x.collection("StorageCollection", "Storage", storagePath) },
	"GET " + storagePath: func(x *exchange) reply {
		var drives []string
		for i := range driveCount {
			drives = append(drives, drivesPath+"/"+strconv.Itoa(i+1))
		}
		return ok(resource(storagePath, "#Storage.v1_10_0.Storage", "Storage", object{
			"Status": healthy(), "Volumes": link(volumesPath), "Drives": links(drives...), "Drives@odata.count": driveCount,
			"StorageControllers": []object{{
				"@odata.id": storagePath + "#/StorageControllers/0", "MemberId": "0", "Name": "Controller", "Manufacturer": "Better Compute", "Model": "Rig RAID", "FirmwareVersion": "5.1",
				"SupportedRAIDTypes": []string{"RAID0", "RAID1", "RAID5", "RAID6", "RAID10"}, "Status": healthy(),
			}},
		}))
	},
	"GET " + drivesPath + "/{id}": func(x *exchange) reply {
		id, err := strconv.Atoi(x.req.PathValue("id"))
		if err != nil || id < 1 || id > driveCount {
			return missing()
		}
		volumes := links()
		x.r.mu.Lock()
		for _, v := range x.r.storage.volumes {
			if slices.Contains(v.drives, id) {
				volumes = append(volumes, link(v.path()))
			}
		}
		x.r.mu.Unlock()
		return ok(resource(drivesPath+"/"+strconv.Itoa(id), "#Drive.v1_11_0.Drive", fmt.Sprintf("Disk %d", id), object{
			"Manufacturer": "Better Compute", "Model": "Rig Disk", "SerialNumber": fmt.Sprintf("RIG-DISK-%04d", id), "Revision": "1.0",
			"CapacityBytes": int64(driveBytes), "BlockSizeBytes": 512, "MediaType": "SSD", "Protocol": "SATA", "Status": healthy(), "Links": object{"Volumes": volumes},
		}))
	},
	"GET " + volumesPath: func(x *exchange) reply {
		var members []string
		x.r.mu.Lock()
		for _, v := range x.r.storage.volumes {
			members = append(members, v.path())
		}
		x.r.mu.Unlock()
		answer := x.collection("VolumeCollection", "Volumes", members...)
		answer.body["@Redfish.OperationApplyTimeSupport"] = object{"SupportedValues": []string{"Immediate", "OnReset"}}
		return answer
	},
	"GET " + volumesPath + "/{id}": func(x *exchange) reply {
		x.r.mu.Lock()
		defer x.r.mu.Unlock()
		i := x.volume()
		if i < 0 {
			return missing()
		}
		v := x.r.storage.volumes[i]
		drives := links()
		for _, d := range v.drives {
			drives = append(drives, link(drivesPath+"/"+strconv.Itoa(d)))
		}
		o := resource(v.path(), "#Volume.v1_5_0.Volume", v.name, object{
			"CapacityBytes": v.bytes, "BlockSizeBytes": 512, "Status": healthy(), "Links": object{"Drives": drives, "Drives@odata.count": len(drives)},
		})
		if x.r.faults.on(VolumesOldTypes) {
			o["VolumeType"] = raids[v.raid].old
		} else {
			o["RAIDType"] = v.raid
		}
		return ok(o)
	},
	"POST " + volumesPath:             createVolume,
	"DELETE " + volumesPath + "/{id}": deleteVolume,
}

func (v volume) path() string { return volumesPath + "/" + strconv.Itoa(v.id) }

// volume is the index of the request's volume, or -1; the caller holds mu.
func (x *exchange) volume() int {
	return slices.IndexFunc(x.r.storage.volumes, func(v volume) bool { return strconv.Itoa(v.id) == x.req.PathValue("id") })
}

func readOnlyVolumes() reply {
	return fail(http.StatusMethodNotAllowed, "Base.1.8.OperationNotAllowed", "Volumes are made by the firmware's own setup.")
}

// atBoot says whether work on volumes or firmware waits for a boot.
func (r *Redfish) atBoot(f Fault, applyTime string) bool {
	return applyTime == "OnReset" || r.faulty(f)
}

func createVolume(x *exchange) reply {
	r := x.r
	if r.faulty(VolumesReadOnly) {
		return readOnlyVolumes()
	}
	type ids []struct {
		ID string `json:"@odata.id"`
	}
	var in struct {
		Name, RAIDType, VolumeType string
		CapacityBytes              int64
		Drives                     ids
		Links                      struct{ Drives ids }
		ApplyTime                  string `json:"@Redfish.OperationApplyTime"`
	}
	if bad := x.decode(&in); bad != nil {
		return *bad
	}
	raid := in.RAIDType
	if old := r.faulty(VolumesOldTypes); old == (raid != "") || !old && in.VolumeType != "" {
		return fail(http.StatusBadRequest, "Base.1.8.PropertyUnknown", "The controller knows its volumes by the other of RAIDType and VolumeType.")
	}
	for name, level := range raids {
		if in.VolumeType == level.old {
			raid = name
		}
	}
	level, known := raids[raid]
	v := volume{name: in.Name, raid: raid}
	for _, d := range append(in.Links.Drives, in.Drives...) {
		id, err := strconv.Atoi(strings.TrimPrefix(strings.TrimSuffix(d.ID, "/"), drivesPath+"/"))
		if err != nil || id < 1 || id > driveCount || slices.Contains(v.drives, id) {
			return refuse("The drive " + d.ID + " is not one that the controller has, or is given twice.")
		}
		v.drives = append(v.drives, id)
	}
	switch {
	case !known || len(v.drives) < level.drives:
		return refuse("The controller has no such level, or it needs more drives.")
	case in.ApplyTime != "" && in.ApplyTime != "Immediate" && in.ApplyTime != "OnReset":
		return refuse("The apply time is not one that the controller has.")
	}
	v.bytes = level.usable(int64(len(v.drives))) * driveBytes
	if in.CapacityBytes > v.bytes {
		return refuse("The drives are too small for the capacity.")
	}
	if in.CapacityBytes > 0 {
		v.bytes = in.CapacityBytes
	}
	r.mu.Lock()
	for _, other := range r.storage.volumes {
		for _, d := range v.drives {
			if slices.Contains(other.drives, d) {
				r.mu.Unlock()
				return fail(http.StatusConflict, "Base.1.8.ResourceInUse", "A drive is part of a volume already.")
			}
		}
	}
	r.storage.made++
	v.id = r.storage.made
	r.mu.Unlock()
	if v.name == "" {
		v.name = fmt.Sprintf("Volume %d", v.id)
	}
	words := make([]string, len(v.drives))
	for i, d := range v.drives {
		words[i] = strconv.Itoa(d)
	}
	r.note("volume create %s %s drives %s", v.raid, v.name, strings.Join(words, ","))
	return r.begin("Make volume", r.atBoot(VolumesAtBoot, in.ApplyTime), func(r *Redfish) {
		r.storage.volumes = append(r.storage.volumes, v)
	})
}

func deleteVolume(x *exchange) reply {
	r := x.r
	if r.faulty(VolumesReadOnly) {
		return readOnlyVolumes()
	}
	r.mu.Lock()
	i := x.volume()
	if i < 0 {
		r.mu.Unlock()
		return missing()
	}
	v := r.storage.volumes[i]
	remove := func(r *Redfish) {
		r.storage.volumes = slices.DeleteFunc(r.storage.volumes, func(other volume) bool { return other.id == v.id })
		if !r.faults.on(VolumesRenumbered) {
			return
		}
		for i := range r.storage.volumes {
			r.storage.volumes[i].id = i + 1
		}
		r.storage.made = len(r.storage.volumes)
	}
	wait := r.faults.on(VolumesAtBoot)
	if !wait {
		remove(r)
	}
	r.mu.Unlock()
	r.note("volume delete %s", v.name)
	if wait {
		return r.begin("Delete volume", true, remove)
	}
	return done()
}
