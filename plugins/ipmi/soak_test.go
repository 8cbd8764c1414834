package ipmi

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmctest"
)

// TestSoak asks slow BMCs, with machines that fail and passwords that are wrong,
// for power and boot devices at random, BC_SOAK_IPMI (40) times with seed
// BC_SOAK_SEED: each ends right or in an error with a code, and nothing is done twice.
func TestSoak(t *testing.T) {
	o := realTool(t)
	operations, seed := 40, uint64(1)
	for name, into := range map[string]func(uint64){"BC_SOAK_IPMI": func(n uint64) { operations = int(n) }, "BC_SOAK_SEED": func(n uint64) { seed = n }} {
		if text := os.Getenv(name); text != "" {
			n, err := strconv.ParseUint(text, 10, 63)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			into(n)
		}
	}
	t.Logf("seed %d, %d operations", seed, operations)
	var left, right atomic.Int64
	left.Store(int64(operations))
	var wg sync.WaitGroup
	for n := range uint64(4) {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, n))
			for left.Load() > 0 {
				delay := []time.Duration{0, 0, 300 * time.Millisecond, 1500 * time.Millisecond, 3200 * time.Millisecond}[r.IntN(5)]
				fake := bmctest.NewFake()
				if r.IntN(3) > 0 {
					_ = fake.PowerOn(context.Background(), bmctest.BootDevice{Device: "none"})
				}
				bmc, err := bmctest.StartIPMI(context.Background(), "127.0.0.1:0", user, password, fake, bmctest.Delay(delay), bmctest.OffInterval(time.Millisecond))
				if err != nil {
					t.Error(err)
					return
				}
				var steps []ipmiStep
				for range 1 + r.IntN(5) {
					if left.Add(-1) < 0 {
						break
					}
					s := soakStep(t, o, r, bmc, fake)
					if s.err == nil {
						right.Add(1)
					}
					steps = append(steps, s)
				}
				// What was sent again waits at the BMC for the first one's end, and begins
				// at once after it: a moment shows it.
				time.Sleep(500 * time.Millisecond)
				_ = bmc.Close()
				for _, wrong := range judgeSteps(steps, bmc.Log()) {
					t.Errorf("seed %d, delay %v: %s\n  steps %+v\n  log   %q", seed, delay, wrong, steps, bmc.Log())
				}
			}
		})
	}
	wg.Wait()
	if right.Load()*2 < int64(operations) {
		t.Errorf("%d of %d operations succeeded, want half", right.Load(), operations)
	}
}

// ipmiStep is one operation and what came of it.
type ipmiStep struct {
	operation, arg string
	locked, broken bool // the password is wrong; the machine fails
	before, after  bool // the machine is on
	result         string
	err            error
}

func soakStep(t *testing.T, o options, r *rand.Rand, bmc *bmctest.IPMI, fake *bmctest.Fake) ipmiStep {
	pick := func(list ...string) string { return list[r.IntN(len(list))] }
	s := ipmiStep{operation: pick("power.getPower", "power.setPower", "power.setPower", "power.setPower", "management.setBootDevice", "management.getBootDevice"), before: fake.Running()}
	args := ""
	switch s.operation {
	case "power.setPower":
		s.arg = pick("on", "off", "soft", "cycle", "reset")
		args = strconv.Quote(s.arg)
	case "management.setBootDevice":
		s.arg = pick("pxe", "disk", "cdrom", "bios")
		args = fmt.Sprintf(`{"device":%q,"efi":%v}`, s.arg, r.IntN(2) == 0)
	}
	with := password
	switch r.IntN(6) {
	case 0:
		with, s.locked = "some-other-password", true
	case 1:
		if s.broken = s.operation == "power.setPower"; s.broken {
			fake.Fail(errors.New("the power supply is gone"))
		}
	}
	config := fmt.Sprintf(`{"address":%q,"options":{"cipherSuite":%s}}`, bmc.Addr(), pick("3", "17"))
	s.result, s.err = invokeAs(t, o, with, config, s.operation, args)
	fake.Fail(nil)
	s.after = fake.Running()
	return s
}

