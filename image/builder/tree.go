package builder

import (
	"context"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/better-compute/site-appliance/initramfs/archive"
)

// tree is what all roles have: init, the agent, modules, commands, programs.
func (b *build) tree(ctx context.Context, role string) (*archive.Tree, error) {
	t := archive.New()
	for _, d := range []string{"dev", "proc", "sys", "run", "data", "config", "etc/bc", "root", "usr/lib/bcx", "var"} {
		t.Dir(d, 0o755)
	}
	t.Dir("root", 0o700)
	t.Dir("tmp", 0o777|fs.ModeSticky)
	t.Device("dev/console", 0o600, 5, 1)
	t.Device("dev/null", 0o666, 1, 3)
	if err := t.Copy("init", b.bin["init"], 0o755); err != nil {
		return nil, err
	}
	t.Link("sbin/modprobe", "/init")
	t.Link("bin/bc-net", "/init")
	t.Link("var/run", "/run")
	if err := t.Copy("bin/bcd", b.bin["bcd"], 0o755); err != nil {
		return nil, err
	}
	t.File("etc/bc/role", []byte(role+"\n"), 0o644)
	t.File("etc/bc/version", []byte(b.Version+"\n"), 0o644)
	t.File("etc/bc/modules", []byte(strings.Join(b.board.Modules.Load, "\n")+"\n"), 0o644)
	if !b.Release {
		// init gives a shell for bc.rescue only where this file is.
		t.File("etc/bc/rescue", []byte("bc.rescue on the kernel's command line gives a shell.\n"), 0o644)
	}
	t.File("etc/os-release", []byte(osRelease(role, b.Version)), 0o644)
	t.File("etc/passwd", []byte("root:x:0:0:root:/root:/bin/gosh\nnobody:x:65534:65534:nobody:/:/bin/false\n"), 0o644)
	t.File("etc/group", []byte("root:x:0:\ntty:x:5:\nnogroup:x:65534:\n"), 0o644)
	t.File("etc/hosts", []byte("127.0.0.1 localhost\n::1 localhost\n"), 0o644)
	t.File("etc/nsswitch.conf", []byte("hosts: files dns\n"), 0o644)
	if err := b.addCommands(t); err != nil {
		return nil, err
	}
	for _, p := range b.board.Programs.Of(role) {
		if err := b.addProgram(t, p); err != nil {
			return nil, err
		}
	}
	for _, f := range b.board.Files.Of(role) {
		if err := t.Copy(f, f, 0o644); err != nil {
			return nil, err
		}
		b.source(f)
	}
	mods := filepath.Join(b.work, "modules-"+role)
	names := append(append([]string{}, b.board.Modules.Load...), b.board.Modules.Common...)
	unknown, err := b.kernel.subset(ctx, mods, append(names, b.board.Modules.Of(role)...))
	if err != nil {
		return nil, err
	}
	if len(unknown) > 0 && b.lenient {
		b.Log.Warn("NOTICE: the kernel has no such modules", "kernel", b.kernel.release, "modules", strings.Join(unknown, " "))
	} else if len(unknown) > 0 {
		return nil, fmt.Errorf("kernel %s has no modules %s", b.kernel.release, strings.Join(unknown, ", "))
	}
	if err := t.CopyDir("lib", filepath.Join(mods, "lib")); err != nil {
		return nil, fmt.Errorf("add modules: %w", err)
	}
	return t, nil
}
