// Command bcx-containerd is the driver plugin "containerd": instances as
// containers of the node's containerd.
package main

import (
	"os"

	"github.com/better-compute/site-appliance/plugins/containerd"
)

// version is set by the linker.
var version = "dev"

func main() { os.Exit(containerd.Main(version)) }
