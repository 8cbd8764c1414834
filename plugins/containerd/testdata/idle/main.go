// Command idle waits until it is told to end, or ends as its argument says.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"
)

func main() {
	fmt.Println("idle", os.Getenv("GREETING"), os.Args[1:])
	if len(os.Args) > 1 {
		code, err := strconv.Atoi(os.Args[1])
		if err != nil {
			code = 9
		}
		os.Exit(code)
	}
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGTERM)
	<-c
}
