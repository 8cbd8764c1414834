// Command init is the first program of every image. Under other names it is
// what the kernel calls to load modules, and the network's own process.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/better-compute/site-appliance/initramfs/module"
	"github.com/better-compute/site-appliance/initramfs/pid1"
)

// Set by the linker.
var (
	version   = "dev"
	buildTime = "0" // Unix seconds
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", filepath.Base(os.Args[0]), err)
		os.Exit(1)
	}
}

func run() error {
	switch filepath.Base(os.Args[0]) {
	case "modprobe":
		return module.Modprobe(os.Args[1:])
	case "bc-net":
		return pid1.Network(os.Args[1:])
	}
	if os.Getpid() != 1 {
		return fmt.Errorf("this is the first program of an image: it runs as process 1 only")
	}
	seconds, err := strconv.ParseInt(buildTime, 10, 64)
	if err != nil {
		seconds = 0
	}
	pid1.Run(pid1.Program{Version: version, Build: time.Unix(seconds, 0)})
	return nil
}
