package bmctest

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
)

// fixed are resources that never change, by path.
var fixed = map[string]object{
	chassisPath: resource(chassisPath, "#Chassis.v1_14_0.Chassis", "Chassis", object{
		"ChassisType": "RackMount", "Manufacturer": "Better Compute", "Model": "Rig Chassis", "SerialNumber": "RIG-CHASSIS-1", "PartNumber": "RC-1", "AssetTag": "",
		"PowerState": "On", "Status": healthy(), "Thermal": link(chassisPath + "/Thermal"), "Power": link(chassisPath + "/Power"),
		"Links": object{"ComputerSystems": links(system), "ManagedBy": links(manager)},
	}),
	chassisPath + "/Thermal": resource(chassisPath+"/Thermal", "#Thermal.v1_7_0.Thermal", "Thermal", object{
		"Temperatures": []object{
			{"@odata.id": chassisPath + "/Thermal#/Temperatures/0", "MemberId": "0", "Name": "CPU1 Temp", "ReadingCelsius": 41, "UpperThresholdCritical": 95, "Status": healthy()},
			{"@odata.id": chassisPath + "/Thermal#/Temperatures/1", "MemberId": "1", "Name": "Inlet Temp", "ReadingCelsius": 23, "UpperThresholdCritical": 50, "Status": healthy()},
		},
		"Fans": []object{{"@odata.id": chassisPath + "/Thermal#/Fans/0", "MemberId": "0", "Name": "FAN1", "Reading": 5400, "ReadingUnits": "RPM", "Status": healthy()}},
	}),
	chassisPath + "/Power": resource(chassisPath+"/Power", "#Power.v1_7_0.Power", "Power", object{
		"PowerControl": []object{{"@odata.id": chassisPath + "/Power#/PowerControl/0", "MemberId": "0", "Name": "System", "PowerConsumedWatts": 212, "PowerCapacityWatts": 800}},
		"PowerSupplies": []object{
			{"@odata.id": chassisPath + "/Power#/PowerSupplies/0", "MemberId": "0", "Name": "PSU1", "Model": "Rig PSU", "SerialNumber": "RIG-PSU-1", "Status": healthy()},
			{"@odata.id": chassisPath + "/Power#/PowerSupplies/1", "MemberId": "1", "Name": "PSU2", "Model": "Rig PSU", "SerialNumber": "RIG-PSU-2", "Status": healthy()},
		},
	}),
	system + "/EthernetInterfaces/1": resource(system+"/EthernetInterfaces/1", "#EthernetInterface.v1_8_0.EthernetInterface", "eth0", object{
		"MACAddress": "52:54:00:b3:c0:11", "PermanentMACAddress": "52:54:00:b3:c0:11", "SpeedMbps": 25000, "LinkStatus": "LinkUp", "InterfaceEnabled": true, "Status": healthy(),
	}),
	system + "/EthernetInterfaces/2": resource(system+"/EthernetInterfaces/2", "#EthernetInterface.v1_8_0.EthernetInterface", "eth1", object{
		"MACAddress": "52:54:00:B3:C0:12", "SpeedMbps": 25000, "LinkStatus": "LinkDown", "InterfaceEnabled": true, "Status": healthy(),
	}),
	manager + "/EthernetInterfaces/1": resource(manager+"/EthernetInterfaces/1", "#EthernetInterface.v1_8_0.EthernetInterface", "Manager", object{
		"MACAddress": "52:54:00:b3:c0:01", "SpeedMbps": 1000, "LinkStatus": "LinkUp", "Status": healthy(),
		"IPv4Addresses": []object{{"Address": "192.0.2.10", "SubnetMask": "255.255.255.0", "AddressOrigin": "Static"}},
	}),
	system + "/Processors/1": processor(1),
	system + "/Processors/2": processor(2),
	system + "/Memory/1":     module(1),
	system + "/Memory/2":     module(2),
}

func processor(n int) object {
	return resource(fmt.Sprintf("%s/Processors/%d", system, n), "#Processor.v1_11_0.Processor", fmt.Sprintf("CPU %d", n), object{
		"Socket": fmt.Sprintf("CPU%d", n), "ProcessorType": "CPU", "ProcessorArchitecture": "x86", "InstructionSet": "x86-64", "Manufacturer": "Better Compute", "Model": "Rig CPU",
		"TotalCores": 16, "TotalThreads": 32, "MaxSpeedMHz": 3600, "Status": healthy(),
	})
}

