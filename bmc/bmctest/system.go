package bmctest

import (
	"context"
	"errors"
	"net/http"
	"slices"
)

const (
	systemsPath  = root + "/Systems"
	system       = systemsPath + "/1"
	secondSystem = systemsPath + "/2"
	manager      = root + "/Managers/1"
	chassisPath  = root + "/Chassis/1"
)

// lateReads is how many reads show the old state under the ...ShownLate faults.
const lateReads = 2

// bootState is what a BMC remembers of the boot override beside the override.
type bootState struct {
	legacy bool // BootSourceOverrideMode
	late   int
	old    object
}

// powerState is what reads show after an action.
type powerState struct {
	late  int
	shown string
}

// bareMissing are the resources that a bare BMC has not.
func bareMissing(path string) bool {
	return within(path, root+"/UpdateService") || within(path, root+"/TaskService") || within(path, root+"/Registries") ||
		within(path, system) && path != system && !within(path, system+"/Actions") || within(path, manager+"/VirtualMedia")
}

var rootRoutes = map[string]handler{
	"GET /redfish": func(*exchange) reply { return ok(object{"v1": root + "/"}) },
	"GET " + root: func(x *exchange) reply {
		o := object{
			"@odata.id": root + "/", "@odata.type": "#ServiceRoot.v1_9_0.ServiceRoot", "Id": "RootService", "Name": "Root Service",
			"RedfishVersion": "1.11.0", "UUID": "42435249-4700-0000-0000-000000000001", "Vendor": "Better Compute", "Product": "Rig BMC",
			"Systems": link(systemsPath), "Chassis": link(root + "/Chassis"), "Managers": link(root + "/Managers"),
			"AccountService": link(root + "/AccountService"), "SessionService": link(root + "/SessionService"), "UpdateService": link(root + "/UpdateService"),
			"Tasks": link(root + "/TaskService"), "Registries": link(root + "/Registries"), "Links": object{"Sessions": link(sessionsPath)},
		}
		if x.r.faulty(NoSessions) {
			delete(o, "SessionService")
			o["Links"] = object{}
		}
		if x.r.faulty(Bare) {
			for _, name := range []string{"UpdateService", "Tasks", "Registries"} {
				delete(o, name)
			}
		}
		return ok(o)
	},
	"GET " + root + "/odata": func(*exchange) reply {
		return ok(object{"@odata.context": root + "/$metadata", "value": []object{
			{"name": "Service", "kind": "Singleton", "url": root + "/"}, {"name": "Systems", "kind": "Singleton", "url": systemsPath},
		}})
	},
}

var systemRoutes = map[string]handler{
	"GET " + systemsPath: func(x *exchange) reply {
		r := x.r
		var members []string
		if r.faulty(ManagerAmongSystems) || r.faulty(ManagerAsSystem) {
			members = append(members, manager)
		}
		switch {
		case r.faulty(ManagerAsSystem):
		case r.faulty(OutsideLinks):
			members = append(members, "/cgi/system")
		default:
			members = append(members, system)
		}
		if r.faulty(SeveralSystems) {
			members = append(members, secondSystem)
		}
		return x.collection("ComputerSystemCollection", "Systems", members...)
	},
	"GET " + systemsPath + "/{system}": func(x *exchange) reply {
		switch x.req.PathValue("system") {
		case "1":
			return ok(x.r.system(x.inside))
		case "2":
			if x.r.faulty(SeveralSystems) {
				return ok(x.r.secondSystem())
			}
		}
		return missing()
	},
	"PATCH " + systemsPath + "/{system}": func(x *exchange) reply {
		if x.r.faulty(BootSettings) {
			return fail(http.StatusBadRequest, "Base.1.8.PropertyNotWritable", "Boot is written to the settings object.")
		}
		return patchBoot(x)
	},
	"GET " + system + "/Settings": func(x *exchange) reply {
		if !x.r.faulty(BootSettings) {
			return missing()
		}
		o := resource(system+"/Settings", "#ComputerSystem.v1_16_0.ComputerSystem", "System settings", object{"Boot": x.r.bootObject(true)})
		return ok(o)
	},
	"PATCH " + system + "/Settings": func(x *exchange) reply {
		if !x.r.faulty(BootSettings) {
			return missing()
		}
		return patchBoot(x)
	},
	"GET " + system + "/ResetActionInfo": func(x *exchange) reply {
		if !x.r.faulty(ActionInfoOnly) {
			return missing()
		}
		return ok(resource(system+"/ResetActionInfo", "#ActionInfo.v1_1_2.ActionInfo", "Reset", object{"Parameters": []object{
			{"Name": "ResetType", "Required": true, "DataType": "String", "AllowableValues": x.r.resetTypes()},
		}}))
	},
	"POST " + systemsPath + "/{system}/Actions/ComputerSystem.Reset": resetSystem,
	"GET " + root + "/Managers": func(x *exchange) reply {
		return x.collection("ManagerCollection", "Managers", manager)
	},
	"GET " + manager: func(x *exchange) reply {
		o := resource(manager, "#Manager.v1_11_0.Manager", "Manager", object{
			"ManagerType": "BMC", "Model": "Rig BMC", "FirmwareVersion": x.r.version("BMC"), "PowerState": "On", "Status": healthy(),
			"DateTime": "2026-01-01T00:00:00Z", "EthernetInterfaces": link(manager + "/EthernetInterfaces"),
			"Links":   object{"ManagerForServers": links(system), "ManagerForChassis": links(chassisPath)},
			"Actions": object{"#Manager.Reset": object{"target": manager + "/Actions/Manager.Reset", "ResetType@Redfish.AllowableValues": []string{"ForceRestart", "GracefulRestart"}}},
		})
		if !x.r.faulty(Bare) && !x.r.faulty(MediaUnderSystem) {
			o["VirtualMedia"] = link(manager + "/VirtualMedia")
		}
		if x.r.faulty(LogUnderManager) {
			o["LogServices"] = link(manager + "/LogServices")
		}
		x.r.webConsole.describe(o)
		return ok(o)
	},
	"POST " + manager + "/Actions/Manager.Reset": func(x *exchange) reply {
		var in struct{ ResetType string }
		if bad := x.decode(&in); bad != nil {
			return *bad
		}
		if in.ResetType != "ForceRestart" && in.ResetType != "GracefulRestart" {
			return refuse("The reset type is not one that the manager has.")
		}
		x.r.note("manager reset")
		x.r.restart(0)
		return done()
	},
}

