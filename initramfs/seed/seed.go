// Package seed reads the NoCloud seed (cloud-init's CIDATA) that a deployment
// leaves for a node: as much of it as a node needs, and JSON only, which is
// what our own deployment writes after the "#cloud-config" line.
package seed

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
)

// Seed is what the files say.
type Seed struct {
	InstanceID string
	Hostname   string
	SSHKeys    []string
	Files      []File
}

// File is one of write_files. Only files below /etc/bcd are taken.
type File struct {
	Path    string
	Content string
}

// limit bounds each file of the seed.
const limit = 1 << 20

var hostname = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?$`)

// Root is the folder that seeds may write to.
const Root = "/etc/bcd"

// Parse reads meta-data ("key: value" lines or JSON) and user-data.
func Parse(meta, user []byte) (Seed, error) {
	if len(meta) > limit || len(user) > limit {
		return Seed{}, fmt.Errorf("seed is over %d bytes", limit)
	}
	var s Seed
	values, err := parseMeta(meta)
	if err != nil {
		return Seed{}, err
	}
	s.InstanceID, s.Hostname = values["instance-id"], values["local-hostname"]
	rest, ok := bytes.CutPrefix(user, []byte("#cloud-config\n"))
	if !ok {
		return Seed{}, errors.New("user-data does not start with #cloud-config")
	}
	var doc struct {
		Hostname string   `json:"hostname"`
		Keys     []string `json:"ssh_authorized_keys"`
		Files    []struct {
			Path        string `json:"path"`
			Content     string `json:"content"`
			Permissions string `json:"permissions"`
			Owner       string `json:"owner"`
			Encoding    string `json:"encoding"`
		} `json:"write_files"`
	}
	if err := json.Unmarshal(rest, &doc); err != nil {
		return Seed{}, fmt.Errorf("parse user-data as JSON: %w", err)
	}
	if doc.Hostname != "" {
		s.Hostname = doc.Hostname
	}
	if s.Hostname != "" && !hostname.MatchString(s.Hostname) {
		return Seed{}, fmt.Errorf("hostname %q of the seed is not a host name", s.Hostname)
	}
	for _, k := range doc.Keys {
		if strings.ContainsAny(k, "\n\r\x00") {
			return Seed{}, errors.New("an SSH key of the seed has more than one line")
		}
		s.SSHKeys = append(s.SSHKeys, k)
	}
	for _, f := range doc.Files {
		if f.Path != path.Clean(f.Path) || !strings.HasPrefix(f.Path, Root+"/") {
			return Seed{}, fmt.Errorf("write_files of the seed names %q: only files below %s are written", f.Path, Root)
		}
		if f.Encoding != "" && f.Encoding != "text/plain" {
			return Seed{}, fmt.Errorf("write_files of the seed has encoding %q: want plain text", f.Encoding)
		}
		s.Files = append(s.Files, File{f.Path, f.Content})
	}
	return s, nil
}

func parseMeta(meta []byte) (map[string]string, error) {
	values := map[string]string{}
	if t := bytes.TrimSpace(meta); len(t) > 0 && t[0] == '{' {
		var doc map[string]any
		if err := json.Unmarshal(t, &doc); err != nil {
			return nil, fmt.Errorf("parse meta-data as JSON: %w", err)
		}
		for k, v := range doc {
			if text, ok := v.(string); ok {
				values[k] = text
			}
		}
		return values, nil
	}
	for line := range strings.SplitSeq(string(meta), "\n") {
		if k, v, ok := strings.Cut(line, ":"); ok && !strings.HasPrefix(strings.TrimSpace(k), "#") {
			values[strings.TrimSpace(k)] = strings.Trim(strings.TrimSpace(v), `"'`)
		}
	}
	return values, nil
}

// Read reads a seed's folder.
func Read(dir string) (Seed, error) {
	meta, err := os.ReadFile(filepath.Join(dir, "meta-data"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return Seed{}, fmt.Errorf("read seed: %w", err)
	}
	user, err := os.ReadFile(filepath.Join(dir, "user-data"))
	if err != nil {
		return Seed{}, fmt.Errorf("read seed: %w", err)
	}
	return Parse(meta, user)
}

// Apply writes the seed's files and keys below root, for their owner's eyes only.
func (s Seed) Apply(root string) error {
	put := func(name, content string) error {
		full := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(full), 0o700); err != nil {
			return fmt.Errorf("apply seed: %w", err)
		}
		return atomicfile.Write(full, []byte(content), 0o600)
	}
	for _, f := range s.Files {
		if err := put(f.Path, f.Content); err != nil {
			return err
		}
	}
	if len(s.SSHKeys) > 0 {
		return put("/root/.ssh/authorized_keys", strings.Join(s.SSHKeys, "\n")+"\n")
	}
	return nil
}
