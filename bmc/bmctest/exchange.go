package bmctest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
)

type object = map[string]any

// exchange is one request and what answers it.
type exchange struct {
	r   *Redfish
	req *http.Request
	// inside marks a read by the BMC itself, which counts for nothing.
	inside bool
	reply  *reply
}

// reply is an answer before the faults of answers.
type reply struct {
	status int
	header map[string]string
	body   object
}

type handler func(*exchange) reply

type exchangeKey struct{}

// routes are the same for all BMCs.
var routes = sync.OnceValue(func() *http.ServeMux {
	mux := http.NewServeMux()
	for _, table := range []map[string]handler{rootRoutes, accountRoutes, systemRoutes, inventoryRoutes, biosRoutes, storageRoutes, updateRoutes, taskRoutes, mediaRoutes} {
		for pattern, h := range table {
			mux.HandleFunc(pattern, func(_ http.ResponseWriter, req *http.Request) {
				x := req.Context().Value(exchangeKey{}).(*exchange)
				x.req = req
				answer := h(x)
				x.reply = &answer
			})
		}
	}
	return mux
})

// statusOnly keeps the status of the mux's own answers.
type statusOnly struct {
	header http.Header
	status int
}

func (s *statusOnly) Header() http.Header         { return s.header }
func (s *statusOnly) Write(p []byte) (int, error) { return len(p), nil }
func (s *statusOnly) WriteHeader(status int)      { s.status = status }

// dispatch answers req, whose path ends without a slash.
func (r *Redfish) dispatch(req *http.Request, inside bool) reply {
	x := &exchange{r: r, inside: inside}
	own := &statusOnly{header: http.Header{}}
	routes().ServeHTTP(own, req.WithContext(context.WithValue(req.Context(), exchangeKey{}, x)))
	switch {
	case x.reply != nil:
		return *x.reply
	case own.status == http.StatusMethodNotAllowed:
		return fail(own.status, "Base.1.8.OperationNotAllowed", "The resource does not allow the method.")
	default:
		return missing()
	}
}

// inside reads a resource for the BMC itself.
func (r *Redfish) inside(ctx context.Context, path string) reply {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, path, nil)
	if err != nil {
		return missing()
	}
	return r.dispatch(req, true)
}

// decode reads the request's JSON, strictly.
func (x *exchange) decode(in any) *reply {
	decoder := json.NewDecoder(io.LimitReader(x.req.Body, 64<<10))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(in); err != nil {
		answer := fail(http.StatusBadRequest, "Base.1.8.MalformedJSON", "The request is not the JSON that the resource takes: "+err.Error())
		return &answer
	}
	return nil
}

func link(path string) object { return object{"@odata.id": path} }

func links(paths ...string) []object {
	out := []object{}
	for _, p := range paths {
		out = append(out, link(p))
	}
	return out
}

func ok(body object) reply { return reply{status: http.StatusOK, body: body} }

func done() reply { return reply{status: http.StatusNoContent} }

func fail(status int, id, message string) reply {
	return reply{status: status, body: object{"error": object{
		"code": "Base.1.8.GeneralError", "message": "See ExtendedInfo.",
		"@Message.ExtendedInfo": []object{{"MessageId": id, "Message": message, "Severity": "Critical"}},
	}}}
}

func missing() reply {
	return fail(http.StatusNotFound, "Base.1.8.ResourceMissingAtURI", "There is no such resource.")
}

func refuse(message string) reply {
	return fail(http.StatusBadRequest, "Base.1.8.PropertyValueNotInList", message)
}

// resource is the part that all resources have.
func resource(path, kind, name string, more object) object {
	parts := strings.Split(path, "/")
	o := object{"@odata.id": path, "@odata.type": kind, "Id": parts[len(parts)-1], "Name": name}
	maps.Copy(o, more)
	return o
}

// collection answers with members, over pages where the faults say so.
func (x *exchange) collection(kind, name string, members ...string) reply {
	path := strings.TrimSuffix(x.req.URL.Path, "/")
	o := object{
		"@odata.id": path, "@odata.type": "#" + kind + "." + kind, "Name": name,
		"Members@odata.count": len(members), "Members": links(members...),
	}
	skip, _ := strconv.Atoi(x.req.URL.Query().Get("$skip"))
	next := func(n int) { o["Members@odata.nextLink"] = path + "?$skip=" + strconv.Itoa(n) }
	switch {
	case x.inside:
	case x.r.faulty(MembersEndless):
		if skip > 0 {
			o["Members"] = links()
		}
		next(skip + 1)
	case x.r.faulty(MembersPaged):
		o["Members"] = links()
		if skip > 0 && skip <= len(members) {
			o["Members"] = links(members[skip-1])
		}
		if skip < len(members) {
			next(skip + 1)
		}
	}
	return ok(o)
}

// open are the resources that need no login.
func open(method, path string) bool {
	switch path {
	case "/redfish", "/redfish/v1", "/redfish/v1/odata", "/redfish/v1/$metadata":
		return method == http.MethodGet || method == http.MethodHead
	case sessionsPath:
		return method == http.MethodPost
	}
	return false
}

