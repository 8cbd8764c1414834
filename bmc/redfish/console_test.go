package redfish

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
)

// seat is a person at a console: her end of it, and how it ended.
type seat struct {
	net.Conn
	opened chan struct{}
	ended  chan error
}

// openSeat opens the console of b's BMC.
func openSeat(ctx context.Context, b *bench, args string) *seat {
	b.t.Helper()
	config, err := json.Marshal(b.config)
	if err != nil {
		b.t.Fatal(err)
	}
	near, far := net.Pipe()
	s := &seat{Conn: near, opened: make(chan struct{}), ended: make(chan error, 1)}
	c, _ := drivertest.Context(b.t, ctx, b.secrets)
	go func() {
		defer far.Close()
		s.ended <- b.driver.Stream(c, "console", "open", config, json.RawMessage(args), &opening{Conn: far, opened: s.opened})
	}()
	b.t.Cleanup(func() { near.Close() })
	return s
}

// opening notes the first write.
type opening struct {
	net.Conn
	opened chan struct{}
}

func (o *opening) Write(p []byte) (int, error) {
	select {
	case <-o.opened:
	default:
		close(o.opened)
	}
	if len(p) == 0 {
		return 0, nil
	}
	return o.Conn.Write(p)
}

// end waits for how it ended.
func (s *seat) end(t *testing.T) error {
	t.Helper()
	select {
	case err := <-s.ended:
		return err
	case <-time.After(30 * time.Second):
		t.Fatal("the console does not end")
		return nil
	}
}

// echo has the machine say what it is told, and reports what was read of it.
func (s *seat) echo(t *testing.T, text string) {
	t.Helper()
	go func() { _, _ = s.Write([]byte(text)) }()
	got := make([]byte, len(text))
	_ = s.SetReadDeadline(time.Now().Add(30 * time.Second))
	if n, err := io.ReadFull(s, got); err != nil || string(got) != text {
		t.Fatalf("of %q the machine repeats %q, %v", text, got[:n], err)
	}
}

func consoleRig(t *testing.T, w bmctest.WebConsole, opts ...bmctest.Option) (*bmctest.Redfish, *bench) {
	t.Helper()
	r, b := rigWith(t, append(opts, bmctest.WithWebConsole(w))...)
	r.Console().Echo(true)
	return r, b
}

var everyByte = func() string {
	all := make([]byte, 0, 6000)
	for i := range 6000 {
		all = append(all, byte(i))
	}
	return string(all)
}()

// Every byte passes both ways on each of OpenBMC's forms, and who leaves says so.
func TestConsole(t *testing.T) {
	for name, w := range map[string]bmctest.WebConsole{
		"newer":       {Path: "/console/default", OpenBMC: true, Types: []string{"IPMI", "SSH"}},
		"older":       {Path: "/console0", OpenBMC: true, Types: []string{"IPMI", "SSH"}},
		"unsaid":      {Path: "/console0", OpenBMC: true},
		"text frames": {Path: "/console0", OpenBMC: true, Text: true},
		"stale once":  {Path: "/console/default", OpenBMC: true, Stale: 1},
	} {
		t.Run(name, func(t *testing.T) {
			r, b := consoleRig(t, w)
			s := openSeat(t.Context(), b, `[{"takeover":true}]`)
			s.echo(t, "login\r")
			s.echo(t, everyByte)
			tokens := r.WebConsoleTokens()
			if w.Stale > 0 && (len(tokens) != 2 || tokens[0] == tokens[1]) || w.Stale == 0 && len(tokens) != 1 || slices.Contains(tokens, "") {
				t.Errorf("upgrades with %d tokens, or the same twice, or none", len(tokens))
			}
			s.Close()
			if err := s.end(t); err != nil {
				t.Errorf("the person left: %v", err)
			}
			if _, left := r.WebConsoles(); left != 1 {
				t.Errorf("%d clients left with a word, want 1", left)
			}
			b.pool.close(t.Context())
			b.pool.ending.Wait()
			if got := r.Sessions(); got != 0 {
				t.Errorf("%d sessions are left, want 0", got)
			}
		})
	}
}

