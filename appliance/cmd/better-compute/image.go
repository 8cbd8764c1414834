package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/site/config"
	"github.com/better-compute/site-appliance/image/builder"
	"github.com/better-compute/site-appliance/image/customize"
	"github.com/better-compute/site-appliance/image/flash"
	"github.com/better-compute/site-appliance/image/gpt"
	"github.com/better-compute/site-appliance/image/layout"
	"github.com/better-compute/site-appliance/image/manifest"
)

// runImage is better-compute image.
func runImage(ctx context.Context, args []string, std stdio) error {
	return dispatch(ctx, "better-compute image", []command{
		{"build", "build a board's images from the sources", runImageBuild},
		{"customize", "put a join string and a configuration into a copy of an image", runImageCustomize},
		{"verify", "compare a build's files with its manifest", runImageVerify},
		{"flash", "write an image to a disk and read it back", runImageFlash},
		{"test", "boot an image in QEMU until it is ready", runImageTest},
	}, args, std)
}

func runImageBuild(ctx context.Context, args []string, std stdio) error {
	f := newFlags("image build", std)
	f.about = "Builds a board's images from the checkout around the current folder."
	boardName := f.String("board", "qemu-amd64", "a folder of board/")
	imageVersion := f.String("version", version, "version of the image")
	out := f.String("out", "", "where the files go (default out/BOARD in the checkout)")
	cache := f.String("cache", "", "where packages are kept between builds (default the user's cache folder)")
	release := f.Bool("release", false, "leave the rescue entry out")
	lock := f.Bool("lock", false, "write the packages used into the board's lock file")
	if _, err := f.parse(args, 0, 0); err != nil {
		return err
	}
	root, err := checkout()
	if err != nil {
		return err
	}
	built, err := sourceTime(ctx, root)
	if err != nil {
		return err
	}
	if *out == "" {
		*out = filepath.Join(root, "out", *boardName)
	}
	if *cache == "" {
		*cache = builder.DefaultCache(root)
	}
	m, err := builder.Build(ctx, builder.Options{
		Root: root, Board: *boardName, Out: *out, Cache: *cache, Version: *imageVersion, Built: built, Release: *release,
		Log: slog.New(slog.NewTextHandler(std.err, nil)),
	})
	if err != nil {
		return fmt.Errorf("image build: %w", err)
	}
	if *lock {
		if err := builder.Lock(root, *boardName, m); err != nil {
			return fmt.Errorf("image build: %w", err)
		}
	}
	for _, file := range m.Files {
		fmt.Fprintf(std.out, "%s %12d  %s\n", file.SHA256, file.Size, filepath.Join(*out, file.Name))
	}
	return nil
}

// checkout finds the module's root around the current folder.
func checkout() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("find checkout: %w", err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "board")); err == nil {
			if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
				return dir, nil
			}
		}
		up := filepath.Dir(dir)
		if up == dir {
			return "", errors.New("find checkout: no folder around this one has go.mod and board")
		}
		dir = up
	}
}

// sourceTime is the time that a build carries: SOURCE_DATE_EPOCH, else that of
// the newest commit.
func sourceTime(ctx context.Context, root string) (time.Time, error) {
	text := os.Getenv("SOURCE_DATE_EPOCH")
	if text == "" {
		out, err := exec.CommandContext(ctx, "git", "-C", root, "log", "-1", "--format=%ct").Output()
		if err != nil {
			return time.Time{}, errors.New("the build needs a time: set SOURCE_DATE_EPOCH, or build from a git checkout with a commit")
		}
		text = strings.TrimSpace(string(out))
	}
	seconds, err := strconv.ParseInt(text, 10, 64)
	if err != nil || seconds < 0 {
		return time.Time{}, fmt.Errorf("SOURCE_DATE_EPOCH = %q: want seconds since 1970", text)
	}
	return time.Unix(seconds, 0), nil
}

