package lab

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Process is a program that the lab started and will end.
type Process struct {
	Name string
	Log  string // file with its output
	cmd  *exec.Cmd
	done chan struct{}
	err  error
}

// spawner starts every process from one thread that lives as long as the lab,
// since a death signal follows the thread that forked.
type spawner struct {
	start chan func()
	stop  chan struct{}
	mu    sync.Mutex
	procs []*Process
	runs  map[string]int
}

func newSpawner() *spawner {
	s := &spawner{start: make(chan func()), stop: make(chan struct{}), runs: map[string]int{}}
	go func() {
		runtime.LockOSThread()
		for {
			select {
			case f := <-s.start:
				f()
			case <-s.stop:
				return
			}
		}
	}()
	return s
}

// run starts argv with its output in a log file of its own: name-1.log for the first run of that name.
func (s *spawner) run(name, dir string, env []string, argv ...string) (*Process, error) {
	s.mu.Lock()
	s.runs[name]++
	run := s.runs[name]
	s.mu.Unlock()
	p := &Process{Name: name, Log: filepath.Join(dir, fmt.Sprintf("%s-%d.log", name, run)), done: make(chan struct{})}
	log, err := os.Create(p.Log)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	p.cmd = exec.Command(argv[0], argv[1:]...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.Env = append(os.Environ(), env...)
	// A group of its own, so that a Ctrl-C at the terminal reaches only us;
	// killed with us, should we die.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	s.start <- func() { started <- p.cmd.Start() }
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	s.mu.Lock()
	s.procs = append(s.procs, p)
	s.mu.Unlock()
	return p, nil
}

// Stop ends the process: SIGTERM, and SIGKILL to its group after 10 s.
func (p *Process) Stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(10 * time.Second):
	}
	p.Kill()
}

// Kill ends the process and its group at once.
func (p *Process) Kill() {
	select {
	case <-p.done:
		return
	default:
	}
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	<-p.done
}

// Exited is closed when the process has ended.
func (p *Process) Exited() <-chan struct{} { return p.done }

// Output is what the process printed so far.
func (p *Process) Output() string {
	data, _ := os.ReadFile(p.Log)
	return string(data)
}

// WaitFor waits until the output holds text.
func (p *Process) WaitFor(ctx context.Context, text string) error {
	for {
		if strings.Contains(p.Output(), text) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s did not print %q: %w; its last lines:\n%s", p.Name, text, ctx.Err(), tail(p.Output(), 15))
		case <-p.done:
			if strings.Contains(p.Output(), text) {
				return nil
			}
			return fmt.Errorf("%s ended (%v) without printing %q; its last lines:\n%s", p.Name, p.err, text, tail(p.Output(), 15))
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (s *spawner) close() {
	s.mu.Lock()
	procs := s.procs
	s.procs = nil
	s.mu.Unlock()
	var wg sync.WaitGroup
	for _, p := range procs {
		wg.Add(1)
		go func() {
			defer wg.Done()
			p.Stop()
		}()
	}
	wg.Wait()
	close(s.stop)
}

// command runs argv to its end and gives its standard output.
func command(ctx context.Context, stdin io.Reader, argv ...string) (string, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var out, errOut bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &errOut
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s: %w: %s", filepath.Base(argv[0]), err, strings.TrimSpace(errOut.String()))
	}
	return out.String(), nil
}

func tail(text string, lines int) string {
	all := strings.Split(strings.TrimRight(text, "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// PID is the program's process id.
func (p *Process) PID() int { return p.cmd.Process.Pid }
