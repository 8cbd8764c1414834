package redfish

import (
	"encoding/json"
	"net/http"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// A BMC that takes a new password some seconds after it said so is waited for: what is
// told to be refused is thrown away.
func TestRotationTakesLate(t *testing.T) {
	const fresh = "another-word"
	var since time.Time
	f, b := serve(t, nil)
	f.change = map[string]http.HandlerFunc{
		sessionsPost: func(w http.ResponseWriter, r *http.Request) {
			var in struct{ Password string }
			_ = json.NewDecoder(r.Body).Decode(&in)
			f.mu.Lock()
			holds := "p"
			if !since.IsZero() && time.Since(since) > 20*quick.tick {
				holds = fresh
			}
			f.mu.Unlock()
			if in.Password != holds {
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
			f.mu.Lock()
			defer f.mu.Unlock()
			since = time.Now()
		},
	}
	b.secrets["newPassword"] = fresh
	if _, err := b.do("credentials", "rotate"); errs.CodeOf(err) == errs.CredentialsUnchanged {
		t.Errorf("rotate() = %v, and the BMC takes the new password a moment later", err)
	}
}
