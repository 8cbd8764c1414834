package metal

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/plugins/driver/binding"
)

// TestConsoleCommand: whose console it is, by the machine's binding, its BMC's
// driver, or what the site's plugin says of itself.
func TestConsoleCommand(t *testing.T) {
	const ref, other = "secret://acme/bmc", "secret://acme/other"
	bound := func(config string) map[string]binding.Binding {
		return map[string]binding.Binding{"console": {Driver: "ipmi-sol", Config: json.RawMessage(config)}}
	}
	ipmi := store.BMC{Driver: "ipmi", Address: "10.0.0.5:6230", CredentialsRef: ref, DriverOptions: `{"cipherSuite":3}`}
	fish := store.BMC{Driver: "redfish", Address: "https://10.0.0.6:8443", CredentialsRef: ref, TLSSPKISHA256: strings.Repeat("ab", 32)}
	acme := store.BMC{Driver: "acme-bmc", Address: "10.0.0.7", CredentialsRef: ref}
	for name, tt := range map[string]struct {
		bmc     store.BMC
		drivers map[string]binding.Binding
		kinds   []string
		want    store.BMC
		refused bool
	}{
		"ipmi":                 {bmc: ipmi, want: store.BMC{Driver: "ipmi-sol", Address: "10.0.0.5:6230", CredentialsRef: ref, DriverOptions: `{"cipherSuite":3}`}},
		"redfish":              {bmc: fish, want: fish},
		"a driver without one": {bmc: store.BMC{Driver: "wol", Address: "52:54:00:00:00:01"}, refused: true},
		"bound by name alone":  {bmc: fish, drivers: bound(""), want: store.BMC{Driver: "ipmi-sol", Address: "10.0.0.6", CredentialsRef: ref}},
		"bound with all":       {bmc: fish, drivers: bound(`{"address":"10.0.0.9:624","credentials":"` + other + `","options":{"cipherSuite":8},"tlsSpkiSha256":"AB"}`), want: store.BMC{Driver: "ipmi-sol", Address: "10.0.0.9:624", CredentialsRef: other, DriverOptions: `{"cipherSuite":8}`, TLSSPKISHA256: "ab"}},
		"IPv6":                 {bmc: store.BMC{Driver: "redfish", Address: "https://[fd00::1]:443", CredentialsRef: ref}, drivers: bound(""), want: store.BMC{Driver: "ipmi-sol", Address: "fd00::1", CredentialsRef: ref}},
		"bound with nonsense":  {bmc: fish, drivers: bound(`{"adress":"x"}`), refused: true},
		"a plugin with one":    {bmc: acme, kinds: []string{"console", "power"}, want: acme},
		"a plugin without one": {bmc: acme, kinds: []string{"power"}, refused: true},
	} {
		c, err := ConsoleCommand(store.Machine{BMC: tt.bmc, Drivers: tt.drivers}, tt.kinds, false, 0)
		if tt.refused {
			if err == nil || !strings.Contains(err.Error(), "console") {
				t.Errorf("%s: %v, want a refusal", name, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		req := c.Args.(*bmcv1.BmcOperationRequest)
		got := store.BMC{Driver: req.Driver, Address: req.Address, CredentialsRef: req.CredentialsRef, TLSSPKISHA256: req.TlsSpkiSha256, DriverOptions: req.DriverOptionsJson}
		if got != tt.want || c.Kind != "bmc.console" || c.Lane != "proxy" || c.Timeout != 8*time.Hour || c.RetrySafe || len(c.SecretRefs) != 1 || c.SecretRefs[0] != tt.want.CredentialsRef || req.Operation != "console.open" || req.ArgsJson != "[{}]" {
			t.Errorf("%s: %+v with %+v, want %+v", name, c, req, tt.want)
		}
	}
}
