package grants

import (
	"crypto/ed25519"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// people are approvers with their keys, and a bundle's policy.
type people struct {
	keys        []ed25519.PrivateKey
	threshold   int
	short, long int
}

func newPeople(n, threshold int) *people {
	p := &people{threshold: threshold, short: 5, long: 20}
	for i := range n {
		p.keys = append(p.keys, ed25519.NewKeyFromSeed([]byte(fmt.Sprintf("%032d", i))))
	}
	return p
}

func (p *people) ApproverKey(id string) (ed25519.PublicKey, bool) {
	for _, key := range p.keys {
		if public := key.Public().(ed25519.PublicKey); trust.KeyID(public) == id {
			return public, true
		}
	}
	return nil, false
}
func (p *people) ApproverThreshold() int           { return p.threshold }
func (p *people) QuorumTargets() (short, long int) { return p.short, p.long }

var noon = time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)

func targets(n int) []string {
	var out []string
	for i := range n {
		out = append(out, BMC(fmt.Sprintf("10.0.0.1%02d:623", i)))
	}
	return out
}

func terms(edit func(*agentv1.Grant)) *agentv1.Grant {
	all := targets(10)
	g := &agentv1.Grant{
		GrantId: "grant_1", SiteId: "site_1", Operations: []*agentv1.GrantOperation{{Kind: "bmc.power", Operation: "power.setPower", Action: "off"}},
		TargetsRoot: Root(all), TargetCount: uint32(len(all)), UsesPerTarget: 1, Reason: "rack 4 moves",
		NotBeforeMs: noon.Add(-time.Minute).UnixMilli(), NotAfterMs: noon.Add(time.Hour).UnixMilli(),
	}
	if edit != nil {
		edit(g)
	}
	return g
}

// off is a power off of one target, with a citation of a grant that holds it.
func off(p *people, target int, edit func(*agentv1.Grant)) Command {
	payload, err := proto.MarshalOptions{Deterministic: true}.Marshal(terms(edit))
	if err != nil {
		panic(err)
	}
	all := targets(10)
	c := Command{Kind: "bmc.power", Operation: "power.setPower", Action: "off", Targets: all[target : target+1], Citation: &agentv1.GrantCitation{
		Grant: &agentv1.SignedGrant{Payload: payload}, Targets: []*agentv1.TargetProof{Prove(all, target)},
	}}
	for _, key := range p.keys {
		c.Citation.Grant.Signatures = append(c.Citation.Grant.Signatures, Sign(key, payload))
	}
	return c
}

// used says that a grant was used n times for a target.
func used(grant string, target int, n uint32) func(string, string) uint32 {
	return func(g, t string) uint32 {
		if g == grant && t == targets(target + 1)[target] {
			return n
		}
		return 0
	}
}

