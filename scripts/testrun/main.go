// Command testrun runs the whole test suite in two passes (what needs no
// virtual machine, then what boots one, a package at a time), fuzzes a few parsers
// whose turn it is, prints what failed and what was skipped and why, and with
// CI=true fails on any skip that scripts/testrun/known-skips.txt does not list.
// How each test ended is in out/test.json. Arguments are go test's; with any,
// nothing is fuzzed.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

const (
	knownSkips  = "scripts/testrun/known-skips.txt"
	resultsFile = "out/test.json"
)

type event struct {
	Action  string
	Package string
	Test    string
	Elapsed float64
	Output  string
}

type suite struct {
	passed, failed, skipped int
	seconds                 map[string]float64
	output                  map[string][]string // package + "." + test -> its lines
	skips                   []string
	results                 map[string]map[string]string // package -> test -> how it ended
}

func newSuite() *suite {
	return &suite{seconds: map[string]float64{}, output: map[string][]string{}, results: map[string]map[string]string{}}
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "testrun:", err)
		os.Exit(1)
	}
}

func run(extra []string) error {
	known, err := readKnown()
	if err != nil {
		return err
	}
	plain, vms, err := packages()
	if err != nil {
		return err
	}
	s := newSuite()
	start := time.Now()
	for _, pass := range []struct {
		pkgs []string
		args []string
	}{
		{plain, []string{"-timeout", "20m"}},
		{vms, []string{"-p", "1", "-timeout", "60m"}},
	} {
		if len(pass.pkgs) == 0 {
			continue
		}
		args := append([]string{"test", "-json", "-count=1"}, pass.args...)
		args = append(append(args, extra...), pass.pkgs...)
		if err := s.pass(args); err != nil {
			return err
		}
	}
	if err := s.write(resultsFile); err != nil {
		return err
	}
	if len(extra) == 0 {
		if err := s.fuzz(start); err != nil {
			return err
		}
	}
	if err := s.table(time.Since(start)); err != nil {
		return err
	}
	var unlisted []string
	for _, skip := range s.skips {
		name, _, _ := strings.Cut(skip, ": ")
		if !slices.Contains(known, name) {
			unlisted = append(unlisted, skip)
		}
	}
	for _, skip := range s.skips {
		fmt.Println("SKIPPED", skip)
	}
	fmt.Printf("%d passed, %d failed, %d skipped\n", s.passed, s.failed, s.skipped)
	switch {
	case s.failed > 0:
		return fmt.Errorf("%d failed", s.failed)
	case s.passed == 0:
		return fmt.Errorf("no test ran")
	case os.Getenv("CI") == "true" && len(unlisted) > 0:
		return fmt.Errorf("%d skipped that %s does not list", len(unlisted), knownSkips)
	}
	return nil
}

// packages splits the module's packages by whether their tests boot a virtual machine.
func packages() (plain, vms []string, err error) {
	out, err := exec.Command("go", "list", "-f", `{{.ImportPath}} {{join .TestImports ","}},{{join .XTestImports ","}}`, "./...").Output()
	if err != nil {
		return nil, nil, fmt.Errorf("go list: %w", err)
	}
	for line := range strings.Lines(string(out)) {
		pkg, imports, _ := strings.Cut(strings.TrimSpace(line), " ")
		if strings.Contains(imports, "/image/qemutest") || strings.HasSuffix(pkg, "/image/qemutest") {
			vms = append(vms, pkg)
		} else {
			plain = append(plain, pkg)
		}
	}
	return plain, vms, nil
}

func (s *suite) pass(args []string) error {
	cmd := exec.Command("go", args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e event
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			fmt.Println(lines.Text())
			continue
		}
		s.event(e)
	}
	if err := cmd.Wait(); err != nil && s.failed == 0 {
		s.failed++
		return fmt.Errorf("go test: %w", err)
	}
	return lines.Err()
}

func (s *suite) event(e event) {
	key := e.Package + "." + e.Test
	switch e.Action {
	case "output", "build-output":
		s.output[key] = append(s.output[key], e.Output)
		if e.Action == "build-output" {
			fmt.Print(e.Output)
		}
		return
	case "pass", "fail", "skip":
	default:
		return
	}
	text := strings.Join(s.output[key], "")
	delete(s.output, key)
	if e.Test == "" {
		s.seconds[e.Package] = e.Elapsed
		if e.Action == "fail" {
			s.failed++
			fmt.Printf("FAIL %s\n%s", e.Package, text)
		} else {
			fmt.Printf("%-4s %7.1f s  %s\n", e.Action, e.Elapsed, e.Package)
		}
		return
	}
	if s.results[e.Package] == nil {
		s.results[e.Package] = map[string]string{}
	}
	s.results[e.Package][e.Test] = e.Action
	switch e.Action {
	case "pass":
		s.passed++
	case "fail":
		s.failed++
		fmt.Printf("FAIL %s %s\n%s", e.Package, e.Test, text)
	case "skip":
		s.skipped++
		s.skips = append(s.skips, fmt.Sprintf("%s.%s: %s", e.Package, e.Test, reason(text)))
	}
}

// reason is the skip's own message, without go test's framing.
func reason(output string) string {
	var parts []string
	for line := range strings.Lines(output) {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, "=== ") && !strings.HasPrefix(line, "--- ") {
			parts = append(parts, line)
		}
	}
	return strings.Join(parts, " ")
}

// write leaves how each test ended, for scripts/spec.
func (s *suite) write(path string) error {
	text, err := json.MarshalIndent(map[string]any{"tests": s.results}, "", "\t")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o644)
}

// table writes each package's seconds to out/test-seconds.tsv, slowest first.
func (s *suite) table(whole time.Duration) error {
	var names []string
	for name := range s.seconds {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int {
		switch {
		case s.seconds[a] > s.seconds[b]:
			return -1
		case s.seconds[a] < s.seconds[b]:
			return 1
		}
		return strings.Compare(a, b)
	})
	var b strings.Builder
	fmt.Fprintf(&b, "whole suite, builds included\t%.1f\n", whole.Seconds())
	for _, name := range names {
		fmt.Fprintf(&b, "%s\t%.1f\n", name, s.seconds[name])
	}
	if err := os.MkdirAll("out", 0o755); err != nil {
		return err
	}
	return os.WriteFile("out/test-seconds.tsv", []byte(b.String()), 0o644)
}

// readKnown reads the allowed skips: "<package>.<test>: <reason>" a line.
func readKnown() ([]string, error) {
	data, err := os.ReadFile(knownSkips)
	if err != nil {
		return nil, fmt.Errorf("run from the top of the checkout: %w", err)
	}
	var names []string
	for line := range strings.Lines(string(data)) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, why, ok := strings.Cut(line, ": ")
		if !ok || why == "" {
			return nil, fmt.Errorf("%s: %q has no reason", knownSkips, line)
		}
		names = append(names, name)
	}
	return names, nil
}