// A BMC without authentication by session takes the basic one.
func TestConsoleBasic(t *testing.T) {
	_, b := consoleRig(t, bmctest.WebConsole{Path: "/console0", OpenBMC: true}, bmctest.WithFaults(bmctest.NoSessions))
	s := openSeat(t.Context(), b, `[]`)
	s.echo(t, "hello")
}

// What a BMC does not have, refuses or gets wrong is an error with a code, without
// the session's token.
func TestConsoleRefused(t *testing.T) {
	frames := func(raw string) bmctest.WebConsole {
		return bmctest.WebConsole{Path: "/console/default", OpenBMC: true, RawFrames: raw}
	}
	answer := func(raw string) bmctest.WebConsole {
		return bmctest.WebConsole{Path: "/console/default", OpenBMC: true, Raw: raw}
	}
	for name, c := range map[string]struct {
		console bmctest.WebConsole
		code    errs.Code
		says    string
	}{
		"nothing said":    {bmctest.WebConsole{}, errs.UnsupportedOperation, "--driver console=ipmi-sol"},
		"ssh only":        {bmctest.WebConsole{Types: []string{"SSH"}}, errs.UnsupportedOperation, "reached by SSH; none of them is served here"},
		"ssh and ipmi":    {bmctest.WebConsole{Types: []string{"SSH", "IPMI"}}, errs.UnsupportedOperation, "reached by IPMI, SSH; enroll the machine with --driver console=ipmi-sol"},
		"off":             {bmctest.WebConsole{OpenBMC: true, Path: "/console0", Types: []string{"SSH"}, Off: true}, errs.UnsupportedOperation, "switched off"},
		"built without":   {bmctest.WebConsole{OpenBMC: true, Types: []string{"IPMI"}}, errs.UnsupportedOperation, "no console in its web service"},
		"not permitted":   {bmctest.WebConsole{OpenBMC: true, Path: "/console0", Refuse: http.StatusForbidden}, errs.BmcError, "does not permit"},
		"always 401":      {bmctest.WebConsole{OpenBMC: true, Path: "/console0", Stale: 100}, errs.BmcError, "refuses the Redfish session"},
		"busy":            {bmctest.WebConsole{OpenBMC: true, Path: "/console0", Refuse: http.StatusServiceUnavailable}, errs.BmcError, "503"},
		"redirect":        {bmctest.WebConsole{OpenBMC: true, Path: "/console0", Refuse: http.StatusTemporaryRedirect}, errs.BmcError, "redirects, which is not followed"},
		"plain page":      {bmctest.WebConsole{OpenBMC: true, Path: "/console0", Refuse: http.StatusOK}, errs.BmcError, "not with a WebSocket"},
		"garbage":         {answer("\x00\x01garbage\r\n\r\n"), errs.Unreachable, ""},
		"endless header":  {answer("HTTP/1.1 101 X\r\nA: " + strings.Repeat("x", 1<<20)), errs.Unreachable, ""},
		"wrong proof":     {answer("HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: AAAA\r\n\r\n"), errs.BmcError, "not to this request"},
		"other protocol":  {answer("HTTP/1.1 101 X\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n"), errs.BmcError, "another protocol"},
		"giant frame":     {frames("\x82\x7f\x00\x00\x00\x01\x00\x00\x00\x00"), errs.BmcError, "4294967296 bytes"},
		"longest frame":   {frames("\x82\x7f\xff\xff\xff\xff\xff\xff\xff\xff"), errs.BmcError, "more than 1048576"},
		"extension":       {frames("\xc2\x01x"), errs.BmcError, "extension"},
		"masked":          {frames("\x82\x81\x00\x00\x00\x00x"), errs.BmcError, "masked"},
		"unknown kind":    {frames("\x83\x01x"), errs.BmcError, "unknown kind 3"},
		"cut ping":        {frames("\x09\x01x"), errs.BmcError, "control frame"},
		"long ping":       {frames("\x89\x7e\x01\x00"), errs.BmcError, "control frame"},
		"stray piece":     {frames("\x80\x01x"), errs.BmcError, "out of order"},
		"message in one":  {frames("\x02\x00\x82\x00"), errs.BmcError, "out of order"},
		"closed":          {frames("\x88\x0f\x03\xe9going away..."), errs.Unreachable, "code 1001): going away"},
		"closed, repeats": {frames("\x88\x07\x03\xe8TOKEN"), errs.Unreachable, ""},
	} {
		t.Run(name, func(t *testing.T) {
			r, b := consoleRig(t, c.console)
			s := openSeat(t.Context(), b, `[]`)
			go func() { _, _ = io.Copy(io.Discard, s) }()
			err := s.end(t)
			if errs.CodeOf(err) != c.code || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v, want %s with %q", err, c.code, c.says)
			}
			for _, token := range r.WebConsoleTokens() {
				if token != "" && strings.Contains(err.Error(), token) {
					t.Errorf("the error repeats the session's token: %v", err)
				}
			}
			for _, q := range r.Requests() {
				if strings.HasPrefix(q, "GET /console") && q != "GET /console/default" && q != "GET /console0" {
					t.Errorf("asked for %s", q)
				}
			}
		})
	}
}

