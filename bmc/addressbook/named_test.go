package addressbook

import (
	"path/filepath"
	"slices"
	"testing"
)

func TestNamed(t *testing.T) {
	b, err := Open("")
	if err != nil {
		t.Fatal(err)
	}
	for _, one := range []struct{ address, driver string }{{"10.0.0.7", "ipmi"}, {"10.0.0.7", "redfish"}, {"bmc8.lan", "redfish"}} {
		if _, err := b.Bind(one.address, "", "secret://t/bmc", one.driver); err != nil {
			t.Fatal(err)
		}
	}
	for text, want := range map[string][]string{
		"10.0.0.7":                         {"10.0.0.7:443", "10.0.0.7:623"},
		"10.0.0.7:623":                     {"10.0.0.7:623"},
		"10.0.0.7:1":                       nil,
		"https://x@BMC8.lan/redfish/v1":    {"bmc8.lan:443"},
		"10.0.0.9, 10.0.0.7:443;bmc8.lan.": {"10.0.0.7:443", "bmc8.lan:443"},
		`https:\\10.0.0.7:443\x`:           {"10.0.0.7:443"},
		"off":                              nil,
		"":                                 nil,
	} {
		if got := b.Named(text); !slices.Equal(got, want) {
			t.Errorf("Named(%q) = %v, want %v", text, got, want)
		}
	}
}

// TestProtectionHoldsForTheHost: neither an unknown port of a protected BMC's host,
// nor one that is used for the first time, is a way round the protection.
func TestProtectionHoldsForTheHost(t *testing.T) {
	b, err := Open("")
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Rebind("10.0.0.7", "", "secret://t/bmc", "ipmi", true); err != nil {
		t.Fatal(err)
	}
	want := func(when string, addresses map[string]bool) {
		t.Helper()
		for address, want := range addresses {
			if got := b.Protected(address); got != want {
				t.Errorf("%s: Protected(%s) = %v, want %v", when, address, got, want)
			}
		}
	}
	want("as bound", map[string]bool{"10.0.0.7:623": true, "10.0.0.7:443": true, "10.0.0.8:623": false})
	if _, err := b.Bind("10.0.0.7", "", "secret://t/bmc", "redfish"); err != nil {
		t.Fatal(err)
	}
	want("after a first use", map[string]bool{"10.0.0.7:443": true})
	if err := b.Rebind("10.0.0.7", "", "secret://t/bmc", "redfish", false); err != nil {
		t.Fatal(err)
	}
	want("let go by name", map[string]bool{"10.0.0.7:443": false, "10.0.0.7:623": true, "10.0.0.7:80": true})
}

// TestNamesOfProtectedBMCs: a name that nobody can look behind is no way round the
// protection of an address.
func TestNamesOfProtectedBMCs(t *testing.T) {
	b, err := Open("")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Bind("alias.example", "", "secret://t/bmc", "redfish"); err != nil {
		t.Fatal(err)
	}
	if b.Protected("alias.example:443") || b.Protected("other.example:623") {
		t.Error("names are protected where nothing is")
	}
	if err := b.Rebind("Rack-3", "", "", "manual", true); err != nil {
		t.Fatal(err)
	}
	if b.Protected("alias.example:443") {
		t.Error("a name is protected for the sake of a machine without a BMC")
	}
	if err := b.Rebind("10.0.0.7", "", "secret://t/bmc", "ipmi", true); err != nil {
		t.Fatal(err)
	}
	for address, want := range map[string]bool{"alias.example:443": true, "other.example:623": true, "10.0.0.8:623": false, "[::1]:443": false, "52:54:00:ab:cd:ef": false, "manual/rack-4": false} {
		if got := b.Protected(address); got != want {
			t.Errorf("Protected(%s) = %v, want %v", address, got, want)
		}
	}
}

// TestProtectionReachesKnownPorts: a port that was used before its BMC was protected
// is no way round the protection.
func TestProtectionReachesKnownPorts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "bmcs.json")
	b, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, address := range []string{"10.0.0.7", "http://10.0.0.7", "10.0.0.8", "10.0.0.7:8443"} {
		if _, err := b.Bind(address, "", "secret://t/bmc", "redfish"); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Rebind("10.0.0.7", "", "secret://t/bmc", "ipmi", true); err != nil {
		t.Fatal(err)
	}
	again, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range []*Book{b, again} {
		for address, want := range map[string]bool{"10.0.0.7:623": true, "10.0.0.7:443": true, "10.0.0.7:80": true, "10.0.0.8:443": false, "10.0.0.7:8443": false} {
			if got := b.Protected(address); got != want {
				t.Errorf("Protected(%s) = %v, want %v", address, got, want)
			}
		}
	}
	// What cannot be kept changes nothing.
	gone, err := Open(filepath.Join(t.TempDir(), "missing", "bmcs.json"))
	if err != nil {
		t.Fatal(err)
	}
	gone.keep(binding{Address: "10.0.0.7:443", Driver: "redfish"})
	if err := gone.Rebind("10.0.0.7", "", "secret://t/bmc", "ipmi", true); err == nil || gone.Protected("10.0.0.7:443") {
		t.Errorf("Rebind() into a missing folder = %v, and the other port is protected: %v", err, gone.Protected("10.0.0.7:443"))
	}
}

// TestTranslatedAddresses: an IPv6 address that is translated on the way is no way
// round the protection of the IPv4 address in it.
func TestTranslatedAddresses(t *testing.T) {
	b, err := Open("")
	if err != nil {
		t.Fatal(err)
	}
	if b.Protected("[64:ff9b::a00:7]:443") {
		t.Error("a translated address is protected where nothing is")
	}
	if err := b.Rebind("10.0.0.7", "", "secret://t/bmc", "ipmi", true); err != nil {
		t.Fatal(err)
	}
	for address, want := range map[string]bool{
		"[64:ff9b::a00:7]:623": true, "[::a00:7]:623": true, "[2002:a00:7::1]:443": true, "[2001:db8::7]:443": false, "10.0.0.8:443": false,
	} {
		plain, err := Normalise(address, "redfish")
		if err != nil {
			t.Fatal(err)
		}
		if got := b.Protected(plain); got != want {
			t.Errorf("Protected(%s) = %v, want %v", plain, got, want)
		}
	}
}
