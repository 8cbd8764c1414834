package redfish

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/plugins/driver"
)

const oldPassword, newPassword = "pass word", "N3w+secret/0123456"

func (b *bench) rotate(fresh string) error {
	b.t.Helper()
	b.secrets["newPassword"] = fresh
	_, err := b.do("credentials", "rotate")
	return err
}

func TestRotate(t *testing.T) {
	for _, faults := range [][]bmctest.Fault{
		nil, {bmctest.PasswordChangeRequired}, {bmctest.PasswordEndsSessions}, {bmctest.AccountSlots}, {bmctest.NoSessions}, {bmctest.SessionUnnamed},
		{bmctest.EtagNeeded}, {bmctest.EtagStrong}, {bmctest.EtagWeak}, {bmctest.EtagDoubledQuotes}, {bmctest.EtagStarOnly}, {bmctest.EtagRefused}, {bmctest.EtagRaces.Times(1)},
		{bmctest.MembersPaged}, {bmctest.SlashNeeded}, {bmctest.AbsoluteLinks}, {bmctest.BusyInPOST.Times(1)},
		{bmctest.FailsAfter.Times(1)}, {bmctest.DropsAfter.Times(1)}, {bmctest.ResetsAfter.Times(1)}, {bmctest.PasswordEndsSessions, bmctest.DropsAfter.Times(1)},
		{bmctest.PasswordChangeRequired, bmctest.EtagStrong}, {bmctest.PasswordChangeRequired, bmctest.AccountSlots}, {bmctest.SessionsExpire}, {bmctest.Unavailable.Times(1)},
	} {
		t.Run(fmt.Sprint(faults), func(t *testing.T) {
			r, b := rig(t, faults...)
			if err := b.rotate(newPassword); err != nil {
				t.Fatalf("rotate = %v", err)
			}
			if got := r.Password(); got != newPassword {
				t.Errorf("the BMC has another password than the new one")
			}
			r.SetFaults()
			b.secrets["password"] = newPassword
			if _, err := b.power(); err != nil {
				t.Errorf("getPower with the new password = %v", err)
			}
		})
	}
}

// A BMC with a single session is enough.
func TestRotateWithOneSession(t *testing.T) {
	r, b := rigWith(t, bmctest.MaxSessions(1), bmctest.WithFaults(bmctest.NoBasic))
	if _, err := b.power(); err != nil {
		t.Fatal(err)
	}
	if err := b.rotate(newPassword); err != nil || r.Password() != newPassword {
		t.Errorf("rotate = %v", err)
	}
}

// A password that the BMC does not take is refused before anything is sent.
func TestRotateLengths(t *testing.T) {
	for _, tt := range []struct {
		fault  bmctest.Fault
		length int
		takes  bool
	}{
		{bmctest.PasswordLimit16, 16, true}, {bmctest.PasswordLimit16, 20, false}, {bmctest.PasswordLimit20, 16, true}, {bmctest.PasswordLimit20, 20, true},
		{bmctest.PasswordLimit20, 21, false}, {bmctest.PasswordLimit20, 7, false}, {"", 21, true}, {"", 65, false},
	} {
		var faults []bmctest.Fault
		if tt.fault != "" {
			faults = append(faults, tt.fault)
		}
		r, b := rig(t, faults...)
		err := b.rotate(strings.Repeat("x", tt.length))
		patched := false
		for _, request := range r.Requests() {
			patched = patched || strings.HasPrefix(request, "PATCH ")
		}
		if tt.takes != (err == nil) || tt.takes != patched || !tt.takes && errs.CodeOf(err) != errs.InvalidArgs {
			t.Errorf("%s: rotate to %d bytes = %v, sent %v, want taken %v", tt.fault, tt.length, err, patched, tt.takes)
		}
	}
}

