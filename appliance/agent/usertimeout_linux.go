package agent

import (
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// setUserTimeout lets the kernel give up on unacknowledged data after d. It is
// best effort: heartbeats find a dead line too.
func setUserTimeout(c net.Conn, d time.Duration) {
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return
	}
	raw.Control(func(fd uintptr) {
		unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.Milliseconds()))
	})
}
