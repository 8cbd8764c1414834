package addressbook

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

func TestNormalise(t *testing.T) {
	for _, tt := range []struct{ address, driver, want string }{
		{"10.0.0.5", "ipmi", "10.0.0.5:623"},
		{"10.0.0.5", "redfish", "10.0.0.5:443"},
		{"10.0.0.5", "acme", "10.0.0.5:443"},
		{"10.0.0.5:6230", "ipmi", "10.0.0.5:6230"},
		{"https://BMC-1.Example.com", "redfish", "bmc-1.example.com:443"},
		{"HTTP://bmc1", "acme", "bmc1:80"},
		{"ipmi://10.0.0.5", "ipmi", "10.0.0.5:623"},
		{"2001:DB8::1", "redfish", "[2001:db8::1]:443"},
		{"[2001:db8::1]", "ipmi", "[2001:db8::1]:623"},
		{"[2001:db8::1]:8443", "redfish", "[2001:db8::1]:8443"},
		{"::ffff:10.0.0.5", "ipmi", "10.0.0.5:623"},
		{"bmc_1", "ipmi", "bmc_1:623"},

		{"", "ipmi", ""},
		{"10.0.0.5:", "ipmi", ""},
		{"10.0.0.5:0", "ipmi", ""},
		{"10.0.0.5:0623", "ipmi", ""},
		{"10.0.0.5:65536", "ipmi", ""},
		{"10.0.0.5/", "ipmi", ""},
		{"https://10.0.0.5/redfish", "redfish", ""},
		{"admin@10.0.0.5", "ipmi", ""},
		{"10.0.0.5 -P x", "ipmi", ""},
		{"-H", "ipmi", ""},
		{"127.1", "ipmi", ""},
		{"0x7f000001", "ipmi", ""},
		{"010.0.0.5", "ipmi", ""},
		{"0.0.0.0", "ipmi", ""},
		{"::", "ipmi", ""},
		{"239.0.0.1", "ipmi", ""},
		{"255.255.255.255", "ipmi", ""},
		{"fe80::1%eth0", "ipmi", ""},
		{"bmc..example", "ipmi", ""},
		{"https://https://bmc", "redfish", ""},
		{"[10.0.0.5]", "ipmi", ""},
		{"[::1", "ipmi", ""},
		{"[::1]x", "ipmi", ""},
		{strings.Repeat("a.", 200), "ipmi", ""},
	} {
		got, err := Normalise(tt.address, tt.driver)
		if got != tt.want || (err != nil) != (tt.want == "") {
			t.Errorf("Normalise(%q, %q) = %q, %v, want %q", tt.address, tt.driver, got, err, tt.want)
		}
		if err != nil && errs.CodeOf(err) != errs.InvalidAddress {
			t.Errorf("Normalise(%q, %q) failed with code %s, want %s", tt.address, tt.driver, errs.CodeOf(err), errs.InvalidAddress)
		}
	}
}

