package redfish

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"io"
	"log/slog"
	"net/netip"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// ID is the driver's id, and version its own.
const (
	ID      = "redfish"
	version = "1.1.0"
)

// Options are what a site says of its BMCs.
type Options struct {
	// Roots judge the BMCs without a pin; nil: the system's.
	Roots *x509.CertPool
	// Legacy says which BMC, by host:port, may use RSA key exchange and TLS 1.0
	// and 1.1; nil: none.
	Legacy func(address string) bool
	// Spool is the folder that firmware images are kept in while they are proven
	// and pushed; empty: the system's for temporary files.
	Spool string
	// Own opens a firmware image that the site itself serves to BMCs at a URL; no
	// reader and no error: it serves none there. Nil: it serves nothing.
	Own func(ctx context.Context, url string) (io.ReadCloser, error)
	// Refuse says why no firmware image is fetched from an address; empty: it may
	// be. Nil: from any.
	Refuse func(netip.Addr) string
	Log    *slog.Logger
}

// New makes the driver. closer logs out of every BMC; calls after it work, and
// log out as soon as they end.
func New(o Options) (d *driver.Definition, closer func(context.Context), err error) {
	p := newPool(o)
	d, err = define(p)
	return d, p.close, err
}

func define(p *pool) (*driver.Definition, error) {
	return driver.Define(driver.Spec[config]{
		ID: ID, Version: version, RunsOn: "site",
		Schema:    json.RawMessage(configSchema),
		Parse:     parseConfig,
		RetrySafe: retrySafe(),
		Validate: func(ctx *driver.Context, c config) error {
			_, err := (&machine{p, c}).GetPower(ctx)
			return err
		},
	}, kinds(p)...)
}

// kinds are what the driver serves, one line each.
func kinds(p *pool) []driver.Part[config] {
	return []driver.Part[config]{
		driver.Implement(metal.PowerKind(), func(c config, _ *driver.Context) (metal.Power, error) { return &machine{p, c}, nil }),
		driver.Implement(metal.VirtualMediaKind(), func(c config, _ *driver.Context) (metal.VirtualMedia, error) { return &machine{p, c}, nil }),
		driver.Implement(metal.ManagementKind(), func(c config, _ *driver.Context) (metal.Management, error) { return &machine{p, c}, nil }),
		driver.Implement(metal.InspectKind(), func(c config, _ *driver.Context) (metal.Inspector, error) { return &machine{p, c}, nil }),
		driver.Implement(metal.BIOSKind(), func(c config, _ *driver.Context) (metal.BIOS, error) { return &machine{p, c}, nil }),
		driver.Implement(metal.RAIDKind(), func(c config, _ *driver.Context) (metal.RAID, error) { return &machine{p, c}, nil }),
		driver.Implement(metal.FirmwareKind(), func(c config, _ *driver.Context) (metal.FirmwareManager, error) { return &machine{p, c}, nil }),
		driver.Implement(metal.ConsoleKind(), func(c config, _ *driver.Context) (metal.Console, error) { return &machine{p, c}, nil }),
		driver.Implement(metal.CredentialsKind(), func(c config, _ *driver.Context) (metal.Credentials, error) { return &machine{p, c}, nil }),
	}
}

// served are the names of kinds.
var served = []string{"power", "management", "virtual-media", "inspect", "bios", "raid", "firmware", "console", "credentials"}

// retrySafe adds to what is so by its nature nothing: every call reads first,
// but what it then changes may have been changed by another.
func retrySafe() []string { return metal.RetrySafe(served...) }

// configSchema says what parseConfig accepts, as far as a schema can.
const configSchema = `{
  "$schema": "https://json-schema.org/draft/2020-12/schema",
  "type": "object",
  "required": ["address"],
  "additionalProperties": false,
  "properties": {
    "address": {"type": "string", "minLength": 1, "maxLength": 300,
      "description": "Host name or IP address with an optional port (443)."},
    "credentials": {"type": "string", "writeOnly": true, "x-bc": {"kind": "secret"}},
    "tlsSpkiSha256": {"type": "string", "pattern": "^([0-9A-Fa-f]{64})?$",
      "description": "Hex SHA-256 of the public key of the BMC's certificate."}
  }
}`

// config is a parsed configuration.
type config struct {
	address string // host:port
	pin     string // hex, lower case; empty: none
}

// parseConfig reads { address, tlsSpkiSha256 }. Options are invalid-config: this
// driver takes none, and trust is nothing that an option could loosen.
func parseConfig(raw json.RawMessage) (config, error) {
	t, err := metal.TargetForm{}.Parse(raw)
	if err != nil {
		return config{}, err
	}
	if scheme, _, found := strings.Cut(t.Address, "://"); found && !strings.EqualFold(scheme, "https") {
		return config{}, errs.New(errs.InvalidAddress, "driver redfish speaks https only, not %.20q", scheme)
	}
	address, err := addressbook.Normalise(t.Address, ID)
	return config{address: address, pin: t.Pin}, err
}
