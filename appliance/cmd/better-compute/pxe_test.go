package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
)

// TestUnknownByCommandLine: what people say of unknown machines, and what they are told.
func TestUnknownByCommandLine(t *testing.T) {
	c := newCLI(t)
	defer c.halt()
	c.run("", "site", "add", "lab")
	if out := c.run("", "site", "unknown", "lab"); out != "unknown machines are left alone" {
		t.Errorf("site unknown = %q", out)
	}
	dir := t.TempDir()
	list, empty := filepath.Join(dir, "list"), filepath.Join(dir, "empty")
	for name, text := range map[string]string{list: "# rack 4\n52-54-00-00-00-0A  # m1\n\n4C4C4544-0042-3010-8056-B4C04F303232\n", empty: "# nobody\n"} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		want string
		args []string
	}{
		{"--leave and --inspect exclude each other", []string{"lab", "--leave", "--inspect"}},
		{"--expect goes with --inspect", []string{"lab", "--expect", list}},
		{"--expect goes with --inspect", []string{"lab", "--leave", "--expect", list}},
		{"read expected machines: " + empty + " names none", []string{"lab", "--inspect", "--expect", empty}},
		{"read expected machines: open ", []string{"lab", "--inspect", "--expect", filepath.Join(dir, "none")}},
		{"NOT_FOUND: ", []string{"nowhere", "--inspect"}},
		{"usage: better-compute site unknown", nil},
	} {
		c.fails(tt.want, append([]string{"site", "unknown"}, tt.args...)...)
	}
	for stdin, want := range map[string]string{"x\n": "INVALID_INPUT: policy.expected[0]", "00000000-0000-0000-0000-000000000000\n": "INVALID_INPUT: policy.expected[0]: many machines"} {
		if _, _, err := c.runAs(c.client, stdin, "site", "unknown", "lab", "--inspect", "--expect", "-"); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("site unknown with %q = %v, want %q", stdin, err, want)
		}
	}
	out := c.run("", "site", "unknown", "lab", "--inspect", "--expect", list)
	for _, want := range []string{"inspected if they are one of 2", "  52:54:00:00:00:0a", "  4c4c4544-0042-3010-8056-b4c04f303232", "does not know yet"} {
		if !strings.Contains(out, want) {
			t.Errorf("site unknown --inspect --expect = %q, want %q", out, want)
		}
	}
	var shown struct {
		Policy struct {
			Inspect  bool     `json:"inspect"`
			Expected []string `json:"expected"`
		} `json:"policy"`
	}
	if err := json.Unmarshal([]byte(c.run("", "site", "unknown", "lab", "--json")), &shown); err != nil || !shown.Policy.Inspect || len(shown.Policy.Expected) != 2 {
		t.Errorf("site unknown --json = %+v, %v", shown, err)
	}
	if out := c.run("", "site", "unknown", "lab", "--inspect"); !strings.HasPrefix(out, "unknown machines are inspected\n") {
		t.Errorf("site unknown --inspect = %q", out)
	}
	if out := c.run("", "site", "unknown", "lab", "--leave"); !strings.HasPrefix(out, "unknown machines are left alone") {
		t.Errorf("site unknown --leave = %q", out)
	}
	if out := c.run("", "events", "--site", "lab"); strings.Count(out, "site.unknown-set") != 3 {
		t.Errorf("events = %q, want three changes", out)
	}
}

