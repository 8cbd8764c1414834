package pid1

import (
	"strings"
	"testing"
)

// site is what bcd site gets in any case.
const site = "--plugins|/usr/lib/bcx|--plugins-cgroup|/sys/fs/cgroup/bcx|--problems|" + problemsPath

func TestServiceArgs(t *testing.T) {
	for _, tt := range []struct {
		role  Role
		data  bool
		ident string
		want  string
	}{
		{Site, true, "/dev/vda3", "/bin/bcd|site|--config|/run/bc/site.toml|--state|/data/bcd|" + site + "|--identity|/dev/vda3"},
		{Site, false, "", "/bin/bcd|site|--config|/run/bc/site.toml|--state||" + site},
		{Ramdisk, false, "", "/bin/bcd|ramdisk|--boot|/etc/bc/boot.json|--state|/run/bcd"},
		{Node, true, "", "/bin/bcd|node|--config|/etc/bcd/config.toml|--state|/data/bcd"},
	} {
		if got := strings.Join(serviceArgs(tt.role, tt.data, tt.ident), "|"); got != tt.want {
			t.Errorf("serviceArgs(%s, %v, %q) = %s, want %s", tt.role, tt.data, tt.ident, got, tt.want)
		}
	}
}

func TestParseRole(t *testing.T) {
	if r, err := ParseRole("site\n"); r != Site || err != nil {
		t.Errorf("ParseRole(site) = %q, %v", r, err)
	}
	for _, in := range []string{"", "gateway", "site node"} {
		if _, err := ParseRole(in); err == nil {
			t.Errorf("ParseRole(%q) = nil, want an error", in)
		}
	}
}

func TestModalias(t *testing.T) {
	for in, want := range map[string]string{
		"add@/devices/x\x00ACTION=add\x00MODALIAS=pci:v1\x00": "pci:v1",
		"remove@/x\x00ACTION=remove\x00MODALIAS=pci:v1\x00":   "",
		"add@/x\x00ACTION=add\x00":                            "",
		"":                                                    "",
	} {
		if got := modalias([]byte(in)); got != want {
			t.Errorf("modalias(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestStepSurvivesPanic(t *testing.T) {
	b := &boot{}
	err := b.step("x", func() error { panic("boom") })
	if err == nil || !strings.Contains(err.Error(), "boom") || len(b.problems) != 1 {
		t.Errorf("step that panics = %v, problems %q", err, b.problems)
	}
	if err := b.step("y", func() error { return nil }); err != nil {
		t.Errorf("step after it = %v", err)
	}
}
