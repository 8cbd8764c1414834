package addressbook

import (
	"net"
	"net/netip"
	"slices"
	"strings"
)

// IsName reports whether an address in plain form is a host name with a port:
// what it leads to is for whoever answers for its domain to say.
func IsName(plain string) bool {
	host, _, err := net.SplitHostPort(plain)
	if err != nil {
		return false
	}
	_, err = netip.ParseAddr(host)
	return err != nil
}

// carrying are the networks in which an IPv6 address carries an IPv4 one:
// compatible, NAT64, 6to4, Teredo.
var carrying = []netip.Prefix{
	netip.MustParsePrefix("::/96"), netip.MustParsePrefix("64:ff9b::/96"), netip.MustParsePrefix("64:ff9b:1::/48"),
	netip.MustParsePrefix("2002::/16"), netip.MustParsePrefix("2001::/32"),
}

// elsewhere reports whether somebody on the way decides what an address in plain
// form leads to.
func elsewhere(plain string) bool {
	if IsName(plain) {
		return true
	}
	to, err := netip.ParseAddrPort(plain)
	return err == nil && Translated(to.Addr())
}

// Translated reports whether an IPv6 address stands for an IPv4 one, which
// something on the way may unwrap.
func Translated(a netip.Addr) bool {
	return a.Is6() && !a.IsLoopback() && slices.ContainsFunc(carrying, func(p netip.Prefix) bool { return p.Contains(a) })
}

// Named are the known BMCs that text may name, in plain form: it is read as Guard
// reads it.
func (b *Book) Named(text string) []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	var out []string
	for _, one := range strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ';' }) {
		one = strings.TrimSpace(one)
		for _, form := range []string{one, strings.ReplaceAll(one, `\`, "/")} {
			if host, port, ok := lenient(form); ok {
				for _, have := range b.at(host, port) {
					out = append(out, have.Address)
				}
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}
