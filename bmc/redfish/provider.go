package redfish

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/bmc-toolbox/bmclib/v2/bmc"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

const (
	providerName = "better-compute-redfish"

	rootPath     = "/redfish/v1/"
	sessionsPath = "/redfish/v1/SessionService/Sessions"
	systemsPath  = "/redfish/v1/Systems"

	// maxSystems is how many systems of one BMC are looked at.
	maxSystems = 16
	// closeTimeout bounds the end of a session when the operation's time is over.
	closeTimeout = 5 * time.Second
	// offTimeout is how long a machine may take to go off within a power cycle.
	offTimeout = 60 * time.Second
	pollEvery  = time.Second
)

// provider is a bmclib provider for one BMC.
type provider struct {
	target Target
	client *http.Client

	system  string // path of the collection
	token   string // of the session; empty: basic authentication
	session string // path of the session to delete; empty: none
	basic   bool
}

// What bmclib asks its providers for.
var (
	_ bmc.Opener                   = (*provider)(nil)
	_ bmc.Closer                   = (*provider)(nil)
	_ bmc.PowerStateGetter         = (*provider)(nil)
	_ bmc.PowerSetter              = (*provider)(nil)
	_ bmc.BootDeviceSetter         = (*provider)(nil)
	_ bmc.BootDeviceOverrideGetter = (*provider)(nil)
)

func newProvider(t Target) (*provider, error) {
	client, err := newClient(t)
	if err != nil {
		return nil, err
	}
	return &provider{target: t, client: client}, nil
}

// Name is the provider's, in bmclib's registry.
func (p *provider) Name() string { return providerName }

func (p *provider) authorise(r *http.Request) {
	switch {
	case p.token != "":
		r.Header.Set("X-Auth-Token", p.token)
	case p.basic:
		r.SetBasicAuth(p.target.Username, string(p.target.Password.Reveal()))
	}
}

// Open finds the service and logs in: by a session, or with basic
// authentication where the BMC has no sessions.
func (p *provider) Open(ctx context.Context) error {
	root, err := p.get(ctx, rootPath)
	if err != nil {
		return err
	}
	if p.system, err = linkOr(root, "Systems", systemsPath); err != nil {
		return err
	}
	sessions, err := linkOr(root.object("Links"), "Sessions", sessionsPath)
	if err != nil {
		return err
	}
	body, err := json.Marshal(map[string]string{"UserName": p.target.Username, "Password": string(p.target.Password.Reveal())})
	if err != nil {
		return errs.New(errs.CredentialsUnavailable, "the credential cannot be written as JSON")
	}
	a, err := p.send(ctx, http.MethodPost, sessions, body, nil)
	if err != nil {
		return err
	}
	switch token := a.header.Get("X-Auth-Token"); {
	case a.status == http.StatusNotFound, a.status == http.StatusMethodNotAllowed, a.status == http.StatusNotImplemented:
		p.basic = true
		return nil
	case a.status/100 != 2:
		return statusError("log in", a)
	case token == "":
		return errs.New(errs.BmcError, "the BMC opened a session without a token")
	default:
		p.token = token
		p.session = sessionPath(a)
		return nil
	}
}

// sessionPath is where the session that a answers is deleted. Some BMCs send a
// whole URL as Location, and some the path in the body only.
func sessionPath(a *answer) string {
	location := a.header.Get("Location")
	if i := strings.Index(location, "/redfish/"); i > 0 {
		location = location[i:]
	}
	if location == "" {
		if o, err := parseObject(a.body); err == nil {
			location = o.text("@odata.id")
		}
	}
	path, err := resource(location)
	if err != nil {
		return ""
	}
	return path
}

// linkOr is the path that o's reference key names, or the standard's own.
func linkOr(o object, key, standard string) (string, error) {
	id := o.object(key).text("@odata.id")
	if id == "" {
		return standard, nil
	}
	return resource(id)
}

// Close ends the session, also when ctx is over.
func (p *provider) Close(ctx context.Context) error {
	defer p.client.CloseIdleConnections()
	if p.session == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	a, err := p.send(ctx, http.MethodDelete, p.session, nil, nil)
	p.token, p.session = "", ""
	if err != nil {
		return err
	}
	if a.status/100 != 2 {
		return statusError("log out", a)
	}
	return nil
}

func (p *provider) get(ctx context.Context, path string) (object, error) {
	a, err := p.send(ctx, http.MethodGet, path, nil, nil)
	if err != nil {
		return nil, err
	}
	if a.status != http.StatusOK {
		return nil, statusError("read "+path, a)
	}
	return parseObject(a.body)
}

