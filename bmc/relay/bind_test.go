package relay

import (
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
)

// TestProtectByAddress: who is protected under one name is not under another.
func TestProtectByAddress(t *testing.T) {
	for _, tt := range []struct {
		driver, address string
		protected       bool
		want            errs.Code
	}{
		{"redfish", "10.0.0.7", true, ""},
		{"redfish", "[2001:db8::1]:443", true, ""},
		{"redfish", "bmc7.example", true, errs.InvalidAddress},
		{"redfish", "bmc7.example", false, ""},
		{"manual", "rack-3", true, ""},
		{"wol", "52:54:00:ab:cd:ef", true, ""},
	} {
		_, err := CheckBind(&bmcv1.BmcBindRequest{Driver: tt.driver, Address: tt.address, CredentialsRef: "secret://t/bmc", Protected: tt.protected})
		if errs.CodeOf(err) != tt.want {
			t.Errorf("CheckBind(%s, protected %v) = %v, want %q", tt.address, tt.protected, err, tt.want)
		}
	}
}
