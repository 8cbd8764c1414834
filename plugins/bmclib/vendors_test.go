package bmclib

import (
	"bytes"
	"crypto/md5"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
)

const (
	user     = "ADMIN"
	password = "Twenty-bytes_pass.OK"
)

// bmc is a machine with a vendor's interface over TLS, as far as bmclib asks for
// it: paths, forms and answers are those that its provider was written for.
type bmc struct {
	*httptest.Server
	t *testing.T

	mu       sync.Mutex
	on       bool
	log      []string // what was done to the machine
	requests []string
	sessions int
	// fault, where set, may answer a request in the BMC's place.
	fault func(w http.ResponseWriter, r *http.Request) bool
	// states are what AMT offers; resets what Redfish allows.
	states []string
	resets []string
	ignore bool // what is asked is taken and not done
}

type object = map[string]any

func newBMC(t *testing.T, vendor string) *bmc {
	t.Helper()
	b := &bmc{t: t, states: []string{"2", "5", "8"}, resets: []string{"On", "ForceOff", "GracefulShutdown", "ForceRestart", "PowerCycle", "Nmi"}}
	handlers := map[string]http.Handler{
		"dell":       redfishBMC{b, "Dell Inc.", "System.Embedded.1", "iDRAC.Embedded.1", "System.Embedded.1"},
		"openbmc":    redfishBMC{b, "OpenBMC Project", "system", "bmc", "ASRock_ROMED8HM3"},
		"supermicro": supermicroBMC{b, redfishBMC{b, "Supermicro", "1", "1", "1"}},
		"asrockrack": asrockrackBMC{b},
		"intel-amt":  amtBMC{b},
	}
	serve := handlers[vendor]
	b.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		r.Body = io.NopCloser(bytes.NewReader(body))
		b.mu.Lock()
		b.requests = append(b.requests, r.Method+" "+r.URL.Path)
		fault := b.fault
		b.mu.Unlock()
		if fault == nil || !fault(w, r) {
			r.Body = io.NopCloser(bytes.NewReader(body))
			serve.ServeHTTP(w, r)
		}
	}))
	b.Config.ErrorLog = log.New(io.Discard, "", 0) // clients that refuse the certificate
	b.StartTLS()
	t.Cleanup(b.Close)
	return b
}

func (b *bmc) addr() string { return strings.TrimPrefix(b.URL, "https://") }

func (b *bmc) pin() string {
	sum := sha256.Sum256(b.Certificate().RawSubjectPublicKeyInfo)
	return hex.EncodeToString(sum[:])
}

func (b *bmc) did() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.log)
}

func (b *bmc) asked() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.requests)
}

func (b *bmc) open() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.sessions
}

func (b *bmc) count(n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sessions += n
}

func (b *bmc) power() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.on
}

func (b *bmc) set(f func(b *bmc)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f(b)
}

// do switches the machine and writes it down.
func (b *bmc) do(word string, on bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.log = append(b.log, word)
	if !b.ignore {
		b.on = on
	}
}