// statusError is an answer that is no success. Only what a BMC says of its own
// load is worth a repeat: repeated wrong passwords lock accounts.
func statusError(doing string, a *answer) error {
	text := reason(a.body)
	if text == "" {
		text = http.StatusText(a.status)
	}
	switch {
	case a.status == http.StatusUnauthorized || a.status == http.StatusForbidden:
		return errs.New(errs.BmcError, "%s: the BMC refuses the credential: %s", doing, text)
	case a.status/100 == 3:
		return errs.New(errs.BmcError, "%s: the BMC redirects, which is not followed", doing)
	case a.status == http.StatusTooManyRequests || a.status >= 500 && a.status != http.StatusNotImplemented:
		return errs.Retry(errs.BmcError, "%s: status %d: %s", doing, a.status, text)
	}
	return errs.New(errs.BmcError, "%s: status %d: %s", doing, a.status, text)
}

// find is the one system that the BMC drives. Beside the host some BMCs list
// composed systems and boards, which have no reset of their own.
func (p *provider) find(ctx context.Context) (*system, error) {
	collection, err := p.get(ctx, p.system)
	if err != nil {
		return nil, err
	}
	members := collection.links("Members")
	switch {
	case len(members) == 0:
		return nil, errs.New(errs.BmcError, "the BMC lists no system")
	case len(members) > maxSystems:
		return nil, errs.New(errs.BmcError, "the BMC lists %d systems, more than %d", len(members), maxSystems)
	}
	var hosts []*system
	for _, id := range members {
		s, err := p.read(ctx, id)
		if err != nil {
			return nil, err
		}
		if len(members) == 1 {
			return s, nil
		}
		if s.reset != "" && (s.kind == "" || strings.EqualFold(s.kind, "Physical")) {
			hosts = append(hosts, s)
		}
	}
	if len(hosts) != 1 {
		return nil, errs.New(errs.BmcError, "the BMC lists %d systems, %d of them hosts: which one is meant cannot be told", len(members), len(hosts))
	}
	return hosts[0], nil
}

func (p *provider) read(ctx context.Context, id string) (*system, error) {
	path, err := resource(id)
	if err != nil {
		return nil, err
	}
	a, err := p.send(ctx, http.MethodGet, path, nil, nil)
	if err != nil {
		return nil, err
	}
	if a.status != http.StatusOK {
		return nil, statusError("read "+path, a)
	}
	s, err := parseSystem(path, a.body)
	if err == nil && a.header.Get("ETag") != "" {
		s.etag = a.header.Get("ETag")
	}
	return s, err
}

// PowerStateGet answers on, off or unknown.
func (p *provider) PowerStateGet(ctx context.Context) (string, error) {
	s, err := p.find(ctx)
	if err != nil {
		return "", err
	}
	return s.powerState(), nil
}

// resetTypes are the power actions in Redfish's words, the best one first.
var resetTypes = map[string][]string{
	"on":    {"On", "ForceOn"},
	"off":   {"ForceOff"},
	"soft":  {"GracefulShutdown"},
	"cycle": {"PowerCycle", "FullPowerCycle"},
	"reset": {"ForceRestart"},
	"nmi":   {"Nmi"},
}

// PowerSet does a power action once; it never repeats one by itself.
func (p *provider) PowerSet(ctx context.Context, action string) (bool, error) {
	words, known := resetTypes[action]
	if !known {
		return false, errs.New(errs.InvalidArgs, "unknown power action %q", printable(action))
	}
	s, err := p.find(ctx)
	if err != nil {
		return false, err
	}
	if action == s.powerState() {
		return true, nil
	}
	word, allowed := pick(s.resets, words...)
	switch {
	case s.reset == "":
		return false, errs.New(errs.UnsupportedOperation, "the BMC has no reset action")
	case allowed:
		return true, p.post(ctx, s, word)
	case action == "cycle":
		return true, p.offAndOn(ctx, s)
	}
	return false, errs.New(errs.UnsupportedOperation, "the BMC does not offer power action %s", action)
}

func (p *provider) post(ctx context.Context, s *system, resetType string) error {
	body, err := json.Marshal(map[string]string{"ResetType": resetType})
	if err != nil {
		return errs.New(errs.Internal, "encode reset: %v", err)
	}
	a, err := p.send(ctx, http.MethodPost, s.reset, body, nil)
	if err != nil {
		return err
	}
	if a.status/100 != 2 {
		return statusError("reset "+resetType, a)
	}
	return nil
}

