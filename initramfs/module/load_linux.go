package module

import (
	"fmt"
	"os"

	"github.com/u-root/u-root/pkg/kmodule"
)

// Kernel is a loader for the running kernel.
func Kernel() (*Loader, error) {
	release, err := Release()
	if err != nil {
		return nil, err
	}
	index, err := Read(os.DirFS(Folder(release)))
	if err != nil {
		return nil, err
	}
	prober, err := kmodule.NewProber(kmodule.ProbeOpts{KVer: release})
	if err != nil {
		return nil, fmt.Errorf("read module dependencies: %w", err)
	}
	return NewLoader(index, func(m string) error { return prober.Probe(m, "") }), nil
}

// Modprobe is /sbin/modprobe as the kernel calls it: "-q -- NAME". The kernel
// asks for much that there is no module for, and sees only the exit code.
func Modprobe(args []string) error {
	var names []string
	for _, a := range args {
		switch a {
		case "-q", "--", "-b", "-s":
		default:
			names = append(names, a)
		}
	}
	if len(names) == 0 {
		return fmt.Errorf("usage: modprobe [-q] NAME…")
	}
	loader, err := Kernel()
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := loader.Load(n); err != nil {
			return err
		}
	}
	return nil
}
