// Package metal decides what may be asked of a machine's BMC, and what the
// commands to its site's agent say. It does no I/O.
package metal

import (
	"encoding/hex"
	"encoding/json"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/secretstore"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// The states of a machine.
const (
	Enrolled   = "enrolled"
	Inspecting = "inspecting"
	Inspected  = "inspected"
	Deploying  = "deploying"
	Deployed   = "deployed"
	Wiping     = "wiping"
	Wiped      = "wiped"
	Failed     = "failed"
)

// The actions of an assignment.
const (
	LocalDisk = "local-disk"
	Ramdisk   = "ramdisk"
)

var (
	hostName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*$`)
)

// ParseBMC checks an enrolled BMC. The credential must be a reference to a
// secret of the same tenant; the driver's own rules are the driver's.
func ParseBMC(tenantID string, b *computev1.Bmc) (store.BMC, error) {
	switch {
	case b.GetDriver() == "":
		return store.BMC{}, apierr.Invalid("bmc.driver is missing")
	case !driver.ValidID(b.GetDriver()):
		return store.BMC{}, apierr.Invalid("bmc.driver %.80q: want lower-case letters, digits and hyphens, a letter first, at most 64", b.GetDriver())
	case b.GetAddress() == "":
		return store.BMC{}, apierr.Invalid("bmc.address is missing")
	}
	if without, ok := withoutBMC[b.GetDriver()]; ok {
		if err := without.check(b); err != nil {
			return store.BMC{}, err
		}
		return store.BMC{Driver: b.GetDriver(), Address: b.GetAddress()}, nil
	}
	if !validAddress(b.GetAddress()) {
		return store.BMC{}, apierr.Invalid("bmc.address %q: want a host name or an IP address, with an optional port", b.GetAddress())
	}
	if err := checkRef(tenantID, b.GetCredentialsRef()); err != nil {
		return store.BMC{}, err
	}
	pin := strings.ToLower(b.GetTlsSpkiSha256())
	if raw, err := hex.DecodeString(pin); pin != "" && (err != nil || len(raw) != 32) {
		return store.BMC{}, apierr.Invalid("bmc.tls_spki_sha256: want 64 hex digits")
	}
	options := b.GetDriverOptionsJson()
	if options != "" {
		var object map[string]json.RawMessage
		if len(options) > 64<<10 || json.Unmarshal([]byte(options), &object) != nil || object == nil {
			return store.BMC{}, apierr.Invalid("bmc.driver_options_json: want a JSON object of at most 64 KiB")
		}
	}
	return store.BMC{Driver: b.GetDriver(), Address: b.GetAddress(), CredentialsRef: b.GetCredentialsRef(), TLSSPKISHA256: pin, DriverOptions: options}, nil
}

// without is a driver of machines that have no BMC: the address is something
// else, and there is nothing to log in to.
type without struct {
	address *regexp.Regexp
	want    string
}

var withoutBMC = map[string]without{
	wakeOnLAN: {regexp.MustCompile(`^([0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}(@[A-Za-z0-9][A-Za-z0-9._-]{0,14})?$`), "the MAC that wakes the machine, such as 52:54:00:12:34:56, alone or with @ and a LAN of the site"},
	Manual:    {regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?$`), "the name on the machine's label: at most 64 letters, digits, dots, underscores and hyphens"},
}

func (w without) check(b *computev1.Bmc) error {
	switch {
	case !w.address.MatchString(b.GetAddress()):
		return apierr.Invalid("bmc.address %q: driver %s wants %s", b.GetAddress(), b.GetDriver(), w.want)
	case b.GetCredentialsRef() != "" || b.GetTlsSpkiSha256() != "" || b.GetDriverOptionsJson() != "":
		return apierr.Invalid("driver %s logs in nowhere: it takes no credential, no key pin and no options", b.GetDriver())
	}
	return nil
}

// checkRef wants secret://<tenant>/<name> of this tenant. The value is never
// repeated in the error: it may be a secret that somebody typed by mistake.
func checkRef(tenantID, ref string) error {
	tenant, err := secretstore.TenantOf(ref)
	switch {
	case err != nil:
		return apierr.Invalid("bmc.credentials_ref: want a reference secret://<tenant>/<name>, never a secret")
	case tenant != tenantID:
		return apierr.Denied("bmc.credentials_ref names another tenant's secret")
	case secretstore.Pending(ref):
		return apierr.Invalid("bmc.credentials_ref names a password that waits to be proved")
	}
	return nil
}

