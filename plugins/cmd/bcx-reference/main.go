// Command bcx-reference is a plugin with the driver that the conformance suite
// knows, on the Go SDK.
package main

import (
	"fmt"
	"os"

	"github.com/better-compute/site-appliance/plugins/conformance/reference"
	"github.com/better-compute/site-appliance/plugins/sdk"
)

// version is set by the linker.
var version = "dev"

func main() {
	d, err := reference.Driver()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bcx-reference:", err)
		os.Exit(1)
	}
	os.Exit(sdk.Main(sdk.Options{PluginVersion: version}, d))
}