// TestCitation holds one good citation against each way in which it can be bad.
func TestCitation(t *testing.T) {
	const fw = "firmware.update"
	digest := strings.Repeat("ab", 32)
	stranger := newPeople(9, 1).keys[8]
	firmware := func(c *Command) { c.Kind, c.Operation, c.Action = "bmc.firmware", fw, "" }
	allowFirmware := func(g *agentv1.Grant) {
		g.Operations = []*agentv1.GrantOperation{{Kind: "bmc.firmware", Operation: fw}}
		g.ArtifactSha256 = []string{digest}
	}
	for name, tt := range map[string]struct {
		edit   func(*agentv1.Grant)
		change func(*Command)
		past   Past
		moment func(*Moment)
		want   string // part of the message; empty: it holds
	}{
		"good": {},
		"good, with more signatures than needed": {change: func(c *Command) {
			c.Citation.Grant.Signatures = append(c.Citation.Grant.Signatures, Sign(stranger, c.Citation.Grant.Payload))
		}},
		"good, always":             {change: func(c *Command) { c.Always = true }},
		"good, two uses":           {edit: func(g *agentv1.Grant) { g.UsesPerTarget = 2 }, past: Past{Used: used("grant_1", 0, 1)}},
		"good, another was used":   {past: Past{Used: used("grant_2", 0, 1)}},
		"good, another target was": {past: Past{Used: used("grant_1", 1, 1)}},
		"good artifact":            {edit: allowFirmware, change: func(c *Command) { firmware(c); c.Artifacts = []string{digest} }},

		"one signature": {change: func(c *Command) { c.Citation.Grant.Signatures = c.Citation.Grant.Signatures[:1] }, want: "signed by 1 different approvers of the trust bundle in force; 2 are needed"},
		"none":          {change: func(c *Command) { c.Citation.Grant.Signatures = nil }, want: "signed by 0"},
		"one approver twice": {change: func(c *Command) {
			s := c.Citation.Grant.Signatures
			s[1] = s[0]
		}, want: "signed by 1"},
		"one approver under two ids": {change: func(c *Command) {
			s := c.Citation.Grant.Signatures
			s[1] = &agentv1.Signature{KeyId: strings.ToUpper(s[0].KeyId), Signature: s[0].Signature}
		}, want: "signed by 1"},
		"a flipped signature byte": {change: func(c *Command) { c.Citation.Grant.Signatures[1].Signature[7] ^= 1 }, want: "does not fit the grant"},
		"a stranger's signature": {change: func(c *Command) {
			c.Citation.Grant.Signatures[1] = Sign(stranger, c.Citation.Grant.Payload)
		}, want: "is no approver's"},
		"a command's signature": {change: func(c *Command) {
			c.Citation.Grant.Signatures[1].Signature = ed25519.Sign(newPeople(2, 2).keys[1], append([]byte("bettercompute.command.v1\x00"), c.Citation.Grant.Payload...))
		}, want: "signed by 1"},
		"a changed payload":       {change: func(c *Command) { c.Citation.Grant.Payload[len(c.Citation.Grant.Payload)-1] ^= 1 }, want: "signed by 0"},
		"no grant":                {change: func(c *Command) { c.Citation = &agentv1.GrantCitation{} }, want: "signed by 0"},
		"an unknown field":        {edit: func(g *agentv1.Grant) { g.ProtoReflect().SetUnknown([]byte{0xa0, 0x06, 1}) }, want: "does not know"},
		"another site":            {edit: func(g *agentv1.Grant) { g.SiteId = "site_2" }, want: "for site site_2"},
		"another action":          {change: func(c *Command) { c.Action = "cycle" }, want: "does not allow bmc.power:power.setPower:cycle"},
		"no action":               {change: func(c *Command) { c.Action = "" }, want: "does not allow bmc.power:power.setPower"},
		"another operation":       {change: func(c *Command) { c.Operation = "management.resetBmc" }, want: "does not allow"},
		"another kind":            {change: func(c *Command) { c.Kind = "driver.invoke" }, want: "does not allow driver.invoke"},
		"another artifact":        {edit: allowFirmware, change: func(c *Command) { firmware(c); c.Artifacts = []string{digest, "https://evil.example/fw"} }, want: "does not allow the artifact"},
		"an artifact left unsaid": {edit: allowFirmware, change: firmware, want: "does not say which"},
		"not yet": {edit: func(g *agentv1.Grant) {
			g.NotBeforeMs = noon.Add(time.Second).UnixMilli()
		}, want: "begins at"},
		"expired":                      {edit: func(g *agentv1.Grant) { g.NotAfterMs = noon.UnixMilli() }, want: "ended at"},
		"expired, by a clock set back": {moment: func(m *Moment) { m.Latest = noon.Add(2 * time.Hour) }, want: "ended at"},
		"forgotten":                    {past: Past{Forgotten: noon.Add(time.Hour).UnixMilli()}, want: "may have been used"},
		"too long":                     {edit: func(g *agentv1.Grant) { g.NotAfterMs = noon.Add(MaxLife).UnixMilli() }, want: "within 168h"},
		"used up":                      {past: Past{Used: used("grant_1", 0, 1)}, want: "is used up for the target bmc:10.0.0.100:623: 1 of 1"},
		"another target":               {change: func(c *Command) { c.Targets = targets(2)[1:] }, want: "is not cited for the target bmc:10.0.0.101:623"},
		"one target of two":            {change: func(c *Command) { c.Targets = targets(2) }, want: "is not cited for the target"},
		"a target that it does not hold": {change: func(c *Command) {
			c.Targets = []string{BMC("10.0.0.200:623")}
			c.Citation.Targets[0].Target = c.Targets[0]
		}, want: "does not hold the target"},
		"a target that no grant can hold": {change: func(c *Command) { c.Targets = []string{"key:x"} }, want: "no target that a grant could name"},
		"no proofs":                       {change: func(c *Command) { c.Citation.Targets = nil }, want: "is not cited"},
		"a proof cut short":               {change: func(c *Command) { c.Citation.Targets[0].Path = c.Citation.Targets[0].Path[1:] }, want: "does not hold"},
		"no reason":                       {edit: func(g *agentv1.Grant) { g.Reason = " " }, want: "reason"},
		"a reason that hides another":     {edit: func(g *agentv1.Grant) { g.Reason = "harmless\x1b[2K" }, want: "reason"},
		"a reason written backwards":      {edit: func(g *agentv1.Grant) { g.Reason = "harmless\u202e" }, want: "reason"},
		"no uses":                         {edit: func(g *agentv1.Grant) { g.UsesPerTarget = 0 }, want: "uses"},
		"no operations":                   {edit: func(g *agentv1.Grant) { g.Operations = nil }, want: "operations"},
		"a root of another length":        {edit: func(g *agentv1.Grant) { g.TargetsRoot = g.TargetsRoot[1:] }, want: "targets_root"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPeople(2, 2)
			c := off(p, 0, tt.edit)
			if tt.change != nil {
				tt.change(&c)
			}
			m := Moment{SiteID: "site_1", Now: noon, Latest: noon}
			if tt.moment != nil {
				tt.moment(&m)
			}
			use, err := Judge(c, p, tt.past, m)
			switch {
			case tt.want == "" && (err != nil || use.Grant != "grant_1" || use.Ends != terms(tt.edit).NotAfterMs || !slices.Equal(use.Targets, c.Targets)):
				t.Errorf("Judge = %+v, %v, want a use of grant_1", use, err)
			case tt.want != "" && (errs.CodeOf(err) != errs.GrantInvalid || !strings.Contains(err.Error(), tt.want)):
				t.Errorf("Judge = %+v, %v, want grant-invalid with %q", use, err, tt.want)
			}
		})
	}
}

