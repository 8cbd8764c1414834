package httpboot

import (
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"strings"

	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// ScriptURL is where the machine with this MAC finds its script.
func ScriptURL(base, mac string) string { return base + "/boot/" + dashed(mac) + "/" + scriptName }

// LoaderURL is where HTTP boot finds its boot program.
func LoaderURL(base, mac, file string) string { return base + "/boot/" + dashed(mac) + "/" + file }

// dashed has no colons: they are legal in a path, but not every firmware's parser knows.
func dashed(mac string) string { return strings.ReplaceAll(mac, ":", "-") }

// ImageURL is where firmware finds what it boots by itself: a disc image or a
// unified kernel image.
func (h *Handler) ImageURL(base, mac string, m *pxev1.Machine, a decide.Action) string {
	name := ukiName
	if a == decide.HTTPISO || a == decide.SanbootISO {
		name = isoName(m)
	}
	return base + "/boot/" + dashed(mac) + "/" + h.boots.same(m, h.cfg.Now(), decide.HTTPBoot) + "/" + name
}

var plainName = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}$`)

// isoName ends as firmware wants a disc image's URL to end.
func isoName(m *pxev1.Machine) string {
	name := strings.TrimSuffix(m.GetIso().GetName(), isoSuffix)
	if !plainName.MatchString(name) {
		name = "disc"
	}
	return name + isoSuffix
}

// split cuts a path at slashes and forgives doubled ones, which firmware makes.
func split(path string) []string {
	return strings.FieldsFunc(path, func(r rune) bool { return r == '/' })
}

// baseOf is how the client reached the box: by the address that it names as the host,
// or where its connection ends.
func baseOf(r *http.Request) string {
	if a, err := netip.ParseAddrPort(r.Host); err == nil && plain(a.Addr()) {
		return Base(a)
	}
	if a, err := netip.ParseAddr(bare(r.Host)); err == nil && plain(a) {
		return Base(netip.AddrPortFrom(a, 80))
	}
	if local, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr); ok {
		a := local.AddrPort()
		return Base(netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port()))
	}
	return "http://" + r.Host
}

// Base is how the URLs begin of who reaches the box at an address.
func Base(at netip.AddrPort) string {
	switch {
	case at.Port() != 80:
		return "http://" + at.String()
	case at.Addr().Is6():
		return "http://[" + at.Addr().String() + "]"
	}
	return "http://" + at.Addr().String()
}

// plain says whether an address can stand in a URL as it is.
func plain(a netip.Addr) bool { return a.Zone() == "" && !a.Is4In6() }

// bare is a URL's host without the brackets of an IPv6 address.
func bare(host string) string {
	if inner, ok := strings.CutPrefix(host, "["); ok {
		if inner, ok = strings.CutSuffix(inner, "]"); ok && strings.Contains(inner, ":") {
			return inner
		}
	}
	return host
}

// bootPath is where the files of a boot are, over TFTP too.
func bootPath(mac, token string) string { return "/boot/" + dashed(mac) + "/" + token + "/" }

// hostOf is the address of a base URL.
func hostOf(base string) netip.Addr {
	host := strings.TrimPrefix(base, "http://")
	if a, err := netip.ParseAddrPort(host); err == nil {
		return a.Addr()
	}
	a, _ := netip.ParseAddr(bare(host))
	return a
}
