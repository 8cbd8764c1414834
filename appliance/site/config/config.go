// Package config reads the agents' configuration files, strictly: site.toml on
// a box, config.toml for bcd node and bcd site elsewhere.
package config

import (
	"bytes"
	"cmp"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/BurntSushi/toml"
)

// Site is site.toml.
type Site struct {
	// Join is the join string, or JoinFile the file that holds it. Needed until
	// the box is enrolled.
	Join     string `toml:"join"`
	JoinFile string `toml:"join_file"`

	Uplink      Uplink         `toml:"uplink"`
	LAN         []LAN          `toml:"lan"`
	BMC         []BMC          `toml:"bmc"`
	Authorities Authorities    `toml:"authorities"`
	Plugins     Plugins        `toml:"plugins"`
	Cache       Cache          `toml:"cache"`
	Lanes       map[string]int `toml:"lanes"`
}

// BMC is what the site says of one BMC.
type BMC struct {
	// Address is a host name or IP address with an optional port, 443.
	Address string `toml:"address"`
	// LegacyTLS allows this one BMC TLS 1.0 and 1.1, and key exchange by RSA.
	LegacyTLS bool `toml:"legacy_tls"`
}

// Authorities are the site's own CAs: beside the system's they judge the
// certificates of BMCs that were enrolled without a pin.
type Authorities struct {
	// File holds certificates in PEM, and PEM is such a text itself.
	File string `toml:"file"`
	PEM  string `toml:"pem"`
}

// Uplink is the interface towards the gateway. Without a MAC or a name it is
// the first wired interface that gets a lease.
type Uplink struct {
	Port
	// Address is "dhcp" (the default) or an address with its prefix length.
	Address string   `toml:"address"`
	Gateway string   `toml:"gateway"`
	DNS     []string `toml:"dns"`
}

// Port picks an interface, by MAC or by name.
type Port struct {
	MAC       string `toml:"mac"`
	Interface string `toml:"interface"`
}

// Plugins is the [plugins] section.
type Plugins struct {
	Dir        string `toml:"dir"`
	User       string `toml:"user"`
	Privileged string `toml:"privileged"`
	Sandbox    *bool  `toml:"sandbox"`
	Cgroup     string `toml:"cgroup"`
	MemoryMax  int64  `toml:"memory_max"`
	PidsMax    int64  `toml:"pids_max"`
}

// Sandboxed is the sandbox key with its default, true.
func (p Plugins) Sandboxed() bool { return p.Sandbox == nil || *p.Sandbox }

// PrivilegedNames splits the comma-separated list.
func (p Plugins) PrivilegedNames() []string {
	var names []string
	for name := range strings.SplitSeq(p.Privileged, ",") {
		if name = strings.TrimSpace(name); name != "" {
			names = append(names, name)
		}
	}
	return names
}

// Cache bounds the artifact cache.
type Cache struct {
	// MaxBytes is the most that artifacts take; 0: 80 % of the data partition.
	MaxBytes int64 `toml:"max_bytes"`
}

// Node is config.toml of bcd node.
type Node struct {
	JoinFile  string    `toml:"join_file"`
	Gateway   Gateway   `toml:"gateway"`
	Plugins   Plugins   `toml:"plugins"`
	Instances Instances `toml:"instances"`
	// Runtimes configures hosted drivers of kind runtime, by driver id: each
	// table is the driver's own.
	Runtimes map[string]map[string]any `toml:"runtimes"`
}

// Instances says where a node's processes run.
type Instances struct {
	// Cgroup is a cgroup v2 folder that is theirs alone; empty: one at the top of
	// the machine's tree, and "off": none.
	Cgroup string `toml:"cgroup"`
}

// Gateway says how a node reaches its gateway.
type Gateway struct {
	// Via is host:port of a box that passes connections through; empty: directly.
	Via string `toml:"via"`
}

// MaxBytes bounds a file, maxLine a line of it and maxDepth its nesting: what
// a damaged file system hands over must not cost the parser minutes or its stack.
const (
	MaxBytes = 64 << 10
	maxLine  = 8 << 10
	maxDepth = 32
)

// lanes that [lanes] may name.
var laneNames = []string{"query", "power", "provision", "proxy", "transfer", "update"}

// LoadSite reads and checks a site.toml. Errors name file, line and key.
func LoadSite(path string) (*Site, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	return ParseSite(path, data)
}

