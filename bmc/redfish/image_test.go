package redfish

import (
	"context"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// An image is pushed to where the BMC says, outside of /redfish/ too, and to no
// other host.
func TestFirmwarePushPath(t *testing.T) {
	d := newDepot(t, []byte("image"))
	var pushed, parameters, name string
	var length int64
	version := "1"
	push := func(uri string) map[string]http.HandlerFunc {
		return map[string]http.HandlerFunc{
			"GET /redfish/v1/UpdateService": say(`{"FirmwareInventory":{"@odata.id":"/redfish/v1/FI"},"MultipartHttpPushUri":"` + uri + `"}`),
			"GET /redfish/v1/FI":            say(`{"Members":[{"@odata.id":"/redfish/v1/FI/BIOS"}]}`),
			"GET /redfish/v1/FI/BIOS":       func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintf(w, `{"Id":"BIOS","Version":%q}`, version) },
			"POST /mfwupdate": func(w http.ResponseWriter, r *http.Request) {
				length = r.ContentLength
				_, params, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
				parts := multipart.NewReader(r.Body, params["boundary"])
				for part, err := parts.NextPart(); err == nil; part, err = parts.NextPart() {
					body, _ := io.ReadAll(part)
					if part.FormName() == "UpdateParameters" {
						parameters = string(body)
					} else {
						pushed, name = string(body), part.FileName()
					}
				}
				version = "2"
				w.WriteHeader(http.StatusOK)
			},
		}
	}
	_, b := serve(t, push("/mfwupdate"))
	b.pool.options.Roots = d.pool
	if _, err := b.do("firmware", "update", d.update("bios", "2")); err != nil {
		t.Fatal(err)
	}
	if pushed != "image" || parameters != `{"Targets":["/redfish/v1/FI/BIOS"]}` || name != "bios.bin" || length <= 0 {
		t.Errorf("the BMC got %q as %q with %s, length %d", pushed, name, parameters, length)
	}
	for _, uri := range []string{"https://192.0.2.1/mfwupdate", "//192.0.2.1/mfwupdate", "mfwupdate", "/../x", "/a?b=c", "/%2e%2e/x", "http://" + d.Listener.Addr().String() + "/x"} {
		version = "1"
		_, b := serve(t, push(uri))
		b.pool.options.Roots = d.pool
		if _, err := b.do("firmware", "update", d.update("BIOS", "2")); errs.CodeOf(err) != errs.BmcError {
			t.Errorf("update of a BMC that wants its image at %s = %v, want bmc-error", uri, err)
		}
	}
}

// No request but a push leaves /redfish/, and a push goes to its one place.
func TestFirmwareOnlyPushesLeaveRedfish(t *testing.T) {
	f, b := serve(t, map[string]http.HandlerFunc{"POST /mfwupdate": code(200, ""), "POST /cgi": code(200, ""), "GET /mfwupdate": code(200, "")})
	config, err := parseConfig(b.raw())
	if err != nil {
		t.Fatal(err)
	}
	client, err := newClient(target{address: config.address, pin: config.pin}, false)
	if err != nil {
		t.Fatal(err)
	}
	defer client.CloseIdleConnections()
	c := &conn{target: target{address: config.address}, client: client, timing: quick}
	push := context.WithValue(t.Context(), pushed{}, "/mfwupdate")
	for _, tt := range []struct {
		ctx          context.Context
		method, path string
		goes         bool
	}{
		{push, "POST", "/mfwupdate", true}, {push, "GET", "/mfwupdate", false}, {push, "POST", "/cgi", false}, {t.Context(), "POST", "/mfwupdate", false}, {t.Context(), "POST", "/cgi", false},
	} {
		before := f.count(tt.method + " " + tt.path)
		_, err := c.do(tt.ctx, request{method: tt.method, path: tt.path})
		if (err == nil) != tt.goes || (f.count(tt.method+" "+tt.path) > before) != tt.goes {
			t.Errorf("%s %s = %v, want sent %v", tt.method, tt.path, err, tt.goes)
		}
	}
}

