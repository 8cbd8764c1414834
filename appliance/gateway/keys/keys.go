// Package keys makes and reads the files that hold a gateway's keys: roots,
// command and release keys, the CA, the key of the secret store, and the trust
// bundles that the roots signed.
package keys

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base32"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
)

// The files of a gateway's folder.
const (
	RootFile    = "root-1.key" // to be taken offline
	CommandFile = "command.key"
	ReleaseFile = "release.key"
	CAKeyFile   = "ca.key"
	CACertFile  = "ca.crt"
	StoreFile   = "store.key"
	TokenFile   = "admin.token"
	ClientFile  = "client.toml"
)

// bundleFile is where the trust bundle of a version lies.
func bundleFile(version uint64) string { return fmt.Sprintf("bundle-%06d.pb", version) }

const (
	bundleLife = 5 * 365 * 24 * time.Hour
	caLife     = 20 * 365 * 24 * time.Hour
	// Peers' clocks differ; what is made now counts as made a day ago.
	backdate = 24 * time.Hour
)

// Init makes a gateway's folder for the URLs under which boxes will reach it.
// It refuses to replace any file. The notes say what a person must do next.
func Init(dir string, urls []string, now time.Time) (notes []string, err error) {
	if len(urls) == 0 {
		return nil, errors.New("gateway init: at least one URL is needed, for example https://gateway.example.net:7443")
	}
	for i, u := range urls {
		urls[i] = strings.TrimSuffix(u, "/")
		if err := trust.CheckURL(u); err != nil {
			return nil, fmt.Errorf("gateway init: %w", err)
		}
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("gateway init: %w", err)
	}
	all := []string{RootFile, CommandFile, ReleaseFile, CAKeyFile, CACertFile, StoreFile, TokenFile, ClientFile, bundleFile(1)}
	for _, name := range all {
		if _, err := os.Lstat(filepath.Join(dir, name)); !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("gateway init: %s is there already; keys are never replaced", filepath.Join(dir, name))
		}
	}
	content, err := makeAll(urls, now)
	if err != nil {
		return nil, fmt.Errorf("gateway init: %w", err)
	}
	for _, name := range all {
		mode := fs.FileMode(0o600)
		if name == CACertFile {
			mode = 0o644
		}
		if err := create(filepath.Join(dir, name), content[name], mode); err != nil {
			return nil, fmt.Errorf("gateway init: %w", err)
		}
	}
	if err := atomicfile.SyncDir(dir); err != nil {
		return nil, fmt.Errorf("gateway init: %w", err)
	}
	root := filepath.Join(dir, RootFile)
	return []string{
		"Take " + root + " offline now: copy it to two places that no network reaches, then remove it here. It says who may command your boxes; the gateway runs without it.",
		"Keep a copy of " + filepath.Join(dir, StoreFile) + " apart from the database: without it the secrets are lost.",
		"Releases are signed with " + filepath.Join(dir, ReleaseFile) + ": move it to where releases are made.",
	}, nil
}

// create writes a new file and never replaces one.
func create(path string, data []byte, mode fs.FileMode) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// makeAll makes each file's content.
func makeAll(urls []string, now time.Time) (map[string][]byte, error) {
	content := map[string][]byte{}
	signing := map[string]ed25519.PrivateKey{}
	for _, name := range []string{RootFile, CommandFile, ReleaseFile} {
		_, key, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			return nil, err
		}
		signing[name] = key
		if content[name], err = privatePEM(key); err != nil {
			return nil, err
		}
	}
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	if content[CAKeyFile], err = privatePEM(caKey); err != nil {
		return nil, err
	}
	caDER, err := makeCA(caKey, now)
	if err != nil {
		return nil, err
	}
	content[CACertFile] = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: caDER})

	storeKey := make([]byte, 32)
	rand.Read(storeKey)
	content[StoreFile] = pem.EncodeToMemory(&pem.Block{Type: storePEM, Bytes: storeKey})
	content[TokenFile] = []byte("bct_" + strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(randomBytes(32))) + "\n")
	content[ClientFile] = []byte(fmt.Sprintf("# How the better-compute command reaches this gateway. Paths are relative to this file.\nurl = %q\nca_file = %q\ntoken_file = %q\n", urls[0], CACertFile, TokenFile))

	public := func(name string) []byte { return signing[name].Public().(ed25519.PublicKey) }
	bundle, err := trust.SignBundle(&agentv1.TrustBundle{
		Version:          1,
		IssuedAtMs:       now.UnixMilli(),
		ValidUntilMs:     now.Add(bundleLife).UnixMilli(),
		Roots:            [][]byte{public(RootFile)},
		RootThreshold:    1,
		CommandKeys:      [][]byte{public(CommandFile)},
		ReleaseKeys:      [][]byte{public(ReleaseFile)},
		ReleaseThreshold: 1,
		GatewayCas:       [][]byte{caDER},
		GatewayUrls:      urls,
	}, signing[RootFile])
	if err != nil {
		return nil, err
	}
	if content[bundleFile(1)], err = proto.Marshal(bundle); err != nil {
		return nil, err
	}
	return content, nil
}

const storePEM = "BETTER-COMPUTE STORE KEY"

func randomBytes(n int) []byte {
	b := make([]byte, n)
	rand.Read(b)
	return b
}

func privatePEM(key any) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

func makeCA(key *ecdsa.PrivateKey, now time.Time) ([]byte, error) {
	template := &x509.Certificate{
		SerialNumber:          serial(),
		Subject:               pkix.Name{CommonName: "better-compute gateway CA"},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(caLife),
		IsCA:                  true,
		BasicConstraintsValid: true,
		MaxPathLenZero:        true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	return x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
}

// serial is a random certificate serial number of 127 bits.
func serial() *big.Int {
	n := new(big.Int).SetBytes(randomBytes(16))
	return n.Rsh(n, 1).Add(n, big.NewInt(1))
}
