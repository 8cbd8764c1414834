package main

import (
	"bytes"
	"context"
	"os"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/plugins/conformance"
	"github.com/better-compute/site-appliance/plugins/conformance/reference"
	"github.com/better-compute/site-appliance/plugins/sdk"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "plugin" {
		d, err := reference.Driver()
		if err != nil {
			panic(err)
		}
		os.Exit(sdk.Main(sdk.Options{}, d))
	}
	os.Exit(m.Run())
}

func TestRun(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		args []string
		code int
		out  string
	}{
		{[]string{"-only", "cookie.missing,args.array", self, "plugin"}, 0, "2 passed, 0 failed, 0 skipped"},
		{[]string{"-only", "handshake.first", "/bin/echo", "hello"}, 1, `FAIL  handshake.first`},
		{[]string{"-only", "no.rule", self, "plugin"}, 2, ""},
		{[]string{"/nonexistent"}, 2, ""},
		{nil, 2, ""},
		{[]string{"-unknown"}, 2, ""},
		{[]string{"-list"}, 0, "cookie.missing"},
	} {
		var stdout, stderr bytes.Buffer
		code := run(context.Background(), tt.args, &stdout, &stderr)
		if code != tt.code || !strings.Contains(stdout.String(), tt.out) || (code == 2) != (stderr.Len() > 0) {
			t.Errorf("run(%q) = %d, %q, %q, want %d and %q", tt.args, code, stdout.String(), stderr.String(), tt.code, tt.out)
		}
	}
	var list bytes.Buffer
	run(context.Background(), []string{"-list"}, &list, &list)
	if got, want := strings.Count(list.String(), "\n"), len(conformance.Rules()); got != want {
		t.Errorf("-list prints %d rules, want %d", got, want)
	}
}
