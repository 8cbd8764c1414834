package redfish

import (
	"crypto/x509"

	"github.com/better-compute/site-appliance/appliance/base/secret"
)

// target is one BMC and what it takes to speak with it.
type target struct {
	address string // host:port
	// pin is the hex SHA-256 of the public key of the BMC's certificate. When it
	// is empty, the certificate must be valid for the host under roots.
	pin      string
	roots    *x509.CertPool // nil: the system's
	username string
	password secret.Value
}
