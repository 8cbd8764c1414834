//go:build !amd64

package main

// There is no such call here.
const sysIopl, sysIoperm = 0, 0
