package peer

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/secret"
)

func TestScrub(t *testing.T) {
	const password = "p@ss/w\"rd<é>"
	r := NewRedactor()
	defer r.Add(secret.New([]byte(password)), secret.New([]byte("abc")))()
	escaped, _ := json.Marshal(password)
	for name, text := range map[string]string{
		"plain":         password,
		"in a sentence": "login with " + password + ".",
		"twice":         password + password,
		"JSON":          string(escaped),
		"query":         url.QueryEscape(password),
		"path":          url.PathEscape(password),
		"lower case":    strings.ToLower(url.QueryEscape(password)),
		"base64":        base64.StdEncoding.EncodeToString([]byte(password)),
		"raw base64":    base64.RawURLEncoding.EncodeToString([]byte(password)),
		"basic auth":    "Basic " + base64.StdEncoding.EncodeToString([]byte("root:"+password)),
		"basic auth 2":  "Basic " + base64.StdEncoding.EncodeToString([]byte("user:"+password)),
		"basic auth 3":  "Basic " + base64.StdEncoding.EncodeToString([]byte("admin1:"+password+"\n")),
	} {
		got := r.Scrub(text)
		rest := strings.ReplaceAll(got, redacted, "")
		if !strings.Contains(got, redacted) || len(rest) > 20 {
			t.Errorf("%s: Scrub(%q) = %q", name, text, got)
		}
	}
	for _, text := range []string{"", "abc", "a short secret is left: abc", "password", "p@ss"} {
		if got := r.Scrub(text); got != text {
			t.Errorf("Scrub(%q) = %q, want it unchanged", text, got)
		}
	}
}

// TestScrubLongestFirst: a secret within a longer one leaves nothing of it.
func TestScrubLongestFirst(t *testing.T) {
	r := NewRedactor()
	defer r.Add(secret.New([]byte("hunter")), secret.New([]byte("hunter2000")))()
	if got := r.Scrub("hunter2000 hunter"); got != "[redacted] [redacted]" {
		t.Errorf("Scrub = %q", got)
	}
}

func TestScrubLinesOfAKey(t *testing.T) {
	r := NewRedactor()
	defer r.Add(secret.New([]byte("-----BEGIN KEY-----\nMIIEvQIBADAN\n-----END KEY-----\n")))()
	if got := r.Scrub("read MIIEvQIBADAN from it"); got != "read [redacted] from it" {
		t.Errorf("Scrub = %q", got)
	}
}

// TestRelease: the last ones are kept, since output comes late; not for ever.
func TestRelease(t *testing.T) {
	r := NewRedactor()
	first := r.Add(secret.New([]byte("hunter2")))
	again := r.Add(secret.New([]byte("hunter2")))
	first()
	first()
	again()
	if got := r.Scrub("hunter2"); got != redacted {
		t.Errorf("just after its call: %q", got)
	}
	for i := range maxKept - 1 {
		r.Add(secret.New(fmt.Appendf(nil, "secret%04d", i)))()
	}
	if got := r.Scrub("hunter2"); got != redacted {
		t.Errorf("as the oldest of %d: %q", maxKept, got)
	}
	held := r.Add(secret.New([]byte("hunter2")))
	for i := range 2 * maxKept {
		r.Add(secret.New(fmt.Appendf(nil, "other%04d", i)))()
	}
	if got := r.Scrub("hunter2"); got != redacted {
		t.Errorf("while it is held: %q", got)
	}
	if n := len(r.held); n > maxKept+1 {
		t.Errorf("%d secrets are kept, want at most %d", n, maxKept+1)
	}
	held()
	for i := range maxKept {
		r.Add(secret.New(fmt.Appendf(nil, "third%04d", i)))()
	}
	if got := r.Scrub("hunter2"); got != "hunter2" {
		t.Errorf("long after: %q", got)
	}
}
