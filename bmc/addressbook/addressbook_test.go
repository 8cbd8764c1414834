package addressbook

import (
	"os"
	"path/filepath"
	"reflect"
	"slices"
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
		{"52-54-00-AB-CD-EF@lan0", "wol", "52:54:00:ab:cd:ef"},
		{"52:54:00:ab:cd:ef", "wol", "52:54:00:ab:cd:ef"},
		{"10.0.0.5", "wol", ""},
		{"Rack-3", "manual", "manual/rack-3"},
		{"manual/rack-3", "manual", "manual/rack-3"},
		{"rack 3", "manual", ""},

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
	if b.Has("10.0.0.5") {
		t.Error("Has() = true after Forget")
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
		"newer":       `{"version":3,"bindings":[]}`,
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
		checkSuspect(t, name, path)
	}
}

// checkSuspect: the book at path follows a damaged one, and knows 10.0.0.5 under
// ipmi from a first use.
func checkSuspect(t *testing.T, name, path string) {
	t.Helper()
	for range 2 { // a restart too
		b, _, err := OpenOrSetAside(path)
		if err != nil || !b.Suspect() {
			t.Fatalf("%s: the book is suspect: %v, %v", name, b.Suspect(), err)
		}
		for _, addr := range []string{"10.0.0.5:623", "10.0.0.9:443", "bmc-9:443", "manual/rack-3"} {
			if !b.Protected(addr) {
				t.Errorf("%s: %s is not protected", name, addr)
			}
		}
	}
	b, _, err := OpenOrSetAside(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Rebind("10.0.0.5", "", "secret://root/a", "ipmi", false); err != nil {
		t.Fatal(err)
	}
	if b, _, err = OpenOrSetAside(path); err != nil || b.Protected("10.0.0.5:623") || !b.Protected("10.0.0.5:443") || !b.Protected("10.0.0.9:443") || !b.Protected("bmc-9:443") {
		t.Errorf("%s: bound anew: protected %v, its other port %v, others %v, %v", name, b.Protected("10.0.0.5:623"), b.Protected("10.0.0.5:443"), b.Protected("10.0.0.9:443"), err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if b, _, err = OpenOrSetAside(path); err != nil || !b.Protected("10.0.0.5:623") {
		t.Errorf("%s: the book that followed is gone: %v, protected %v, want it to be", name, err, b.Protected("10.0.0.5:623"))
	}
}

// TestRemove: what is forgotten is as if it had never been, on disk too.
func TestRemove(t *testing.T) {
	path := filepath.Join(t.TempDir(), "bmcs.json")
	b, _, err := OpenOrSetAside(path)
	if err != nil || b.Suspect() || b.Protected("10.0.0.5:623") {
		t.Fatalf("a new book: %v, suspect %v", err, b.Suspect())
	}
	for _, driver := range []string{"ipmi", "redfish"} {
		if err := b.Rebind("10.0.0.5", "", "secret://root/a", driver, true); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Remove("10.0.0.5", "ipmi"); err != nil {
		t.Fatal(err)
	}
	if err := b.Remove("10.0.0.5", "ipmi"); err != nil {
		t.Errorf("Remove() of what nobody knows = %v", err)
	}
	if err := b.Remove("10.0.0.5/x", "ipmi"); errs.CodeOf(err) != errs.InvalidAddress {
		t.Errorf("Remove() of no address = %v", err)
	}
	b, _, err = OpenOrSetAside(path)
	if err != nil || !slices.Equal(b.Addresses(), []string{"10.0.0.5:443"}) {
		t.Fatalf("the book holds %v, %v, want the other port alone", b.Addresses(), err)
	}
	if err := b.Remove("10.0.0.5", "redfish"); err != nil {
		t.Fatal(err)
	}
	if learned, err := b.Bind("10.0.0.5", "", "secret://root/other", "redfish"); !learned || err != nil || b.Protected("10.0.0.5:443") {
		t.Errorf("the next use: learned %v, %v, protected %v", learned, err, b.Protected("10.0.0.5:443"))
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

func FuzzGuard(f *testing.F) {
	for _, s := range []string{"10.0.0.5", "https:\\\\u@bmc%2e:443/", "0x0a.5", "[::1]:623,x", "secret://t/own", "%", "@"} {
		f.Add(s)
	}
	b := empty("")
	if _, err := b.Bind("10.0.0.5", "", "secret://t/own", "ipmi"); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if err := b.Guard(s, "", "secret://t/own"); err != nil {
			t.Errorf("Guard(%q, its own) = %v", s, err)
		}
		if address, err := Normalise(s, "ipmi"); err == nil && address == "10.0.0.5:623" && b.Guard(s, "", "secret://t/other") == nil {
			t.Errorf("Guard(%q) lets through what Normalise takes for %s", s, address)
		}
	})
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"version":1,"bindings":[{"address":"10.0.0.5:623","driver":"ipmi","credentials_ref":"secret://r/a"}]}`))
	f.Add([]byte(`{"version":1}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		b := empty("")
		if b.parse(data) == nil && len(b.Addresses()) > maxBindings {
			t.Error("more bindings than allowed")
		}
	})
}

// TestGuard: an address of a known BMC is refused another credential and another
// pin, however it is written.
func TestGuard(t *testing.T) {
	b := open(t, "")
	for _, address := range []string{"10.0.0.5:623", "bmc.example:443", "[2001:db8::5]:443", "t:443"} {
		if _, err := b.Bind(address, "AA11", "secret://t/own", "ipmi"); err != nil {
			t.Fatal(err)
		}
	}
	for addr, known := range map[string]bool{
		"10.0.0.5": true, "10.0.0.5:623": true, "10.0.0.5:624": false, "https://10.0.0.5/redfish/v1": true, "https://u:p@10.0.0.5:623?x": true,
		"10.0.0.5/x": true, "BMC.example": true, "http://bmc.example#x": true, "10.0.0.6": false, "": false, "not an address": false,
		"bmc.example.": true, "https://bmc.example.:443/": true, "bmc.example.:444": false, "https://bmc%2Eexample/": true,
		`https:\\10.0.0.5\x`: true, `https://10.9.9.9\@10.0.0.5/`: true, `https://10.0.0.5\@10.9.9.9/`: true, "https:/10.0.0.5": true, "HTTPS:10.0.0.5:623": true, "https:///10.0.0.5": true, " 10.0.0.5\n": true,
		"10.9.9.9,10.0.0.5": true, "10.9.9.9; https://10.0.0.5/": true, "10.9.9.9,10.9.9.8": false, "ping 10.0.0.5\n": false,
		"0x0a000005": true, "0xa.5": true, "10.5": true, "012.0.0.05:623": true, "167772165": true, "167772166": false, "10.0.0.261": false, "1.2.3.4.5": false,
		"::ffff:10.0.0.5": true, "[2001:DB8:0::5]": true, "https://[2001:db8::5]:443/x": true, "2001:db8::6": false,
		"secret://t/own": false, "secret://t/other": false, "t": true,
	} {
		if err := b.Guard(addr, "aa11", "secret://t/own"); err != nil {
			t.Errorf("Guard(%q, its own) = %v, want nil", addr, err)
		}
		for _, tt := range []struct{ pin, credential string }{{"aa11", "secret://t/other"}, {"bb22", "secret://t/own"}, {"", "secret://t/own"}} {
			if err := b.Guard(addr, tt.pin, tt.credential); (errs.CodeOf(err) == errs.BindingMismatch) != known {
				t.Errorf("Guard(%q, %q, %q) = %v, want refused %t", addr, tt.pin, tt.credential, err, known)
			}
		}
	}
}

// TestPortThatNobodyTells: a driver whose own port is unknown may mean the port of
// another BMC on the host, so that one's credential is the only one for it.
func TestPortThatNobodyTells(t *testing.T) {
	const own, other = "secret://root/a", "secret://root/b"
	for _, tt := range []struct {
		addr, credRef, driver string
		want                  errs.Code
	}{
		{"10.0.0.5", other, "acme", errs.BindingMismatch},
		{"https://10.0.0.5", other, "acme", errs.BindingMismatch},
		{"10.0.0.5", own, "acme", ""},
		{"10.0.0.5:443", other, "acme", ""},
		{"10.0.0.5", other, "redfish", ""},
		{"10.0.0.5", other, "ipmi", errs.BindingMismatch},
		{"10.0.0.6", other, "acme", ""},
	} {
		b := open(t, "")
		if _, err := b.Bind("10.0.0.5:623", "", own, "ipmi"); err != nil {
			t.Fatal(err)
		}
		if err := b.Check(tt.addr, "", tt.credRef, tt.driver); errs.CodeOf(err) != tt.want {
			t.Errorf("Check(%q, %q, %q) = %v, want code %q", tt.addr, tt.credRef, tt.driver, err, tt.want)
		}
		if _, err := b.Bind(tt.addr, "", tt.credRef, tt.driver); errs.CodeOf(err) != tt.want {
			t.Errorf("Bind(%q, %q, %q) = %v, want code %q", tt.addr, tt.credRef, tt.driver, err, tt.want)
		}
	}
}

// TestForgetKeepsWhatAnotherUseReliedOn: a first use that sent nothing takes
// nothing away from one that came beside it, and did.
func TestForgetKeepsWhatAnotherUseReliedOn(t *testing.T) {
	b := open(t, "")
	for i, learned := range []bool{true, false} {
		if got, err := b.Bind("10.0.0.5", "", "secret://root/a", "ipmi"); got != learned || err != nil {
			t.Fatalf("Bind() %d = %v, %v, want learned %v", i, got, err, learned)
		}
	}
	if err := b.Forget("10.0.0.5", "ipmi"); err != nil {
		t.Fatal(err)
	}
	if err := b.Check("10.0.0.5", "", "secret://root/b", "ipmi"); errs.CodeOf(err) != errs.BindingMismatch {
		t.Errorf("Check() of another credential = %v, want binding-mismatch", err)
	}
}

// TestRebind: what a signed rebind says holds from then on, over a restart too,
// and the protection with it.
func TestRebind(t *testing.T) {
	path := filepath.Join(t.TempDir(), "bmcs.json")
	b := open(t, path)
	const own, other = "secret://root/a", "secret://root/b"
	if _, err := b.Bind("10.0.0.5", "aa", own, "redfish"); err != nil {
		t.Fatal(err)
	}
	if b.Protected("10.0.0.5:443") {
		t.Error("Protected() = true for what was only learned")
	}
	if err := b.Rebind("https://10.0.0.5:443", "BB", other, "acme", true); err != nil {
		t.Fatal(err)
	}
	if err := b.Rebind("10.0.0.6", "", other, "ipmi", false); err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string]*Book{"at once": b, "reopened": open(t, path)} {
		if err := b.Check("10.0.0.5:443", "aa", own, "redfish"); errs.CodeOf(err) != errs.BindingMismatch {
			t.Errorf("%s: Check(what was) = %v, want binding-mismatch", name, err)
		}
		if err := b.Check("10.0.0.5:443", "bb", other, "acme"); err != nil {
			t.Errorf("%s: Check(what is) = %v", name, err)
		}
		if !b.Protected("10.0.0.5:443") || b.Protected("10.0.0.6:623") || b.Protected("10.0.0.7:443") {
			t.Errorf("%s: Protected() is not as it was said", name)
		}
		if got, want := b.Addresses(), []string{"10.0.0.5:443", "10.0.0.6:623"}; !reflect.DeepEqual(got, want) {
			t.Errorf("%s: Addresses() = %q, want %q", name, got, want)
		}
	}
	// A first use in flight does not take back what was said since.
	if err := b.Forget("10.0.0.6", "ipmi"); err != nil || !b.Has("10.0.0.6:623") {
		t.Errorf("Forget() = %v, and the book has it: %v", err, b.Has("10.0.0.6:623"))
	}
	if err := b.Rebind("10.0.0.5/x", "", own, "acme", false); errs.CodeOf(err) != errs.InvalidAddress {
		t.Errorf("Rebind(no address) = %v, want invalid-address", err)
	}
	// Where the port is not told, another BMC's credential stays its own.
	if err := b.Rebind("10.0.0.6", "", own, "acme", false); errs.CodeOf(err) != errs.BindingMismatch {
		t.Errorf("Rebind(a driver whose port nobody knows) = %v, want binding-mismatch", err)
	}
	// What cannot be kept changes nothing.
	gone := open(t, filepath.Join(t.TempDir(), "missing", "bmcs.json"))
	if err := gone.Rebind("10.0.0.5", "", own, "ipmi", true); err == nil || gone.Has("10.0.0.5") {
		t.Errorf("Rebind() into a missing folder = %v, want an error and nothing kept", err)
	}
}

