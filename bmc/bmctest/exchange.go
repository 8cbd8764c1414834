package bmctest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
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

// tag is the opaque part of a resource's entity tag.
func (r *Redfish) tag(body object) string {
	text, err := json.Marshal(body)
	if err != nil {
		return ""
	}
	r.mu.Lock()
	salt := r.salt
	r.mu.Unlock()
	sum := sha256.Sum256(append(text, byte(salt)))
	return hex.EncodeToString(sum[:6])
}

// etag is how the BMC writes a tag.
func (r *Redfish) etag(tag string) string {
	if r.faulty(EtagDoubledQuotes) {
		return `"` + tag + `"`
	}
	return `W/"` + tag + `"`
}

// matches judges If-Match against the tag of a resource.
func (r *Redfish) matches(given, tag string) bool {
	for _, exact := range []struct {
		fault Fault
		want  string
	}{{EtagStrong, `"` + tag + `"`}, {EtagWeak, `W/"` + tag + `"`}, {EtagDoubledQuotes, `""` + tag + `""`}, {EtagStarOnly, "*"}} {
		if r.faulty(exact.fault) {
			return given == exact.want
		}
	}
	for one := range strings.SplitSeq(given, ",") {
		one = strings.TrimPrefix(strings.TrimSpace(one), "W/")
		if one == "*" || one == `"`+tag+`"` {
			return true
		}
	}
	return false
}

// precondition answers a change whose If-Match is not what the BMC wants.
func (r *Redfish) precondition(req *http.Request) *reply {
	owner, _, action := strings.Cut(req.URL.Path, "/Actions/")
	given := req.Header.Get("If-Match")
	failed := fail(http.StatusPreconditionFailed, "Base.1.8.PreconditionFailed", "The ETag did not match.")
	wanted := false
	switch {
	case given != "" && r.faulty(EtagRefused):
		return &failed
	case action:
		if wanted = r.faulty(EtagOnActions); !wanted {
			return nil
		}
	case req.Method == http.MethodPatch:
		for _, f := range []Fault{EtagStrong, EtagWeak, EtagDoubledQuotes, EtagStarOnly} {
			wanted = wanted || r.faulty(f)
		}
	case req.Method != http.MethodDelete:
		return nil
	}
	if given == "" {
		if wanted {
			return &failed
		}
		if req.Method == http.MethodPatch && r.faulty(EtagNeeded) {
			answer := fail(http.StatusPreconditionRequired, "Base.1.8.PreconditionRequired", "The change needs an If-Match.")
			return &answer
		}
		return nil
	}
	current := r.inside(req.Context(), owner)
	if current.status != http.StatusOK {
		return nil
	}
	if !r.matches(given, r.tag(current.body)) {
		return &failed
	}
	if req.Method == http.MethodPatch && r.strike(EtagRaces) {
		r.mu.Lock()
		r.salt++
		r.mu.Unlock()
		return &failed
	}
	return nil
}

// write sends an answer with what the faults make of it.
func (r *Redfish) write(w http.ResponseWriter, req *http.Request, answer reply) {
	h := w.Header()
	h.Set("OData-Version", "4.0")
	for name, value := range answer.header {
		if name == "Location" {
			value = r.location(value)
		}
		h.Set(name, value)
	}
	if answer.body == nil {
		w.WriteHeader(answer.status)
		return
	}
	read := (req.Method == http.MethodGet || req.Method == http.MethodHead) && answer.status == http.StatusOK
	if read {
		etag := r.etag(r.tag(answer.body))
		answer.body["@odata.etag"] = etag
		if !r.faulty(EtagInBodyOnly) {
			h.Set("ETag", etag)
		}
	}
	text, err := json.Marshal(r.odd(answer.body))
	if err != nil {
		panic(err)
	}
	h.Set("Content-Type", "application/json")
	if read && strings.HasPrefix(req.URL.Path, "/redfish/v1") {
		switch {
		case r.strike(NotJSON):
			h.Set("Content-Type", "text/html")
			text = []byte("<!DOCTYPE html><html><body>Please log in.</body></html>")
		case r.strike(CutJSON):
			text = text[:len(text)/2]
		case r.strike(DeepJSON):
			const depth = 100_000
			text = append(text[:len(text)-1], (`,"Oem":` + strings.Repeat("[", depth) + strings.Repeat("]", depth) + "}")...)
		case r.strike(EndlessBody):
			endless(req.Context(), w, text)
			return
		}
	}
	w.WriteHeader(answer.status)
	_, _ = w.Write(append(text, '\n'))
}

