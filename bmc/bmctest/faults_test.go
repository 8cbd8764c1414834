package bmctest

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// caller is a plain client of one BMC.
type caller struct {
	t     *testing.T
	r     *Redfish
	media *httptest.Server
	http  *http.Client
	token string // instead of basic authentication
	bare  bool   // no credentials
}

type result struct {
	status int // 0: no answer
	header http.Header
	text   string
	body   object
}

func (c *caller) do(method, path, body string, header ...string) result {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), 20*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, "https://"+c.r.Addr()+path, strings.NewReader(body))
	if err != nil {
		c.t.Fatal(err)
	}
	switch {
	case c.token != "":
		req.Header.Set("X-Auth-Token", c.token)
	case !c.bare:
		req.SetBasicAuth("admin", c.r.Password())
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return result{text: err.Error()}
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 4<<20))
	out := result{status: resp.StatusCode, header: resp.Header, text: string(text)}
	if err != nil {
		out.text += " " + err.Error()
	}
	_ = json.Unmarshal(text, &out.body)
	return out
}

func (c *caller) status(method, path, body string, header ...string) int {
	c.t.Helper()
	return c.do(method, path, body, header...).status
}

// at follows keys and indexes into a body.
func at(v any, keys ...any) any {
	for _, key := range keys {
		switch key := key.(type) {
		case string:
			o, _ := v.(object)
			v = o[key]
		case int:
			list, _ := v.([]any)
			if key >= len(list) {
				return nil
			}
			v = list[key]
		}
	}
	return v
}

func (c *caller) get(path string, keys ...any) any {
	c.t.Helper()
	return at(c.do("GET", path, "").body, keys...)
}

const (
	resetPath  = system + "/Actions/ComputerSystem.Reset"
	onceUEFI   = `{"Boot":{"BootSourceOverrideEnabled":"Once","BootSourceOverrideTarget":"Pxe","BootSourceOverrideMode":"UEFI"}}`
	alwaysUEFI = `{"Boot":{"BootSourceOverrideEnabled":"Continuous","BootSourceOverrideTarget":"Pxe","BootSourceOverrideMode":"UEFI"}}`
	slotPath   = manager + "/VirtualMedia/CD1"
	insertPath = slotPath + "/Actions/VirtualMedia.InsertMedia"
	ejectPath  = slotPath + "/Actions/VirtualMedia.EjectMedia"
	twoDrives  = `"Links":{"Drives":[{"@odata.id":"` + drivesPath + `/1"},{"@odata.id":"` + drivesPath + `/2"}]}`
)

// boot patches the override and reads it back.
func (c *caller) boot(body string) (int, object) {
	status := c.status("PATCH", system, body)
	o, _ := c.get(system, "Boot").(object)
	return status, o
}

func (c *caller) power(kind string) int {
	return c.status("POST", resetPath, `{"ResetType":"`+kind+`"}`)
}

func (c *caller) insert(more string) int {
	return c.status("POST", insertPath, `{"Image":"`+c.media.URL+`/x.iso"`+more+`}`)
}

// login opens a session and uses it from now on.
func (c *caller) login() result {
	out := c.do("POST", sessionsPath, `{"UserName":"admin","Password":"`+c.r.Password()+`"}`)
	c.token = out.header.Get("X-Auth-Token")
	return out
}

func (c *caller) logged(line string) bool { return slices.Contains(c.r.Log(), line) }

func (c *caller) tag(path string) string { return c.do("GET", path, "").header.Get("ETag") }

// turbo patches a BIOS setting.
func (c *caller) turbo(path, more string) result {
	return c.do("PATCH", path, `{"Attributes":{"ProcTurboMode":"Disabled"}`+more+`}`)
}

const onReset = `,"@Redfish.SettingsApplyTime":{"ApplyTime":"OnReset"}`

// volume makes a mirror and says where its task is.
func (c *caller) volume(kind string) result {
	return c.do("POST", volumesPath, `{"Name":"os",`+kind+`,`+twoDrives+`}`)
}

const mirror = `"RAIDType":"RAID1"`

// reads lets tasks go on.
func (c *caller) reads() {
	for range taskReads {
		c.status("GET", root+"/Chassis", "")
	}
}

func (c *caller) push(version string) result {
	return c.do("POST", updatePath+"/push", string(FirmwareImage("BIOS", version)))
}

func (c *caller) password(p string) int {
	return c.status("PATCH", accountsPath+"/1", `{"Password":"`+p+`"}`)
}

