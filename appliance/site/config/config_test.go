package config

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"
)

const good = `
join_file = "/run/join"

[uplink]
interface = "up0"

[[lan]]
mac = "52:54:00:00:00:02"
address = "10.77.0.1/24"
dhcp = "authoritative"
range = ["10.77.0.100", "10.77.0.200"]

[plugins]
dir = "/usr/lib/bcx"
privileged = "kata, two"

[lanes]
power = 4

[[bmc]]
address = "BMC-9.example"
legacy_tls = true

[authorities]
file = "/etc/ca.pem"
`

func TestParseSite(t *testing.T) {
	s, err := ParseSite("site.toml", []byte(good))
	if err != nil {
		t.Fatal(err)
	}
	if got := s.LAN[0].Address.String(); got != "10.77.0.1/24" {
		t.Errorf("lan address = %s", got)
	}
	if len(s.BMC) != 1 || !s.BMC[0].LegacyTLS || s.Authorities.File != "/etc/ca.pem" {
		t.Errorf("bmc = %+v, authorities = %+v", s.BMC, s.Authorities)
	}
	if !s.Plugins.Sandboxed() || strings.Join(s.Plugins.PrivilegedNames(), "|") != "kata|two" {
		t.Errorf("plugins = %+v", s.Plugins)
	}
}

func TestParseSiteErrors(t *testing.T) {
	for _, tt := range []struct{ old, new, want string }{
		{`privileged =`, `privilegd =`, `site.toml:15: unknown key "plugins.privilegd"`},
		{`"52:54:00:00:00:02"`, `"52:54:00:00:00:02"` + "\naddress = \"10.77.1.1/24\"\n[[lan]]\nmac = \"52:54:00:00:00:02\"", "is lan 1's too"},
		{`interface = "up0"`, `mac = "52:54:00:00:00:02"`, "lan 1: 52:54:00:00:00:02 is uplink's too"},
		{`"10.77.0.1/24"`, `"10.77.0.1"`, "site.toml:9: lan.address: "},
		{"power = 4", `power = "four"`, `line 18 (last key "lanes.power")`},
		{"[lanes]\npower", "[lanez]\npower", `site.toml:17: unknown key "lanez"`},
		{`"52:54:00:00:00:02"`, `"52:54"`, "mac = "},
		{`"10.77.0.200"]`, `"10.78.0.200"]`, "outside of 10.77.0.0/24"},
		{`"10.77.0.100"`, `"10.77.0.201"`, "ends (10.77.0.200) before"},
		{`"10.77.0.100"`, `"10.77.0.1"`, "own address"},
		{`"authoritative"`, `"Proxy"`, `dhcp = "Proxy": want one of off, authoritative, reservations, proxy, relay`},
		{`interface = "up0"`, `interface = "up0`, "site.toml:5:"},
		{`interface = "up0"`, "interface = \"up0\"\naddress = \"10.0.0.1\"", "uplink.address"},
		{"power = 4", "powr = 4", "unknown lane"},
		{"power = 4", "power = 0", "want 1 to 1024"},
		{"legacy_tls = true", "legacy_tsl = true", `site.toml:22: unknown key "bmc.legacy_tsl"`},
		{"legacy_tls = true", "tls_verify = false", `unknown key "bmc.tls_verify"`},
		{"legacy_tls = true", `legacy_tls = "yes"`, "bmc.legacy_tls"},
		{`"BMC-9.example"`, `""`, "bmc 1: address = \"\""},
		{`"BMC-9.example"`, `"https://bmc"`, "bmc 1: address"},
		{`"BMC-9.example"`, `"bmc:0"`, "want a port"},
		{`"BMC-9.example"`, "\"bmc-9.example:443\"\n[[bmc]]\naddress = \"BMC-9.example\"", "bmc 2: bmc-9.example:443 has a section already"},
		{`file = "/etc/ca.pem"`, `pem = "hello"`, "authorities.pem: want certificates"},
		{`file = "/etc/ca.pem"`, "pem = '''\n-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n'''", "authorities.pem: want certificates"},
		{`file = "/etc/ca.pem"`, `path = "/etc/ca.pem"`, `unknown key "authorities.path"`},
		{`join_file = "/run/join"`, "join_file = \"a\"\njoin = \"b\"", "keep one"},
	} {
		text := strings.Replace(good, tt.old, tt.new, 1)
		if text == good {
			t.Fatalf("%q is not in the good text", tt.old)
		}
		_, err := ParseSite("site.toml", []byte(text))
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("with %q: error %v, want it to hold %q", tt.new, err, tt.want)
		}
	}
}