func healthy() object { return object{"State": "Enabled", "Health": "OK"} }

// targets are the boot devices in Redfish's words.
var targets = map[string]string{"none": "None", "pxe": "Pxe", "disk": "Hdd", "cdrom": "Cd", "bios": "BiosSetup"}

// bootObject is the override; inside reads it without counting.
func (r *Redfish) bootObject(inside bool) object {
	r.mu.Lock()
	if r.boot.late > 0 {
		defer r.mu.Unlock()
		if !inside {
			r.boot.late--
		}
		return r.boot.old
	}
	legacy, continuous := r.boot.legacy, !r.faults.on(BootContinuousRefused)
	r.mu.Unlock()
	boot := object{
		"BootSourceOverrideEnabled": "Disabled", "BootSourceOverrideTarget": "None", "BootSourceOverrideMode": mode(legacy),
		"BootSourceOverrideTarget@Redfish.AllowableValues": []string{"None", "Pxe", "Hdd", "Cd", "BiosSetup"},
		"BootSourceOverrideMode@Redfish.AllowableValues":   []string{"UEFI", "Legacy"},
	}
	enabled := []string{"Disabled", "Once"}
	if continuous {
		enabled = append(enabled, "Continuous")
	}
	boot["BootSourceOverrideEnabled@Redfish.AllowableValues"] = enabled
	if dev, valid := r.current(); valid {
		boot["BootSourceOverrideEnabled"] = "Once"
		if dev.Persistent {
			boot["BootSourceOverrideEnabled"] = "Continuous"
		}
		boot["BootSourceOverrideTarget"] = targets[dev.Device]
		boot["BootSourceOverrideMode"] = mode(!dev.EFI)
	}
	return boot
}

func mode(legacy bool) string {
	if legacy {
		return "Legacy"
	}
	return "UEFI"
}

// resetTypes are the reset types of the system.
func (r *Redfish) resetTypes() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	types := []string{"On", "ForceOff", "GracefulShutdown", "GracefulRestart", "ForceRestart", "PowerCycle", "Nmi"}
	switch {
	case r.faults.on(GracefulOnly):
		types = []string{"On", "GracefulShutdown", "GracefulRestart"}
	case r.faults.on(ForcedOnly):
		types = []string{"ForceOn", "ForceOff", "ForceRestart"}
	}
	return slices.DeleteFunc(types, func(t string) bool {
		return t == "PowerCycle" && r.faults.on(NoPowerCycle) || t == "Nmi" && r.faults.on(NoNMI)
	})
}

