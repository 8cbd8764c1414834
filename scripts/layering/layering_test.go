// Package layering keeps the direction of imports: who may link whom.
package layering

import (
	"encoding/json"
	"io"
	"os/exec"
	"strings"
	"testing"
)

const module = "github.com/better-compute/site-appliance/"

type goPackage struct {
	ImportPath   string
	Imports      []string
	TestImports  []string
	XTestImports []string
	Deps         []string
}

func list(t *testing.T, args ...string) []goPackage {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-json=ImportPath,Imports,TestImports,XTestImports,Deps"}, args...)...)
	cmd.Dir = "../.."
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var pkgs []goPackage
	dec := json.NewDecoder(strings.NewReader(string(out)))
	for {
		var p goPackage
		if err := dec.Decode(&p); err == io.EOF {
			return pkgs
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
}

// in reports whether a package path (without the module) lies in one of the folders.
func in(path string, folders ...string) bool {
	for _, f := range folders {
		if path == f || strings.HasPrefix(path, f+"/") {
			return true
		}
	}
	return false
}

// wire holds the leaf packages that any part may import.
var wire = []string{"appliance/api", "bmc/bmcv1", "pxe/pxev1", "image/imagev1", "plugins/bcx/driverv1"}

// rules say what each folder may import of this module, beside itself, base and
// the wire types. The longest matching folder decides.
var rules = map[string][]string{
	"appliance/base":        {},
	"appliance/agent":       {},
	"appliance/artifact":    {},
	"pxe":                   {},
	"bmc":                   {"plugins/driver", "plugins/metal"},
	"image":                 {},
	"plugins":               {},
	"board":                 {},
	"initramfs":             {"appliance/site/config", "board", "image/gpt", "image/layout"},
	"appliance/site/config": {},
	"appliance/invoke":      {"appliance/agent", "plugins", "bmc/addressbook"},
	"appliance/hosting":     {"plugins", "appliance/site/config"},
	"appliance/daemontest":  {"appliance/agent", "appliance/invoke", "appliance/gateway", "plugins"},
	"appliance/site":        {"appliance/agent", "appliance/invoke", "appliance/hosting", "appliance/artifact", "pxe", "bmc", "plugins", "image"},
	"appliance/ramdisk":     {"appliance/agent", "appliance/invoke", "image", "plugins/driver", "plugins/metal", "appliance/site/config", "pxe/mandate"},
	"appliance/node":        {"appliance/agent", "appliance/invoke", "appliance/hosting", "plugins", "appliance/site/config"},
	// It encodes grants and writes addresses as boxes do, by the same code.
	"appliance/gateway": {"appliance/agent/envelope", "appliance/agent/trust", "appliance/agent/grants", "bmc/addressbook", "appliance/agent/tunnel", "plugins/driver", "plugins/external", "plugins/metal", "pxe/files", "pxe/isoclass", "pxe/script", "pxe/mandate", "pxe/productuuid"},
	"image/builder":     {"image", "initramfs", "board"},
	"appliance/cmd/bcd": {"appliance/site", "appliance/ramdisk", "appliance/node", "plugins", "appliance/agent"},
	"appliance/cmd/better-compute": {
		"appliance/gateway", "image", "board", "initramfs", "appliance/site/config", "appliance/agent", "plugins/external", "plugins/driver", "plugins/sdk", "bmc/probe",
	},
}

// testExtra is what tests may import beside that; the gateway's, as the far end
// of a box's line.
var testExtra = []string{
	"appliance/site/netnstest", "bmc/bmctest", "image/qemutest", "image/authenticode", "pxe/isoclass/isotest", "scripts/lab",
	"appliance/gateway/commands", "appliance/gateway/gatewaytest", "appliance/gateway/grants", "appliance/gateway/keys", "appliance/gateway/metal", "appliance/gateway/store",
}

func TestDirections(t *testing.T) {
	for _, p := range list(t, "./...") {
		path := strings.TrimPrefix(p.ImportPath, module)
		if in(path, "scripts") || in(path, wire...) {
			continue
		}
		folder := ""
		for f := range rules {
			if in(path, f) && len(f) > len(folder) {
				folder = f
			}
		}
		if folder == "" {
			t.Errorf("%s is in no folder that has a rule", path)
			continue
		}
		allowed := append([]string{folder, "appliance/base"}, append(rules[folder], wire...)...)
		check := func(imports []string, also ...string) {
			for _, i := range imports {
				if own, ok := strings.CutPrefix(i, module); ok && !in(own, append(allowed, also...)...) {
					t.Errorf("%s imports %s: %s may import %v", path, own, folder, rules[folder])
				}
			}
		}
		check(p.Imports)
		check(p.TestImports, testExtra...)
		check(p.XTestImports, testExtra...)
	}
}

// homes says which folders may import a third-party module.
var homes = map[string][]string{
	"github.com/bmc-toolbox/bmclib":  {"bmc", "plugins/bmclib", "scripts/bench"},
	"github.com/stmcginnis/gofish":   {"bmc/redfish"},
	"github.com/bougou/go-ipmi":      {"bmc/bmctest"},
	"github.com/insomniacslk/dhcp":   {"pxe", "initramfs", "scripts/bench"},
	"github.com/pin/tftp":            {"pxe/tftp", "scripts/bench"},
	"github.com/u-root/u-root":       {"initramfs", "image", "appliance/ramdisk"},
	"github.com/u-root/mkuimage":     {"initramfs", "image"},
	"github.com/diskfs/go-diskfs":    {"image"},
	"modernc.org/sqlite":             {"appliance/gateway/store"},
	"database/sql":                   {"appliance/gateway/store"},
	"github.com/google/nftables":     {"appliance/site/firewall"},
	"github.com/BurntSushi/toml":     {"appliance/gateway/config", "appliance/site/config", "board"},
	"github.com/santhosh-tekuri":     {}, // tests compare with it
	"github.com/containerd":          {"plugins/containerd"},
	"github.com/hashicorp":           {"scripts/bench"},
	"golang.org/x/net/http2":         {"plugins/bcx/h2"},
	"github.com/opencontainers":      {"plugins/containerd"},
	"github.com/vishvananda/netlink": {"initramfs", "appliance/site", "pxe/pxetest", "scripts/lab"},
}

func TestThirdPartyHomes(t *testing.T) {
	for _, p := range list(t, "./...") {
		path := strings.TrimPrefix(p.ImportPath, module)
		for lib, where := range homes {
			for _, i := range p.Imports {
				if in(i, lib) && !in(path, where...) {
					t.Errorf("%s imports %s: its home is %v", path, i, where)
				}
			}
		}
	}
}

// forbidden says what a program must not link.
var forbidden = map[string][]string{
	"./appliance/cmd/bcd":          {module + "appliance/gateway", "database/sql", "modernc.org/sqlite", "github.com/containerd", "github.com/opencontainers"},
	"./plugins/cmd/bcx-ipmi":       {module + "appliance/agent", module + "appliance/site", module + "appliance/gateway", "database/sql"},
	"./plugins/cmd/bcx-bmclib":     {module + "appliance/agent", module + "appliance/site", module + "appliance/gateway", "database/sql"},
	"./plugins/cmd/bcx-containerd": {module + "appliance/agent", module + "appliance/site", module + "appliance/gateway", "database/sql"},
	"./initramfs/cmd/init":         {module + "appliance/agent", module + "appliance/gateway", "database/sql", "connectrpc.com/connect"},
	"./appliance/base/...":         {"connectrpc.com/connect", "google.golang.org/protobuf", "golang.org/x/sys"},
	"./plugins/driver":             {"connectrpc.com/connect"},
	"./appliance/agent/trust":      {module + "appliance/gateway"},
	"./appliance/site/config/":     {"connectrpc.com/connect"},
}

func TestForbiddenLinks(t *testing.T) {
	for target, bad := range forbidden {
		for _, p := range list(t, target) {
			for _, dep := range p.Deps {
				// Its driver package is only types, which github.com/google/uuid uses.
				if dep != "database/sql/driver" && in(dep, bad...) {
					t.Errorf("%s links %s", target, dep)
				}
			}
		}
	}
}

// TestRequiredLinks keeps the forbidden list honest: a path that no longer
// exists would pass it for ever.
func TestRequiredLinks(t *testing.T) {
	want := map[string]string{
		"./appliance/cmd/better-compute": "modernc.org/sqlite",
		"./appliance/cmd/bcd":            "github.com/pin/tftp/v3",
		"./plugins/cmd/bcx-containerd":   "github.com/containerd/containerd/v2/client",
	}
	for target, dep := range want {
		found := false
		for _, p := range list(t, target) {
			for _, d := range p.Deps {
				found = found || d == dep
			}
		}
		if !found {
			t.Errorf("%s does not link %s", target, dep)
		}
	}
}
