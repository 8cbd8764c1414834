// Package provision is the module by which workflows reach drivers: it brings
// the command kind driver.invoke.
package provision

import (
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/plugins/driver/invocation"
)

// Module brings driver.invoke and the given profiles. Driver operations include
// power and deployment, so the kind is destructive and never retry-safe as a whole.
func Module(profiles ...module.Profile) module.Module {
	return module.Module{
		Name: "provision",
		Kinds: []module.Kind{{
			Name: invocation.Kind, Lane: "provision", Timeout: 10 * time.Minute, Destructive: true,
			Roles: []agentv1.Role{agentv1.Role_ROLE_NODE, agentv1.Role_ROLE_SITE, agentv1.Role_ROLE_RAMDISK},
		}},
		Profiles: profiles,
	}
}