func validAddress(address string) bool {
	if scheme, rest, ok := strings.Cut(address, "://"); ok {
		if scheme == "" || strings.ContainsAny(scheme, "/:@ ") {
			return false
		}
		address = rest
	}
	host := address
	if h, port, err := net.SplitHostPort(address); err == nil {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 {
			return false
		}
		host = h
	} else {
		host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		return !addr.IsUnspecified() && !addr.IsMulticast()
	}
	return len(host) <= 253 && hostName.MatchString(host)
}

// MaxMACs is what a box takes of one machine: with more, it would refuse every
// snapshot of the whole site.
const MaxMACs = 16

// ParseMACs checks and normalises MACs: lower-case, colon-separated, sorted.
func ParseMACs(macs []string) ([]string, error) {
	if len(macs) > MaxMACs {
		return nil, apierr.Invalid("macs: at most %d, not %d", MaxMACs, len(macs))
	}
	var out []string
	for _, text := range macs {
		mac, err := net.ParseMAC(text)
		switch {
		case err != nil || len(mac) != 6:
			return nil, apierr.Invalid("mac %q: want six bytes such as 52:54:00:12:34:56", text)
		case mac[0]&1 != 0:
			return nil, apierr.Invalid("mac %q is a group address", text)
		case mac.String() == "00:00:00:00:00:00":
			return nil, apierr.Invalid("mac %q is empty", text)
		}
		out = append(out, mac.String())
	}
	slices.Sort(out)
	if n := len(out); len(slices.Compact(slices.Clone(out))) != n {
		return nil, apierr.Invalid("macs: one is given twice")
	}
	return out, nil
}

// The operations that metal asks of BMC drivers.
const (
	GetPower      = "power.getPower"
	SetPower      = "power.setPower"
	SetBootDevice = "management.setBootDevice"
	Rotation      = "credentials.rotate"
)

// Query is the kind of what only asks.
const Query = cmdkind.Query

// wakeOnLAN is the driver of machines that a packet switches on.
const wakeOnLAN = "wol"

// Verb is what a person asks for; it needs operations of the BMC's driver.
type Verb string

// The verbs.
const (
	VerbGetPower Verb = "get-power"
	VerbSetPower Verb = "set-power"
	VerbBoot     Verb = "boot"
	VerbInspect  Verb = "inspect"
	VerbDeploy   Verb = "deploy"
	VerbRotate   Verb = "rotate"
	VerbWipe     Verb = "wipe"
	// The boots of what is not the ramdisk; a machine that people switch needs none of these.
	VerbBootISO    Verb = "boot-iso"
	VerbBootKernel Verb = "boot-kernel"
	VerbBootDisk   Verb = "boot-disk"
)

var needs = map[Verb][]string{
	VerbGetPower: {GetPower},
	VerbSetPower: {SetPower},
	VerbBoot:     {SetBootDevice},
	VerbInspect:  switching,
	VerbDeploy:   switching,
	VerbRotate:   {Rotation},
	VerbWipe:     switching,

	VerbBootISO:    switching,
	VerbBootKernel: switching,
	VerbBootDisk:   switching,
}

// switching is what a workflow needs that starts a machine from a device.
var switching = []string{GetPower, SetPower, SetBootDevice}

// serves are the operations of the drivers that metal knows.
var serves = map[string][]string{
	"ipmi": {GetPower, SetPower, SetBootDevice, "management.getBootDevice", "inspect.inspect"},
	"redfish": {
		GetPower, SetPower, SetBootDevice, "management.getBootDevice", "management.resetBmc", "management.getEventLog",
		"management.getSecureBoot", "management.setSecureBoot", "virtual-media.insert", "virtual-media.eject", "virtual-media.status", "inspect.inspect",
		"bios.getSettings", "bios.applySettings", "bios.resetSettings", "raid.getLayout", "raid.applyLayout", "firmware.list", "firmware.update", Rotation,
	},
	wakeOnLAN: {GetPower, SetPower},
	Manual:    {GetPower, SetPower},
}

// Command is what one command says, whoever sends it.
type Command = module.Command

