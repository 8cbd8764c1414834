package builder

import (
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/u-root/gobusybox/src/pkg/bb"
	"github.com/u-root/gobusybox/src/pkg/golang"
	"github.com/u-root/uio/ulog"

	"github.com/better-compute/site-appliance/image/manifest"
	"github.com/better-compute/site-appliance/initramfs/archive"
)

// ldflags give every program its version and time, and nothing of this machine.
func (b *build) ldflags() string {
	return fmt.Sprintf("-s -w -buildid= -X main.version=%s -X main.buildTime=%d", b.Version, b.Built.Unix())
}

// buildPrograms compiles init, the agent, the plugins and u-root's commands.
func (b *build) buildPrograms(ctx context.Context) error {
	packages := append([]string{InitPackage, b.Agent}, b.Plugins...)
	for i, pkg := range packages {
		name := path.Base(pkg)
		switch i {
		case 0:
			name = "init"
		case 1:
			name = "bcd"
		}
		out := filepath.Join(b.work, name)
		cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags", b.ldflags(), "-o", out, pkg)
		cmd.Dir = b.Root
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+b.board.Arch)
		if msg, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("go build %s: %w: %s", pkg, err, strings.TrimSpace(string(msg)))
		}
		st, err := os.Stat(out)
		if err != nil {
			return fmt.Errorf("go build %s: %w", pkg, err)
		}
		b.bin[name] = out
		b.m.Parts[name] = st.Size()
	}
	return b.buildCommands(ctx)
}

const shellTag = "goshsmall"

const urootModule = "github.com/u-root/u-root"

// buildCommands makes one program of u-root's commands, by u-root's own
// builder. That takes a while and rarely changes: it is cached by what goes in.
func (b *build) buildCommands(ctx context.Context) error {
	if len(b.board.Commands.URoot) == 0 {
		return nil
	}
	out, err := command(ctx, b.Root, "go", "list", "-m", "-f", "{{.Version}} {{.Dir}}", urootModule)
	if err != nil {
		return err
	}
	version, dir, ok := strings.Cut(strings.TrimSpace(out), " ")
	if !ok || dir == "" {
		if _, err := command(ctx, b.Root, "go", "mod", "download", urootModule); err != nil {
			return err
		}
		if out, err = command(ctx, b.Root, "go", "list", "-m", "-f", "{{.Version}} {{.Dir}}", urootModule); err != nil {
			return err
		}
		if version, dir, ok = strings.Cut(strings.TrimSpace(out), " "); !ok || dir == "" {
			return fmt.Errorf("module %s has no folder", urootModule)
		}
	}
	goVersion, err := command(ctx, b.Root, "go", "env", "GOVERSION")
	if err != nil {
		return err
	}
	commands := slices.Sorted(slices.Values(b.board.Commands.URoot))
	key := sha256.Sum256([]byte(strings.Join([]string{version, strings.TrimSpace(goVersion), b.board.Arch, shellTag, strings.Join(commands, " ")}, "\n")))
	b.busybox = filepath.Join(b.Cache, "commands-"+hex.EncodeToString(key[:8]))
	if st, err := os.Stat(b.busybox); err == nil {
		b.m.Parts["u-root commands"] = st.Size()
		return nil
	}
	b.Log.Info("building u-root's commands, once", "version", version)
	var paths []string
	for _, c := range commands {
		paths = append(paths, filepath.Join(dir, "cmds", "core", c))
	}
	// A program built with -trimpath does not know where Go lies.
	goroot, err := command(ctx, b.Root, "go", "env", "GOROOT")
	if err != nil {
		return err
	}
	// u-root's own module knows the versions of what its commands use.
	// gosh's line editor asks the terminal questions that a serial line may not
	// answer: the simple one works everywhere.
	env := golang.Default(golang.WithBuildTag(shellTag), golang.DisableCGO(), golang.WithGOOS("linux"), golang.WithGOARCH(b.board.Arch), golang.WithWorkingDir(dir), golang.WithGOROOT(strings.TrimSpace(goroot)))
	tmp := filepath.Join(b.work, "commands")
	err = bb.BuildBusybox(ulog.Null, &bb.Opts{
		Env:          env,
		GenSrcDir:    filepath.Join(b.work, "commands-src"),
		CommandPaths: paths,
		BinaryPath:   tmp,
		GoBuildOpts:  &golang.BuildOpts{ExtraArgs: []string{"-trimpath", "-buildvcs=false", "-ldflags=-s -w -buildid="}},
	})
	if err != nil {
		return fmt.Errorf("build u-root's commands: %w", err)
	}
	st, err := os.Stat(tmp)
	if err != nil {
		return fmt.Errorf("build u-root's commands: %w", err)
	}
	b.m.Parts["u-root commands"] = st.Size()
	if err := os.Rename(tmp, b.busybox); err != nil {
		return fmt.Errorf("keep u-root's commands: %w", err)
	}
	return nil
}

