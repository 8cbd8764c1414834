// Command cmd is the plugin of the benches.
package main

import (
	"fmt"
	"os"

	"github.com/better-compute/site-appliance/scripts/bench/benchplugin"
)

func main() {
	if err := benchplugin.Main(); err != nil {
		fmt.Fprintln(os.Stderr, "benchplugin:", err)
		os.Exit(1)
	}
}
