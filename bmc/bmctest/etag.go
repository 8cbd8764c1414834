package bmctest

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"net/http"
	"strings"
)

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
