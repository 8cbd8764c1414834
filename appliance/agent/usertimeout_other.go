//go:build !linux

package agent

import (
	"net"
	"time"
)

func setUserTimeout(net.Conn, time.Duration) {}
