package redfish

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	bmclib "github.com/bmc-toolbox/bmclib/v2"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/plugins/driver"
)

const taskPath = "/redfish/v1/TaskService/Tasks/1"

// following follows an answer at a BMC whose job answers one after another, the
// last again and again.
func following(t *testing.T, limit time.Duration, j job, first *answer, answers ...http.HandlerFunc) (end outcome, progress []driver.Progress, err error) {
	t.Helper()
	n := 0
	_, b := serve(t, map[string]http.HandlerFunc{"GET " + taskPath: func(w http.ResponseWriter, r *http.Request) {
		h := answers[min(n, len(answers)-1)]
		n++
		h(w, r)
	}})
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	secrets := driver.Delivered{"username": secret.New([]byte("u")), "password": secret.New([]byte("p"))}
	c := driver.NewContext(ctx, secrets, slog.New(slog.DiscardHandler), func(p driver.Progress) { progress = append(progress, p) })
	config, perr := parseConfig(b.raw())
	if perr != nil {
		t.Fatal(perr)
	}
	m := &machine{pool: b.pool, config: config}
	err = m.with(c, func(_ *bmclib.Client, p *provider) error {
		end, err = p.follow(c, first, j)
		return err
	})
	return end, progress, err
}

func accepted(location, body string) *answer {
	return &answer{status: http.StatusAccepted, header: http.Header{"Location": {location}}, body: []byte(body)}
}

func code(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		fmt.Fprint(w, body)
	}
}

func TestTaskEnds(t *testing.T) {
	running, completed := say(`{"TaskState":"Running","PercentComplete":40}`), say(`{"TaskState":"Completed","TaskStatus":"OK","PercentComplete":100}`)
	for _, tt := range []struct {
		name    string
		first   *answer
		answers []http.HandlerFunc
		atBoot  bool
		want    outcome
		fails   string // text of a bmc-error; empty: none
	}{
		{"a task", accepted(taskPath, ""), []http.HandlerFunc{running, completed}, false, outcome{}, ""},
		{"a task in the body", accepted("", `{"@odata.id":"`+taskPath+`","TaskState":"New"}`), []http.HandlerFunc{running, completed}, false, outcome{}, ""},
		{"a task beside 200", &answer{status: 200, header: http.Header{"Location": {taskPath}}}, []http.HandlerFunc{running, completed}, false, outcome{}, ""},
		{"a monitor", accepted(taskPath, ""), []http.HandlerFunc{code(202, ""), code(202, ""), code(204, "")}, false, outcome{}, ""},
		{"a monitor that ends with the result", accepted(taskPath, ""), []http.HandlerFunc{code(202, ""), code(200, `{"Name":"Volume"}`)}, false, outcome{}, ""},
		{"no task", &answer{status: 204, header: http.Header{}}, nil, false, outcome{}, ""},
		{"no task, a new resource", &answer{status: 201, header: http.Header{"Location": {"/redfish/v1/Systems/1/Storage/1/Volumes/1"}}}, nil, false, outcome{}, ""},
		{"a task without a name", accepted("", ""), nil, false, outcome{unseen: true}, ""},
		{"a task of another host", accepted("https://192.0.2.1"+taskPath, ""), nil, false, outcome{unseen: true}, ""},
		{"a task that vanishes", accepted(taskPath, ""), []http.HandlerFunc{running, code(404, "")}, false, outcome{unseen: true}, ""},
		{"a task that was gone at once", accepted(taskPath, ""), []http.HandlerFunc{code(410, "")}, false, outcome{unseen: true}, ""},
		{"a BMC that restarts", accepted(taskPath, ""), []http.HandlerFunc{running, abort, abort, abort, abort, code(503, ""), running, completed}, false, outcome{}, ""},
		{"a Dell job", accepted(taskPath, ""), []http.HandlerFunc{say(`{"JobState":"Running"}`), say(`{"JobState":"Completed","Message":"Job completed successfully."}`)}, false, outcome{}, ""},
		{"a job for the next boot", accepted(taskPath, ""), []http.HandlerFunc{say(`{"JobState":"Scheduled"}`)}, true, outcome{waits: true}, ""},
		{"a task that stays pending", accepted(taskPath, ""), []http.HandlerFunc{say(`{"TaskState":"Pending"}`)}, true, outcome{waits: true}, ""},
		{"a task that is pending at first", accepted(taskPath, ""), []http.HandlerFunc{say(`{"TaskState":"Pending"}`), running, completed}, true, outcome{}, ""},

		{"critical", accepted(taskPath, ""), []http.HandlerFunc{running, say(`{"TaskState":"Completed","TaskStatus":"Critical","Messages":[{"Message":"Slot 3 failed","Severity":"Critical"}]}`)}, false, outcome{}, "Completed but critical: Slot 3 failed"},
		{"a critical message", accepted(taskPath, ""), []http.HandlerFunc{say(`{"TaskState":"Completed","TaskStatus":"OK","Messages":[{"Message":"fine"},{"Message":"bad","MessageSeverity":"Critical"}]}`)}, false, outcome{}, "bad"},
		{"an exception", accepted(taskPath, ""), []http.HandlerFunc{say(`{"TaskState":"Exception","Messages":[{"Message":"it broke\u001b[31m"}]}`)}, false, outcome{}, "Exception: it broke"},
		{"killed", accepted(taskPath, ""), []http.HandlerFunc{say(`{"TaskState":"Killed"}`)}, false, outcome{}, "Killed"},
		{"a failed Dell job", accepted(taskPath, ""), []http.HandlerFunc{say(`{"JobState":"Failed","Message":"Job failed: LC012"}`)}, false, outcome{}, "LC012"},
		{"completed with errors", accepted(taskPath, ""), []http.HandlerFunc{say(`{"JobState":"CompletedWithErrors"}`)}, false, outcome{}, "CompletedWithErrors"},
		{"a monitor that ends with a refusal", accepted(taskPath, ""), []http.HandlerFunc{code(202, ""), code(400, `{"error":{"message":"no such drive"}}`)}, false, outcome{}, "no such drive"},
		{"a monitor that ends with a critical result", accepted(taskPath, ""), []http.HandlerFunc{code(200, `{"@Message.ExtendedInfo":[{"Message":"bad","Severity":"Critical"}]}`)}, false, outcome{}, "bad"},
		{"a success that is critical", &answer{status: 200, header: http.Header{}, body: []byte(`{"@Message.ExtendedInfo":[{"Message":"bad","Severity":"Critical"}]}`)}, nil, false, outcome{}, "bad"},
		{"a monitor that fails", accepted(taskPath, ""), []http.HandlerFunc{code(500, `{"error":{"message":"oops"}}`)}, false, outcome{}, "may go on: status 500: oops"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			end, _, err := following(t, time.Minute, job{doing: "do it", atBoot: tt.atBoot}, tt.first, tt.answers...)
			end.notes = nil
			if end.waits != tt.want.waits || end.unseen != tt.want.unseen {
				t.Errorf("follow() = %+v, want %+v", end, tt.want)
			}
			if (tt.fails == "") != (err == nil) || err != nil && (errs.CodeOf(err) != errs.BmcError || !strings.Contains(err.Error(), tt.fails) || strings.Contains(err.Error(), "\x1b")) {
				t.Errorf("follow() = %v, want bmc-error with %q", err, tt.fails)
			}
		})
	}
}

