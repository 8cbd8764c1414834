package main

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway"
	"github.com/better-compute/site-appliance/appliance/gateway/api"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/config"
	"github.com/better-compute/site-appliance/appliance/gateway/instances"
	"github.com/better-compute/site-appliance/appliance/gateway/keys"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/provision"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/appliance/gateway/workflow"
)

func runGateway(ctx context.Context, args []string, std stdio) error {
	return dispatch(ctx, "better-compute gateway", []command{
		{"init", "make a gateway's folder and keys", gatewayInit},
		{"serve", "serve agents and people", gatewayServe},
		{"token", "mint an API token for a tenant", gatewayToken},
		{"bundle", "say who may approve destructive work", gatewayBundle},
	}, args, std)
}

func gatewayInit(_ context.Context, args []string, std stdio) error {
	f := newFlags("gateway init --dir DIR --url URL [--url URL …]", std)
	var urls stringList
	dir := f.String("dir", "", "the gateway's `folder`")
	f.Var(&urls, "url", "`URL` under which boxes reach the gateway, https://HOST:PORT; may be given several times")
	if _, err := f.parse(args, 0, 0); err != nil {
		return err
	}
	if *dir == "" {
		return errors.New("gateway init: --dir is missing")
	}
	for _, u := range urls {
		if err := trust.CheckURL(u); err != nil {
			return fmt.Errorf("gateway init: --url %q: want https://HOST:PORT: %w", u, err)
		}
	}
	notes, err := keys.Init(*dir, urls, time.Now())
	if err != nil {
		return err
	}
	for _, note := range notes {
		fmt.Fprintln(std.err, note)
	}
	_, err = fmt.Fprintf(std.err, "Client settings: %s (--client, or $%s)\n", filepath.Join(*dir, keys.ClientFile), clientEnv)
	return err
}

func gatewayServe(ctx context.Context, args []string, std stdio) error {
	f := newFlags("gateway serve --dir DIR [--listen HOST:PORT]", std)
	dir := f.String("dir", "", "the gateway's `folder`")
	listen := f.String("listen", gateway.DefaultListen, "`address` to listen at")
	verbose := f.Bool("verbose", false, "log every step")
	if _, err := f.parse(args, 0, 0); err != nil {
		return err
	}
	if *dir == "" {
		return errors.New("gateway serve: --dir is missing")
	}
	level := slog.LevelInfo
	if *verbose {
		level = slog.LevelDebug
	}
	return serveGateway(ctx, *dir, gateway.Options{Listen: *listen, Log: slog.New(slog.NewTextHandler(std.err, &slog.HandlerOptions{Level: level}))}, nil)
}

