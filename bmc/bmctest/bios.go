package bmctest

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
)

// attribute is one setting of the firmware.
type attribute struct {
	kind    string // of Redfish's attribute registry
	initial any
	values  []string
	fixed   bool
}

var attributes = map[string]attribute{
	"BootMode":       {kind: "Enumeration", initial: "Uefi", values: []string{"Uefi", "Bios"}},
	"ProcTurboMode":  {kind: "Enumeration", initial: "Enabled", values: []string{"Enabled", "Disabled"}},
	"SriovGlobal":    {kind: "Boolean", initial: false},
	"NodesPerSocket": {kind: "Integer", initial: 1},
	"AdminPhone":     {kind: "String", initial: ""},
	"SystemModel":    {kind: "String", initial: "Rig Machine", fixed: true},
}

const registryName = "RigBios.v1_0_0"

// biosState holds what differs from the initial values; Redfish's mu guards it.
type biosState struct {
	values, pending map[string]any
	held            bool // pending values that no boot applies
	tasked          bool // pending values that a task is to apply, and has not
}

// current are all values.
func (b *biosState) current() map[string]any {
	out := map[string]any{}
	for name, a := range attributes {
		out[name] = a.initial
	}
	maps.Copy(out, b.values)
	return out
}

// boot makes the pending values the current ones.
func (b *biosState) boot(faults faultSet) {
	if len(b.pending) == 0 || b.held || b.tasked && faults.on(TaskNeverEnds) {
		return
	}
	if !b.tasked && !faults.strike(BiosDropsValues) {
		if b.values == nil {
			b.values = map[string]any{}
		}
		maps.Copy(b.values, b.pending)
	}
	b.pending, b.tasked = nil, false
}

// secureState is secure boot; Redfish's mu guards it.
type secureState struct{ enabled, booted bool }

func (s *secureState) boot() { s.booted = s.enabled }

const (
	biosPath     = system + "/Bios"
	settingsPath = biosPath + "/Settings"
	securePath   = system + "/SecureBoot"
)

var biosRoutes = map[string]handler{
	"GET " + biosPath: func(x *exchange) reply {
		r := x.r
		r.mu.Lock()
		defer r.mu.Unlock()
		o := resource(biosPath, "#Bios.v1_2_0.Bios", "BIOS", object{
			"AttributeRegistry": registryName,
			"Actions":           object{"#Bios.ResetBios": object{"target": biosPath + "/Actions/Bios.ResetBios"}},
		})
		values := r.bios.current()
		if r.faults.on(BiosShownEarly) {
			maps.Copy(values, r.bios.pending)
		}
		if !r.faults.on(BiosOnlyInSettings) {
			o["Attributes"] = values
		}
		if !r.faults.on(BiosNoSettings) {
			settings := object{"@odata.type": "#Settings.v1_3_5.Settings", "SettingsObject": link(settingsPath)}
			if !r.faults.on(BiosRefusesApplyTime) {
				settings["SupportedApplyTimes"] = []string{"OnReset"}
			}
			o["@Redfish.Settings"] = settings
		}
		return ok(o)
	},
	"PATCH " + biosPath: func(x *exchange) reply {
		if !x.r.faulty(BiosNoSettings) {
			return fail(http.StatusMethodNotAllowed, "Base.1.8.OperationNotAllowed", "The settings object is what is written.")
		}
		return patchBios(x)
	},
	"GET " + settingsPath: func(x *exchange) reply {
		r := x.r
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.faults.on(BiosNoSettings) {
			return missing()
		}
		values := map[string]any{}
		if r.faults.on(BiosOnlyInSettings) {
			values = r.bios.current()
		}
		maps.Copy(values, r.bios.pending)
		return ok(resource(settingsPath, "#Bios.v1_2_0.Bios", "BIOS settings", object{"AttributeRegistry": registryName, "Attributes": values}))
	},
	"PATCH " + settingsPath: func(x *exchange) reply {
		if x.r.faulty(BiosNoSettings) {
			return missing()
		}
		return patchBios(x)
	},
	"POST " + biosPath + "/Actions/Bios.ResetBios": func(x *exchange) reply {
		x.r.mu.Lock()
		x.r.bios.pending, x.r.bios.held, x.r.bios.tasked = map[string]any{}, false, false
		for name, a := range attributes {
			x.r.bios.pending[name] = a.initial
		}
		x.r.mu.Unlock()
		x.r.note("bios reset")
		return done()
	},
	"GET " + root + "/Registries": func(x *exchange) reply {
		return x.collection("MessageRegistryFileCollection", "Registries", root+"/Registries/"+registryName)
	},
	"GET " + root + "/Registries/" + registryName: func(*exchange) reply {
		return ok(resource(root+"/Registries/"+registryName, "#MessageRegistryFile.v1_1_3.MessageRegistryFile", "BIOS registry", object{
			"Registry": registryName, "Languages": []string{"en"},
			"Location": []object{{"Language": "en", "Uri": root + "/Registries/" + registryName + "/en"}},
		}))
	},
	"GET " + root + "/Registries/" + registryName + "/en": func(*exchange) reply {
		var list []object
		for _, name := range slices.Sorted(maps.Keys(attributes)) {
			a := attributes[name]
			o := object{"AttributeName": name, "Type": a.kind, "DefaultValue": a.initial, "ReadOnly": a.fixed, "DisplayName": name}
			if a.values != nil {
				var values []object
				for _, v := range a.values {
					values = append(values, object{"ValueName": v, "ValueDisplayName": v})
				}
				o["Value"] = values
			}
			list = append(list, o)
		}
		return ok(object{
			"@odata.type": "#AttributeRegistry.v1_3_5.AttributeRegistry", "Id": registryName, "Name": "BIOS registry", "Language": "en",
			"OwningEntity": "Better Compute", "RegistryVersion": "1.0.0", "RegistryEntries": object{"Attributes": list},
		})
	},
	"GET " + securePath: func(x *exchange) reply {
		x.r.mu.Lock()
		defer x.r.mu.Unlock()
		now := "Disabled"
		if x.r.secure.booted {
			now = "Enabled"
		}
		return ok(resource(securePath, "#SecureBoot.v1_1_0.SecureBoot", "Secure Boot", object{
			"SecureBootEnable": x.r.secure.enabled, "SecureBootCurrentBoot": now, "SecureBootMode": "UserMode",
			"Actions": object{"#SecureBoot.ResetKeys": object{
				"target":                                securePath + "/Actions/SecureBoot.ResetKeys",
				"ResetKeysType@Redfish.AllowableValues": resetKeys,
			}},
		}))
	},
	"PATCH " + securePath: func(x *exchange) reply {
		var in struct{ SecureBootEnable *bool }
		if bad := x.decode(&in); bad != nil {
			return *bad
		}
		if in.SecureBootEnable == nil {
			return refuse("Nothing is to be changed.")
		}
		x.r.mu.Lock()
		x.r.secure.enabled = *in.SecureBootEnable
		x.r.mu.Unlock()
		x.r.note("secure boot %s", map[bool]string{true: "on", false: "off"}[*in.SecureBootEnable])
		return done()
	},
	"POST " + securePath + "/Actions/SecureBoot.ResetKeys": func(x *exchange) reply {
		var in struct{ ResetKeysType string }
		if bad := x.decode(&in); bad != nil {
			return *bad
		}
		if !slices.Contains(resetKeys, in.ResetKeysType) {
			return refuse("The value is not one that ResetKeysType has.")
		}
		x.r.note("secure boot keys %s", in.ResetKeysType)
		return done()
	},
}

