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
