// Package assign keeps the site's boot decisions: one versioned snapshot on disk, replaced as a whole.
package assign

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// Bounds of one snapshot.
const (
	maxMachines  = 4096
	maxMACs      = 16
	maxArtifacts = 64
	maxFileBytes = 16 << 20
	// maxAhead bounds how far one snapshot may raise the version: one that nobody can
	// go beyond would be the last for good.
	maxAhead = 1 << 32
)

// magic starts the file; the SHA-256 of the encoded snapshot follows, then the snapshot.
const magic = "bcassign1\n"

// Store is the snapshot in force. It is safe for concurrent use.
type Store struct {
	path    string
	damaged error
	suspect bool // a file before this one was damaged

	applying sync.Mutex // one Apply at a time, over the disk write too
	mu       sync.RWMutex
	snapshot *pxev1.AssignRequest
	byMAC    map[string]*pxev1.Machine
}

// Open reads the snapshot at path; no file is version 0 with no machines. A
// damaged file is moved aside and counts as none, since the gateway sends a
// whole snapshot again; Damaged then says why. What was protected is lost with
// it: while it lies there, the store is suspect.
func Open(path string) (*Store, error) {
	s := &Store{path: path, snapshot: &pxev1.AssignRequest{}}
	if err := s.load(); err != nil {
		return nil, err
	}
	var err error
	if s.suspect, err = atomicfile.WasSetAside(path); err != nil {
		return nil, err
	}
	return s, nil
}