func reply(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

// redfishBMC is a Redfish service with the paths that bmclib knows of a vendor.
type redfishBMC struct {
	*bmc
	manufacturer, system, manager, chassis string
}

const token = "token-of-the-rig"

func (b redfishBMC) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := strings.TrimSuffix(r.URL.Path, "/")
	link := func(p string) object { return object{"@odata.id": p} }
	members := func(p ...string) object {
		list := []object{}
		for _, m := range p {
			list = append(list, link(m))
		}
		return object{"@odata.id": path, "Name": "Collection", "Members": list, "Members@odata.count": len(list)}
	}
	systems, managers, chassis := "/redfish/v1/Systems/"+b.system, "/redfish/v1/Managers/"+b.manager, "/redfish/v1/Chassis/"+b.chassis
	sessions := "/redfish/v1/SessionService/Sessions"
	if path == "" {
		fmt.Fprintf(w, "<title>%s</title>", b.manufacturer)
		return
	}
	if path == "/redfish/v1" {
		reply(w, 200, object{"@odata.id": "/redfish/v1", "Id": "RootService", "Name": "Root", "RedfishVersion": "1.6.0",
			"Systems": link("/redfish/v1/Systems"), "Managers": link("/redfish/v1/Managers"), "Chassis": link("/redfish/v1/Chassis"),
			"UpdateService": link("/redfish/v1/UpdateService"), "Links": object{"Sessions": link(sessions)}})
		return
	}
	if r.Method == http.MethodPost && path == sessions {
		var in struct{ UserName, Password string }
		if json.NewDecoder(r.Body).Decode(&in) != nil || in.UserName != user || in.Password != password {
			reply(w, 401, object{"error": object{"message": "the credentials are wrong"}})
			return
		}
		b.count(1)
		w.Header().Set("X-Auth-Token", token)
		w.Header().Set("Location", sessions+"/1")
		reply(w, 201, object{"@odata.id": sessions + "/1", "Id": "1"})
		return
	}
	if r.Header.Get("X-Auth-Token") != token {
		reply(w, 401, object{"error": object{"message": "no session"}})
		return
	}
	if r.Method == http.MethodDelete && path == sessions+"/1" {
		b.count(-1)
		w.WriteHeader(204)
		return
	}
	power := map[bool]string{true: "On", false: "Off"}[b.power()]
	if r.Method == http.MethodPost && path == systems+"/Actions/ComputerSystem.Reset" {
		var in struct{ ResetType string }
		_ = json.NewDecoder(r.Body).Decode(&in)
		if !slices.Contains(b.resets, in.ResetType) {
			reply(w, 400, object{"error": object{"message": "ResetType is not in the list"}})
			return
		}
		b.do(in.ResetType, in.ResetType != "ForceOff" && in.ResetType != "GracefulShutdown")
		w.WriteHeader(204)
		return
	}
	if r.Method != http.MethodGet {
		b.do(r.Method+" "+path, b.power())
		w.WriteHeader(204)
		return
	}
	answers := map[string]object{
		"/redfish/v1/Systems": members(systems), "/redfish/v1/Managers": members(managers), "/redfish/v1/Chassis": members(chassis),
		systems: {"@odata.id": systems, "Id": b.system, "Name": "System", "Manufacturer": b.manufacturer, "Model": "Rig 1", "SerialNumber": "SN\u001b[2J-1",
			"PowerState": power, "Processors": link(systems + "/Processors"), "Memory": link(systems + "/Memory"), "EthernetInterfaces": link(systems + "/EthernetInterfaces"),
			"BiosVersion": "1.2.3", "Bios": link(systems + "/Bios"),
			"Actions": object{"#ComputerSystem.Reset": object{"target": systems + "/Actions/ComputerSystem.Reset", "ResetType@Redfish.AllowableValues": b.resets}}},
		systems + "/Processors": members(systems + "/Processors/1"),
		systems + "/Processors/1": {"@odata.id": systems + "/Processors/1", "Id": "1", "Name": "CPU1", "Manufacturer": "Intel", "Model": "Xeon X", "TotalCores": 8, "TotalThreads": 16,
			"ProcessorType": "CPU", "Status": object{"Health": "OK", "State": "Enabled"}},
		systems + "/Memory":               members(systems + "/Memory/1"),
		systems + "/Memory/1":             {"@odata.id": systems + "/Memory/1", "Id": "DIMM1", "Name": "DIMM1", "CapacityMiB": 16384, "SerialNumber": "M-1", "DeviceLocator": "A1", "MemoryDeviceType": "DDR4"},
		systems + "/EthernetInterfaces":   members(systems + "/EthernetInterfaces/1"),
		systems + "/EthernetInterfaces/1": {"@odata.id": systems + "/EthernetInterfaces/1", "Id": "NIC1", "Name": "NIC1", "MACAddress": "52:54:00:12:34:56", "SpeedMbps": 1000},
		managers: {"@odata.id": managers, "Id": b.manager, "Name": "Manager", "ManagerType": "BMC", "FirmwareVersion": "9.9", "Status": object{"Health": "OK"},
			"EthernetInterfaces": link(managers + "/EthernetInterfaces")},
		chassis:                     {"@odata.id": chassis, "Id": b.chassis, "Name": "Chassis", "ChassisType": "RackMount", "Manufacturer": b.manufacturer, "Model": "Rig 1"},
		"/redfish/v1/UpdateService": {"@odata.id": path, "Id": "UpdateService", "Name": "Update", "FirmwareInventory": link("/redfish/v1/UpdateService/FirmwareInventory")},
		"/redfish/v1/UpdateService/FirmwareInventory": members(),
	}
	if found, ok := answers[path]; ok {
		reply(w, 200, found)
		return
	}
	reply(w, 404, object{"error": object{"message": "there is no " + path}})
}

// supermicroBMC is an X11's web interface beside its Redfish service.
type supermicroBMC struct {
	*bmc
	redfish redfishBMC
}

