package site

import (
	"context"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/site/console"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/bmc/redfish"
	"github.com/better-compute/site-appliance/bmc/relay"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// redfishConsole is the kind with the redfish driver of this process, and a BMC.
func redfishConsole(t *testing.T, w bmctest.WebConsole) (*bmctest.Redfish, dispatch.Kind, *bmcv1.BmcOperationRequest) {
	t.Helper()
	r, err := bmctest.StartRedfish(t.Context(), "127.0.0.1:0", "admin", "s3cret", bmctest.NewFake(), bmctest.WithWebConsole(w))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	r.Console().Echo(true)
	own, logOut, err := redfish.New(redfish.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { logOut(context.Background()) })
	book, err := addressbook.Open("")
	if err != nil {
		t.Fatal(err)
	}
	desk := console.New(console.Options{Retry: backoff.Policy{Min: time.Millisecond, Max: 10 * time.Millisecond}})
	k := consoleKind(relay.New(relay.Options{Book: book, BuiltIn: []*driver.Definition{own}}), nil, desk, func(string, string, string, any) error { return nil })
	return r, k, &bmcv1.BmcOperationRequest{Driver: redfish.ID, Address: r.Addr(), TlsSpkiSha256: r.SPKI(), CredentialsRef: "secret://acme/bmc", Operation: "console.open"}
}

// expect reads until text was said.
func expect(t *testing.T, r io.Reader, text string) {
	t.Helper()
	var said strings.Builder
	buf := make([]byte, 256)
	for !strings.Contains(said.String(), text) {
		n, err := r.Read(buf)
		said.Write(buf[:n])
		if err != nil {
			t.Fatalf("%q, %v; want %q", said.String(), err, text)
		}
	}
}

// TestConsoleKindOverRedfish: an OpenBMC's console is carried without a plugin, comes
// back after a loss, goes to who takes it over with what was said before, and is
// left when the person leaves.
func TestConsoleKindOverRedfish(t *testing.T) {
	bmc, k, req := redfishConsole(t, bmctest.WebConsole{Path: "/console0", OpenBMC: true, Stale: 1})
	type ended struct {
		result []byte
		err    error
	}
	var order []string
	sit := func(args string) (net.Conn, chan ended) {
		near, person := net.Pipe()
		_ = person.SetDeadline(time.Now().Add(time.Minute))
		req.ArgsJson = args
		call := callOf(t, k, req, near, &order)
		done := make(chan ended, 1)
		go func() {
			result, err := k.Run(t.Context(), call)
			done <- ended{result, err}
		}()
		return person, done
	}
	first, firstDone := sit("")
	_, _ = first.Write([]byte("one\r"))
	expect(t, first, "one\r")
	bmc.DropWebConsoles()
	expect(t, first, "open again")
	_, _ = first.Write([]byte("two\r"))
	expect(t, first, "two\r")

	second, secondDone := sit(`[{"takeover":true,"historyBytes":4096}]`)
	go func() { _, _ = io.Copy(io.Discard, first) }()
	if end := <-firstDone; errs.CodeOf(end.err) != errs.Cancelled || !strings.Contains(end.err.Error(), "taken over") {
		t.Errorf("the first owner: %v, want that the console was taken over", end.err)
	}
	expect(t, second, "two\r")
	_, _ = second.Write([]byte("three\r"))
	expect(t, second, "three\r")
	second.Close()
	end := <-secondDone
	if end.err != nil {
		t.Errorf("the second owner left: %v", end.err)
	}
	result := &bmcv1.BmcOperationResult{}
	if err := proto.Unmarshal(end.result, result); err != nil || !strings.Contains(result.ResultJson, `"sent":6`) {
		t.Errorf("result %s, %v", result.ResultJson, err)
	}
	// The BMC hears of it a moment later.
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		open, left := bmc.WebConsoles()
		if open == 0 && left == 2 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d are open at the BMC and %d were left with a word, want 0 and 2", open, left)
		}
	}
}

// TestConsoleKindNotInRedfish: a BMC that has its console elsewhere says where.
func TestConsoleKindNotInRedfish(t *testing.T) {
	_, k, req := redfishConsole(t, bmctest.WebConsole{Types: []string{"IPMI", "SSH"}})
	var order []string
	_, err := k.Run(t.Context(), callOf(t, k, req, nil, &order))
	if errs.CodeOf(err) != errs.UnsupportedOperation || !strings.Contains(err.Error(), "IPMI, SSH") || !strings.Contains(err.Error(), "console=ipmi-sol") || strings.Contains(strings.Join(order, " "), "tunnel") {
		t.Errorf("%v after %v, want unsupported-operation that names the ways and ipmi-sol, and no tunnel", err, order)
	}
}