// TestOldFormat: a file of the version before is read, and written anew with
// what it did not know.
func TestOldFormat(t *testing.T) {
	path := filepath.Join(t.TempDir(), "bmcs.json")
	old := `{"version":1,"bindings":[{"address":"10.0.0.5:623","driver":"ipmi","credentials_ref":"secret://r/a"}]}`
	if err := os.WriteFile(path, []byte(old), 0o600); err != nil {
		t.Fatal(err)
	}
	b := open(t, path)
	if err := b.Check("10.0.0.5", "", "secret://r/a", "ipmi"); err != nil || b.Protected("10.0.0.5:623") {
		t.Errorf("Check() = %v, Protected() = %v, want the old binding, not protected", err, b.Protected("10.0.0.5:623"))
	}
	if err := b.Rebind("10.0.0.5", "", "secret://r/a", "ipmi", true); err != nil {
		t.Fatal(err)
	}
	if data, err := os.ReadFile(path); err != nil || !strings.Contains(string(data), `"version": 2`) || !open(t, path).Protected("10.0.0.5:623") {
		t.Errorf("the file is %s, %v, want version 2 and protected", data, err)
	}
	if err := b.Rebind("10.0.0.5", "", "secret://r/a", "ipmi", false); err != nil {
		t.Fatal(err)
	}
	if data, err := os.ReadFile(path); err != nil || !strings.Contains(string(data), `"version": 1`) {
		t.Errorf("the file is %s, %v, want version 1: the program before must read it", data, err)
	}
}