func open(t *testing.T, path string) *Book {
	t.Helper()
	b, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestBind(t *testing.T) {
	path := filepath.Join(t.TempDir(), "bmcs.json")
	b := open(t, path)
	const pin = "aa11"
	for _, tt := range []struct {
		name                       string
		addr, pin, credRef, driver string
		learned                    bool
		want                       errs.Code
	}{
		{"first use", "10.0.0.5", pin, "secret://root/a", "redfish", true, ""},
		{"the same", "10.0.0.5", pin, "secret://root/a", "redfish", false, ""},
		{"the same, written otherwise", "https://10.0.0.5:443", "AA11", "secret://root/a", "redfish", false, ""},
		{"another credential", "10.0.0.5", pin, "secret://root/b", "redfish", false, errs.BindingMismatch},
		{"another pin", "10.0.0.5", "bb22", "secret://root/a", "redfish", false, errs.BindingMismatch},
		{"no pin", "10.0.0.5", "", "secret://root/a", "redfish", false, errs.BindingMismatch},
		{"another driver", "10.0.0.5", pin, "secret://root/a", "acme", false, errs.BindingMismatch},
		{"another port", "10.0.0.5:623", "", "secret://root/b", "ipmi", true, ""},
		{"no address", "10.0.0.5/x", "", "secret://root/b", "ipmi", false, errs.InvalidAddress},
	} {
		if err := b.Check(tt.addr, tt.pin, tt.credRef, tt.driver); errs.CodeOf(err) != tt.want {
			t.Errorf("%s: Check() = %v, want code %q", tt.name, err, tt.want)
		}
		learned, err := b.Bind(tt.addr, tt.pin, tt.credRef, tt.driver)
		if learned != tt.learned || errs.CodeOf(err) != tt.want {
			t.Errorf("%s: Bind() = %v, %v, want %v, code %q", tt.name, learned, err, tt.learned, tt.want)
		}
	}
	// Another process, after a power cut, knows what was learned.
	again := open(t, path)
	if _, err := again.Bind("10.0.0.5", pin, "secret://root/b", "redfish"); errs.CodeOf(err) != errs.BindingMismatch {
		t.Errorf("after reopening: Bind() = %v, want binding-mismatch", err)
	}
	if got, want := again.Addresses(), []string{"10.0.0.5:443", "10.0.0.5:623"}; !reflect.DeepEqual(got, want) {
		t.Errorf("Addresses() = %q, want %q", got, want)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the file's mode is %v, %v, want 0600", st.Mode(), err)
	}
}

func TestHas(t *testing.T) {
	b := open(t, "")
	if _, err := b.Bind("bmc1.example:8443", "", "secret://root/a", "redfish"); err != nil {
		t.Fatal(err)
	}
	for addr, want := range map[string]bool{
		"bmc1.example:8443": true, "https://BMC1.example:8443": true, "bmc1.example": true,
		"bmc1.example:443": false, "bmc2.example": false, "": false, "http://": false, "bmc1.example/": false,
	} {
		if got := b.Has(addr); got != want {
			t.Errorf("Has(%q) = %v, want %v", addr, got, want)
		}
	}
}

func TestForget(t *testing.T) {
	path := filepath.Join(t.TempDir(), "bmcs.json")
	b := open(t, path)
	if _, err := b.Bind("10.0.0.5", "aa", "secret://root/a", "ipmi"); err != nil {
		t.Fatal(err)
	}
	if err := b.Forget("10.0.0.5", "ipmi"); err != nil {
		t.Fatal(err)
	}
	if learned, err := open(t, path).Bind("10.0.0.5", "", "secret://root/a", "ipmi"); !learned || err != nil {
		t.Errorf("Bind() after Forget = %v, %v, want learned", learned, err)
	}
}

// What cannot be kept is not used: a binding that only memory knew would be
// another one after a power cut.
func TestBindNeedsTheDisk(t *testing.T) {
	b := open(t, filepath.Join(t.TempDir(), "missing", "bmcs.json"))
	if learned, err := b.Bind("10.0.0.5", "", "secret://root/a", "ipmi"); err == nil || learned {
		t.Errorf("Bind() into a missing folder = %v, %v, want an error", learned, err)
	}
	if b.Has("10.0.0.5") {
		t.Error("Has() = true for an address that was not kept")
	}
}

func TestOpenDamaged(t *testing.T) {
	for name, data := range map[string]string{
		"empty":       "",
		"torn":        `{"version":1,"bind`,
		"newer":       `{"version":2,"bindings":[]}`,
		"unknown key": `{"version":1,"bindings":[],"more":1}`,
		"not plain":   `{"version":1,"bindings":[{"address":"10.0.0.5","driver":"ipmi","credentials_ref":"secret://r/a"}]}`,
		"twice": `{"version":1,"bindings":[{"address":"10.0.0.5:623","driver":"ipmi","credentials_ref":"secret://r/a"},
			{"address":"10.0.0.5:623","driver":"ipmi","credentials_ref":"secret://r/b"}]}`,
	} {
		path := filepath.Join(t.TempDir(), "bmcs.json")
		if err := os.WriteFile(path, []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(path); err == nil {
			t.Errorf("Open of a file that is %s succeeded", name)
		}
		b, aside, err := OpenOrSetAside(path)
		if err != nil || aside == "" || len(b.Addresses()) != 0 {
			t.Errorf("OpenOrSetAside of a file that is %s = %v, %q, %v, want an empty book", name, b, aside, err)
			continue
		}
		if kept, err := os.ReadFile(aside); err != nil || string(kept) != data {
			t.Errorf("the file aside holds %q, %v, want %q", kept, err, data)
		}
		if _, err := b.Bind("10.0.0.5", "", "secret://root/a", "ipmi"); err != nil {
			t.Errorf("Bind() after setting aside = %v", err)
		}
		if _, aside, err := OpenOrSetAside(path); aside != "" || err != nil {
			t.Errorf("OpenOrSetAside of a sound file = %q, %v, want none aside", aside, err)
		}
	}
}

func FuzzNormalise(f *testing.F) {
	for _, s := range []string{"10.0.0.5", "https://bmc:443", "[::1]:623", "2001:db8::1", "a:b:c", "0x7f.1", "[", "]:", "://"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := Normalise(s, "ipmi")
		if err != nil {
			return
		}
		if again, err := Normalise(got, "ipmi"); err != nil || again != got {
			t.Errorf("Normalise(%q) = %q, but Normalise of that = %q, %v", s, got, again, err)
		}
		if strings.ContainsAny(got, "/@ \t\n\x00%") {
			t.Errorf("Normalise(%q) = %q", s, got)
		}
	})
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"version":1,"bindings":[{"address":"10.0.0.5:623","driver":"ipmi","credentials_ref":"secret://r/a"}]}`))
	f.Add([]byte(`{"version":1}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		b := &Book{bindings: map[string]binding{}}
		if b.parse(data) == nil && len(b.Addresses()) > maxBindings {
			t.Error("more bindings than allowed")
		}
	})
}