// TestWindows counts without grants.
func TestWindows(t *testing.T) {
	const h = time.Hour
	each := func(age time.Duration, n int) map[string]time.Duration {
		out := map[string]time.Duration{}
		for _, target := range targets(n) {
			out[target] = age
		}
		return out
	}
	command := func(targets ...string) Command {
		return Command{Kind: "bmc.power", Operation: "power.setPower", Action: "off", Targets: targets}
	}
	last := targets(100)[99]
	for name, tt := range map[string]struct {
		past   Past
		c      Command
		policy func(*people)
		want   string // part of the message; empty: it may
	}{
		"the first":                    {c: command(last)},
		"the fourth":                   {past: Past{Age: h, Counted: each(h, 3)}, c: command(last)},
		"the fifth":                    {past: Past{Age: h, Counted: each(h, 4)}, c: command(last), want: "touched 4 distinct targets in the last 10 minutes"},
		"one of the four again":        {past: Past{Age: h, Counted: each(h, 4)}, c: command(targets(1)...)},
		"five at once":                 {c: command(targets(5)...), want: "it would be 5"},
		"four at once":                 {c: command(targets(4)...)},
		"just inside ten minutes":      {past: Past{Age: h, Counted: each(h-ShortWindow+1, 4)}, c: command(last), want: "10 minutes"},
		"ten minutes later":            {past: Past{Age: h, Counted: each(h-ShortWindow, 4)}, c: command(last)},
		"the twentieth in a day":       {past: Past{Age: 30 * h, Counted: each(7*h, 19)}, c: command(last), want: "touched 19 distinct targets in the last 24 hours"},
		"the twentieth, a day later":   {past: Past{Age: 30 * h, Counted: each(6*h, 19)}, c: command(last)},
		"a policy of two":              {past: Past{Age: h, Counted: each(h, 1)}, c: command(last), policy: func(p *people) { p.short = 2 }, want: "from 2 on"},
		"a policy of one":              {c: command(last), policy: func(p *people) { p.long = 1 }, want: "24 hours"},
		"always":                       {c: Command{Kind: "bmc.firmware", Operation: "firmware.update", Always: true, Targets: targets(1)}, want: "always"},
		"a lost memory":                {past: Past{Age: h, Lost: 25 * h}, c: command(last), want: "another 24h0m0s of its running time"},
		"a memory lost a day ago":      {past: Past{Age: 25 * h, Lost: 25 * h}, c: command(last)},
		"targets that no grant names":  {past: Past{Age: h, Counted: map[string]time.Duration{"key:a": h, "key:b": h, "key:c": h, "config:d": h}}, c: command("key:e"), want: "it would be 5"},
		"ages that lie ahead count on": {past: Past{Age: h, Counted: each(40*h, 4)}, c: command(last), want: "10 minutes"},
	} {
		p := newPeople(3, 2)
		if tt.policy != nil {
			tt.policy(p)
		}
		use, err := Judge(tt.c, p, tt.past, Moment{SiteID: "site_1", Now: noon, Latest: noon})
		if tt.want == "" {
			if err != nil || use.Grant != "" || use.Age != tt.past.Age || !slices.Equal(use.Targets, tt.c.Targets) {
				t.Errorf("%s: Judge = %+v, %v, want it counted", name, use, err)
			}
			continue
		}
		if errs.CodeOf(err) != errs.QuorumRequired || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "better-compute grant propose --allow "+tt.c.Allow()+" ") ||
			!strings.Contains(err.Error(), "2 of the approvers") {
			t.Errorf("%s: Judge = %+v, %v, want quorum-required with %q and what to do", name, use, err, tt.want)
		}
	}
}

