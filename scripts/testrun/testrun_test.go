package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// Every target has its turn, and no turn has one twice.
func TestRotation(t *testing.T) {
	for count := range 12 {
		var all []target
		for i := range count {
			all = append(all, target{"p", string(rune('a' + i))})
		}
		for _, n := range []int{1, 3, 4} {
			seen := map[target]bool{}
			for turn := 100; turn < 100+(count+n-1)/n; turn++ {
				chosen := rotation(all, turn, n)
				if len(chosen) != min(n, count) {
					t.Errorf("rotation(%d targets, %d, %d) has %d", count, turn, n, len(chosen))
				}
				for i, c := range chosen {
					seen[c] = true
					if slices.Contains(chosen[:i], c) {
						t.Errorf("rotation(%d targets, %d, %d) has %v twice", count, turn, n, c)
					}
				}
			}
			if len(seen) != count {
				t.Errorf("%d of %d targets had their turn, %d at a time", len(seen), count, n)
			}
		}
	}
}

func TestFuzzNames(t *testing.T) {
	got := fuzzNames([]byte("package x\n\nfunc FuzzOne(f *testing.F) {\n}\n\n// func FuzzTwo(\nfunc (x) FuzzThree() {}\nfunc FuzzFour2(f *testing.F) {}\n"))
	if want := []string{"FuzzOne", "FuzzFour2"}; !slices.Equal(got, want) {
		t.Errorf("fuzzNames() = %v, want %v", got, want)
	}
}

func TestResults(t *testing.T) {
	s := newSuite()
	for _, e := range []event{
		{Action: "run", Package: "p", Test: "TestA"},
		{Action: "output", Package: "p", Test: "TestB", Output: "    x_test.go:1: needs root\n"},
		{Action: "pass", Package: "p", Test: "TestA"},
		{Action: "skip", Package: "p", Test: "TestB"},
		{Action: "fail", Package: "p", Test: "TestC/sub"},
		{Action: "fail", Package: "p"},
	} {
		s.event(e)
	}
	path := filepath.Join(t.TempDir(), "out", "test.json")
	if err := s.write(path); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var got struct{ Tests map[string]map[string]string }
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	p := got.Tests["p"]
	if len(p) != 3 || p["TestA"] != "pass" || p["TestB"] != "skip" || p["TestC/sub"] != "fail" {
		t.Errorf("the results are %v", got.Tests)
	}
	if len(s.skips) != 1 || s.passed != 1 || s.failed != 2 {
		t.Errorf("%d passed, %d failed, skips %v", s.passed, s.failed, s.skips)
	}
}

func TestTimeIsUp(t *testing.T) {
	const ended = "fuzz: elapsed: 10s, execs: 9\n--- FAIL: FuzzParse (10.10s)\n    context deadline exceeded\nFAIL\nexit status 1\n"
	for name, tt := range map[string]struct {
		output string
		want   bool
	}{
		"time ended":             {ended, true},
		"a finding":              {"--- FAIL: FuzzParse (0.10s)\n    --- FAIL: FuzzParse (0.00s)\n        x_test.go:9: bad\n    \n    Failing input written to testdata/fuzz/FuzzParse/1\nFAIL\n", false},
		"a finding, then time":   {"    Failing input written to testdata/fuzz/FuzzParse/1\n" + ended, false},
		"a target that says so":  {"--- FAIL: FuzzParse (0.10s)\n    x_test.go:9: context deadline exceeded\nFAIL\n", false},
		"it does not compile":    {"FAIL\tx [build failed]\nFAIL\n", false},
		"a seed that is refused": {"--- FAIL: FuzzParse (0.10s)\n    --- FAIL: FuzzParse/seed#0 (0.00s)\n    context deadline exceeded\nFAIL\n", false},
	} {
		if got := timeIsUp([]byte(tt.output)); got != tt.want {
			t.Errorf("%s: timeIsUp() = %v, want %v", name, got, tt.want)
		}
	}
}
