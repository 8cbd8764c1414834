// Command bcx-ipmi is the driver plugin "ipmi": BMCs by ipmitool.
package main

import (
	"os"

	"github.com/better-compute/site-appliance/plugins/ipmi"
)

// version is set by the linker.
var version = "dev"

func main() { os.Exit(ipmi.Main(version)) }
