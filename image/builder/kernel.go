package builder

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
	"github.com/better-compute/site-appliance/image/manifest"
)

// kernel is the unpacked kernel package.
type kernel struct {
	release string
	image   []byte
	// dir holds lib/modules/<release> with a complete modules.dep.
	dir string
}

// lockFile names the packages that the board was tried with.
const lockFile = "packages.lock"

var packageName = regexp.MustCompile(`^[a-z0-9][a-z0-9.+-]+$`)

// command runs a program of the build machine in dir.
func command(ctx context.Context, dir string, argv ...string) (string, error) {
	return commandWith(ctx, dir, nil, argv...)
}

// commandWith is command with more in its environment.
func commandWith(ctx context.Context, dir string, env []string, argv ...string) (string, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = dir
	if env != nil {
		cmd.Env = append(os.Environ(), env...)
	}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, strings.TrimSpace(stderr.String()))
	}
	return string(out), nil
}

// fetchKernel gets the kernel package: the locked one where the cache or
// Debian has it, else the one of the day, said aloud. A build does not fail
// because a point release replaced a kernel.
func (b *build) fetchKernel(ctx context.Context) error {
	lock, err := readLock(filepath.Join(b.board.Dir, lockFile))
	if err != nil {
		return err
	}
	debs := filepath.Join(b.Cache, "debs")
	if err := os.MkdirAll(debs, 0o755); err != nil {
		return fmt.Errorf("make folder: %w", err)
	}
	deb, err := b.lockedKernel(debs, lock)
	if err != nil {
		return err
	}
	if deb == "" {
		if deb, err = b.downloadKernel(ctx, debs, lock); err != nil {
			return err
		}
	}
	sum, err := b.note("kernel", deb, lock)
	if err != nil {
		return err
	}

	dir := filepath.Join(b.Cache, "kernel-"+sum[:16])
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		tmp := filepath.Join(b.work, "kernel")
		if _, err := command(ctx, "", "dpkg-deb", "-x", deb, tmp); err != nil {
			return err
		}
		release, err := onlyEntry(filepath.Join(tmp, "lib", "modules"))
		if err != nil {
			return err
		}
		if _, err := command(ctx, "", depmod(), "-b", tmp, release); err != nil {
			return err
		}
		if err := os.Rename(tmp, dir); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("keep kernel: %w", err)
		}
	}
	release, err := onlyEntry(filepath.Join(dir, "lib", "modules"))
	if err != nil {
		return err
	}
	image, err := os.ReadFile(filepath.Join(dir, "boot", "vmlinuz-"+release))
	if err != nil {
		return fmt.Errorf("read kernel: %w", err)
	}
	b.kernel = &kernel{release: release, image: image, dir: dir}
	b.m.Kernel = release
	b.m.Parts["kernel"] = int64(len(image))
	return nil
}

// note puts a package into the manifest, and says aloud where it is not the locked one.
func (b *build) note(what, deb string, lock map[string]locked) (sum string, err error) {
	if sum, err = digest(deb); err != nil {
		return "", err
	}
	name, version, _ := packageOf(deb)
	locked := lock[name].sha256 == sum
	if !locked {
		b.Log.Warn("NOTICE: the "+what+" is not the one that the board is locked to; the manifest says which was used",
			"used", name+" "+version, "sha256", sum, "lock", filepath.Join(b.board.Dir, lockFile))
	}
	b.m.Packages = append(b.m.Packages, manifest.Package{Name: name, Version: version, SHA256: sum, Locked: locked})
	return sum, nil
}

// depmod is in sbin, which is not on everybody's path.
func depmod() string {
	if path, err := exec.LookPath("depmod"); err == nil {
		return path
	}
	return "/sbin/depmod"
}

// lockedKernel finds the locked package in the cache; empty where it is not.
func (b *build) lockedKernel(debs string, lock map[string]locked) (string, error) {
	for name, l := range lock {
		if !b.isKernel(name) {
			continue
		}
		if deb, err := lockedDeb(debs, name, l); err != nil || deb != "" {
			return deb, err
		}
	}
	return "", nil
}

