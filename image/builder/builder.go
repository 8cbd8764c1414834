// Package builder makes a board's images from the sources: the three
// initramfs, the unified kernel image, the disk of a box and that of a node.
// The same sources and packages give the same bytes.
package builder

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/better-compute/site-appliance/board"
	"github.com/better-compute/site-appliance/image/layout"
	"github.com/better-compute/site-appliance/image/manifest"
	"github.com/better-compute/site-appliance/image/uki"
	"github.com/better-compute/site-appliance/initramfs/archive"
)

// Options say what to build.
type Options struct {
	// Root is the checkout, Board a folder of its board folder.
	Root, Board string
	// Out gets the files; Cache keeps packages and u-root's commands between builds.
	Out, Cache string
	Version    string
	// Built is the time that every file carries.
	Built time.Time
	// Release leaves the rescue entry out.
	Release bool
	// Agent and Plugins are packages of commands, relative to Root; their
	// defaults are the project's own.
	Agent   string
	Plugins []string
	// Quick packs with less effort: for tests.
	Quick bool
	Log   *slog.Logger
}

// The project's own commands.
const (
	InitPackage  = "./initramfs/cmd/init"
	AgentPackage = "./appliance/cmd/bcd"
)

// PluginPackages are the plugins that a box carries.
func PluginPackages() []string {
	return []string{"./plugins/cmd/bcx-ipmi", "./plugins/cmd/bcx-bmclib"}
}

// Names of the files that a build leaves in Out.
const (
	SiteImage     = "site.img"
	SiteEFI       = "site.efi"
	NodeImage     = "node.raw.zst"
	RamdiskKernel = "ramdisk/vmlinuz"
	RamdiskInitrd = "ramdisk/initrd"
	ManifestFile  = "manifest.json"
)

// netbootDir is where a box has what it serves.
const netbootDir = "usr/share/bc/netboot/"

// build is one run.
type build struct {
	Options
	board *board.Board
	// work is a folder for this run only.
	work string
	m    *manifest.Manifest

	// apt is what Debian's client needs in its environment for another architecture.
	apt     []string
	kernel  *kernel
	bin     map[string]string
	busybox string
	// lenient leaves modules out that the kernel does not know.
	lenient bool
	// also are the files that the box serves to other architectures, by their names.
	also map[string][]byte
}

// ErrBudget says that a file is larger than its board allows.
var ErrBudget = errors.New("over budget")

// Build makes everything and returns the manifest that it also leaves in Out.
func Build(ctx context.Context, o Options) (*manifest.Manifest, error) {
	if o.Agent == "" {
		o.Agent = AgentPackage
	}
	if o.Plugins == nil {
		o.Plugins = PluginPackages()
	}
	if _, err := layout.EntryName(o.Version, 0); err != nil {
		return nil, err
	}
	brd, err := board.Load(o.Root, o.Board)
	if err != nil {
		return nil, err
	}
	if brd.Arch != runtime.GOARCH {
		return nil, fmt.Errorf("board %s is %s and programs of this %s machine travel with it: build it on its own kind", brd.Name, brd.Arch, runtime.GOARCH)
	}
	for _, dir := range []string{o.Out, filepath.Join(o.Out, "ramdisk"), o.Cache} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, fmt.Errorf("make folder: %w", err)
		}
	}
	work, err := os.MkdirTemp(o.Cache, "build-")
	if err != nil {
		return nil, fmt.Errorf("make folder: %w", err)
	}
	defer os.RemoveAll(work)
	b := &build{Options: o, board: brd, work: work, bin: map[string]string{}, m: &manifest.Manifest{
		Board: brd.Name, Version: o.Version, Built: o.Built.UTC(), Arch: brd.Arch, Release: o.Release, Parts: map[string]int64{}, Go: runtime.Version(),
	}}
	for _, s := range []struct {
		name string
		run  func(context.Context) error
	}{
		{"kernel", b.fetchKernel},
		{"programs", b.buildPrograms},
		{"ramdisk", b.makeRamdisk},
		{"ramdisks of other architectures", b.makeAlso},
		{"site", b.makeSite},
		{"node", b.makeNode},
		{"manifest", b.describe},
	} {
		began := time.Now()
		if err := s.run(ctx); err != nil {
			return nil, fmt.Errorf("build %s: %w", s.name, err)
		}
		o.Log.Info("built", "step", s.name, "seconds", fmt.Sprintf("%.1f", time.Since(began).Seconds()))
	}
	return b.m, nil
}

func (b *build) level() zstd.EncoderLevel {
	if b.Quick {
		return zstd.SpeedDefault
	}
	return zstd.SpeedBetterCompression
}