func (s *Store) load() error {
	data, err := readBounded(s.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil && !errors.Is(err, errTooLarge) {
		return fmt.Errorf("read boot assignments: %w", err)
	}
	if err == nil {
		var req *pxev1.AssignRequest
		if req, err = decode(data); err == nil {
			s.install(req)
			return nil
		}
	}
	s.damaged = fmt.Errorf("boot assignments %s are damaged and were moved aside: %w", s.path, err)
	_, err = atomicfile.SetAside(s.path)
	return err
}

// Suspect reports whether a snapshot before this one was damaged: then every
// machine that the store does not know counts as protected.
func (s *Store) Suspect() bool { return s.suspect }

// Damaged is why the file on disk was given up at Open, or nil.
func (s *Store) Damaged() error { return s.damaged }

// Apply puts req in force and on disk before it returns the version in force.
// The same version with the same content is fine; an older version, or the
// same with other content, is refused and changes nothing. A machine that is
// protected stays it, unless its id is one of unprotect; in a suspect store that
// is each machine whose protection is not known.
func (s *Store) Apply(req *pxev1.AssignRequest, unprotect ...string) (uint64, error) {
	if err := Check(req); err != nil {
		return s.Version(), err
	}
	s.applying.Lock()
	defer s.applying.Unlock()
	s.mu.RLock()
	current := s.snapshot
	s.mu.RUnlock()
	req = s.keepProtected(current, req, unprotect)
	switch {
	case req.Version < current.Version:
		return current.Version, errs.New(errs.StaleVersion, "version %d is older than version %d in force", req.Version, current.Version)
	case req.Version-current.Version > maxAhead:
		return current.Version, errs.New(errs.InvalidArgs, "version %d is too far ahead of version %d in force", req.Version, current.Version)
	case req.Version == current.Version:
		if !proto.Equal(req, current) {
			return current.Version, errs.New(errs.DuplicateMismatch, "version %d is in force with other content", req.Version)
		}
		return current.Version, nil
	}
	data, err := encode(req)
	if err != nil {
		return current.Version, fmt.Errorf("encode boot assignments: %w", err)
	}
	if err := atomicfile.Write(s.path, data, 0o600); err != nil {
		return current.Version, fmt.Errorf("keep boot assignments: %w", err)
	}
	s.install(req)
	return req.Version, nil
}

// ByMAC finds the machine that owns mac (lower-case, colon-separated). The
// machine is shared: callers must not change it.
func (s *Store) ByMAC(mac string) (*pxev1.Machine, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	m, ok := s.byMAC[mac]
	return m, ok
}

// Machines are all that the snapshot names; they are shared as ByMAC's are.
func (s *Store) Machines() []*pxev1.Machine {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.snapshot.Machines
}

// Named are the SHA-256s of the artifacts that machines may still ask for at now.
func (s *Store) Named(now time.Time) map[string]bool {
	named := make(map[string]bool)
	for _, m := range s.Machines() {
		if m.Action == pxev1.Action_ACTION_LOCAL_DISK || now.UnixMilli() >= m.WindowUntilMs {
			continue
		}
		for _, digest := range digests(m) {
			named[digest] = true
		}
	}
	return named
}

// Version is the version in force, 0 before the first Apply.
func (s *Store) Version() uint64 {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.snapshot.Version
}

func (s *Store) install(req *pxev1.AssignRequest) {
	byMAC := make(map[string]*pxev1.Machine)
	for _, m := range req.Machines {
		for _, mac := range m.Macs {
			byMAC[mac] = m
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.snapshot, s.byMAC = req, byMAC
}

// Check is what Apply accepts, as a pure function; errors are invalid-args.
func Check(req *pxev1.AssignRequest) error {
	if req.GetVersion() == 0 {
		return errs.New(errs.InvalidArgs, "version is missing")
	}
	if n := len(req.Machines); n > maxMachines {
		return errs.New(errs.InvalidArgs, "%d machines are more than %d", n, maxMachines)
	}
	ids := make(map[string]bool)
	owner := make(map[string]string)
	for i, m := range req.Machines {
		if m == nil {
			return errs.New(errs.InvalidArgs, "machine %d is empty", i)
		}
		if !validID(m.MachineId) {
			return errs.New(errs.InvalidArgs, "machine %d: machine_id %.80q: want 1 to 64 of a-z, A-Z, 0-9, _ and -", i, m.MachineId)
		}
		if ids[m.MachineId] {
			return errs.New(errs.InvalidArgs, "machine %s is listed twice", m.MachineId)
		}
		ids[m.MachineId] = true
		if err := checkMachine(m); err != nil {
			return err
		}
		for _, mac := range m.Macs {
			if other, ok := owner[mac]; ok {
				return errs.New(errs.InvalidArgs, "MAC %s belongs to %s and %s", mac, other, m.MachineId)
			}
			owner[mac] = m.MachineId
		}
	}
	return checkUnknown(req.Unknown)
}

func checkMachine(m *pxev1.Machine) error {
	bad := func(format string, args ...any) error {
		return errs.New(errs.InvalidArgs, "machine %s: %s", m.MachineId, fmt.Sprintf(format, args...))
	}
	if n := len(m.Macs); n < 1 || n > maxMACs {
		return bad("%d MACs: want 1 to %d", n, maxMACs)
	}
	for _, mac := range m.Macs {
		hw, err := net.ParseMAC(mac)
		if err != nil || len(hw) != 6 || hw.String() != mac {
			return bad("MAC %.40q: want six lower-case bytes such as 52:54:00:12:34:56", mac)
		}
		if hw[0]&1 != 0 || bytes.Equal(hw, make([]byte, 6)) {
			return bad("MAC %s is not a machine's", mac)
		}
	}
	if len(m.Name) > 255 {
		return bad("name is longer than 255 bytes")
	}
	if n := len(m.Artifacts); n > maxArtifacts {
		return bad("%d artifacts are more than %d", n, maxArtifacts)
	}
	for _, a := range m.Artifacts {
		if !ValidDigest(a) {
			return bad("artifact %.80q: want 64 lower-case hex digits", a)
		}
	}
	allowed, known := purposes[m.Action]
	switch {
	case !known:
		return bad("action %d is unknown", m.Action)
	case len(allowed) == 0 && m.Purpose != "":
		return bad("purpose %.40q with local disk: want none", m.Purpose)
	case len(allowed) > 0 && !slices.Contains(allowed, m.Purpose):
		return bad("purpose %.40q: want %s", m.Purpose, strings.Join(allowed, " or "))
	case len(allowed) > 0 && !validID(m.WindowId):
		return bad("window_id %.80q: want 1 to 64 of a-z, A-Z, 0-9, _ and -", m.WindowId)
	case len(allowed) > 0 && m.WindowUntilMs <= 0:
		return bad("window_until_ms is missing")
	}
	return checkBoot(m, bad)
}

func validID(s string) bool {
	if len(s) < 1 || len(s) > 64 {
		return false
	}
	for _, r := range s {
		switch {
		case 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z', '0' <= r && r <= '9', r == '_', r == '-':
		default:
			return false
		}
	}
	return true
}

// ValidDigest says whether s is a SHA-256 in lower-case hex.
func ValidDigest(s string) bool {
	if len(s) != 64 {
		return false
	}
	for _, r := range s {
		if (r < '0' || r > '9') && (r < 'a' || r > 'f') {
			return false
		}
	}
	return true
}

func encode(req *pxev1.AssignRequest) ([]byte, error) {
	body, err := proto.MarshalOptions{Deterministic: true}.Marshal(req)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(body)
	return append(append([]byte(magic), sum[:]...), body...), nil
}

func decode(data []byte) (*pxev1.AssignRequest, error) {
	rest, ok := bytes.CutPrefix(data, []byte(magic))
	if !ok || len(rest) < sha256.Size {
		return nil, errors.New("not a file of boot assignments")
	}
	body := rest[sha256.Size:]
	if sum := sha256.Sum256(body); !bytes.Equal(sum[:], rest[:sha256.Size]) {
		return nil, errors.New("checksum does not match")
	}
	var req pxev1.AssignRequest
	if err := proto.Unmarshal(body, &req); err != nil {
		return nil, err
	}
	if err := Check(&req); err != nil {
		return nil, err
	}
	return &req, nil
}

var errTooLarge = errors.New("file is too large")

func readBounded(path string) ([]byte, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if st.Size() > maxFileBytes {
		return nil, errTooLarge
	}
	return os.ReadFile(path)
}
