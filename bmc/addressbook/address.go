package addressbook

import (
	"net"
	"net/netip"
	"regexp"
	"strconv"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
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

// Normalise turns a BMC's address (host or IP address, with an optional scheme
// and port) into host:port in lower case. Without a port it is 623 for driver
// ipmi, and otherwise the scheme's (443 without one). Errors have code
// invalid-address.
func Normalise(address, driver string) (string, error) {
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

func defaultPort(driver, scheme string) string {
	switch {
	case driver == "ipmi":
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
	host, err = parseHost(host)
	return host, port, err
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
