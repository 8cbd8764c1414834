package keys

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
)

const gatewayURL = "https://gateway.example.net:7443"

func initDir(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "gw")
	notes, err := Init(dir, []string{gatewayURL, "https://192.0.2.7:7443/"}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if text := strings.Join(notes, "\n"); !strings.Contains(text, RootFile) || !strings.Contains(text, "offline") {
		t.Errorf("notes = %q, want what to take offline", text)
	}
	return dir
}

func TestInitLoad(t *testing.T) {
	dir := initDir(t)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		st, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		want := os.FileMode(0o600)
		if e.Name() == CACertFile {
			want = 0o644
		}
		if st.Mode().Perm() != want {
			t.Errorf("mode of %s = %04o, want %04o", e.Name(), st.Mode().Perm(), want)
		}
	}
	if err := os.Remove(filepath.Join(dir, RootFile)); err != nil {
		t.Fatal(err)
	}
	s, err := Load(dir, time.Now())
	if err != nil {
		t.Fatalf("Load without the root key: %v", err)
	}
	if got := s.Current.URLs(); len(got) != 2 || got[1] != "https://192.0.2.7:7443" {
		t.Errorf("URLs = %v", got)
	}
	if _, err := trust.VerifyFirst(s.Current.RootSet(), s.Current.Raw(), time.Now()); err != nil {
		t.Errorf("VerifyFirst(bundle) = %v", err)
	}
	cert, err := s.Authority.IssueServer(s.Current.URLs(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{"gateway.example.net", "192.0.2.7", "127.0.0.1", "localhost"} {
		if err := cert.Leaf.VerifyHostname(host); err != nil {
			t.Errorf("server certificate: %v", err)
		}
	}
	if err := cert.Leaf.VerifyHostname("evil.example.net"); err == nil {
		t.Error("server certificate fits evil.example.net")
	}
}

func TestInitRefuses(t *testing.T) {
	dir := initDir(t)
	before, err := os.ReadFile(filepath.Join(dir, CommandFile))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Init(dir, []string{gatewayURL}, time.Now()); err == nil {
		t.Error("Init over a gateway's folder succeeded")
	}
	// Even with one file left.
	for _, name := range []string{RootFile, ReleaseFile, CAKeyFile, CACertFile, StoreFile, TokenFile, ClientFile, bundleFile(1)} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Init(dir, []string{gatewayURL}, time.Now()); err == nil || !strings.Contains(err.Error(), CommandFile) {
		t.Errorf("Init over %s = %v, want a refusal that names it", CommandFile, err)
	}
	if after, err := os.ReadFile(filepath.Join(dir, CommandFile)); err != nil || string(after) != string(before) {
		t.Errorf("the key changed (%v)", err)
	}
	for _, urls := range [][]string{nil, {""}, {"http://gateway.example.net"}, {"https://gateway.example.net/path"}, {"gateway:7443"}} {
		if _, err := Init(t.TempDir(), urls, time.Now()); err == nil {
			t.Errorf("Init(%q) succeeded", urls)
		}
	}
}

func TestLoadRefuses(t *testing.T) {
	other := initDir(t)
	swap := func(name string) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) {
			data, err := os.ReadFile(filepath.Join(other, name))
			if err == nil {
				err = os.WriteFile(filepath.Join(dir, name), data, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, change := range map[string]func(t *testing.T, dir string){
		"another command key":  swap(CommandFile),
		"another CA key":       swap(CAKeyFile),
		"another bundle":       swap(bundleFile(1)),
		"a key that all read":  func(t *testing.T, dir string) { chmod(t, filepath.Join(dir, CommandFile)) },
		"a CA that all read":   func(t *testing.T, dir string) { chmod(t, filepath.Join(dir, CAKeyFile)) },
		"a store key for all":  func(t *testing.T, dir string) { chmod(t, filepath.Join(dir, StoreFile)) },
		"no bundle":            func(t *testing.T, dir string) { remove(t, filepath.Join(dir, bundleFile(1))) },
		"no store key":         func(t *testing.T, dir string) { remove(t, filepath.Join(dir, StoreFile)) },
		"a bundle flipped bit": func(t *testing.T, dir string) { flip(t, filepath.Join(dir, bundleFile(1))) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := initDir(t)
			if _, err := Load(dir, time.Now()); err != nil {
				t.Fatalf("Load before the change: %v", err)
			}
			change(t, dir)
			if _, err := Load(dir, time.Now()); err == nil {
				t.Error("Load succeeded")
			}
		})
	}
	dir := initDir(t)
	if _, err := Load(dir, time.Now().Add(bundleLife+time.Hour)); err == nil {
		t.Error("Load with an expired bundle succeeded")
	}
}

func chmod(t *testing.T, path string) {
	t.Helper()
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
}

func remove(t *testing.T, path string) {
	t.Helper()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
}

func flip(t *testing.T, path string) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)/2] ^= 1
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

func rootKey(t *testing.T, dir string) ed25519.PrivateKey {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, RootFile))
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(text)
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return key.(ed25519.PrivateKey)
}

func TestBundlesAfter(t *testing.T) {
	dir := initDir(t)
	s, err := Load(dir, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for version := uint64(2); version <= 3; version++ {
		next := &agentv1.TrustBundle{}
		if err := proto.Unmarshal(s.Bundles[0].Payload, next); err != nil {
			t.Fatal(err)
		}
		next.Version = version
		signed, err := trust.SignBundle(next, rootKey(t, dir))
		if err != nil {
			t.Fatal(err)
		}
		data, err := proto.Marshal(signed)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, bundleFile(version)), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if s, err = Load(dir, time.Now()); err != nil {
		t.Fatal(err)
	}
	for version, want := range map[uint64]int{0: 3, 1: 2, 2: 1, 3: 0, 9: 0} {
		if got := len(s.After(version)); got != want {
			t.Errorf("After(%d) = %d bundles, want %d", version, got, want)
		}
	}
	// A hole in the chain is refused.
	remove(t, filepath.Join(dir, bundleFile(2)))
	if _, err := Load(dir, time.Now()); err == nil {
		t.Error("Load with bundle 2 of 3 missing succeeded")
	}
}

func TestAgentID(t *testing.T) {
	s, err := Load(initDir(t), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	der, err := s.Authority.IssueAgent("ag_1", &key.PublicKey, now, now.Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	if id, ok := AgentID(leaf); !ok || id != "ag_1" {
		t.Errorf("AgentID(leaf) = %q, %v, want ag_1", id, ok)
	}
	if id, ok := AgentID(s.Authority.Certificate()); ok {
		t.Errorf("AgentID(CA) = %q, want none", id)
	}
	opts := x509.VerifyOptions{Roots: s.Current.CAs(), CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	if _, err := leaf.Verify(opts); err == nil {
		t.Error("an agent's certificate serves as a server's")
	}
}
