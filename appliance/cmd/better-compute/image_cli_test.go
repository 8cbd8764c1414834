package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/image/builder"
	"github.com/better-compute/site-appliance/image/customize"
	"github.com/better-compute/site-appliance/image/fat"
	"github.com/better-compute/site-appliance/image/layout"
	"github.com/better-compute/site-appliance/image/manifest"
)

// boxImage makes an image with a box's partitions and nothing to boot.
func boxImage(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "site.img")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	l := layout.Site()
	tab, err := l.Table()
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(l.Size); err != nil {
		t.Fatal(err)
	}
	p, _ := l.Partition(layout.ConfigName)
	if err := fat.Create(f, fat.Spec{Start: p.Start, Size: p.Size, Label: p.Label, Time: time.Unix(1e9, 0), Files: []fat.File{{Path: layout.ConfigFile, Content: []byte("#\n")}}}); err != nil {
		t.Fatal(err)
	}
	if err := tab.Write(f); err != nil {
		t.Fatal(err)
	}
	return path
}

// imageCLI runs better-compute image with in as standard input.
func imageCLI(in string, args ...string) (string, error) {
	var out, errs bytes.Buffer
	err := runImage(context.Background(), args, stdio{strings.NewReader(in), &out, &errs})
	return out.String(), err
}

func TestImageCustomize(t *testing.T) {
	const join = "bc1.AAAAAAAAAAAAAAAAAAAAAAAA"
	img := boxImage(t)
	dir := t.TempDir()
	put := func(name, text string) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	good := put("good.toml", "[uplink]\ninterface = \"eth0\"\n")
	bad := put("bad.toml", "[uplink]\ninterfce = \"eth0\"\n")
	file := put("join", join+"\n")
	copyPath := filepath.Join(dir, "copy.img")
	for _, tt := range []struct {
		name, in string
		args     []string
		want     string // error
	}{
		{"stdin", join + "\n", []string{"--join-file", "-", img, copyPath}, ""},
		{"file and configuration", "", []string{"--join-file", file, "--config", good, img, copyPath}, ""},
		{"configuration alone", "", []string{"--config", good, img, copyPath}, ""},
		{"unknown key", join, []string{"--join-file", "-", "--config", bad, img, copyPath}, `bad.toml:4: unknown key "uplink.interfce"`},
		{"no join string", "hello", []string{"--join-file", "-", img, copyPath}, "not a join string"},
		{"nothing to do", "", []string{img, copyPath}, "give --join-file"},
		{"a join string as argument", "", []string{"--join", join, img, copyPath}, "not defined"},
	} {
		os.Remove(copyPath)
		_, err := imageCLI(tt.in, append([]string{"customize"}, tt.args...)...)
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
		got, rerr := customize.Read(copyPath)
		if err != nil {
			if rerr == nil {
				t.Errorf("%s: a copy was left", tt.name)
			}
			continue
		}
		if wantJoin := tt.name != "configuration alone"; rerr != nil || strings.Contains(string(got), join) != wantJoin {
			t.Errorf("%s: the copy holds %q, %v", tt.name, got, rerr)
		}
	}
}

func TestImageVerifyAndFlash(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "site.img"), []byte("0123456789"), 0o644); err != nil {
		t.Fatal(err)
	}
	f, err := manifest.Describe(dir, "site.img")
	if err != nil {
		t.Fatal(err)
	}
	if err := (&manifest.Manifest{Files: []manifest.File{f}}).Store(filepath.Join(dir, builder.ManifestFile)); err != nil {
		t.Fatal(err)
	}
	if out, err := imageCLI("", "verify", dir); err != nil || !strings.Contains(out, "site.img: ok") {
		t.Errorf("verify = %q, %v", out, err)
	}
	to := filepath.Join(dir, "disk")
	if _, err := imageCLI("", "flash", filepath.Join(dir, "site.img"), to); err != nil {
		t.Errorf("flash = %v", err)
	}
	if got, err := os.ReadFile(to); err != nil || string(got) != "0123456789" {
		t.Errorf("the flashed file holds %q, %v", got, err)
	}
	if _, err := imageCLI("", "flash", filepath.Join(dir, "site.img"), "/dev/null"); err == nil {
		t.Error("flash to /dev/null = nil")
	}
	if err := os.WriteFile(filepath.Join(dir, "site.img"), []byte("0123456780"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := imageCLI("", "verify", dir); err == nil || !strings.Contains(err.Error(), "digest") {
		t.Errorf("verify of a changed file = %v", err)
	}
}