func TestBMCHostPort(t *testing.T) {
	for in, want := range map[string]string{
		"10.0.0.9": "10.0.0.9:443", "10.0.0.9:8443": "10.0.0.9:8443", "BMC.Example": "bmc.example:443", "::1": "[::1]:443", "[2001:DB8::1]:8443": "[2001:db8::1]:8443",
		"[::1]": "[::1]:443", "": "", ":443": "", "10.0.0.9:": "", "10.0.0.9:65536": "", "10.0.0.9:0443": "", "[::1": "", "[bmc]": "", "a b": "", "-bmc": "", "bmc/": "", "u@bmc": "",
	} {
		got, err := BMC{Address: in}.HostPort()
		if got != want || (err == nil) != (want != "") {
			t.Errorf("HostPort(%q) = %q, %v, want %q", in, got, err, want)
		}
	}
}

// What a damaged or hostile file system can hand over ends in an error.
func TestParseSiteGarbage(t *testing.T) {
	for name, text := range map[string]string{
		"random bytes":  "\x00\xff\xfe\x01[\x7f=",
		"deep nesting":  "a = " + strings.Repeat("[", MaxBytes-10),
		"deep table":    "[" + strings.Repeat("a.", MaxBytes/2-10) + "a]\n",
		"long key":      strings.Repeat("a.", maxLine/2-10) + "a = 1\n",
		"deep by lines": "a = " + strings.Repeat("[\n", 1000),
		"deep inline":   "a = " + strings.Repeat("{a=", MaxBytes/3-10),
		"too large":     strings.Repeat("#\n", MaxBytes),
		"not a string":  "join = 7\n",
		"binary string": "join = \"\x00\x01\"\n",
	} {
		_, err := ParseSite("site.toml", []byte(text))
		if err == nil || !strings.Contains(err.Error(), "site.toml") || !utf8.ValidString(err.Error()) || strings.ContainsAny(err.Error(), "\x00\x01") {
			t.Errorf("%s: error %v, want one that names the file and holds no control bytes", name, err)
		} else if len(err.Error()) > 400 {
			t.Errorf("%s: the error has %d bytes", name, len(err.Error()))
		}
	}
}

func TestPortName(t *testing.T) {
	mac, _ := net.ParseMAC("52:54:00:00:00:02")
	ifaces := []net.Interface{{Name: "eth0"}, {Name: "eth1", HardwareAddr: mac}}
	if got, err := (Port{MAC: "52:54:00:00:00:02"}).Name(ifaces); got != "eth1" || err != nil {
		t.Errorf("by MAC: %q, %v", got, err)
	}
	if _, err := (Port{Interface: "eth9"}).Name(ifaces); err == nil {
		t.Error("a missing interface was found")
	}
}

func TestLoadNode(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.toml")
	os.WriteFile(path, []byte("join_file = \"/x\"\n[gateway]\nvia = \"10.77.0.1:7443\"\n"), 0o600)
	n, err := LoadNode(path)
	if err != nil || n.Gateway.Via != "10.77.0.1:7443" {
		t.Errorf("LoadNode = %+v, %v", n, err)
	}
	if _, err := ParseNode("config.toml", []byte("gatewy = 1")); err == nil || !strings.Contains(err.Error(), "config.toml:1") {
		t.Errorf("unknown key: %v", err)
	}
}

func FuzzParseSite(f *testing.F) {
	f.Add([]byte(good))
	f.Fuzz(func(t *testing.T, data []byte) { _, _ = ParseSite("site.toml", data) })
}
