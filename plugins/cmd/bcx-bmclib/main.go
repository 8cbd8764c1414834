// Command bcx-bmclib is the driver plugin of bmclib's vendors: BMCs by the
// vendors' own interfaces.
package main

import (
	"os"

	"github.com/better-compute/site-appliance/plugins/bmclib"
)

// version is set by the linker.
var version = "dev"

func main() { os.Exit(bmclib.Main(version)) }
