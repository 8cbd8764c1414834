package redfish

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// An iLO has every path with a slash at its end, and leads there from the other
// form also where nothing is.
func TestMissingStaysMissing(t *testing.T) {
	const gone = "/redfish/v1/Systems/9/"
	_, b := serve(t, map[string]http.HandlerFunc{
		"GET /redfish/v1/Systems/9": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", gone)
			w.WriteHeader(http.StatusPermanentRedirect)
		},
	})
	to := target{address: b.config["address"].(string), pin: b.config["tlsSpkiSha256"].(string), username: "u", password: secretOf("p")}
	c, err := b.pool.take(to)
	if err != nil {
		t.Fatal(err)
	}
	defer b.pool.give(c)
	if _, err := (&provider{conn: c}).get(t.Context(), gone); !absent(err) {
		t.Errorf("get(%s) = %v, want that there is nothing", gone, err)
	}
}

// A BMC that answers 401 to what an account may not see has forgotten no session:
// neither the one before nor the one that was opened for it stays open.
func TestNoSessionIsLeftByA401(t *testing.T) {
	open := map[string]bool{}
	f, b := serve(t, nil)
	n := 0
	f.change = map[string]http.HandlerFunc{
		sessionsPost: func(w http.ResponseWriter, _ *http.Request) {
			f.mu.Lock()
			defer f.mu.Unlock()
			n++
			at := fmt.Sprintf("/redfish/v1/SessionService/Sessions/%d", n)
			open[at] = true
			w.Header().Set("X-Auth-Token", fmt.Sprint(n))
			w.Header().Set("Location", at)
			w.WriteHeader(http.StatusCreated)
		},
		systemGet: func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) },
	}
	for n := 1; n < 40; n++ {
		at := fmt.Sprintf("/redfish/v1/SessionService/Sessions/%d", n)
		f.change["DELETE "+at] = func(w http.ResponseWriter, _ *http.Request) {
			f.mu.Lock()
			defer f.mu.Unlock()
			delete(open, at)
		}
	}
	for range 5 {
		if _, err := b.power(); errs.CodeOf(err) != errs.BmcError {
			t.Fatalf("getPower() = %v", err)
		}
	}
	b.pool.close(t.Context())
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(open) != 0 {
		t.Errorf("%d of %d sessions are left open", len(open), n)
	}
}

// A call waits for another's log-in no longer than it may last itself.
func TestLogInIsNotWaitedForTooLong(t *testing.T) {
	arrived := make(chan struct{}, 1)
	_, b := serve(t, map[string]http.HandlerFunc{
		sessionsPost: func(w http.ResponseWriter, r *http.Request) { arrived <- struct{}{}; hang(w, r) },
	})
	to := target{address: b.config["address"].(string), pin: b.config["tlsSpkiSha256"].(string), username: "u", password: secretOf("p")}
	c, err := b.pool.take(to)
	if err != nil {
		t.Fatal(err)
	}
	defer b.pool.give(c)
	long, end := context.WithCancel(t.Context())
	first := make(chan error, 1)
	go func() { _, err := c.authorise(long, nil); first <- err }()
	<-arrived
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	second := make(chan error, 1)
	go func() { _, err := c.authorise(short, nil); second <- err }()
	select {
	case err := <-second:
		if err == nil {
			t.Error("a log-in that hangs = nil")
		}
	case <-time.After(10 * time.Second):
		t.Error("a call whose time is over still waits for another's log-in")
	}
	end()
	<-first
}

// A BMC that repeats the password that it refuses gets it into no error and no log.
func TestLogInErrorHasNoPassword(t *testing.T) {
	const password = "correct-horse-battery-staple"
	for name, h := range map[string]http.HandlerFunc{
		"refused": func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusBadRequest)
			fmt.Fprintf(w, `{"error":{"@Message.ExtendedInfo":[{"MessageId":"Base.1.8.PropertyValueFormatError","Message":"The value '%s' for the property Password is of a different format."}]}}`, password)
		},
		"in part": func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusUnauthorized)
			fmt.Fprintf(w, `{"error":{"message":"no user u with %s..."}}`, password[:20])
		},
		"no session": func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusServiceUnavailable)
			fmt.Fprintf(w, `{"error":{"@Message.ExtendedInfo":[{"MessageId":"Base.1.8.SessionLimitExceeded","Message":"no session for %s"}]}}`, password)
		},
	} {
		_, b := serve(t, map[string]http.HandlerFunc{sessionsPost: h})
		b.secrets["password"] = password
		if _, err := b.power(); err == nil || strings.Contains(err.Error(), password[:20]) {
			t.Errorf("%s: getPower() = %v, want an error without the password", name, err)
		}
	}
}

