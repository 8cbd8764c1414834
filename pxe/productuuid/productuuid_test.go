package productuuid

import (
	"strings"
	"testing"
)

const dell, swapped = "4c4c4544-0042-3010-8056-b4c04f303232", "44454c4c-4200-1030-8056-b4c04f303232"

func TestNone(t *testing.T) {
	for uuid, want := range map[string]bool{
		"": true, "x": true, "4c4c4544-0042-3010-8056": true, dell + "0": true, dell: false, swapped: false, strings.ToUpper(dell): false,
		"00000000-0000-0000-0000-000000000000": true, "ffffffff-ffff-ffff-ffff-ffffffffffff": true, "FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF": true,
		"11111111-1111-1111-1111-111111111111": true, "10101010-1010-1010-1010-101010101010": true,
		"01010101-1010-1010-1010-101010101010": false,                                              // no byte sixteen times
		"03000200-0400-0500-0006-000700080009": true, "00020003-0004-0005-0006-000700080009": true, // and swapped
		"4C4C4544-0000-2010-8020-80C04F202020": true, "44454c4c-0000-1020-8020-80c04f202020": true,
		"03000200-0400-0500-0006-000700080008": false,
	} {
		if got := None(uuid); got != want {
			t.Errorf("None(%q) = %v, want %v", uuid, got, want)
		}
		if got := Key(uuid) == ""; got != want {
			t.Errorf("Key(%q) = %q", uuid, Key(uuid))
		}
	}
}

func TestSame(t *testing.T) {
	const zero = "00000000-0000-0000-0000-000000000000"
	for _, tt := range []struct {
		a, b          string
		same, swapped bool
	}{
		{dell, dell, true, false}, {dell, strings.ToUpper(dell), true, false}, {dell, swapped, true, true}, {swapped, dell, true, true},
		{dell, "4c4c4544-0042-3010-8056-b4c04f303233", false, true}, {zero, zero, false, false}, {"", "", false, false}, {dell, "", false, false},
	} {
		if same, swapped := Same(tt.a, tt.b); same != tt.same || same && swapped != tt.swapped {
			t.Errorf("Same(%q, %q) = %v, %v, want %v, %v", tt.a, tt.b, same, swapped, tt.same, tt.swapped)
		}
	}
	if Key(dell) != Key(strings.ToUpper(swapped)) || Swapped(Swapped(dell)) != dell || Swapped(dell) != swapped {
		t.Errorf("Swapped(%s) = %s, keys %s and %s", dell, Swapped(dell), Key(dell), Key(swapped))
	}
}

func FuzzSwapped(f *testing.F) {
	f.Add(dell)
	f.Fuzz(func(t *testing.T, s string) {
		if uuid, ok := Parse(s); ok && (Swapped(Swapped(uuid)) != uuid || Key(uuid) != Key(Swapped(uuid))) {
			t.Errorf("Swapped(%s) = %s", uuid, Swapped(uuid))
		}
		None(s)
	})
}
