package ipmi

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// solVersion is the version of the driver "ipmi-sol".
const solVersion = "1.0.0"

const (
	// solEscape begins ipmitool's own commands where it comes first or after a CR
	// or LF; there it is doubled, which ipmitool sends as one. So every byte passes.
	solEscape = 0x1f
	// solBanner begins the line that ipmitool prints before the machine's first byte.
	solBanner = "[SOL Session operational."
	// solReady begins what ipmitool says on stderr when the session is there and it
	// finds that its input is no terminal: it holds its banner back until then.
	solReady = "tcgetattr"
	// solHeld is what it says where another session has the port.
	solHeld = "SOL payload already active"
	// solGrace is how long ipmitool may take to deactivate at the end.
	solGrace = 5 * time.Second
	// maxBanner bounds the banner's line.
	maxBanner = 512
)

// solDriver declares the driver "ipmi-sol": the serial console of a BMC, by IPMI's
// serial over LAN. Its configuration is ipmi's.
func solDriver() (*driver.Definition, error) {
	return defineSOL(options{dirs: searchPath(), timeout: runTimeout})
}

func defineSOL(o options) (*driver.Definition, error) {
	return driver.Define(driver.Spec[config]{
		ID: "ipmi-sol", Version: solVersion, RunsOn: "site",
		Schema: json.RawMessage(schema),
		Parse:  parseConfig,
		Health: func(context.Context) error {
			_, err := findTool(o.dirs)
			return err
		},
	}, driver.Implement(metal.ConsoleKind(), func(c config, ctx *driver.Context) (metal.Console, error) {
		t, err := o.connect(ctx, c)
		return &serial{t}, err
	}))
}

// serial is one BMC's console for one call.
type serial struct{ tool *tool }

// Open carries the serial port until either side ends. A port that another session
// has is operation-not-allowed.
func (s *serial) Open(ctx *driver.Context, stream io.ReadWriter) error {
	return s.tool.console(ctx, stream)
}

// Take ends another session with the port first.
func (s *serial) Take(ctx *driver.Context, stream io.ReadWriter) error {
	if _, err := s.tool.run(ctx, patient, "sol", "deactivate"); err != nil {
		if errs.CodeOf(err) != errs.BmcError {
			return err
		}
		// It fails where nobody has the port, too.
		ctx.Log.Info("no session was ended", "reason", err.Error())
	}
	return s.tool.console(ctx, stream)
}

// console runs "ipmitool sol activate" on pipes: without a terminal it changes no
// byte, and the end of its input is its order to deactivate.
func (t *tool) console(ctx context.Context, stream io.ReadWriter) error {
	cmd, release, err := t.command(patient, "-e", string(rune(solEscape)), "sol", "activate")
	if err != nil {
		return err
	}
	defer release()
	input, err := cmd.StdinPipe()
	if err != nil {
		return fmt.Errorf("run ipmitool: %w", err)
	}
	output, err := cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("run ipmitool: %w", err)
	}
	said := &firstWords{ready: make(chan struct{})}
	cmd.Stderr = said
	cmd.WaitDelay = solGrace
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("run ipmitool: %w", err)
	}
	release()
	// However this ends: input's end lets ipmitool free the port, and what does not
	// heed it is killed.
	ended := make(chan struct{})
	var once sync.Once
	kill := func() {
		_ = cmd.Process.Kill()
		output.Close() // a child of its own could hold it open
	}
	leave := func() {
		once.Do(func() {
			input.Close()
			go func() {
				timer := time.NewTimer(solGrace)
				defer timer.Stop()
				select {
				case <-ended:
				case <-timer.C:
					kill()
				}
			}()
		})
	}
	stop := context.AfterFunc(ctx, leave)
	defer stop()
	reader := bufio.NewReaderSize(output, 32<<10)
	timer := time.AfterFunc(t.timeout, func() {
		if said.expire() {
			kill()
		}
	})
	defer timer.Stop()

	// What ipmitool prints ends with it: reading ends then at the latest.
	copied := make(chan error, 1)
	go func() { copied <- t.fromMachine(reader, said, stream, input, leave) }()
	copyErr := <-copied
	leave()
	_, _ = io.Copy(io.Discard, reader)
	waitErr := cmd.Wait()
	close(ended)
	switch {
	case said.expired():
		return errs.Retry(errs.Unreachable, "BMC %s did not open its console within %v", t.config.host, t.timeout)
	case ctx.Err() != nil:
		return fmt.Errorf("ipmitool: %w", ctx.Err())
	case copyErr != nil && !errors.Is(copyErr, io.EOF) && !errors.Is(copyErr, os.ErrClosed):
		return copyErr
	case said.opened() && waitErr == nil:
		return nil
	}
	reason := t.firstLine(said.words())
	switch {
	case !said.opened() && strings.Contains(reason, solHeld):
		return errs.New(errs.OperationNotAllowed, "the serial console is open in another session with the BMC, which only a takeover ends")
	case said.opened():
		return errs.Retry(errs.Unreachable, "the console's session with BMC %s ended: %s", t.config.host, reason)
	}
	return errs.Retry(errs.BmcError, "ipmitool: %s", reason)
}

