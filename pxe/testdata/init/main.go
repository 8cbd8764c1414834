// Init is the first program of a machine that a test boots: it shows what the boot's own initrd brought.
package main

import (
	"fmt"
	"os"
	"time"
)

func main() {
	data, err := os.ReadFile("/etc/bc/boot.json")
	fmt.Printf("init: %s, %v\n", data, err)
	time.Sleep(time.Hour) // the test ends the machine
}