// isKernel says whether a package is a kernel for the board's architecture, whose
// name is Debian's too.
func (b *build) isKernel(name string) bool {
	return strings.HasPrefix(name, "linux-image-") && strings.HasSuffix(name, "-"+b.board.Arch)
}

// lockedDeb finds one locked package in the cache; empty where it is not.
func lockedDeb(debs, name string, l locked) (string, error) {
	matches, err := filepath.Glob(filepath.Join(debs, name+"_*.deb"))
	if err != nil {
		return "", fmt.Errorf("look into cache: %w", err)
	}
	for _, m := range matches {
		if sum, err := digest(m); err == nil && sum == l.sha256 {
			return m, nil
		}
	}
	return "", nil
}

func (b *build) downloadKernel(ctx context.Context, debs string, lock map[string]locked) (string, error) {
	for name, l := range lock {
		if b.isKernel(name) {
			if deb, err := b.download(ctx, debs, name, l.version); err == nil {
				return deb, nil
			}
		}
	}
	name := b.board.Kernel.Package
	out, err := commandWith(ctx, "", b.apt, "apt-cache", "depends", name)
	if err != nil {
		return "", err
	}
	for line := range strings.SplitSeq(out, "\n") {
		if dep, ok := strings.CutPrefix(strings.TrimSpace(line), "Depends: "); ok && strings.HasPrefix(dep, "linux-image-") {
			name = dep
			break
		}
	}
	return b.download(ctx, debs, name, "")
}

// download fetches a package into the cache by Debian's own client, which
// checks its signature.
func (b *build) download(ctx context.Context, debs, name, version string) (string, error) {
	if !packageName.MatchString(name) {
		return "", fmt.Errorf("package name %q is not one", name)
	}
	tmp := filepath.Join(b.work, "download")
	if err := os.MkdirAll(tmp, 0o755); err != nil {
		return "", fmt.Errorf("make folder: %w", err)
	}
	want := name
	if version != "" {
		want += "=" + version
	}
	b.Log.Info("fetching a package", "package", want)
	if _, err := commandWith(ctx, tmp, b.apt, "apt-get", "-qq", "download", want); err != nil {
		return "", err
	}
	file, err := onlyEntry(tmp)
	if err != nil {
		return "", err
	}
	to := filepath.Join(debs, file)
	if err := os.Rename(filepath.Join(tmp, file), to); err != nil {
		return "", fmt.Errorf("keep package: %w", err)
	}
	return to, nil
}

// packageOf reads name and version from a package's file name.
func packageOf(deb string) (name, version string, ok bool) {
	f := strings.Split(strings.TrimSuffix(filepath.Base(deb), ".deb"), "_")
	if len(f) != 3 {
		return filepath.Base(deb), "", false
	}
	return f[0], strings.ReplaceAll(f[1], "%3a", ":"), true
}

func onlyEntry(dir string) (string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", fmt.Errorf("look into %s: %w", dir, err)
	}
	if len(entries) != 1 {
		return "", fmt.Errorf("%s holds %d entries: want one", dir, len(entries))
	}
	return entries[0].Name(), nil
}

