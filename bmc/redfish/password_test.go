package redfish

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmctest"
)

// A wrong password is tried once: more would lock the account.
func TestWrongPasswordIsTriedOnce(t *testing.T) {
	r, b := rig(t)
	b.secrets["password"] = "guess"
	_, err := b.power()
	if errs.CodeOf(err) != errs.BmcError || !strings.Contains(err.Error(), "refuses the credential") || errs.From(err).Retryable {
		t.Errorf("getPower() = %v, want bmc-error about the credential, not retryable", err)
	}
	if strings.Contains(fmt.Sprintf("%+v", err), "guess") {
		t.Errorf("getPower() = %v: the password is in the error", err)
	}
	if got := logins(r); got != 1 {
		t.Errorf("%d log-ins, want 1", got)
	}
}

func TestPasswordChangeRequired(t *testing.T) {
	_, b := rig(t, bmctest.PasswordChangeRequired)
	for range 2 {
		_, err := b.power()
		if errs.CodeOf(err) != errs.PasswordChangeRequired || errs.From(err).Retryable {
			t.Errorf("getPower() = %v, want password-change-required, not retryable", err)
		}
	}
	// What the log-in says is heeded, whatever the session is still good for.
	f, told := serve(t, map[string]http.HandlerFunc{sessionsPost: func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Auth-Token", "t")
		w.WriteHeader(http.StatusCreated)
		fmt.Fprint(w, `{"@Message.ExtendedInfo":[{"MessageId":"Base.1.8.1.PasswordChangeRequired"}]}`)
	}})
	if _, err := told.power(); errs.CodeOf(err) != errs.PasswordChangeRequired || f.count(systemsGet) != 0 {
		t.Errorf("getPower() = %v after %d reads, want password-change-required after none", err, f.count(systemsGet))
	}
	_, later := serve(t, map[string]http.HandlerFunc{systemsGet: func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprint(w, `{"error":{"@Message.ExtendedInfo":[{"MessageId":"Base.1.8.1.PasswordChangeRequired","Message":"change it"}]}}`)
	}})
	if _, err := later.power(); errs.CodeOf(err) != errs.PasswordChangeRequired {
		t.Errorf("getPower() of a BMC that says it by 403 = %v, want password-change-required", err)
	}
}

// Passwords go out as they are, whatever their bytes.
func TestPasswords(t *testing.T) {
	for _, password := range []string{strings.Repeat("x", 16), strings.Repeat("y", 20), strings.Repeat("z", 21), `a"b\c<&>é`, " leading and trailing "} {
		got := ""
		_, b := serve(t, map[string]http.HandlerFunc{sessionsPost: func(w http.ResponseWriter, r *http.Request) {
			o, err := parseObject(readAll(r))
			if err != nil {
				t.Error(err)
			}
			got = o.text("Password")
			w.Header().Set("X-Auth-Token", "t")
			w.WriteHeader(http.StatusCreated)
		}})
		b.secrets["password"] = password
		if _, err := b.power(); err != nil || got != password {
			t.Errorf("getPower() with password %q: %v, and the BMC got %q", password, err, got)
		}
	}
}

func readAll(r *http.Request) []byte {
	data, _ := io.ReadAll(r.Body)
	return data
}

func TestMissingSecrets(t *testing.T) {
	_, b := rig(t)
	for _, missing := range []string{"username", "password"} {
		kept := b.secrets[missing]
		delete(b.secrets, missing)
		if _, err := b.power(); errs.CodeOf(err) != errs.CredentialsUnavailable {
			t.Errorf("getPower() without %s = %v, want credentials-unavailable", missing, err)
		}
		b.secrets[missing] = kept
	}
}

// While nothing is asked of a BMC its password is kept nowhere.
func TestIdleConnectionHasNoPassword(t *testing.T) {
	_, b := rig(t)
	if _, err := b.power(); err != nil {
		t.Fatal(err)
	}
	n := 0
	for c := range b.pool.idleConns() {
		n++
		if c.revealed() != "" || !c.target.password.Empty() {
			t.Error("an idle connection has the password")
		}
	}
	if n != 1 {
		t.Errorf("%d idle connections, want 1", n)
	}
	// The caller's own copy is not touched.
	v := secretOf("pass word")
	c, err := b.pool.take(target{address: b.config["address"].(string), pin: b.config["tlsSpkiSha256"].(string), username: "admin", password: v})
	if err != nil || c.revealed() != "pass word" {
		t.Errorf("take() has password %q, %v", c.revealed(), err)
	}
	b.pool.give(c)
	if got := string(v.Reveal()); got != "pass word" {
		t.Errorf("the caller's password is %q after the call", got)
	}
}

// Another password is another session, so that a rotation's proof proves something.
func TestSessionIsOfOnePassword(t *testing.T) {
	r, b := rig(t)
	if _, err := b.power(); err != nil {
		t.Fatal(err)
	}
	b.secrets["password"] = "guess"
	if _, err := b.power(); errs.CodeOf(err) != errs.BmcError || errs.From(err).Retryable {
		t.Errorf("getPower() with a wrong password = %v, want bmc-error, not retryable", err)
	}
	if got := logins(r); got != 2 {
		t.Errorf("%d log-ins, want one with each password", got)
	}
}
