package dhcp

import "github.com/better-compute/site-appliance/pxe/decide"

// What a client is, as far as DHCP cares.

func isSystem(c decide.Client) bool   { return c.Program == decide.System }
func isIPXE(c decide.Client) bool     { return c.Program == decide.IPXE }
func isHTTPBoot(c decide.Client) bool { return c.Program == decide.HTTPBoot }