func module(n int) object {
	return resource(fmt.Sprintf("%s/Memory/%d", system, n), "#Memory.v1_11_0.Memory", fmt.Sprintf("DIMM %d", n), object{
		"DeviceLocator": fmt.Sprintf("DIMM_A%d", n), "MemoryDeviceType": "DDR4", "CapacityMiB": 32768, "OperatingSpeedMhz": 3200, "Manufacturer": "Better Compute",
		"PartNumber": "RIG-DIMM", "SerialNumber": fmt.Sprintf("RIG-DIMM-%d", n), "Status": healthy(),
	})
}

// folders are collections of fixed resources: schema, members.
var folders = map[string]struct {
	schema  string
	members []string
}{
	root + "/Chassis":               {"ChassisCollection", []string{chassisPath}},
	system + "/EthernetInterfaces":  {"EthernetInterfaceCollection", []string{system + "/EthernetInterfaces/1", system + "/EthernetInterfaces/2"}},
	manager + "/EthernetInterfaces": {"EthernetInterfaceCollection", []string{manager + "/EthernetInterfaces/1"}},
	system + "/Processors":          {"ProcessorCollection", []string{system + "/Processors/1", system + "/Processors/2"}},
	system + "/Memory":              {"MemoryCollection", []string{system + "/Memory/1", system + "/Memory/2"}},
}

// entries are the event log, oldest first.
var entries = []struct{ severity, message string }{
	{"OK", "The system was powered on."},
	{"Warning", "Fan 1 is slow."},
	{"Critical", "Memory error at DIMM_A2."},
}

var inventoryRoutes = inventoryTable()

func inventoryTable() map[string]handler {
	table := map[string]handler{}
	for path, o := range fixed {
		table["GET "+path] = func(*exchange) reply { return ok(maps.Clone(o)) }
	}
	for path, folder := range folders {
		table["GET "+path] = func(x *exchange) reply { return x.collection(folder.schema, folder.schema, folder.members...) }
	}
	for _, owner := range []string{system, manager} {
		services := owner + "/LogServices"
		log := services + "/SEL"
		here := func(h handler) handler {
			return func(x *exchange) reply {
				if (owner == manager) != x.r.faulty(LogUnderManager) {
					return missing()
				}
				return h(x)
			}
		}
		table["GET "+services] = here(func(x *exchange) reply { return x.collection("LogServiceCollection", "Log Services", log) })
		table["GET "+log] = here(func(*exchange) reply {
			return ok(resource(log, "#LogService.v1_2_0.LogService", "System Event Log", object{
				"LogEntryType": "SEL", "MaxNumberOfRecords": 512, "OverWritePolicy": "WrapsWhenFull", "ServiceEnabled": true, "Entries": link(log + "/Entries"),
				"Actions": object{"#LogService.ClearLog": object{"target": log + "/Actions/LogService.ClearLog"}},
			}))
		})
		entry := func(n int) object {
			e := entries[n-1]
			return resource(log+"/Entries/"+strconv.Itoa(n), "#LogEntry.v1_8_0.LogEntry", "Entry", object{
				"EntryType": "SEL", "Severity": e.severity, "Created": fmt.Sprintf("2026-01-01T00:0%d:00Z", n), "Message": e.message, "MessageId": "0x0001", "SensorType": "System Event",
			})
		}
		table["GET "+log+"/Entries"] = here(func(x *exchange) reply {
			var members []string
			x.r.mu.Lock()
			cleared := x.r.cleared
			x.r.mu.Unlock()
			for n := range entries {
				if !cleared {
					members = append(members, log+"/Entries/"+strconv.Itoa(n+1))
				}
			}
			answer := x.collection("LogEntryCollection", "Entries", members...)
			// Entries come whole, as the standard wants it.
			for _, member := range answer.body["Members"].([]object) {
				if i := slices.Index(members, member["@odata.id"].(string)); i >= 0 {
					maps.Copy(member, entry(i+1))
				}
			}
			return answer
		})
		table["GET "+log+"/Entries/{id}"] = here(func(x *exchange) reply {
			n, err := strconv.Atoi(x.req.PathValue("id"))
			x.r.mu.Lock()
			defer x.r.mu.Unlock()
			if err != nil || n < 1 || n > len(entries) || x.r.cleared {
				return missing()
			}
			return ok(entry(n))
		})
		table["POST "+log+"/Actions/LogService.ClearLog"] = here(func(x *exchange) reply {
			x.r.mu.Lock()
			x.r.cleared = true
			x.r.mu.Unlock()
			x.r.note("log cleared")
			return done()
		})
	}
	return table
}
