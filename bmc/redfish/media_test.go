package redfish

import (
	"crypto/x509"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmctest"
)

type media struct {
	Inserted bool   `json:"inserted"`
	Image    string `json:"image"`
}

func (b *bench) media() (media, error) {
	b.t.Helper()
	raw, err := b.do("virtual-media", "status")
	var m media
	_ = json.Unmarshal(raw, &m)
	return m, err
}

// library serves images over https; its CA is the option.
func library(t *testing.T) (string, bmctest.Option) {
	t.Helper()
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "an image") }))
	t.Cleanup(s.Close)
	pool := x509.NewCertPool()
	pool.AddCert(s.Certificate())
	return s.URL, bmctest.MediaRoots(pool)
}

func TestVirtualMedia(t *testing.T) {
	url, roots := library(t)
	r, b := rigWith(t, roots)
	if got, err := b.media(); got.Inserted || err != nil {
		t.Errorf("status() of an empty drive = %+v, %v", got, err)
	}
	one, two := url+"/one.iso", url+"/two.iso"
	for _, iso := range []string{one, one, two} {
		if _, err := b.do("virtual-media", "insert", iso); err != nil {
			t.Errorf("insert(%s) = %v", iso, err)
		}
		if got, err := b.media(); got != (media{true, iso}) || err != nil {
			t.Errorf("status() = %+v, %v, want %s", got, err, iso)
		}
	}
	for range 2 {
		if _, err := b.do("virtual-media", "eject"); err != nil {
			t.Errorf("eject() = %v", err)
		}
	}
	if got, err := b.media(); got.Inserted || err != nil {
		t.Errorf("status() after eject = %+v, %v", got, err)
	}
	if got := requests(r, "POST /redfish/v1/Managers/1/VirtualMedia/CD1/Actions/VirtualMedia.EjectMedia"); got != 2 {
		t.Errorf("%d ejects were sent, want 2: none for an empty drive", got)
	}
	want := []string{"media insert " + one, "media eject", "media insert " + two, "media eject"}
	if got := r.Log(); !slices.Equal(got, want) {
		t.Errorf("the BMC logged %q, want %q", got, want)
	}
}

func TestMediaFaults(t *testing.T) {
	for _, tt := range []struct {
		fault  bmctest.Fault
		insert errs.Code
		ejects int
	}{
		{bmctest.MediaPatchOnly, "", 1},
		{bmctest.MediaWantsCredentials, "", 1},
		{bmctest.MediaWantsTransfer, "", 1},
		{bmctest.MediaImageOnly, "", 1},
		{bmctest.MediaEjectLeavesImage, "", 1},
		{bmctest.MediaEjectEmptyFails, "", 1},
		{bmctest.MediaOccupiedFails, "", 1},
		{bmctest.MediaShownLate, "", 1},
		{bmctest.MediaUnderSystem, "", 1},
		{bmctest.EtagOnActions, "", 1},
		{bmctest.MembersPaged, "", 1},
		{bmctest.DropsAfter.Times(1), "", 1},
		{bmctest.SuccessAsError, "", 1},
		{bmctest.MediaIgnored, errs.BmcError, 0},
		{bmctest.MediaCannotVerify, errs.MediaUntrusted, 0},
		{bmctest.Bare, errs.UnsupportedOperation, 0},
	} {
		t.Run(string(tt.fault), func(t *testing.T) {
			t.Parallel()
			url, roots := library(t)
			iso := url + "/x.iso"
			r, b := rigWith(t, roots, bmctest.WithFaults(tt.fault))
			if tt.insert == errs.BmcError {
				b.hurry()
			}
			_, err := b.do("virtual-media", "insert", iso)
			if errs.CodeOf(err) != tt.insert {
				t.Errorf("insert() = %v, want code %q", err, tt.insert)
			}
			if want := map[bool]string{true: iso}[tt.insert == ""]; r.Media() != want {
				t.Errorf("the drive holds %q, want %q", r.Media(), want)
			}
			for range 2 {
				if _, err := b.do("virtual-media", "eject"); err != nil && tt.fault != bmctest.Bare {
					t.Errorf("eject() = %v", err)
				}
			}
			if got := r.Media(); got != "" {
				t.Errorf("the drive holds %q after eject", got)
			}
			inserts, ejects := 0, 0
			for _, l := range r.Log() {
				inserts += strings.Count(l, "media insert")
				ejects += strings.Count(l, "media eject")
			}
			if ejects != tt.ejects || inserts > 1 {
				t.Errorf("the BMC logged %q, want one insert and %d ejects", r.Log(), tt.ejects)
			}
		})
	}
}