func (b *build) makeRamdisk(ctx context.Context) error {
	tree, err := b.tree(ctx, "ramdisk")
	if err != nil {
		return err
	}
	initrd, err := b.pack("ramdisk", tree)
	if err != nil {
		return err
	}
	if err := budget("ramdisk initrd", int64(len(initrd)), b.board.Budget.RamdiskInitrd); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(b.Out, RamdiskInitrd), initrd, 0o644); err != nil {
		return fmt.Errorf("write ramdisk: %w", err)
	}
	if err := os.WriteFile(filepath.Join(b.Out, RamdiskKernel), b.kernel.image, 0o644); err != nil {
		return fmt.Errorf("write ramdisk: %w", err)
	}
	return nil
}

func (b *build) makeSite(ctx context.Context) error {
	tree, err := b.tree(ctx, "site")
	if err != nil {
		return err
	}
	for name, from := range b.board.Netboot {
		if err := tree.Copy(netbootDir+name, from, 0o644); err != nil {
			return err
		}
		b.source(from)
	}
	if err := b.addOptional(tree); err != nil {
		return err
	}
	for _, name := range []string{RamdiskKernel, RamdiskInitrd} {
		if err := tree.Copy(netbootDir+name, filepath.Join(b.Out, name), 0o644); err != nil {
			return err
		}
	}
	for name, data := range b.also {
		tree.File(netbootDir+name, data, 0o644)
	}
	if err := b.addPlugins(tree); err != nil {
		return err
	}
	image, err := b.makeUKI("site", tree)
	if err != nil {
		return err
	}
	if err := budget("site UKI", int64(len(image)), b.board.Budget.SiteEFI); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(b.Out, SiteEFI), image, 0o644); err != nil {
		return fmt.Errorf("write UKI: %w", err)
	}
	return b.siteDisk(image)
}

func (b *build) makeNode(ctx context.Context) error {
	tree, err := b.tree(ctx, "node")
	if err != nil {
		return err
	}
	image, err := b.makeUKI("node", tree)
	if err != nil {
		return err
	}
	return b.nodeDisk(ctx, image)
}

// makeUKI packs a tree with the kernel.
func (b *build) makeUKI(role string, tree *archive.Tree) ([]byte, error) {
	initrd, err := b.pack(role, tree)
	if err != nil {
		return nil, err
	}
	stub, err := os.ReadFile(b.board.Boot.Stub)
	if err != nil {
		return nil, fmt.Errorf("read EFI stub: %w", err)
	}
	b.source(b.board.Boot.Stub)
	return uki.Build(uki.Parts{
		Stub:      stub,
		OSRelease: osRelease(role, b.Version),
		Cmdline:   b.board.Kernel.Cmdline,
		Uname:     b.kernel.release,
		Initrd:    initrd,
		Linux:     b.kernel.image,
	})
}

func osRelease(role, version string) string {
	return fmt.Sprintf("ID=better-compute-%s\nNAME=\"Better Compute %s\"\nVERSION_ID=%s\nIMAGE_ID=bc%s\nIMAGE_VERSION=%s\nPRETTY_NAME=\"Better Compute %s %s\"\n",
		role, role, version, role, version, role, version)
}

// pack makes the compressed archive and notes its sizes.
func (b *build) pack(role string, tree *archive.Tree) ([]byte, error) {
	raw, err := tree.Cpio()
	if err != nil {
		return nil, err
	}
	packed, err := archive.Compress(raw, b.level())
	if err != nil {
		return nil, err
	}
	b.m.Parts[role+" initramfs, unpacked"] = int64(len(raw))
	b.m.Parts[role+" initramfs"] = int64(len(packed))
	return packed, nil
}

func (b *build) describe(context.Context) error {
	for _, name := range append([]string{SiteImage, SiteEFI, NodeImage, RamdiskKernel, RamdiskInitrd}, b.alsoFiles()...) {
		f, err := manifest.Describe(b.Out, name)
		if err != nil {
			return err
		}
		for _, known := range b.m.Files { // unpacked sizes, noted while packing
			if known.Name == name {
				f.UnpackedSize, f.UnpackedSHA256 = known.UnpackedSize, known.UnpackedSHA256
			}
		}
		b.put(f)
	}
	return b.m.Store(filepath.Join(b.Out, ManifestFile))
}

func (b *build) put(f manifest.File) {
	for i, known := range b.m.Files {
		if known.Name == f.Name {
			b.m.Files[i] = f
			return
		}
	}
	b.m.Files = append(b.m.Files, f)
}

func budget(what string, size, limit int64) error {
	if limit > 0 && size > limit {
		return fmt.Errorf("%w: %s has %d bytes, the board allows %d", ErrBudget, what, size, limit)
	}
	return nil
}

// DefaultCache is where packages are kept between builds: the user's cache
// folder, or .cache in the checkout.
func DefaultCache(root string) string {
	if dir, err := os.UserCacheDir(); err == nil {
		return filepath.Join(dir, "better-compute")
	}
	return filepath.Join(root, ".cache")
}