// fromMachine opens the stream once the session is there, and copies both ways
// until ipmitool ends.
func (t *tool) fromMachine(r *bufio.Reader, said *firstWords, stream io.ReadWriter, input io.WriteCloser, leave func()) error {
	first := make(chan error, 1)
	go func() {
		_, err := r.Peek(1)
		first <- err
	}()
	var err error
	select {
	case <-said.ready:
	case err = <-first:
		if err != nil {
			return err // it ended: stderr says why
		}
		said.open()
		first <- nil
	}
	// An empty write opens the stream.
	if _, err := stream.Write(nil); err != nil {
		leave()
		return err
	}
	go func() {
		defer leave()
		toMachine(input, stream)
	}()
	if err = <-first; err != nil {
		return err
	}
	if err := skipBanner(r); err != nil {
		return err
	}
	buf := make([]byte, 32<<10)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if _, err := stream.Write(buf[:n]); err != nil {
				leave()
				return err
			}
		}
		if err != nil {
			return err
		}
	}
}

// skipBanner drops the line that ipmitool prints before the machine's bytes.
func skipBanner(r *bufio.Reader) error {
	// A byte at a time: what is no banner must not wait for more of itself.
	for n := range len(solBanner) {
		start, err := r.Peek(n + 1)
		if err != nil || start[n] != solBanner[n] {
			return nil // what there is, reading gives
		}
	}
	for range maxBanner {
		b, err := r.ReadByte()
		if err != nil {
			return err
		}
		if b == '\n' {
			return nil
		}
	}
	return errs.New(errs.DriverError, "ipmitool's first line does not end")
}

// toMachine copies what a person types, so that ipmitool takes none of it for its own.
func toMachine(w io.Writer, r io.Reader) {
	e := escaper{fresh: true}
	buf := make([]byte, 4<<10)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if _, werr := w.Write(e.escape(buf[:n])); werr != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// escaper doubles ipmitool's escape byte where ipmitool looks for it.
type escaper struct{ fresh bool } // at the start, and after a CR or LF

func (e *escaper) escape(data []byte) []byte {
	out := make([]byte, 0, len(data)+8)
	for _, b := range data {
		if b == solEscape && e.fresh {
			out = append(out, solEscape)
		}
		out = append(out, b)
		e.fresh = b == '\r' || b == '\n'
	}
	return out
}

// firstWords keeps the start of stderr and sees in it that the session is there.
type firstWords struct {
	mu    sync.Mutex
	text  bytes.Buffer
	line  []byte
	state int // 0: opening
	ready chan struct{}
}

const (
	solOpen = 1 + iota
	solExpired
)

func (f *firstWords) Write(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for l := range bytes.Lines(p) {
		f.line = append(f.line, l[:min(len(l), maxBanner)]...)
		if !bytes.HasSuffix(l, []byte("\n")) {
			continue
		}
		if bytes.HasPrefix(f.line, []byte(solReady)) {
			f.opens()
		} else if f.text.Len() < maxBanner {
			f.text.Write(f.line)
		}
		f.line = nil
	}
	f.line = f.line[:min(len(f.line), maxBanner)]
	return len(p), nil
}

// opens notes that the session is there; the caller holds mu.
func (f *firstWords) opens() {
	if f.state == 0 {
		f.state = solOpen
		close(f.ready)
	}
}

func (f *firstWords) open() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.opens()
}

// expire ends the time for opening, and reports whether that was too late.
func (f *firstWords) expire() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.state == 0 {
		f.state = solExpired
	}
	return f.state == solExpired
}

func (f *firstWords) opened() bool  { return f.in(solOpen) }
func (f *firstWords) expired() bool { return f.in(solExpired) }
func (f *firstWords) in(state int) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.state == state
}

func (f *firstWords) words() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.text.String() + string(f.line)
}

// command is ipmitool with its fixed environment and the password in a pipe of
// its own; release closes this side's end.
func (t *tool) command(repeat []string, args ...string) (cmd *exec.Cmd, release func(), err error) {
	path, err := findTool(t.dirs)
	if err != nil {
		return nil, nil, errs.New(errs.DriverError, "%v", err)
	}
	password, err := passwordPipe(t.login.password.Reveal())
	if err != nil {
		return nil, nil, err
	}
	cmd = exec.Command(path, append(t.argv(repeat), args...)...)
	cmd.Env = []string{toolPath}
	cmd.Dir = "/"
	cmd.ExtraFiles = []*os.File{password}
	return cmd, sync.OnceFunc(func() { password.Close() }), nil
}
