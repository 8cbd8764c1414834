package external_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/external"
)

// A plugin in JavaScript, pinned to its bundled script, and one call of it.
func Example() {
	ctx := context.Background()
	command := []string{"/usr/bin/node", "dist/acme-bmc-plugin.js"}
	file, err := external.PinnedFile(command)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	pin, err := external.SHA256File(file)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	acme := external.New(external.Options{Command: command, SHA256: pin})
	defer acme.Close()
	drivers, err := acme.Start(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	config := json.RawMessage(`{"address":"https://10.0.0.10","credentials":"secret://root/bmc"}`)
	power, err := drivers[0].Implementation("power", config, driver.NewContext(ctx, nil, nil, nil))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	fmt.Println(power.Call("getPower").Await())
}