// judgeSteps holds what one BMC was asked against its log. It looks at nothing else.
func judgeSteps(steps []ipmiStep, log []string) (wrong []string) {
	say := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	var asked, done []string // power actions: what may be there, and what must
	for _, s := range steps {
		var e *errs.Error
		if s.err != nil && (!errors.As(s.err, &e) || !slices.Contains([]errs.Code{errs.BmcError, errs.Unreachable, errs.Timeout}, e.Code)) {
			say("%s %s: no code that it may have: %v", s.operation, s.arg, s.err)
		}
		if s.err != nil && strings.Contains(s.err.Error(), password) {
			say("%s %s tells the password", s.operation, s.arg)
		}
		if s.operation == "power.getPower" && s.err == nil && s.result != map[bool]string{true: `"on"`, false: `"off"`}[s.before] {
			say("the machine is on: %v, it says %s", s.before, s.result)
		}
		if s.operation != "power.setPower" {
			if s.before != s.after {
				say("%s switched the machine", s.operation)
			}
			continue
		}
		asked = append(asked, s.arg)
		// A machine that is so already is asked for nothing.
		idle := s.before && s.arg == "on" || !s.before && (s.arg == "off" || s.arg == "soft")
		want, seen := map[string]bool{"on": true, "off": false, "cycle": true, "reset": true}[s.arg]
		switch {
		case s.err == nil && (s.locked || s.broken && !idle):
			say("%s succeeded, and could not", s.arg)
		case s.err == nil && seen && s.after != want:
			say("%s succeeded, and the machine is on: %v", s.arg, s.after)
		case s.err == nil && !idle:
			done = append(done, s.arg)
		}
	}
	var did []string
	for _, l := range log {
		if v, _, _ := strings.Cut(l, " "); slices.Contains([]string{"on", "off", "soft", "cycle", "reset"}, v) {
			did = append(did, v)
		}
	}
	if !within(did, asked) {
		say("the BMC did %q, and was asked for %q", did, asked)
	}
	if !within(done, did) {
		say("%q succeeded, and the BMC did %q", done, did)
	}
	return wrong
}

// within reports whether list is what is left of all when some of it is taken out.
func within(list, all []string) bool {
	for _, v := range all {
		if len(list) > 0 && list[0] == v {
			list = list[1:]
		}
	}
	return len(list) == 0
}

// The judge finds each wrong that it is there for.
func TestSoakJudge(t *testing.T) {
	cycle := ipmiStep{operation: "power.setPower", arg: "cycle", before: true, after: true}
	for name, tt := range map[string]struct {
		steps []ipmiStep
		log   []string
		want  string
	}{
		"right":          {[]ipmiStep{cycle}, []string{"cycle none"}, ""},
		"twice":          {[]ipmiStep{cycle}, []string{"cycle none", "cycle none"}, "was asked for"},
		"never":          {[]ipmiStep{cycle}, nil, "succeeded, and the BMC did"},
		"another":        {[]ipmiStep{cycle}, []string{"reset none"}, "was asked for"},
		"wrong end":      {[]ipmiStep{{operation: "power.setPower", arg: "off", before: true, after: true}}, []string{"off"}, "the machine is on"},
		"wrong reading":  {[]ipmiStep{{operation: "power.getPower", before: true, after: true, result: `"off"`}}, nil, "it says"},
		"no code":        {[]ipmiStep{{operation: "power.getPower", err: errors.New("x")}}, nil, "no code"},
		"tells":          {[]ipmiStep{{operation: "power.getPower", err: errs.New(errs.BmcError, "%s", password)}}, nil, "tells"},
		"a wrong login":  {[]ipmiStep{{operation: "power.setPower", arg: "on", after: true, locked: true}}, []string{"on none"}, "could not"},
		"a query's deed": {[]ipmiStep{{operation: "management.getBootDevice", before: true}}, nil, "switched"},
		"failed in time": {[]ipmiStep{{operation: "power.setPower", arg: "cycle", before: true, after: true, err: errs.New(errs.BmcError, "x")}}, []string{"cycle none"}, ""},
	} {
		got := judgeSteps(tt.steps, tt.log)
		if tt.want == "" && len(got) > 0 || tt.want != "" && !strings.Contains(strings.Join(got, "\n"), tt.want) {
			t.Errorf("%s: judgeSteps = %q, want %q", name, got, tt.want)
		}
	}
}
