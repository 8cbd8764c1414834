// Package productuuid compares the UUIDs that firmware, tools and people give one machine.
package productuuid

import (
	"regexp"
	"strings"
)

var form = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// Parse gives the lower-case form; ok is false for what is no UUID.
func Parse(s string) (uuid string, ok bool) {
	s = strings.ToLower(s)
	return s, form.MatchString(s)
}

// shared are UUIDs that makers left in the firmware of many machines.
var shared = map[string]bool{
	"03000200-0400-0500-0006-000700080009": true,
	"4c4c4544-0000-2010-8020-80c04f202020": true, // a service tag of blanks
	"00010203-0405-0607-0809-0a0b0c0d0e0f": true,
	"deadbeef-dead-beef-dead-beefdeadbeef": true,
	"12345678-1234-5678-90ab-cddeefaabbcc": true,
	"12345678-1234-1234-1234-123456789abc": true,
	"10000000-0000-8000-0040-000000000000": true,
}

// None says whether a UUID tells no machine from another: it is missing or no
// UUID, one byte sixteen times (all zeros: not present, all ones: not set; DMTF
// DSP0134, 7.2.1), or one that many machines share, in either byte order.
func None(s string) bool {
	uuid, ok := Parse(s)
	if !ok {
		return true
	}
	digits := strings.ReplaceAll(uuid, "-", "")
	return strings.ReplaceAll(digits, digits[:2], "") == "" || shared[uuid] || shared[Swapped(uuid)]
}

// Swapped is a UUID with its first three fields in the other byte order. SMBIOS
// keeps them little-endian, and not everything that prints them knows.
func Swapped(uuid string) string {
	if !form.MatchString(uuid) {
		return uuid
	}
	pair := func(i int) string { return uuid[i : i+2] }
	return pair(6) + pair(4) + pair(2) + pair(0) + "-" + pair(11) + pair(9) + "-" + pair(16) + pair(14) + uuid[18:]
}

// Same says whether two UUIDs are one machine's, and whether only after one of
// them was swapped. What is none matches nothing.
func Same(a, b string) (same, swapped bool) {
	a, b = strings.ToLower(a), strings.ToLower(b)
	if None(a) || None(b) {
		return false, false
	}
	return a == b || Swapped(a) == b, a != b
}

// Key is the same for every spelling of one machine's UUID; empty for none.
func Key(s string) string {
	if None(s) {
		return ""
	}
	uuid, _ := Parse(s)
	return min(uuid, Swapped(uuid))
}