func (b supermicroBMC) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	sid, _ := r.Cookie("SID")
	in := sid != nil && sid.Value == "web-session"
	switch {
	case strings.HasPrefix(r.URL.Path, "/redfish/"):
		b.redfish.ServeHTTP(w, r)
	case r.URL.Path == "/cgi/login.cgi" && r.Method == http.MethodPost:
		_ = r.ParseForm()
		name, _ := base64.StdEncoding.DecodeString(r.PostForm.Get("name"))
		pwd, _ := base64.StdEncoding.DecodeString(r.PostForm.Get("pwd"))
		if string(name) != user || string(pwd) != password {
			fmt.Fprint(w, "<html>wrong</html>") // 200, as these boards do
			return
		}
		b.count(1)
		http.SetCookie(w, &http.Cookie{Name: "SID", Value: "web-session", Path: "/"})
		fmt.Fprint(w, `<html>../cgi/url_redirect.cgi?url_name=mainmenu</html>`)
	case !in:
		w.WriteHeader(401)
	case r.URL.Path == "/cgi/url_redirect.cgi":
		fmt.Fprint(w, `<script>SmcCsrfInsert ("CSRF_TOKEN", "csrf-1");</script>`)
	case r.URL.Path == "/cgi/ipmi.cgi":
		fmt.Fprint(w, `<?xml version="1.0"?><IPMI><FRU_INFO RES="1"><BOARD MFC_NAME="Supermicro" PART_NUM="X11SCM-F" PROD_NAME="X11SCM-F" SERIAL_NUM="B-1"/></FRU_INFO></IPMI>`)
	case r.URL.Path == "/cgi/logout.cgi":
		b.count(-1)
		w.WriteHeader(200)
	default:
		b.do(r.Method+" "+r.URL.Path, b.power())
	}
}

// asrockrackBMC is the interface of an E3C246D4I-NL.
type asrockrackBMC struct{ *bmc }

func (b asrockrackBMC) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := strings.TrimLeft(r.URL.Path, "/")
	if r.Method == http.MethodPost && path == "api/session" {
		_ = r.ParseForm()
		if r.PostForm.Get("username") != user || r.PostForm.Get("password") != password {
			w.WriteHeader(401)
			return
		}
		b.count(1)
		http.SetCookie(w, &http.Cookie{Name: "QSESSIONID", Value: "web-session", Path: "/"})
		reply(w, 200, object{"ok": 0, "privilege": 4, "racsession_id": 1, "CSRFToken": "csrf-1"})
		return
	}
	if c, err := r.Cookie("QSESSIONID"); err != nil || c.Value != "web-session" || r.Header.Get("X-Csrftoken") != "csrf-1" {
		w.WriteHeader(401)
		return
	}
	switch r.Method + " " + path {
	case "DELETE api/session":
		b.count(-1)
		w.WriteHeader(200)
	case "GET api/fru":
		reply(w, 200, []object{{
			"board":   object{"manufacturer": "ASRockRack", "product_name": "E3C246D4I-NL", "serial_number": "SN\u001b[2J-1"},
			"chassis": object{"type": "Main Server Chassis", "serial_number": "C-1"}, "product": object{"manufacturer": "Packet", "product_name": "c3"},
		}})
	case "GET api/asrr/fw-info":
		reply(w, 200, object{"BMC_fw_version": "0.01.00", "BIOS_fw_version": "L2.07B", "CPLD_version": "N/A"})
	case "GET api/asrr/inventory_info":
		reply(w, 200, []object{
			{"device_type": "CPU", "product_manufacturer_name": "Intel", "product_name": "Xeon X", "product_serial_number": "N/A"},
			{"device_type": "Memory", "device_name": "DDR4_A1", "product_manufacturer_name": "Micron", "product_serial_number": "M-1"},
			{"device_type": "Storage device", "product_manufacturer_name": "N/A", "product_part_number": "DISK-1", "product_serial_number": "D-1"},
		})
	case "GET api/sensors":
		reply(w, 200, []object{})
	case "GET api/asrr/getbioscode":
		reply(w, 200, object{"poststatus": 1, "postdata": 160})
	case "GET api/chassis-status":
		reply(w, 200, object{"power_status": map[bool]int{true: 1}[b.power()], "led_status": 0})
	case "POST api/actions/power":
		var in struct {
			Command int `json:"power_command"`
		}
		_ = json.NewDecoder(r.Body).Decode(&in)
		b.do(fmt.Sprintf("power_command %d", in.Command), in.Command != 0 && in.Command != 5)
		w.WriteHeader(200)
	default:
		b.do(r.Method+" "+path, b.power())
		w.WriteHeader(200)
	}
}

