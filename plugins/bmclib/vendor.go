package bmclib

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/bmc-toolbox/bmclib/v2/providers/asrockrack"
	"github.com/bmc-toolbox/bmclib/v2/providers/dell"
	"github.com/bmc-toolbox/bmclib/v2/providers/intelamt"
	"github.com/bmc-toolbox/bmclib/v2/providers/openbmc"
	"github.com/bmc-toolbox/bmclib/v2/providers/supermicro"
	"github.com/go-logr/logr"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// provider is what every vendor's client does.
type provider interface {
	Open(context.Context) error
	Close(context.Context) error
	PowerStateGet(context.Context) (string, error)
	PowerSet(context.Context, string) (bool, error)
}

// vendor is one driver.
type vendor struct {
	id   string
	port int
	// actions are bmclib's words for the ones that are served; nmi has no word.
	actions  map[metal.PowerAction]string
	inspects bool
	// form: the login writes the password into a form as it is.
	form bool
	// dial makes the provider, whose requests all go through the guard.
	dial func(c config, l credentials, g *guard) (provider, error)
	// purpose sorts requests that are no GET.
	purpose func(r *http.Request, body []byte) purpose
	// wants is what the one changing request of an action must be.
	wants func(action metal.PowerAction, r *http.Request, body []byte) error
	// judge reads an answer that says failure in words.
	judge func(answer []byte) error
}

// redfishActions: bmclib's "reset" cycles the power, and its "cycle" resets.
var redfishActions = map[metal.PowerAction]string{
	metal.ActionOn: "on", metal.ActionOff: "off", metal.ActionSoft: "soft", metal.ActionCycle: "reset", metal.ActionReset: "cycle", metal.ActionNMI: "",
}

func vendors() []vendor {
	silent := logr.Discard()
	return []vendor{
		{
			id: "asrockrack", port: 443, inspects: true, form: true, purpose: asrockrackPurpose, wants: asrockrackWants,
			actions: map[metal.PowerAction]string{metal.ActionOn: "on", metal.ActionOff: "off", metal.ActionSoft: "soft", metal.ActionCycle: "cycle", metal.ActionReset: "reset"},
			dial: func(c config, l credentials, g *guard) (provider, error) {
				return asrockrack.NewWithOptions(c.hostURL()+":"+strconv.Itoa(c.port), l.username, string(l.password.Reveal()), silent, asrockrack.WithHTTPClient(g.client())), nil
			},
		},
		{
			id: "dell", port: 443, inspects: true, actions: redfishActions, purpose: redfishPurpose, wants: redfishWants,
			dial: func(c config, l credentials, g *guard) (provider, error) {
				return dell.New(c.hostURL(), l.username, string(l.password.Reveal()), silent, dell.WithHttpClient(g.client()), dell.WithPort(strconv.Itoa(c.port))), nil
			},
		},
		{
			// Plain AMT, port 16992, is not spoken: nothing would say who answers.
			id: "intel-amt", port: 16993, purpose: amtPurpose, wants: amtWants, judge: amtJudge,
			actions: map[metal.PowerAction]string{metal.ActionOn: "on", metal.ActionOff: "off", metal.ActionSoft: "off", metal.ActionCycle: "cycle"},
			dial: func(c config, l credentials, g *guard) (provider, error) {
				p := intelamt.New(c.hostURL(), l.username, string(l.password.Reveal()), intelamt.WithLogger(silent), intelamt.WithHostScheme("https"), intelamt.WithPort(uint32(c.port)))
				return p, capture(g, p, "client", "conn", "WsmanClient", "httpClient")
			},
		},
		{
			id: "openbmc", port: 443, inspects: true, actions: redfishActions, purpose: redfishPurpose, wants: redfishWants,
			dial: func(c config, l credentials, g *guard) (provider, error) {
				// Its own look at the BMC knows no port but one that stands with the host.
				return openbmc.New(c.hostURL()+":"+strconv.Itoa(c.port), l.username, string(l.password.Reveal()), silent, openbmc.WithHttpClient(g.client()), openbmc.WithPort("")), nil
			},
		},
		{
			id: "supermicro", port: 443, inspects: true, form: true, actions: redfishActions, purpose: supermicroPurpose, wants: redfishWants,
			dial: func(c config, l credentials, g *guard) (provider, error) {
				p := supermicro.NewClient(c.hostURL(), l.username, string(l.password.Reveal()), silent, supermicro.WithPort(strconv.Itoa(c.port)))
				return p, capture(g, p, "serviceClient", "client")
			},
		},
	}
}

// capture puts the guard into the http.Client at the end of a path of fields:
// these providers take none, and make their own, which verifies nothing. A
// provider that is built otherwise is not used.
func capture(g *guard, p any, path ...string) error {
	v := reflect.ValueOf(p)
	for _, name := range path {
		for v.Kind() == reflect.Pointer || v.Kind() == reflect.Interface {
			v = v.Elem()
		}
		if v.Kind() != reflect.Struct {
			return fmt.Errorf("bmclib is built otherwise: %s is no struct's field", name)
		}
		if v = v.FieldByName(name); !v.IsValid() {
			return fmt.Errorf("bmclib is built otherwise: there is no field %s", name)
		}
	}
	if v.Type() != reflect.TypeFor[*http.Client]() || v.IsNil() {
		return fmt.Errorf("bmclib is built otherwise: %s is no HTTP client", strings.Join(path, "."))
	}
	g.take((*http.Client)(v.UnsafePointer()))
	return nil
}