// TestNamesCountEachTime: one host name can lead to a thousand BMCs.
func TestNamesCountEachTime(t *testing.T) {
	p := newPeople(2, 2)
	past := Past{Age: time.Hour, Counted: map[string]time.Duration{}}
	judge := func(id string, targets ...string) (Use, error) {
		use, err := Judge(Command{ID: id, Kind: "bmc.power", Operation: "power.setPower", Action: "off", Targets: targets}, p, past, Moment{SiteID: "site_1", Now: noon, Latest: noon})
		for _, target := range use.Targets {
			past.Counted[target] = past.Age
		}
		return use, err
	}
	// What is no host counts once, however often it is used.
	for n := range 9 {
		for _, target := range []string{BMC("10.0.0.1:623"), BMC("[::1]:443"), BMC("52:54:00:ab:cd:ef")} {
			if use, err := judge(fmt.Sprint("cmd_", n), target); err != nil || !slices.Equal(use.Targets, []string{target}) {
				t.Fatalf("Judge(%s) = %+v, %v, want it counted as it is", target, use, err)
			}
		}
	}
	if _, err := judge("cmd_10", BMC("bmc.example:623")); err != nil {
		t.Errorf("the first use of a name: %v", err)
	}
	if _, err := judge("cmd_11", BMC("bmc.example:623")); errs.CodeOf(err) != errs.QuorumRequired || !strings.Contains(err.Error(), "a host name counts each time") {
		t.Errorf("its second use, beside three addresses: %v, want quorum-required", err)
	}
	// A grant names it as it is.
	name := []string{BMC("bmc.example:623")}
	c := off(p, 0, func(g *agentv1.Grant) { g.TargetsRoot, g.TargetCount = Root(name), 1 })
	c.Targets, c.Citation.Targets = name, []*agentv1.TargetProof{Prove(name, 0)}
	if use, err := Judge(c, p, past, Moment{SiteID: "site_1", Now: noon, Latest: noon}); err != nil || !slices.Equal(use.Targets, name) {
		t.Errorf("Judge of a granted name = %+v, %v", use, err)
	}
}

