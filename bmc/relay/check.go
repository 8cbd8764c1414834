package relay

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"regexp"
	"slices"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/bmc/manual"
	"github.com/better-compute/site-appliance/bmc/redfish"
	"github.com/better-compute/site-appliance/bmc/wol"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// Operation is what the dispatcher must know before an operation runs.
type Operation struct {
	// Key is the queue: the BMC's address in its plain form, host:port.
	Key string
	// Action is what setPower does, if it is one that is known, or addressbook.BindAction.
	Action string
	// Destructive operations change what a machine or its BMC is or runs.
	Destructive bool
	// Counts says that people's grants are needed where many are asked for at
	// once, Always that they are needed for a single one.
	Counts, Always bool
	RetrySafe      bool
	// Artifacts are the hex SHA-256 of what the operation brings along.
	Artifacts []string
}

// guard says when a kind's operations need grants.
type guard struct {
	// counts is true for the operations and arguments that need them.
	counts func(operation string, args driver.Args) bool
	// always says that they need them for a single target too.
	always bool
}

func no(string, driver.Args) bool  { return false }
func yes(string, driver.Args) bool { return true }

// The kinds that stand apart from the others.
const (
	Query   = cmdkind.Query
	Rotate  = cmdkind.Rotate
	Console = cmdkind.Console
	Bind    = cmdkind.Bind
)

// guards are those of all kinds that carry operations. What applyLayout deletes
// only the BMC knows: it always needs grants.
var guards = map[string]guard{
	Query:            {counts: no},
	cmdkind.Boot:     {counts: no},
	cmdkind.Power:    {counts: takesDown},
	cmdkind.Media:    {counts: no},
	cmdkind.BIOS:     {counts: yes},
	cmdkind.RAID:     {counts: yes, always: true},
	Rotate:           {counts: yes},
	cmdkind.Firmware: {counts: yes, always: true},
	Console:          {counts: no},
}

// The operations whose arguments the relay reads.
const (
	setPower       = "power.setPower"
	insertMedia    = "virtual-media.insert"
	ejectMedia     = "virtual-media.eject"
	firmwareUpdate = "firmware.update"
	rotation       = "credentials.rotate"
)

// Kinds are the command kinds that the relay takes, bmc.bind apart.
func Kinds() []cmdkind.Kind {
	return slices.DeleteFunc(cmdkind.All(), func(k cmdkind.Kind) bool { return guards[k.Name].counts == nil })
}

const maxArgs = 1 << 20

var credentialRef = regexp.MustCompile(`^secret://[A-Za-z0-9._-]{1,64}/[A-Za-z0-9._/-]{1,128}$`)

// withoutCredential are the drivers that log in nowhere.
var withoutCredential = []string{wol.ID, manual.ID}

// Check judges an operation without a look at the network or the disk. Codes:
// unknown-kind, operation-not-allowed, invalid-payload, invalid-args,
// invalid-config, invalid-address.
func Check(kind string, op *bmcv1.BmcOperationRequest) (Operation, error) {
	k, _ := cmdkind.Named(kind)
	g, known := guards[kind]
	switch {
	case !known:
		return Operation{}, errs.New(errs.UnknownKind, "unknown kind %q", kind)
	case op == nil:
		return Operation{}, errs.New(errs.InvalidPayload, "there is no operation")
	case !slices.Contains(k.Operations, op.GetOperation()):
		return Operation{}, errs.New(errs.OperationNotAllowed, "kind %s does not carry operation %q", kind, op.GetOperation())
	}
	key, err := checkTarget(op.GetDriver(), op.GetAddress(), op.GetCredentialsRef(), op.GetTlsSpkiSha256())
	if err != nil {
		return Operation{}, err
	}
	if err := checkOptions(op); err != nil {
		return Operation{}, err
	}
	args, err := arguments(op.GetArgsJson())
	if err != nil {
		return Operation{}, err
	}
	o := Operation{Key: key, Counts: g.counts(op.GetOperation(), args), RetrySafe: k.RetrySafe}
	o.Destructive, o.Always = o.Counts, o.Counts && g.always
	switch op.GetOperation() {
	case setPower:
		o.Action = action(args)
	case rotation:
		_, _, err = takeNewPassword(op.GetCredentialsRef(), args)
	case firmwareUpdate:
		o.Artifacts = digests(args)
	}
	return o, err
}

// CheckBind judges a rebinding as Check does an operation.
func CheckBind(req *bmcv1.BmcBindRequest) (Operation, error) {
	key, err := bindTarget(req)
	if err != nil {
		return Operation{}, err
	}
	if req.GetProtected() && addressbook.IsName(key) {
		return Operation{}, errs.New(errs.InvalidAddress, "%s cannot be protected by a host name, which is not its only one: bind it by its IP address", key)
	}
	return Operation{Key: key, Action: addressbook.BindAction(req.GetProtected(), req.GetForget()), Destructive: true, Counts: true, Always: true, RetrySafe: true}, nil
}