func runImageCustomize(_ context.Context, args []string, std stdio) error {
	f := newFlags("image customize [--config FILE] [--join-file FILE] IMG COPY", std)
	f.about = "Copies the box image IMG to the file COPY and writes its site.toml. The join string is\nread from a file or from standard input, never from the command line."
	joinFile := f.String("join-file", "", "`file` with the join string, - for standard input")
	configFile := f.String("config", "", "`file` to put in as site.toml; the join string is added to it")
	rest, err := f.parse(args, 2, 2)
	if err != nil {
		return err
	}
	if *joinFile == "" && *configFile == "" {
		return errors.New("image customize: give --join-file, --config or both")
	}
	var base []byte
	if *configFile != "" {
		if base, err = os.ReadFile(*configFile); err != nil {
			return fmt.Errorf("read configuration: %w", err)
		}
	}
	join := ""
	if *joinFile != "" {
		var text []byte
		if *joinFile == "-" {
			text, err = io.ReadAll(io.LimitReader(std.in, 1<<16))
		} else {
			text, err = os.ReadFile(*joinFile)
		}
		if err != nil {
			return fmt.Errorf("read join string: %w", err)
		}
		if join, err = customize.ParseJoin(text); err != nil {
			return fmt.Errorf("read join string: %w", err)
		}
	}
	text, err := customize.Configuration(base, join)
	if err != nil {
		return fmt.Errorf("image customize: %w", err)
	}
	// What the box would refuse is refused here.
	name := layout.ConfigFile
	if *configFile != "" {
		name = *configFile
	}
	site, err := config.ParseSite(name, text)
	if err != nil {
		return fmt.Errorf("image customize: %w", err)
	}
	if site.Join != "" {
		if _, err := trust.ParseJoin(site.Join); err != nil {
			return fmt.Errorf("image customize: %w", err)
		}
	}
	if err := customize.Image(rest[0], rest[1], text, time.Now()); err != nil {
		return fmt.Errorf("image customize: %w", err)
	}
	note := ""
	if site.Join != "" {
		note = "; it holds a secret: keep it private"
	}
	fmt.Fprintf(std.err, "%s is %s with its own %s%s\n", rest[1], rest[0], layout.ConfigFile, note)
	return nil
}

func runImageVerify(_ context.Context, args []string, std stdio) error {
	f := newFlags("image verify DIR", std)
	f.about = "Compares the files of a build in DIR with the manifest.json there."
	rest, err := f.parse(args, 1, 1)
	if err != nil {
		return err
	}
	m, err := manifest.Load(filepath.Join(rest[0], builder.ManifestFile))
	if err != nil {
		return err
	}
	if err := m.Verify(rest[0]); err != nil {
		return fmt.Errorf("image verify: %w", err)
	}
	for _, file := range m.Files {
		fmt.Fprintf(std.out, "%s: ok\n", file.Name)
	}
	return nil
}

func runImageFlash(ctx context.Context, args []string, std stdio) error {
	f := newFlags("image flash [--yes-erase SERIAL] IMG DISK", std)
	f.about = "Writes IMG to DISK, a device or a file, and reads it back. DISK must not be in use; one that is\nnot removable has to be confirmed by its serial number."
	yes := f.String("yes-erase", "", "`serial` number of the disk to erase")
	rest, err := f.parse(args, 2, 2)
	if err != nil {
		return err
	}
	image, err := os.Open(rest[0])
	if err != nil {
		return fmt.Errorf("open image: %w", err)
	}
	defer image.Close()
	st, err := image.Stat()
	if err != nil || !st.Mode().IsRegular() {
		return fmt.Errorf("%s is not an image file", rest[0])
	}
	if _, err := gpt.Read(image, uint64(st.Size()), layout.Sector); err != nil {
		return fmt.Errorf("image flash: %s is not a whole disk image: %w", rest[0], err)
	}
	if to, err := os.Stat(rest[1]); err == nil && os.SameFile(st, to) {
		return fmt.Errorf("image flash: %w: %s is the image itself", flash.ErrRefused, rest[1])
	}
	target, err := flash.Describe(rest[1], "/sys", "/proc/self/mountinfo", "/proc/swaps")
	if err != nil {
		return fmt.Errorf("image flash: %w", err)
	}
	if err := flash.Check(target, st.Size(), *yes); err != nil {
		return fmt.Errorf("image flash: %w", err)
	}
	last, terminal := "", isTerminal(std.err)
	err = flash.Write(ctx, image, st.Size(), target, func(phase string, done, total int64) {
		if line := fmt.Sprintf("%-6s %3d %%", phase, done*100/total); terminal && line != last {
			last = line
			fmt.Fprintf(std.err, "\r%s", line)
		}
	})
	if last != "" {
		fmt.Fprintln(std.err)
	}
	switch {
	case err != nil && ctx.Err() != nil:
		return fmt.Errorf("image flash: stopped: %s is not complete, flash it again", rest[1])
	case err != nil:
		return fmt.Errorf("image flash: %w", err)
	}
	fmt.Fprintf(std.out, "%s holds %s, and was read back\n", rest[1], rest[0])
	return nil
}

// isTerminal reports whether w is a screen, where a line can be written over.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