// system is the first system; inside reads it without counting.
func (r *Redfish) system(inside bool) object {
	power := "Off"
	if r.machine.Running() {
		power = "On"
	}
	r.mu.Lock()
	if r.power.late > 0 {
		power = r.power.shown
		if !inside {
			r.power.late--
		}
	}
	r.mu.Unlock()
	reset := object{"target": system + "/Actions/ComputerSystem.Reset"}
	switch {
	case r.faulty(ActionInfoOnly):
		reset["@Redfish.ActionInfo"] = system + "/ResetActionInfo"
	case !r.faulty(ResetTypesUnsaid):
		reset["ResetType@Redfish.AllowableValues"] = r.resetTypes()
	}
	o := resource(system, "#ComputerSystem.v1_16_0.ComputerSystem", "System", object{
		"SystemType": "Physical", "Manufacturer": "Better Compute", "Model": "Rig Machine", "SerialNumber": "RIG-0001", "SKU": "RM-1", "PartNumber": "RM-1-A",
		"UUID": "42435249-4700-0000-0000-000000000002", "AssetTag": "", "HostName": "rig", "BiosVersion": r.version("BIOS"),
		"PowerState": power, "Status": healthy(), "Boot": r.bootObject(inside),
		"ProcessorSummary": object{"Count": 2, "Model": "Rig CPU", "Status": healthy()}, "MemorySummary": object{"TotalSystemMemoryGiB": 64, "Status": healthy()},
		"Links":   object{"ManagedBy": links(manager), "Chassis": links(chassisPath)},
		"Actions": object{"#ComputerSystem.Reset": reset},
	})
	if r.faulty(BootSettings) {
		o["@Redfish.Settings"] = object{"@odata.type": "#Settings.v1_3_5.Settings", "SettingsObject": link(system + "/Settings")}
	}
	if r.faulty(Bare) {
		return o
	}
	for name, path := range map[string]string{
		"Bios": "/Bios", "Storage": "/Storage", "SecureBoot": "/SecureBoot", "Processors": "/Processors", "Memory": "/Memory", "EthernetInterfaces": "/EthernetInterfaces",
	} {
		o[name] = link(system + path)
	}
	if r.faulty(MediaUnderSystem) {
		o["VirtualMedia"] = link(system + "/VirtualMedia")
	}
	if !r.faulty(LogUnderManager) {
		o["LogServices"] = link(system + "/LogServices")
	}
	return o
}

// secondSystem is the one of SeveralSystems.
func (r *Redfish) secondSystem() object {
	r.mu.Lock()
	power := "Off"
	if r.second {
		power = "On"
	}
	r.mu.Unlock()
	return resource(secondSystem, "#ComputerSystem.v1_16_0.ComputerSystem", "Second system", object{
		"SystemType": "Physical", "Manufacturer": "Better Compute", "Model": "Rig Machine", "SerialNumber": "RIG-0002", "UUID": "42435249-4700-0000-0000-000000000003",
		"PowerState": power, "Status": healthy(), "Boot": object{"BootSourceOverrideEnabled": "Disabled", "BootSourceOverrideTarget": "None", "BootSourceOverrideMode": "UEFI"},
		"Links":   object{"ManagedBy": links(manager)},
		"Actions": object{"#ComputerSystem.Reset": object{"target": secondSystem + "/Actions/ComputerSystem.Reset", "ResetType@Redfish.AllowableValues": r.resetTypes()}},
	})
}

