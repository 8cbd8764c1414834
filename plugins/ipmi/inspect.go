package ipmi

import (
	"errors"
	"strconv"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// Inspect reads FRU 0 and the power, which must succeed, and the BMC's facts,
// its network and the sensors, which are left out where they fail.
func (m *machine) Inspect(ctx *driver.Context) (metal.Inspection, error) {
	in := metal.Inspection{Source: "ipmi"}
	ctx.Emit(driver.Progress{Phase: "inspect", Message: "reading FRU", Total: 5})
	// A bare `fru print` walks the sensor repository, and erases an empty one.
	out, err := m.tool.run(ctx, patient, "fru", "print", "0")
	if err != nil {
		return in, err
	}
	fru := fields(out)
	if !isFRU(fru) {
		return in, errs.Retry(errs.BmcError, "ipmitool read no FRU: %s", m.tool.firstLine(out))
	}
	fillFRU(&in, fru)
	ctx.Emit(driver.Progress{Phase: "inspect", Message: "reading power", Done: 1, Total: 5})
	if in.Power, err = m.GetPower(ctx); err != nil {
		return in, err
	}
	bmc := &metal.BMC{}
	for i, part := range []struct {
		name string
		read func() error
	}{
		{"BMC", func() error {
			out, err := m.tool.run(ctx, patient, "mc", "info")
			if err == nil {
				fillBMC(bmc, fields(out))
			}
			return err
		}},
		{"BMC's network", func() error {
			out, err := m.tool.run(ctx, patient, "lan", "print")
			if err == nil {
				fillLAN(bmc, fields(out))
			}
			return err
		}},
		{"sensors", func() (err error) {
			in.Sensors, err = m.sensors(ctx)
			return err
		}},
	} {
		ctx.Emit(driver.Progress{Phase: "inspect", Message: "reading " + part.name, Done: uint64(i + 2), Total: 5})
		if err := part.read(); err != nil {
			if ctx.Err() != nil {
				return in, ctx.Err()
			}
			ctx.Log.Warn("part of the inspection left out", "part", part.name, "reason", err.Error())
		}
	}
	if *bmc != (metal.BMC{}) {
		in.BMC = bmc
	}
	return in, nil
}

// sensors lists the sensors of a repository that has some: listing an empty one
// makes ipmitool erase it.
func (m *machine) sensors(ctx *driver.Context) ([]metal.Sensor, error) {
	out, err := m.tool.run(ctx, patient, "sdr", "info")
	if err != nil {
		return nil, err
	}
	n, err := strconv.Atoi(fields(out)["Record Count"])
	if err != nil {
		return nil, errs.New(errs.BmcError, "the number of sensor records cannot be read")
	}
	if n == 0 {
		return nil, nil
	}
	if out, err = m.tool.run(ctx, patient, "sdr", "list"); err != nil {
		return nil, err
	}
	return parseSensors(out)
}

// fields reads lines of "name : value"; the first value of a name stays.
func fields(out string) map[string]string {
	m := map[string]string{}
	for l := range strings.Lines(out) {
		name, value, ok := strings.Cut(l, ":")
		name, value = strings.TrimSpace(name), strings.TrimSpace(value)
		if _, seen := m[name]; ok && !seen && name != "" {
			m[name] = strings.ToValidUTF8(value, "?")
		}
	}
	return m
}

// isFRU reports whether some area of a FRU was read: ipmitool's exit code is 0
// where there is none.
func isFRU(f map[string]string) bool {
	for name := range f {
		for _, area := range []string{"Chassis ", "Board ", "Product "} {
			if strings.HasPrefix(name, area) {
				return true
			}
		}
	}
	return false
}

func fillFRU(in *metal.Inspection, f map[string]string) {
	in.Manufacturer = f["Product Manufacturer"]
	in.Model = f["Product Name"]
	in.Serial = f["Product Serial"]
	in.AssetTag = f["Product Asset Tag"]
	board := metal.Board{
		Manufacturer: f["Board Mfg"], Product: f["Board Product"],
		Serial: f["Board Serial"], PartNumber: f["Board Part Number"],
	}
	if board != (metal.Board{}) {
		in.Board = &board
	}
}

func fillBMC(b *metal.BMC, f map[string]string) {
	b.Manufacturer = f["Manufacturer Name"]
	if b.Manufacturer == "" || strings.HasPrefix(b.Manufacturer, "Unknown") {
		b.Manufacturer = f["Manufacturer ID"]
	}
	b.Firmware = f["Firmware Revision"]
	b.Version = f["IPMI Version"]
}

func fillLAN(b *metal.BMC, f map[string]string) {
	if mac := strings.ToLower(f["MAC Address"]); mac != "00:00:00:00:00:00" {
		b.MAC = mac
	}
	if address := f["IP Address"]; address != "0.0.0.0" {
		b.Address = address
	}
}

// maxSensors bounds an answer: no machine has as many.
const maxSensors = 2048

// parseSensors reads lines of "name | reading | status".
func parseSensors(out string) ([]metal.Sensor, error) {
	var list []metal.Sensor
	for l := range strings.Lines(out) {
		parts := strings.Split(l, "|")
		if len(parts) != 3 {
			continue
		}
		for i := range parts {
			parts[i] = strings.ToValidUTF8(strings.TrimSpace(parts[i]), "?")
		}
		if parts[0] == "" {
			continue
		}
		s := metal.Sensor{Name: parts[0], Status: parts[2]}
		number, unit, _ := strings.Cut(parts[1], " ")
		if v, err := strconv.ParseFloat(number, 64); err == nil && v-v == 0 {
			s.Value, s.Unit = &v, unit
		}
		if list = append(list, s); len(list) > maxSensors {
			return nil, errors.New("more sensors than any machine has")
		}
	}
	return list, nil
}
