package ipmi

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
	"github.com/better-compute/site-appliance/plugins/host"
	"github.com/better-compute/site-appliance/plugins/host/hosttest"
)

// patience is how long something may take on a busy machine.
const patience = 60 * time.Second

// person is the far end of a console's stream.
type person struct {
	keys *io.PipeWriter

	mu      sync.Mutex
	seen    bytes.Buffer
	opened  bool
	changed chan struct{}
	in      *io.PipeReader
}

func newPerson() *person {
	p := &person{changed: make(chan struct{})}
	p.in, p.keys = io.Pipe()
	return p
}

func (p *person) Read(b []byte) (int, error) { return p.in.Read(b) }
func (p *person) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.opened = true
	p.seen.Write(b)
	close(p.changed)
	p.changed = make(chan struct{})
	return len(b), nil
}

// until waits for what is seen to satisfy done.
func (p *person) until(t *testing.T, what string, done func(opened bool, seen []byte) bool) {
	t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for {
		p.mu.Lock()
		ok, changed := done(p.opened, p.seen.Bytes()), p.changed
		seen := p.seen.String()
		p.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-timer.C:
			t.Fatalf("%s did not come; seen %.400q", what, seen)
		}
	}
}

func isOpen(opened bool, _ []byte) bool { return opened }

// console runs the driver's console in this process until the person leaves.
func console(t *testing.T, o options, config, args, password string, p *person) <-chan error {
	t.Helper()
	d, err := defineSOL(o)
	if err != nil {
		t.Fatal(err)
	}
	base, cancel := context.WithCancel(context.Background())
	ctx, _ := drivertest.Context(t, base, map[string]string{"username": user, "password": password})
	ended := make(chan error, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		ended <- d.Stream(ctx, "console", "open", json.RawMessage(config), json.RawMessage(args), p)
	}()
	t.Cleanup(func() {
		p.keys.Close()
		cancel()
		<-done
	})
	return ended
}

func end(t *testing.T, ended <-chan error) error {
	t.Helper()
	select {
	case err := <-ended:
		return err
	case <-time.After(patience):
		t.Fatal("the console did not end")
		return nil
	}
}

func configFor(address string) string { return fmt.Sprintf(`{"address":%q}`, address) }

var real = options{dirs: searchPath(), timeout: runTimeout}

func TestEscaperDoublesWhereIpmitoolLooks(t *testing.T) {
	for _, tt := range []struct{ in, want string }{
		{"", ""},
		{"a\x1fb", "a\x1fb"},
		{"\x1f", "\x1f\x1f"},
		{"\x1f\x1f", "\x1f\x1f\x1f"},
		{"\r\x1f.", "\r\x1f\x1f."},
		{"\n\x1f\x1f\r\x1f", "\n\x1f\x1f\x1f\r\x1f\x1f"},
	} {
		whole := (&escaper{fresh: true}).escape([]byte(tt.in))
		e := &escaper{fresh: true}
		var parts []byte
		for i := range len(tt.in) {
			parts = append(parts, e.escape([]byte{tt.in[i]})...)
		}
		if string(whole) != tt.want || string(parts) != tt.want {
			t.Errorf("escape(%q) = %q, in parts %q, want %q", tt.in, whole, parts, tt.want)
		}
	}
}

// TestConsoleCarriesEveryByte: the real ipmitool changes nothing, neither what
// looks like its own commands nor what looks like its own words.
func TestConsoleCarriesEveryByte(t *testing.T) {
	needsIpmitool(t)
	bmc, _ := startBMC(t)
	p := newPerson()
	ended := console(t, real, configFor(bmc.Addr()), "", password, p)
	p.until(t, "the opening", isOpen)

	var typed []byte
	random := rand.New(rand.NewPCG(1, 2))
	alphabet := []byte{'\r', '\n', solEscape, solEscape, '.', 'B', '?', 'x', 0, 26, 24}
	for range 300 {
		typed = append(typed, alphabet[random.IntN(len(alphabet))])
	}
	for b := range 256 {
		typed = append(typed, byte(b))
	}
	for sent := 0; sent < len(typed); {
		n := min(1+random.IntN(40), len(typed)-sent)
		if _, err := p.keys.Write(typed[sent : sent+n]); err != nil {
			t.Fatal(err)
		}
		sent += n
	}
	heard(t, bmc, typed)

	said := []byte("[SOL Session operational.  Use ~? for help]\r\n\x00\xff tcgetattr: no\n")
	for b := range 256 {
		said = append(said, byte(b))
	}
	bmc.Console().Say(said)
	p.until(t, "all that the machine said", func(_ bool, seen []byte) bool { return len(seen) >= len(said) })
	if !bytes.Equal(p.seen.Bytes(), said) {
		t.Errorf("seen %q, want %q", p.seen.Bytes(), said)
	}
	p.keys.Close()
	if err := end(t, ended); err != nil {
		t.Errorf("after the person left: %v, want none", err)
	}
}

