package metal

import (
	"encoding/json"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// Volume is one logical disk.
type Volume struct {
	Name string `json:"name"`
	// Level is 0, 1, 5, 6, 10, 50 or 60.
	Level string `json:"level"`
	// Drives are the serial numbers or slots of its drives, as inspect names them.
	Drives []string `json:"drives"`
	// Controller is needed only where a machine has several.
	Controller string `json:"controller,omitempty"`
	// SizeBytes 0 takes all there is.
	SizeBytes uint64 `json:"sizeBytes,omitempty"`
}

// Layout is all volumes of a machine.
type Layout struct {
	Volumes []Volume `json:"volumes"`
}

// RAID is the kind "raid".
type RAID interface {
	GetLayout(*driver.Context) (Layout, error)
	// ApplyLayout makes the volumes exactly these: one that is not listed is deleted.
	ApplyLayout(*driver.Context, Layout) (Applied, error)
}

// RAIDKind is raid {getLayout, applyLayout}.
func RAIDKind() driver.Kind[RAID] {
	return driver.Kind[RAID]{
		Name: "raid",
		Operations: map[string]driver.Operation[RAID]{
			"getLayout": driver.Get(func(r RAID, ctx *driver.Context) (Layout, error) {
				l, err := r.GetLayout(ctx)
				l.Volumes = some(l.Volumes)
				return l, err
			}),
			"applyLayout": driver.Ask(ParseLayout, RAID.ApplyLayout),
		},
		Proxy: func(i *driver.Implementation) RAID { return raidProxy{i} },
	}
}

// leastDrives is what each level needs at least.
var leastDrives = map[string]int{"0": 1, "1": 2, "5": 3, "6": 4, "10": 4, "50": 6, "60": 8}

// ParseLayout reads applyLayout's argument. Volumes must be given, if only as an
// empty list: deleting every volume is nothing to do by a slip of the pen.
func ParseLayout(raw json.RawMessage) (Layout, error) {
	var in struct {
		Volumes *[]Volume `json:"volumes"`
	}
	if err := strict(raw, &in, "layout", "volumes"); err != nil {
		return Layout{}, err
	}
	if in.Volumes == nil || len(*in.Volumes) > 64 {
		return Layout{}, errs.New(errs.InvalidArgs, "layout: volumes: want a list of at most 64")
	}
	names, owner := map[string]bool{}, map[string]string{}
	for _, v := range *in.Volumes {
		if err := checkName("volume's name", v.Name, 64); err != nil {
			return Layout{}, err
		}
		least, known := leastDrives[v.Level]
		switch {
		case names[v.Name]:
			return Layout{}, errs.New(errs.InvalidArgs, "volume %q is listed twice", v.Name)
		case !known:
			return Layout{}, errs.New(errs.InvalidArgs, "volume %q: level %.40q: want 0, 1, 5, 6, 10, 50 or 60", v.Name, v.Level)
		case len(v.Drives) < least || len(v.Drives) > 256:
			return Layout{}, errs.New(errs.InvalidArgs, "volume %q: %d drives: level %s wants %d to 256", v.Name, len(v.Drives), v.Level, least)
		case (v.Level == "10" || v.Level == "50" || v.Level == "60") && len(v.Drives)%2 != 0:
			return Layout{}, errs.New(errs.InvalidArgs, "volume %q: %d drives: level %s wants an even number", v.Name, len(v.Drives), v.Level)
		}
		names[v.Name] = true
		for _, d := range v.Drives {
			if err := checkName("drive's name", d, 128); err != nil {
				return Layout{}, err
			}
			// Two volumes with sizes of their own can share their drives.
			if o, taken := owner[d]; taken && (o == v.Name || v.SizeBytes == 0) {
				return Layout{}, errs.New(errs.InvalidArgs, "volume %q: drive %q is taken by %q", v.Name, d, o)
			}
			owner[d] = v.Name
		}
	}
	return Layout{Volumes: *in.Volumes}, nil
}

type raidProxy struct{ i *driver.Implementation }

func (p raidProxy) GetLayout(ctx *driver.Context) (Layout, error) {
	return ask[Layout](p.i, ctx, "getLayout")
}

func (p raidProxy) ApplyLayout(ctx *driver.Context, l Layout) (Applied, error) {
	l.Volumes = some(l.Volumes)
	return ask[Applied](p.i, ctx, "applyLayout", l)
}
