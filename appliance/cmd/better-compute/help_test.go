package main

import (
	"bytes"
	"context"
	"strings"
	"testing"
)

// Help is an answer, not an error: on standard output, and with exit code 0.
func TestHelp(t *testing.T) {
	for _, args := range [][]string{
		{"-h"}, {"help"}, {"gateway", "--help"}, {"gateway", "init", "-h"}, {"gateway", "serve", "-h"}, {"site", "add", "--help"},
		{"metal", "deploy", "rack-1", "-h"}, {"metal", "confirm-power", "-h"}, {"iso", "add", "-h"}, {"iso", "remove", "-h"}, {"metal", "boot-iso", "-h"}, {"metal", "boot-kernel", "-h"}, {"metal", "boot-disk", "-h"}, {"metal", "wipe", "-h"}, {"metal", "loader", "-h"}, {"metal", "found", "-h"}, {"metal", "confirm-mac", "-h"}, {"metal", "reject-mac", "-h"}, {"pxe", "explain", "-h"}, {"iso", "list", "-h"}, {"iso", "show", "-h"}, {"secret", "put", "-h"}, {"artifact", "import", "-h"}, {"workflow", "list", "-h"},
		{"drivers", "list", "-h"}, {"bmc", "probe", "-h"}, {"site", "ca", "-h"}, {"place", "-h"}, {"events", "-h"}, {"image", "build", "-h"}, {"image", "flash", "-h"}, {"image", "test", "-h"}, {"version", "-h"},
	} {
		var out, notes bytes.Buffer
		err := dispatch(context.Background(), "better-compute", commands(), args, stdio{strings.NewReader(""), &out, &notes})
		if err != nil || !strings.HasPrefix(out.String(), "usage: better-compute") || notes.Len() > 0 {
			t.Errorf("better-compute %s = %v, printed %q and %q beside it, want its usage alone", strings.Join(args, " "), err, out.String(), notes.String())
		}
	}
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"pool", "add", "p"}, "missing: --site; usage: better-compute pool add"},
		{[]string{"metal", "enroll", "m", "--pool", "p"}, "missing: --driver, --address; usage"},
		{[]string{"metal", "deploy", "m", "--image", "debian"}, "missing: --disk-serial; usage"},
		{[]string{"artifact", "import", "f"}, "missing: --name; usage"},
		{[]string{"metal", "boot-kernel", "m"}, "missing: --kernel; usage"},
		{[]string{"metal", "wipe", "m"}, "missing: --disk-serial; usage"},
		{[]string{"gateway", "init", "--dir", t.TempDir(), "--url", "gw:7443"}, `--url "gw:7443": want https://HOST:PORT`},
	} {
		var out, notes bytes.Buffer
		err := dispatch(context.Background(), "better-compute", commands(), tt.args, stdio{strings.NewReader(""), &out, &notes})
		if err == nil || !strings.Contains(err.Error(), tt.want) || strings.Count(err.Error(), "\n") > 0 {
			t.Errorf("better-compute %s = %v, want %q", strings.Join(tt.args, " "), err, tt.want)
		}
	}
	for _, args := range [][]string{{"image", "flash", "--nope"}, {"image", "verify"}, {"site", "add", "--nope"}, {"site", "add"}} {
		var out, notes bytes.Buffer
		err := dispatch(context.Background(), "better-compute", commands(), args, stdio{strings.NewReader(""), &out, &notes})
		if err == nil || !strings.Contains(err.Error(), "usage: better-compute "+args[0]+" "+args[1]) || strings.Count(err.Error(), "\n") > 0 || out.Len() > 0 {
			t.Errorf("better-compute %s = %v, printed %q, want an error with the usage", strings.Join(args, " "), err, out.String())
		}
	}
}
