package addressbook

import (
	"net"
	"net/netip"
	"net/url"
	"regexp"
	"strconv"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/manual"
	"github.com/better-compute/site-appliance/bmc/wol"
)

// maxAddress bounds an address before anything looks at it: a host name's 253
// bytes, a scheme and a port.
const maxAddress = 300

var (
	scheme = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9+.-]*://`)
	label  = regexp.MustCompile(`^[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?$`)
	// numeric is a last label that resolvers take for a part of an IPv4 address
	// in one of its old forms (127.1, 0x7f000001): a second name for one BMC.
	numeric = regexp.MustCompile(`^([0-9]+|0x[0-9a-f]*)$`)
)

// byHand stands before the name of a machine that people switch, which no host
// and port can be taken for.
const byHand = manual.ID + "/"

// Normalise turns a BMC's address (host or IP address, with an optional scheme
// and port) into host:port in lower case. Without a port it is 623 for driver
// ipmi, and otherwise the scheme's (443 without one). A machine without a BMC is
// known by its MAC under driver wol, and by its name, with manual/ before it, under
// driver manual. Errors have code invalid-address.
func Normalise(address, driver string) (string, error) {
	switch driver {
	case wol.ID:
		plain, err := wol.Normalise(address)
		mac, _, _ := strings.Cut(plain, "@") // the way to it is not its name
		return mac, err
	case manual.ID:
		name, err := manual.Normalise(strings.TrimPrefix(address, byHand))
		if err != nil {
			return "", err
		}
		return byHand + name, nil
	}
	if len(address) > maxAddress {
		return "", errs.New(errs.InvalidAddress, "the address has %d bytes, more than %d", len(address), maxAddress)
	}
	prefix := scheme.FindString(address)
	host, port, err := split(address[len(prefix):])
	if err != nil {
		return "", errs.New(errs.InvalidAddress, "address %q: %v", address, err)
	}
	if port == "" {
		port = defaultPort(driver, strings.ToLower(prefix))
	}
	return net.JoinHostPort(host, port), nil
}

// kin is the driver by which the book knows a BMC: the console of an IPMI BMC is
// at the same address, and has the same credential, as the rest of it.
func kin(driver string) string {
	if driver == "ipmi-sol" {
		return "ipmi"
	}
	return driver
}

// tells reports whether Normalise knows the port of an address that it took: the
// address says it, or the driver's own is known. Any other driver may have one of
// its own, whatever the scheme.
func tells(address, driver string) bool {
	_, port, err := split(address[len(scheme.FindString(address)):])
	return err == nil && port != "" || kin(driver) == "ipmi" || driver == "redfish" || driver == wol.ID || driver == manual.ID
}

// web is what stands before the host of a web address as browsers read it, who do
// not count slashes.
var web = regexp.MustCompile(`^(?i:https?|wss?|ftp):[/\\]*`)

// lenient finds the host that some driver, resolver or URL parser may take s for,
// though Normalise refuses it: a URL with a path or a user, a name with a dot at
// its end, an IPv4 address in an old form. ok is false where there is none.
func lenient(s string) (host, port string, ok bool) {
	prefix := scheme.FindString(s)
	if special := web.FindString(s); len(special) > len(prefix) {
		prefix = special
	}
	if prefix == "secret://" {
		return "", "", false
	}
	s = s[len(prefix):]
	if end := strings.IndexAny(s, "/?#"); end >= 0 {
		s = s[:end]
	}
	s = s[strings.LastIndexByte(s, '@')+1:]
	if plain, err := url.PathUnescape(s); err == nil {
		s = plain
	}
	host, port, err := cut(s)
	if err != nil {
		return "", "", false
	}
	host = strings.TrimSuffix(host, ".")
	if ip, old := oldIPv4(host); old {
		return ip, port, true
	}
	host, err = parseHost(host)
	return host, port, err == nil
}

// oldIPv4 reads the forms of inet_aton: one to four numbers, of which the last
// fills what the others leave, each decimal, octal or hexadecimal.
func oldIPv4(s string) (ip string, ok bool) {
	parts := strings.Split(s, ".")
	if len(parts) > 4 {
		return "", false
	}
	var n uint32
	for i, part := range parts {
		bits := 8
		if i == len(parts)-1 {
			bits = 8 * (5 - len(parts))
		}
		v, err := strconv.ParseUint(part, 0, bits)
		if err != nil {
			return "", false
		}
		n = uint32(uint64(n)<<bits | v)
	}
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}).String(), true
}

func defaultPort(driver, scheme string) string {
	switch {
	case kin(driver) == "ipmi":
		return "623"
	case scheme == "http://":
		return "80"
	}
	return "443"
}

type addressError string

func (e addressError) Error() string { return string(e) }

// split takes host, host:port, [v6]:port, [v6] or a bare v6 apart. The port is
// empty when there is none.
func split(s string) (host, port string, err error) {
	if host, port, err = cut(s); err == nil {
		host, err = parseHost(host)
	}
	return host, port, err
}

// cut is split without a look at the host.
func cut(s string) (host, port string, err error) {
	host = s
	switch {
	case strings.HasPrefix(s, "["):
		inner, rest, closed := strings.Cut(s[1:], "]")
		if !closed || !strings.Contains(inner, ":") || rest != "" && rest[0] != ':' {
			return "", "", addressError("want [IPv6 address]:port")
		}
		host = inner
		if rest != "" {
			if port, err = parsePort(rest[1:]); err != nil {
				return "", "", err
			}
		}
	case strings.Count(s, ":") == 1:
		var text string
		host, text, _ = strings.Cut(s, ":")
		if port, err = parsePort(text); err != nil {
			return "", "", err
		}
	}
	return host, port, nil
}

func parsePort(s string) (string, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 || strconv.FormatUint(n, 10) != s {
		return "", addressError("want a port from 1 to 65535")
	}
	return s, nil
}

func parseHost(s string) (string, error) {
	if ip, err := netip.ParseAddr(s); err == nil {
		ip = ip.Unmap()
		switch {
		case ip.Zone() != "":
			return "", addressError("an address with a zone is not supported")
		case ip.IsUnspecified() || ip.IsMulticast() || ip == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
			return "", addressError("not an address of one host")
		}
		return ip.String(), nil
	}
	s = strings.ToLower(s)
	if s == "" || len(s) > 253 {
		return "", addressError("want a host name or an IP address")
	}
	labels := strings.Split(s, ".")
	for _, l := range labels {
		if !label.MatchString(l) {
			return "", addressError("want a host name or an IP address, with an optional port and scheme")
		}
	}
	if numeric.MatchString(labels[len(labels)-1]) {
		return "", addressError("not a whole IP address")
	}
	return s, nil
}
