package ipmi

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// schema says what parseConfig accepts, as far as a schema can.
const schema = `{
  "$schema": "https://json-schema.org/draft/2020-12/schema",
  "type": "object",
  "required": ["address"],
  "additionalProperties": false,
  "properties": {
    "address": {"type": "string", "minLength": 1, "maxLength": 300,
      "description": "Host name or IP address with an optional port (623)."},
    "credentials": {"type": "string", "writeOnly": true, "x-bc": {"kind": "secret"}},
    "tlsSpkiSha256": {"type": "string", "maxLength": 0,
      "description": "IPMI has no TLS: a pin is refused."},
    "options": {"type": "object", "additionalProperties": false, "properties": {
      "cipherSuite": {"type": "integer", "enum": [3, 8, 12, 17], "default": 17}}}
  }
}`

const (
	defaultPort  = 623
	defaultSuite = 17
	// maxPassword is IPMI 2.0's.
	maxPassword = 20
)

// config is a parsed configuration.
type config struct {
	host  string
	port  int
	suite int
}

// parseConfig reads { address, options { cipherSuite } } strictly. A pin is
// pin-unsupported, since nothing could check it.
func parseConfig(raw json.RawMessage) (config, error) {
	var in struct {
		Address       *string          `json:"address"`
		Credentials   *string          `json:"credentials"`
		TLSSPKISHA256 string           `json:"tlsSpkiSha256"`
		Options       *json.RawMessage `json:"options"`
	}
	if err := driver.StrictJSON(raw, &in, "address", "credentials", "tlsSpkiSha256", "options"); err != nil {
		return config{}, errs.New(errs.InvalidConfig, "configuration: %v", err)
	}
	if in.Address == nil {
		return config{}, errs.New(errs.InvalidConfig, "configuration: address is missing")
	}
	if in.TLSSPKISHA256 != "" {
		return config{}, errs.New(errs.PinUnsupported,
			"IPMI has no TLS, so the key pin cannot be checked: use a Redfish driver, or remove the pin")
	}
	c := config{suite: defaultSuite}
	if in.Options != nil {
		suite, err := parseOptions(*in.Options)
		if err != nil {
			return config{}, errs.New(errs.InvalidConfig, "options: %v", err)
		}
		c.suite = suite
	}
	var err error
	if c.host, c.port, err = parseAddress(*in.Address); err != nil {
		return config{}, errs.New(errs.InvalidAddress, "address %.80q: %v", *in.Address, err)
	}
	return c, nil
}

// parseOptions answers the cipher suite: only those with an integrity HMAC and
// AES. Suite 0 needs no password at all, and 1 and 2 do not encrypt.
func parseOptions(raw json.RawMessage) (int, error) {
	var in struct {
		CipherSuite *int `json:"cipherSuite"`
	}
	if err := driver.StrictJSON(raw, &in, "cipherSuite"); err != nil {
		return 0, err
	}
	if in.CipherSuite == nil {
		return defaultSuite, nil
	}
	if !slices.Contains([]int{3, 8, 12, 17}, *in.CipherSuite) {
		return 0, fmt.Errorf("cipherSuite %d: want 17, 12, 8 or 3", *in.CipherSuite)
	}
	return *in.CipherSuite, nil
}

var (
	schemeForm = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9+.-]*://`)
	labelForm  = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?$`)
	userForm   = regexp.MustCompile(`^[A-Za-z0-9._@-]{1,64}$`)
)

// parseAddress reads [scheme://]host[:port], where an IPv6 address with a port
// stands in brackets.
func parseAddress(text string) (host string, port int, err error) {
	text = text[len(schemeForm.FindString(text)):]
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
	port = defaultPort
	if portText != "" {
		n, err := strconv.ParseUint(strings.TrimPrefix(portText, ":"), 10, 16)
		if err != nil || n == 0 || portText[0] != ':' || portText[1] == '+' {
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

// credentials of one call.
type credentials struct {
	username string
	password secret.Value
}

func readCredentials(ctx *driver.Context) (credentials, error) {
	username, err := ctx.Secrets.Resolve(ctx, "username")
	if err != nil {
		return credentials{}, err
	}
	password, err := ctx.Secrets.Resolve(ctx, "password")
	if err != nil {
		return credentials{}, err
	}
	c := credentials{string(username.Reveal()), password}
	// A leading hyphen would still be ipmitool's -U argument, never an option.
	if !userForm.MatchString(c.username) {
		return credentials{}, errs.New(errs.CredentialsUnavailable, "user name is not 1 to 64 of A-Z a-z 0-9 . _ @ -")
	}
	p := password.Reveal()
	switch {
	case len(p) == 0:
		return credentials{}, errs.New(errs.CredentialsUnavailable, "password is empty")
	case len(p) > maxPassword:
		return credentials{}, errs.New(errs.CredentialsUnavailable, "password is longer than IPMI's %d bytes", maxPassword)
	case strings.ContainsFunc(string(p), func(r rune) bool { return unicode.IsSpace(r) || unicode.IsControl(r) }):
		return credentials{}, errs.New(errs.CredentialsUnavailable, "password holds white space or a control character, of which ipmitool reads only what comes before")
	}
	return c, nil
}