// After a lost answer a refusal of the same request says nothing of the first one:
// the password may have changed, and a BMC takes no password twice.
func TestRotationAfterALostAnswer(t *testing.T) {
	password := "p"
	var patches atomic.Int32
	f, b := serve(t, nil)
	f.change = map[string]http.HandlerFunc{
		sessionsPost: func(w http.ResponseWriter, r *http.Request) {
			var in struct{ Password string }
			_ = json.NewDecoder(r.Body).Decode(&in)
			f.mu.Lock()
			good := in.Password == password
			f.mu.Unlock()
			if !good {
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			w.Header().Set("X-Auth-Token", "t")
			w.Header().Set("Location", "/redfish/v1/SessionService/Sessions/1")
			w.WriteHeader(http.StatusCreated)
		},
		"GET /redfish/v1/AccountService":            say(`{"Accounts":{"@odata.id":"/redfish/v1/AccountService/Accounts"}}`),
		"GET /redfish/v1/AccountService/Accounts":   say(`{"Members":[{"@odata.id":"/redfish/v1/AccountService/Accounts/2"}]}`),
		"GET /redfish/v1/AccountService/Accounts/2": say(`{"UserName":"u"}`),
		"PATCH /redfish/v1/AccountService/Accounts/2": func(w http.ResponseWriter, r *http.Request) {
			var in struct{ Password string }
			_ = json.NewDecoder(r.Body).Decode(&in)
			if patches.Add(1) == 1 {
				f.mu.Lock()
				password = in.Password
				f.mu.Unlock()
				panic(http.ErrAbortHandler) // done, and the answer is lost
			}
			w.WriteHeader(http.StatusBadRequest)
			fmt.Fprint(w, `{"error":{"@Message.ExtendedInfo":[{"MessageId":"Base.1.8.PropertyValueError","Message":"used before"}]}}`)
		},
	}
	b.secrets["newPassword"] = "another-word"
	if _, err := b.do("credentials", "rotate"); err != nil {
		t.Errorf("rotate() = %v, want success: the BMC's password is %q", err, password)
	}
}

// What a busy BMC says of a request with a password goes into no progress.
func TestProgressHasNoPassword(t *testing.T) {
	const fresh = "another-password"
	var patches atomic.Int32
	_, b := serve(t, map[string]http.HandlerFunc{
		"GET /redfish/v1/AccountService":            say(`{"Accounts":{"@odata.id":"/redfish/v1/AccountService/Accounts"}}`),
		"GET /redfish/v1/AccountService/Accounts":   say(`{"Members":[{"@odata.id":"/redfish/v1/AccountService/Accounts/2"}]}`),
		"GET /redfish/v1/AccountService/Accounts/2": say(`{"UserName":"u"}`),
		"PATCH /redfish/v1/AccountService/Accounts/2": func(w http.ResponseWriter, r *http.Request) {
			if patches.Add(1) == 1 {
				w.WriteHeader(http.StatusServiceUnavailable)
				fmt.Fprintf(w, `{"error":{"message":"cannot set Password to %s now"}}`, fresh)
			}
		},
	})
	b.secrets["newPassword"] = fresh
	if _, err := b.do("credentials", "rotate"); err != nil {
		t.Fatal(err)
	}
	if patches.Load() != 2 {
		t.Errorf("%d writes, want the busy one repeated", patches.Load())
	}
	if text := strings.Join(b.told(), "\n"); strings.Contains(text, fresh) {
		t.Errorf("the progress has the password: %s", text)
	}
}

// A power cycle by off and on does not leave the machine off because the BMC is
// still busy when it is to go on.
func TestCycleOfABusyBMC(t *testing.T) {
	state := "On"
	var ons atomic.Int32
	f, b := serve(t, nil)
	f.change = map[string]http.HandlerFunc{
		systemGet: func(w http.ResponseWriter, _ *http.Request) {
			f.mu.Lock()
			defer f.mu.Unlock()
			fmt.Fprintf(w, `{"PowerState":%q,"Actions":{"#ComputerSystem.Reset":{"target":"/redfish/v1/Systems/1/Actions/ComputerSystem.Reset","ResetType@Redfish.AllowableValues":["On","ForceOff"]}}}`, state)
		},
		resetPost: func(w http.ResponseWriter, r *http.Request) {
			var in struct{ ResetType string }
			_ = json.NewDecoder(r.Body).Decode(&in)
			if in.ResetType == "On" && ons.Add(1) <= 2 {
				w.WriteHeader(http.StatusBadRequest)
				fmt.Fprint(w, `{"error":{"@Message.ExtendedInfo":[{"MessageId":"iLO.2.14.UnableToModifyDuringSystemPOST"}]}}`)
				return
			}
			f.mu.Lock()
			defer f.mu.Unlock()
			state = strings.TrimPrefix(in.ResetType, "Force")
		},
	}
	if _, err := b.do("power", "setPower", "cycle"); err != nil || state != "On" {
		t.Errorf("setPower(cycle) = %v, and the machine is %s", err, state)
	}
	ons.Store(-1 << 20)
	f.mu.Lock()
	state = "On"
	f.mu.Unlock()
	if _, err := b.within(time.Second, "power", "setPower", "cycle"); err == nil || !strings.Contains(err.Error(), "switched off before") {
		t.Errorf("setPower(cycle) of a BMC that stays busy = %v, want an error that says that the machine is off", err)
	}
}

// A secure boot that is as wanted, and set to be otherwise from the next boot on,
// is not as wanted.
func TestSecureBootPendingOtherwise(t *testing.T) {
	f, b := serve(t, nil)
	pending := true
	f.change = map[string]http.HandlerFunc{
		systemGet:                              say(`{"SecureBoot":{"@odata.id":"/redfish/v1/Systems/1/SecureBoot"}}`),
		"GET /redfish/v1/Systems/1/SecureBoot": say(`{"SecureBootEnable":false,"@Redfish.Settings":{"SettingsObject":{"@odata.id":"/redfish/v1/Systems/1/SecureBoot/Settings"}}}`),
		"GET /redfish/v1/Systems/1/SecureBoot/Settings": func(w http.ResponseWriter, _ *http.Request) {
			f.mu.Lock()
			defer f.mu.Unlock()
			fmt.Fprintf(w, `{"SecureBootEnable":%v}`, pending)
		},
		"PATCH /redfish/v1/Systems/1/SecureBoot/Settings": func(w http.ResponseWriter, r *http.Request) {
			var in struct{ SecureBootEnable bool }
			_ = json.NewDecoder(r.Body).Decode(&in)
			f.mu.Lock()
			defer f.mu.Unlock()
			pending = in.SecureBootEnable
		},
	}
	if _, err := b.do("management", "setSecureBoot", map[string]bool{"enabled": false}); err != nil || pending {
		t.Errorf("setSecureBoot(false) = %v, and the next boot has it %v", err, pending)
	}
}

// What somebody else put into a URL to log in with does not go home.
func TestStatusShowsNoLogIn(t *testing.T) {
	_, b := serve(t, map[string]http.HandlerFunc{
		systemGet:                                  say(`{"VirtualMedia":{"@odata.id":"/redfish/v1/Systems/1/VirtualMedia"}}`),
		"GET /redfish/v1/Systems/1/VirtualMedia":   say(`{"Members":[{"@odata.id":"/redfish/v1/Systems/1/VirtualMedia/1"}]}`),
		"GET /redfish/v1/Systems/1/VirtualMedia/1": say(`{"MediaTypes":["CD"],"Inserted":true,"Image":"cifs://ops:hunter22@10.0.0.9/share/a.iso?token=abcdef"}`),
	})
	raw, err := b.do("virtual-media", "status")
	if err != nil || bytes.Contains(raw, []byte("hunter22")) || bytes.Contains(raw, []byte("abcdef")) || !bytes.Contains(raw, []byte("10.0.0.9/share/a.iso")) {
		t.Errorf("status() = %s, %v, want the image without its log-in", raw, err)
	}
}

// A certificate that a BMC made with a serial number below zero, which the standard
// library refuses unless told otherwise, is as good as another under its pin.
func TestNegativeSerial(t *testing.T) {
	key, _ := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(0x7155aa33), Subject: pkix.Name{CommonName: "bmc"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	i := bytes.Index(der, []byte{0x02, 0x04, 0x71, 0x55, 0xaa, 0x33})
	der[i+2] = 0xf1 // the signature is not looked at under a pin
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: &fake{t: t}}
	go s.Serve(tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}))
	t.Cleanup(func() { s.Close() })
	spki, _ := x509.MarshalPKIXPublicKey(key.Public())
	sum := sha256.Sum256(spki)
	b := newBench(t, l.Addr().String(), hex.EncodeToString(sum[:]), "u", "p")
	if _, err = b.power(); err != nil {
		t.Error(err)
	}
}