// endless goes on with strings in an array until the client is gone, and at
// most for a GiB.
func endless(ctx context.Context, w io.Writer, text []byte) {
	_, err := w.Write(append(text[:len(text)-1], `,"Oem":["`...))
	chunk := bytes.Repeat([]byte(`x","`), 16<<10)
	for sent := 0; err == nil && ctx.Err() == nil && sent < 1<<30; sent += len(chunk) {
		_, err = w.Write(chunk)
	}
	panic(http.ErrAbortHandler)
}

// location is a path as a Location header has it.
func (r *Redfish) location(path string) string {
	switch {
	case !strings.HasPrefix(path, "/"):
		return path
	case r.faulty(ForeignLocation):
		return r.options.foreign + path
	case r.faulty(AbsoluteLinks):
		return "https://" + r.Addr() + path
	case r.faulty(SlashInLinks):
		return path + "/"
	}
	return path
}

// linkKeys are the properties that hold a path.
var linkKeys = map[string]bool{
	"@odata.id": true, "target": true, "@Redfish.ActionInfo": true, "Members@odata.nextLink": true,
	"HttpPushUri": true, "MultipartHttpPushUri": true, "TaskMonitor": true,
}

// oddities are what OddTypes makes of a property.
var oddities = map[string]any{
	"SerialNumber": 1234, "Model": 42, "Manufacturer": []any{"Better Compute"}, "PartNumber": 7, "SKU": false, "UUID": 0,
	"BiosVersion": 2.1, "FirmwareVersion": 1.2, "HostName": object{}, "AssetTag": nil, "MACAddress": 0, "Version": 3,
	"SpeedMbps": "N/A", "Count": "two", "TotalSystemMemoryGiB": "64 GiB", "TotalCores": "N/A", "TotalThreads": "", "CapacityMiB": "32 GB",
	"MaxSpeedMHz": "N/A", "ReadingCelsius": "N/A", "PowerConsumedWatts": "N/A", "Reading": "N/A", "Status": nil, "ProcessorSummary": nil, "Protocol": 4,
	"LinkStatus": 1, "Severity": 3, "Created": 0, "DateTime": 0, "MediaType": 9, "BlockSizeBytes": "N/A",
}

// escapes clears a terminal and renames its window.
const escapes = "\x1b[2J\x1b]0;owned\x07"

// odd is body with links, types and texts as the faults have them.
func (r *Redfish) odd(body object) any {
	r.mu.Lock()
	on := r.faults.on
	types, texts := on(OddTypes), on(TerminalEscapes)
	path := func(p string) string { return p }
	switch {
	case on(ForeignLinks):
		path = func(p string) string { return r.options.foreign + p }
	case on(AbsoluteLinks):
		path = func(p string) string { return "https://" + r.Addr() + p }
	case on(SlashInLinks):
		path = func(p string) string {
			if strings.ContainsAny(p, "?#") || strings.HasSuffix(p, "/") || strings.Contains(p, "/Actions/") {
				return p
			}
			return p + "/"
		}
	}
	r.mu.Unlock()
	return odd(body, path, types, texts)
}

func odd(v any, path func(string) string, types, texts bool) any {
	switch v := v.(type) {
	case object:
		out := object{}
		for key, value := range v {
			text, isText := value.(string)
			strange, isStrange := oddities[key]
			switch {
			case isText && linkKeys[key] && strings.HasPrefix(text, "/"):
				out[key] = path(text)
			case key == "Attributes":
				out[key] = value
			case types && isStrange:
				out[key] = strange
			case isText && texts && (key == "SerialNumber" || key == "Model" || key == "Manufacturer" || key == "Message"):
				out[key] = text + escapes
			default:
				out[key] = odd(value, path, types, texts)
			}
		}
		return out
	case []object:
		out := make([]any, len(v))
		for i, value := range v {
			out[i] = odd(value, path, types, texts)
		}
		return out
	}
	return v
}