func digest(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("digest: %w", err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", fmt.Errorf("digest %s: %w", path, err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// locked is one line of a lock file.
type locked struct{ version, sha256 string }

// readLock reads "name version sha256" lines. No file locks nothing.
func readLock(path string) (map[string]locked, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read lock file: %w", err)
	}
	defer f.Close()
	out := map[string]locked{}
	s := bufio.NewScanner(f)
	for n := 1; s.Scan(); n++ {
		line := strings.TrimSpace(s.Text())
		if line == "" || line[0] == '#' {
			continue
		}
		w := strings.Fields(line)
		if len(w) != 3 || !packageName.MatchString(w[0]) || len(w[2]) != 64 {
			return nil, fmt.Errorf("%s:%d: want a package, its version and its SHA-256", path, n)
		}
		out[w[0]] = locked{w[1], w[2]}
	}
	return out, s.Err()
}

// Lock writes the packages of a build into the board's lock file.
func Lock(root, boardName string, m *manifest.Manifest) error {
	var lines []string
	for _, p := range m.Packages {
		if p.SHA256 != "" {
			lines = append(lines, fmt.Sprintf("%s %s %s\n", p.Name, p.Version, p.SHA256))
		}
	}
	slices.Sort(lines)
	text := "# What images of this board were built from and tried with: package, version, SHA-256.\n# `better-compute image build --lock` writes it anew.\n" + strings.Join(lines, "")
	return atomicfile.Write(filepath.Join(root, "board", boardName, lockFile), []byte(text), 0o644)
}

// subset copies the named modules and what they link into dst, with an index
// of their own. Modules that the kernel has built in are there already; names
// that it does not know are returned.
func (k *kernel) subset(ctx context.Context, dst string, names []string) (unknown []string, err error) {
	src := filepath.Join(k.dir, "lib", "modules", k.release)
	links, err := readDeps(filepath.Join(src, "modules.dep"))
	if err != nil {
		return nil, err
	}
	builtin, err := os.ReadFile(filepath.Join(src, "modules.builtin"))
	if err != nil {
		return nil, fmt.Errorf("read built-in modules: %w", err)
	}
	there := map[string]bool{}
	for line := range strings.FieldsSeq(string(builtin)) {
		there[moduleName(line)] = true
	}
	byName := map[string]string{}
	for path := range links {
		byName[moduleName(path)] = path
	}
	chosen := map[string]bool{}
	for _, n := range names {
		n = strings.ReplaceAll(n, "-", "_")
		path, ok := byName[n]
		if !ok {
			if !there[n] {
				unknown = append(unknown, n)
			}
			continue
		}
		chosen[path] = true
		for _, d := range links[path] {
			chosen[d] = true
		}
	}
	out := filepath.Join(dst, "lib", "modules", k.release)
	copyFile := func(rel string) error {
		data, err := os.ReadFile(filepath.Join(src, rel))
		if err != nil {
			return fmt.Errorf("copy module: %w", err)
		}
		to := filepath.Join(out, rel)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return fmt.Errorf("copy module: %w", err)
		}
		return os.WriteFile(to, data, 0o644)
	}
	for path := range chosen {
		if err := copyFile(path); err != nil {
			return nil, err
		}
	}
	for _, f := range []string{"modules.builtin", "modules.builtin.modinfo", "modules.order"} {
		if err := copyFile(f); err != nil {
			return nil, err
		}
	}
	if _, err := command(ctx, "", depmod(), "-b", dst, k.release); err != nil {
		return nil, err
	}
	// init reads text; the rest is for tools that are not there.
	entries, err := os.ReadDir(out)
	if err != nil {
		return nil, fmt.Errorf("look at module index: %w", err)
	}
	keep := []string{"modules.dep", "modules.alias", "modules.softdep", "modules.builtin", "kernel"}
	for _, e := range entries {
		if !slices.Contains(keep, e.Name()) {
			if err := os.RemoveAll(filepath.Join(out, e.Name())); err != nil {
				return nil, fmt.Errorf("trim module index: %w", err)
			}
		}
	}
	return unknown, nil
}

func moduleName(path string) string {
	base, _, _ := strings.Cut(filepath.Base(path), ".ko")
	return strings.ReplaceAll(base, "-", "_")
}

func readDeps(path string) (map[string][]string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read module dependencies: %w", err)
	}
	defer f.Close()
	out := map[string][]string{}
	s := bufio.NewScanner(f)
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		if mod, deps, ok := strings.Cut(s.Text(), ":"); ok {
			out[mod] = strings.Fields(deps)
		}
	}
	return out, s.Err()
}
