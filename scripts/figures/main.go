// Command figures prints what docs/figures.md records: sizes of the image and
// its parts, the agent's idle memory, the seconds of each demo step. It reads
// what make image and make demo left in out/, and needs root for the memory.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/scripts/lab"
)

// idle is how long the agent is left alone before it is measured.
const idle = 60 * time.Second

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "figures:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	if err := sizes(); err != nil {
		return err
	}
	rss, err := memory(ctx)
	if err != nil {
		return err
	}
	fmt.Printf("| `bcd site`, resident memory after %.0f s at rest with a session | %.1f MiB |\n", idle.Seconds(), float64(rss)/(1<<10))
	return timeline()
}

func sizes() error {
	data, err := os.ReadFile("out/qemu-amd64/manifest.json")
	if err != nil {
		return fmt.Errorf("run make image first: %w", err)
	}
	var m struct {
		Files []struct {
			Name string
			Size int64
		}
		Parts map[string]int64
	}
	if err := json.Unmarshal(data, &m); err != nil {
		return err
	}
	for _, f := range m.Files {
		fmt.Printf("| %s | %.1f MB |\n", f.Name, float64(f.Size)/1e6)
	}
	names := make([]string, 0, len(m.Parts))
	for name := range m.Parts {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		fmt.Printf("| part: %s | %.1f MB |\n", name, float64(m.Parts[name])/1e6)
	}
	return nil
}

// memory is the resident size of bcd site in KiB, at rest with a session.
func memory(ctx context.Context) (int, error) {
	dir, err := os.MkdirTemp("", "figures")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	l, err := lab.Start(ctx, lab.Config{Dir: dir, Out: "out", Machine: bmctest.NewFake()})
	if err != nil {
		return 0, err
	}
	defer l.Close()
	if err := l.Keys(ctx); err != nil {
		return 0, err
	}
	if err := l.Serve(ctx); err != nil {
		return 0, err
	}
	join, err := l.AddSite(ctx)
	if err != nil {
		return 0, err
	}
	if err := l.StartSite(ctx, join, lab.SiteOptions{}); err != nil {
		return 0, err
	}
	if err := l.WaitSiteOnline(ctx); err != nil {
		return 0, err
	}
	time.Sleep(idle)
	status, err := os.ReadFile(filepath.Join("/proc", fmt.Sprint(l.Site.PID()), "status"))
	if err != nil {
		return 0, err
	}
	var kib int
	for line := range strings.Lines(string(status)) {
		if _, err := fmt.Sscanf(line, "VmRSS: %d kB", &kib); err == nil {
			return kib, nil
		}
	}
	return 0, fmt.Errorf("no VmRSS in the status of bcd site")
}

func timeline() error {
	f, err := os.Open("out/demo/timeline.tsv")
	if err != nil {
		return fmt.Errorf("run make demo first: %w", err)
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		name, seconds, _ := strings.Cut(lines.Text(), "\t")
		fmt.Printf("| demo: %s | %s s |\n", name, seconds)
	}
	return nil
}