// serveGateway puts the gateway's parts together and serves until ctx ends.
// ready, where it is not nil, gets them before the first call.
func serveGateway(ctx context.Context, dir string, o gateway.Options, ready func(*gateway.Gateway)) (err error) {
	settings, err := config.Load(dir)
	if err != nil {
		return apierr.BadConfig("%v", err)
	}
	var hardware *metal.Metal
	if settings.Has(config.Metal) {
		if hardware, err = metal.New(settings.MetalOptions()); err != nil {
			return err
		}
		m, err := hardware.Module()
		if err != nil {
			return err
		}
		o.Modules = append(o.Modules, m)
	}
	if settings.Has(config.Provision) {
		o.Modules = append(o.Modules, provision.Module(settings.ModuleProfiles()...))
	}
	o.Modules = append(o.Modules, instances.Module())
	g, err := gateway.New(dir, o)
	if err != nil {
		return configError(err)
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	if err := adoptAdmin(ctx, g.Store, dir); err != nil {
		return err
	}
	stopExternal, err := startExternal(ctx, g, settings.ExternalDrivers)
	defer func() { err = errors.Join(err, stopExternal()) }()
	if err != nil {
		return configError(err)
	}
	engine := workflow.New(workflow.Config{
		Store: g.Store, Modules: g.Modules, Commands: g.Commands, Enrol: g.Enrol, Secrets: g.Secrets, Online: g.Sessions.Online, Log: g.Log.With("part", "workflow"),
	})
	g.Discovery.Turn = engine.LockSite
	g.Sessions.OnState(func(string, bool) { engine.Wake() })
	g.Sessions.OnEvent(func(context.Context, string, *agentv1.Event) { engine.Wake() })
	wanted := instances.New(instances.Config{Store: g.Store, Commands: g.Commands, Online: g.Sessions.Online, Log: g.Log.With("part", "instances")})
	g.Sessions.OnState(wanted.Came)
	g.Sessions.OnEvent(wanted.Heard)
	if hardware != nil {
		g.Nodes.Layout = hardware.Layout
	}
	api.New(api.Config{
		Metal: hardware, Profiles: g.Modules, Drivers: g.Drivers, Instances: wanted, Grants: g.Grants,
		Discovery: g.Discovery, Settle: g.Settle, Tunnels: g.Tunnels, CancelCommand: g.Commands.Cancel,
		Store: g.Store, Commands: g.Commands, Enrol: g.Enrol, Secrets: g.Secrets, Artifacts: g.Artifacts, Workflows: engine, Online: g.Sessions.Online, Log: g.Log.With("part", "api"),
	}).Register(g.Handle)
	if ready != nil {
		ready(g)
	}

	ctx, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	var failed error
	wg.Go(func() {
		// A gateway that cannot run workflows must not look as if it could.
		defer stop()
		failed = engine.Run(ctx)
	})
	wg.Go(func() { wanted.Run(ctx) })
	err = g.Serve(ctx)
	stop()
	wg.Wait()
	return errors.Join(err, failed)
}

// configError says by its code what the deployment has configured wrong.
func configError(err error) error {
	var known *apierr.Error
	if errs.CodeOf(err) != errs.InvalidConfig || errors.As(err, &known) {
		return err
	}
	return apierr.BadConfig("%s", errs.From(err).Message)
}

// storeFile is where the gateway keeps its store.
const storeFile = "gateway.db"

// adminName is the name of the token that gateway init made.
const adminName = "admin"

// adoptAdmin lets the token in the folder's token file do everything. A token
// that was replaced there stops working; without the file the last one stays,
// so that it may be kept elsewhere.
func adoptAdmin(ctx context.Context, st *store.Store, dir string) error {
	data, err := os.ReadFile(filepath.Join(dir, keys.TokenFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the admin token: %w", err)
	}
	token := strings.TrimSpace(string(data))
	if len(token) < 32 {
		return fmt.Errorf("read the admin token: %s holds fewer than 32 characters", keys.TokenFile)
	}
	return st.PutAPIToken(ctx, store.APIToken{Hash: sha256.Sum256([]byte(token)), Name: adminName, TenantID: store.AllTenants,
		Permissions: []string{api.AllPermissions}, Created: st.Now()})
}

// gatewayToken works beside a gateway that serves: both use the store.
func gatewayToken(ctx context.Context, args []string, std stdio) error {
	f := newFlags("gateway token --dir DIR --tenant TENANT --name NAME --allow PERMISSION [--allow PERMISSION …] [--ttl DURATION]", std)
	var allow stringList
	dir := f.String("dir", "", "the gateway's `folder`")
	tenant := f.String("tenant", "default", "`tenant` that the token speaks for")
	name := f.String("name", "", "the token's `name`; a token of that name is replaced")
	ttl := f.Duration("ttl", 0, "the token's life (default: no end)")
	f.Var(&allow, "allow", "`permission`: "+strings.Join(api.Permissions(), ", ")+"; may be given several times")
	if _, err := f.parse(args, 0, 0); err != nil {
		return err
	}
	switch {
	case *dir == "" || *name == "" || len(allow) == 0:
		return errors.New("gateway token: --dir, --name and --allow are needed")
	case *tenant == store.AllTenants || *tenant == "":
		return errors.New("gateway token: a token is one tenant's")
	case *ttl < 0:
		return errors.New("gateway token: --ttl is below zero")
	}
	for _, permission := range allow {
		if !slices.Contains(api.Permissions(), permission) {
			return fmt.Errorf("gateway token: unknown permission %q; there are %s", permission, strings.Join(api.Permissions(), ", "))
		}
	}
	path := filepath.Join(*dir, storeFile)
	if _, err := os.Stat(filepath.Join(*dir, keys.CACertFile)); err != nil {
		return fmt.Errorf("gateway token: %s is no gateway's folder: %w", *dir, err)
	}
	st, err := store.Open(path, time.Now)
	if err != nil {
		return err
	}
	defer st.Close()
	token := "bct_" + strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(randomBytes(32)))
	t := store.APIToken{Hash: sha256.Sum256([]byte(token)), Name: *name, TenantID: *tenant, Permissions: allow, Created: st.Now()}
	if *ttl > 0 {
		t.Expires = st.Now().Add(*ttl)
	}
	if err := st.PutAPIToken(ctx, t); err != nil {
		return err
	}
	_, err = fmt.Fprintln(std.out, token)
	return err
}

func randomBytes(n int) []byte {
	b := make([]byte, n)
	rand.Read(b)
	return b
}
