package bmctest

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"net/http"
	"strconv"
	"time"
)

const (
	root         = "/redfish/v1"
	sessionsPath = root + "/SessionService/Sessions"
	accountsPath = root + "/AccountService/Accounts"
)

// accounts are who may log in, and who is; Redfish's mu guards them.
type accounts struct {
	user, password string
	changed        bool // the password, since PasswordChangeRequired was set
	sessions       map[string]*session
}

func newAccounts(user, password string) accounts { return accounts{user: user, password: password} }

type session struct {
	used     time.Time
	requests int
}

// fewRequests is how long a session of SessionsExpire lives.
const fewRequests = 3

// limits are a new password's lengths: at least, at most.
func (r *Redfish) limits() (int, int) {
	switch {
	case r.faults.on(PasswordLimit16):
		return 8, 16
	case r.faults.on(PasswordLimit20):
		return 8, 20
	}
	return 8, 64
}

// Sessions is how many sessions are open.
func (r *Redfish) Sessions() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.expireSessions()
	return len(r.sessions)
}

// Password is what logs in now.
func (r *Redfish) Password() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.password
}

// expireSessions drops what nobody used for too long; the caller holds mu.
func (r *Redfish) expireSessions() {
	for token, s := range r.sessions {
		if r.options.now().Sub(s.used) >= r.options.sessionTimeout {
			delete(r.sessions, token)
		}
	}
}

// logsIn compares a user and a password; the caller holds mu.
func (r *Redfish) logsIn(user, password string) bool {
	u := subtle.ConstantTimeCompare([]byte(user), []byte(r.user))
	p := subtle.ConstantTimeCompare([]byte(password), []byte(r.password))
	return u&p == 1
}

// authorize is nil for a request with a session or the right credentials.
func (r *Redfish) authorize(req *http.Request) *reply {
	user, password, basic := req.BasicAuth()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.expireSessions()
	token := req.Header.Get("X-Auth-Token")
	s, known := r.sessions[token]
	if known {
		s.used = r.options.now()
		if s.requests++; s.requests > fewRequests && r.faults.strike(SessionsExpire) {
			delete(r.sessions, token)
			known = false
		}
	}
	known = known && !r.faults.on(SessionsDead)
	if !known && !(basic && !r.faults.on(NoBasic) && r.logsIn(user, password)) {
		answer := fail(http.StatusUnauthorized, "Base.1.8.InsufficientPrivilege", "The credentials are not valid.")
		answer.header = map[string]string{"WWW-Authenticate": `Basic realm="BMC"`}
		return &answer
	}
	if r.faults.on(PasswordChangeRequired) && !r.changed && !within(req.URL.Path, accountsPath+"/1") && !within(req.URL.Path, sessionsPath) {
		answer := fail(http.StatusForbidden, "Base.1.8.PasswordChangeRequired", "The password must be changed at "+accountsPath+"/1 first.")
		return &answer
	}
	return nil
}

// within says whether path is folder or below it.
func within(path, folder string) bool {
	return path == folder || len(path) > len(folder) && path[:len(folder)] == folder && path[len(folder)] == '/'
}

var accountRoutes = map[string]handler{
	"GET " + root + "/SessionService": func(x *exchange) reply {
		if x.r.faulty(NoSessions) {
			return missing()
		}
		return ok(resource(root+"/SessionService", "#SessionService.v1_1_8.SessionService", "Session Service", object{
			"ServiceEnabled": true, "SessionTimeout": int(x.r.options.sessionTimeout.Seconds()), "Sessions": link(sessionsPath),
		}))
	},
	"GET " + sessionsPath: func(x *exchange) reply {
		if x.r.faulty(NoSessions) {
			return missing()
		}
		var members []string
		x.r.mu.Lock()
		for token := range x.r.sessions {
			members = append(members, sessionsPath+"/"+sessionID(token))
		}
		x.r.mu.Unlock()
		return x.collection("SessionCollection", "Sessions", members...)
	},
	"GET " + sessionsPath + "/{id}": func(x *exchange) reply {
		x.r.mu.Lock()
		defer x.r.mu.Unlock()
		for token := range x.r.sessions {
			if sessionID(token) == x.req.PathValue("id") {
				return ok(sessionResource(token, x.r.user))
			}
		}
		return missing()
	},
	"POST " + sessionsPath:             openSession,
	"DELETE " + sessionsPath + "/{id}": closeSession,
	"GET " + root + "/AccountService": func(x *exchange) reply {
		x.r.mu.Lock()
		low, high := x.r.limits()
		x.r.mu.Unlock()
		return ok(resource(root+"/AccountService", "#AccountService.v1_9_0.AccountService", "Account Service", object{
			"ServiceEnabled": true, "MinPasswordLength": low, "MaxPasswordLength": high, "Accounts": link(accountsPath), "Roles": link(root + "/AccountService/Roles"),
		}))
	},
	"GET " + root + "/AccountService/Roles": func(x *exchange) reply {
		return x.collection("RoleCollection", "Roles", root+"/AccountService/Roles/Administrator")
	},
	"GET " + root + "/AccountService/Roles/Administrator": func(*exchange) reply {
		return ok(resource(root+"/AccountService/Roles/Administrator", "#Role.v1_3_1.Role", "Administrator", object{
			"RoleId": "Administrator", "IsPredefined": true, "AssignedPrivileges": []string{"Login", "ConfigureManager", "ConfigureUsers", "ConfigureSelf", "ConfigureComponents"},
		}))
	},
	"GET " + accountsPath: func(x *exchange) reply {
		members := []string{accountsPath + "/1"}
		if x.r.faulty(AccountSlots) {
			members = nil
			for i := range accountSlots {
				members = append(members, accountsPath+"/"+strconv.Itoa(accountSlots-i))
			}
		}
		return x.collection("ManagerAccountCollection", "Accounts", members...)
	},
	"GET " + accountsPath + "/{id}":   getAccount,
	"PATCH " + accountsPath + "/{id}": patchAccount,
}

