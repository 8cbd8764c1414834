package host_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/host"
	"github.com/better-compute/site-appliance/plugins/host/hosttest"
)

// loops is how often the kill tests kill: BC_KILL_LOOPS, or 20.
func loops(t *testing.T) int {
	t.Helper()
	text := os.Getenv("BC_KILL_LOOPS")
	if text == "" {
		return 20
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("BC_KILL_LOOPS = %q, want a number", text)
	}
	return n
}

// killConfig is a host whose plugin has a uid that no other test uses, so that
// whatever runs with it is an orphan of this one.
func killConfig(t *testing.T, uid int) host.Config {
	t.Helper()
	hosttest.NeedsRoot(t)
	d := hosttest.NewDir(t)
	d.Add("echo", hosttest.Self(t))
	c := d.Config()
	c.User = strconv.Itoa(uid)
	c.Cgroup = filepath.Join(unifiedCgroup(t), "plugins")
	c.Log = slog.New(slog.DiscardHandler)
	c.Backoff = backoff.Policy{Min: time.Millisecond, Max: 4 * time.Millisecond}
	c.ShutdownGrace = time.Second
	t.Cleanup(func() { os.Remove(c.Cgroup) })
	return c
}

// running counts the processes of a uid; those that only wait to be reaped do not count.
func running(t *testing.T, uid int) (list []string) {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if strings.Contains(string(text), fmt.Sprintf("\nUid:\t%d\t", uid)) && !gone(pid) {
			name, _, _ := strings.Cut(string(text), "\n")
			list = append(list, e.Name()+" "+name)
		}
	}
	return list
}

// nothingLeft checks what must not outlive a host.
func nothingLeft(t *testing.T, c host.Config, uid int) {
	t.Helper()
	eventually(t, "no process is left", func() bool { return len(running(t, uid)) == 0 })
	for _, p := range running(t, uid) {
		t.Errorf("left: process %s", p)
	}
	for _, name := range left(t, c.SocketRoot) {
		t.Errorf("left: %s in the folder of sockets", name)
	}
	groups, _ := filepath.Glob(filepath.Join(c.Cgroup, "plugin-*"))
	for _, g := range groups {
		t.Errorf("left: cgroup %s", g)
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// TestKillHost kills a host under load again and again, with descendants that
// left the plugin's group. The next one sweeps, and the last one leaves nothing.
func TestKillHost(t *testing.T) {
	const uid = 61701
	c := killConfig(t, uid)
	for range loops(t) {
		killedHost(t, c, "escape escape:1 spawn", 4)
	}
	h, err := host.Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	if got := running(t, uid); len(got) != 1 {
		t.Errorf("the last host runs %v, want its plugin alone", got)
	}
	h.Close()
	nothingLeft(t, c, uid)
}

// TestKillPlugin kills a plugin under load again and again. Calls fail with what
// a caller may repeat, and nothing is left: no process, folder, descriptor,
// cgroup, goroutine.
func TestKillPlugin(t *testing.T) {
	const uid = 61702
	c := killConfig(t, uid)
	// What the first host of a process opens for good does not count.
	warm, err := host.Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	warm.Close()
	settle := func() (fds, goroutines int) {
		// Idle connections end by themselves.
		fds, goroutines = descriptors(t), runtime.NumGoroutine()
		for range 20 {
			time.Sleep(10 * time.Millisecond)
			fds, goroutines = min(fds, descriptors(t)), min(goroutines, runtime.NumGoroutine())
		}
		return fds, goroutines
	}
	fds, goroutines := settle()

	h, err := host.Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var load sync.WaitGroup
	var answered, failed atomic.Int64
	for i := range 4 {
		load.Go(func() {
			operation := []string{"echo", "progress", "spawn", "escape"}[i]
			pause := time.Millisecond
			if i > 1 {
				// What they leave is reaped by the machine's own first process.
				pause = 20 * time.Millisecond
			}
			for ctx.Err() == nil {
				_, err := h.Invoke(ctx, host.Call{Driver: "echo", Kind: "echo", Operation: operation, Args: json.RawMessage("[]")})
				var e *errs.Error
				switch {
				case err == nil:
					answered.Add(1)
				case errors.As(err, &e) && (e.Code == errs.Unavailable || e.Code == errs.Unreachable) && e.Retryable:
					failed.Add(1)
				case ctx.Err() == nil:
					t.Errorf("%s: %v, want an answer or a retryable error", operation, err)
					return
				}
				time.Sleep(pause)
			}
		})
	}
	for n := range loops(t) {
		var pid int
		eventually(t, "the plugin runs", func() bool {
			s := status(t, h, "echo")
			pid = s.PID
			return s.State == "running" && s.Restarts == n
		})
		before := answered.Load()
		eventually(t, "calls are answered", func() bool { return answered.Load() > before })
		if t.Failed() {
			break
		}
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	stop()
	load.Wait()
	h.Close()
	t.Logf("%d calls answered, %d failed", answered.Load(), failed.Load())
	nothingLeft(t, c, uid)
	eventually(t, "descriptors and goroutines are those of before", func() bool {
		return descriptors(t) <= fds && runtime.NumGoroutine() <= goroutines
	})
	if t.Failed() {
		stacks := make([]byte, 1<<20)
		t.Logf("%d descriptors, %d before; %d goroutines, %d before\n%s", descriptors(t), fds, runtime.NumGoroutine(), goroutines, stacks[:runtime.Stack(stacks, true)])
	}
}
