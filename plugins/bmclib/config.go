package bmclib

import (
	"encoding/json"
	"errors"
	"net"
	"regexp"
	"strconv"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// schema says what parseConfig accepts, as far as a schema can.
const schema = `{
  "$schema": "https://json-schema.org/draft/2020-12/schema",
  "type": "object",
  "required": ["address"],
  "additionalProperties": false,
  "properties": {
    "address": {"type": "string", "minLength": 1, "maxLength": 300,
      "description": "Host name or IP address with an optional port, over https."},
    "credentials": {"type": "string", "writeOnly": true, "x-bc": {"kind": "secret"}},
    "tlsSpkiSha256": {"type": "string", "pattern": "^([0-9a-fA-F]{64})?$",
      "description": "SHA-256 of the key that the BMC must show; without it the system's authorities judge."},
    "options": {"type": "object", "additionalProperties": false}
  }
}`

// config is a parsed configuration.
type config struct {
	host string // an IPv6 address stands without brackets
	port int
	pin  string // lower-case hex; empty: the authorities judge
}

// hostPort is the only place that a call may reach.
func (c config) hostPort() string { return net.JoinHostPort(c.host, strconv.Itoa(c.port)) }

// hostURL is the host as it stands in a URL.
func (c config) hostURL() string {
	if strings.Contains(c.host, ":") {
		return "[" + c.host + "]"
	}
	return c.host
}

// parseConfig reads { address, tlsSpkiSha256, options {} } strictly.
func parseConfig(raw json.RawMessage, port int) (config, error) {
	t, err := metal.TargetForm{Options: func(raw json.RawMessage) error {
		var none struct{}
		return driver.StrictJSON(raw, &none)
	}}.Parse(raw)
	if err != nil {
		return config{}, err
	}
	c := config{pin: t.Pin}
	if c.host, c.port, err = parseAddress(t.Address, port); err != nil {
		return config{}, errs.New(errs.InvalidAddress, "address %.80q: %v", t.Address, err)
	}
	return c, nil
}

var (
	schemeForm = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9+.-]*://`)
	userForm   = regexp.MustCompile(`^[A-Za-z0-9._@-]{1,64}$`)
)

// parseAddress reads [https://]host[:port].
func parseAddress(text string, port int) (host string, _ int, err error) {
	if scheme := schemeForm.FindString(text); scheme != "" {
		if !strings.EqualFold(scheme, "https://") {
			return "", 0, errors.New("the driver speaks https only")
		}
		text = text[len(scheme):]
	}
	return metal.ParseHostPort(text, port)
}

// maxPassword is what any BMC takes at most.
const maxPassword = 128

// credentials of one call.
type credentials struct {
	username string
	password secret.Value
}

// readCredentials takes what the host delivered. With form, a provider writes
// the password into a form as it is, and one with a sign that means something
// there would be another password, or another field.
func readCredentials(ctx *driver.Context, form bool) (credentials, error) {
	username, err := ctx.Secrets.Resolve(ctx, "username")
	if err != nil {
		return credentials{}, err
	}
	password, err := ctx.Secrets.Resolve(ctx, "password")
	if err != nil {
		return credentials{}, err
	}
	refuse := func(text string) (credentials, error) {
		return credentials{}, errs.New(errs.CredentialsUnavailable, "%s", text)
	}
	c := credentials{string(username.Reveal()), password}
	if !userForm.MatchString(c.username) {
		return refuse("user name is not 1 to 64 of A-Z a-z 0-9 . _ @ -")
	}
	switch p := string(password.Reveal()); {
	case p == "":
		return refuse("password is empty")
	case len(p) > maxPassword:
		return refuse("password is longer than " + strconv.Itoa(maxPassword) + " bytes")
	case strings.ContainsFunc(p, func(r rune) bool { return r < ' ' || r == 0x7f || r == '\ufffd' }):
		return refuse("password holds a control character, or is not UTF-8")
	case form && strings.ContainsFunc(p, func(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune("&=+%#;", r) }):
		return refuse("this BMC's login carries no password with white space, & = + % # ; or letters beyond ASCII")
	}
	return c, nil
}
