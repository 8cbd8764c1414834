package builder

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/better-compute/site-appliance/board"
	"github.com/better-compute/site-appliance/image/authenticode"
	"github.com/better-compute/site-appliance/image/manifest"
	"github.com/better-compute/site-appliance/initramfs/archive"
)

// addOptional adds the boot programs that the build machine has, and says which it lacks.
func (b *build) addOptional(tree *archive.Tree) error {
	secure := false
	for name, from := range b.board.NetbootOptional {
		_, err := os.Stat(from)
		if errors.Is(err, fs.ErrNotExist) {
			b.Log.Warn("NOTICE: a boot program is left out: the box will refuse the machines that need it", "name", name, "missing", from)
			continue
		}
		if err := tree.Copy(netbootDir+name, from, 0o644); err != nil {
			return err
		}
		b.source(from)
		secure = true
	}
	if !secure {
		return nil
	}
	// What Secure Boot starts goes on to no kernel that is not signed.
	if _, err := authenticode.Of(b.kernel.image); err != nil {
		return fmt.Errorf("the kernel %s for machines with Secure Boot: %w", b.kernel.release, err)
	}
	return nil
}

// alsoFiles are the names of what was made for other architectures.
func (b *build) alsoFiles() []string {
	names := slices.Sorted(maps.Keys(b.also))
	return slices.DeleteFunc(names, func(n string) bool { return !strings.HasPrefix(n, "ramdisk-") })
}

// makeAlso makes the ramdisks of other architectures. One whose packages cannot be
// had is left out, said aloud: an image is built without a line to Debian too.
func (b *build) makeAlso(ctx context.Context) error {
	b.also = map[string][]byte{}
	for _, arch := range slices.Sorted(maps.Keys(b.board.Also)) {
		made, err := b.ramdiskFor(ctx, arch, b.board.Also[arch])
		if missing := new(missingError); errors.As(err, &missing) {
			b.Log.Warn("NOTICE: the ramdisk for another architecture is left out: the box will refuse its machines", "arch", arch, "err", err)
			continue
		}
		if err != nil {
			return fmt.Errorf("%s: %w", arch, err)
		}
		for name, data := range made {
			b.also[name] = data
			if !strings.HasPrefix(name, "ramdisk-") {
				continue
			}
			to := filepath.Join(b.Out, name)
			if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
				return fmt.Errorf("make folder: %w", err)
			}
			if err := os.WriteFile(to, data, 0o644); err != nil {
				return fmt.Errorf("write ramdisk: %w", err)
			}
		}
	}
	return nil
}

// missingError says that a package cannot be had now.
type missingError struct{ err error }

func (e *missingError) Error() string { return e.err.Error() }
func (e *missingError) Unwrap() error { return e.err }

// ramdiskFor makes kernel, initrd and boot programs of one architecture, by the names
// that the box serves them under.
func (b *build) ramdiskFor(ctx context.Context, arch string, also board.Also) (map[string][]byte, error) {
	sub := b.other(arch, also)
	if err := os.MkdirAll(sub.work, 0o755); err != nil {
		return nil, fmt.Errorf("make folder: %w", err)
	}
	made := map[string][]byte{}
	if err := sub.fetchOther(ctx, also, made); err != nil {
		return nil, &missingError{err}
	}
	if err := sub.buildPrograms(ctx); err != nil {
		return nil, err
	}
	tree, err := sub.tree(ctx, "ramdisk")
	if err != nil {
		return nil, err
	}
	initrd, err := sub.pack("ramdisk", tree)
	if err != nil {
		return nil, err
	}
	if err := budget("ramdisk initrd for "+arch, int64(len(initrd)), also.RamdiskInitrd); err != nil {
		return nil, err
	}
	made["ramdisk-"+arch+"/vmlinuz"], made["ramdisk-"+arch+"/initrd"] = sub.kernel.image, initrd
	b.m.Packages = append(b.m.Packages, sub.m.Packages...)
	for name, size := range sub.m.Parts {
		b.m.Parts[arch+" "+name] = size
	}
	return made, nil
}

