package main

import (
	"strings"
	"testing"
)

// A machine whose agent has never come takes what it is to run, for later.
func TestInstanceCommands(t *testing.T) {
	c := newCLI(t)
	defer c.halt()
	c.enrolBox(c.run("", "site", "add", "lab"))
	c.run("", "pool", "add", "metal", "--site", "lab")
	c.run(`{"username":"root","password":"x"}`, "secret", "put", "bmc")
	c.run("", "metal", "enroll", "m1", "--pool", "metal", "--driver", "ipmi", "--address", "192.0.2.7", "--credentials", "bmc", "--mac", "52:54:00:00:00:01")

	out := c.run(`{"argv":["/bin/x"]}`, "instance", "apply", "web", "--machine", "m1", "--runtime", "process", "--spec", "-")
	if !strings.Contains(out, "inst_") || !strings.Contains(out, "pending") {
		t.Errorf("instance apply = %q, want an id and pending", out)
	}
	if out := c.run("", "instance", "list", "--machine", "m1"); !strings.Contains(out, "web") || !strings.Contains(out, "process") {
		t.Errorf("instance list = %q", out)
	}
	if out := c.run("", "instance", "list", "--json"); !strings.Contains(out, `"spec_json"`) {
		t.Errorf("instance list --json = %q", out)
	}
	c.fails("usage: ", "instance", "apply", "--machine", "m1")
	c.fails("INVALID_INPUT: spec_json", "instance", "apply", "web", "--machine", "m1", "--runtime", "process", "--spec", "-")
	c.fails("NOT_FOUND: ", "instance", "remove", "db", "--machine", "m1")
	c.fails("INVALID_INPUT: machine is missing", "instance", "remove", "web")
	c.run("", "instance", "remove", "web", "--machine", "m1")
	if out := c.run("", "instance", "list"); strings.Contains(out, "web") {
		t.Errorf("instance list = %q, want nothing left", out)
	}
}
