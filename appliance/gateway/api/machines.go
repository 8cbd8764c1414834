package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/placement"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/appliance/gateway/workflow"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/plugins/driver/binding"
	"github.com/better-compute/site-appliance/pxe/productuuid"
)

type metalService struct{ *API }

// Enroll makes a machine of a pool.
func (s metalService) Enroll(ctx context.Context, req *connect.Request[computev1.EnrollMachineRequest]) (*connect.Response[computev1.EnrollMachineResponse], error) {
	in := req.Msg
	if err := checkName("name", in.Name); err != nil {
		return nil, err
	}
	bmc, err := metal.ParseBMC(in.TenantId, in.Bmc)
	if err != nil {
		return nil, err
	}
	macs, err := metal.ParseMACs(in.Macs)
	if err != nil {
		return nil, err
	}
	uuid, ok := productuuid.Parse(in.ProductUuid)
	if uuid != "" && !ok {
		return nil, apierr.Invalid("product_uuid %.80q: want 32 hex digits such as 4c4c4544-0042-3010-8056-b4c04f303232", in.ProductUuid)
	}
	if err := metal.CheckLoader(in.Loader); err != nil {
		return nil, err
	}
	pool, err := s.Store.Pool(ctx, in.TenantId, in.Pool)
	if err != nil {
		return nil, err
	}
	if err := s.checkEnrolment(ctx, pool, bmc, macs, uuid); err != nil {
		return nil, err
	}
	if err := s.credentialThere(ctx, bmc); err != nil {
		return nil, err
	}
	overrides, err := overridesOf(in.Drivers)
	if err != nil {
		return nil, err
	}
	drivers, profile, err := s.Metal.Bindings(in.TenantId, bmc, in.HardwareProfile, pool.HardwareProfile, overrides)
	if err != nil {
		return nil, err
	}
	if err := module.SecretsByReference(s.Drivers, drivers); err != nil {
		return nil, apierr.Invalid("%s", errs.From(err).Message)
	}
	m := store.Machine{ID: s.Store.NewID("node"), TenantID: in.TenantId, Name: in.Name, PoolID: pool.ID, SiteID: pool.SiteID, BMC: bmc, MACs: macs,
		ProductUUID: uuid, State: metal.Enrolled, Created: s.Store.Now(), Drivers: drivers, HardwareProfile: profile, Loader: in.Loader}
	if err := s.Store.AddMachine(ctx, m); err != nil {
		return nil, s.whoseIt(ctx, m, err)
	}
	s.changed() // a site that inspects unknown machines is to know this one
	s.audit(ctx, m.SiteID, m.ID, "machine.enrolled", map[string]string{"name": m.Name, "driver": bmc.Driver, "address": bmc.Address, "credentials": bmc.CredentialsRef})
	out, err := s.wireMachine(ctx, m)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.EnrollMachineResponse{Machine: out}), nil
}

// whoseIt names what keeps a machine from being added, where the tenant may know it.
func (s metalService) whoseIt(ctx context.Context, m store.Machine, err error) error {
	if !errors.Is(err, store.ErrConflict) {
		return err
	}
	if other, ferr := s.Store.Machine(ctx, m.TenantID, m.Name); ferr == nil && other.Name == m.Name {
		return apierr.Taken("there is a machine %s", m.Name)
	}
	machines, ferr := s.Store.Machines(ctx, m.TenantID)
	if ferr != nil {
		return err
	}
	for _, other := range machines {
		for _, mac := range m.MACs {
			if other.SiteID == m.SiteID && slices.Contains(other.MACs, mac) {
				return apierr.Taken("MAC %s is machine %s's", mac, other.Name)
			}
		}
	}
	return err
}

