package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestTable(t *testing.T) {
	got := table([]row{
		{name: "a.speed", ours: 950, unit: "MB/s", peer: "dd", theirs: 1000, goal: 0.9},
		{name: "b.time", ours: 200, unit: "µs", peer: "bare", theirs: 100, less: true},
		{name: "c.small", ours: 0.5, unit: "s", peer: "x", theirs: 12.5, less: true, goal: 3},
	})
	want := "name\tours\tunit\tpeer\tpeer's value\tratio\tgoal\n" +
		"a.speed\t950\tMB/s\tdd\t1000\t0.95\t0.9\n" +
		"b.time\t200\tµs\tbare\t100\t0.50\t\n" +
		"c.small\t0.500\ts\tx\t12.5\t25.00\t3\n"
	if got != want {
		t.Errorf("table() = %q, want %q", got, want)
	}
}

// Under a goal is less than it: level with it is not, and a row without one cannot be.
func TestMissed(t *testing.T) {
	got := missed([]row{
		{name: "met", ours: 95, theirs: 100, goal: 0.95},
		{name: "under", ours: 150, theirs: 100, goal: 3},
		{name: "slower", ours: 200, theirs: 100, less: true, goal: 0.9},
		{name: "none", ours: 1, theirs: 100},
	})
	if want := []string{"under (1.50 of 3)", "slower (0.50 of 0.9)"}; !slices.Equal(got, want) {
		t.Errorf("missed() = %q, want %q", got, want)
	}
}

func TestMedian(t *testing.T) {
	for _, tt := range []struct {
		of   []float64
		want float64
	}{{[]float64{3}, 3}, {[]float64{9, 1, 2}, 2}, {[]float64{4, 1, 3, 100}, 3.5}} {
		if got := median(tt.of); got != tt.want {
			t.Errorf("median(%v) = %v, want %v", tt.of, got, tt.want)
		}
	}
}

func TestMeasureOnly(t *testing.T) {
	var ran []string
	fake := func(err error, names ...string) suite {
		return suite{names, func(context.Context, settings) (rows []row, _ error) {
			ran = append(ran, names[0])
			for _, n := range names {
				rows = append(rows, row{name: n})
			}
			return rows, err
		}}
	}
	suites := []suite{fake(nil, "a.x", "a.y"), fake(errors.New("broken"), "c"), fake(nil, "b.x")}
	for _, tt := range []struct {
		only string
		ran  int
		rows int
		fail bool
	}{{"a", 1, 2, false}, {"a.y", 1, 1, false}, {"b.x", 1, 1, false}, {"z", 0, 0, true}, {"c", 1, 0, true}, {"", 3, 3, true}} {
		ran = nil
		rows, err := measure(t.Context(), suites, tt.only, settings{})
		if len(ran) != tt.ran || len(rows) != tt.rows || (err != nil) != tt.fail {
			t.Errorf("measure(%q) ran %v and gave %v, %v, want %d and %d", tt.only, ran, rows, err, tt.ran, tt.rows)
		}
	}
}

// The image is what it says, and has no block that a stream would skip.
func TestMakeImage(t *testing.T) {
	dir := t.TempDir()
	raw, stored := filepath.Join(dir, "raw"), filepath.Join(dir, "stored")
	job, err := makeImage(raw, stored, 8*mib)
	if err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(raw)
	if err != nil || len(content) != 8*mib || job.UnpackedSizeBytes != 8*mib {
		t.Fatalf("the image has %d bytes of %d, %v", len(content), job.UnpackedSizeBytes, err)
	}
	for off := 0; off < len(content); off += 4096 {
		if bytes.Equal(content[off:][:4096], make([]byte, 4096)) {
			t.Errorf("the block at %d is empty", off)
		}
	}
	job.Disk = filepath.Join(dir, "disk")
	if err := os.WriteFile(job.Disk, make([]byte, 8*mib), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := timeStream(t.Context(), job); err != nil {
		t.Fatal(err)
	}
	if disk, err := os.ReadFile(job.Disk); err != nil || !bytes.Equal(disk, content) {
		t.Errorf("the disk differs from the image, %v", err)
	}
}

func TestRunRefuses(t *testing.T) {
	for _, args := range [][]string{{"-only", "nobody"}, {"-rounds", "0"}, {"-size", "15"}, {"-size", "18"}, {"-x"}} {
		out := filepath.Join(t.TempDir(), "bench.tsv")
		if err := run(t.Context(), append(args, "-out", out, "-dir", t.TempDir()), io.Discard, io.Discard); err == nil {
			t.Errorf("run(%v) succeeded", args)
		}
		if _, err := os.Stat(out); err == nil {
			t.Errorf("run(%v) wrote a table", args)
		}
	}
}
