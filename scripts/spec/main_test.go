package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const good = `# A map

| id | behaviour | lines | tests |
| --- | --- | --- | --- |
| DECL-1 | a \| b | 1, 3-4 | a/b.TestOne, a/b.TestTwo/sub |
| DECL-2 | c | 4 | c.FuzzThree |

## Nothing to build

| lines | reason |
| --- | --- |
| 6 | a heading |
`

// second is a map of behaviours that the specification does not ask for.
const second = `# Another map

| id | behaviour | lines | tests |
| --- | --- | --- | --- |
| MORE-1 | d | - | c.FuzzThree |
`

// third is one more.
const third = `# A third map

| id | behaviour | lines | tests |
| --- | --- | --- | --- |
| LAST-1 | e | 4 | c.FuzzThree |
`

// tree makes a checkout with the maps, tests and, unless it is "", results.
func tree(t *testing.T, spec, results string) string {
	t.Helper()
	dir := t.TempDir()
	for path, text := range map[string]string{
		mapFiles[0]: spec, mapFiles[1]: second, mapFiles[2]: third, resultsFile: results,
		knownSkipsFile:  "# c: x\ngithub.com/better-compute/site-appliance/a/b.TestTwo/sub: needs a moon\n",
		"a/b/x_test.go": "package b\nimport \"testing\"\nfunc TestOne(t *testing.T) {}\nfunc TestTwo(t *testing.T) {}\n",
		"c/x_test.go":   "package c\nimport \"testing\"\nfunc FuzzThree(f *testing.F) {}\ntype x struct{}\nfunc (x) TestMethod() {}\n",
	} {
		if text == "" {
			continue
		}
		path = filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestParse(t *testing.T) {
	rows, exempts, err := parse(good)
	if err != nil || len(rows) != 2 || len(exempts) != 1 {
		t.Fatalf("parse() = %v, %v, %v", rows, exempts, err)
	}
	r := rows[0]
	if r.id != "DECL-1" || r.behaviour != "a | b" || !slices.Equal(r.lines, []span{{1, 1}, {3, 4}}) || !slices.Equal(r.tests, []string{"a/b.TestOne", "a/b.TestTwo/sub"}) {
		t.Errorf("the first row is %+v", r)
	}
	for name, text := range map[string]string{
		"no rows":             "# A map\n",
		"an id twice":         strings.ReplaceAll(good, "DECL-2", "DECL-1"),
		"a bad id":            strings.ReplaceAll(good, "DECL-2", "decl 2"),
		"no behaviour":        strings.ReplaceAll(good, "| c |", "| |"),
		"bad lines":           strings.ReplaceAll(good, "3-4", "4-3"),
		"no lines":            strings.ReplaceAll(good, "1, 3-4", ""),
		"a test without home": strings.ReplaceAll(good, "a/b.TestOne", "TestOne"),
		"a bar too many":      strings.ReplaceAll(good, `a \| b`, "a | b"),
		"no reason":           strings.ReplaceAll(good, "a heading", ""),
	} {
		if _, _, err := parse(text); err == nil {
			t.Errorf("%s: parse() succeeded", name)
		}
	}
}

const passed = `{"tests":{"github.com/better-compute/site-appliance/a/b":{"TestOne":"pass","TestTwo":"pass","TestTwo/sub":"pass"},
"github.com/better-compute/site-appliance/c":{"FuzzThree":"pass"}}}`

func TestRun(t *testing.T) {
	const text = "one\n\nthree\nfour\n\nsix\n"
	for _, tt := range []struct {
		name, spec, results, text string
		want                      string // in what is printed; "": all is well
	}{
		{"all well", good, passed, text, ""},
		{"without a run", good, "", text, ""},
		{"without the text", good, passed, "", ""},
		{"a test that does not exist", strings.ReplaceAll(good, "TestOne", "TestNone"), "", "", "DECL-1 names a/b.TestNone, which does not exist"},
		{"a method is no test", strings.ReplaceAll(good, "c.FuzzThree", "c.TestMethod"), "", "", "which does not exist"},
		{"a folder that does not exist", strings.ReplaceAll(good, "c.FuzzThree", "d.FuzzThree"), "", "", "which does not exist"},
		{"no test", strings.ReplaceAll(good, "c.FuzzThree", ""), "", "", "DECL-2 has no test"},
		{"a test that did not run", good, strings.ReplaceAll(passed, `"TestOne":"pass",`, ""), "", "DECL-1 names a/b.TestOne, which did not run"},
		{"a part that did not run", good, strings.ReplaceAll(passed, `"TestTwo/sub":"pass"`, `"x":"pass"`), "", "a/b.TestTwo/sub, which did not run"},
		{"a test that failed", good, strings.ReplaceAll(passed, `"FuzzThree":"pass"`, `"FuzzThree":"fail"`), "", "c.FuzzThree: fail"},
		{"a test that was skipped", good, strings.ReplaceAll(passed, `"TestOne":"pass"`, `"TestOne":"skip"`), "", "a/b.TestOne: skip"},
		{"a test whose skip is known", good, strings.ReplaceAll(passed, `"TestTwo/sub":"pass"`, `"TestTwo/sub":"skip"`), "", ""},
		{"a line in no row", good, passed, text + "seven\n", "line 7 of the specification is in no row"},
		{"a line that is not there", good, passed, "one\n\nthree\n", "the specification has no line 4"},
	} {
		dir, spec := tree(t, tt.spec, tt.results), ""
		if tt.text != "" {
			spec = filepath.Join(dir, "spec.txt")
			if err := os.WriteFile(spec, []byte(tt.text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		var out bytes.Buffer
		if err := run(dir, spec, &out); (err == nil) != (tt.want == "") || !strings.Contains(out.String(), tt.want) {
			t.Errorf("%s: run() = %v, printed %q, want %q", tt.name, err, out.String(), tt.want)
		}
	}
	for name, f := range map[string]func() error{
		"no map":  func() error { return run(t.TempDir(), "", &bytes.Buffer{}) },
		"no text": func() error { return run(tree(t, good, passed), "/nowhere", &bytes.Buffer{}) },
		"an id in two maps": func() error {
			return run(tree(t, strings.ReplaceAll(good, "DECL-2", "MORE-1"), passed), "", &bytes.Buffer{})
		},
		"bad results": func() error { return run(tree(t, good, "{"), "", &bytes.Buffer{}) },
	} {
		if f() == nil {
			t.Errorf("%s: run() succeeded", name)
		}
	}
}