// ParseSite is LoadSite on bytes; name stands in errors.
func ParseSite(name string, data []byte) (*Site, error) {
	var s Site
	if err := decode(name, data, &s); err != nil {
		return nil, err
	}
	if err := s.check(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return &s, nil
}

// LoadNode reads and checks a config.toml.
func LoadNode(path string) (*Node, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	return ParseNode(path, data)
}

// ParseNode is LoadNode on bytes.
func ParseNode(name string, data []byte) (*Node, error) {
	var n Node
	if err := decode(name, data, &n); err != nil {
		return nil, err
	}
	return &n, nil
}

func decode(name string, data []byte, into any) error {
	if len(data) > MaxBytes {
		return fmt.Errorf("%s has over %d bytes: this is no configuration", name, MaxBytes)
	}
	line, length, depth := 1, 0, 0
	for _, c := range data {
		length++
		switch c {
		case '\n':
			line, length = line+1, 0
		case '[', '{':
			depth++
		case ']', '}':
			depth = max(0, depth-1)
		}
		if length > maxLine || depth > maxDepth {
			return fmt.Errorf("%s:%d: a line too long, or nested too deep: this is no configuration", name, line)
		}
	}
	meta, err := toml.Decode(string(data), into)
	var perr toml.ParseError
	if errors.As(err, &perr) {
		if perr.LastKey != "" {
			return fmt.Errorf("%s:%d: %.100s: %s", name, perr.Position.Line, perr.LastKey, strings.TrimPrefix(perr.Error(), "toml: "))
		}
		return fmt.Errorf("%s:%d: %s", name, perr.Position.Line, perr.Message)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if unknown := meta.Undecoded(); len(unknown) > 0 {
		key := unknown[0]
		return fmt.Errorf("%s:%d: unknown key %.100q", name, lineOf(string(data), key), key.String())
	}
	return nil
}

// lineOf finds the line on which key is set: the last part, under the header of the rest.
func lineOf(text string, key toml.Key) int {
	table := strings.Join(key[:len(key)-1], ".")
	current, line := "", 0
	for l := range strings.SplitSeq(text, "\n") {
		line++
		l = strings.TrimSpace(l)
		if strings.HasPrefix(l, "[") {
			current = strings.Trim(l[:strings.LastIndex(l, "]")+1], "[] ")
			if current == key.String() {
				return line
			}
			continue
		}
		name, _, ok := strings.Cut(l, "=")
		if ok && current == table && strings.Trim(strings.TrimSpace(name), `"'`) == key[len(key)-1] {
			return line
		}
	}
	return 0
}

func (s *Site) check() error {
	if s.Join != "" && s.JoinFile != "" {
		return errors.New("join and join_file are both set: keep one")
	}
	if err := s.Uplink.check("uplink"); err != nil {
		return err
	}
	if a := s.Uplink.Address; a != "" && a != "dhcp" {
		if _, err := netip.ParsePrefix(a); err != nil {
			return fmt.Errorf("uplink.address = %q: want \"dhcp\" or an address with prefix length, such as 192.0.2.10/24", a)
		}
	}
	if g := s.Uplink.Gateway; g != "" {
		if _, err := netip.ParseAddr(g); err != nil {
			return fmt.Errorf("uplink.gateway = %q: want an IP address", g)
		}
	}
	for _, d := range s.Uplink.DNS {
		if _, err := netip.ParseAddr(d); err != nil {
			return fmt.Errorf("uplink.dns holds %q: want IP addresses", d)
		}
	}
	ports := map[string]string{s.Uplink.id(): "uplink"}
	networks := map[netip.Prefix]string{}
	for i, l := range s.LAN {
		where := fmt.Sprintf("lan %d", i+1)
		if err := l.checkLAN(where); err != nil {
			return err
		}
		if other := ports[l.id()]; other != "" {
			return fmt.Errorf("%s: %s is %s's too: each port has one use", where, cmp.Or(l.MAC, l.Interface), other)
		}
		ports[l.id()] = where
		if l.IPv6.IsValid() {
			if other := networks[l.IPv6.Masked()]; other != "" {
				return fmt.Errorf("%s: ipv6 = %s is in the network of %s", where, l.IPv6, other)
			}
			networks[l.IPv6.Masked()] = where
		}
	}
	bmcs := map[string]bool{}
	for i, b := range s.BMC {
		address, err := b.HostPort()
		if err != nil {
			return fmt.Errorf("bmc %d: address = %.100q: %w", i+1, b.Address, err)
		}
		if bmcs[address] {
			return fmt.Errorf("bmc %d: %s has a section already", i+1, address)
		}
		bmcs[address] = true
	}
	if err := checkPEM([]byte(s.Authorities.PEM)); err != nil {
		return fmt.Errorf("authorities.pem: %w", err)
	}
	for lane, n := range s.Lanes {
		known := false
		for _, name := range laneNames {
			known = known || name == lane
		}
		if !known {
			return fmt.Errorf("lanes.%s: unknown lane: want one of %s", lane, strings.Join(laneNames, ", "))
		}
		if n < 1 || n > 1024 {
			return fmt.Errorf("lanes.%s = %d: want 1 to 1024", lane, n)
		}
	}
	if s.Cache.MaxBytes < 0 {
		return fmt.Errorf("cache.max_bytes = %d: want 0 or more", s.Cache.MaxBytes)
	}
	return nil
}

var hostName = regexp.MustCompile(`^[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?$`)

// HostPort is the address with its port, in the one spelling that BMCs are known by.
func (b BMC) HostPort() (string, error) {
	host, port := b.Address, "443"
	if i := strings.LastIndexByte(host, ':'); i >= 0 && (strings.Count(host, ":") == 1 || strings.Contains(host, "]:")) {
		host, port = host[:i], host[i+1:]
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 || strconv.FormatUint(n, 10) != port {
		return "", errors.New("want a port from 1 to 65535 behind the colon")
	}
	if inner, ok := strings.CutPrefix(host, "["); ok {
		if host, ok = strings.CutSuffix(inner, "]"); !ok || !strings.Contains(host, ":") {
			return "", errors.New("want [IPv6 address]:port")
		}
	}
	if ip, err := netip.ParseAddr(host); err == nil && ip.Zone() == "" {
		return net.JoinHostPort(ip.Unmap().String(), port), nil
	}
	if host = strings.ToLower(host); !hostName.MatchString(host) {
		return "", errors.New("want a host name or an IP address, such as 10.0.0.9 or 10.0.0.9:443")
	}
	return net.JoinHostPort(host, port), nil
}

// checkPEM wants certificates and nothing else; nothing at all is fine.
func checkPEM(text []byte) error {
	for len(bytes.TrimSpace(text)) > 0 {
		block, rest := pem.Decode(text)
		if block == nil || block.Type != "CERTIFICATE" || !bytes.HasPrefix(bytes.TrimSpace(text), []byte("-----BEGIN ")) {
			return errors.New("want certificates in PEM, and nothing else")
		}
		text = rest
	}
	return nil
}

// id is one string for one port; a port that nothing picks has "".
func (p Port) id() string {
	if mac, err := net.ParseMAC(p.MAC); err == nil {
		return mac.String()
	}
	return p.Interface
}

func (p Port) check(where string) error {
	if p.MAC != "" && p.Interface != "" {
		return fmt.Errorf("%s: mac and interface are both set: keep one", where)
	}
	if p.MAC != "" {
		if _, err := net.ParseMAC(p.MAC); err != nil {
			return fmt.Errorf("%s: mac = %q: want six bytes such as 52:54:00:12:34:56", where, p.MAC)
		}
	}
	return nil
}

// Name finds the interface among those that are there.
func (p Port) Name(ifaces []net.Interface) (string, error) {
	for _, i := range ifaces {
		if p.Interface == "" && onAnother(i.Name, ifaces) {
			continue // a VLAN has its port's MAC
		}
		if p.Interface != "" && i.Name == p.Interface || p.MAC != "" && strings.EqualFold(i.HardwareAddr.String(), p.MAC) {
			return i.Name, nil
		}
	}
	if p.Interface != "" {
		return "", fmt.Errorf("no interface is named %q", p.Interface)
	}
	return "", fmt.Errorf("no interface has MAC %s", p.MAC)
}

// onAnother says whether name is a VLAN's on another interface.
func onAnother(name string, ifaces []net.Interface) bool {
	port, id, ok := strings.Cut(name, ".")
	if _, err := strconv.ParseUint(id, 10, 12); !ok || err != nil {
		return false
	}
	return slices.ContainsFunc(ifaces, func(i net.Interface) bool { return i.Name == port })
}
