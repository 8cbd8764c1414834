package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/gateway"
	"github.com/better-compute/site-appliance/appliance/gateway/keys"
)

// buffer is what a command printed; commands may run beside the test.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) { b.mu.Lock(); defer b.mu.Unlock(); return b.b.Write(p) }
func (b *buffer) String() string              { b.mu.Lock(); defer b.mu.Unlock(); return b.b.String() }

// cli runs the program as a person does.
type cli struct {
	t      *testing.T
	dir    string
	client string
	log    *buffer
	stop   context.CancelFunc
	done   chan error
	listen string
}

func (c *cli) runAs(client, stdin string, args ...string) (string, string, error) {
	var out, notes buffer
	if client != "" {
		args = append(args, "--client", client)
	}
	err := dispatch(c.t.Context(), "better-compute", commands(), args, stdio{strings.NewReader(stdin), &out, &notes})
	return strings.TrimRight(out.String(), "\n"), notes.String(), err
}

func (c *cli) run(stdin string, args ...string) string {
	c.t.Helper()
	out, _, err := c.runAs(c.client, stdin, args...)
	if err != nil {
		c.t.Fatalf("better-compute %s = %v", strings.Join(args, " "), err)
	}
	return out
}

func (c *cli) fails(want string, args ...string) {
	c.t.Helper()
	_, _, err := c.runAs(c.client, "", args...)
	if err == nil || !strings.HasPrefix(err.Error(), want) {
		c.t.Errorf("better-compute %s = %v, want %q", strings.Join(args, " "), err, want)
	}
}

