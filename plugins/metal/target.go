package metal

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"net/netip"
	"regexp"
	"strconv"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// Target is whom a driver's configuration names: { address, credentials,
// tlsSpkiSha256, options }. The credentials are the host's to fetch.
type Target struct {
	// Address is as it was written; what it may be is the driver's matter.
	Address string
	// Pin is the lower-case hex SHA-256 of the key that the target must show;
	// empty: none is pinned.
	Pin string
}

// TargetForm is what a driver takes of that.
type TargetForm struct {
	// Unpinned says why no pin can be checked; empty: one can.
	Unpinned string
	// Options reads the driver's own; nil: it takes none, not even empty ones.
	Options func(json.RawMessage) error
}

// Parse reads a configuration strictly. Codes: invalid-config, and
// pin-unsupported for a pin that nothing could check.
func (f TargetForm) Parse(raw json.RawMessage) (Target, error) {
	var in struct {
		Address     *string          `json:"address"`
		Credentials *string          `json:"credentials"`
		Pin         string           `json:"tlsSpkiSha256"`
		Options     *json.RawMessage `json:"options"`
	}
	keys := []string{"address", "credentials", "tlsSpkiSha256"}
	if f.Options != nil {
		keys = append(keys, "options")
	}
	if err := driver.StrictJSON(raw, &in, keys...); err != nil {
		return Target{}, errs.New(errs.InvalidConfig, "configuration: %v", err)
	}
	switch {
	case in.Address == nil:
		return Target{}, errs.New(errs.InvalidConfig, "configuration: address is missing")
	case in.Pin == "":
	case f.Unpinned != "":
		return Target{}, errs.New(errs.PinUnsupported, "%s", f.Unpinned)
	default:
		if sum, err := hex.DecodeString(in.Pin); err != nil || len(sum) != 32 {
			return Target{}, errs.New(errs.InvalidConfig, "tlsSpkiSha256: want a SHA-256 of 64 hex digits")
		}
	}
	if in.Options != nil {
		if err := f.Options(*in.Options); err != nil {
			return Target{}, errs.New(errs.InvalidConfig, "options: %v", err)
		}
	}
	return Target{Address: *in.Address, Pin: strings.ToLower(in.Pin)}, nil
}

var labelForm = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?$`)

// ParseHostPort reads host[:port], where an IPv6 address with a port stands in
// brackets; the host it answers has none. port is what stands for none.
func ParseHostPort(text string, port int) (host string, _ int, err error) {
	host, portText := text, ""
	switch {
	case strings.HasPrefix(text, "["):
		end := strings.IndexByte(text, ']')
		if end < 0 {
			return "", 0, errors.New("] is missing")
		}
		host, portText = text[1:end], text[end+1:]
		if a, err := netip.ParseAddr(host); err != nil || !a.Is6() {
			return "", 0, errors.New("brackets hold no IPv6 address")
		}
	case strings.Count(text, ":") == 1:
		i := strings.IndexByte(text, ':')
		host, portText = text[:i], text[i:]
	}
	if portText != "" {
		n, err := strconv.ParseUint(strings.TrimPrefix(portText, ":"), 10, 16)
		if err != nil || n == 0 || portText[0] != ':' {
			return "", 0, errors.New("port is not a number from 1 to 65535")
		}
		port = int(n)
	}
	if a, err := netip.ParseAddr(host); err == nil {
		if a.Zone() != "" {
			return "", 0, errors.New("zones are not supported")
		}
		return a.String(), port, nil
	}
	if len(host) > 253 {
		return "", 0, errors.New("host name is too long")
	}
	for label := range strings.SplitSeq(host, ".") {
		if !labelForm.MatchString(label) {
			return "", 0, errors.New("want a host name or an IP address, with an optional port")
		}
	}
	return host, port, nil
}