// A session that the BMC cuts off is unreachable, which is opened again.
func TestConsoleDropped(t *testing.T) {
	r, b := consoleRig(t, bmctest.WebConsole{Path: "/console0", OpenBMC: true})
	s := openSeat(t.Context(), b, `[]`)
	s.echo(t, "a")
	r.DropWebConsoles()
	if err := s.end(t); errs.CodeOf(err) != errs.Unreachable || !errs.From(err).Retryable {
		t.Errorf("dropped: %v, want unreachable, worth a repeat", err)
	}
}

// The call's end ends the console, even one at which nothing can be sent or read.
func TestConsoleCancelled(t *testing.T) {
	for name, w := range map[string]bmctest.WebConsole{
		"idle":         {Path: "/console0", OpenBMC: true},
		"deaf":         {Path: "/console0", OpenBMC: true, RawFrames: "\x82\x7e\xff\xffx"},
		"stuck header": {Path: "/console0", OpenBMC: true, Raw: "HTTP/1.1 101"},
	} {
		t.Run(name, func(t *testing.T) {
			r, b := consoleRig(t, w)
			ctx, cancel := context.WithCancel(t.Context())
			s := openSeat(ctx, b, `[]`)
			if w.Raw == "" {
				<-s.opened
			} else {
				for len(r.WebConsoleTokens()) == 0 {
					runtime.Gosched()
				}
			}
			cancel()
			if err := s.end(t); errs.CodeOf(err) != errs.Cancelled {
				t.Errorf("%v, want cancelled", err)
			}
		})
	}
}

// A BMC that floods a console fills no memory: who reads slowly holds it up.
func TestConsoleFlood(t *testing.T) {
	_, b := consoleRig(t, bmctest.WebConsole{Path: "/console0", OpenBMC: true, Repeat: true,
		RawFrames: "\x82\x7f\x00\x00\x00\x00\x00\x10\x00\x00" + strings.Repeat("x", 1<<20) + strings.Repeat("\x89\x7d"+strings.Repeat("p", 125), 50)})
	s := openSeat(t.Context(), b, `[]`)
	var before, after runtime.MemStats
	if _, err := io.CopyN(io.Discard, s, 4<<20); err != nil {
		t.Fatal(err)
	}
	runtime.GC()
	runtime.ReadMemStats(&before)
	if _, err := io.CopyN(io.Discard, s, 64<<20); err != nil {
		t.Fatal(err)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if after.HeapAlloc > before.HeapAlloc+(16<<20) {
		t.Errorf("64 MiB of a console keep %d bytes in memory", after.HeapAlloc-before.HeapAlloc)
	}
	s.Close()
	if err := s.end(t); err != nil {
		t.Errorf("the person left: %v", err)
	}
}

// silentSocket is a socket to a BMC that neither sends nor reads.
func silentSocket(t *testing.T, timing socketTiming) (w *webSocket, far net.Conn) {
	t.Helper()
	near, far := net.Pipe()
	t.Cleanup(func() { near.Close(); far.Close() })
	resp := &http.Response{Header: http.Header{"Upgrade": {"websocket"}, "Sec-Websocket-Accept": {socketProof("k")}}, Body: near}
	w, err := acceptSocket(resp, "k", "secret")
	if err != nil {
		t.Fatal(err)
	}
	w.timing = timing
	return w, far
}

// A BMC that is dead is given up: one that does not answer a ping, and one that
// takes nothing.
func TestConsoleDead(t *testing.T) {
	for name, timing := range map[string]socketTiming{
		"silent": {alive: 40 * time.Millisecond, write: time.Hour, leave: time.Second},
		"full":   {alive: time.Hour, write: 20 * time.Millisecond, leave: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			w, far := silentSocket(t, timing)
			if name == "silent" {
				go func() { _, _ = io.Copy(io.Discard, far) }()
			}
			near, person := net.Pipe()
			defer person.Close()
			go func() { _, _ = person.Write([]byte("x")) }()
			if err := w.carry(t.Context(), &opening{Conn: near, opened: make(chan struct{})}); errs.CodeOf(err) != errs.Unreachable || !strings.Contains(err.Error(), "dead") {
				t.Errorf("%v, want unreachable", err)
			}
		})
	}
}

