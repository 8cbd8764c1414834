package process

import (
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

func TestParseConfig(t *testing.T) {
	for text, want := range map[string]string{
		`{"argv":["/bin/x","a b"]}`: "",
		`{"argv":["/bin/x"],"env":{"A":"1"},"dir":"/srv","user":"nobody","restart":"never","stop_timeout":"1m","limits":{"pids_max":8,"cpu_max":0.5,"memory_max_bytes":8388608}}`: "",
		`{}`:                                           "argv is missing",
		`{"argv":["bin/x"]}`:                           "absolute",
		`{"argv":["/bin/../x"]}`:                       "absolute",
		`{"argv":["/bin/x","a\u0000b"]}`:               "zero byte",
		`{"argv":["/bin/x"],"shell":true}`:             "unknown field",
		`{"argv":["/bin/x"]} {}`:                       "follows",
		`{"argv":["/bin/x"],"restart":"sometimes"}`:    "restart",
		`{"argv":["/bin/x"],"stop_timeout":"11m"}`:     "stop_timeout",
		`{"argv":["/bin/x"],"stop_timeout":"soon"}`:    "stop_timeout",
		`{"argv":["/bin/x"],"dir":"srv"}`:              "dir",
		`{"argv":["/bin/x"],"env":{"A=B":"1"}}`:        "env",
		`{"argv":["/bin/x"],"env":{"BC_RUN":"1"}}`:     "env",
		`{"argv":["/bin/x"],"limits":{"pids_max":-1}}`: "limits",
		// Within these the gate itself does not come to the program.
		`{"argv":["/bin/x"],"limits":{"pids_max":7}}`:                  "limits",
		`{"argv":["/bin/x"],"limits":{"memory_max_bytes":8388607}}`:    "limits",
		`{"argv":["/bin/x"],"limits":{"memory_max_bytes":1}}`:          "limits",
		`{"argv":["/bin/x"],"limits":{"cpu_max":0.001}}`:               "limits",
		`{"argv":["/bin/x"],"user":"` + strings.Repeat("u", 65) + `"}`: "user",
		`[`: "EOF",
	} {
		_, err := ParseConfig([]byte(text))
		switch {
		case want == "" && err != nil:
			t.Errorf("ParseConfig(%s) = %v, want none", text, err)
		case want != "" && (errs.CodeOf(err) != errs.InvalidConfig || !strings.Contains(err.Error(), want)):
			t.Errorf("ParseConfig(%s) = %v, want %q", text, err, want)
		}
	}
	c, err := ParseConfig([]byte(`{"argv":["/bin/x"]}`))
	if d, _ := c.stopTimeout(); err != nil || c.Restart != always || c.Dir != "/" || d != defaultStop {
		t.Errorf("defaults = %+v, %v", c, err)
	}
}

func TestOOMKills(t *testing.T) {
	for text, want := range map[string]uint64{
		"low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n": 2, "oom_kill 0\n": 0, "oom_kill x\n": 0, "": 0, "oom_kill_x 3\n": 0,
	} {
		if got := oomKills([]byte(text)); got != want {
			t.Errorf("oomKills(%q) = %d, want %d", text, got, want)
		}
	}
	if got := (ended{Known: true, Signal: "SIGKILL", OutOfMemory: true}).String(); !strings.Contains(got, "SIGKILL") || !strings.Contains(got, "memory limit") {
		t.Errorf("an end for memory reads %q", got)
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add([]byte(`{"argv":["/bin/x"],"env":{"A":"1"},"limits":{"pids_max":50}}`))
	f.Add([]byte(`{"argv":[]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if c, err := ParseConfig(data); err == nil && (len(c.Argv) == 0 || c.Argv[0][0] != '/') {
			t.Errorf("ParseConfig(%q) = %+v", data, c)
		}
	})
}

func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"spec":{"id":"d","generation":1,"config":{"argv":["/bin/true"]}},"run":{"pid":7,"start":1,"boot":"b","mark":"m"}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if rec, err := parseRecord(data); err == nil && (rec.Spec.ID == "" || rec.Run != nil && rec.Run.PID <= 1) {
			t.Errorf("parseRecord(%q) = %+v", data, rec)
		}
	})
}