const accountSlots = 16

func sessionResource(token, user string) object {
	return resource(sessionsPath+"/"+sessionID(token), "#Session.v1_3_0.Session", "Session", object{"UserName": user})
}

func openSession(x *exchange) reply {
	r := x.r
	if r.faulty(NoSessions) {
		return missing()
	}
	var in struct{ UserName, Password string }
	if bad := x.decode(&in); bad != nil {
		return *bad
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.logsIn(in.UserName, in.Password) {
		return fail(http.StatusUnauthorized, "Base.1.8.ResourceAtUriUnauthorized", "The user name or the password is wrong.")
	}
	r.expireSessions()
	if len(r.sessions) >= r.options.maxSessions || r.faults.strike(SessionsFull) {
		return fail(http.StatusServiceUnavailable, "Base.1.8.SessionLimitExceeded", "Too many sessions are open.")
	}
	token := rand.Text()
	if r.sessions == nil {
		r.sessions = map[string]*session{}
	}
	r.sessions[token] = &session{used: r.options.now()}
	body := sessionResource(token, r.user)
	if r.faults.on(PasswordChangeRequired) && !r.changed {
		body["@Message.ExtendedInfo"] = []object{{
			"MessageId": "Base.1.8.PasswordChangeRequired", "Message": "The password provided for this account must be changed before access is granted.",
			"MessageArgs": []string{accountsPath + "/1"},
		}}
	}
	header := map[string]string{"X-Auth-Token": token, "Location": sessionsPath + "/" + sessionID(token)}
	if r.faults.on(SessionUnnamed) {
		delete(header, "Location")
	}
	return reply{status: http.StatusCreated, header: header, body: body}
}

// sessionID names a session without giving its token away.
func sessionID(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:6])
}

func closeSession(x *exchange) reply {
	x.r.mu.Lock()
	defer x.r.mu.Unlock()
	for token := range x.r.sessions {
		if sessionID(token) == x.req.PathValue("id") {
			delete(x.r.sessions, token)
			return done()
		}
	}
	return missing()
}

func getAccount(x *exchange) reply {
	r := x.r
	id, err := strconv.Atoi(x.req.PathValue("id"))
	slots := r.faulty(AccountSlots)
	if err != nil || id < 1 || id > 1 && !slots || id > accountSlots {
		return missing()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	user, role := r.user, "Administrator"
	if id > 1 {
		user, role = "", "None"
	}
	return ok(resource(accountsPath+"/"+strconv.Itoa(id), "#ManagerAccount.v1_8_0.ManagerAccount", "Account", object{
		"UserName": user, "RoleId": role, "Enabled": id == 1, "Locked": false, "Password": nil,
		"PasswordChangeRequired": id == 1 && r.faults.on(PasswordChangeRequired) && !r.changed,
	}))
}

func patchAccount(x *exchange) reply {
	var in struct{ Password *string }
	if bad := x.decode(&in); bad != nil {
		return *bad
	}
	r := x.r
	if x.req.PathValue("id") != "1" {
		return missing()
	}
	if in.Password == nil {
		return refuse("Nothing is to be changed.")
	}
	r.mu.Lock()
	low, high := r.limits()
	ignored, cut := r.faults.strike(PasswordIgnored), r.faults.on(PasswordTruncated)
	if len(*in.Password) < low || len(*in.Password) > high {
		r.mu.Unlock()
		return fail(http.StatusBadRequest, "Base.1.8.PropertyValueFormatError", "The password has a length that the account does not take.")
	}
	if ignored {
		r.mu.Unlock()
		return done()
	}
	r.password, r.changed = *in.Password, true
	if cut && len(r.password) > 16 {
		r.password = r.password[:16]
	}
	if r.faults.on(PasswordEndsSessions) {
		r.sessions = nil
	}
	r.mu.Unlock()
	r.note("password changed")
	return done()
}