// offAndOn is the power cycle of a BMC that has no such action of its own,
// as most have not.
func (p *provider) offAndOn(ctx context.Context, s *system) error {
	off, hasOff := pick(s.resets, resetTypes["off"]...)
	on, hasOn := pick(s.resets, resetTypes["on"]...)
	switch {
	case !hasOff || !hasOn:
		return errs.New(errs.UnsupportedOperation, "the BMC offers neither a power cycle nor off and on")
	case s.powerState() == "off":
		return errs.New(errs.BmcError, "the machine is off: there is nothing to cycle")
	}
	if err := p.post(ctx, s, off); err != nil {
		return err
	}
	waiting, cancel := context.WithTimeout(ctx, offTimeout)
	defer cancel()
	for {
		now, err := p.read(waiting, s.path)
		if err == nil && now.powerState() == "off" {
			break
		}
		if !sleep(waiting, pollEvery) {
			return errs.New(errs.BmcError, "the machine did not go off within the power cycle; it was not switched on again")
		}
	}
	return p.post(ctx, s, on)
}

func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// BootDeviceSet sets the override and reads it back: some BMCs accept what they
// then ignore.
func (p *provider) BootDeviceSet(ctx context.Context, device string, persistent, efi bool) (bool, error) {
	words, known := bootTargets[device]
	if !known {
		return false, errs.New(errs.InvalidArgs, "unknown boot device %q", printable(device))
	}
	s, err := p.find(ctx)
	if err != nil {
		return false, err
	}
	want := BootDevice{Device: device, Persistent: persistent, EFI: efi}
	body, err := bootPatch(s, want, words)
	if err != nil {
		return false, err
	}
	header := http.Header{}
	if s.etag != "" {
		header.Set("If-Match", s.etag)
	}
	a, err := p.send(ctx, http.MethodPatch, s.path, body, header)
	if err != nil {
		return false, err
	}
	if a.status/100 != 2 {
		return false, statusError("set the boot device", a)
	}
	now, err := p.read(ctx, s.path)
	if err != nil {
		return false, err
	}
	if got := now.bootDevice(); got.Device != want.Device || want.Device != "none" && got.Persistent != want.Persistent {
		return false, errs.New(errs.BmcError, "the BMC accepted boot device %s and still shows %s", want.Device, got.Device)
	}
	return true, nil
}

// bootPatch is the request's body for a BMC that has what s shows.
func bootPatch(s *system, want BootDevice, words []string) ([]byte, error) {
	boot := map[string]string{}
	if want.Device == "none" {
		boot["BootSourceOverrideEnabled"] = "Disabled"
	} else {
		target, ok := pick(s.targets, words...)
		if !ok {
			return nil, errs.New(errs.UnsupportedOperation, "the BMC does not offer boot device %s", want.Device)
		}
		enabled := "Once"
		if want.Persistent {
			enabled = "Continuous"
		}
		if _, ok := pick(s.enables, enabled); !ok {
			return nil, errs.New(errs.UnsupportedOperation, "the BMC does not offer a boot override that is %s", strings.ToLower(enabled))
		}
		boot["BootSourceOverrideTarget"], boot["BootSourceOverrideEnabled"] = target, enabled
		// A BMC that has one boot mode only refuses to be told a mode.
		if s.boot.text("BootSourceOverrideMode") != "" {
			boot["BootSourceOverrideMode"] = "Legacy"
			if want.EFI {
				boot["BootSourceOverrideMode"] = "UEFI"
			}
		}
	}
	body, err := json.Marshal(map[string]any{"Boot": boot})
	if err != nil {
		return nil, errs.New(errs.Internal, "encode boot override: %v", err)
	}
	return body, nil
}

// BootDeviceOverrideGet answers the override in force.
func (p *provider) BootDeviceOverrideGet(ctx context.Context) (bmc.BootDeviceOverride, error) {
	s, err := p.find(ctx)
	if err != nil {
		return bmc.BootDeviceOverride{}, err
	}
	dev := s.bootDevice()
	if dev.Device == otherDevice {
		return bmc.BootDeviceOverride{}, errs.New(errs.BmcError, "the boot override is %s, which no boot device of ours stands for", printable(s.boot.text("BootSourceOverrideTarget")))
	}
	return bmc.BootDeviceOverride{Device: bmc.BootDeviceType(dev.Device), IsPersistent: dev.Persistent, IsEFIBoot: dev.EFI}, nil
}
