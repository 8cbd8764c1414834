package metal

// Inspection is what inspect answers; absent parts are left out. The BMC's own
// MAC is never a NIC.
type Inspection struct {
	// Source is who looked: ipmi, redfish or ramdisk.
	Source       string      `json:"source"`
	Manufacturer string      `json:"manufacturer,omitempty"`
	Model        string      `json:"model,omitempty"`
	Serial       string      `json:"serial,omitempty"`
	AssetTag     string      `json:"assetTag,omitempty"`
	ProductUUID  string      `json:"productUuid,omitempty"`
	Board        *Board      `json:"board,omitempty"`
	BMC          *BMC        `json:"bmc,omitempty"`
	Power        PowerState  `json:"power,omitempty"`
	Processors   []Processor `json:"processors,omitempty"`
	Memory       []Memory    `json:"memory,omitempty"`
	Drives       []Drive     `json:"drives,omitempty"`
	NICs         []NIC       `json:"nics,omitempty"`
	Firmware     []Firmware  `json:"firmware,omitempty"`
	Sensors      []Sensor    `json:"sensors,omitempty"`
}

// Board is the main board.
type Board struct {
	Manufacturer string `json:"manufacturer,omitempty"`
	Product      string `json:"product,omitempty"`
	Serial       string `json:"serial,omitempty"`
	PartNumber   string `json:"partNumber,omitempty"`
}

// BMC is the management controller. Version is that of its protocol.
type BMC struct {
	Manufacturer string `json:"manufacturer,omitempty"`
	Firmware     string `json:"firmware,omitempty"`
	Version      string `json:"version,omitempty"`
	MAC          string `json:"mac,omitempty"`
	Address      string `json:"address,omitempty"`
}

// Processor is one socket.
type Processor struct {
	Model   string `json:"model,omitempty"`
	Cores   int    `json:"cores,omitempty"`
	Threads int    `json:"threads,omitempty"`
}

// Memory is one module.
type Memory struct {
	Slot      string `json:"slot,omitempty"`
	SizeBytes uint64 `json:"size_bytes,omitempty"`
	Serial    string `json:"serial,omitempty"`
}

// Drive is one disk.
type Drive struct {
	Name      string `json:"name,omitempty"`
	Serial    string `json:"serial,omitempty"`
	SizeBytes uint64 `json:"size_bytes,omitempty"`
	Model     string `json:"model,omitempty"`
}

// NIC is one network port; Speed is in Mbit/s.
type NIC struct {
	MAC   string `json:"mac"`
	Name  string `json:"name,omitempty"`
	Speed int    `json:"speed,omitempty"`
}

// Firmware is one component's version.
type Firmware struct {
	Component string `json:"component"`
	Version   string `json:"version"`
}

// Sensor is one reading; Value is absent where the sensor has none.
type Sensor struct {
	Name   string   `json:"name"`
	Value  *float64 `json:"value,omitempty"`
	Unit   string   `json:"unit,omitempty"`
	Status string   `json:"status,omitempty"`
}
