package external

import (
	"bytes"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/plugins/bcx"
)

// endLeft kills what a plugin started and its killed host left behind: the
// processes whose environment still names the plugin's socket folder, which no
// other run ever had. It answers how many there were.
func endLeft(dir string) (n int) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0
	}
	variable := []byte("\x00" + bcx.SocketDirVariable + "=" + dir + "\x00")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		// Opened before the process is looked at, so that the signal cannot reach
		// another one that got its number.
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue
		}
		environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if err == nil && bytes.Contains(append([]byte{0}, environ...), variable) && unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0) == nil {
			n++
		}
		unix.Close(fd)
	}
	return n
}
