package drivertest_test

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
	"github.com/better-compute/site-appliance/plugins/driver/schema"
)

// siren is a kind of this test's own.
type siren interface {
	Sound(*driver.Context) (string, error)
}

func sirenKind() driver.Kind[siren] {
	return driver.Kind[siren]{Name: "siren", Operations: map[string]driver.Operation[siren]{"sound": driver.Get(siren.Sound)}}
}

// config is what the driver's configuration decodes into.
type config struct {
	Address     string        `json:"address"`
	Credentials driver.Ref    `json:"credentials"`
	Timeout     time.Duration `json:"timeout"`
}

// box implements siren for one call.
type box struct{ config config }

func (b box) Sound(ctx *driver.Context) (string, error) {
	key, err := ctx.Secrets.Resolve(ctx, b.config.Credentials)
	if err != nil {
		return "", err
	}
	ctx.Emit(driver.Progress{Phase: "sound", Message: "asking " + b.config.Address, Done: 1, Total: 1})
	return fmt.Sprintf("loud, with a key of %d bytes, for %s", len(key.Reveal()), b.config.Timeout), nil
}

func declare() (*driver.Definition, error) {
	manifest, err := schema.New(schema.Fields{
		"address":     schema.URL(),
		"credentials": schema.Secret(),
		"timeout":     schema.Duration().Default("30s"),
	})
	if err != nil {
		return nil, err
	}
	return driver.Define(driver.Spec[config]{
		ID: "acme-siren", Version: "1.0.0", RunsOn: "site", Config: manifest,
	}, driver.Implement(sirenKind(), func(c config, _ *driver.Context) (siren, error) { return box{c}, nil }))
}

// A driver is tested in process: its implementation is called with a context
// that the test builds.
func ExampleContext() {
	d, err := declare()
	if err != nil {
		fmt.Println(err)
		return
	}
	// A test passes its own t and t.Context().
	ctx, recorder := drivertest.Context(nil, context.Background(), map[string]string{"secret://root/siren": "swordfish"})
	s, err := driver.Use(d, sirenKind(), json.RawMessage(`{"address":"https://10.0.0.9","credentials":"secret://root/siren"}`), ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(s.Sound(ctx))
	fmt.Println(recorder.Progress())
	// Output:
	// loud, with a key of 9 bytes, for 30s <nil>
	// [{sound asking https://10.0.0.9 1 1}]
}