// Only an answer that the request is wrong leads to another form of it: of any
// other it is not known what the BMC did. One that says yes and does nothing is
// found out.
func TestMediaRefusals(t *testing.T) {
	const slot, insert, eject = "GET /redfish/v1/vm/CD", "POST /redfish/v1/vm/CD/Actions/in", "POST /redfish/v1/vm/CD/Actions/out"
	for status, more := range map[int]bool{400: true, 404: true, 405: true, 501: true, 401: false, 403: false, 408: false, 500: false, 502: false, 504: false, 204: false} {
		for operation, key := range map[string]string{"insert": insert, "eject": eject} {
			refuse := func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }
			f, b := serve(t, map[string]http.HandlerFunc{
				systemGet:            say(`{"VirtualMedia":{"@odata.id":"/redfish/v1/vm"}}`),
				"GET /redfish/v1/vm": say(`{"Members":[{"@odata.id":"/redfish/v1/vm/CD"}]}`),
				slot: say(fmt.Sprintf(`{"Id":"CD","MediaTypes":["CD"],"Inserted":%v,"Image":"https://h/old.iso","Actions":{
					"#VirtualMedia.InsertMedia":{"target":"/redfish/v1/vm/CD/Actions/in"},"#VirtualMedia.EjectMedia":{"target":"/redfish/v1/vm/CD/Actions/out"}}}`, operation == "eject")),
				insert: refuse, eject: refuse, "PATCH /redfish/v1/vm/CD": refuse,
			})
			b.hurry()
			args := map[string][]any{"insert": {"https://h/x.iso"}}[operation]
			_, err := b.do("virtual-media", operation, args...)
			asked := f.count(insert) + f.count(eject) + f.count("PATCH /redfish/v1/vm/CD")
			if errs.CodeOf(err) != errs.BmcError || f.count(key) == 0 || (asked > 2) != more {
				t.Errorf("%s answered %d = %v after %d requests, want more than one form: %v", operation, status, err, asked, more)
			}
		}
	}
}

// Two images, one after the other, of a BMC that leaves the old one's name behind.
func TestMediaAgainAfterLeftImage(t *testing.T) {
	url, roots := library(t)
	r, b := rigWith(t, roots, bmctest.WithFaults(bmctest.MediaEjectLeavesImage))
	for _, step := range []string{"/a.iso", "", "/a.iso"} {
		if step == "" {
			if _, err := b.do("virtual-media", "eject"); err != nil {
				t.Fatal(err)
			}
			if got, err := b.media(); got.Inserted || err != nil {
				t.Errorf("status() = %+v, %v, want not inserted", got, err)
			}
			continue
		}
		if _, err := b.do("virtual-media", "insert", url+step); err != nil {
			t.Fatal(err)
		}
	}
	if got := r.Media(); got != url+"/a.iso" {
		t.Errorf("the drive holds %q", got)
	}
}

// A BMC without the CA of the image's server: what it says becomes a code.
func TestMediaUntrusted(t *testing.T) {
	url, _ := library(t)
	_, b := rig(t) // knows no CA
	_, err := b.do("virtual-media", "insert", url+"/x.iso")
	if errs.CodeOf(err) != errs.MediaUntrusted || errs.From(err).Retryable {
		t.Errorf("insert() = %v, want media-untrusted, not retryable", err)
	}
	const slot = `{"Id":"CD","MediaTypes":["CD"],"Inserted":false,"Actions":{"#VirtualMedia.InsertMedia":{"target":"/redfish/v1/vm/CD/Actions/x"}}}`
	change := map[string]http.HandlerFunc{
		systemGet:               say(`{"VirtualMedia":{"@odata.id":"/redfish/v1/vm"}}`),
		"GET /redfish/v1/vm":    say(`{"Members":[{"@odata.id":"/redfish/v1/vm/CD"}]}`),
		"GET /redfish/v1/vm/CD": say(slot),
		"POST /redfish/v1/vm/CD/Actions/x": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "/redfish/v1/TaskService/Tasks/1")
			w.WriteHeader(http.StatusAccepted)
		},
		"GET /redfish/v1/TaskService/Tasks/1": say(`{"TaskState":"Exception","TaskStatus":"Critical","Messages":[{"Message":"Peer certificate cannot be authenticated"}]}`),
	}
	_, late := serve(t, change)
	if _, err := late.do("virtual-media", "insert", url+"/x.iso"); errs.CodeOf(err) != errs.MediaUntrusted {
		t.Errorf("insert() of a BMC that says it in a task = %v, want media-untrusted", err)
	}
	change["GET /redfish/v1/TaskService/Tasks/1"] = say(`{"TaskState":"Exception","Messages":[{"Message":"404 from the server"}]}`)
	if _, err := late.do("virtual-media", "insert", url+"/x.iso"); errs.CodeOf(err) != errs.BmcError || !strings.Contains(err.Error(), "404") {
		t.Errorf("insert() whose task fails = %v, want bmc-error with the task's reason", err)
	}
}

// Which of a BMC's drives is a CD drive, and what is in it.
func TestDrives(t *testing.T) {
	for _, tt := range []struct {
		slot            string
		drive, inserted bool
	}{
		{`{"MediaTypes":["CD","DVD"],"Inserted":true}`, true, true},
		{`{"MediaTypes":["USBStick"],"Inserted":false,"Image":"http://old"}`, false, false},
		{`{"MediaTypes":["CD","USBStick"],"Inserted":"yes","Image":""}`, true, false},
		{`{"Id":"CD1","Image":"http://x","Inserted":null}`, true, true},
		{`{"Name":"Virtual DVD","Image":"http://x","ConnectedVia":"NotConnected"}`, true, false},
		{`{"Id":"Floppy1"}`, false, false},
	} {
		o, err := parseObject([]byte(tt.slot))
		if err != nil {
			t.Fatal(err)
		}
		s := &slot{object: o, path: "/redfish/v1/x/1"}
		if s.drive() != tt.drive || s.inserted() != tt.inserted {
			t.Errorf("%s: drive %v, inserted %v, want %v, %v", tt.slot, s.drive(), s.inserted(), tt.drive, tt.inserted)
		}
	}
}
