package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	// fuzzed is how many targets a run takes, fuzzLanes of them at a time, for
	// fuzzTime each: about a minute, with what it takes to build them.
	fuzzed    = 4
	fuzzLanes = 2
	fuzzTime  = "10s"
)

// target is a fuzz test.
type target struct{ pkg, name string }

// rotation is the n targets whose turn it is. Turns that follow each other take
// all of them.
func rotation(all []target, turn, n int) []target {
	if n = min(n, len(all)); n == 0 {
		return nil
	}
	chosen := make([]target, n)
	for i := range chosen {
		chosen[i] = all[(turn*n+i)%len(all)]
	}
	return chosen
}

// turn goes on with each day and with each commit.
func turn(now time.Time) int {
	out, err := exec.Command("git", "rev-list", "--count", "HEAD").Output()
	commits, aerr := strconv.Atoi(strings.TrimSpace(string(out)))
	if err != nil || aerr != nil {
		commits = 0 // not a clone: the days are enough
	}
	return int(now.Unix()/86400) + commits
}

// targets are the module's, in the order of packages and files.
func targets() ([]target, error) {
	out, err := exec.Command("go", "list", "-json=ImportPath,Dir,TestGoFiles,XTestGoFiles", "./...").Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	var all []target
	for dec := json.NewDecoder(bytes.NewReader(out)); dec.More(); {
		var p struct {
			ImportPath, Dir           string
			TestGoFiles, XTestGoFiles []string
		}
		if err := dec.Decode(&p); err != nil {
			return nil, fmt.Errorf("go list: %w", err)
		}
		for _, file := range append(p.TestGoFiles, p.XTestGoFiles...) {
			text, err := os.ReadFile(filepath.Join(p.Dir, file))
			if err != nil {
				return nil, err
			}
			for _, name := range fuzzNames(text) {
				all = append(all, target{p.ImportPath, name})
			}
		}
	}
	return all, nil
}

var fuzzFunc = regexp.MustCompile(`(?m)^func (Fuzz[A-Za-z0-9_]*)\(`)

func fuzzNames(file []byte) (names []string) {
	for _, m := range fuzzFunc.FindAllSubmatch(file, -1) {
		names = append(names, string(m[1]))
	}
	return names
}

var deadline = regexp.MustCompile(`(?m)^--- FAIL: Fuzz\S+ \([0-9.]+s\)\n    context deadline exceeded\nFAIL$`)

// timeIsUp says that a run failed only in that its time ended in the middle of
// an input, which go test reports as a failure of the target's.
func timeIsUp(output []byte) bool {
	return deadline.Match(output) && !bytes.Contains(output, []byte("Failing input written"))
}

// fuzz gives the targets whose turn it is some time of their own.
func (s *suite) fuzz(now time.Time) error {
	all, err := targets()
	if err != nil {
		return err
	}
	chosen := rotation(all, turn(now), fuzzed)
	fmt.Printf("fuzzing %d of %d targets:\n", len(chosen), len(all))
	type outcome struct {
		target
		text []byte
		err  error
	}
	work, done := make(chan target), make(chan outcome)
	var lanes sync.WaitGroup
	for range fuzzLanes {
		lanes.Go(func() {
			for t := range work {
				text, err := exec.Command("go", "test", "-run", "^$", "-fuzz", "^"+t.name+"$", "-fuzztime", fuzzTime, "-fuzzminimizetime", "10x", "-parallel", "1", t.pkg).CombinedOutput()
				done <- outcome{t, text, err}
			}
		})
	}
	go func() {
		for _, t := range chosen {
			work <- t
		}
		close(work)
		lanes.Wait()
		close(done)
	}()
	for o := range done {
		if o.err != nil && !timeIsUp(o.text) {
			s.failed++
			fmt.Printf("FAIL %s %s, fuzzed\n%s", o.pkg, o.name, o.text)
			continue
		}
		s.passed++
		fmt.Printf("fuzzed %s  %s %s\n", fuzzTime, o.pkg, o.name)
	}
	return nil
}
