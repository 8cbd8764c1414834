// Package enroll gets an agent its identity, keeps it in two places, and renews it.
package enroll

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
)

// Identity is who an agent is to its gateway. Its key was made here and never
// leaves. An Identity does not change; a renewal makes another one.
type Identity struct {
	AgentID   string
	SiteID    string
	MachineID string
	Key       *ecdsa.PrivateKey
	// Chain is DER, leaf first, CA last.
	Chain      [][]byte
	Leaf       *x509.Certificate
	RenewAfter time.Time
	Bundle     *trust.Bundle
	// Origin tells the join string or voucher that it came from.
	Origin [32]byte
	// Serial rises with each change, so that the newer of two copies is known.
	Serial uint64
}

// Certificate is what the agent shows in TLS.
func (id *Identity) Certificate() *tls.Certificate {
	return &tls.Certificate{Certificate: id.Chain, PrivateKey: id.Key, Leaf: id.Leaf}
}

// Pending is a key and its request before the gateway has answered. Both are
// kept, so that a repeat after a power cut asks for the same thing.
type Pending struct {
	Origin [32]byte
	Key    *ecdsa.PrivateKey
	CSR    []byte
}

// NewPending makes a key and a certificate request for it.
func NewPending(origin [32]byte) (*Pending, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make key: %w", err)
	}
	csr, err := request(key)
	if err != nil {
		return nil, err
	}
	return &Pending{Origin: origin, Key: key, CSR: csr}, nil
}

func request(key *ecdsa.PrivateKey) ([]byte, error) {
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		return nil, fmt.Errorf("make certificate request: %w", err)
	}
	return csr, nil
}

// Copy is a second place for the identity, apart from the state folder.
type Copy interface {
	// Load returns what was stored, and nothing if nothing was.
	Load() ([]byte, error)
	Store([]byte) error
}

// Store keeps an identity, and a pending request before it, in a folder and in a Copy.
type Store struct {
	dir  string // "": no folder
	copy Copy   // nil: no copy
}

// NewStore keeps in dir and copy; either may be absent. With neither nothing is kept.
func NewStore(dir string, copy Copy) *Store { return &Store{dir, copy} }

const (
	identityFile = "identity.json"
	pendingFile  = "enrolment.json"
)

// stored is the file's form. The sum tells a damaged copy from a good one.
type stored struct {
	Sum     []byte          `json:"sha256"`
	Content json.RawMessage `json:"content"`
}

type content struct {
	// Pending: only Origin, Key and CSR are set.
	CSR []byte `json:"csr,omitempty"`

	Origin       []byte   `json:"origin"`
	Key          []byte   `json:"key"` // PKCS #8
	AgentID      string   `json:"agent_id,omitempty"`
	SiteID       string   `json:"site_id,omitempty"`
	MachineID    string   `json:"machine_id,omitempty"`
	Chain        [][]byte `json:"chain,omitempty"`
	RenewAfterMS int64    `json:"renew_after_ms,omitempty"`
	Bundle       []byte   `json:"bundle,omitempty"`
	Serial       uint64   `json:"serial,omitempty"`
}

func (c content) encode() ([]byte, error) {
	inner, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(inner)
	return json.Marshal(stored{sum[:], inner})
}

