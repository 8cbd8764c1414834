package api

import (
	"context"
	"crypto/sha256"
	"errors"
	"net/http"
	"slices"
	"strings"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/computev1/computev1connect"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

// permissions says what each call needs. A call that is not here is denied.
var permissions = map[string]string{
	computev1connect.SiteServiceAddProcedure:                "compute:sites:write",
	computev1connect.SiteServiceListProcedure:               "compute:sites:read",
	computev1connect.PoolServiceAddProcedure:                "compute:pools:write",
	computev1connect.PoolServiceListProcedure:               "compute:pools:read",
	computev1connect.SecretServicePutProcedure:              "compute:secrets:write",
	computev1connect.MetalServiceEnrollProcedure:            "compute:metal:write",
	computev1connect.MetalServiceListProcedure:              "compute:metal:read",
	computev1connect.MetalServiceGetProcedure:               "compute:metal:read",
	computev1connect.MetalServiceGetPowerProcedure:          "compute:metal:read",
	computev1connect.MetalServiceSetPowerProcedure:          "compute:metal:write",
	computev1connect.MetalServiceSetBootDeviceProcedure:     "compute:metal:write",
	computev1connect.MetalServiceInspectProcedure:           "compute:metal:write",
	computev1connect.MetalServiceDeployProcedure:            "compute:metal:write",
	computev1connect.WorkflowServiceGetProcedure:            "compute:workflows:read",
	computev1connect.WorkflowServiceListProcedure:           "compute:workflows:read",
	computev1connect.ArtifactServiceImportProcedure:         "compute:artifacts:write",
	computev1connect.ArtifactServiceListProcedure:           "compute:artifacts:read",
	computev1connect.EventServiceListProcedure:              "compute:events:read",
	computev1connect.IsoServiceAddProcedure:                 "compute:isos:write",
	computev1connect.IsoServiceListProcedure:                "compute:isos:read",
	computev1connect.IsoServiceGetProcedure:                 "compute:isos:read",
	computev1connect.IsoServiceRemoveProcedure:              "compute:isos:write",
	computev1connect.BootServiceBootIsoProcedure:            "compute:metal:write",
	computev1connect.BootServiceBootKernelProcedure:         "compute:metal:write",
	computev1connect.BootServiceBootDiskProcedure:           "compute:metal:write",
	computev1connect.BootServiceWipeProcedure:               "compute:metal:write",
	computev1connect.DriverServiceListProcedure:             "compute:drivers:read",
	computev1connect.PlacementServiceFindProcedure:          "compute:placement:read",
	computev1connect.WorkflowServiceStartProcedure:          "compute:workflows:write",
	computev1connect.WorkflowServiceCancelProcedure:         "compute:workflows:write",
	computev1connect.InstanceServiceApplyProcedure:          "compute:instances:write",
	computev1connect.InstanceServiceListProcedure:           "compute:instances:read",
	computev1connect.InstanceServiceRemoveProcedure:         "compute:instances:write",
	computev1connect.MetalServiceOperateProcedure:           "compute:metal:read",
	computev1connect.MetalServiceGetCommandProcedure:        "compute:metal:read",
	computev1connect.MetalServiceRotateCredentialsProcedure: "compute:metal:write",
	computev1connect.MetalServiceRebindBmcProcedure:         "compute:metal:write",
	computev1connect.MetalServiceConfirmPowerProcedure:      "compute:metal:write",
	computev1connect.MetalServiceConsoleProcedure:           "compute:metal:console",
	computev1connect.SiteServiceForgetBmcProcedure:          "compute:metal:write",
	computev1connect.SiteServiceHttpProxyProcedure:          "compute:sites:proxy",
	computev1connect.GrantServiceProposeProcedure:           "compute:grants:write",
	computev1connect.GrantServiceApproveProcedure:           "compute:grants:write",
	computev1connect.GrantServiceGetProcedure:               "compute:grants:read",
	computev1connect.GrantServiceListProcedure:              "compute:grants:read",
	computev1connect.SiteServiceSetUnknownProcedure:         "compute:sites:write",
	computev1connect.SiteServiceGetUnknownProcedure:         "compute:sites:read",
	computev1connect.MetalServiceListFoundProcedure:         "compute:metal:read",
	computev1connect.MetalServiceConfirmMacProcedure:        "compute:metal:write",
	computev1connect.MetalServiceRejectMacProcedure:         "compute:metal:write",
	computev1connect.MetalServiceSetLoaderProcedure:         "compute:metal:write",
	computev1connect.PxeServiceExplainProcedure:             "compute:metal:read",
}

// Permissions are the names that a token may hold, sorted.
func Permissions() []string {
	var names []string
	for _, name := range permissions {
		names = append(names, name)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// AllPermissions stands for every permission.
const AllPermissions = "*"

// principal is who calls.
type principal struct{ token store.APIToken }

type principalKey struct{}

// enter finds the caller by its bearer token and checks that it may call procedure.
func (a *API) enter(ctx context.Context, header http.Header, procedure string) (context.Context, error) {
	token, ok := strings.CutPrefix(header.Get("Authorization"), "Bearer ")
	if !ok || token == "" {
		return nil, apierr.Unauthenticated("a bearer token is missing")
	}
	// Found by its hash: how long that takes says nothing about the token.
	found, err := a.Store.APIToken(ctx, sha256.Sum256([]byte(token)))
	switch {
	case errors.Is(err, store.ErrNotFound):
		return nil, apierr.Unauthenticated("the bearer token is unknown")
	case err != nil:
		return nil, err
	case !found.Expires.IsZero() && !found.Expires.After(a.Store.Now()):
		return nil, apierr.Unauthenticated("the bearer token has expired")
	}
	need := permissions[procedure]
	if need == "" {
		return nil, apierr.Denied("%s is not open to tokens", procedure)
	}
	if !slices.Contains(found.Permissions, need) && !slices.Contains(found.Permissions, AllPermissions) {
		return nil, apierr.Denied("the token lacks %s", need)
	}
	return context.WithValue(ctx, principalKey{}, principal{found}), nil
}

// checkTenant says whether the caller may act for the tenant.
func checkTenant(ctx context.Context, tenantID string) error {
	p, ok := ctx.Value(principalKey{}).(principal)
	switch {
	case !ok:
		return apierr.Unauthenticated("nobody calls")
	case tenantID == "":
		return apierr.Invalid("tenant_id is missing")
	case p.token.TenantID != store.AllTenants && p.token.TenantID != tenantID:
		return apierr.Denied("the token is not tenant %s's", tenantID)
	}
	return checkName("tenant_id", tenantID)
}

// authenticate finds the caller and checks its permission before a byte of the
// body is read: connect itself would read a whole message first.
func (a *API) authenticate(next http.Handler) http.Handler {
	writer := connect.NewErrorWriter()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, err := a.enter(r.Context(), r.Header, r.URL.Path)
		if err == nil {
			next.ServeHTTP(w, r.WithContext(ctx))
			return
		}
		err = a.wire(err, r.URL.Path)
		if !writer.IsSupported(r) {
			http.Error(w, err.Error(), http.StatusForbidden)
			return
		}
		if err := writer.Write(w, r, err); err != nil {
			a.Log.Debug("refusal not written", "procedure", r.URL.Path, "err", err)
		}
	})
}

func (a *API) wire(err error, procedure string) error {
	wire, known := apierr.ToConnect(err)
	if !known {
		a.Log.Error("call failed", "procedure", procedure, "err", err)
	}
	return wire
}

// guard checks the tenant, and turns errors into what callers see.
type guard struct{ api *API }

// WrapUnary checks the tenant that the message names.
func (g *guard) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		var err error
		if named, ok := req.Any().(interface{ GetTenantId() string }); ok {
			err = checkTenant(ctx, named.GetTenantId())
		} else {
			err = apierr.Denied("%s names no tenant", req.Spec().Procedure)
		}
		var res connect.AnyResponse
		if err == nil {
			res, err = next(ctx, req)
		}
		if err != nil {
			return nil, g.api.wire(err, req.Spec().Procedure)
		}
		return res, nil
	}
}

// WrapStreamingHandler leaves the tenant to the handler: the first message names it.
func (g *guard) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		if err := next(ctx, conn); err != nil {
			return g.api.wire(err, conn.Spec().Procedure)
		}
		return nil
	}
}

// WrapStreamingClient is for callers, which this is not.
func (g *guard) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}
