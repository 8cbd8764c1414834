// Command spec holds the maps of the driver specification, plugins/SPEC.md,
// bmc/SPEC.md and pxe/SPEC.md, against the tests: each that a row names must exist and, once the
// suite has run, have passed. With SPEC_TEXT naming the specification's file it
// also wants every line of it in a row of one of them, or in a list of lines that
// state nothing to build.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

var mapFiles = []string{"plugins/SPEC.md", "bmc/SPEC.md", "pxe/SPEC.md"}

const (
	resultsFile    = "out/test.json"
	knownSkipsFile = "scripts/testrun/known-skips.txt"
)

// row is a behaviour.
type row struct {
	id, behaviour string
	lines         []span
	tests         []string
	at            int // line in the map
}

// exempt are lines that state nothing to build.
type exempt struct {
	lines  []span
	reason string
}

// span is a range of lines, both ends included.
type span struct{ from, to int }

func main() {
	if err := run(".", os.Getenv("SPEC_TEXT"), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "spec:", err)
		os.Exit(1)
	}
}

// run checks the maps of the checkout in dir, and prints what is wrong with them.
func run(dir, specText string, out io.Writer) error {
	rows, exempts, err := readMaps(dir)
	if err != nil {
		return err
	}
	wrong, tests := existing(dir, rows)
	results, err := readResults(filepath.Join(dir, resultsFile))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		fmt.Fprintf(out, "spec: no %s: whether the tests pass is not checked (make test writes it)\n", resultsFile)
	case err != nil:
		return err
	default:
		known, err := knownSkips(filepath.Join(dir, knownSkipsFile))
		if err != nil {
			return err
		}
		bad, notes := notPassed(rows, results, known)
		wrong = append(wrong, bad...)
		for _, n := range notes {
			fmt.Fprintln(out, "spec:", n)
		}
	}
	if specText != "" {
		text, err := os.ReadFile(specText)
		if err != nil {
			return fmt.Errorf("SPEC_TEXT: %w", err)
		}
		wrong = append(wrong, unmapped(rows, exempts, string(text))...)
	}
	for _, w := range wrong {
		fmt.Fprintln(out, "spec:", w)
	}
	fmt.Fprintf(out, "spec: %d rows, %d tests\n", len(rows), tests)
	if len(wrong) > 0 {
		return fmt.Errorf("%d things are wrong", len(wrong))
	}
	return nil
}

var (
	rowHeader    = []string{"id", "behaviour", "lines", "tests"}
	exemptHeader = []string{"lines", "reason"}
	idForm       = regexp.MustCompile(`^[A-Z]+-[0-9]+$`)
	testForm     = regexp.MustCompile(`^[a-z0-9_/.-]+\.(Test|Fuzz|Example)[A-Za-z0-9_]*(/[^ ,]+)?$`)
)

// readMaps joins the maps' tables. A row's id stands in one of them only.
func readMaps(dir string) (rows []row, exempts []exempt, err error) {
	where := map[string]string{}
	for _, name := range mapFiles {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return nil, nil, fmt.Errorf("run from the top of the checkout: %w", err)
		}
		r, e, err := parse(string(text))
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", name, err)
		}
		for _, row := range r {
			if where[row.id] != "" {
				return nil, nil, fmt.Errorf("%s: line %d: %s is in %s too", name, row.at, row.id, where[row.id])
			}
			where[row.id] = name
		}
		rows, exempts = append(rows, r...), append(exempts, e...)
	}
	return rows, exempts, nil
}

// parse reads the tables of a map. Other text is for people.
func parse(text string) (rows []row, exempts []exempt, err error) {
	var header []string
	seen := map[string]bool{}
	number := 0
	for line := range strings.Lines(text) {
		number++
		cells, ok := cells(line)
		if !ok {
			header = nil
			continue
		}
		fail := func(format string, args ...any) error {
			return fmt.Errorf("line %d: %s", number, fmt.Sprintf(format, args...))
		}
		switch {
		case header == nil:
			header = cells
		case strings.Trim(strings.Join(cells, ""), ":- ") == "":
			// The line under the header.
		case slices.Equal(header, rowHeader):
			if len(cells) != len(rowHeader) {
				return nil, nil, fail("%d cells: want %d", len(cells), len(rowHeader))
			}
			r := row{id: cells[0], behaviour: cells[1], at: number}
			if !idForm.MatchString(r.id) {
				return nil, nil, fail("id %q is not like DECL-3", r.id)
			}
			if seen[r.id] {
				return nil, nil, fail("%s is there twice", r.id)
			}
			seen[r.id] = true
			if r.behaviour == "" {
				return nil, nil, fail("%s has no behaviour", r.id)
			}
			if r.lines, err = spans(cells[2]); err != nil {
				return nil, nil, fail("%s: %v", r.id, err)
			}
			r.tests = strings.FieldsFunc(cells[3], func(r rune) bool { return r == ' ' || r == ',' })
			for _, t := range r.tests {
				if !testForm.MatchString(t) {
					return nil, nil, fail("%s: %q is not like folder.TestName", r.id, t)
				}
			}
			rows = append(rows, r)
		case slices.Equal(header, exemptHeader):
			if len(cells) != len(exemptHeader) || cells[1] == "" {
				return nil, nil, fail("lines without a reason")
			}
			e := exempt{reason: cells[1]}
			if e.lines, err = spans(cells[0]); err != nil {
				return nil, nil, fail("%v", err)
			}
			exempts = append(exempts, e)
		}
	}
	if len(rows) == 0 {
		return nil, nil, errors.New("it has no rows")
	}
	return rows, exempts, nil
}

