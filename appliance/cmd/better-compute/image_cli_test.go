package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/image/builder"
	"github.com/better-compute/site-appliance/image/customize"
	"github.com/better-compute/site-appliance/image/fat"
	"github.com/better-compute/site-appliance/image/gpt"
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
	join := trust.Join{URLs: []string{"https://gw.example.net:7443"}, SiteID: "site_1", Token: secret.New([]byte("once"))}.Encode()
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
		{"half a join string", join[:len(join)-5], []string{"--join-file", "-", img, copyPath}, "join string is damaged"},
		{"nothing on standard input", "", []string{"--join-file", "-", img, copyPath}, "the input is empty"},
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
	img := filepath.Join(dir, "site.img")
	disk, err := os.Create(img)
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	table, err := gpt.New(uuid.New(), 4<<20, layout.Sector)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(disk.Truncate(4<<20), table.Write(disk)); err != nil {
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
	if _, err := imageCLI("", "flash", img, to); err != nil {
		t.Errorf("flash = %v", err)
	}
	if got, err := manifest.Describe(dir, "disk"); err != nil || got.SHA256 != f.SHA256 {
		t.Errorf("the flashed file = %+v, %v, want the image's %s", got, err, f.SHA256)
	}
	text, link := filepath.Join(dir, "text"), filepath.Join(dir, "link")
	if err := errors.Join(os.WriteFile(text, []byte("no image"), 0o644), os.Symlink(img, link)); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ image, disk, want string }{
		{img, "/dev/null", "neither a disk nor a file"},
		{img, link, "is the image itself"},
		{text, to, "not a whole disk image"},
	} {
		if _, err := imageCLI("", "flash", tt.image, tt.disk); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("flash %s to %s = %v, want %q", tt.image, tt.disk, err, tt.want)
		}
	}
	for _, name := range []string{"site.img", "disk"} {
		if got, err := manifest.Describe(dir, name); err != nil || got.SHA256 != f.SHA256 {
			t.Errorf("after refusals %s = %+v, %v: it was changed", name, got, err)
		}
	}
	if _, err := disk.WriteAt([]byte("x"), 1<<20); err != nil {
		t.Fatal(err)
	}
	if _, err := imageCLI("", "verify", dir); err == nil || !strings.Contains(err.Error(), "digest") {
		t.Errorf("verify of a changed file = %v", err)
	}
}