func patchBoot(x *exchange) reply {
	r := x.r
	var in struct {
		Boot struct {
			Enabled *string `json:"BootSourceOverrideEnabled"`
			Target  *string `json:"BootSourceOverrideTarget"`
			Mode    *string `json:"BootSourceOverrideMode"`
		}
	}
	if bad := x.decode(&in); bad != nil {
		return *bad
	}
	second := x.req.PathValue("system") == "2"
	if second && !r.faulty(SeveralSystems) || !second && x.req.PathValue("system") != "1" && x.req.PathValue("system") != "" {
		return missing()
	}
	b := in.Boot
	switch {
	case b.Enabled == nil && b.Target == nil && b.Mode == nil:
		return refuse("Nothing is to be changed.")
	case r.faulty(BootModeRefused) && b.Mode != nil:
		return fail(http.StatusBadRequest, "Base.1.8.PropertyNotWritable", "The property BootSourceOverrideMode is read only.")
	case r.faulty(BootWhole) && (b.Enabled == nil || b.Target == nil || b.Mode == nil):
		return fail(http.StatusBadRequest, "Base.1.8.PropertyMissing", "The Boot object lacks a property that is needed.")
	}
	before, set := r.current()
	enabled, target := "Disabled", before.Device
	if set {
		enabled = "Once"
		if before.Persistent {
			enabled = "Continuous"
		}
	}
	if b.Enabled != nil {
		enabled = *b.Enabled
	} else if set && r.faulty(BootRevertsToOnce) {
		enabled = "Once"
	}
	if b.Target != nil {
		target = ""
		for device, name := range targets {
			if name == *b.Target {
				target = device
			}
		}
		if target == "" {
			return refuse("The boot target is not one that the system has.")
		}
	}
	r.mu.Lock()
	legacy := r.boot.legacy
	r.mu.Unlock()
	if set {
		legacy = !before.EFI
	}
	switch {
	case b.Mode != nil && *b.Mode != "UEFI" && *b.Mode != "Legacy":
		return refuse("The boot mode is not one that the system has.")
	case b.Mode != nil:
		legacy = *b.Mode == "Legacy"
	case r.faulty(BootModeLost):
		legacy = true
	}
	switch enabled {
	case "Continuous":
		if r.faulty(BootContinuousRefused) {
			return refuse("The value Continuous is not one that BootSourceOverrideEnabled has.")
		}
		if r.faulty(BootContinuousBecomesOnce) {
			enabled = "Once"
		}
	case "Once", "Disabled":
	default:
		return refuse("The value is not one that BootSourceOverrideEnabled has.")
	}
	if second {
		r.note("second: bootdev %s", target)
		return done()
	}
	if r.strike(BootIgnored) {
		return done()
	}
	if r.faulty(BootShownLate) {
		old := r.bootObject(true)
		r.mu.Lock()
		r.boot.old, r.boot.late = old, lateReads
		r.mu.Unlock()
	}
	r.mu.Lock()
	r.boot.legacy = legacy
	r.mu.Unlock()
	switch {
	case enabled == "Disabled" || target == "none":
		if b.Enabled != nil || b.Target != nil && set {
			r.clearOverride()
		}
	default:
		r.setOverride(BootDevice{Device: target, EFI: !legacy, Persistent: enabled == "Continuous"}, false)
	}
	return done()
}

func resetSystem(x *exchange) reply {
	r := x.r
	var in struct{ ResetType string }
	if bad := x.decode(&in); bad != nil {
		return *bad
	}
	if !slices.Contains(r.resetTypes(), in.ResetType) {
		return fail(http.StatusBadRequest, "Base.1.8.ActionParameterNotSupported", "The reset type is not one that the system has.")
	}
	if x.req.PathValue("system") == "2" {
		if !r.faulty(SeveralSystems) {
			return missing()
		}
		r.mu.Lock()
		r.second = in.ResetType != "ForceOff" && in.ResetType != "GracefulShutdown"
		r.mu.Unlock()
		r.note("second: %s", in.ResetType)
		return done()
	}
	if x.req.PathValue("system") != "1" {
		return missing()
	}
	action := map[string]func(context.Context) error{
		"On": r.powerOn, "ForceOn": r.powerOn, "ForceOff": r.powerOff, "GracefulShutdown": r.soft, "GracefulRestart": r.graceful,
		"ForceRestart": r.chassis.reset, "PowerCycle": r.cycle, "Nmi": r.nmi,
	}[in.ResetType]
	running := r.machine.Running()
	soft := in.ResetType == "GracefulShutdown"
	switch {
	case r.faulty(PowerSameRefused) && (running && (in.ResetType == "On" || in.ResetType == "ForceOn") || !running && in.ResetType == "ForceOff"):
		return fail(http.StatusConflict, "Base.1.8.ActionNotSupported", "The system is in that state already.")
	case r.strike(PowerIgnored):
		return done()
	case soft && running && r.faulty(SoftIgnored):
		r.note("soft")
		return done()
	}
	switch err := action(x.req.Context()); {
	case errors.Is(err, errNotRunning):
		return fail(http.StatusConflict, "Base.1.8.ActionNotSupported", "The system is off.")
	case errors.Is(err, errNoNMI):
		return fail(http.StatusNotImplemented, "Base.1.8.ActionNotSupported", "The system takes no interrupt.")
	case err != nil:
		return fail(http.StatusInternalServerError, "Base.1.8.InternalError", err.Error())
	}
	if r.faulty(PowerShownLate) {
		r.mu.Lock()
		r.power.late, r.power.shown = lateReads, "On"
		switch now := r.machine.Running(); {
		case now && !running:
			r.power.shown = "PoweringOn"
		case running && (!now || soft):
			r.power.shown = "PoweringOff"
		}
		r.mu.Unlock()
	}
	return done()
}