// other is a run for another architecture: the agent and what it needs, and nothing
// of this machine.
func (b *build) other(arch string, also board.Also) *build {
	sub := *b
	sub.work = filepath.Join(b.work, arch)
	sub.bin, sub.m, sub.kernel, sub.busybox = map[string]string{}, &manifest.Manifest{Parts: map[string]int64{}}, nil, ""
	sub.Plugins = []string{}
	brd := *b.board
	brd.Arch, brd.Kernel.Package, brd.Modules = arch, also.Kernel, also.Modules
	brd.Programs, brd.Files = board.PerRole{}, board.PerRole{}
	sub.board, sub.lenient = &brd, true
	return &sub
}

// fetchOther gets the architecture's packages.
func (b *build) fetchOther(ctx context.Context, also board.Also, made map[string][]byte) error {
	lock, err := readLock(filepath.Join(b.board.Dir, lockFile))
	if err != nil {
		return err
	}
	debs := filepath.Join(b.Cache, "debs")
	if err := b.useApt(ctx, debs, also, lock); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(also.Netboot)) {
		pkg, file, _ := strings.Cut(also.Netboot[name], ":")
		deb, err := lockedDeb(debs, pkg, lock[pkg])
		if err != nil {
			return err
		}
		if deb == "" {
			if deb, err = b.downloadAny(ctx, debs, pkg, lock[pkg].version); err != nil {
				return err
			}
		}
		if _, err := b.note("package "+pkg, deb, lock); err != nil {
			return err
		}
		tmp := filepath.Join(b.work, pkg)
		if _, err := command(ctx, "", "dpkg-deb", "-x", deb, tmp); err != nil {
			return err
		}
		if made[name], err = os.ReadFile(filepath.Join(tmp, file)); err != nil {
			return fmt.Errorf("package %s: %w", pkg, err)
		}
	}
	return b.fetchKernel(ctx)
}

// downloadAny takes the locked version where Debian has it, else that of the day.
func (b *build) downloadAny(ctx context.Context, debs, name, version string) (string, error) {
	if version != "" {
		if deb, err := b.download(ctx, debs, name, version); err == nil {
			return deb, nil
		}
	}
	return b.download(ctx, debs, name, "")
}

// useApt makes a place of Debian's client for the architecture, with the sources and
// keys of the build machine and lists of its own; nothing where all is in the cache.
func (b *build) useApt(ctx context.Context, debs string, also board.Also, lock map[string]locked) error {
	deb, err := b.lockedKernel(debs, lock)
	if err != nil {
		return err
	}
	all := deb != ""
	for _, from := range also.Netboot {
		pkg, _, _ := strings.Cut(from, ":")
		deb, err := lockedDeb(debs, pkg, lock[pkg])
		if err != nil {
			return err
		}
		all = all && deb != ""
	}
	if all {
		return nil
	}
	place := filepath.Join(b.Cache, "apt-"+b.board.Arch)
	for _, dir := range []string{"state/lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(place, dir), 0o755); err != nil {
			return fmt.Errorf("make folder: %w", err)
		}
	}
	status := filepath.Join(place, "state", "status")
	if err := os.WriteFile(status, nil, 0o644); err != nil {
		return fmt.Errorf("make apt's place: %w", err)
	}
	conf := filepath.Join(place, "apt.conf")
	text := fmt.Sprintf("APT::Architecture %q;\nAPT::Architectures { %q; };\nDir::State %q;\nDir::State::status %q;\nDir::Cache %q;\nAcquire::Retries \"1\";\nAcquire::http::Timeout \"20\";\n",
		b.board.Arch, b.board.Arch, filepath.Join(place, "state"), status, filepath.Join(place, "cache"))
	if err := os.WriteFile(conf, []byte(text), 0o644); err != nil {
		return fmt.Errorf("make apt's place: %w", err)
	}
	b.apt = []string{"APT_CONFIG=" + conf}
	_, err = commandWith(ctx, "", b.apt, "apt-get", "-qq", "update")
	return err
}