func decode(data []byte) (*content, *ecdsa.PrivateKey, error) {
	var s stored
	if err := json.Unmarshal(data, &s); err != nil {
		return nil, nil, fmt.Errorf("damaged: %w", err)
	}
	if sum := sha256.Sum256(s.Content); string(sum[:]) != string(s.Sum) {
		return nil, nil, errors.New("damaged: the checksum differs")
	}
	c := new(content)
	if err := json.Unmarshal(s.Content, c); err != nil {
		return nil, nil, fmt.Errorf("damaged: %w", err)
	}
	parsed, err := x509.ParsePKCS8PrivateKey(c.Key)
	if err != nil {
		return nil, nil, fmt.Errorf("damaged key: %w", err)
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	if !ok || len(c.Origin) != 32 {
		return nil, nil, errors.New("damaged: not what this version stores")
	}
	return c, key, nil
}

func encodeIdentity(id *Identity) ([]byte, error) {
	key, err := x509.MarshalPKCS8PrivateKey(id.Key)
	if err != nil {
		return nil, err
	}
	bundle, err := proto.Marshal(id.Bundle.Raw())
	if err != nil {
		return nil, err
	}
	return content{
		Origin: id.Origin[:], Key: key, AgentID: id.AgentID, SiteID: id.SiteID, MachineID: id.MachineID,
		Chain: id.Chain, RenewAfterMS: id.RenewAfter.UnixMilli(), Bundle: bundle, Serial: id.Serial,
	}.encode()
}

func decodeIdentity(data []byte) (*Identity, error) {
	c, key, err := decode(data)
	if err != nil {
		return nil, err
	}
	signed := new(agentv1.SignedBundle)
	if err := proto.Unmarshal(c.Bundle, signed); err != nil {
		return nil, fmt.Errorf("damaged bundle: %w", err)
	}
	bundle, err := trust.Restore(signed)
	if err != nil {
		return nil, fmt.Errorf("stored trust bundle: %w", err)
	}
	id := &Identity{
		AgentID: c.AgentID, SiteID: c.SiteID, MachineID: c.MachineID, Key: key, Chain: c.Chain,
		RenewAfter: time.UnixMilli(c.RenewAfterMS), Bundle: bundle, Origin: [32]byte(c.Origin), Serial: c.Serial,
	}
	if id.Leaf, err = checkLeaf(c.Chain, key, c.AgentID); err != nil {
		return nil, err
	}
	return id, nil
}

// Load returns the newer of the identities kept, nil if there is none, and
// mends the place that lacks it. The error tells what was found damaged; an
// identity is returned beside it where one place was good.
func (s *Store) Load() (*Identity, error) {
	var found *Identity
	var complaints []error
	from := map[string]uint64{}
	for _, place := range s.places() {
		data, err := place.load()
		if err != nil {
			complaints = append(complaints, fmt.Errorf("read identity from %s: %w", place.name, err))
			continue
		}
		if len(data) == 0 {
			continue
		}
		id, err := decodeIdentity(data)
		if err != nil {
			complaints = append(complaints, fmt.Errorf("identity in %s: %w", place.name, err))
			continue
		}
		from[place.name] = id.Serial
		if found == nil || id.Serial > found.Serial {
			found = id
		}
	}
	if found != nil {
		for _, place := range s.places() {
			if from[place.name] == found.Serial {
				continue
			}
			data, err := encodeIdentity(found)
			if err == nil {
				err = place.store(data)
			}
			if err != nil {
				complaints = append(complaints, fmt.Errorf("mend identity in %s: %w", place.name, err))
			}
		}
	}
	return found, errors.Join(complaints...)
}

// Save keeps an identity everywhere, and drops the pending request. It fails
// only if no place took it; with no places it keeps nothing and succeeds.
// The second error tells of places that failed beside one that did not.
func (s *Store) Save(id *Identity) (fatal, partial error) {
	data, err := encodeIdentity(id)
	if err != nil {
		return fmt.Errorf("encode identity: %w", err), nil
	}
	var failed []error
	places := s.places()
	for _, place := range places {
		if err := place.store(data); err != nil {
			failed = append(failed, fmt.Errorf("store identity in %s: %w", place.name, err))
		}
	}
	if len(places) > 0 && len(failed) == len(places) {
		return errors.Join(failed...), nil
	}
	if s.dir != "" {
		if err := os.Remove(filepath.Join(s.dir, pendingFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			failed = append(failed, err)
		}
	}
	return nil, errors.Join(failed...)
}

type place struct {
	name  string
	load  func() ([]byte, error)
	store func([]byte) error
}

func (s *Store) places() []place {
	var places []place
	if s.dir != "" {
		path := filepath.Join(s.dir, identityFile)
		places = append(places, place{path, func() ([]byte, error) {
			data, err := os.ReadFile(path)
			if errors.Is(err, fs.ErrNotExist) {
				return nil, nil
			}
			return data, err
		}, func(data []byte) error { return atomicfile.Write(path, data, 0o600) }})
	}
	if s.copy != nil {
		places = append(places, place{"the second copy", s.copy.Load, s.copy.Store})
	}
	return places
}

// Pending returns the request kept for this origin, or makes and keeps one. It
// is kept in the folder alone; without one it is good for this process.
func (s *Store) Pending(origin [32]byte) (*Pending, error) {
	if s.dir == "" {
		return NewPending(origin)
	}
	path := filepath.Join(s.dir, pendingFile)
	if data, err := os.ReadFile(path); err == nil {
		if c, key, err := decode(data); err == nil && [32]byte(c.Origin) == origin && len(c.CSR) > 0 {
			return &Pending{Origin: origin, Key: key, CSR: c.CSR}, nil
		}
	}
	p, err := NewPending(origin)
	if err != nil {
		return nil, err
	}
	key, err := x509.MarshalPKCS8PrivateKey(p.Key)
	if err != nil {
		return nil, fmt.Errorf("encode key: %w", err)
	}
	data, err := content{Origin: origin[:], Key: key, CSR: p.CSR}.encode()
	if err != nil {
		return nil, fmt.Errorf("encode enrolment: %w", err)
	}
	if err := atomicfile.Write(path, data, 0o600); err != nil {
		if s.copy != nil {
			// A full data partition must not keep a box from coming home: the
			// identity itself will be in the copy.
			return p, nil
		}
		return nil, fmt.Errorf("keep enrolment: %w", err)
	}
	return p, nil
}
