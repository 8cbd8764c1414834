// Package api serves compute.v1, the API for people and their tools. Every call
// carries a bearer token and names a tenant; what a token may do is checked
// before anything else is looked at.
package api

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/computev1/computev1connect"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/appliance/gateway/workflow"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// Commands sends signed commands.
type Commands interface {
	Submit(ctx context.Context, spec commands.Spec) (id string, err error)
	Wait(ctx context.Context, id string) (commands.Outcome, error)
	Progress(id string) string
}

// Enroller mints join strings.
type Enroller interface {
	NewToken(ctx context.Context, role agentv1.Role, siteID, machineID string, ttl time.Duration) (join string, err error)
}

// Secrets keeps secrets encrypted.
type Secrets interface {
	Put(ctx context.Context, tenant, name string, value secret.Value) (ref string, err error)
	Has(ctx context.Context, ref string) (bool, error)
}

// Artifacts takes in files for boxes and machines.
type Artifacts interface {
	Import(ctx context.Context, name, arch, format string, r io.Reader) (store.Artifact, error)
	Open(sha256 string) (*os.File, error)
	Remove(ctx context.Context, name, arch string) error
}

// Workflows runs procedures on machines.
type Workflows interface {
	Start(ctx context.Context, name string, m store.Machine, p workflow.Params) (id string, err error)
	StartProfile(ctx context.Context, profile string, m store.Machine, traceparent string) (id string, err error)
	Cancel(ctx context.Context, tenantID, id string) error
	Note(workflowID string) string
}

// Drivers lists declarations, by id and then version; kind narrows them.
type Drivers interface {
	List(kind string) []driver.Manifest
	Find(id, kind string) (*driver.Definition, bool)
}

// Profiles finds procedures by name.
type Profiles interface {
	Profile(name string) (module.Profile, bool)
}

// Config is what the API works with.
type Config struct {
	Store     *store.Store
	Commands  Commands
	Enrol     Enroller
	Secrets   Secrets
	Artifacts Artifacts
	Workflows Workflows
	// Metal is what the gateway knows about hardware; nil: there are no pools and machines.
	Metal *metal.Metal
	// Profiles are the procedures that Workflows starts.
	Profiles Profiles
	// Drivers are the drivers that the deployment registered.
	Drivers Drivers
	// Instances keeps what machines are to run; nil: that is not offered.
	Instances Instances
	// Tunnels and CancelCommand serve streams; nil: there is neither console nor proxy.
	Tunnels       Tunnels
	CancelCommand func(ctx context.Context, id string) error
	// Grants keeps what people approve; nil: that is not offered.
	Grants Grants
	// Discovery hears of what boxes are to be told; nil: nobody does.
	Discovery Discovery
	// Settle ends rotations and rebindings; nil: neither is offered.
	Settle Settle
	// Online says whether an agent holds a session.
	Online func(agentID string) bool
	Log    *slog.Logger
}

// API answers the calls.
type API struct{ Config }

// New makes the API.
func New(c Config) *API {
	a := &API{c}
	if c.Metal != nil && c.Profiles != nil {
		a.Workflows = judged{c.Workflows, a}
	}
	return a
}

// maxMessage bounds one message of a caller.
const maxMessage = 4 << 20

