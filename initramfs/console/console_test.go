package console

import (
	"bytes"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestNames(t *testing.T) {
	for in, want := range map[string][]string{
		"tty0 ttyS0\n":   {"tty1", "ttyS0"},
		"tty1 tty0 hvc0": {"tty1", "hvc0"},
		"":               nil,
	} {
		if got := Names(in); !reflect.DeepEqual(got, want) {
			t.Errorf("Names(%q) = %v, want %v", in, got, want)
		}
	}
}

func TestWriteReachesAll(t *testing.T) {
	var a, b bytes.Buffer
	c := New(&a, &b)
	fmt.Fprintln(c, "one\ntwo")
	c.Drain(time.Second)
	fmt.Fprintln(c, "late") // a service that did not end must not bring PID 1 down
	c.Drain(time.Second)
	if a.String() != "one\r\ntwo\r\n" || a.String() != b.String() {
		t.Errorf("consoles show %q and %q", a.String(), b.String())
	}
}

// stuck never takes a byte.
type stuck struct{ never chan struct{} }

func (s stuck) Write(b []byte) (int, error) { <-s.never; return len(b), nil }

func TestStuckConsoleHoldsNothingUp(t *testing.T) {
	var good bytes.Buffer
	s := stuck{make(chan struct{})}
	c := New(s, &good)
	for i := range 3 * queueLines {
		fmt.Fprintf(c, "line %d\n", i)
		if i%64 == 0 {
			time.Sleep(time.Millisecond) // lets the good one keep up
		}
	}
	c.Drain(200 * time.Millisecond)
	close(s.never)
	c.wg.Wait()
	if !strings.Contains(good.String(), "line 0\r\n") {
		t.Error("the working console shows nothing")
	}
}