// TestMACsByCommandLine: a MAC is added to a machine that has none, and who is nobody
// is told so.
func TestMACsByCommandLine(t *testing.T) {
	c := newCLI(t)
	defer c.halt()
	c.enrolBox(c.run("", "site", "add", "lab"))
	c.run("", "pool", "add", "metal", "--site", "lab")
	c.run(`{"username":"root","password":"x"}`, "secret", "put", "bmc")
	c.run("", "metal", "enroll", "m1", "--pool", "metal", "--driver", "ipmi", "--address", "192.0.2.7", "--credentials", "bmc", "--uuid", "4c4c4544-0042-3010-8056-b4c04f303232")
	const mac = "52:54:00:00:00:0a"
	if out := c.run("", "metal", "found"); !strings.HasPrefix(out, "SITE") || strings.Contains(out, "\n") {
		t.Errorf("metal found = %q, want the head alone", out)
	}
	c.fails("NOT_FOUND: MAC "+mac, "metal", "found", mac)
	c.fails("NOT_FOUND: ", "metal", "found", "--site", "nowhere")
	c.fails("INVALID_INPUT: mac-not-seen: ", "metal", "confirm-mac", "m1", mac)
	c.fails("INVALID_INPUT: mac", "metal", "confirm-mac", "m1", "x")
	c.fails("NOT_FOUND: ", "metal", "reject-mac", mac)
	c.fails("usage: better-compute metal confirm-mac", "metal", "confirm-mac", "m1")
	if _, notes, err := c.runAs(c.client, "", "metal", "confirm-mac", "m1", "52-54-00-00-00-0A", "--unseen"); err != nil || notes != "m1 boots by "+mac+"\n" {
		t.Errorf("metal confirm-mac --unseen = %q, %v", notes, err)
	}
	if out := c.run("", "metal", "list"); !strings.Contains(out, mac) {
		t.Errorf("metal list = %q, want the MAC", out)
	}
	c.fails("DRIVER_ERROR: unavailable: the site's box is offline (site lab)", "pxe", "explain", mac)
	c.fails("usage: better-compute pxe explain", "pxe", "explain")
	for _, tt := range []struct {
		want string
		args []string
	}{
		{`INVALID_INPUT: mac "m1": want six bytes such as 52:54:00:12:34:56`, []string{"pxe", "explain", "m1"}},
		{`NOT_FOUND: site "nowhere"`, []string{"pxe", "explain", mac, "--site", "nowhere"}},
		{`INVALID_INPUT: mac "ff:ff:ff:ff:ff:ff" is a group address`, []string{"metal", "confirm-mac", "m1", "ff:ff:ff:ff:ff:ff"}},
		{`NOT_FOUND: machine "m9"`, []string{"metal", "confirm-mac", "m9", mac}},
		{"INVALID_INPUT: mac-not-seen: MAC 52:54:00:00:00:0b was not seen by the box of machine m1's site: whoever is sure of it says --unseen", []string{"metal", "confirm-mac", "m1", "52:54:00:00:00:0B"}},
		{`NOT_FOUND: MAC ` + mac + `: no box of this tenant has found it, or it is a machine's`, []string{"metal", "reject-mac", strings.ToUpper(mac)}},
		{`INVALID_INPUT: mac "x"`, []string{"metal", "reject-mac", "x"}},
		{`NOT_FOUND: site "nowhere"`, []string{"metal", "reject-mac", mac, "--site", "nowhere"}},
		{"INVALID_INPUT: taken: there is a machine m1", []string{"metal", "enroll", "m1", "--pool", "metal", "--driver", "ipmi", "--address", "192.0.2.8", "--credentials", "bmc", "--mac", "52:54:00:00:00:0c"}},
		{"INVALID_INPUT: taken: MAC " + mac + " is machine m1's", []string{"metal", "enroll", "m2", "--pool", "metal", "--driver", "ipmi", "--address", "192.0.2.8", "--credentials", "bmc", "--mac", strings.ToUpper(mac)}},
		{`INVALID_INPUT: product_uuid "123": want 32 hex digits`, []string{"metal", "enroll", "m2", "--pool", "metal", "--driver", "ipmi", "--address", "192.0.2.8", "--credentials", "bmc", "--uuid", "123"}},
	} {
		c.fails(tt.want, tt.args...)
	}
	c.run("", "site", "add", "shed")
	c.fails("INVALID_INPUT: site is missing: MAC 52:54:00:00:00:ee is no machine's, and was found at 0 of 2 sites: name the one whose box is asked (--site)", "pxe", "explain", "52:54:00:00:00:EE")
	c.fails("DRIVER_ERROR: unavailable: the site's box has not enrolled yet (site shed)", "pxe", "explain", mac, "--site", "shed")
}