// SetLoader changes the boot program that a machine's UEFI firmware gets. The box hears
// of it with the next change of what boots there.
func (s metalService) SetLoader(ctx context.Context, req *connect.Request[computev1.SetLoaderRequest]) (*connect.Response[computev1.SetLoaderResponse], error) {
	in := req.Msg
	if err := metal.CheckLoader(in.Loader); err != nil {
		return nil, err
	}
	m, err := s.Store.Machine(ctx, in.TenantId, in.Machine)
	if err != nil {
		return nil, err
	}
	if err := s.Store.SetLoader(ctx, m.ID, in.Loader); err != nil {
		return nil, err
	}
	m.Loader = in.Loader
	s.audit(ctx, m.SiteID, m.ID, "machine.loader", map[string]string{"name": m.Name, "loader": in.Loader})
	out, err := s.wireMachine(ctx, m)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.SetLoaderResponse{Machine: out}), nil
}

// overridesOf reads the drivers that an enrolment binds itself.
func overridesOf(wire map[string]*computev1.DriverBinding) (map[string]binding.Binding, error) {
	overrides := map[string]binding.Binding{}
	for _, kind := range slices.Sorted(maps.Keys(wire)) {
		b, err := binding.New(wire[kind].GetDriver(), json.RawMessage(wire[kind].GetConfigJson()))
		if err != nil {
			return nil, apierr.Invalid("drivers: kind %.80q: %v", kind, err)
		}
		overrides[kind] = b
	}
	return overrides, nil
}

func wireBindings(bindings map[string]binding.Binding) map[string]*computev1.DriverBinding {
	out := map[string]*computev1.DriverBinding{}
	for kind, b := range bindings {
		out[kind] = &computev1.DriverBinding{Driver: b.Driver, ConfigJson: string(b.Config)}
	}
	return out
}

func (s metalService) wireMachine(ctx context.Context, m store.Machine) (*computev1.Machine, error) {
	out := &computev1.Machine{
		Id: m.ID, Name: m.Name, PoolId: m.PoolID, Macs: m.MACs, ProductUuid: m.ProductUUID, State: m.State, HardwareJson: m.HardwareJSON, Protected: m.Protected,
		Drivers: wireBindings(m.Drivers), HardwareProfile: m.HardwareProfile, Netboot: metal.Netboot(m.Assignment, s.Store.Now()), Loader: m.Loader,
		Bmc: &computev1.Bmc{Driver: m.BMC.Driver, Address: m.BMC.Address, CredentialsRef: m.BMC.CredentialsRef, TlsSpkiSha256: m.BMC.TLSSPKISHA256, DriverOptionsJson: m.BMC.DriverOptions},
	}
	var err error
	if out.PowerAsked, err = s.powerAsked(ctx, m); err != nil {
		return nil, err
	}
	agent, ok, err := s.machineAgent(ctx, m.ID)
	if err != nil {
		return nil, err
	}
	if ok {
		role := map[agentv1.Role]string{agentv1.Role_ROLE_RAMDISK: "ramdisk", agentv1.Role_ROLE_NODE: "node"}[agent.Role]
		out.AgentId, out.AgentRole, out.AgentOnline = agent.ID, role, s.Online(agent.ID)
	}
	return out, nil
}

// List tells the tenant's machines.
func (s metalService) List(ctx context.Context, req *connect.Request[computev1.ListMachinesRequest]) (*connect.Response[computev1.ListMachinesResponse], error) {
	machines, err := s.Store.Machines(ctx, req.Msg.TenantId)
	if err != nil {
		return nil, err
	}
	res := &computev1.ListMachinesResponse{}
	for _, m := range machines {
		item, err := s.wireMachine(ctx, m)
		if err != nil {
			return nil, err
		}
		res.Items = append(res.Items, item)
	}
	return connect.NewResponse(res), nil
}

// Get tells one machine.
func (s metalService) Get(ctx context.Context, req *connect.Request[computev1.GetMachineRequest]) (*connect.Response[computev1.GetMachineResponse], error) {
	m, err := s.Store.Machine(ctx, req.Msg.TenantId, req.Msg.Machine)
	if err != nil {
		return nil, err
	}
	out, err := s.wireMachine(ctx, m)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.GetMachineResponse{Machine: out}), nil
}