// A BMC whose every resource is as large as one may be does not fill the memory.
func TestOneCallReadsABoundedAmount(t *testing.T) {
	const members = 60
	f, b := serve(t, nil)
	var links []string
	large := fmt.Sprintf(`{"Model":"x","Oem":%q}`, strings.Repeat("x", 2<<20))
	f.change = map[string]http.HandlerFunc{systemGet: say(`{"Processors":{"@odata.id":"/redfish/v1/Systems/1/Processors"}}`)}
	for n := range members {
		at := fmt.Sprintf("/redfish/v1/Systems/1/Processors/%d", n)
		links = append(links, fmt.Sprintf(`{"@odata.id":%q}`, at))
		f.change["GET "+at] = say(large)
	}
	f.change["GET /redfish/v1/Systems/1/Processors"] = say(`{"Members":[` + strings.Join(links, ",") + `]}`)
	_, _ = b.do("inspect", "inspect")
	read := 0
	for n := range members {
		read += f.count(fmt.Sprintf("GET /redfish/v1/Systems/1/Processors/%d", n))
	}
	if most := maxTaken/len(large) + 1; read == 0 || read > most {
		t.Errorf("%d resources of 2 MiB were read, want at most %d", read, most)
	}
}

// The power of the whole box, its BMC's too, is not cut where a power cycle was
// asked for.
func TestCycleIsNoFullPowerCycle(t *testing.T) {
	state := "On"
	var sent []string
	f, b := serve(t, nil)
	f.change = map[string]http.HandlerFunc{
		systemGet: func(w http.ResponseWriter, _ *http.Request) {
			f.mu.Lock()
			defer f.mu.Unlock()
			fmt.Fprintf(w, `{"PowerState":%q,"Actions":{"#ComputerSystem.Reset":{"target":"/redfish/v1/Systems/1/Actions/ComputerSystem.Reset","ResetType@Redfish.AllowableValues":["On","ForceOff","FullPowerCycle"]}}}`, state)
		},
		resetPost: func(w http.ResponseWriter, r *http.Request) {
			var in struct{ ResetType string }
			_ = json.NewDecoder(r.Body).Decode(&in)
			f.mu.Lock()
			defer f.mu.Unlock()
			sent = append(sent, in.ResetType)
			state = strings.TrimPrefix(in.ResetType, "Force")
		},
	}
	if _, err := b.do("power", "setPower", "cycle"); err != nil || strings.Join(sent, " ") != "ForceOff On" {
		t.Errorf("setPower(cycle) = %v, sent %q, want ForceOff and On", err, sent)
	}
}

