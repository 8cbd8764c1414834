package console

import "golang.org/x/sys/unix"

const noCTTY = unix.O_NOCTTY