// When the new password does not log in, the error says which one does.
func TestRotateTellsWhichHolds(t *testing.T) {
	for _, tt := range []struct {
		fault bmctest.Fault
		says  string
		code  errs.Code
		holds string
	}{
		{bmctest.PasswordIgnored, "the old one still holds", errs.CredentialsUnchanged, oldPassword},
		{bmctest.FailsBefore, "the old one still holds", errs.CredentialsUnchanged, oldPassword},
		{bmctest.DropsBefore, "the old one still holds", errs.CredentialsUnchanged, oldPassword},
		{bmctest.PasswordTruncated, "neither the new password", errs.BmcError, newPassword[:16]},
	} {
		r, b := rig(t, tt.fault)
		err := b.hasty().rotate(newPassword)
		if errs.CodeOf(err) != tt.code || !strings.Contains(err.Error(), tt.says) || r.Password() != tt.holds || errs.From(err).Retryable {
			t.Errorf("%s: rotate = %v, want %s with %q", tt.fault, err, tt.code, tt.says)
		}
	}
}

// A call after an interruption finds what holds: the new password is success,
// and with the old one it goes on.
func TestRotateAfterInterruption(t *testing.T) {
	r, b := rig(t)
	if err := b.rotate(newPassword); err != nil {
		t.Fatal(err)
	}
	patches := func() (n int) {
		for _, request := range r.Requests() {
			if strings.HasPrefix(request, "PATCH ") {
				n++
			}
		}
		return n
	}
	// The secret "password" is still the old one.
	if err := b.rotate(newPassword); err != nil || patches() != 1 {
		t.Errorf("rotate again = %v with %d changes, want none but the first", err, patches())
	}
	if err := b.rotate("quite-another-one"); errs.CodeOf(err) != errs.BmcError || !strings.Contains(err.Error(), "neither the old password") {
		t.Errorf("rotate with two wrong passwords = %v", err)
	}
	b.secrets["password"] = newPassword
	if err := b.rotate("quite-another-one"); err != nil || r.Password() != "quite-another-one" {
		t.Errorf("rotate with the one that holds = %v", err)
	}
}

// Wrong passwords lock accounts: so few log-ins are tried.
func TestRotateTriesFewLogIns(t *testing.T) {
	r, b := rig(t)
	b.secrets["password"] = "a wrong one"
	if err := b.rotate(newPassword); errs.CodeOf(err) != errs.BmcError {
		t.Fatalf("rotate = %v", err)
	}
	tries := 0
	for _, request := range r.Requests() {
		if request == sessionsPost {
			tries++
		}
	}
	if tries != 2 {
		t.Errorf("%d log-ins, want one for each password", tries)
	}
}