// A session that a slow BMC opens when nobody waits for it any more is ended.
func TestLateSessionIsEnded(t *testing.T) {
	arrived, late := make(chan struct{}, 1), make(chan struct{})
	ended := make(chan struct{})
	_, b := serve(t, map[string]http.HandlerFunc{
		sessionsPost: func(w http.ResponseWriter, _ *http.Request) {
			arrived <- struct{}{}
			<-late
			w.Header().Set("X-Auth-Token", "t")
			w.Header().Set("Location", "/redfish/v1/SessionService/Sessions/7")
			w.WriteHeader(http.StatusCreated)
		},
		"DELETE /redfish/v1/SessionService/Sessions/7": func(http.ResponseWriter, *http.Request) { close(ended) },
	})
	b.pool.timing.late = time.Minute
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-arrived
		cancel()
	}()
	if _, err := b.in(ctx, "power", "getPower"); errs.CodeOf(err) != errs.Cancelled {
		t.Errorf("getPower() = %v, want cancelled", err)
	}
	close(late)
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Error("the session stays open")
	}
}

// A reset that the BMC makes a job of, as some do, is done when the job is: a machine
// that stays on shows nothing of it.
func TestResetFollowsItsJob(t *testing.T) {
	for task, good := range map[string]bool{
		`{"TaskState":"Exception","TaskStatus":"Critical","Messages":[{"Message":"the chassis refuses"}]}`: false,
		`{"TaskState":"Completed","TaskStatus":"OK"}`:                                                      true,
	} {
		for _, action := range []string{"reset", "nmi"} {
			_, b := serve(t, map[string]http.HandlerFunc{
				resetPost: func(w http.ResponseWriter, _ *http.Request) {
					w.Header().Set("Location", "/redfish/v1/TaskService/Tasks/1")
					w.WriteHeader(http.StatusAccepted)
				},
				"GET /redfish/v1/TaskService/Tasks/1": say(task),
			})
			if _, err := b.do("power", "setPower", action); (err == nil) != good {
				t.Errorf("setPower(%s) whose job says %s = %v", action, task, err)
			}
		}
	}
}
