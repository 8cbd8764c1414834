package metal

import "github.com/better-compute/site-appliance/plugins/driver"

// Inspector is the kind "inspect".
type Inspector interface {
	Inspect(*driver.Context) (Inspection, error)
}

// InspectKind is inspect {inspect}.
func InspectKind() driver.Kind[Inspector] {
	return driver.Kind[Inspector]{
		Name: "inspect",
		Operations: map[string]driver.Operation[Inspector]{"inspect": driver.Get(func(i Inspector, ctx *driver.Context) (Inspection, error) {
			in, err := i.Inspect(ctx)
			return legible(in), err
		})},
		Proxy: func(i *driver.Implementation) Inspector { return inspectProxy{i} },
	}
}

type inspectProxy struct{ i *driver.Implementation }

func (p inspectProxy) Inspect(ctx *driver.Context) (Inspection, error) {
	return ask[Inspection](p.i, ctx, "inspect")
}