// shows says for each fault how a client sees it. Each is false for a BMC
// without the fault.
var shows = map[Fault]func(*caller) bool{
	BootRevertsToOnce: func(c *caller) bool {
		c.boot(alwaysUEFI)
		_, o := c.boot(`{"Boot":{"BootSourceOverrideTarget":"Hdd"}}`)
		return o["BootSourceOverrideEnabled"] == "Once" && o["BootSourceOverrideTarget"] == "Hdd"
	},
	BootContinuousBecomesOnce: func(c *caller) bool {
		status, o := c.boot(alwaysUEFI)
		return status == 204 && o["BootSourceOverrideEnabled"] == "Once"
	},
	BootContinuousRefused: func(c *caller) bool {
		status, o := c.boot(alwaysUEFI)
		return status == 400 && len(o["BootSourceOverrideEnabled@Redfish.AllowableValues"].([]any)) == 2
	},
	BootModeLost: func(c *caller) bool {
		_, o := c.boot(`{"Boot":{"BootSourceOverrideEnabled":"Once","BootSourceOverrideTarget":"Hdd"}}`)
		return o["BootSourceOverrideMode"] == "Legacy"
	},
	BootModeRefused: func(c *caller) bool {
		status, _ := c.boot(onceUEFI)
		without, _ := c.boot(`{"Boot":{"BootSourceOverrideEnabled":"Once","BootSourceOverrideTarget":"Hdd"}}`)
		return status == 400 && without == 204
	},
	BootWhole: func(c *caller) bool {
		status, _ := c.boot(`{"Boot":{"BootSourceOverrideEnabled":"Once","BootSourceOverrideTarget":"Hdd"}}`)
		whole, _ := c.boot(onceUEFI)
		return status == 400 && whole == 204
	},
	BootSettings: func(c *caller) bool {
		target, _ := c.get(system, "@Redfish.Settings", "SettingsObject", "@odata.id").(string)
		status, _ := c.boot(onceUEFI)
		return status == 400 && c.status("PATCH", target, onceUEFI) == 204 && c.get(target, "Boot", "BootSourceOverrideTarget") == "Pxe"
	},
	BootIgnored: func(c *caller) bool {
		status, o := c.boot(onceUEFI)
		return status == 204 && o["BootSourceOverrideEnabled"] == "Disabled" && len(c.r.Log()) == 0
	},
	BootShownLate: func(c *caller) bool {
		_, first := c.boot(onceUEFI)
		c.get(system)
		return first["BootSourceOverrideEnabled"] == "Disabled" && c.get(system, "Boot", "BootSourceOverrideEnabled") == "Once"
	},
	BusyInPOST: func(c *caller) bool {
		out := c.do("PATCH", system, onceUEFI)
		return out.status == 400 && strings.Contains(out.text, "UnableToModifyDuringSystemPOST") && len(c.r.Log()) == 0
	},
	EtagNeeded: func(c *caller) bool {
		return c.status("PATCH", system, onceUEFI) == 428 && c.status("PATCH", system, onceUEFI, "If-Match", c.tag(system)) == 204
	},
	EtagStrong: func(c *caller) bool {
		tag := c.tag(system)
		return strings.HasPrefix(tag, "W/") && c.status("PATCH", system, onceUEFI, "If-Match", tag) == 412 && c.status("PATCH", system, onceUEFI) == 412 &&
			c.status("PATCH", system, onceUEFI, "If-Match", strings.TrimPrefix(tag, "W/")) == 204
	},
	EtagWeak: func(c *caller) bool {
		tag := c.tag(system)
		return c.status("PATCH", system, onceUEFI, "If-Match", strings.TrimPrefix(tag, "W/")) == 412 && c.status("PATCH", system, onceUEFI) == 412 &&
			c.status("PATCH", system, onceUEFI, "If-Match", tag) == 204
	},
	EtagDoubledQuotes: func(c *caller) bool {
		tag := c.tag(system)
		return c.status("PATCH", system, onceUEFI, "If-Match", tag) == 412 && c.status("PATCH", system, onceUEFI, "If-Match", `"`+tag+`"`) == 204
	},
	EtagStarOnly: func(c *caller) bool {
		return c.status("PATCH", system, onceUEFI, "If-Match", c.tag(system)) == 412 && c.status("PATCH", system, onceUEFI, "If-Match", "*") == 204
	},
	EtagRefused: func(c *caller) bool {
		return c.status("PATCH", system, onceUEFI, "If-Match", c.tag(system)) == 412 && c.status("PATCH", system, onceUEFI, "If-Match", "*") == 412 &&
			c.status("PATCH", system, onceUEFI) == 204
	},
	EtagOnActions: func(c *caller) bool {
		return c.power("On") == 412 && c.status("POST", resetPath, `{"ResetType":"On"}`, "If-Match", c.tag(system)) == 204
	},
	EtagInBodyOnly: func(c *caller) bool {
		out := c.do("GET", system, "")
		tag, _ := out.body["@odata.etag"].(string)
		return out.header.Get("ETag") == "" && c.status("PATCH", system, onceUEFI, "If-Match", tag) == 204
	},
	EtagRaces.Times(1): func(c *caller) bool {
		tag := c.tag(system)
		return c.status("PATCH", system, onceUEFI, "If-Match", tag) == 412 && c.tag(system) != tag && c.status("PATCH", system, onceUEFI, "If-Match", c.tag(system)) == 204
	},
	BiosOnlyInSettings: func(c *caller) bool {
		return c.get(biosPath, "Attributes") == nil && c.get(settingsPath, "Attributes", "ProcTurboMode") == "Enabled"
	},
	BiosShownEarly: func(c *caller) bool {
		c.turbo(settingsPath, "")
		return c.get(biosPath, "Attributes", "ProcTurboMode") == "Disabled"
	},
	BiosNoSettings: func(c *caller) bool {
		return c.get(biosPath, "@Redfish.Settings") == nil && c.turbo(biosPath, "").status == 204 && c.get(biosPath, "Attributes", "ProcTurboMode") == "Enabled" &&
			c.power("On") == 204 && c.get(biosPath, "Attributes", "ProcTurboMode") == "Disabled"
	},
	BiosWantsApplyTime: func(c *caller) bool {
		c.turbo(settingsPath, "")
		c.power("On")
		held := c.get(biosPath, "Attributes", "ProcTurboMode") == "Enabled"
		c.turbo(settingsPath, onReset)
		c.power("ForceRestart")
		return held && c.get(biosPath, "Attributes", "ProcTurboMode") == "Disabled"
	},
	BiosRefusesApplyTime: func(c *caller) bool {
		return c.turbo(settingsPath, onReset).status == 400 && c.turbo(settingsPath, "").status == 204
	},
	BiosDropsValues: func(c *caller) bool {
		c.turbo(settingsPath, "")
		c.power("On")
		return c.get(biosPath, "Attributes", "ProcTurboMode") == "Enabled"
	},
	TaskCritical: func(c *caller) bool {
		task, _ := c.volume(mirror).body["@odata.id"].(string)
		c.reads()
		return c.get(task, "TaskState") == "Completed" && c.get(task, "TaskStatus") == "Critical" && c.get(volumesPath, "Members@odata.count") == 0.
	},
	TaskException: func(c *caller) bool {
		task, _ := c.volume(mirror).body["@odata.id"].(string)
		c.reads()
		return c.get(task, "TaskState") == "Exception" && c.get(volumesPath, "Members@odata.count") == 0.
	},
	TaskVanishes: func(c *caller) bool {
		task, _ := c.volume(mirror).body["@odata.id"].(string)
		before := c.status("GET", task, "")
		c.reads()
		return before == 200 && c.status("GET", task, "") == 404 && c.get(volumesPath, "Members@odata.count") == 1.
	},
	TaskNeverEnds: func(c *caller) bool {
		task, _ := c.volume(mirror).body["@odata.id"].(string)
		c.reads()
		return c.get(task, "TaskState") == "Running"
	},
	TaskInLocation: func(c *caller) bool {
		task := c.volume(mirror).header.Get("Location")
		return strings.HasPrefix(task, tasksPath) && c.get(task, "TaskState") == "Running"
	},
	TaskMonitorOnly: func(c *caller) bool {
		out := c.volume(mirror)
		monitor := out.header.Get("Location")
		running := c.do("GET", monitor, "")
		c.reads()
		return out.text == "" && running.status == 202 && running.text == "" && c.status("GET", monitor, "") == 204
	},
	TaskUnnamed: func(c *caller) bool {
		out := c.volume(mirror)
		return out.status == 202 && out.text == "" && out.header.Get("Location") == ""
	},
	MediaPatchOnly: func(c *caller) bool {
		return c.get(slotPath, "Actions") == nil && c.insert("") == 404 && c.status("PATCH", slotPath, `{"Image":"`+c.media.URL+`/x.iso","Inserted":true}`) == 204 &&
			c.get(slotPath, "Inserted") == true && c.status("PATCH", slotPath, `{"Image":null,"Inserted":false}`) == 204 && c.get(slotPath, "Inserted") == false
	},
	MediaWantsCredentials: func(c *caller) bool { return c.insert("") == 400 && c.insert(`,"UserName":"","Password":""`) == 204 },
	MediaWantsTransfer: func(c *caller) bool {
		return c.insert("") == 400 && c.insert(`,"TransferProtocolType":"HTTPS","TransferMethod":"Stream"`) == 204
	},
	MediaImageOnly: func(c *caller) bool { return c.insert(`,"Inserted":true`) == 400 && c.insert("") == 204 },
	MediaEjectLeavesImage: func(c *caller) bool {
		c.insert("")
		return c.status("POST", ejectPath, "{}") == 204 && c.get(slotPath, "Inserted") == false && c.get(slotPath, "Image") == c.media.URL+"/x.iso" &&
			c.get(slotPath, "ConnectedVia") == "URI"
	},
	MediaEjectEmptyFails: func(c *caller) bool { return c.status("POST", ejectPath, "{}") == 400 },
	MediaOccupiedFails:   func(c *caller) bool { return c.insert("") == 204 && c.insert("") == 400 },
	MediaCannotVerify: func(c *caller) bool {
		out := c.do("POST", insertPath, `{"Image":"`+c.media.URL+`/x.iso"}`)
		return out.status == 400 && strings.Contains(out.text, "certificate") && c.get(slotPath, "Inserted") == false
	},
	MediaIgnored: func(c *caller) bool { return c.insert("") == 204 && c.get(slotPath, "Inserted") == false },
	MediaShownLate: func(c *caller) bool {
		c.insert("")
		first := c.get(slotPath, "Inserted")
		c.get(slotPath)
		return first == false && c.get(slotPath, "Inserted") == true
	},
	MediaUnderSystem: func(c *caller) bool {
		return c.status("GET", slotPath, "") == 404 && c.get(manager, "VirtualMedia") == nil && c.get(system+"/VirtualMedia/CD1", "Inserted") == false
	},
	ManagerAmongSystems: func(c *caller) bool {
		return c.get(systemsPath, "Members", 0, "@odata.id") == manager && c.get(systemsPath, "Members", 1, "@odata.id") == system
	},
	ManagerAsSystem: func(c *caller) bool {
		return c.get(systemsPath, "Members", 0, "@odata.id") == manager && c.get(systemsPath, "Members@odata.count") == 1.
	},
	SeveralSystems: func(c *caller) bool {
		return c.status("POST", secondSystem+"/Actions/ComputerSystem.Reset", `{"ResetType":"On"}`) == 204 && c.logged("second: On") &&
			c.get(secondSystem, "PowerState") == "On" && c.get(system, "PowerState") == "Off" && c.get(systemsPath, "Members@odata.count") == 2.
	},
	SlashNeeded: func(c *caller) bool {
		return c.status("GET", system, "") == 404 && c.status("GET", system+"/", "") == 200 && c.get(systemsPath+"/", "Members", 0, "@odata.id") == system
	},
	SlashInLinks: func(c *caller) bool {
		return c.status("GET", system, "") == 404 && c.get(systemsPath+"/", "Members", 0, "@odata.id") == system+"/"
	},
	SlashRefused: func(c *caller) bool {
		return c.status("GET", system+"/", "") == 404 && c.status("GET", root+"/", "") == 200
	},
	SlashRedirects: func(c *caller) bool {
		out := c.do("GET", system, "")
		return out.status == 308 && out.header.Get("Location") == system+"/" && c.status("GET", system+"/", "") == 200 && c.power("On") == 204
	},
	MembersPaged: func(c *caller) bool {
		first := c.do("GET", systemsPath, "").body
		next, _ := first["Members@odata.nextLink"].(string)
		second := c.do("GET", next, "").body
		return len(first["Members"].([]any)) == 0 && at(second, "Members", 0, "@odata.id") == system && second["Members@odata.nextLink"] == nil
	},
	MembersEndless: func(c *caller) bool {
		next := systemsPath
		for range 20 {
			next, _ = c.get(next, "Members@odata.nextLink").(string)
		}
		return next != ""
	},
	LogUnderManager: func(c *caller) bool {
		return c.get(system, "LogServices") == nil && c.get(manager+"/LogServices/SEL/Entries", "Members", 0, "Message") != nil
	},
	Bare: func(c *caller) bool {
		return c.status("GET", biosPath, "") == 404 && c.get(root, "UpdateService") == nil && c.get(system, "Storage") == nil && c.status("GET", slotPath, "") == 404 && c.power("On") == 204
	},
	ForeignRedirect: func(c *caller) bool {
		out := c.do("GET", systemsPath, "")
		return out.status == 307 && out.header.Get("Location") == c.r.options.foreign+systemsPath
	},
	ForeignLinks: func(c *caller) bool {
		return c.get(systemsPath, "Members", 0, "@odata.id") == c.r.options.foreign+system && c.get(system, "Actions", "#ComputerSystem.Reset", "target") == c.r.options.foreign+resetPath
	},
	ForeignLocation: func(c *caller) bool {
		return strings.HasPrefix(c.login().header.Get("Location"), c.r.options.foreign)
	},
	AbsoluteLinks: func(c *caller) bool {
		return c.get(systemsPath, "Members", 0, "@odata.id") == "https://"+c.r.Addr()+system
	},
	OutsideLinks: func(c *caller) bool { return c.get(systemsPath, "Members", 0, "@odata.id") == "/cgi/system" },
	SessionsFull: func(c *caller) bool { return c.login().status == 503 },
	NoSessions: func(c *caller) bool {
		return c.get(root, "SessionService") == nil && c.login().status == 404 && c.status("GET", system, "") == 200
	},
	NoBasic: func(c *caller) bool {
		return c.status("GET", system, "") == 401 && c.login().status == 201 && c.status("GET", system, "") == 200
	},
	SessionsExpire: func(c *caller) bool {
		c.login()
		for range fewRequests {
			if c.status("GET", system, "") != 200 {
				return false
			}
		}
		return c.status("GET", system, "") == 401
	},
	SessionsDead: func(c *caller) bool { return c.login().status == 201 && c.status("GET", system, "") == 401 },
	SessionUnnamed: func(c *caller) bool {
		out := c.login()
		id, _ := out.body["@odata.id"].(string)
		return out.header.Get("Location") == "" && c.status("DELETE", id, "") == 204
	},
	PasswordChangeRequired: func(c *caller) bool {
		out := c.login()
		return out.status == 201 && strings.Contains(out.text, "PasswordChangeRequired") && c.status("GET", system, "") == 403 &&
			c.password("eight byt") == 204 && c.status("GET", system, "") == 200
	},
	PasswordLimit16: func(c *caller) bool {
		return c.password("seventeen-bytes-1") == 400 && c.password("sixteen-bytes-16") == 204
	},
	PasswordLimit20: func(c *caller) bool {
		return c.password("twenty-one-bytes-0021") == 400 && c.password("twenty-bytes-pass-ok") == 204
	},
	PasswordTruncated: func(c *caller) bool { c.password("seventeen-bytes-1"); return c.r.Password() == "seventeen-bytes-" },
	PasswordIgnored:   func(c *caller) bool { return c.password("another-one") == 204 && c.r.Password() == "password" },
	PasswordEndsSessions: func(c *caller) bool {
		c.login()
		c.password("another-one")
		return c.status("GET", system, "") == 401
	},
	AccountSlots: func(c *caller) bool {
		return c.get(accountsPath, "Members@odata.count") == 16. && c.get(accountsPath+"/16", "UserName") == "" && c.get(accountsPath+"/1", "UserName") == "admin"
	},
	SoftIgnored: func(c *caller) bool {
		c.power("On")
		return c.power("GracefulShutdown") == 204 && c.logged("soft") && c.get(system, "PowerState") == "On"
	},
	ActionInfoOnly: func(c *caller) bool {
		reset, _ := c.get(system, "Actions", "#ComputerSystem.Reset").(object)
		info, _ := reset["@Redfish.ActionInfo"].(string)
		return reset["ResetType@Redfish.AllowableValues"] == nil && c.get(info, "Parameters", 0, "AllowableValues", 0) == "On"
	},
	ResetTypesUnsaid: func(c *caller) bool {
		reset, _ := c.get(system, "Actions", "#ComputerSystem.Reset").(object)
		return len(reset) == 1 && c.power("On") == 204
	},
	NoPowerCycle: func(c *caller) bool { c.power("On"); return c.power("PowerCycle") == 400 },
	NoNMI:        func(c *caller) bool { c.power("On"); return c.power("Nmi") == 400 },
	GracefulOnly: func(c *caller) bool {
		c.power("On")
		return c.power("ForceOff") == 400 && c.power("GracefulShutdown") == 204
	},
	ForcedOnly: func(c *caller) bool {
		return c.power("On") == 400 && c.power("ForceOn") == 204 && c.power("GracefulShutdown") == 400 && c.power("ForceOff") == 204
	},
	PowerShownLate: func(c *caller) bool {
		c.power("On")
		first, second := c.get(system, "PowerState"), c.get(system, "PowerState")
		return first == "PoweringOn" && second == "PoweringOn" && c.get(system, "PowerState") == "On"
	},
	PowerIgnored: func(c *caller) bool { return c.power("On") == 204 && c.get(system, "PowerState") == "Off" },
	PowerSameRefused: func(c *caller) bool {
		return c.power("ForceOff") == 409 && c.power("On") == 204 && c.power("On") == 409
	},
	VolumesAtBoot: func(c *caller) bool {
		c.volume(mirror)
		c.reads()
		waits := c.get(volumesPath, "Members@odata.count") == 0.
		c.power("On")
		return waits && c.get(volumesPath, "Members@odata.count") == 1.
	},
	VolumesOldTypes: func(c *caller) bool {
		refused := c.volume(mirror).status == 400
		out := c.volume(`"VolumeType":"Mirrored"`)
		c.reads()
		return refused && out.status == 202 && c.get(volumesPath+"/1", "VolumeType") == "Mirrored"
	},
	VolumesReadOnly: func(c *caller) bool { return c.volume(mirror).status == 405 },
	VolumesRenumbered: func(c *caller) bool {
		c.volume(mirror)
		c.reads()
		c.do("POST", volumesPath, `{"Name":"data","RAIDType":"RAID0","Links":{"Drives":[{"@odata.id":"`+drivesPath+`/3"}]}}`)
		c.reads()
		c.status("DELETE", volumesPath+"/1", "")
		return c.get(volumesPath+"/1", "Name") == "data"
	},
	FirmwareUnchanged: func(c *caller) bool {
		status := c.push("2.0").status
		c.reads()
		return status == 202 && c.get(inventoryPath+"/BIOS", "Version") == "1.0"
	},
	FirmwareAtBoot: func(c *caller) bool {
		c.push("2.0")
		c.reads()
		waits := c.get(inventoryPath+"/BIOS", "Version") == "1.0"
		c.power("On")
		return waits && c.get(inventoryPath+"/BIOS", "Version") == "2.0"
	},
	NoSimpleUpdate: func(c *caller) bool {
		return at(c.get(updatePath, "Actions"), "#UpdateService.SimpleUpdate") == nil &&
			c.status("POST", updatePath+"/Actions/UpdateService.SimpleUpdate", `{"ImageURI":"`+c.media.URL+`/bios"}`) == 404 && c.push("2.0").status == 202
	},
	NoFirmwarePush: func(c *caller) bool {
		return c.get(updatePath, "MultipartHttpPushUri") == nil && c.push("2.0").status == 404 &&
			c.status("POST", updatePath+"/Actions/UpdateService.SimpleUpdate", `{"ImageURI":"`+c.media.URL+`/bios"}`) == 202
	},
	DeepJSON: func(c *caller) bool {
		return strings.Contains(c.do("GET", system, "").text, strings.Repeat("[", 100_000))
	},
	EndlessBody: func(c *caller) bool { return len(c.do("GET", system, "").text) == 4<<20 },
	NotJSON:     func(c *caller) bool { return strings.HasPrefix(c.do("GET", system, "").text, "<!DOCTYPE") },
	CutJSON: func(c *caller) bool {
		out := c.do("GET", system, "")
		return out.status == 200 && out.body == nil && strings.HasPrefix(out.text, "{")
	},
	OddTypes: func(c *caller) bool {
		o := c.do("GET", system, "").body
		return o["SerialNumber"] == 1234. && at(o, "MemorySummary", "TotalSystemMemoryGiB") == "64 GiB" && o["PowerState"] == "Off" && at(o, "Actions", "#ComputerSystem.Reset", "target") == resetPath
	},
	TerminalEscapes: func(c *caller) bool {
		serial, _ := c.get(system, "SerialNumber").(string)
		return strings.Contains(serial, "\x1b]0;")
	},
	SuccessAsError: func(c *caller) bool {
		out := c.do("POST", resetPath, `{"ResetType":"On"}`)
		return out.status == 200 && strings.Contains(out.text, "Success") && c.logged("on none")
	},
	AnswersLate: func(c *caller) bool {
		start := time.Now()
		return c.power("On") == 204 && time.Since(start) >= time.Second
	},
	DropsBefore: func(c *caller) bool { return c.power("On") == 0 && len(c.r.Log()) == 0 },
	DropsAfter:  func(c *caller) bool { return c.power("On") == 0 && c.logged("on none") },
	ResetsAfter.Times(1): func(c *caller) bool {
		c.login()
		dropped := c.power("On") == 0 && c.logged("on none")
		for range 3 {
			dropped = dropped && c.status("GET", system, "") == 0
		}
		return dropped && c.status("GET", system, "") == 401
	},
	FailsBefore: func(c *caller) bool { return c.power("On") == 500 && len(c.r.Log()) == 0 },
	FailsAfter:  func(c *caller) bool { return c.power("On") == 500 && c.logged("on none") },
	Unavailable.Times(2): func(c *caller) bool {
		first := c.do("GET", system, "")
		return first.status == 503 && first.header.Get("Retry-After") == "1" && c.status("GET", system, "") == 503 && c.status("GET", system, "") == 200
	},
	OldTLS: func(c *caller) bool { return c.handshake(tls.VersionTLS10, 0) && !c.handshake(tls.VersionTLS12, 0) },
	RSAKeyExchange: func(c *caller) bool {
		return c.handshake(tls.VersionTLS12, tls.TLS_RSA_WITH_AES_128_GCM_SHA256) && !c.handshake(tls.VersionTLS12, 0)
	},
}