// addCommands puts u-root's commands into /bin.
func (b *build) addCommands(tree *archive.Tree) error {
	if len(b.board.Commands.URoot) == 0 {
		return nil
	}
	if err := tree.Copy("bin/bb", b.busybox, 0o755); err != nil {
		return err
	}
	for _, c := range b.board.Commands.URoot {
		if name := "bin/" + c; !tree.Has(name) {
			tree.Link(name, "bb")
		}
	}
	return nil
}

// libraryDirs are searched as the dynamic linker does.
func libraryDirs(arch string) []string {
	triplet := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[arch]
	return []string{"/lib/" + triplet, "/usr/lib/" + triplet, "/lib", "/usr/lib", "/lib64"}
}

// addProgram adds a program of the build machine at its usual path, with its
// interpreter and every library that it and they need.
func (b *build) addProgram(tree *archive.Tree, file string) error {
	if tree.Has(file) {
		return nil
	}
	f, err := elf.Open(file)
	if err != nil {
		return fmt.Errorf("add program %s: %w", file, err)
	}
	defer f.Close()
	if err := tree.Copy(file, file, 0o755); err != nil {
		return err
	}
	b.source(file)
	if s := f.Section(".interp"); s != nil {
		data, err := s.Data()
		if err != nil {
			return fmt.Errorf("add program %s: %w", file, err)
		}
		interp := strings.TrimRight(string(data), "\x00")
		if !tree.Has(interp) {
			if err := tree.Copy(interp, interp, 0o755); err != nil {
				return err
			}
			b.source(interp)
		}
	}
	needed, err := f.ImportedLibraries()
	if err != nil {
		return fmt.Errorf("add program %s: %w", file, err)
	}
	for _, lib := range needed {
		found := ""
		for _, dir := range libraryDirs(b.board.Arch) {
			if _, err := os.Stat(filepath.Join(dir, lib)); err == nil {
				found = filepath.Join(dir, lib)
				break
			}
		}
		if found == "" {
			return fmt.Errorf("add program %s: library %s is nowhere", file, lib)
		}
		if err := b.addProgram(tree, found); err != nil {
			return err
		}
	}
	return nil
}

// source notes the Debian package that a file of the build machine is from.
func (b *build) source(file string) {
	candidates := []string{file}
	if real, err := filepath.EvalSymlinks(file); err == nil {
		candidates = append(candidates, real, strings.TrimPrefix(real, "/usr"))
	}
	for _, c := range candidates {
		out, err := exec.Command("dpkg-query", "-S", c).Output()
		if err != nil {
			continue
		}
		name, _, ok := strings.Cut(string(out), ": ")
		if !ok || strings.Contains(name, ",") {
			continue
		}
		base, _, _ := strings.Cut(name, ":")
		for _, p := range b.m.Packages {
			if p.Name == base {
				return
			}
		}
		version, err := exec.Command("dpkg-query", "-W", "-f", "${Version}", name).Output()
		if err != nil {
			continue
		}
		b.m.Packages = append(b.m.Packages, manifest.Package{Name: base, Version: string(version)})
		return
	}
	b.Log.Warn("no package owns a file that goes into the image", "file", file)
}

// addPlugins puts the plugins and their pins where bcd looks.
func (b *build) addPlugins(tree *archive.Tree) error {
	pins := "# SHA-256 of each plugin that this image carries.\n"
	for _, pkg := range b.Plugins {
		name := path.Base(pkg)
		data, err := os.ReadFile(b.bin[name])
		if err != nil {
			return fmt.Errorf("add plugin: %w", err)
		}
		tree.File("usr/lib/bcx/"+name, data, 0o755)
		pins += fmt.Sprintf("%x  %s\n", sha256.Sum256(data), name)
	}
	tree.File("usr/lib/bcx/pins", []byte(pins), 0o644)
	return nil
}