// A refusal for good leads to the next way; anything else does not.
func TestFirmwareLadder(t *testing.T) {
	d := newDepot(t, []byte("image"))
	for status, next := range map[int]bool{400: true, 404: true, 405: true, 415: true, 501: true, 401: false, 403: false, 409: false, 429: false, 500: false, 503: false} {
		version := "1"
		f, b := serve(t, map[string]http.HandlerFunc{
			"GET /redfish/v1/UpdateService": say(`{"FirmwareInventory":{"@odata.id":"/redfish/v1/FI"},"MultipartHttpPushUri":"/redfish/v1/push",
				"Actions":{"#UpdateService.SimpleUpdate":{"target":"/redfish/v1/US/Actions/UpdateService.SimpleUpdate"}}}`),
			"GET /redfish/v1/FI":      say(`{"Members":[{"@odata.id":"/redfish/v1/FI/BIOS"}]}`),
			"GET /redfish/v1/FI/BIOS": func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintf(w, `{"Id":"BIOS","Version":%q}`, version) },
			"POST /redfish/v1/push": func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				w.WriteHeader(status)
			},
			"POST /redfish/v1/US/Actions/UpdateService.SimpleUpdate": func(w http.ResponseWriter, r *http.Request) {
				body, _ := io.ReadAll(r.Body)
				if want := `{"ImageURI":"` + d.URL + `/bios.bin","Targets":["/redfish/v1/FI/BIOS"],"TransferProtocol":"HTTPS"}`; string(body) != want {
					t.Errorf("the BMC is asked to fetch %s, want %s", body, want)
				}
				version = "2"
			},
		})
		b.pool.options.Roots, b.pool.timing.settle = d.pool, 10*time.Millisecond
		_, err := b.do("firmware", "update", d.update("BIOS", "2"))
		pushes := map[bool]int{true: 2, false: 1}[status == http.StatusUnauthorized] // under a new session
		if simple := f.count("POST /redfish/v1/US/Actions/UpdateService.SimpleUpdate"); (simple == 1) != next || (err == nil) != next || f.count("POST /redfish/v1/push") != pushes {
			t.Errorf("after %d: %d simple updates, %v, want one %v", status, simple, err, next)
		}
	}
}

// A BMC that does not take targets gets the image once more without.
func TestFirmwareTargetsRefused(t *testing.T) {
	d := newDepot(t, []byte("image"))
	for words, pushes := range map[string]int{"Targets is not supported": 2, "the image is bad": 1} {
		version := "1"
		f, b := serve(t, map[string]http.HandlerFunc{
			"GET /redfish/v1/UpdateService": say(`{"FirmwareInventory":{"@odata.id":"/redfish/v1/FI"},"MultipartHttpPushUri":"/redfish/v1/push"}`),
			"GET /redfish/v1/FI":            say(`{"Members":[{"@odata.id":"/redfish/v1/FI/BIOS"}]}`),
			"GET /redfish/v1/FI/BIOS":       func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintf(w, `{"Id":"BIOS","Version":%q}`, version) },
			"POST /redfish/v1/push": func(w http.ResponseWriter, r *http.Request) {
				body, _ := io.ReadAll(r.Body)
				if strings.Contains(string(body), "/redfish/v1/FI/BIOS") {
					answer400(`{"error":{"message":"`+words+`"}}`)(w, r)
					return
				}
				version = "2"
			},
		})
		b.pool.options.Roots = d.pool
		_, err := b.do("firmware", "update", d.update("BIOS", "2"))
		if got := f.count("POST /redfish/v1/push"); got != pushes || (err == nil) != (pushes == 2) {
			t.Errorf("%s: update = %v after %d pushes, want %d", words, err, got, pushes)
		}
	}
}