// cells are a table row's.
func cells(line string) ([]string, bool) {
	line = strings.TrimSpace(line)
	if len(line) < 2 || line[0] != '|' || line[len(line)-1] != '|' {
		return nil, false
	}
	const bar = "\x00"
	parts := strings.Split(strings.ReplaceAll(line[1:len(line)-1], `\|`, bar), "|")
	for i, p := range parts {
		parts[i] = strings.TrimSpace(strings.ReplaceAll(p, bar, "|"))
	}
	return parts, true
}

// spans reads "1, 3-5". A behaviour that the specification does not ask for has "-".
func spans(text string) ([]span, error) {
	if text == "-" {
		return nil, nil
	}
	var s []span
	for part := range strings.SplitSeq(text, ",") {
		from, to, both := strings.Cut(strings.TrimSpace(part), "-")
		if !both {
			to = from
		}
		a, err1 := strconv.Atoi(from)
		b, err2 := strconv.Atoi(to)
		if err1 != nil || err2 != nil || a < 1 || b < a {
			return nil, fmt.Errorf("%q is no range of lines", part)
		}
		s = append(s, span{a, b})
	}
	return s, nil
}

// split is a test's folder, and its function.
func split(test string) (folder, function string) {
	name, sub, _ := strings.Cut(test, ".Test")
	kind := "Test"
	for _, k := range []string{"Fuzz", "Example"} {
		if f, s, ok := strings.Cut(test, "."+k); ok && len(f) < len(name) {
			name, sub, kind = f, s, k
		}
	}
	function, _, _ = strings.Cut(kind+sub, "/")
	return name, function
}

// existing says which rows have no test, or one that does not exist.
func existing(dir string, rows []row) (wrong []string, tests int) {
	folders := map[string]map[string]bool{}
	named := map[string]bool{}
	for _, r := range rows {
		if len(r.tests) == 0 {
			wrong = append(wrong, fmt.Sprintf("%s has no test: %s", r.id, r.behaviour))
		}
		for _, t := range r.tests {
			named[t] = true
			folder, function := split(t)
			if folders[folder] == nil {
				folders[folder] = functions(filepath.Join(dir, folder))
			}
			if !folders[folder][function] {
				wrong = append(wrong, fmt.Sprintf("%s names %s, which does not exist", r.id, t))
			}
		}
	}
	return wrong, len(named)
}

// functions are those of a folder's test files.
func functions(dir string) map[string]bool {
	found := map[string]bool{}
	files, _ := filepath.Glob(filepath.Join(dir, "*_test.go")) // the pattern is good
	for _, path := range files {
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			continue // the suite says so
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil {
				found[fn.Name.Name] = true
			}
		}
	}
	return found
}

// results is what scripts/testrun leaves: "pass", "fail" or "skip" by package
// and test.
type results map[string]map[string]string

func readResults(path string) (results, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var r struct{ Tests results }
	if err := json.Unmarshal(text, &r); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return r.Tests, nil
}

const module = "github.com/better-compute/site-appliance/"

// knownSkips are the tests that scripts/testrun lets be skipped.
func knownSkips(path string) (map[string]bool, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	known := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		name, _, ok := strings.Cut(strings.TrimSpace(line), ": ")
		if ok && !strings.HasPrefix(line, "#") {
			known[name] = true
		}
	}
	return known, nil
}

// notPassed says which tests did not run, or not to a good end. Those that are
// known to be skipped are noted.
func notPassed(rows []row, r results, known map[string]bool) (wrong, notes []string) {
	for _, row := range rows {
		for _, t := range row.tests {
			folder, _ := split(t)
			name := strings.TrimPrefix(t, folder+".")
			switch how := r[module+folder][name]; {
			case how == "pass":
			case how == "skip" && known[module+t]:
				notes = append(notes, fmt.Sprintf("%s names %s, which was skipped, as %s lets it be", row.id, t, knownSkipsFile))
			case how == "":
				wrong = append(wrong, fmt.Sprintf("%s names %s, which did not run", row.id, t))
			default:
				wrong = append(wrong, fmt.Sprintf("%s names %s: %s", row.id, t, how))
			}
		}
	}
	return wrong, notes
}

// unmapped says which lines of the specification nobody speaks of.
func unmapped(rows []row, exempts []exempt, text string) (wrong []string) {
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	spoken := make([]bool, len(lines)+1)
	beyond := map[int]bool{}
	speak := func(spans []span) {
		for _, s := range spans {
			for n := s.from; n <= s.to; n++ {
				if n >= len(spoken) {
					beyond[n] = true
					continue
				}
				spoken[n] = true
			}
		}
	}
	for _, r := range rows {
		speak(r.lines)
	}
	for _, e := range exempts {
		speak(e.lines)
	}
	for i, line := range lines {
		if !spoken[i+1] && strings.TrimSpace(line) != "" {
			wrong = append(wrong, fmt.Sprintf("line %d of the specification is in no row and in no list", i+1))
		}
	}
	for _, n := range slices.Sorted(maps.Keys(beyond)) {
		wrong = append(wrong, fmt.Sprintf("the specification has no line %d", n))
	}
	return wrong
}