var sessionPath = regexp.MustCompile(`^/redfish/v1/(SessionService/)?Sessions(/|$)`)

// redfishPurpose knows sessions; everything else that is no GET changes something.
func redfishPurpose(r *http.Request, _ []byte) purpose {
	if sessionPath.MatchString(r.URL.Path) && (r.Method == http.MethodPost || r.Method == http.MethodDelete) {
		return asSession
	}
	return asWrite
}

func asrockrackPurpose(r *http.Request, _ []byte) purpose {
	if strings.Trim(r.URL.Path, "/") == "api/session" && (r.Method == http.MethodPost || r.Method == http.MethodDelete) {
		return asSession
	}
	return asWrite
}

func supermicroPurpose(r *http.Request, body []byte) purpose {
	switch {
	case r.Method == http.MethodPost && r.URL.Path == "/cgi/login.cgi":
		return asSession
	case r.Method == http.MethodPost && r.URL.Path == "/cgi/ipmi.cgi" && bytes.HasPrefix(body, []byte("op=FRU_INFO.XML&")):
		return asRead
	}
	return redfishPurpose(r, body)
}

var (
	amtAction = regexp.MustCompile(`<(?:[\w.-]+:)?Action\b[^>]*>\s*([^<\s]+)\s*</`)
	amtState  = regexp.MustCompile(`<(?:[\w.-]+:)?PowerState\b[^>]*>\s*(\d+)\s*</`)
	amtReturn = regexp.MustCompile(`<(?:[\w.-]+:)?ReturnValue\b[^>]*>\s*(\d+)\s*</`)
)

// amtPurpose reads the action: over WS-Management everything is a POST.
func amtPurpose(r *http.Request, body []byte) purpose {
	if r.Method != http.MethodPost || r.URL.Path != "/wsman" {
		return asWrite
	}
	if len(body) == 0 {
		return asSession // it fetches the challenge
	}
	found := amtAction.FindSubmatch(body)
	if found == nil {
		return asWrite
	}
	for _, verb := range []string{"/enumeration/Enumerate", "/enumeration/Pull", "/enumeration/Release", "/transfer/Get"} {
		if bytes.HasSuffix(found[1], []byte(verb)) {
			return asRead
		}
	}
	return asWrite
}

// amtJudge wants the return value 0, which the provider does not look at.
func amtJudge(answer []byte) error {
	found := amtReturn.FindSubmatch(answer)
	if found == nil {
		return errs.New(errs.BmcError, "the BMC did not say whether it switched")
	}
	if string(found[1]) != "0" {
		return errs.New(errs.BmcError, "the BMC answers %s", found[1])
	}
	return nil
}

// amtStates are the power states (CIM_PowerManagementService) that an action
// may request: the provider asks the operating system first where it can, and
// so a graceful request would stand in for a hard one.
var amtStates = map[metal.PowerAction][]string{
	metal.ActionOn: {"2"}, metal.ActionOff: {"6", "8"}, metal.ActionSoft: {"12", "13"}, metal.ActionCycle: {"5", "9"},
}

func amtWants(action metal.PowerAction, _ *http.Request, body []byte) error {
	found := amtState.FindSubmatch(body)
	if found == nil {
		return errors.New("the provider asks for no power state")
	}
	if !slices.Contains(amtStates[action], string(found[1])) {
		return fmt.Errorf("of this machine bmclib would request power state %s, which is not %s", found[1], action)
	}
	return nil
}

// resetTypes are Redfish's words. A provider whose first does not work tries
// another, which is refused: a graceful action never stands in for a hard one.
var resetTypes = map[metal.PowerAction]string{
	metal.ActionOn: "On", metal.ActionOff: "ForceOff", metal.ActionSoft: "GracefulShutdown",
	metal.ActionCycle: "PowerCycle", metal.ActionReset: "ForceRestart", metal.ActionNMI: "Nmi",
}

func redfishWants(action metal.PowerAction, r *http.Request, body []byte) error {
	var in struct{ ResetType string }
	if !strings.HasSuffix(r.URL.Path, "/ComputerSystem.Reset") || json.Unmarshal(body, &in) != nil {
		return fmt.Errorf("bmclib would change something else: %s %.100s", r.Method, r.URL.Path)
	}
	if in.ResetType != resetTypes[action] {
		return fmt.Errorf("the BMC does not take %s, and bmclib would try %.40q", resetTypes[action], in.ResetType)
	}
	return nil
}

func asrockrackWants(_ metal.PowerAction, r *http.Request, _ []byte) error {
	if r.Method != http.MethodPost || strings.TrimLeft(r.URL.Path, "/") != "api/actions/power" {
		return fmt.Errorf("bmclib would change something else: %s %.100s", r.Method, r.URL.Path)
	}
	return nil
}
