// Command demo runs the main job on real parts, says what happens as it
// happens, and ends with a timeline. KEEP=1 leaves everything running.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/better-compute/site-appliance/scripts/lab"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	dir, err := filepath.Abs("out/demo")
	if err != nil {
		return err
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	l, err := lab.Start(ctx, lab.Config{Dir: dir, Out: "out", Log: os.Stdout})
	if err != nil {
		return err
	}
	defer l.Close()
	start := time.Now()
	steps, err := l.MainJob(ctx, os.Stdout)
	fmt.Printf("\n%-60s %s\n", "step", "seconds")
	for _, s := range steps {
		fmt.Printf("%-60s %7.1f\n", s.Name, s.Took.Seconds())
	}
	fmt.Printf("%-60s %7.1f\n", "whole", time.Since(start).Seconds())
	if err := timeline(filepath.Join(dir, "timeline.tsv"), steps); err != nil {
		return err
	}
	if err != nil {
		fmt.Printf("\nlogs: %s\n", dir)
		return err
	}
	if os.Getenv("KEEP") == "1" {
		fmt.Printf("\n%s\nCtrl-C ends it.\n", l.Hints())
		<-ctx.Done()
	}
	return nil
}

func timeline(path string, steps []lab.Step) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	for _, s := range steps {
		fmt.Fprintf(f, "%s\t%.1f\n", s.Name, s.Took.Seconds())
	}
	return f.Close()
}