var resetKeys = []string{"ResetAllKeysToDefault", "DeleteAllKeys", "DeletePK"}

// takes says whether v is a value of a.
func (a attribute) takes(v any) bool {
	if a.fixed {
		return false
	}
	switch a.kind {
	case "Boolean":
		_, is := v.(bool)
		return is
	case "Integer":
		n, is := v.(float64)
		return is && n == float64(int(n))
	default:
		text, is := v.(string)
		return is && (a.values == nil || slices.Contains(a.values, text))
	}
}

func patchBios(x *exchange) reply {
	r := x.r
	var in struct {
		Attributes map[string]any
		Apply      *struct {
			Type  string `json:"@odata.type"`
			Time  string `json:"ApplyTime"`
			Start string `json:"MaintenanceWindowStartTime"`
			Life  int    `json:"MaintenanceWindowDurationInSeconds"`
		} `json:"@Redfish.SettingsApplyTime"`
	}
	if bad := x.decode(&in); bad != nil {
		return *bad
	}
	if in.Apply != nil && r.faulty(BiosRefusesApplyTime) {
		return fail(http.StatusBadRequest, "Base.1.8.PropertyUnknown", "The property @Redfish.SettingsApplyTime is not known.")
	}
	if in.Apply != nil && in.Apply.Time != "OnReset" {
		return refuse("The apply time is not one that the resource has.")
	}
	if len(in.Attributes) == 0 {
		return refuse("Nothing is to be changed.")
	}
	var words []string
	for _, name := range slices.Sorted(maps.Keys(in.Attributes)) {
		a, known := attributes[name]
		switch {
		case !known:
			return fail(http.StatusBadRequest, "Base.1.8.PropertyUnknown", "The attribute "+name+" is not known.")
		case a.fixed:
			return fail(http.StatusBadRequest, "Base.1.8.PropertyNotWritable", "The attribute "+name+" is read only.")
		case !a.takes(in.Attributes[name]):
			return fail(http.StatusBadRequest, "Base.1.8.PropertyValueNotInList", "The attribute "+name+" has no such value.")
		}
		words = append(words, fmt.Sprintf("%s=%v", name, in.Attributes[name]))
	}
	r.mu.Lock()
	if r.bios.pending == nil {
		r.bios.pending = map[string]any{}
	}
	maps.Copy(r.bios.pending, in.Attributes)
	r.bios.held = in.Apply == nil && r.faults.on(BiosWantsApplyTime)
	r.bios.tasked = in.Apply != nil
	r.mu.Unlock()
	r.note("bios set %s", strings.Join(words, ","))
	if in.Apply == nil {
		return done()
	}
	return r.begin("BIOS settings", true, func(r *Redfish) { r.bios.tasked = false })
}