// able finds the machine and its box, and refuses a verb that the machine's
// driver cannot serve. The box may be offline or not enrolled yet.
func (s metalService) able(ctx context.Context, tenantID, machine string, verb metal.Verb) (m store.Machine, box store.Agent, enrolled bool, err error) {
	m, err = s.Store.Machine(ctx, tenantID, machine)
	if err != nil {
		return store.Machine{}, store.Agent{}, false, err
	}
	box, enrolled, err = s.serves(ctx, m, func(kinds []string) error { return s.Metal.CheckVerb(verb, m.BMC.Driver, kinds) })
	return m, box, enrolled, err
}

// judged refuses up front a procedure with steps that the machine's BMC driver
// cannot serve, as able does with a verb.
type judged struct {
	Workflows
	api *API
}

// StartProfile starts what the driver serves.
func (j judged) StartProfile(ctx context.Context, name string, m store.Machine, traceparent string) (string, error) {
	profile, ok := j.api.Profiles.Profile(name)
	if !ok {
		return j.Workflows.StartProfile(ctx, name, m, traceparent) // which says so
	}
	var kinds []string
	box, enrolled, err := j.api.siteAgent(ctx, m.SiteID)
	if err != nil {
		return "", err
	}
	if enrolled {
		labels, err := j.api.Store.AgentLabels(ctx, box.ID)
		if err != nil {
			return "", err
		}
		kinds = placement.Kinds(labels, m.BMC.Driver)
	}
	if err := j.api.Metal.CheckProfile(profile, m.BMC.Driver, kinds); err != nil {
		return "", err
	}
	return j.Workflows.StartProfile(ctx, name, m, traceparent)
}

// send runs one command at the machine's box and waits for its outcome.
func (s metalService) send(ctx context.Context, m store.Machine, box store.Agent, enrolled bool, c metal.Command) (id string, result []byte, err error) {
	if id, _, err = s.sendOnly(ctx, m, box, enrolled, c); err != nil {
		return "", nil, err
	}
	outcome, err := s.Commands.Wait(ctx, id)
	switch {
	case err != nil:
		return id, nil, err
	case outcome.Err != nil:
		return id, nil, outcome.Err
	}
	return id, outcome.Result, nil
}

// sendOnly is send without the wait.
func (s metalService) sendOnly(ctx context.Context, m store.Machine, box store.Agent, enrolled bool, c metal.Command) (id string, _ []byte, err error) {
	switch {
	case !enrolled:
		return "", nil, errs.Retry(errs.Unavailable, "the site's box has not enrolled yet")
	case !s.Online(box.ID):
		return "", nil, errs.Retry(errs.Unavailable, "the site's box is offline")
	}
	id, err = s.Commands.Submit(ctx, commands.Spec{AgentID: box.ID, TargetNodeID: m.ID, Kind: c.Kind, Lane: c.Lane, Args: c.Args, SecretRefs: c.SecretRefs,
		Timeout: c.Timeout, Traceparent: traceparent()})
	return id, nil, err
}

// GetPower asks the machine's BMC.
func (s metalService) GetPower(ctx context.Context, req *connect.Request[computev1.GetPowerRequest]) (*connect.Response[computev1.GetPowerResponse], error) {
	m, box, enrolled, err := s.able(ctx, req.Msg.TenantId, req.Msg.Machine, metal.VerbGetPower)
	if err != nil {
		return nil, err
	}
	_, result, err := s.ask(ctx, m, box, enrolled, metal.PowerQuery(m.BMC))
	if err != nil {
		return nil, err
	}
	var answer bmcv1.BmcOperationResult
	if err := proto.Unmarshal(result, &answer); err != nil {
		return nil, fmt.Errorf("read the answer to bmc.query: %w", err)
	}
	state, err := metal.PowerState(&answer)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.GetPowerResponse{Power: state}), nil
}