// What a BMC says of its console is read from its system and from its manager.
func TestReadConsole(t *testing.T) {
	for name, c := range map[string]struct {
		system, manager string
		want            consoleOffer
	}{
		"nothing":    {`{}`, `{}`, consoleOffer{}},
		"odd":        {`{"SerialConsole":7,"Oem":[]}`, `{"SerialConsole":{"ConnectTypesSupported":"SSH","IPMI":[]}}`, consoleOffer{}},
		"bmcweb":     {`{"SerialConsole":{"IPMI":{"ServiceEnabled":true},"SSH":{"ServiceEnabled":true,"Port":2200}}}`, `{"Model":"OpenBmc","SerialConsole":{"ServiceEnabled":true,"ConnectTypesSupported":["IPMI","SSH"]}}`, consoleOffer{openBMC: true, types: []string{"IPMI", "SSH"}}},
		"oem":        {`{}`, `{"Oem":{"OpenBmc":{}}}`, consoleOffer{openBMC: true}},
		"switched":   {`{}`, `{"SerialConsole":{"ServiceEnabled":false,"ConnectTypesSupported":["SSH"]}}`, consoleOffer{off: true}},
		"member off": {`{"SerialConsole":{"SSH":{"ServiceEnabled":false},"Telnet":{"ServiceEnabled":true}}}`, `{}`, consoleOffer{types: []string{"Telnet"}}},
	} {
		parse := func(text string) object {
			o, err := parseObject([]byte(text))
			if err != nil {
				t.Fatal(err)
			}
			return o
		}
		got := readConsole(parse(c.system), parse(c.manager))
		if got.openBMC != c.want.openBMC || got.off != c.want.off || !slices.Equal(got.types, c.want.types) {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
}

// FuzzConsole: whatever a BMC sends on its socket ends in an error or the end.
func FuzzConsole(f *testing.F) {
	for _, seed := range []string{"\x82\x01x", "\x88\x00", "\x02\x01a\x89\x00\x80\x01b", "\x82\x7f\x00\x00\x00\x00\x00\x00\x00\x01x"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		near, far := net.Pipe()
		go func() { _, _ = io.Copy(io.Discard, far) }()
		go func() { _, _ = far.Write(data); far.Close() }()
		resp := &http.Response{Header: http.Header{"Upgrade": {"websocket"}, "Sec-Websocket-Accept": {socketProof("k")}}, Body: near}
		w, err := acceptSocket(resp, "k", "secret")
		if err != nil {
			t.Fatal(err)
		}
		defer w.cut()
		if err := w.fromMachine(io.Discard); errs.CodeOf(err) != errs.BmcError && errs.CodeOf(err) != errs.Unreachable {
			t.Errorf("%q ends with %v", data, err)
		}
	})
}
