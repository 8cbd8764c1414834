package seed

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/diskfs/go-diskfs/backend/file"
	"github.com/diskfs/go-diskfs/filesystem/fat32"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/image/layout"
)

func sample() Seed {
	return Seed{
		InstanceID: "wf_01", Hostname: "node-1.rack", SSHAuthorizedKeys: []string{"ssh-ed25519 AAAA \"quoted\" key"},
		Files: []File{
			{Path: "/etc/bcd/join", Content: secret.New([]byte("bc1.token\n")), Mode: "0600"},
			{Path: "/etc/bcd/config.toml", Content: secret.New([]byte("join_file = \"/etc/bcd/join\"\n")), Mode: "0644"},
		},
	}
}

// write puts the image into a file for the peers that read it.
func write(t *testing.T, image []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "seed.img")
	if err := os.WriteFile(path, image, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestBuild(t *testing.T) {
	image, err := Build(sample())
	if err != nil {
		t.Fatal(err)
	}
	if len(image) != SizeBytes {
		t.Errorf("len(Build()) = %d, want %d", len(image), SizeBytes)
	}
	f, err := os.Open(write(t, image))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fs, err := fat32.Read(file.New(f, true), SizeBytes, 0, 512)
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(fs.Label()); got != layout.SeedLabel {
		t.Errorf("label = %q, want %q", got, layout.SeedLabel)
	}
	// Where a machine's init looks for it.
	if got := string(image[71:82]); strings.TrimSpace(got) != layout.SeedLabel {
		t.Errorf("label in the boot sector = %q, want %q", got, layout.SeedLabel)
	}
	meta, err := fs.ReadFile("meta-data")
	var m map[string]string
	if err != nil || json.Unmarshal(meta, &m) != nil || m["instance-id"] != "wf_01" || m["local-hostname"] != "node-1.rack" {
		t.Errorf("meta-data = %q, %v", meta, err)
	}
	user, err := fs.ReadFile("user-data")
	if err != nil {
		t.Fatal(err)
	}
	body, found := bytes.CutPrefix(user, []byte("#cloud-config\n"))
	var u struct {
		Hostname string   `json:"hostname"`
		Keys     []string `json:"ssh_authorized_keys"`
		Files    []struct {
			Path, Content, Permissions, Owner string
		} `json:"write_files"`
	}
	if err := json.Unmarshal(body, &u); err != nil || !found {
		t.Fatalf("user-data = %q, %v", user, err)
	}
	if u.Hostname != "node-1.rack" || len(u.Keys) != 1 || u.Keys[0] != sample().SSHAuthorizedKeys[0] {
		t.Errorf("user-data = %+v", u)
	}
	if got, want := fmt.Sprint(u.Files), "[{/etc/bcd/join bc1.token\n 0600 root:root} {/etc/bcd/config.toml join_file = \"/etc/bcd/join\"\n 0644 root:root}]"; got != want {
		t.Errorf("write_files = %s, want %s", got, want)
	}
}

func TestBuildPassesFsck(t *testing.T) {
	fsck, err := exec.LookPath("/usr/sbin/fsck.vfat")
	if err != nil {
		t.Skip("needs fsck.vfat: package dosfstools is not there")
	}
	image, err := Build(sample())
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(fsck, "-n", "-v", write(t, image)).CombinedOutput()
	for _, bad := range []string{"Free cluster", "differ", "Dirty", "wrong", "Serial number 00000000"} {
		if bytes.Contains(out, []byte(bad)) {
			t.Errorf("fsck.vfat says %q:\n%s", bad, out)
		}
	}
	if err != nil {
		t.Errorf("fsck.vfat: %v\n%s", err, out)
	}
}

func TestBuildTwiceIsTheSame(t *testing.T) {
	a, err := Build(sample())
	if err != nil {
		t.Fatal(err)
	}
	b, err := Build(sample())
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(a, b) {
		t.Error("two builds of one seed differ")
	}
}

func TestCheck(t *testing.T) {
	for name, change := range map[string]func(*Seed){
		"no instance":     func(s *Seed) { s.InstanceID = "" },
		"instance text":   func(s *Seed) { s.InstanceID = "a\nb" },
		"no host name":    func(s *Seed) { s.Hostname = "" },
		"host name":       func(s *Seed) { s.Hostname = "under_score" },
		"host name dash":  func(s *Seed) { s.Hostname = "-a" },
		"long label":      func(s *Seed) { s.Hostname = strings.Repeat("a", 64) },
		"long name":       func(s *Seed) { s.Hostname = strings.Repeat("a.", 130) + "a" },
		"key of 2 lines":  func(s *Seed) { s.SSHAuthorizedKeys = []string{"a\nb"} },
		"empty key":       func(s *Seed) { s.SSHAuthorizedKeys = []string{" "} },
		"relative path":   func(s *Seed) { s.Files[0].Path = "etc/x" },
		"climbing path":   func(s *Seed) { s.Files[0].Path = "/etc/../x" },
		"mode":            func(s *Seed) { s.Files[0].Mode = "600" },
		"setuid mode":     func(s *Seed) { s.Files[0].Mode = "4755" },
		"binary":          func(s *Seed) { s.Files[0].Content = secret.New([]byte{0xff}) },
		"too much to say": func(s *Seed) { s.Files[0].Content = secret.New(bytes.Repeat([]byte("x"), maxContent)) },
	} {
		s := sample()
		change(&s)
		if got := errs.CodeOf(s.Check()); got != errs.InvalidArgs {
			t.Errorf("%s: Check() = %q, want %q", name, got, errs.InvalidArgs)
		}
		if _, err := Build(s); err == nil {
			t.Errorf("%s: Build succeeded", name)
		}
	}
	if err := sample().Check(); err != nil {
		t.Errorf("Check() = %v", err)
	}
}
