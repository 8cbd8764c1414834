// Command foreign is built for another architecture's system calls than the
// box's. It ends with code 42 where these are let through.
package main

import "os"

func main() { os.Exit(42) }
