package supervise

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/backoff"
)

// The tests reap every child of their process, so each runs in one of its own.
func TestMain(m *testing.M) {
	if name := os.Getenv("SUPERVISE_CASE"); name != "" {
		// orphans come to us, as they come to PID 1
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		if err := cases[name](); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestCases(t *testing.T) {
	for name := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command("/proc/self/exe")
			cmd.Env = append(os.Environ(), "SUPERVISE_CASE="+name)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}

// lines keeps what is written and said.
type lines struct {
	mu   sync.Mutex
	text []string
}

func (l *lines) Write(b []byte) (int, error) {
	l.say("%s", strings.TrimSpace(string(b)))
	return len(b), nil
}
func (l *lines) say(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text = append(l.text, fmt.Sprintf(format, args...))
}
func (l *lines) count(part string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, t := range l.text {
		if strings.Contains(t, part) {
			n++
		}
	}
	return n
}

// quiet is for panics that do not come.
func quiet(string, ...any) {}

func until(what string, ok func() bool) error {
	for range 500 {
		if ok() {
			return nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	return fmt.Errorf("%s did not come about", what)
}

type writer func([]byte)

func (w writer) Write(b []byte) (int, error) { w(b); return len(b), nil }

var cases = map[string]func() error{
	"run": func() error {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		c := Reap(ctx, quiet)
		code, out, err := c.Run(ctx, "/bin/sh", "-c", "echo hello; exit 3")
		if err != nil || code != 3 || out != "hello\n" {
			return fmt.Errorf("Run = %d, %q, %v", code, out, err)
		}
		if code, _, err := c.Run(ctx, "/bin/sh", "-c", "kill -9 $$"); err != nil || code != 137 {
			return fmt.Errorf("Run of a killed command = %d, %v, want 137", code, err)
		}
		if _, _, err := c.Run(ctx, "/bin/none"); err == nil {
			return fmt.Errorf("Run(/bin/none) = nil, want an error")
		}
		short, stop := context.WithTimeout(ctx, 100*time.Millisecond)
		defer stop()
		if _, _, err := c.Run(short, "/bin/sleep", "60"); err == nil {
			return fmt.Errorf("Run past its time = nil, want an error")
		}
		return nil
	},
	"orphans are reaped": func() error {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		c := Reap(ctx, quiet)
		_, out, err := c.Run(ctx, "/bin/sh", "-c", "sleep 0.1 >/dev/null 2>&1 & echo $!")
		if err != nil {
			return err
		}
		return until("the orphan's end", func() bool {
			_, err := os.Stat("/proc/" + strings.TrimSpace(out))
			return os.IsNotExist(err)
		})
	},
	"a service that ends is started again": func() error {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		c := Reap(ctx, quiet)
		var l lines
		done := make(chan struct{})
		go func() {
			defer close(done)
			Service{Name: "bcd", Argv: []string{"/bin/sh", "-c", "echo up; exit 7"}, Console: &l, Say: l.say,
				Backoff: backoff.Policy{Min: 10 * time.Millisecond, Max: 20 * time.Millisecond}, Steady: time.Minute, Grace: time.Second}.Run(ctx, c)
		}()
		if err := until("three starts", func() bool { return l.count("up") >= 3 }); err != nil {
			return err
		}
		if l.count("bcd: failed: ended with exit code 7") == 0 {
			return fmt.Errorf("said %q", l.text)
		}
		stop, over := context.WithTimeout(context.Background(), 3*time.Second)
		defer over()
		go cancel()
		select {
		case <-done:
			return nil
		case <-stop.Done():
			return fmt.Errorf("Run did not end with its context")
		}
	},
	"a service that cannot start is tried again": func() error {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		var l lines
		go Service{Name: "bcd", Argv: []string{"/bin/none"}, Console: &l, Say: l.say, Backoff: backoff.Policy{Min: time.Millisecond, Max: time.Millisecond}}.Run(ctx, Reap(ctx, quiet))
		return until("repeats", func() bool { return l.count("no such file") > 2 })
	},
	"panics of what it calls end nothing": func() error {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		c := Reap(ctx, quiet)
		var l lines
		var mu sync.Mutex
		var reasons []string
		written := 0
		go Service{Name: "bcd", Argv: []string{"/bin/sh", "-c", "echo one; sleep 1.2; echo two; exit 3"}, Say: l.say, Grace: time.Second,
			Backoff: backoff.Policy{Min: time.Millisecond, Max: time.Millisecond},
			Console: writer(func(b []byte) {
				mu.Lock()
				written++
				first := written == 1
				mu.Unlock()
				if first {
					panic("console")
				}
				l.Write(b)
			}),
			Started: func() { panic("started") },
			Failed: func(reason string) {
				mu.Lock()
				defer mu.Unlock()
				reasons = append(reasons, reason)
			},
		}.Run(ctx, c)
		if err := until("a second start", func() bool { return l.count("bcd: panic: started") >= 2 }); err != nil {
			return fmt.Errorf("%w: %q", err, l.text)
		}
		mu.Lock()
		defer mu.Unlock()
		if l.count("bcd: panic: console") != 1 || l.count("two") == 0 || len(reasons) == 0 || reasons[0] != "ended with exit code 3" {
			return fmt.Errorf("said %q, reasons %q", l.text, reasons)
		}
		return nil
	},
	"stop is polite, then not": func() error {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		c := Reap(ctx, quiet)
		var l lines
		inner, stop := context.WithCancel(ctx)
		defer stop()
		done := make(chan struct{})
		go func() {
			defer close(done)
			Service{Name: "bcd", Argv: []string{"/bin/sh", "-c", "trap 'echo asked' TERM; echo up; while :; do sleep 0.05; done"}, Console: &l, Say: l.say, Steady: time.Minute, Grace: 300 * time.Millisecond}.Run(inner, c)
		}()
		if err := until("start", func() bool { return l.count("up") == 1 }); err != nil {
			return err
		}
		stop()
		<-done
		if l.count("asked") != 1 {
			return fmt.Errorf("the service was not asked: %q", l.text)
		}
		return nil
	},
	"a line without end is cut": func() error {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		var l lines
		go Service{Name: "x", Argv: []string{"/bin/sh", "-c", "head -c 100000 /dev/zero | tr '\\0' x; echo; echo after; sleep 9"}, Console: &l, Say: l.say, Steady: time.Minute}.Run(ctx, Reap(ctx, quiet))
		if err := until("the line after", func() bool { return l.count("after") == 1 }); err != nil {
			return err
		}
		if l.count("xxx") != 1 {
			return fmt.Errorf("the long line came %d times", l.count("xxx"))
		}
		return nil
	},
}

func TestDescribe(t *testing.T) {
	for s, want := range map[syscall.WaitStatus]string{7 << 8: "exit code 7", 9: "killed by signal SIGKILL"} {
		if got := Describe(s); got != want {
			t.Errorf("Describe(%#x) = %q, want %q", s, got, want)
		}
	}
}
