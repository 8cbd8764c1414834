package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// quoted is an argument in quotes, one word to a shell.
var quoted = regexp.MustCompile(`"[^"]*"`)

// The commands on the pages about machines, BMCs, approvals, instances and the gateway
// have the options that they are shown with: each gets as far as looking for a gateway.
func TestDocumentedCommands(t *testing.T) {
	seen := 0
	for _, page := range []string{"machines.md", "bmc.md", "approvals.md", "gateway.md", "instances.md"} {
		data, err := os.ReadFile(filepath.Join("../../../docs", page))
		if err != nil {
			t.Fatal(err)
		}
		text := strings.ReplaceAll(string(data), "\\\n", " ")
		for line := range strings.Lines(text) {
			line, ok := strings.CutPrefix(strings.TrimSpace(line), "better-compute ")
			if !ok || strings.HasPrefix(line, "gateway ") || strings.HasPrefix(line, "approver ") || strings.HasPrefix(line, "bmc probe ") {
				continue
			}
			line, _, _ = strings.Cut(line, "#")
			line, _, _ = strings.Cut(line, " < ")
			line, _, _ = strings.Cut(line, " > ")
			args := append(strings.Fields(quoted.ReplaceAllString(line, "quoted")), "--client", filepath.Join(t.TempDir(), "none.toml"))
			var out, notes bytes.Buffer
			err := dispatch(t.Context(), "better-compute", commands(), args, stdio{strings.NewReader("{}"), &out, &notes})
			if err == nil || !strings.Contains(err.Error(), "read client settings") {
				t.Errorf("%s: better-compute %s = %v, want it to look for its settings", page, line, err)
			}
			seen++
		}
	}
	if seen < 35 {
		t.Errorf("%d commands were found, want more: the pages are written otherwise", seen)
	}
}