// heard waits until the machine was told all of want.
func heard(t *testing.T, bmc *bmctest.IPMI, want []byte) {
	t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for {
		changed := bmc.Console().Changed()
		got := bmc.Console().Heard()
		if bytes.Equal(got, want) {
			return
		}
		if !bytes.HasPrefix(want, got) {
			t.Fatalf("the machine was told %q, want %q", got, want)
		}
		select {
		case <-changed:
		case <-timer.C:
			t.Fatalf("the machine was told %d of %d bytes", len(got), len(want))
		}
	}
}

// TestConsoleHeldByAnother: a port that another session has is refused, and
// taken over on request only; one that a person left is free.
func TestConsoleHeldByAnother(t *testing.T) {
	needsIpmitool(t)
	bmc, _ := startBMC(t)
	config := configFor(bmc.Addr())
	first, second, third, fourth := newPerson(), newPerson(), newPerson(), newPerson()
	console(t, real, config, "[]", password, first)
	first.until(t, "the first opening", isOpen)

	if err := end(t, console(t, real, config, `[{"takeover":false}]`, password, second)); errs.CodeOf(err) != errs.OperationNotAllowed || second.opened {
		t.Fatalf("open beside another: %v, opened %v; want operation-not-allowed", err, second.opened)
	}
	taken := console(t, real, config, `[{"takeover":true}]`, password, third)
	third.until(t, "the takeover", isOpen)
	bmc.Console().Say([]byte("hello"))
	third.until(t, "what the machine says", func(_ bool, seen []byte) bool { return string(seen) == "hello" })

	third.keys.Close()
	if err := end(t, taken); err != nil {
		t.Fatalf("after the third left: %v", err)
	}
	console(t, real, config, "", password, fourth)
	fourth.until(t, "the opening of a port that was left", isOpen)
}

func TestConsoleFailures(t *testing.T) {
	needsIpmitool(t)
	bmc, _ := startBMC(t)
	silent, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	for _, tt := range []struct {
		name, config, args, password string
		o                            options
		code                         errs.Code
	}{
		{"wrong password", configFor(bmc.Addr()), "", "wrong-password", real, errs.BmcError},
		{"dead BMC", configFor(silent.LocalAddr().String()), "", password, options{dirs: searchPath(), timeout: time.Second}, errs.Unreachable},
		{"pin", fmt.Sprintf(`{"address":%q,"tlsSpkiSha256":"aa"}`, bmc.Addr()), "", password, real, errs.PinUnsupported},
		{"unknown argument", configFor(bmc.Addr()), `[{"takeOver":true}]`, password, real, errs.InvalidArgs},
		{"two arguments", configFor(bmc.Addr()), `[{},{}]`, password, real, errs.InvalidArgs},
		{"no ipmitool", configFor(bmc.Addr()), "", password, options{dirs: []string{"/nowhere"}, timeout: time.Second}, errs.DriverError},
		{"long password", configFor(bmc.Addr()), "", strings.Repeat("p", 21), real, errs.CredentialsUnavailable},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := newPerson()
			err := end(t, console(t, tt.o, tt.config, tt.args, tt.password, p))
			if errs.CodeOf(err) != tt.code || p.opened || strings.Contains(fmt.Sprint(err), tt.password) {
				t.Errorf("open: %v, opened %v; want %s", err, p.opened, tt.code)
			}
		})
	}
}

// TestConsoleWords: what a fake in ipmitool's place prints and how it ends.
func TestConsoleWords(t *testing.T) {
	for _, tt := range []struct {
		name, script, seen string
		code               errs.Code
		message            string
	}{
		{"banner and bytes", `echo "tcgetattr: Inappropriate ioctl for device" >&2; echo "[SOL Session operational.  Use X? for help]"; printf 'a\nb'`, "a\nb", "", ""},
		{"no banner", `printf 'login: '`, "login: ", "", ""},
		{"half a banner", `printf '[SOL'`, "[SOL", "", ""},
		{"a line that only looks like it", `printf '[SOL x]\n'`, "[SOL x]\n", "", ""},
		{"closed by the BMC", `echo "[SOL Session operational.]"; printf x; echo "Error: SOL session closed by BMC" >&2; exit 1`, "x", errs.Unreachable, "SOL session closed by BMC"},
		{"disabled", `echo "Info: SOL payload disabled" >&2; exit 1`, "", errs.BmcError, "SOL payload disabled"},
		{"password in its words", `echo "bad $(cat /dev/fd/3)" >&2; exit 1`, "", errs.BmcError, "[redacted]"},
		{"endless first line", `printf '[SOL Session operational.'; yes | tr -d '\n' | head -c 100000; exec sleep 1000`, "", errs.DriverError, "does not end"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := newPerson()
			err := end(t, console(t, fakeTool(t, tt.script), anyConfig, "", password, p))
			if errs.CodeOf(err) != tt.code || !strings.Contains(fmt.Sprint(err), tt.message) {
				t.Errorf("open: %v, want %s %q", err, tt.code, tt.message)
			}
			if got := p.seen.String(); got != tt.seen {
				t.Errorf("seen %q, want %q", got, tt.seen)
			}
		})
	}
}

