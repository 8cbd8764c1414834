package bmctest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"sync"
	"time"
)

// Redfish is a running Redfish BMC.
type Redfish struct {
	*chassis
	listener net.Listener
	server   *http.Server
	spki     string
	cancel   context.CancelFunc
	stop     func() bool
	done     chan struct{}

	user, password string

	mu       sync.Mutex
	sessions map[string]bool // token -> open
	requests []string
}

// maxSessions is how many sessions the BMC holds, few as on real ones: a client
// that never closes its own is found out.
const maxSessions = 8

// StartRedfish serves Redfish over TLS with a self-signed certificate on
// listen (host:port, port 0 for any free one) until Close or the end of ctx.
func StartRedfish(ctx context.Context, listen, user, password string, m Machine, opts ...Option) (*Redfish, error) {
	cert, spki, err := selfSigned()
	if err != nil {
		return nil, fmt.Errorf("start Redfish BMC: %w", err)
	}
	listener, err := net.Listen("tcp", listen)
	if err != nil {
		return nil, fmt.Errorf("start Redfish BMC: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	r := &Redfish{
		chassis: newChassis(m, newOptions(opts)), listener: listener, spki: spki, cancel: cancel, done: make(chan struct{}),
		user: user, password: password, sessions: map[string]bool{},
	}
	r.server = &http.Server{
		Handler:           http.MaxBytesHandler(r.handler(), 64<<10),
		ReadHeaderTimeout: 10 * time.Second,
		TLSConfig:         &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12},
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ErrorLog:          slog.NewLogLogger(slog.DiscardHandler, slog.LevelError), // clients that refuse the certificate
	}
	go func() {
		defer close(r.done)
		_ = r.server.ServeTLS(listener, "", "") // ends with Close's error only
	}()
	r.stop = context.AfterFunc(ctx, func() { _ = r.server.Close() })
	return r, nil
}

// selfSigned makes a certificate that names no host, as BMCs ship it.
func selfSigned() (tls.Certificate, string, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, "", err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		Subject:      pkix.Name{CommonName: "bmc"},
		NotBefore:    time.Unix(0, 0),
		NotAfter:     time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, "", err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return tls.Certificate{}, "", err
	}
	sum := sha256.Sum256(leaf.RawSubjectPublicKeyInfo)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, hex.EncodeToString(sum[:]), nil
}

// Addr is the BMC's host:port.
func (r *Redfish) Addr() string { return r.listener.Addr().String() }

// SPKI is the pin: hex SHA-256 of the certificate's public key.
func (r *Redfish) SPKI() string { return r.spki }

// Requests are the requests so far, such as "GET /redfish/v1/Systems".
func (r *Redfish) Requests() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]string(nil), r.requests...)
}

// Sessions is how many sessions are open.
func (r *Redfish) Sessions() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.sessions)
}

// Close ends the BMC, not the machine, and waits for what it is doing.
func (r *Redfish) Close() error {
	r.stop()
	r.cancel()
	err := r.server.Close()
	<-r.done
	r.quiesce()
	return err
}

const system = "/redfish/v1/Systems/1"

type object = map[string]any

func link(path string) object { return object{"@odata.id": path} }