func operation(b store.BMC, name, args string) *bmcv1.BmcOperationRequest {
	return &bmcv1.BmcOperationRequest{
		Driver: b.Driver, Address: b.Address, CredentialsRef: b.CredentialsRef, Operation: name, ArgsJson: args,
		TlsSpkiSha256: b.TLSSPKISHA256, DriverOptionsJson: b.DriverOptions,
	}
}

// PowerQuery asks for the power state.
func PowerQuery(b store.BMC) Command {
	return toBMC(b, GetPower, "")
}

// PowerState reads the answer to PowerQuery.
func PowerState(result *bmcv1.BmcOperationResult) (string, error) {
	var state string
	if err := json.Unmarshal([]byte(result.GetResultJson()), &state); err != nil {
		return "", errs.New(errs.BmcError, "power state is not a JSON string")
	}
	switch state {
	case "on", "off", "unknown":
		return state, nil
	}
	return "", errs.New(errs.BmcError, "power state is none of on, off and unknown")
}

// PowerCommand changes the power. The actions on, off, soft, cycle, reset and nmi are served.
func PowerCommand(b store.BMC, action string) (Command, error) {
	switch action {
	case "on", "off", "soft", "cycle", "reset", "nmi":
	default:
		return Command{}, apierr.Invalid("action %q: want on, off, soft, cycle, reset or nmi", action)
	}
	return toBMC(b, SetPower, `["`+action+`"]`), nil
}

// BootDevice is the argument of management.setBootDevice.
type BootDevice struct {
	Device     string `json:"device"`
	Persistent bool   `json:"persistent"`
	EFI        bool   `json:"efi"`
}

// BootCommand chooses the boot device. The devices none, pxe, disk, cdrom and bios are served.
func BootCommand(b store.BMC, d BootDevice) (Command, error) {
	switch d.Device {
	case "none", "pxe", "disk", "cdrom", "bios":
	default:
		return Command{}, apierr.Invalid("device %q: want none, pxe, disk, cdrom or bios", d.Device)
	}
	args, err := json.Marshal([]BootDevice{d})
	if err != nil {
		return Command{}, err
	}
	return toBMC(b, SetBootDevice, string(args)), nil
}

// AssignCommand carries the whole site's boot decisions. A machine without a
// MAC is left out, and a window that is over is not opened again.
func AssignCommand(next store.Snapshot, now time.Time) Command {
	req := &pxev1.AssignRequest{Version: next.Version, Unknown: unknown(next.Unknown, next.Machines, now)}
	for _, m := range next.Machines {
		if len(m.MACs) == 0 {
			continue
		}
		entry := &pxev1.Machine{MachineId: m.ID, Name: m.Name, Macs: m.MACs, Action: pxev1.Action_ACTION_LOCAL_DISK, Protected: m.Protected, Loader: m.Loader}
		boots(entry, m, now)
		req.Machines = append(req.Machines, entry)
	}
	c := CommandOf(cmdkind.Assign)
	c.Args = req
	return c
}

var sshKey = regexp.MustCompile(`^(ssh|ecdsa|sk)-[A-Za-z0-9@.-]+ [A-Za-z0-9+/]+={0,3}( [^\x00-\x1f\x7f]*)?$`)

func checkSerial(s string) error {
	if s == "" || len(s) > 128 || strings.TrimSpace(s) != s || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' }) {
		return apierr.Invalid("disk_serial: want 1 to 128 printable ASCII characters, no space at the ends")
	}
	return nil
}

// CheckSeed checks what a deploy puts beside the image.
func CheckSeed(diskSerial, hostname string, keys []string) error {
	if diskSerial == "" {
		return apierr.Invalid("disk_serial is missing: a deploy names the disk that it overwrites")
	}
	if err := checkSerial(diskSerial); err != nil {
		return err
	}
	switch {
	case len(hostname) > 253 || !hostName.MatchString(hostname):
		return apierr.Invalid("hostname %q is no host name", hostname)
	case len(keys) > 64:
		return apierr.Invalid("ssh_authorized_keys: at most 64, not %d", len(keys))
	}
	for i, key := range keys {
		if len(key) > 16<<10 || !sshKey.MatchString(key) {
			return apierr.Invalid("ssh_authorized_keys[%d]: want one line of an authorized_keys file, without options", i)
		}
	}
	return nil
}