// TestPrintFound: what a machine says of itself does not steer the terminal.
func TestPrintFound(t *testing.T) {
	var out bytes.Buffer
	err := printFound(&out, []*computev1.FoundMachine{
		{Site: "lab", Mac: "52:54:00:00:00:0a", Macs: []string{"52:54:00:00:00:0a", "52:54:00:00:00:0b"}, ProductUuid: "u", Manufacturer: "Ac\x1b[2Jme", Model: "R1", Serial: "S\n1", Processors: "2 x Xeon",
			MemoryBytes: 33_000_000_000, LastSeenMs: 1, InspectedMs: 2, HardwareJson: "{\"a\":\"\x1b\"}", Proposals: []*computev1.MacProposal{{Machine: "m1", Reason: "it is enrolled with \x1b"}}},
		{Site: "lab", Mac: "52:54:00:00:00:0c", Notes: []string{"two have\r its UUID"}},
	})
	text := out.String()
	if err != nil || strings.ContainsAny(text, "\x1b\r") {
		t.Errorf("printFound = %q, %v", text, err)
	}
	for _, want := range []string{"Ac·[2Jme R1", "S·1", "31 GiB", "52:54:00:00:00:0a,52:54:00:00:00:0b", "seems to be m1: it is enrolled with ·. If it is: better-compute metal confirm-mac m1 52:54:00:00:00:0a\n",
		"52:54:00:00:00:0c: two have· its UUID\n", `{"a":"·"}`} {
		if !strings.Contains(text, want) {
			t.Errorf("printFound = %q, want %q", text, want)
		}
	}
}

func TestPrintExplained(t *testing.T) {
	res := &computev1.ExplainBootResponse{
		Site: "lab", Mac: "52:54:00:00:00:0a", MachineId: "node_1", Machine: "m1", WaitsFor: "the kernel\x1b",
		Answers:  []*computev1.BootAnswer{{Protocol: "tftp", Client: "pxe uefi-x64", Action: "agent", File: "snponly.efi", Reason: "as\x07signed"}, {Client: "pxe bios", Protocol: "dhcp", Action: "deny"}},
		Attempts: []*computev1.BootAttempt{{BeganMs: 1, Interface: "lan0", Steps: []*computev1.BootStep{{AtMs: 2, Stage: "dhcp", Client: "pxe", Detail: "x\ny"}}}, {BeganMs: 3}},
		Syslog:   []string{"<30>hello\x1b[2J"},
	}
	var out bytes.Buffer
	err := printExplained(&out, res)
	text := out.String()
	if err != nil || strings.ContainsAny(text, "\x1b\x07") {
		t.Errorf("printExplained = %q, %v", text, err)
	}
	at := -1
	for _, want := range []string{"52:54:00:00:00:0a at site lab: m1 node_1\n", "waits for: the kernel·\n", "snponly.efi", "as·signed", "pxe bios", "attempt 1, 1970-01-01T00:00:00.001Z on lan0", "x·y", "attempt 2", "syslog\n  <30>hello·[2J\n"} {
		i := strings.Index(text, want)
		if i < at || i < 0 {
			t.Errorf("printExplained = %q, want %q, in its place", text, want)
		}
		at = i
	}
	out.Reset()
	if err := printExplained(&out, &computev1.ExplainBootResponse{Site: "lab", Mac: "m"}); err != nil || !strings.Contains(out.String(), "no machine that the box knows") || !strings.Contains(out.String(), "no attempt in the last hour") || strings.Contains(out.String(), "syslog") {
		t.Errorf("printExplained of nobody = %q, %v", out.String(), err)
	}
}

func TestExpectedOf(t *testing.T) {
	if got, want := expectedOf(" a \r\n#b\n\nc # d\n"), []string{"a", "c"}; !slices.Equal(got, want) {
		t.Errorf("expectedOf = %q, want %q", got, want)
	}
}
