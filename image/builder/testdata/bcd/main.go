// Command bcd stands in for the agent in tests of the image: it says how it
// was started and what it finds, and counts its starts on the data partition.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	// Before it says that it is up: from then on it may be asked to end.
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	fmt.Printf("stand-in: args %q\n", os.Args[1:])
	for i, a := range os.Args {
		if a != "--state" || i+1 >= len(os.Args) || os.Args[i+1] == "" {
			continue
		}
		path := filepath.Join(os.Args[i+1], "count")
		n := 0
		if data, err := os.ReadFile(path); err == nil {
			n, _ = strconv.Atoi(strings.TrimSpace(string(data)))
		}
		fmt.Printf("stand-in: start %d on this disk: %v\n", n+1, os.WriteFile(path, []byte(strconv.Itoa(n+1)), 0o600))
	}
	for _, p := range []string{"/run/bc/site.toml", "/run/bc/problems", "/run/bc/network.json", "/etc/resolv.conf", "/usr/lib/bcx/pins", "/etc/bcd/join", "/etc/bc/boot.json"} {
		if data, err := os.ReadFile(p); err == nil {
			fmt.Printf("stand-in: %s: %q\n", p, data)
		}
	}
	if screen, err := os.ReadFile("/dev/vcs1"); err == nil {
		fmt.Printf("stand-in: the screen shows the boot: %v\n", strings.Contains(string(screen), "bc-init: network: ok"))
	}
	if st, err := os.Stat("/"); err == nil {
		fmt.Printf("stand-in: root folder %v\n", st.Mode())
	}
	if host, err := os.Hostname(); err == nil {
		fmt.Printf("stand-in: host name %s\n", host)
	}
	for _, argv := range [][]string{{"/usr/bin/ipmitool", "-V"}, {"/bin/find", "/usr/share/bc/netboot"}} {
		if _, err := os.Stat(argv[0]); err == nil {
			out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
			fmt.Printf("stand-in: %s: %q, %v\n", argv[0], out, err)
		}
	}
	fmt.Printf("stand-in: up\n")
	if cmdline, err := os.ReadFile("/proc/cmdline"); err == nil && strings.Contains(string(cmdline), "test.crash") {
		time.Sleep(time.Second)
		os.Exit(7)
	}
	<-stop
	fmt.Printf("stand-in: asked to end\n")
}