func TestSorted(t *testing.T) {
	got, err := Sorted([]string{"machine:b", "bmc:x:1", "machine:b", "machine:a"})
	if want := []string{"bmc:x:1", "machine:a", "machine:b"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("Sorted = %v, %v, want %v", got, err, want)
	}
	for _, bad := range [][]string{nil, {""}, {"bmc:"}, {"machine"}, {"site:x"}, {"bmc:a b"}, {"bmc:\u00e4"}, {"machine:\x1b[m"}, {"bmc:" + strings.Repeat("x", 400)}} {
		if got, err := Sorted(bad); errs.CodeOf(err) != errs.GrantInvalid {
			t.Errorf("Sorted(%q) = %v, %v, want grant-invalid", bad, got, err)
		}
	}
}

// FuzzParse: what Parse takes is encoded again to what it takes, and no bytes make
// a citation pass that nobody signed.
func FuzzParse(f *testing.F) {
	good, _ := Encode(terms(nil))
	f.Add(good)
	f.Add([]byte{})
	f.Add(good[:len(good)-3])
	p := newPeople(2, 2)
	f.Fuzz(func(t *testing.T, payload []byte) {
		g, err := Parse(payload)
		if err != nil {
			if errs.CodeOf(err) != errs.GrantInvalid {
				t.Errorf("Parse = %v, want grant-invalid", err)
			}
		} else if again, err := Encode(g); err != nil {
			t.Errorf("Encode(Parse(%x)) = %x, %v", payload, again, err)
		}
		c := off(p, 0, nil)
		if c.Citation.Grant.Payload = payload; !slices.Equal(payload, good) {
			if use, err := Judge(c, p, Past{}, Moment{SiteID: "site_1", Now: noon, Latest: noon}); err == nil {
				t.Errorf("Judge of unsigned bytes = %+v", use)
			}
		}
		if g, err := Parse(payload); err == nil {
			// Signed by everybody, what it says decides, and nothing panics.
			c := off(p, 0, nil)
			c.Citation.Grant = &agentv1.SignedGrant{Payload: payload, Signatures: []*agentv1.Signature{Sign(p.keys[0], payload), Sign(p.keys[1], payload)}}
			if use, err := Judge(c, p, Past{}, Moment{SiteID: "site_1", Now: noon, Latest: noon}); err == nil && (use.Grant != g.GrantId || !Allows(g, c.Kind, c.Operation, c.Action)) {
				t.Errorf("Judge = %+v for a grant %v", use, g)
			}
		}
	})
}

// TestGrantsHoldNoUnknown: what no grant can hold counts in the windows though one
// covers the rest of the command: the id of a machine is only what the sender says.
func TestGrantsHoldNoUnknown(t *testing.T) {
	p := newPeople(2, 2)
	m := Moment{SiteID: "site_1", Now: noon, Latest: noon}
	c := off(p, 0, func(g *agentv1.Grant) { g.UsesPerTarget = 9 })
	c.Targets = append(slices.Clone(c.Targets), "config:e")
	past := Past{Age: time.Hour, Counted: map[string]time.Duration{"config:a": time.Hour, "config:b": time.Hour, "config:c": time.Hour}}
	use, err := Judge(c, p, past, m)
	if err != nil || use.Grant != "grant_1" || !slices.Equal(use.InWindows(), []string{"config:e"}) {
		t.Errorf("the fourth unknown: Judge = %+v, %v, want a use of grant_1 that counts config:e", use, err)
	}
	past.Counted["config:d"] = time.Hour
	if _, err := Judge(c, p, past, m); errs.CodeOf(err) != errs.QuorumRequired {
		t.Errorf("the fifth unknown: Judge = %v, want quorum-required", err)
	}
	c.Targets = c.Targets[:1]
	if use, err := Judge(c, p, past, m); err != nil || len(use.InWindows()) != 0 {
		t.Errorf("nothing unknown: Judge = %+v, %v, want a use that counts nothing", use, err)
	}
	for _, tt := range []struct {
		age       time.Duration
		forgotten int64
		want      bool
	}{{time.Hour, 0, true}, {time.Hour, 9, true}, {26 * time.Hour, 0, true}, {26 * time.Hour, 9, false}} {
		if got := (Use{Age: time.Hour, Grant: "grant_1", Ends: 9, Counted: []string{"config:e"}}).Keep(tt.age, tt.forgotten); got != tt.want {
			t.Errorf("Keep(%s, %d) = %v, want %v", tt.age, tt.forgotten, got, tt.want)
		}
	}
}
