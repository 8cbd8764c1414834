package bmclib

import (
	"encoding/json"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// strange stands in for any value of an answer.
var strange = []string{"null", "0", `"x"`, "[]", "{}", "[null]", "[{}]", "true"}

// Whatever a BMC answers in a field, or as a whole, ends at worst that call: a
// panic in a goroutine of bmclib's own would end this test's process.
func TestStrangeAnswersEndNothing(t *testing.T) {
	for _, id := range ids() {
		t.Run(id, func(t *testing.T) {
			t.Parallel()
			plain := newBMC(t, id)
			d := find(t, options{}, id)
			operation := "inspect.inspect"
			if id == "intel-amt" {
				operation = "power.getPower"
			}
			if _, err := run(t, t.Context(), d, pinned(plain), operation, ""); err != nil {
				t.Fatal(err)
			}
			paths := map[string]bool{}
			for _, r := range plain.asked() {
				_, path, _ := strings.Cut(r, " ")
				paths[path] = true
			}
			tried := 0
			for path := range paths {
				for _, body := range variations(t, plain, id, path) {
					b := newBMC(t, id)
					b.set(func(b *bmc) {
						b.fault = func(w http.ResponseWriter, r *http.Request) bool {
							if r.URL.Path != path || r.Method != http.MethodGet && id != "intel-amt" {
								return false
							}
							w.Header().Set("Content-Type", "application/json")
							_, _ = w.Write([]byte(body))
							return true
						}
					})
					tried++
					if _, err := run(t, t.Context(), d, pinned(b), operation, ""); err != nil && errs.CodeOf(err) != errs.BmcError {
						t.Errorf("%s with %s for %s = %v, want bmc-error at worst", operation, body, path, err)
					}
					b.Close()
				}
			}
			if tried < 5 {
				t.Errorf("%d answers were tried, want more", tried)
			}
		})
	}
}

// variations are strange values in place of the BMC's answer to a path, and the
// answer with one in each field, in turn. Dell's and the other Redfish providers
// share what reads fields.
func variations(t *testing.T, b *bmc, id, path string) []string {
	t.Helper()
	list := []string{"", "null", " \n null", "[null]", "{}"}
	if id == "openbmc" || id == "supermicro" {
		return list
	}
	w := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodGet, "https://"+b.addr()+path, nil)
	r.Header.Set("X-Auth-Token", token)
	r.Header.Set("X-Csrftoken", "csrf-1")
	r.AddCookie(&http.Cookie{Name: "QSESSIONID", Value: "web-session"})
	b.Config.Handler.ServeHTTP(w, r)
	var fields map[string]json.RawMessage
	if json.Unmarshal(w.Body.Bytes(), &fields) != nil {
		return list
	}
	for i, name := range slices.Sorted(maps.Keys(fields)) {
		changed := maps.Clone(fields)
		changed[name] = json.RawMessage(strange[(i+len(path))%len(strange)])
		text, err := json.Marshal(changed)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, string(text))
	}
	return list
}