// Some BMCs need a moment before a new password holds.
func TestRotateWaitsAMoment(t *testing.T) {
	changed, refusedOnce := false, false
	_, b := serve(t, map[string]http.HandlerFunc{
		"GET /redfish/v1/AccountService/Accounts":     say(`{"Members":[{"@odata.id":"/redfish/v1/AccountService/Accounts/1"}]}`),
		"GET /redfish/v1/AccountService/Accounts/1":   say(`{"UserName":"u"}`),
		"PATCH /redfish/v1/AccountService/Accounts/1": func(w http.ResponseWriter, _ *http.Request) { changed = true; w.WriteHeader(http.StatusNoContent) },
		sessionsPost: func(w http.ResponseWriter, r *http.Request) {
			var in struct{ Password string }
			decodeBody(r, &in)
			if (in.Password == newPassword) != changed || changed && !refusedOnce {
				refusedOnce = refusedOnce || changed
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			w.Header().Set("X-Auth-Token", "token")
			w.WriteHeader(http.StatusCreated)
		},
	})
	if err := b.rotate(newPassword); err != nil || !refusedOnce {
		t.Errorf("rotate at a BMC that needs a moment = %v, refused once %v", err, refusedOnce)
	}
}

// The passwords are taken out of what an error says.
func TestRotateHidesPasswords(t *testing.T) {
	r := rotation{old: secret.New([]byte("old-one")), fresh: secret.New([]byte("new-one"))}
	if got := r.hidden(errs.New(errs.BmcError, "old-one is not new-one")).Error(); got != "bmc-error: [redacted] is not [redacted]" {
		t.Errorf("hidden = %q", got)
	}
	if err := r.hidden(nil); err != nil {
		t.Errorf("hidden(nil) = %v", err)
	}
}

// Another account than the one that is logged in with is changed and proven too.
func TestRotateAnotherAccount(t *testing.T) {
	password, patched := "before-0", ""
	logIn := func(w http.ResponseWriter, r *http.Request) {
		var in struct{ UserName, Password string }
		decodeBody(r, &in)
		if in.UserName == "u" && in.Password == "p" || in.UserName == "ops" && in.Password == password {
			w.Header().Set("X-Auth-Token", "token-of-"+in.UserName)
			w.WriteHeader(http.StatusCreated)
			return
		}
		w.WriteHeader(http.StatusUnauthorized)
	}
	change := map[string]http.HandlerFunc{
		sessionsPost:                     logIn,
		"GET /redfish/v1/AccountService": say(`{"Accounts":{"@odata.id":"/redfish/v1/A"}}`),
		"GET /redfish/v1/A":              say(`{"Members":[{"@odata.id":"/redfish/v1/A/1"},{"@odata.id":"/redfish/v1/A/2"}]}`),
		"GET /redfish/v1/A/1":            say(`{"UserName":"u"}`),
		"GET /redfish/v1/A/2":            say(`{"UserName":"ops"}`),
		"PATCH /redfish/v1/A/2": func(w http.ResponseWriter, r *http.Request) {
			var in struct{ Password string }
			decodeBody(r, &in)
			password, patched = in.Password, r.Header.Get("X-Auth-Token")
			w.WriteHeader(http.StatusNoContent)
		},
	}
	_, b := serve(t, change)
	b.secrets["newPassword"] = newPassword
	if _, err := b.do("credentials", "rotate", map[string]string{"username": "ops"}); err != nil || password != newPassword || patched != "token-of-u" {
		t.Errorf("rotate of another account = %v, by %s", err, patched)
	}
	if _, err := b.do("credentials", "rotate", map[string]string{"username": "nobody"}); errs.CodeOf(err) != errs.InvalidArgs {
		t.Errorf("rotate of an account that is not there = %v, want invalid-args", err)
	}
}

// A BMC that repeats the password in its answers gets it into no error, log or
// progress.
func TestRotateTellsNoPassword(t *testing.T) {
	long := strings.Repeat("s3cret-", 8)
	for name, status := range map[string]int{"a refusal": 400, "a failure": 500, "a conflict": 409, "a success": 200, "a success, then a failing log-in": 204} {
		echo := func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			if status == http.StatusNoContent {
				return
			}
			fmt.Fprintf(w, `{"error":{"message":"%[1]s","@Message.ExtendedInfo":[{"MessageId":"Base.1.8.PropertyValueFormatError","Message":"%[2]s the value '%[1]s' of Password","MessageArgs":["%[1]s"]}]}}`, long, strings.Repeat("x", 150))
		}
		_, b := serve(t, map[string]http.HandlerFunc{
			"GET /redfish/v1/AccountService/Accounts":     say(`{"Members":[{"@odata.id":"/redfish/v1/AccountService/Accounts/1"}]}`),
			"GET /redfish/v1/AccountService/Accounts/1":   say(`{"UserName":"u"}`),
			"PATCH /redfish/v1/AccountService/Accounts/1": echo,
			sessionsPost: func(w http.ResponseWriter, r *http.Request) {
				var in struct{ UserName, Password string }
				decodeBody(r, &in)
				if in.Password == long {
					w.WriteHeader(map[bool]int{true: http.StatusInternalServerError, false: http.StatusUnauthorized}[status == http.StatusNoContent])
					fmt.Fprintf(w, `{"error":{"message":"%s no: %s"}}`, strings.Repeat("x", 170), long)
					return
				}
				w.Header().Set("X-Auth-Token", "token")
				w.WriteHeader(http.StatusCreated)
			},
		})
		b.hasty()
		var log bytes.Buffer
		logger := slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
		secrets := driver.Delivered{"username": secret.New([]byte("u")), "password": secret.New([]byte("p")), "newPassword": secret.New([]byte(long))}
		var progress []driver.Progress
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		c := driver.NewContext(ctx, secrets, logger, func(p driver.Progress) { progress = append(progress, p) })
		_, err := b.driver.Invoke(c, "credentials", "rotate", b.raw(), []byte("[]"))
		cancel()
		if err == nil {
			t.Errorf("%s: rotate at a BMC that refuses = nil", name)
		}
		for where, text := range map[string]string{"error": fmt.Sprint(err), "log": log.String(), "progress": fmt.Sprint(progress)} {
			if strings.Contains(text, "s3cret") {
				t.Errorf("%s: the %s has the password: %s", name, where, text)
			}
		}
	}
}