// serve starts the gateway and waits until it answers.
func (c *cli) serve() {
	c.t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	c.stop, c.done = stop, make(chan error, 1)
	ready := make(chan struct{})
	go func() {
		c.done <- serveGateway(ctx, c.dir, gateway.Options{Listen: c.listen, Log: slog.New(slog.NewTextHandler(c.log, nil))}, func(*gateway.Gateway) { close(ready) })
	}()
	select {
	case err := <-c.done:
		c.t.Fatalf("gateway serve = %v", err)
	case <-ready:
	}
	deadline := time.Now().Add(10 * time.Second)
	for {
		conn, err := net.Dial("tcp", c.listen)
		if err == nil {
			conn.Close()
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("gateway does not listen: %v\n%s", err, c.log)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func (c *cli) halt() {
	c.t.Helper()
	c.stop()
	if err := <-c.done; err != nil {
		c.t.Errorf("gateway serve = %v", err)
	}
}

// enrolBox has the box of a join string enrol, and stay away.
func (c *cli) enrolBox(join string) {
	c.t.Helper()
	j, err := trust.ParseJoin(join)
	if err != nil {
		c.t.Fatal(err)
	}
	p := &place{t: c.t, ctx: c.t.Context()}
	if _, err := p.peer(agentv1.Role_ROLE_SITE, j, func(r *agentv1.EnrollRequest) {
		r.Credential = &agentv1.EnrollRequest_Token{Token: string(j.Token.Reveal())}
	}); err != nil {
		c.t.Fatal(err)
	}
}

func newCLI(t *testing.T) *cli {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	c := &cli{t: t, dir: filepath.Join(t.TempDir(), "gw"), log: &buffer{}, listen: l.Addr().String()}
	if _, notes, err := c.runAs("", "", "gateway", "init", "--dir", c.dir, "--url", "https://"+c.listen); err != nil || !strings.Contains(notes, "offline") {
		t.Fatalf("gateway init = %q, %v", notes, err)
	}
	if _, _, err := c.runAs("", "", "gateway", "init", "--dir", c.dir, "--url", "https://"+c.listen); err == nil {
		t.Error("a second gateway init = nil, want a refusal")
	}
	c.client = filepath.Join(c.dir, keys.ClientFile)
	c.serve()
	return c
}

func TestCommandLine(t *testing.T) {
	c := newCLI(t)
	defer func() { c.halt() }()

	out, notes, err := c.runAs(c.client, "", "site", "add", "lab")
	if err != nil || !strings.HasPrefix(out, "bc1.") || strings.ContainsAny(out, " \n") || strings.Contains(notes, "bc1.") {
		t.Errorf("site add = %q, notes %q, %v: want the join string alone", out, notes, err)
	}
	if strings.Contains(c.log.String(), out) {
		t.Error("the join string is in the log")
	}
	c.fails("INVALID_INPUT: taken", "site", "add", "lab")
	if out := c.run("", "site", "list"); !strings.Contains(out, "lab") || !strings.Contains(out, "new") {
		t.Errorf("site list = %q", out)
	}
	join := out
	c.run("", "pool", "add", "metal", "--site", "lab")
	c.fails("NOT_FOUND: ", "pool", "add", "metal2", "--site", "nowhere")
	c.run("", "pool", "list")

	if out := c.run(`{"username":"root","password":"hunter2"}`+"\n", "secret", "put", "bmc"); out != "secret://default/bmc" {
		t.Errorf("secret put = %q", out)
	}
	c.fails("the secret is empty", "secret", "put", "nothing")
	for _, file := range []string{"gateway.db", "gateway.db-wal"} {
		if data, err := os.ReadFile(filepath.Join(c.dir, file)); err == nil && bytes.Contains(data, []byte("hunter2")) {
			t.Errorf("%s holds the password", file)
		}
	}

	c.fails("INVALID_INPUT: pool-without-agent: ", "metal", "enroll", "m1", "--pool", "metal", "--driver", "ipmi", "--address", "192.0.2.7", "--credentials", "bmc", "--mac", "52:54:00:00:00:01")
	c.enrolBox(join)
	c.fails("INVALID_INPUT: boot-identity-missing: ", "metal", "enroll", "m1", "--pool", "metal", "--driver", "ipmi", "--address", "192.0.2.7", "--credentials", "bmc")
	c.run("", "metal", "enroll", "m1", "--pool", "metal", "--driver", "ipmi", "--address", "192.0.2.7", "--credentials", "bmc", "--mac", "52:54:00:00:00:01")
	c.fails(`INVALID_INPUT: loader "grub": want ipxe, shim, snponly`, "metal", "enroll", "m2", "--loader", "grub", "--pool", "metal", "--driver", "ipmi", "--address", "192.0.2.8", "--credentials", "bmc", "--mac", "52:54:00:00:00:02")
	c.fails("INVALID_INPUT: loader", "metal", "loader", "m1", "grub")
	c.fails("NOT_FOUND: ", "metal", "loader", "m9", "shim")
	if out := c.run("", "metal", "loader", "m1", "shim"); strings.TrimSpace(out) != "m1 gets shim" {
		t.Errorf("metal loader = %q", out)
	}
	if out := c.run("", "metal", "show", "m1"); !strings.Contains(out, "\nloader          shim\n") {
		t.Errorf("metal show = %q, want its loader", out)
	}
	c.fails("INVALID_INPUT: bmc.address", "metal", "enroll", "m2", "--pool", "metal", "--driver", "ipmi", "--address", "http://x/", "--credentials", "bmc")
	c.fails("PERMISSION_DENIED: ", "metal", "enroll", "m2", "--pool", "metal", "--driver", "ipmi", "--address", "192.0.2.7", "--credentials", "secret://other/bmc")
	if out := c.run("", "metal", "list"); !strings.Contains(out, "m1") || !strings.Contains(out, "enrolled") {
		t.Errorf("metal list = %q", out)
	}
	if out := c.run("", "metal", "show", "m1"); !strings.Contains(out, "secret://default/bmc") {
		t.Errorf("metal show = %q", out)
	}
	var shown struct {
		Machine struct {
			Name string `json:"name"`
			Bmc  struct {
				Driver string `json:"driver"`
			} `json:"bmc"`
		} `json:"machine"`
	}
	if err := json.Unmarshal([]byte(c.run("", "metal", "show", "--json", "m1")), &shown); err != nil || shown.Machine.Bmc.Driver != "ipmi" {
		t.Errorf("metal show --json = %+v, %v", shown, err)
	}
	c.fails("DRIVER_ERROR: unavailable: ", "metal", "power", "m1")
	c.fails("DRIVER_ERROR: unavailable: ", "metal", "power", "m1", "on")
	c.fails("DRIVER_ERROR: unavailable: ", "metal", "boot", "m1", "pxe", "--efi")
	c.fails("INVALID_INPUT: action", "metal", "power", "m1", "explode")
	c.fails("usage: ", "metal", "power")
	c.fails("unknown command", "metal", "melt")

	image := filepath.Join(t.TempDir(), "node.raw.zst")
	writer, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(image, writer.EncodeAll(bytes.Repeat([]byte("disk"), 1<<20), nil), 0o600); err != nil {
		t.Fatal(err)
	}
	c.run("", "artifact", "import", image, "--name", "node", "--arch", "amd64")
	if out := c.run("", "artifact", "list"); !strings.Contains(out, "node") || !strings.Contains(out, "4194304") {
		t.Errorf("artifact list = %q", out)
	}
	c.fails("UNSUPPORTED: image-format-unsupported", "artifact", "import", image, "--name", "node", "--format", "qcow2")
	if err := os.WriteFile(image, []byte("no zstd"), 0o600); err != nil {
		t.Fatal(err)
	}
	c.fails("INVALID_INPUT: ", "artifact", "import", image, "--name", "broken")

	id := c.run("", "metal", "deploy", "m1", "--image", "node", "--disk-serial", "S1")
	if !strings.HasPrefix(id, "wf_") {
		t.Fatalf("metal deploy = %q, want a workflow", id)
	}
	c.fails("INVALID_INPUT: workflow-running", "metal", "inspect", "m1")
	c.fails(`INVALID_INPUT: profile "none"`, "workflow", "start", "none", "m1")
	deadline := time.Now().Add(10 * time.Second)
	for !strings.Contains(c.run("", "workflow", "show", id), "waiting for the site's box") {
		if time.Now().After(deadline) {
			t.Fatalf("workflow show = %q", c.run("", "workflow", "show", id))
		}
		time.Sleep(20 * time.Millisecond)
	}
	if out := c.run("", "workflow", "list"); !strings.Contains(out, id) || !strings.Contains(out, "main.1 pxe.assign-ramdisk") {
		t.Errorf("workflow list = %q", out)
	}
	c.fails("NOT_FOUND: ", "workflow", "show", "wf_none")
	c.run("", "events")
	c.run("", "events", "--site", "lab", "--limit", "5")

	// The workflow outlives the gateway, and a token that was replaced does not.
	c.halt()
	old, err := os.ReadFile(filepath.Join(c.dir, keys.TokenFile))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(c.dir, keys.TokenFile), []byte("another-token-of-forty-characters-0123456\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c.serve()
	if out := c.run("", "workflow", "show", id); !strings.Contains(out, "running") {
		t.Errorf("workflow show after the restart = %q", out)
	}
	stale := c.settings("stale", string(old))
	if _, _, err := c.runAs(stale, "", "site", "list"); err == nil || !strings.HasPrefix(err.Error(), "PERMISSION_DENIED: the bearer token is unknown") {
		t.Errorf("site list with the old token = %v", err)
	}
	// A watcher ends with its context, and says why.
	ctx, stop := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer stop()
	var watched buffer
	err = dispatch(ctx, "better-compute", commands(), []string{"workflow", "watch", id, "--client", c.client}, stdio{nil, &watched, &watched})
	if err == nil || !strings.Contains(err.Error(), "goes on: better-compute workflow watch "+id) || !strings.Contains(watched.String(), "window.open") {
		t.Errorf("workflow watch = %q, %v", watched.String(), err)
	}
	c.run("", "workflow", "cancel", id)
	for !strings.Contains(c.run("", "workflow", "show", id), "cancelled") {
		if time.Now().After(deadline.Add(20 * time.Second)) {
			t.Fatalf("workflow show = %q, want it cancelled", c.run("", "workflow", "show", id))
		}
		time.Sleep(20 * time.Millisecond)
	}
	c.fails("INVALID_INPUT: workflow-ended", "workflow", "cancel", id)
}

// settings writes a client's settings with another token.
func (c *cli) settings(name, token string) string {
	c.t.Helper()
	file := filepath.Join(c.dir, name+".token")
	if err := os.WriteFile(file, []byte(token), 0o600); err != nil {
		c.t.Fatal(err)
	}
	path := filepath.Join(c.dir, name+".toml")
	if err := os.WriteFile(path, []byte("url = \"https://"+c.listen+"\"\nca_file = \"ca.crt\"\ntoken_file = \""+file+"\"\ntenant = \"acme\"\n"), 0o600); err != nil {
		c.t.Fatal(err)
	}
	return path
}

func TestGatewayToken(t *testing.T) {
	c := newCLI(t)
	defer c.halt()
	token, _, err := c.runAs("", "", "gateway", "token", "--dir", c.dir, "--tenant", "acme", "--name", "reader", "--allow", "compute:sites:read")
	if err != nil {
		t.Fatal(err)
	}
	acme := c.settings("acme", token)
	if _, _, err := c.runAs(acme, "", "site", "list"); err != nil {
		t.Errorf("site list = %v", err)
	}
	for args, want := range map[string]string{
		"site add lab":               "PERMISSION_DENIED: the token lacks compute:sites:write",
		"site list --tenant default": "PERMISSION_DENIED: the token is not tenant default's",
		"metal list":                 "PERMISSION_DENIED: the token lacks compute:metal:read",
	} {
		if _, _, err := c.runAs(acme, "", strings.Fields(args)...); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s = %v, want %q", args, err, want)
		}
	}
	for _, args := range []string{
		"--tenant acme --name x --allow compute:everything:write",
		"--tenant * --name x --allow compute:sites:read",
		"--tenant acme --allow compute:sites:read",
		"--tenant acme --name x",
	} {
		if _, _, err := c.runAs("", "", append([]string{"gateway", "token", "--dir", c.dir}, strings.Fields(args)...)...); err == nil {
			t.Errorf("gateway token %s = nil, want a refusal", args)
		}
	}
}

// TestGatewayOfSomebodyElse: a server with another CA is not told the token.
func TestGatewayOfSomebodyElse(t *testing.T) {
	c, other := newCLI(t), newCLI(t)
	defer c.halt()
	defer other.halt()
	path := other.settings("mixed", "token-of-more-than-thirty-two-characters")
	if err := os.WriteFile(filepath.Join(other.dir, "mixed.toml"), []byte("url = \"https://"+c.listen+"\"\nca_file = \"ca.crt\"\ntoken_file = \"admin.token\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.runAs(path, "", "site", "list"); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("site list at another gateway = %v, want a certificate error", err)
	}
}

func TestParseClient(t *testing.T) {
	good := "# x\nurl = \"https://g:1\"\n\nca_file = \"ca.crt\"\ntoken_file = \"/abs/token\"\n"
	s, err := parseClient("/etc/bc/client.toml", []byte(good))
	if err != nil || s.url != "https://g:1" || s.caFile != "/etc/bc/ca.crt" || s.tokenFile != "/abs/token" || s.tenant != "default" {
		t.Errorf("parseClient = %+v, %v", s, err)
	}
	for text, want := range map[string]string{
		good + "x = \"1\"\n":                      "c.toml:6: unknown key \"x\"",
		good + "url = \"https://h\"":              "c.toml:6: key \"url\" is given twice",
		good + "tenant = acme\n":                  "c.toml:6: want key",
		good + "[section]\n":                      "c.toml:6: want key",
		"url = \"https://g:1\"\n":                 "c.toml: key \"ca_file\" is missing",
		strings.Replace(good, "https", "http", 1): "c.toml: url",
	} {
		if _, err := parseClient("c.toml", []byte(text)); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("parseClient(%q) = %v, want %q", text, err, want)
		}
	}
}

func FuzzParseClient(f *testing.F) {
	f.Add([]byte("url = \"https://g:1\"\nca_file = \"ca.crt\"\ntoken_file = \"t\"\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if s, err := parseClient("/x/client.toml", data); err == nil && (!strings.HasPrefix(s.url, "https://") || !filepath.IsAbs(s.caFile) || !filepath.IsAbs(s.tokenFile)) {
			t.Errorf("parseClient(%q) = %+v", data, s)
		}
	})
}

// Whoever interrupts a call is told that it may still be done.
func TestInterrupted(t *testing.T) {
	c := newCLI(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := dispatch(ctx, "better-compute", commands(), []string{"site", "list", "--client", c.client}, stdio{nil, io.Discard, io.Discard})
	if err == nil || !strings.Contains(err.Error(), "interrupted: what was sent may still be done") {
		t.Errorf("site list, interrupted = %v", err)
	}
}

func TestFlags(t *testing.T) {
	for _, c := range []struct {
		args string
		want string
		efi  bool
		ok   bool
	}{
		{"m1 pxe --efi", "m1 pxe", true, true},
		{"--efi m1 pxe", "m1 pxe", true, true},
		{"m1 --efi pxe", "m1 pxe", true, true},
		{"m1 pxe", "m1 pxe", false, true},
		{"-- m1 --efi", "m1 --efi", false, true},
		{"m1", "", false, false},
		{"m1 pxe x", "", false, false},
		{"m1 pxe --nonsense", "", false, false},
	} {
		f := newFlags("x", stdio{nil, &buffer{}, &buffer{}})
		efi := f.Bool("efi", false, "")
		got, err := f.parse(strings.Fields(c.args), 2, 2)
		if (err == nil) != c.ok || strings.Join(got, " ") != c.want || *efi != c.efi {
			t.Errorf("parse(%s) = %q, efi %t, %v, want %q, efi %t", c.args, got, *efi, err, c.want, c.efi)
		}
	}
}

func TestClean(t *testing.T) {
	for in, want := range map[string]string{"": "-", "plain": "plain", "\x1b[31mred": "·[31mred", "a\nb": "a·b", "käse": "käse"} {
		if got := clean(in); got != want {
			t.Errorf("clean(%q) = %q, want %q", in, got, want)
		}
	}
}
