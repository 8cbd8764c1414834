// A driver of a kind that only this program knows.
package main

import (
	"encoding/json"
	"os"
	"sync"

	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/schema"
	"github.com/better-compute/site-appliance/plugins/sdk"
)

// Cooling is the kind "acme-cooling": a fan curve, in percent of full speed.
type Cooling interface {
	GetFanCurve(*driver.Context) ([]int, error)
	SetFanCurve(*driver.Context, []int) error
}

func coolingKind() driver.Kind[Cooling] {
	return driver.Kind[Cooling]{Name: "acme-cooling", Operations: map[string]driver.Operation[Cooling]{
		"getFanCurve": driver.Get(Cooling.GetFanCurve),
		"setFanCurve": driver.Set(parseCurve, Cooling.SetFanCurve),
	}}
}

func parseCurve(raw json.RawMessage) ([]int, error) {
	var curve []int
	if json.Unmarshal(raw, &curve) != nil || len(curve) == 0 {
		return nil, &driver.DriverError{Code: "bad-curve", Message: "want a list of whole numbers"}
	}
	return curve, nil
}

type config struct {
	Most int        `json:"most"`
	Key  driver.Ref `json:"key"`
}

// fans are the hardware.
type fans struct {
	mu    sync.Mutex
	curve []int
}

// call is the hardware, for one configuration.
type call struct {
	fans   *fans
	config config
}

func (c call) GetFanCurve(*driver.Context) ([]int, error) {
	c.fans.mu.Lock()
	defer c.fans.mu.Unlock()
	return c.fans.curve, nil
}

func (c call) SetFanCurve(ctx *driver.Context, curve []int) error {
	if _, err := ctx.Secrets.Resolve(ctx, c.config.Key); err != nil {
		return err
	}
	for _, speed := range curve {
		if speed > c.config.Most {
			return &driver.DriverError{Code: "too-fast", Message: "the fans would break"}
		}
	}
	ctx.Emit(driver.Progress{Phase: "fans", Message: "setting the curve", Done: 1, Total: 1})
	c.fans.mu.Lock()
	defer c.fans.mu.Unlock()
	c.fans.curve = curve
	return nil
}

func run() int {
	manifest, err := schema.New(schema.Fields{"most": schema.Int().Min(1).Max(100).Default(80), "key": schema.Secret()})
	if err != nil {
		panic(err)
	}
	hardware := &fans{curve: []int{20, 40}}
	d, err := driver.Define(driver.Spec[config]{
		ID: "acme-fans", Version: "1.0.0", RunsOn: "site", Config: manifest, RetrySafe: []string{"acme-cooling.getFanCurve"},
	}, driver.Implement(coolingKind(), func(c config, _ *driver.Context) (Cooling, error) { return call{hardware, c}, nil }))
	if err != nil {
		panic(err)
	}
	return sdk.Main(sdk.Options{PluginVersion: "1.0.0"}, d)
}

func main() { os.Exit(run()) }
