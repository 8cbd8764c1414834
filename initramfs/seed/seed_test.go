package seed

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const (
	meta = "instance-id: node_1\nlocal-hostname: \"m1\"\n"
	user = `#cloud-config
{"hostname":"m2","ssh_authorized_keys":["ssh-ed25519 AAAA k"],"write_files":[{"path":"/etc/bcd/join","permissions":"0600","content":"bc1.x"}]}`
)

func TestParse(t *testing.T) {
	s, err := Parse([]byte(meta), []byte(user))
	if err != nil {
		t.Fatal(err)
	}
	if s.InstanceID != "node_1" || s.Hostname != "m2" || len(s.SSHKeys) != 1 || len(s.Files) != 1 || s.Files[0].Content != "bc1.x" {
		t.Errorf("Parse = %+v", s)
	}
	if s, err = Parse([]byte(`{"instance-id":"i","local-hostname":"m3"}`), []byte("#cloud-config\n{}")); err != nil || s.Hostname != "m3" {
		t.Errorf("Parse(JSON meta-data) = %+v, %v", s, err)
	}
}

func TestParseErrors(t *testing.T) {
	for _, tt := range []struct{ old, new, want string }{
		{"#cloud-config", "#!/bin/sh", "does not start"},
		{`/etc/bcd/join`, `/etc/passwd`, "only files below /etc/bcd"},
		{`/etc/bcd/join`, `/etc/bcd/../passwd`, "only files below /etc/bcd"},
		{`"m2"`, `"m2; reboot"`, "not a host name"},
		{`AAAA k`, `AAAA k\ncommand`, "more than one line"},
		{`{"hostname"`, `{hostname`, "parse user-data"},
		{`"permissions":"0600"`, `"encoding":"gz"`, "encoding"},
	} {
		text := strings.Replace(user, tt.old, tt.new, 1)
		if text == user {
			t.Fatalf("%q is not in the sample", tt.old)
		}
		if _, err := Parse([]byte(meta), []byte(text)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("Parse(%q) = %v, want %q", tt.new, err, tt.want)
		}
	}
}

func TestApply(t *testing.T) {
	root := t.TempDir()
	s, err := Parse([]byte(meta), []byte(user))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Apply(root); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"etc/bcd/join": "bc1.x", "root/.ssh/authorized_keys": "ssh-ed25519 AAAA k\n"} {
		full := filepath.Join(root, name)
		data, err := os.ReadFile(full)
		if err != nil || string(data) != want {
			t.Errorf("%s = %q, %v, want %q", name, data, err, want)
		}
		if st, err := os.Stat(full); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("mode of %s = %v, want 0600", name, st.Mode())
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(meta), []byte(user))
	f.Fuzz(func(t *testing.T, meta, user []byte) {
		s, err := Parse(meta, user)
		if err != nil {
			return
		}
		for _, file := range s.Files {
			if !strings.HasPrefix(filepath.Clean(file.Path), Root+"/") {
				t.Errorf("%q is outside of %s", file.Path, Root)
			}
		}
	})
}
