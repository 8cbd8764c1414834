package relay

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"io"
	"regexp"
	"slices"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// Operation is what the dispatcher must know before an operation runs.
type Operation struct {
	// Key is the queue: the BMC's host:port.
	Key         string
	Destructive bool
	RetrySafe   bool
}

// kinds are the operations that each kind may carry; an operation that stands
// in no list is not allowed.
var kinds = map[string][]string{
	"bmc.query": {
		"power.getPower", "management.getBootDevice", "management.getEventLog", "management.getSecureBoot",
		"inspect.inspect", "firmware.list", "bios.getSettings", "raid.getLayout", "virtual-media.status",
	},
	"bmc.boot":  {"management.setBootDevice", "management.setSecureBoot"},
	"bmc.power": {"power.setPower", "management.resetBmc"},
	"bmc.media": {"virtual-media.insert", "virtual-media.eject"},
}

// Kinds are the command kinds that the relay takes, sorted.
func Kinds() []string {
	names := make([]string, 0, len(kinds))
	for kind := range kinds {
		names = append(names, kind)
	}
	slices.Sort(names)
	return names
}

const (
	redfishDriver = "redfish"
	maxArgs       = 1 << 20
)

var credentialRef = regexp.MustCompile(`^secret://[A-Za-z0-9._-]{1,64}/[A-Za-z0-9._/-]{1,128}$`)

// Check judges an operation without a look at the network or the disk. Codes:
// unknown-kind, operation-not-allowed, invalid-payload, invalid-args,
// invalid-config, invalid-address.
func Check(kind string, op *bmcv1.BmcOperationRequest) (Operation, error) {
	allowed, known := kinds[kind]
	switch {
	case !known:
		return Operation{}, errs.New(errs.UnknownKind, "unknown kind %q", kind)
	case op == nil:
		return Operation{}, errs.New(errs.InvalidPayload, "there is no operation")
	case !slices.Contains(allowed, op.GetOperation()):
		return Operation{}, errs.New(errs.OperationNotAllowed, "kind %s does not carry operation %q", kind, op.GetOperation())
	case !driver.ValidID(op.GetDriver()):
		return Operation{}, errs.New(errs.InvalidPayload, "driver %q is not a driver id", op.GetDriver())
	case !credentialRef.MatchString(op.GetCredentialsRef()):
		return Operation{}, errs.New(errs.InvalidPayload, "credentials_ref is not a secret:// reference")
	}
	key, err := addressbook.Normalise(op.GetAddress(), op.GetDriver())
	if err != nil {
		return Operation{}, err
	}
	if err := checkConfig(op); err != nil {
		return Operation{}, err
	}
	args, err := positional(op.GetArgsJson())
	if err != nil {
		return Operation{}, err
	}
	return Operation{
		Key:         key,
		Destructive: destructive(kind, op.GetOperation(), args),
		RetrySafe:   kind != "bmc.power",
	}, nil
}

// checkConfig judges pin and options. What they mean is the driver's matter.
func checkConfig(op *bmcv1.BmcOperationRequest) error {
	if pin := op.GetTlsSpkiSha256(); pin != "" {
		if raw, err := hex.DecodeString(pin); err != nil || len(raw) != 32 {
			return errs.New(errs.InvalidConfig, "tls_spki_sha256 is not a hex SHA-256")
		}
	}
	options := op.GetDriverOptionsJson()
	if options == "" {
		return nil
	}
	var object map[string]json.RawMessage
	if len(options) > maxArgs || json.Unmarshal([]byte(options), &object) != nil || object == nil {
		return errs.New(errs.InvalidPayload, "driver_options_json is not a JSON object")
	}
	if op.GetDriver() == redfishDriver {
		return errs.New(errs.InvalidConfig, "driver redfish takes no options")
	}
	return nil
}

// positional are the arguments: an array holds them, any other value is the
// single one, and nothing is none.
func positional(text string) ([]json.RawMessage, error) {
	if text == "" {
		return nil, nil
	}
	data := bytes.TrimSpace([]byte(text))
	if len(text) > maxArgs || !json.Valid(data) {
		return nil, errs.New(errs.InvalidArgs, "args_json is not JSON of at most %d bytes", maxArgs)
	}
	if data[0] != '[' {
		return []json.RawMessage{data}, nil
	}
	var args []json.RawMessage
	if err := json.Unmarshal(data, &args); err != nil {
		return nil, errs.New(errs.InvalidArgs, "args_json: %v", err)
	}
	return args, nil
}

// destructive is true for what takes a machine or its BMC down. What nobody has
// classified counts, so that a new action is guarded until someone says otherwise.
func destructive(kind, operation string, args []json.RawMessage) bool {
	if kind != "bmc.power" {
		return false
	}
	if operation == "power.setPower" && len(args) == 1 {
		var action string
		return json.Unmarshal(args[0], &action) != nil || action != "on"
	}
	return true
}

// split takes "<concern>.<operation>" apart.
func split(operation string) (concern, name string) {
	concern, name, _ = strings.Cut(operation, ".")
	return concern, name
}

// strict decodes one argument without unknown fields.
func strict(data json.RawMessage, into any) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return err
	}
	if _, err := dec.Token(); err != io.EOF {
		return errs.New(errs.InvalidArgs, "more than one value")
	}
	return nil
}
