package instances

import (
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
)

// The command kinds that a node serves.
const (
	applyKind  = "instance.apply"
	removeKind = "instance.remove"
	listKind   = "instance.list"
)

// Module brings the command kinds of instances.
func Module() module.Module {
	m := module.Module{Name: "instances"}
	for _, name := range []string{applyKind, removeKind, listKind} {
		m.Kinds = append(m.Kinds, module.Kind{
			Name: name, Lane: "provision", Timeout: 10 * time.Minute, RetrySafe: true, Roles: []agentv1.Role{agentv1.Role_ROLE_NODE},
		})
	}
	return m
}