// SetPower changes the power and answers when the BMC did, or when a person
// will be asked to.
func (s metalService) SetPower(ctx context.Context, req *connect.Request[computev1.SetPowerRequest]) (*connect.Response[computev1.SetPowerResponse], error) {
	m, box, enrolled, err := s.able(ctx, req.Msg.TenantId, req.Msg.Machine, metal.VerbSetPower)
	if err != nil {
		return nil, err
	}
	c, err := metal.PowerCommand(m.BMC, req.Msg.Action)
	if err != nil {
		return nil, err
	}
	send := s.send
	if m.BMC.Driver == metal.Manual {
		send = s.sendOnly // a person takes hours; the machine's view says what is asked
	}
	id, _, err := send(ctx, m, box, enrolled, c)
	s.audit(ctx, m.SiteID, m.ID, "power.set", map[string]string{"action": req.Msg.Action, "command": id, "code": string(errs.CodeOf(err))})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.SetPowerResponse{CommandId: id}), nil
}

// SetBootDevice chooses what the machine boots next.
func (s metalService) SetBootDevice(ctx context.Context, req *connect.Request[computev1.SetBootDeviceRequest]) (*connect.Response[computev1.SetBootDeviceResponse], error) {
	m, box, enrolled, err := s.able(ctx, req.Msg.TenantId, req.Msg.Machine, metal.VerbBoot)
	if err != nil {
		return nil, err
	}
	c, err := metal.BootCommand(m.BMC, metal.BootDevice{Device: req.Msg.Device, Persistent: req.Msg.Persistent, EFI: req.Msg.Efi})
	if err != nil {
		return nil, err
	}
	id, _, err := s.send(ctx, m, box, enrolled, c)
	s.audit(ctx, m.SiteID, m.ID, "boot.set", map[string]string{"device": req.Msg.Device, "command": id, "code": string(errs.CodeOf(err))})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.SetBootDeviceResponse{CommandId: id}), nil
}

// start begins a workflow that network-boots the machine. The box need not be
// online: the workflow waits for it.
func (s metalService) start(ctx context.Context, m store.Machine, name string, p workflow.Params) (string, error) {
	if len(m.MACs) == 0 {
		return "", apierr.Busy("no-mac", "machine %s has no MAC to network-boot from: confirm one that its site's box has found", m.Name)
	}
	p.Traceparent = traceparent()
	return s.Workflows.Start(ctx, name, m, p)
}

// Inspect begins the workflow that records the machine's hardware.
func (s metalService) Inspect(ctx context.Context, req *connect.Request[computev1.InspectRequest]) (*connect.Response[computev1.InspectResponse], error) {
	m, _, _, err := s.able(ctx, req.Msg.TenantId, req.Msg.Machine, metal.VerbInspect)
	if err != nil {
		return nil, err
	}
	id, err := s.start(ctx, m, workflow.Inspect, workflow.Params{})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.InspectResponse{WorkflowId: id}), nil
}

// Deploy begins the workflow that writes an image to the machine's disk.
func (s metalService) Deploy(ctx context.Context, req *connect.Request[computev1.DeployRequest]) (*connect.Response[computev1.DeployResponse], error) {
	in := req.Msg
	m, _, _, err := s.able(ctx, in.TenantId, in.Machine, metal.VerbDeploy)
	if err != nil {
		return nil, err
	}
	hostname := in.Hostname
	if hostname == "" {
		hostname = m.Name
	}
	if err := metal.CheckSeed(in.DiskSerial, hostname, in.SshAuthorizedKeys); err != nil {
		return nil, err
	}
	if in.Image == "" {
		return nil, apierr.Invalid("image is missing")
	}
	artifact, err := s.Store.Artifact(ctx, in.Image, "")
	if err != nil {
		return nil, fmt.Errorf("image %q: %w", in.Image, err)
	}
	if artifact.Format != "raw.zst" {
		return nil, apierr.Cannot("image-format-unsupported", "image %s is %s; only raw.zst is deployed", in.Image, artifact.Format)
	}
	id, err := s.start(ctx, m, workflow.Deploy, workflow.Params{
		Image: &workflow.Image{Format: artifact.Format, SHA256: artifact.SHA256, SizeBytes: artifact.SizeBytes,
			UnpackedSHA256: artifact.UnpackedSHA256, UnpackedSizeBytes: artifact.UnpackedSizeBytes},
		DiskSerial: in.DiskSerial, Hostname: hostname, SSHAuthorizedKeys: in.SshAuthorizedKeys,
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.DeployResponse{WorkflowId: id}), nil
}
