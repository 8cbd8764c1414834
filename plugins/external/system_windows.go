package external

import (
	"os"
	"syscall"
)

func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{CreationFlags: syscall.CREATE_NEW_PROCESS_GROUP}
}

// hold has no lock here: folders that a host leaves stay.
func hold(string) (*os.File, error) { return nil, nil }

func abandoned(string) (release func(), yes bool) { return nil, false }

func killGroup(p *os.Process) { _ = p.Kill() }

// terminate does nothing: there is no SIGTERM, and the closed stdin says it.
func terminate(*os.Process) {}