func bindTarget(req *bmcv1.BmcBindRequest) (key string, err error) {
	switch {
	case !req.GetForget():
		return checkTarget(req.GetDriver(), req.GetAddress(), req.GetCredentialsRef(), req.GetTlsSpkiSha256())
	case !driver.ValidID(req.GetDriver()):
		return "", errs.New(errs.InvalidPayload, "driver %q is not a driver id", req.GetDriver())
	case req.GetCredentialsRef() != "" || req.GetTlsSpkiSha256() != "" || req.GetProtected():
		return "", errs.New(errs.InvalidPayload, "what is forgotten is not bound: only driver and address may be set")
	}
	return addressbook.Normalise(req.GetAddress(), req.GetDriver())
}

// checkTarget judges who is meant, and by which credential and pin.
func checkTarget(id, address, credentialsRef, pin string) (key string, err error) {
	needless := credentialsRef == "" && slices.Contains(withoutCredential, id)
	switch {
	case !driver.ValidID(id):
		return "", errs.New(errs.InvalidPayload, "driver %q is not a driver id", id)
	case !needless && !credentialRef.MatchString(credentialsRef):
		return "", errs.New(errs.InvalidPayload, "credentials_ref is not a secret:// reference")
	}
	if key, err = addressbook.Normalise(address, id); err != nil {
		return "", err
	}
	if raw, err := hex.DecodeString(pin); pin != "" && (err != nil || len(raw) != 32) {
		return "", errs.New(errs.InvalidConfig, "tls_spki_sha256 is not a hex SHA-256")
	}
	return key, nil
}

// checkOptions judges their form. What they mean is the driver's matter.
func checkOptions(op *bmcv1.BmcOperationRequest) error {
	options := op.GetDriverOptionsJson()
	if options == "" {
		return nil
	}
	var object map[string]json.RawMessage
	if len(options) > maxArgs || json.Unmarshal([]byte(options), &object) != nil || object == nil {
		return errs.New(errs.InvalidPayload, "driver_options_json is not a JSON object")
	}
	if op.GetDriver() == redfish.ID {
		return errs.New(errs.InvalidConfig, "driver redfish takes no options")
	}
	return nil
}

// arguments reads them as every driver does.
func arguments(text string) (driver.Args, error) {
	if len(text) > maxArgs {
		return nil, errs.New(errs.InvalidArgs, "args_json has %d bytes, more than %d", len(text), maxArgs)
	}
	return driver.ParseArgs([]byte(text))
}

// takesDown is true for what takes a machine or its BMC down. What nobody has
// classified counts, so that a new action is guarded until someone says otherwise.
func takesDown(operation string, args driver.Args) bool {
	return operation != setPower || action(args) != string(metal.ActionOn)
}

// action is what setPower's arguments ask for, as drivers read them; empty for
// what is none.
func action(args driver.Args) string {
	if len(args) != 1 {
		return ""
	}
	a, err := metal.ParseAction(args[0])
	if err != nil {
		return ""
	}
	return string(a)
}

// digests are what an update says of its file. A driver refuses arguments of
// another form.
func digests(args driver.Args) []string {
	if len(args) != 1 {
		return nil
	}
	u, err := metal.ParseFirmwareUpdate(withURL(args[0], "https://bmc.invalid/"))
	if err != nil {
		return nil
	}
	return []string{u.SHA256}
}

// takeNewPassword takes the reference of a rotation's new password out of its
// arguments. Only a reference may stand there, and no other field for a password:
// what a command carries is written down on the way.
func takeNewPassword(credentialsRef string, args driver.Args) (ref string, rest json.RawMessage, err error) {
	var fields map[string]json.RawMessage
	if len(args) != 1 || json.Unmarshal(args[0], &fields) != nil || fields == nil {
		return "", nil, errs.New(errs.InvalidArgs, "rotate takes one object with newPassword")
	}
	const name = string(metal.NewPassword)
	for field := range fields {
		if field != name && strings.Contains(strings.ToLower(field), "pass") {
			return "", nil, errs.New(errs.InvalidPayload, "a rotation's arguments hold no password but newPassword, a reference")
		}
	}
	if json.Unmarshal(fields[name], &ref) != nil || !credentialRef.MatchString(ref) {
		return "", nil, errs.New(errs.InvalidPayload, "newPassword is not a secret:// reference")
	}
	if ref == credentialsRef {
		return "", nil, errs.New(errs.InvalidPayload, "newPassword is the credential itself")
	}
	delete(fields, name)
	if len(fields) == 0 {
		return ref, json.RawMessage("[]"), nil
	}
	rest, err = json.Marshal([]any{fields})
	return ref, rest, err
}

// withURL is an argument with another url, all else as it is.
func withURL(arg json.RawMessage, url string) json.RawMessage {
	var fields map[string]json.RawMessage
	if json.Unmarshal(arg, &fields) != nil || fields == nil {
		return arg
	}
	fields["url"], _ = json.Marshal(url)
	out, err := json.Marshal(fields)
	if err != nil {
		return arg
	}
	return out
}

// urlOf is the url of an update's argument.
func urlOf(arg json.RawMessage) string {
	var fields struct {
		URL string `json:"url"`
	}
	if json.Unmarshal(bytes.TrimSpace(arg), &fields) != nil {
		return ""
	}
	return fields.URL
}

// split takes "<concern>.<operation>" apart.
func split(operation string) (concern, name string) {
	concern, name, _ = strings.Cut(operation, ".")
	return concern, name
}