func (r *Redfish) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /redfish/v1/{$}", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, http.StatusOK, object{
			"@odata.id": "/redfish/v1/", "@odata.type": "#ServiceRoot.v1_5_0.ServiceRoot", "Id": "RootService", "Name": "Root Service",
			"RedfishVersion": "1.6.0", "Systems": link("/redfish/v1/Systems"), "SessionService": link("/redfish/v1/SessionService"),
			"Links": object{"Sessions": link("/redfish/v1/SessionService/Sessions")},
		})
	})
	mux.HandleFunc("POST /redfish/v1/SessionService/Sessions", r.openSession)
	closed := http.NewServeMux()
	closed.HandleFunc("DELETE /redfish/v1/SessionService/Sessions/{id}", r.closeSession)
	closed.HandleFunc("GET /redfish/v1/Systems", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, http.StatusOK, object{
			"@odata.id": "/redfish/v1/Systems", "@odata.type": "#ComputerSystemCollection.ComputerSystemCollection", "Name": "Systems",
			"Members@odata.count": 1, "Members": []object{link(system)},
		})
	})
	closed.HandleFunc("GET "+system, func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, r.system()) })
	closed.HandleFunc("PATCH "+system, r.patchSystem)
	closed.HandleFunc("POST "+system+"/Actions/ComputerSystem.Reset", r.reset)
	mux.Handle("/redfish/v1/", r.authenticated(closed))
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		r.mu.Lock()
		r.requests = append(r.requests, req.Method+" "+req.URL.Path)
		r.mu.Unlock()
		w.Header().Set("OData-Version", "4.0")
		mux.ServeHTTP(w, req)
	})
}

func (r *Redfish) authenticated(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		user, password, basic := req.BasicAuth()
		r.mu.Lock()
		known := r.sessions[req.Header.Get("X-Auth-Token")]
		r.mu.Unlock()
		if !known && !(basic && r.matches(user, password)) {
			fail(w, http.StatusUnauthorized, "Base.1.0.InsufficientPrivilege", "The credentials are not valid.")
			return
		}
		next.ServeHTTP(w, req)
	})
}

func (r *Redfish) matches(user, password string) bool {
	u := subtle.ConstantTimeCompare([]byte(user), []byte(r.user))
	p := subtle.ConstantTimeCompare([]byte(password), []byte(r.password))
	return u&p == 1
}

func (r *Redfish) openSession(w http.ResponseWriter, req *http.Request) {
	var in struct{ UserName, Password string }
	if err := json.NewDecoder(req.Body).Decode(&in); err != nil {
		fail(w, http.StatusBadRequest, "Base.1.0.MalformedJSON", "The request is not JSON.")
		return
	}
	if !r.matches(in.UserName, in.Password) {
		fail(w, http.StatusUnauthorized, "Base.1.0.ResourceAtUriUnauthorized", "The user name or the password is wrong.")
		return
	}
	token := rand.Text()
	r.mu.Lock()
	full := len(r.sessions) >= maxSessions
	if !full {
		r.sessions[token] = true
	}
	r.mu.Unlock()
	if full {
		fail(w, http.StatusServiceUnavailable, "Base.1.0.SessionLimitExceeded", "Too many sessions are open.")
		return
	}
	id := "/redfish/v1/SessionService/Sessions/" + sessionID(token)
	w.Header().Set("X-Auth-Token", token)
	w.Header().Set("Location", id)
	answer(w, http.StatusCreated, object{"@odata.id": id, "Id": sessionID(token), "UserName": in.UserName})
}

// sessionID names a session without giving its token away.
func sessionID(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:6])
}

func (r *Redfish) closeSession(w http.ResponseWriter, req *http.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for token := range r.sessions {
		if sessionID(token) == req.PathValue("id") {
			delete(r.sessions, token)
			w.WriteHeader(http.StatusNoContent)
			return
		}
	}
	fail(w, http.StatusNotFound, "Base.1.0.ResourceMissingAtURI", "There is no such session.")
}

// targets are the boot devices in Redfish's words.
var targets = map[string]string{"none": "None", "pxe": "Pxe", "disk": "Hdd", "cdrom": "Cd", "bios": "BiosSetup"}

