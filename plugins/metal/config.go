package metal

import (
	"encoding/json"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// Configurator is the kind "config": it brings a running system's own
// configuration, such as a GPU's, to what is wanted. What that holds is the
// driver's.
type Configurator interface {
	ApplyConfig(*driver.Context, json.RawMessage) (Applied, error)
}

// ConfigGetter is config's optional get.
type ConfigGetter interface {
	GetConfig(*driver.Context) (json.RawMessage, error)
}

// ConfigKind is config {apply; get}.
func ConfigKind() driver.Kind[Configurator] {
	return driver.Kind[Configurator]{
		Name: "config",
		Operations: map[string]driver.Operation[Configurator]{
			"apply": driver.Ask(ParseWanted, Configurator.ApplyConfig),
			"get":   driver.Optional[Configurator](driver.Get(ConfigGetter.GetConfig)),
		},
		Proxy: func(i *driver.Implementation) Configurator { return configProxy{i} },
	}
}

// ParseWanted reads apply's argument: any object.
func ParseWanted(raw json.RawMessage) (json.RawMessage, error) {
	var object map[string]json.RawMessage
	if json.Unmarshal(raw, &object) != nil || object == nil {
		return nil, errs.New(errs.InvalidArgs, "configuration: want an object")
	}
	return raw, nil
}

type configProxy struct{ i *driver.Implementation }

func (p configProxy) ApplyConfig(ctx *driver.Context, wanted json.RawMessage) (Applied, error) {
	return ask[Applied](p.i, ctx, "apply", wanted)
}

func (p configProxy) GetConfig(ctx *driver.Context) (json.RawMessage, error) {
	return ask[json.RawMessage](p.i, ctx, "get")
}