// handshake connects with one version and, if given, one suite.
func (c *caller) handshake(version, suite uint16) bool {
	config := &tls.Config{InsecureSkipVerify: true, MinVersion: version, MaxVersion: version}
	if suite != 0 {
		config.CipherSuites = []uint16{suite}
	}
	conn, err := (&tls.Dialer{Config: config}).DialContext(c.t.Context(), "tcp", c.r.Addr())
	if err != nil {
		return false
	}
	return conn.Close() == nil
}

// files serves what a BMC fetches.
func files(t *testing.T) *httptest.Server {
	t.Helper()
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		switch req.URL.Path {
		case "/x.iso":
			_, _ = w.Write([]byte("an image"))
		case "/bios":
			_, _ = w.Write(FirmwareImage("BIOS", "2.0"))
		default:
			http.NotFound(w, req)
		}
	}))
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	t.Cleanup(s.Close)
	return s
}

func newCaller(t *testing.T, m Machine, opts ...Option) *caller {
	t.Helper()
	media := files(t)
	roots := media.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs
	r, err := StartRedfish(t.Context(), "127.0.0.1:0", "admin", "password", m, append([]Option{OffInterval(time.Millisecond), LateBy(time.Second), MediaRoots(roots)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return &caller{t: t, r: r, media: media, http: &http.Client{
		Transport:     &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// Every fault is seen when it is on, and is not when it is off.
func TestFaults(t *testing.T) {
	t.Parallel()
	seen := map[Fault]bool{}
	for f, show := range shows {
		name, _ := f.split()
		seen[name] = true
		t.Run(string(name), func(t *testing.T) {
			t.Parallel()
			if !show(newCaller(t, NewFake(), WithFaults(f))) {
				t.Errorf("%s is on and does not show", f)
			}
			if show(newCaller(t, NewFake())) {
				t.Errorf("%s is off and shows", f)
			}
		})
	}
	for _, f := range Faults() {
		if !seen[f] {
			t.Errorf("nothing shows what %s does", f)
		}
	}
}

func TestSetFaults(t *testing.T) {
	c := newCaller(t, NewFake(), WithFaults(PowerIgnored))
	if c.power("On"); len(c.r.Log()) != 0 {
		t.Errorf("Log() = %q, want nothing", c.r.Log())
	}
	c.r.SetFaults(Unavailable.Times(1))
	if got := []int{c.power("On"), c.power("On")}; !slices.Equal(got, []int{503, 204}) || !c.logged("on none") {
		t.Errorf("power on = %v with log %q, want 503 and then 204", got, c.r.Log())
	}
	// What comes after an effect does not come after a refusal.
	for _, f := range []Fault{DropsAfter, FailsAfter, ResetsAfter, AnswersLate, SuccessAsError} {
		c.r.SetFaults(f)
		if got := c.power("Sideways"); got != 400 {
			t.Errorf("%s: a refused action = %d, want 400", f, got)
		}
	}
	defer func() {
		if recover() == nil {
			t.Error("a fault that is not there was taken")
		}
	}()
	WithFaults("no-such")(&options{})
	newFaultSet([]Fault{"no-such"})
}

// Faults at random, several at once, never break the rig itself, and no command
// leaves more lines than one.
func TestFaultsTogether(t *testing.T) {
	c := newCaller(t, NewFake(), LateBy(time.Millisecond))
	random := rand.New(rand.NewPCG(1, 2))
	pick := slices.DeleteFunc(Faults(), func(f Fault) bool { return f == OldTLS || f == RSAKeyExchange || f == EndlessBody || f == DeepJSON })
	requests := []struct{ method, path, body string }{
		{"GET", root, ""}, {"GET", systemsPath, ""}, {"GET", system, ""}, {"GET", system + "/", ""}, {"GET", manager, ""}, {"GET", biosPath, ""}, {"GET", settingsPath, ""},
		{"GET", slotPath, ""}, {"GET", volumesPath, ""}, {"GET", tasksPath + "/1", ""}, {"GET", monitorsPath + "/1", ""}, {"GET", accountsPath, ""},
		{"POST", resetPath, `{"ResetType":"On"}`}, {"POST", resetPath, `{"ResetType":"PowerCycle"}`}, {"POST", resetPath, `{"ResetType":"ForceOff"}`},
		{"PATCH", system, alwaysUEFI}, {"PATCH", settingsPath, `{"Attributes":{"NodesPerSocket":2}` + onReset + `}`}, {"POST", insertPath, `{"Image":"` + c.media.URL + `/x.iso"}`},
		{"POST", ejectPath, "{}"}, {"POST", volumesPath, `{` + mirror + `,` + twoDrives + `}`}, {"DELETE", volumesPath + "/1", ""}, {"POST", updatePath + "/push", string(FirmwareImage("BIOS", "2.0"))},
		{"PATCH", accountsPath + "/1", `{"Password":"another-one"}`}, {"PATCH", securePath, `{"SecureBootEnable":true}`},
	}
	for range 400 {
		var on []Fault
		for range random.IntN(4) {
			f := pick[random.IntN(len(pick))]
			if random.IntN(2) == 0 {
				f = f.Times(1 + random.IntN(2))
			}
			on = append(on, f)
		}
		c.r.SetFaults(on...)
		before := len(c.r.Log())
		q := requests[random.IntN(len(requests))]
		var header []string
		if random.IntN(2) == 0 {
			header = []string{"If-Match", "*"}
		}
		out := c.do(q.method, q.path, q.body, header...)
		if lines := c.r.Log()[before:]; len(lines) > 1 || q.method == "GET" && len(lines) > 0 {
			t.Errorf("%s %s %s with %v = %d and left %q", q.method, q.path, q.body, on, out.status, lines)
		}
	}
	if n := c.r.panics.Load(); n > 0 {
		t.Errorf("%d requests broke the rig", n)
	}
	if got := len(c.r.Log()); got < 40 {
		t.Errorf("%d commands were taken, want 40 and more", got)
	}
}

// A BMC without faults does all that its resources promise, and each command
// leaves its one line.
func TestRedfishWhole(t *testing.T) {
	c := newCaller(t, NewFake())
	multipart := "--b\r\nContent-Disposition: form-data; name=\"UpdateParameters\"\r\nContent-Type: application/json\r\n\r\n{\"Targets\":[\"" + inventoryPath + "/BMC\"]}\r\n" +
		"--b\r\nContent-Disposition: form-data; name=\"UpdateFile\"; filename=\"f\"\r\nContent-Type: application/octet-stream\r\n\r\n" + string(FirmwareImage("BMC", "1.3")) + "\r\n--b--\r\n"
	update := updatePath + "/Actions/UpdateService.SimpleUpdate"
	for _, tt := range []struct {
		method, path, body string
		want               int
	}{
		{"GET", "/redfish", "", 200},
		{"GET", root + "/Nothing", "", 404},
		{"DELETE", system, "", 405},
		{"PATCH", system, `{"Boot":`, 400},
		{"PATCH", system, `{"Boot":{"BootOrder":[]}}`, 400},
		{"PATCH", system, alwaysUEFI, 204},
		{"POST", resetPath, `{"ResetType":"Nmi"}`, 409},
		{"POST", resetPath, `{"ResetType":"On"}`, 204},
		{"POST", resetPath, `{"ResetType":"On"}`, 204},
		{"POST", resetPath, `{"ResetType":"Nmi"}`, 204},
		{"POST", resetPath, `{"ResetType":"GracefulRestart"}`, 204},
		{"PATCH", biosPath, `{"Attributes":{"BootMode":"Bios"}}`, 405},
		{"PATCH", settingsPath, `{"Attributes":{"Nothing":1}}`, 400},
		{"PATCH", settingsPath, `{"Attributes":{"SystemModel":"x"}}`, 400},
		{"PATCH", settingsPath, `{"Attributes":{"NodesPerSocket":"2"}}`, 400},
		{"PATCH", settingsPath, `{"Attributes":{"BootMode":"Other"}}`, 400},
		{"PATCH", settingsPath, `{"Attributes":{"NodesPerSocket":2,"SriovGlobal":true}` + onReset + `}`, 202},
		{"POST", insertPath, `{"Image":"http://127.0.0.1/x.iso"}`, 400},
		{"POST", insertPath, `{"Image":"` + c.media.URL + `/other.iso"}`, 400},
		{"POST", insertPath, `{"Image":"` + c.media.URL + `/x.iso","Inserted":true}`, 204},
		{"PATCH", slotPath, `{"Image":null}`, 405},
		{"POST", ejectPath, "{}", 204},
		{"POST", ejectPath, "{}", 204},
		{"POST", volumesPath, `{"RAIDType":"RAID5",` + twoDrives + `}`, 400},
		{"POST", volumesPath, `{"RAIDType":"RAID1","Links":{"Drives":[{"@odata.id":"` + drivesPath + `/9"}]}}`, 400},
		{"POST", volumesPath, `{"Name":"os","RAIDType":"RAID1",` + twoDrives + `}`, 202},
		{"POST", update, `{"ImageURI":"` + c.media.URL + `/x.iso"}`, 400},
		{"POST", update, `{"ImageURI":"` + c.media.URL + `/bios","Targets":["` + inventoryPath + `/BMC"]}`, 400},
		{"POST", update, `{"ImageURI":"` + c.media.URL + `/bios"}`, 202},
		{"PATCH", securePath, `{"SecureBootEnable":true}`, 204},
		{"POST", securePath + "/Actions/SecureBoot.ResetKeys", `{"ResetKeysType":"DeletePK"}`, 204},
		{"PATCH", accountsPath + "/1", `{"Password":"short"}`, 400},
		{"PATCH", accountsPath + "/1", `{"Password":"another-one"}`, 204},
		{"POST", system + "/LogServices/SEL/Actions/LogService.ClearLog", "{}", 204},
		{"GET", system + "/LogServices/SEL/Entries/1", "", 404},
		{"POST", manager + "/Actions/Manager.Reset", `{"ResetType":"ForceRestart"}`, 204},
		{"POST", resetPath, `{"ResetType":"PowerCycle"}`, 204},
		{"DELETE", volumesPath + "/2", "", 404},
	} {
		if got := c.do(tt.method, tt.path, tt.body); got.status != tt.want {
			t.Errorf("%s %s %s = %d %s, want %d", tt.method, tt.path, tt.body, got.status, got.text, tt.want)
		}
	}
	if got := c.do("POST", updatePath+"/upload", multipart, "Content-Type", "multipart/form-data; boundary=b"); got.status != 202 {
		t.Errorf("multipart push = %d %s, want 202", got.status, got.text)
	}
	c.reads()
	for _, tt := range []struct {
		path string
		keys []any
		want any
	}{
		{biosPath, []any{"Attributes", "NodesPerSocket"}, 2.},
		{volumesPath + "/1", []any{"RAIDType"}, "RAID1"},
		{volumesPath + "/1", []any{"CapacityBytes"}, float64(driveBytes)},
		{drivesPath + "/2", []any{"Links", "Volumes", 0, "@odata.id"}, volumesPath + "/1"},
		{inventoryPath + "/BIOS", []any{"Version"}, "2.0"},
		{inventoryPath + "/BMC", []any{"Version"}, "1.3"},
		{securePath, []any{"SecureBootCurrentBoot"}, "Enabled"},
		{root + "/Registries/" + registryName + "/en", []any{"RegistryEntries", "Attributes", 0, "AttributeName"}, "AdminPhone"},
	} {
		if got := c.get(tt.path, tt.keys...); got != tt.want {
			t.Errorf("%s%v = %v, want %v", tt.path, tt.keys, got, tt.want)
		}
	}
	if got := c.status("DELETE", volumesPath+"/1", ""); got != 204 {
		t.Errorf("delete the volume = %d, want 204", got)
	}
	want := []string{
		"bootdev pxe efi persistent", "on pxe efi persistent", "nmi", "graceful restart pxe efi persistent", "bios set NodesPerSocket=2,SriovGlobal=true",
		"media insert " + c.media.URL + "/x.iso", "media eject", "volume create RAID1 os drives 1,2", "firmware BIOS 2.0", "secure boot on", "secure boot keys DeletePK",
		"password changed", "log cleared", "manager reset", "cycle pxe efi persistent", "firmware BMC 1.3", "volume delete os",
	}
	if got := c.r.Log(); !slices.Equal(got, want) {
		t.Errorf("Log() =\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// Every link in every resource leads to a resource.
func TestRedfishLinks(t *testing.T) {
	c := newCaller(t, NewFake())
	c.volume(mirror)
	c.reads()
	waiting, seen := []string{root + "/"}, map[string]bool{root + "/": true}
	var walk func(v any)
	walk = func(v any) {
		switch v := v.(type) {
		case object:
			for key, value := range v {
				path, _ := value.(string)
				if path, _, _ = strings.Cut(path, "#"); linkKeys[key] && key != "target" && !strings.HasSuffix(key, "PushUri") && !seen[path] {
					seen[path] = true
					waiting = append(waiting, path)
				}
				walk(value)
			}
		case []any:
			for _, value := range v {
				walk(value)
			}
		}
	}
	for len(waiting) > 0 {
		path := waiting[0]
		waiting = waiting[1:]
		out := c.do("GET", path, "")
		if out.status != 200 {
			t.Errorf("GET %s = %d, want 200", path, out.status)
		}
		if id, _ := out.body["@odata.id"].(string); id != path && id != "" && !strings.HasPrefix(path, monitorsPath) {
			t.Errorf("GET %s says that it is %s", path, id)
		}
		walk(out.body)
	}
	if len(seen) < 45 {
		t.Errorf("%d resources were seen, want 45 or more", len(seen))
	}
	if got := c.r.Log(); len(got) != 1 {
		t.Errorf("reading left %q in the log", got[1:])
	}
}

func TestSessions(t *testing.T) {
	now := time.Unix(1000, 0)
	c := newCaller(t, NewFake(), MaxSessions(2), SessionTimeout(time.Minute), Clock(func() time.Time { return now }))
	first := c.login()
	for range 2 {
		c.token = ""
		c.login()
	}
	if c.token != "" || c.r.Sessions() != 2 {
		t.Errorf("a third session opened beside two: %d are open", c.r.Sessions())
	}
	c.token = first.header.Get("X-Auth-Token")
	now = now.Add(59 * time.Second)
	if got := c.status("GET", system, ""); got != 200 {
		t.Errorf("after 59 s = %d, want 200", got)
	}
	now = now.Add(time.Second)
	if got := c.r.Sessions(); got != 1 {
		t.Errorf("%d sessions are open, want the one in use", got)
	}
	now = now.Add(time.Minute)
	if got := c.status("GET", system, ""); got != 401 {
		t.Errorf("after a minute without a request = %d, want 401", got)
	}
	again := c.login()
	if got := c.status("DELETE", again.header.Get("Location"), ""); got != 204 || c.r.Sessions() != 0 {
		t.Errorf("logout = %d, %d sessions open, want 204 and none", got, c.r.Sessions())
	}
	c.token, c.bare = "", true
	for _, path := range []string{system, root + "/Chassis", sessionsPath, accountsPath + "/1"} {
		if got := c.status("GET", path, ""); got != 401 {
			t.Errorf("GET %s without credentials = %d, want 401", path, got)
		}
	}
}

// The BMC judges the servers that it fetches from by the given roots only.
func TestMediaIsVerified(t *testing.T) {
	c := newCaller(t, NewFake(), MediaRoots(nil))
	if out := c.do("POST", insertPath, `{"Image":"`+c.media.URL+`/x.iso"}`); out.status != 400 || !strings.Contains(out.text, errUnverified.Error()) {
		t.Errorf("insert from a server without a known CA = %d %s, want 400", out.status, out.text)
	}
	if got := c.r.Log(); len(got) != 0 {
		t.Errorf("Log() = %q, want nothing", got)
	}
}

// drive is a machine with drives.
type drive struct {
	*Fake
	media map[string]string
	fail  error
}

func (d *drive) InsertMedium(_ context.Context, name string, image io.Reader) error {
	content, err := io.ReadAll(image)
	d.media[name] = string(content)
	return errors.Join(err, d.fail)
}

func (d *drive) EjectMedium(_ context.Context, name string) error {
	delete(d.media, name)
	return nil
}

func TestMediaReachTheMachine(t *testing.T) {
	d := &drive{Fake: NewFake(), media: map[string]string{}}
	c := newCaller(t, d)
	if got := c.insert(""); got != 204 || d.media["cdrom"] != "an image" || c.r.Media() != c.media.URL+"/x.iso" {
		t.Errorf("insert = %d, the machine has %q, Media() = %q", got, d.media, c.r.Media())
	}
	if got := c.status("POST", ejectPath, "{}"); got != 204 || len(d.media) != 0 || c.r.Media() != "" {
		t.Errorf("eject = %d, the machine has %q", got, d.media)
	}
	d.fail = errors.New("no drive")
	if got := c.insert(""); got != 500 || c.r.Media() != "" {
		t.Errorf("insert into a machine that refuses = %d, Media() = %q, want 500 and none", got, c.r.Media())
	}
}

// Several at once do not get in each other's way, and count exactly.
func TestRedfishUnderLoad(t *testing.T) {
	c := newCaller(t, NewFake())
	c.power("On")
	const clients, each = 8, 10
	ended := make(chan error, clients)
	for range clients {
		go func() {
			for range each {
				if c.status("GET", system, "") != 200 || c.power("ForceRestart") != 204 {
					ended <- errors.New("a request failed")
					return
				}
			}
			ended <- nil
		}()
	}
	for range clients {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	if got := len(c.r.Log()); got != 1+clients*each {
		t.Errorf("the log has %d lines, want %d", got, 1+clients*each)
	}
}

func TestFleet(t *testing.T) {
	const n = 200
	f, err := StartFleet(t.Context(), n, "admin", "password", func() time.Duration { return time.Millisecond })
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	seen := map[string]bool{}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	for i, r := range f.BMCs {
		seen[r.Addr()] = true
		c := &caller{t: t, r: r, http: client}
		if i%10 == 0 {
			if got := c.power("On"); got != 204 || c.get(system, "PowerState") != "On" {
				t.Errorf("power on of BMC %d = %d", i, got)
			}
		}
	}
	for i, r := range f.BMCs {
		if got, want := len(r.Log()), map[bool]int{true: 1}[i%10 == 0]; got != want {
			t.Errorf("BMC %d has %d lines, want %d", i, got, want)
		}
	}
	if len(seen) != n || len(f.BMCs) != n || f.Slept() != n/10*2*time.Millisecond {
		t.Errorf("%d BMCs at %d addresses took %v, want %d and %v", len(f.BMCs), len(seen), f.Slept(), n, n/10*2*time.Millisecond)
	}
	if err := f.Close(); err != nil {
		t.Errorf("Close() = %v", err)
	}
	_, port, _ := strings.Cut(f.BMCs[0].Addr(), ":")
	if _, err := strconv.Atoi(port); err != nil || !bytes.HasPrefix([]byte(f.BMCs[0].Addr()), []byte("127.0.0.1:")) {
		t.Errorf("Addr() = %s, want a port of 127.0.0.1", f.BMCs[0].Addr())
	}
	if out := (&caller{t: t, r: f.BMCs[0], http: client}).do("GET", root, ""); out.status != 0 {
		t.Errorf("a closed BMC answers %s", fmt.Sprint(out.status))
	}
}
