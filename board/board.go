// Package board reads what is particular to one kind of box: board.toml in its folder.
package board

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/BurntSushi/toml"
)

// Board is board.toml.
type Board struct {
	Name string `toml:"-"`
	Dir  string `toml:"-"`

	// Arch is Go's name of the processor.
	Arch string `toml:"arch"`
	// EFI ends the name of the removable-media boot file: BOOTX64.EFI.
	EFI string `toml:"efi"`

	Kernel Kernel `toml:"kernel"`
	Boot   Boot   `toml:"boot"`
	// Netboot maps the name under which a box serves a file to its path on the build machine.
	Netboot map[string]string `toml:"netboot"`
	// NetbootOptional are more of them, which the build machine may lack: then the box
	// refuses the machines that need them.
	NetbootOptional map[string]string `toml:"netboot_optional"`
	// Also are the further architectures, by Go's name, whose machines the box boots
	// into a ramdisk.
	Also     map[string]Also `toml:"also"`
	Programs PerRole         `toml:"programs"`
	Files    PerRole         `toml:"files"`
	Commands Commands        `toml:"commands"`
	Modules  Modules         `toml:"modules"`
	Budget   Budget          `toml:"budget"`
}

// Kernel says which kernel is used and how it is started.
type Kernel struct {
	// Package is a Debian package: a kernel, or one that depends on it.
	Package string `toml:"package"`
	Cmdline string `toml:"cmdline"`
}

// Also is a ramdisk for another architecture. All of it comes from Debian packages of
// that architecture.
type Also struct {
	// Kernel is a package: a kernel, or one that depends on it.
	Kernel string `toml:"kernel"`
	// Netboot maps the name under which a box serves a file to a package and a path in
	// it, joined by a colon.
	Netboot map[string]string `toml:"netboot"`
	// Modules are load and common alone; a name that the kernel does not know is left out.
	Modules Modules `toml:"modules"`
	// RamdiskInitrd is the most bytes of the initrd; 0 is no bound.
	RamdiskInitrd int64 `toml:"ramdisk_initrd"`
}

// Boot holds paths of the boot loader and of the stub that a UKI starts with.
type Boot struct {
	Loader string `toml:"loader"`
	Stub   string `toml:"stub"`
}

// PerRole lists paths per image.
type PerRole struct {
	Site    []string `toml:"site"`
	Node    []string `toml:"node"`
	Ramdisk []string `toml:"ramdisk"`
}

// Of is the list of one role.
func (p PerRole) Of(role string) []string {
	switch role {
	case "site":
		return p.Site
	case "node":
		return p.Node
	case "ramdisk":
		return p.Ramdisk
	}
	return nil
}

// Commands lists commands by name.
type Commands struct {
	URoot []string `toml:"uroot"`
}

// Modules lists kernel modules by name; what they depend on comes along.
type Modules struct {
	// Load is loaded at every boot.
	Load   []string `toml:"load"`
	Common []string `toml:"common"`
	PerRole
}

// Budget bounds sizes in bytes; 0 is no bound.
type Budget struct {
	SiteEFI       int64 `toml:"site_efi"`
	RamdiskInitrd int64 `toml:"ramdisk_initrd"`
	NodeImage     int64 `toml:"node_image"`
}

var validName = regexp.MustCompile(`^[a-z0-9]+(-[a-z0-9]+)*$`)

// Load reads <root>/board/<name>/board.toml strictly.
func Load(root, name string) (*Board, error) {
	if !validName.MatchString(name) {
		return nil, fmt.Errorf("board name %q: want lower-case words joined by dashes", name)
	}
	dir := filepath.Join(root, "board", name)
	path := filepath.Join(dir, "board.toml")
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read board: %w", err)
	}
	b, err := parse(path, data)
	if err != nil {
		return nil, err
	}
	b.Name, b.Dir = name, dir
	return b, nil
}

func parse(path string, data []byte) (*Board, error) {
	var b Board
	meta, err := toml.Decode(string(data), &b)
	var perr toml.ParseError
	if errors.As(err, &perr) {
		return nil, fmt.Errorf("%s:%d: %s", path, perr.Position.Line, perr.Message)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if unknown := meta.Undecoded(); len(unknown) > 0 {
		return nil, fmt.Errorf("%s: unknown key %q", path, unknown[0].String())
	}
	for _, f := range []struct{ key, value string }{
		{"arch", b.Arch}, {"efi", b.EFI}, {"kernel.package", b.Kernel.Package}, {"kernel.cmdline", b.Kernel.Cmdline},
		{"boot.loader", b.Boot.Loader}, {"boot.stub", b.Boot.Stub},
	} {
		if f.value == "" {
			return nil, fmt.Errorf("%s: %s is missing", path, f.key)
		}
	}
	for arch, also := range b.Also {
		if also.Kernel == "" {
			return nil, fmt.Errorf("%s: also.%s.kernel is missing", path, arch)
		}
		for name, from := range also.Netboot {
			if pkg, file, ok := strings.Cut(from, ":"); !ok || pkg == "" || !strings.HasPrefix(file, "/") {
				return nil, fmt.Errorf("%s: also.%s.netboot %q is %q: want a package and a path, such as ipxe:/usr/lib/ipxe/snponly.efi", path, arch, name, from)
			}
		}
	}
	return &b, nil
}