// ServeHTTP implements http.Handler.
func (r *Redfish) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	defer func() {
		if v := recover(); v != nil {
			if v != http.ErrAbortHandler {
				// The server would take it for the client's fault, and say nothing.
				r.panics.Add(1)
				fmt.Fprintf(os.Stderr, "bmctest: %s %s: panic: %v\n%s", req.Method, req.URL.Path, v, debug.Stack())
			}
			panic(http.ErrAbortHandler)
		}
	}()
	r.mu.Lock()
	r.requests = append(r.requests, req.Method+" "+req.URL.Path)
	down := r.down > 0
	if down {
		r.down--
	}
	r.mu.Unlock()
	if down {
		panic(http.ErrAbortHandler)
	}
	if r.consoleTakes(w, req) {
		return
	}
	r.write(w, req, r.serve(req))
}

// serve decides about a request; what it is not to answer ends in a panic
// with http.ErrAbortHandler, which closes the connection.
func (r *Redfish) serve(req *http.Request) reply {
	path, answer := r.slashes(req.URL.Path)
	if answer != nil {
		return *answer
	}
	if r.strike(Unavailable) {
		answer := fail(http.StatusServiceUnavailable, "Base.1.8.ServiceTemporarilyUnavailable", "The service is busy.")
		answer.header = map[string]string{"Retry-After": "1"}
		return answer
	}
	req = req.Clone(req.Context())
	req.URL.Path, req.URL.RawPath = path, ""
	if req.Method == http.MethodHead {
		req.Method = http.MethodGet
	}
	if !strings.HasPrefix(path, "/redfish/v1") || path == "/redfish/v1" {
		return r.dispatch(req, false)
	}
	if r.faulty(ForeignRedirect) {
		return reply{status: http.StatusTemporaryRedirect, header: map[string]string{"Location": r.options.foreign + req.URL.Path}}
	}
	if !open(req.Method, path) {
		if answer := r.authorize(req); answer != nil {
			return *answer
		}
	}
	if r.options.latency != nil {
		d := r.options.latency()
		r.mu.Lock()
		r.slept += d
		r.mu.Unlock()
		if wait(req.Context(), d) != nil {
			panic(http.ErrAbortHandler)
		}
	}
	if r.faulty(Bare) && bareMissing(path) {
		return missing()
	}
	if req.Method == http.MethodGet {
		r.tick()
		return r.dispatch(req, false)
	}
	if strings.HasPrefix(path, sessionsPath) {
		return r.dispatch(req, false)
	}
	return r.change(req)
}

// change answers a request that changes something.
func (r *Redfish) change(req *http.Request) reply {
	if req.Method == http.MethodPatch && r.strike(BusyInPOST) {
		return fail(http.StatusBadRequest, "iLO.2.14.UnableToModifyDuringSystemPOST", "The system is in POST; nothing was changed.")
	}
	if r.strike(DropsBefore) {
		panic(http.ErrAbortHandler)
	}
	broken := fail(http.StatusInternalServerError, "Base.1.8.InternalError", "The request failed due to an internal service error.")
	if r.strike(FailsBefore) {
		return broken
	}
	if answer := r.precondition(req); answer != nil {
		return *answer
	}
	// A client that gives up does not stop what the BMC has begun.
	answer := r.dispatch(req.WithContext(context.WithoutCancel(req.Context())), false)
	if answer.status >= 300 {
		return answer
	}
	if r.strike(AnswersLate) && wait(req.Context(), r.options.late) != nil {
		panic(http.ErrAbortHandler)
	}
	if r.strike(ResetsAfter) {
		r.restart(3)
		panic(http.ErrAbortHandler)
	}
	if r.strike(DropsAfter) {
		panic(http.ErrAbortHandler)
	}
	if r.strike(FailsAfter) {
		return broken
	}
	if answer.status <= http.StatusNoContent && answer.status != http.StatusCreated && answer.status != http.StatusAccepted && r.faulty(SuccessAsError) {
		answer = fail(http.StatusOK, "Base.1.18.Success", "The request completed successfully.")
	}
	return answer
}

// restart ends all sessions; so many requests get no answer.
func (r *Redfish) restart(silent int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sessions, r.down = nil, silent
}

// slashes is the path without its last slash, or the answer to a path that
// the BMC does not know that way.
func (r *Redfish) slashes(path string) (string, *reply) {
	bare := strings.TrimSuffix(path, "/")
	slash, root := bare != path, bare == "/redfish/v1" || bare == "/redfish"
	wrong := !slash && (r.faulty(SlashNeeded) || r.faulty(SlashInLinks)) || slash && !root && r.faulty(SlashRefused)
	action := strings.Contains(bare, "/Actions/")
	if !slash && !root && !action && r.faulty(SlashRedirects) {
		return "", &reply{status: http.StatusPermanentRedirect, header: map[string]string{"Location": bare + "/"}}
	}
	if wrong && !action {
		answer := missing()
		return "", &answer
	}
	return bare, nil
}