// TestConsolePasswordOnlyThroughThePipe is TestPasswordOnlyThroughThePipe for the console.
func TestConsolePasswordOnlyThroughThePipe(t *testing.T) {
	t.Setenv("SOMETHING", "inherited")
	seen := filepath.Join(t.TempDir(), "seen")
	o := fakeTool(t, fmt.Sprintf(`{ printf 'args: %%s\n' "$*"; tr '\0' '\n' </proc/$$/environ; printf 'pipe: '; cat /dev/fd/3; echo; } >%s
echo "[SOL Session operational.]"`, seen))
	if err := end(t, console(t, o, anyConfig, "", password, newPerson())); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(seen)
	if err != nil {
		t.Fatal(err)
	}
	text := string(data)
	if want := "args: -I lanplus -C 3 -H 192.0.2.5 -p 6230 -U ADMIN -L ADMINISTRATOR -f /dev/fd/3 -N 3 -e \x1f sol activate\n"; !strings.HasPrefix(text, want) {
		t.Errorf("ipmitool got %q, want %q", text, want)
	}
	if n := strings.Count(text, password); n != 1 || !strings.Contains(text, "pipe: "+password+"\n") {
		t.Errorf("the password shows %d times, want once, in the pipe:\n%s", n, text)
	}
	if strings.Contains(text, "inherited") {
		t.Errorf("environment is not the fixed one:\n%s", text)
	}
}

// TestConsoleHeedsItsEnd: an ipmitool that does not heed the end of its input is killed.
func TestConsoleHeedsItsEnd(t *testing.T) {
	pid := filepath.Join(t.TempDir(), "pid")
	o := fakeTool(t, fmt.Sprintf(`echo $$ >%s; echo "[SOL Session operational.]"; printf x; exec sleep 1000`, pid))
	p := newPerson()
	ended := console(t, o, anyConfig, "", password, p)
	p.until(t, "a byte", func(_ bool, seen []byte) bool { return len(seen) == 1 })
	p.keys.Close()
	if err := end(t, ended); errs.CodeOf(err) != errs.Unreachable {
		t.Errorf("end: %v, want unreachable: it was killed", err)
	}
	data, err := os.ReadFile(pid)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("/proc/" + strings.TrimSpace(string(data))); err == nil {
		t.Error("ipmitool still runs")
	}
}

// TestConsoleThroughTheSandbox goes host, shim, wall, filter, bcx Stream, bcx-ipmi,
// ipmitool, BMC; meanwhile no process shows the password.
func TestConsoleThroughTheSandbox(t *testing.T) {
	hosttest.NeedsRoot(t)
	needsIpmitool(t)
	bmc, _ := startBMC(t)
	bmc.Console().Echo(true)
	dir := hosttest.NewDir(t)
	dir.Add("bcx-ipmi", hosttest.Build(t, "github.com/better-compute/site-appliance/plugins/cmd/bcx-ipmi"))
	h := hosttest.Start(t, dir.Config())
	call := host.Call{Driver: "ipmi-sol", Kind: "console", Operation: "open", Config: json.RawMessage(configFor(bmc.Addr())),
		Secrets: secrets(user, password), IdempotencyKey: "cmd_1", Deadline: time.Now().Add(35 * time.Second)}
	stream, err := h.Stream(t.Context(), call)
	if err != nil {
		t.Fatalf("Stream: %v", err)
	}
	defer stream.Close()
	if _, err := h.Stream(t.Context(), call); errs.CodeOf(err) != errs.OperationNotAllowed {
		t.Errorf("a second Stream: %v, want operation-not-allowed", err)
	}
	typed := []byte("root\r\x1f.\x00\xff\n")
	if _, err := stream.Write(typed); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(typed))
	if _, err := io.ReadFull(stream, got); err != nil || !bytes.Equal(got, typed) {
		t.Errorf("echo %q, %v; want %q", got, err, typed)
	}
	if n := shown(t, password); n != 0 {
		t.Errorf("%d processes show the password in their arguments or environment", n)
	}
	stream.Close()
	// The port is free again as soon as ipmitool has deactivated.
	call.Deadline = time.Now().Add(35 * time.Second)
	again, err := h.Stream(t.Context(), call)
	for start := time.Now(); errs.CodeOf(err) == errs.OperationNotAllowed && time.Since(start) < patience; {
		again, err = h.Stream(t.Context(), call)
	}
	if err != nil {
		t.Fatalf("Stream after the end: %v", err)
	}
	again.Close()
}

// shown counts processes, other than this one, whose command line or environment
// holds text; at least one ipmitool must be among those looked at.
func shown(t *testing.T, text string) int {
	t.Helper()
	procs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	n, tools := 0, 0
	for _, dir := range procs {
		if dir == fmt.Sprintf("/proc/%d", os.Getpid()) {
			continue
		}
		for _, file := range []string{"cmdline", "environ"} {
			data, err := os.ReadFile(filepath.Join(dir, file))
			if err != nil {
				continue // it ended
			}
			if file == "cmdline" && bytes.Contains(data, []byte("sol\x00activate")) {
				tools++
			}
			if bytes.Contains(data, []byte(text)) {
				n++
			}
		}
	}
	if tools == 0 {
		t.Error("no ipmitool was looked at")
	}
	return n
}