// amtBMC is WS-Management behind digest authentication.
type amtBMC struct{ *bmc }

const (
	amtRealm = "Digest:rig"
	amtNonce = "nonce-of-the-rig"
	cim      = "http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/"
	wsen     = "http://schemas.xmlsoap.org/ws/2004/09/enumeration"
	wsa      = "http://schemas.xmlsoap.org/ws/2004/08/addressing"
	wsman    = "http://schemas.dmtf.org/wbem/wsman/1/wsman.xsd"
)

func sum(format string, args ...any) string {
	h := md5.Sum(fmt.Appendf(nil, format, args...))
	return hex.EncodeToString(h[:])
}

var resourceURI = regexp.MustCompile(`ResourceURI[^>]*>([^<]+)<`)

func (b amtBMC) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	fields := map[string]string{}
	for _, f := range strings.Split(strings.TrimPrefix(r.Header.Get("Authorization"), "Digest "), ",") {
		name, value, _ := strings.Cut(f, "=")
		fields[name] = strings.Trim(value, `"`)
	}
	want := sum("%s:%s:%s:%s:auth:%s", sum("%s:%s:%s", user, amtRealm, password), amtNonce, fields["nc"], fields["cnonce"], sum("POST:/wsman"))
	if r.URL.Path != "/wsman" || fields["username"] != user || fields["response"] != want {
		w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Digest realm="%s",nonce="%s",qop="auth"`, amtRealm, amtNonce))
		w.WriteHeader(401)
		return
	}
	body, _ := io.ReadAll(r.Body)
	action, resource := string(amtAction.FindSubmatch(body)[1]), ""
	if m := resourceURI.FindSubmatch(body); m != nil {
		resource = string(m[1])
	}
	envelope := func(inner string) {
		w.Header().Set("Content-Type", "application/soap+xml; charset=utf-8")
		fmt.Fprintf(w, `<?xml version="1.0" encoding="UTF-8"?><s:Envelope xmlns:s="http://www.w3.org/2003/05/soap-envelope" xmlns:a="%s"><s:Header><a:Action>%sResponse</a:Action></s:Header><s:Body>%s</s:Body></s:Envelope>`, wsa, action, inner)
	}
	switch {
	case strings.HasSuffix(action, "/Enumerate"):
		envelope(fmt.Sprintf(`<n:EnumerateResponse xmlns:n="%s"><n:EnumerationContext>1</n:EnumerationContext></n:EnumerateResponse>`, wsen))
	case strings.HasSuffix(action, "/Pull"):
		var items string
		switch strings.TrimPrefix(resource, cim) {
		case "CIM_AssociatedPowerManagementService":
			for _, s := range b.states {
				items += "<p:AvailableRequestedPowerStates>" + s + "</p:AvailableRequestedPowerStates>"
			}
			items = fmt.Sprintf(`<p:CIM_AssociatedPowerManagementService xmlns:p="%s">%s<p:PowerState>%d</p:PowerState></p:CIM_AssociatedPowerManagementService>`, resource, items, map[bool]int{true: 2, false: 8}[b.power()])
		case "CIM_ComputerSystem":
			items = fmt.Sprintf(`<a:EndpointReference xmlns:a="%s" xmlns:w="%s"><a:Address>x</a:Address><a:ReferenceParameters><w:SelectorSet><w:Selector Name="Name">ManagedSystem</w:Selector></w:SelectorSet></a:ReferenceParameters></a:EndpointReference>`, wsa, wsman)
		}
		envelope(fmt.Sprintf(`<n:PullResponse xmlns:n="%s"><n:Items>%s</n:Items><n:EndOfSequence/></n:PullResponse>`, wsen, items))
	case strings.HasSuffix(action, "/RequestPowerStateChange"):
		state := string(amtState.FindSubmatch(body)[1])
		b.do("state "+state, state != "6" && state != "8" && state != "12" && state != "13")
		envelope(fmt.Sprintf(`<p:RequestPowerStateChange_OUTPUT xmlns:p="%sCIM_PowerManagementService"><p:ReturnValue>0</p:ReturnValue></p:RequestPowerStateChange_OUTPUT>`, cim))
	default:
		b.do(action, b.power())
		envelope("")
	}
}