func abort(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }

// The end of the operation is no end of the task, and the error says so.
func TestTaskOutlastsTheOperation(t *testing.T) {
	for name, endless := range map[string]http.HandlerFunc{"running": say(`{"TaskState":"Running","PercentComplete":12}`), "a monitor": code(202, ""), "away": abort} {
		_, _, err := following(t, 500*time.Millisecond, job{doing: "do it"}, accepted(taskPath, ""), endless)
		if errs.CodeOf(err) != errs.Timeout || !strings.Contains(err.Error(), "goes on") || errs.From(err).Retryable {
			t.Errorf("%s: follow() past the deadline = %v, want timeout, not retryable", name, err)
		}
	}
}

func TestTaskProgress(t *testing.T) {
	_, progress, err := following(t, time.Minute, job{doing: "do it"}, accepted(taskPath, `{"@odata.id":"`+taskPath+`","TaskState":"Running","PercentComplete":10}`),
		say(`{"TaskState":"Running","PercentComplete":40}`), say(`{"TaskState":"Running"}`), say(`{"TaskState":"Completed"}`))
	var done []uint64
	for _, p := range progress {
		if p.Phase == "task" {
			done = append(done, p.Done)
		}
	}
	if err != nil || fmt.Sprint(done) != "[10 40 40 100]" {
		t.Errorf("progress = %v, %v, want 10, 40, 40, 100", done, err)
	}
}

// A look that is cut short says nothing, and the one before it counts.
func TestTaskLastLookCutShort(t *testing.T) {
	p := &provider{conn: &conn{timing: quick}}
	looks := 0
	ok, err := p.until(t.Context(), 50*time.Millisecond, func(ctx context.Context) (bool, error) {
		if looks++; looks == 1 {
			return false, nil
		}
		<-ctx.Done()
		return false, errs.Retry(errs.Unreachable, "cut short")
	})
	if ok || err != nil || looks != 2 {
		t.Errorf("until() = %v, %v after %d looks, want no error", ok, err, looks)
	}
}

func FuzzTask(f *testing.F) {
	f.Add(200, []byte(`{"TaskState":"Completed","TaskStatus":"Critical","Messages":[{"Message":"x","Severity":"Critical"}],"PercentComplete":1e300}`))
	f.Add(202, []byte(`{"JobState":7}`))
	f.Fuzz(func(t *testing.T, status int, body []byte) {
		r := reading(&answer{status: status, header: http.Header{}, body: body})
		if r.percent < 0 || r.percent > 100 || r.done && r.failed != "" || strings.ContainsAny(r.failed+r.state, "\x1b\n\x00") {
			t.Errorf("reading(%d, %q) = %+v", status, body, r)
		}
	})
}