// Register mounts every service.
func (a *API) Register(handle func(pattern string, h http.Handler)) {
	mount := func(pattern string, h http.Handler) { handle(pattern, a.authenticate(h)) }
	options := []connect.HandlerOption{connect.WithInterceptors(&guard{a}), connect.WithReadMaxBytes(maxMessage)}
	mount(computev1connect.NewSiteServiceHandler(siteService{a}, options...))
	mount(computev1connect.NewSecretServiceHandler(secretService{a}, options...))
	if a.Metal != nil {
		mount(computev1connect.NewPoolServiceHandler(poolService{a}, options...))
		mount(computev1connect.NewMetalServiceHandler(metalService{a}, options...))
		mount(computev1connect.NewBootServiceHandler(bootService{metalService{a}}, options...))
		mount(computev1connect.NewPxeServiceHandler(pxeService{a}, options...))
	} else {
		mount(computev1connect.NewPoolServiceHandler(computev1connect.UnimplementedPoolServiceHandler{}, options...))
		mount(computev1connect.NewMetalServiceHandler(computev1connect.UnimplementedMetalServiceHandler{}, options...))
		mount(computev1connect.NewBootServiceHandler(computev1connect.UnimplementedBootServiceHandler{}, options...))
		mount(computev1connect.NewPxeServiceHandler(computev1connect.UnimplementedPxeServiceHandler{}, options...))
	}
	mount(computev1connect.NewDriverServiceHandler(driverService{a}, options...))
	mount(computev1connect.NewPlacementServiceHandler(placementService{a}, options...))
	mount(computev1connect.NewWorkflowServiceHandler(workflowService{a}, options...))
	if a.Instances != nil {
		mount(computev1connect.NewInstanceServiceHandler(instanceService{a}, options...))
	} else {
		mount(computev1connect.NewInstanceServiceHandler(computev1connect.UnimplementedInstanceServiceHandler{}, options...))
	}
	mount(computev1connect.NewArtifactServiceHandler(artifactService{a}, options...))
	mount(computev1connect.NewIsoServiceHandler(isoService{a}, options...))
	mount(computev1connect.NewEventServiceHandler(eventService{a}, options...))
	if a.Grants != nil {
		mount(computev1connect.NewGrantServiceHandler(grantService{a}, options...))
	} else {
		mount(computev1connect.NewGrantServiceHandler(computev1connect.UnimplementedGrantServiceHandler{}, options...))
	}
}

var nameForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// checkName wants what can also be a host name. Ids hold an underscore, so a
// name is never taken for one.
func checkName(what, name string) error {
	if name == "" {
		return apierr.Invalid("%s is missing", what)
	}
	if !nameForm.MatchString(name) {
		return apierr.Invalid("%s %q: want lower-case letters, digits and inner hyphens, at most 63", what, name)
	}
	return nil
}

// siteAgent is the identity that stands for a site now; ok is false before the
// box enrolled.
func (a *API) siteAgent(ctx context.Context, siteID string) (agent store.Agent, ok bool, err error) {
	agents, err := a.Store.Agents(ctx, store.AgentFilter{SiteID: siteID, Role: agentv1.Role_ROLE_SITE, State: store.AgentActive})
	if err != nil || len(agents) == 0 {
		return store.Agent{}, false, err
	}
	return agents[len(agents)-1], true, nil
}

// machineAgent is what stands for a machine now: who is online before who is
// not, the newest first.
func (a *API) machineAgent(ctx context.Context, machineID string) (agent store.Agent, ok bool, err error) {
	agents, err := a.Store.Agents(ctx, store.AgentFilter{MachineID: machineID, State: store.AgentActive})
	if err != nil || len(agents) == 0 {
		return store.Agent{}, false, err
	}
	for _, one := range slices.Backward(agents) {
		if a.Online(one.ID) {
			return one, true, nil
		}
	}
	return agents[len(agents)-1], true, nil
}

// audit records who did what. The deed is done by then: an event that cannot be
// stored is a matter for the log.
func (a *API) audit(ctx context.Context, siteID, machineID, name string, details map[string]string) {
	body := map[string]string{}
	if p, ok := ctx.Value(principalKey{}).(principal); ok {
		body["by"] = p.token.Name
	}
	maps.Copy(body, details)
	data, err := json.Marshal(body)
	if err == nil {
		err = a.Store.AddEvent(context.WithoutCancel(ctx), store.Event{SiteID: siteID, MachineID: machineID, Name: name, Class: "audit", Key: machineID, BodyJSON: string(data)})
	}
	if err != nil {
		a.Log.Error("audit event not stored", "event", name, "site", siteID, "machine", machineID, "err", err)
	}
}

// traceparent begins a trace, as W3C Trace Context writes it.
func traceparent() string {
	var id [24]byte
	rand.Read(id[:])
	return "00-" + hex.EncodeToString(id[:16]) + "-" + hex.EncodeToString(id[16:]) + "-01"
}

func unixMS(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}