// TestMachinesWithoutBMC: they stand in the book, for their protection, and are
// no host that anything else could be kept from.
func TestMachinesWithoutBMC(t *testing.T) {
	path := filepath.Join(t.TempDir(), "bmcs.json")
	b := open(t, path)
	if err := b.Rebind("Rack-3", "", "", "manual", true); err != nil {
		t.Fatal(err)
	}
	if learned, err := b.Bind("52:54:00:AB:CD:EF@lan0", "", "", "wol"); err != nil || !learned {
		t.Fatalf("Bind(wol) = %v, %v, want learned", learned, err)
	}
	b = open(t, path)
	if !b.Protected("manual/rack-3") || b.Protected("52:54:00:ab:cd:ef") {
		t.Error("Protected() is not as it was said")
	}
	for _, text := range []string{"rack-3", "http://rack-3/", "52:54:00:ab:cd:ef", ""} {
		if b.Has(text) {
			t.Errorf("Has(%q) = true: it names no BMC", text)
		}
		if err := b.Guard(text, "", "secret://t/own"); err != nil {
			t.Errorf("Guard(%q) = %v", text, err)
		}
	}
}

// TestConsoleIsKinOfIPMI: the console of an IPMI BMC is no second BMC, and has no
// other credential.
func TestConsoleIsKinOfIPMI(t *testing.T) {
	b := open(t, "")
	const own, other = "secret://root/a", "secret://root/b"
	if _, err := b.Bind("10.0.0.5", "", own, "ipmi"); err != nil {
		t.Fatal(err)
	}
	if learned, err := b.Bind("10.0.0.5", "", own, "ipmi-sol"); err != nil || learned {
		t.Errorf("Bind() of the console = %v, %v, want a known BMC", learned, err)
	}
	if _, err := b.Bind("10.0.0.5:623", "", other, "ipmi-sol"); errs.CodeOf(err) != errs.BindingMismatch {
		t.Errorf("Bind() of the console with another credential = %v, want binding-mismatch", err)
	}
	if learned, err := b.Bind("10.0.0.6", "", own, "ipmi-sol"); err != nil || !learned {
		t.Errorf("Bind() of a console first = %v, %v, want learned", learned, err)
	}
	if err := b.Check("10.0.0.6:623", "", own, "ipmi"); err != nil {
		t.Errorf("Check() of its BMC = %v", err)
	}
}