func (r *Redfish) system() object {
	power := "Off"
	if r.machine.Running() {
		power = "On"
	}
	boot := object{
		"BootSourceOverrideEnabled": "Disabled", "BootSourceOverrideTarget": "None", "BootSourceOverrideMode": "UEFI",
		"BootSourceOverrideTarget@Redfish.AllowableValues": []string{"None", "Pxe", "Hdd", "Cd", "BiosSetup"},
	}
	if dev, valid := r.current(); valid {
		boot["BootSourceOverrideEnabled"] = "Once"
		if dev.Persistent {
			boot["BootSourceOverrideEnabled"] = "Continuous"
		}
		boot["BootSourceOverrideTarget"] = targets[dev.Device]
		if !dev.EFI {
			boot["BootSourceOverrideMode"] = "Legacy"
		}
	}
	return object{
		"@odata.id": system, "@odata.type": "#ComputerSystem.v1_10_0.ComputerSystem", "Id": "1", "Name": "System",
		"Manufacturer": "Better Compute", "Model": "Rig Machine", "SerialNumber": "RIG-0001", "PowerState": power, "Boot": boot,
		"Actions": object{"#ComputerSystem.Reset": object{
			"target":                            system + "/Actions/ComputerSystem.Reset",
			"ResetType@Redfish.AllowableValues": []string{"On", "ForceOff", "GracefulShutdown", "ForceRestart", "PowerCycle"},
		}},
	}
}

func (r *Redfish) patchSystem(w http.ResponseWriter, req *http.Request) {
	var in struct {
		Boot struct {
			Enabled string `json:"BootSourceOverrideEnabled"`
			Target  string `json:"BootSourceOverrideTarget"`
			Mode    string `json:"BootSourceOverrideMode"`
		}
	}
	decoder := json.NewDecoder(req.Body)
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&in); err != nil {
		fail(w, http.StatusBadRequest, "Base.1.0.MalformedJSON", "The request is not JSON with a Boot object alone.")
		return
	}
	if in.Boot.Enabled == "Disabled" || in.Boot.Target == "None" {
		r.clearOverride()
		w.WriteHeader(http.StatusNoContent)
		return
	}
	dev := BootDevice{EFI: in.Boot.Mode != "Legacy", Persistent: in.Boot.Enabled == "Continuous"}
	for device, target := range targets {
		if target == in.Boot.Target {
			dev.Device = device
		}
	}
	if dev.Device == "" || in.Boot.Enabled != "Once" && in.Boot.Enabled != "Continuous" {
		fail(w, http.StatusBadRequest, "Base.1.0.PropertyValueNotInList", "The boot override is not one that the system has.")
		return
	}
	r.setOverride(dev, false)
	w.WriteHeader(http.StatusNoContent)
}

func (r *Redfish) reset(w http.ResponseWriter, req *http.Request) {
	var in struct{ ResetType string }
	if err := json.NewDecoder(req.Body).Decode(&in); err != nil {
		fail(w, http.StatusBadRequest, "Base.1.0.MalformedJSON", "The request is not JSON.")
		return
	}
	actions := map[string]func(context.Context) error{
		"On": r.powerOn, "ForceOff": r.powerOff, "GracefulShutdown": r.soft, "ForceRestart": r.chassis.reset, "PowerCycle": r.cycle,
	}
	action, known := actions[in.ResetType]
	if !known {
		fail(w, http.StatusBadRequest, "Base.1.0.ActionParameterNotSupported", "The reset type is not one that the system has.")
		return
	}
	// A client that gives up does not stop what the BMC has begun.
	ctx := context.WithoutCancel(req.Context())
	switch err := action(ctx); {
	case errors.Is(err, errNotRunning):
		fail(w, http.StatusConflict, "Base.1.0.ActionNotSupported", "The system is off.")
	case err != nil:
		fail(w, http.StatusInternalServerError, "Base.1.0.InternalError", err.Error())
	default:
		w.WriteHeader(http.StatusNoContent)
	}
}

func answer(w http.ResponseWriter, status int, body object) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body)
}

func fail(w http.ResponseWriter, status int, id, message string) {
	answer(w, status, object{"error": object{
		"code": "Base.1.0.GeneralError", "message": "See ExtendedInfo.",
		"@Message.ExtendedInfo": []object{{"MessageId": id, "Message": message}},
	}})
}
