package metal

import (
	"encoding/json"
	"net"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// BootPlan says what a machine's next boot from the network finds.
type BootPlan struct {
	// MACs are the machine's, lower-case with colons.
	MACs []string `json:"macs"`
	// Purpose is inspect or deploy.
	Purpose string `json:"purpose"`
}

// BootTarget is what clear is about.
type BootTarget struct {
	MACs []string `json:"macs"`
}

// Boot is the kind "boot". Preparing what is prepared and clearing what is
// clear change nothing.
type Boot interface {
	Prepare(*driver.Context, BootPlan) error
	// Clear leaves the machine to its own disk.
	Clear(*driver.Context, BootTarget) error
}

// BootKind is boot {prepare, clear}.
func BootKind() driver.Kind[Boot] {
	return driver.Kind[Boot]{
		Name: "boot",
		Operations: map[string]driver.Operation[Boot]{
			"prepare": driver.Set(ParseBootPlan, Boot.Prepare),
			"clear":   driver.Set(ParseBootTarget, Boot.Clear),
		},
		Proxy: func(i *driver.Implementation) Boot { return bootProxy{i} },
	}
}

// ParseBootPlan reads prepare's argument, {macs, purpose}.
func ParseBootPlan(raw json.RawMessage) (BootPlan, error) {
	var b BootPlan
	if err := strict(raw, &b, "boot plan", "macs", "purpose"); err != nil {
		return b, err
	}
	if b.Purpose != "inspect" && b.Purpose != "deploy" {
		return b, errs.New(errs.InvalidArgs, "boot plan: purpose %.40q: want inspect or deploy", b.Purpose)
	}
	return b, checkMACs("boot plan", b.MACs)
}

// ParseBootTarget reads clear's argument, {macs}.
func ParseBootTarget(raw json.RawMessage) (BootTarget, error) {
	var b BootTarget
	if err := strict(raw, &b, "boot target", "macs"); err != nil {
		return b, err
	}
	return b, checkMACs("boot target", b.MACs)
}

func checkMACs(what string, macs []string) error {
	if len(macs) == 0 || len(macs) > 32 {
		return errs.New(errs.InvalidArgs, "%s: %d macs: want 1 to 32", what, len(macs))
	}
	seen := map[string]bool{}
	for _, text := range macs {
		mac, err := net.ParseMAC(text)
		switch {
		case err != nil || len(mac) != 6 || mac.String() != text:
			return errs.New(errs.InvalidArgs, "%s: mac %.40q: want 6 bytes in lower-case hex with colons", what, text)
		case seen[text]:
			return errs.New(errs.InvalidArgs, "%s: mac %s is listed twice", what, text)
		}
		seen[text] = true
	}
	return nil
}

type bootProxy struct{ i *driver.Implementation }

func (p bootProxy) Prepare(ctx *driver.Context, b BootPlan) error { return do(p.i, ctx, "prepare", b) }
func (p bootProxy) Clear(ctx *driver.Context, b BootTarget) error { return do(p.i, ctx, "clear", b) }
