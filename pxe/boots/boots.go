// Package boots counts how often each machine has booted in its window and what is done there, on disk: the box alone ends a boot loop.
package boots

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"

	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
	"github.com/better-compute/site-appliance/pxe/decide"
)

const (
	keyFile  = "key"
	suffix   = ".boots"
	maxBytes = 1 << 10
	// most bounds the machines that are kept: twice an assignment's.
	most = 8192
)

// AnyWindow stands for the one that is in force where that was lost as well: until
// Settle, every window counts as it.
const AnyWindow = "_any"

// State is one machine's in one window.
type State struct {
	Window string
	Boots  int
	Done   bool
}

// Store keeps one small file for each machine. It is safe for concurrent use. What it
// knows it says at once; what it is told is on disk when the call returns.
type Store struct {
	dir     string
	key     []byte
	damaged []error
	replace func(path string, data []byte, mode os.FileMode) error

	// disk is held over a file's writing, and never taken with mu held.
	disk     sync.Mutex
	kept     map[string]State // what the files say, under disk
	mu       sync.Mutex
	machines map[string]State
}

// Open reads the folder and makes it if it is missing. A machine whose file is
// damaged counts as done with the window that current names for it, the one that
// is in force, or AnyWindow: a deployed machine must not be deployed again, and the
// next window counts anew.
func Open(dir string, current func(machine string) (window string, ok bool)) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the folder of boots: %w", err)
	}
	s := &Store{dir: dir, replace: atomicfile.Write, kept: make(map[string]State), machines: make(map[string]State)}
	if err := s.loadKey(); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("read boots: %w", err)
	}
	for _, e := range entries {
		machine, ok := strings.CutSuffix(e.Name(), suffix)
		if !ok || !validID(machine) {
			continue
		}
		state, err := read(filepath.Join(dir, e.Name()))
		if err != nil {
			s.damaged = append(s.damaged, fmt.Errorf("the boots of machine %s: %w", machine, err))
			window, ok := current(machine)
			if !ok {
				_ = os.Remove(filepath.Join(dir, e.Name())) // it has no window that could be booted
				continue
			}
			state = State{Window: window, Done: true}
			if err := s.write(machine, state); err != nil {
				s.damaged = append(s.damaged, err)
			}
		} else {
			s.kept[machine] = state
		}
		s.machines[machine] = state
	}
	return s, nil
}

// loadKey reads the key of the tokens. A damaged one is replaced: the machines
// that run then cannot say that they are done, and the bound on boots ends theirs.
func (s *Store) loadKey() error {
	path := filepath.Join(s.dir, keyFile)
	key, err := os.ReadFile(path)
	if err == nil && len(key) == sha256.Size {
		s.key = key
		return nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read the key of boots: %w", err)
	}
	if err == nil {
		s.damaged = append(s.damaged, errors.New("the key of the boots' tokens is damaged and was replaced"))
	}
	s.key = make([]byte, sha256.Size)
	_, _ = rand.Read(s.key) // never fails: crypto/rand ends the program instead
	if err := atomicfile.Write(path, s.key, 0o600); err != nil {
		return fmt.Errorf("keep the key of boots: %w", err)
	}
	return nil
}

// Damaged is what was lost at Open, or nil.
func (s *Store) Damaged() error { return errors.Join(s.damaged...) }

// Of is how often the machine has booted in the window and whether that is done.
func (s *Store) Of(machine, window string) (boots int, done bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if st := s.machines[machine]; st.Window == window || st.Window == AnyWindow {
		return st.Boots, st.Done
	}
	return 0, false
}

// Booted counts one more boot. It counts in memory even where it returns an error.
func (s *Store) Booted(machine, window string) error {
	return s.change(machine, window, func(st *State) { st.Boots++ })
}

// Done notes that what the window was for is done; as Booted does, in any case.
func (s *Store) Done(machine, window string) error {
	return s.change(machine, window, func(st *State) { st.Done = true })
}

func (s *Store) change(machine, window string, edit func(*State)) error {
	if !validID(machine) || !validID(window) {
		return fmt.Errorf("boots of machine %.80q in window %.80q are not kept", machine, window)
	}
	forgotten, err := s.remember(machine, window, edit)
	if err != nil {
		return err
	}
	if forgotten != "" {
		_ = s.persist(forgotten) // what stays is read and forgotten again
	}
	return s.persist(machine)
}

// remember changes what is in memory, and names the stranger that was forgotten for it.
func (s *Store) remember(machine, window string, edit func(*State)) (forgotten string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	st, known := s.machines[machine]
	if st.Window != window {
		st = State{Window: window}
	}
	edit(&st)
	if !known && len(s.machines) >= most {
		if forgotten = s.giveWay(machine); forgotten == "" {
			return "", fmt.Errorf("boots of %d machines are kept; %s is one more", most, machine)
		}
	}
	s.machines[machine] = st
	return forgotten, nil
}

// giveWay makes room for a machine by forgetting a stranger; for a stranger it does not.
func (s *Store) giveWay(machine string) (forgotten string) {
	if decide.IsStranger(machine) {
		return ""
	}
	for other := range s.machines {
		if decide.IsStranger(other) {
			delete(s.machines, other)
			return other
		}
	}
	return ""
}

// Settle has what stood for any window stand for the one that current names, once it is
// known which is in force; where none is, there was nothing to lose.
func (s *Store) Settle(current func(machine string) (window string, ok bool)) {
	s.mu.Lock()
	var settled []string
	for machine, st := range s.machines {
		if st.Window != AnyWindow {
			continue
		}
		settled = append(settled, machine)
		if window, ok := current(machine); ok {
			s.machines[machine] = State{Window: window, Done: true}
		} else {
			delete(s.machines, machine)
		}
	}
	s.mu.Unlock()
	for _, machine := range settled {
		_ = s.persist(machine) // what stays is read and settled again
	}
}

// Any says whether the boots of any machine are kept.
func (s *Store) Any() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.machines) > 0
}

// Keep forgets the machines that has says no to.
func (s *Store) Keep(has func(machine string) bool) {
	s.mu.Lock()
	var gone []string
	for machine := range s.machines {
		if !has(machine) {
			delete(s.machines, machine)
			gone = append(gone, machine)
		}
	}
	s.mu.Unlock()
	for _, machine := range gone {
		_ = s.persist(machine) // what stays is read and forgotten again
	}
}

// persist brings a machine's file to what is in memory by then: of many that come at
// once, one writes all of it, and the others find it there.
func (s *Store) persist(machine string) error {
	s.disk.Lock()
	defer s.disk.Unlock()
	s.mu.Lock()
	st, known := s.machines[machine]
	s.mu.Unlock()
	if !known {
		delete(s.kept, machine)
		return os.Remove(filepath.Join(s.dir, machine+suffix))
	}
	if kept, ok := s.kept[machine]; ok && kept == st {
		return nil
	}
	return s.write(machine, st)
}

// Token is what the machine says with its posts that it is the one that was booted
// for the window. It needs no memory of the boot.
func (s *Store) Token(machine, window string) string {
	h := hmac.New(sha256.New, s.key)
	fmt.Fprintf(h, "boot\x00%s\x00%s", machine, window)
	return strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(h.Sum(nil)[:20]))
}

// Holds says whether token is the machine's in the window.
func (s *Store) Holds(token, machine, window string) bool {
	return hmac.Equal([]byte(token), []byte(s.Token(machine, window)))
}

// The file is one line: window, boots, done, and the SHA-256 of what is before it.
func (s *Store) write(machine string, st State) error {
	delete(s.kept, machine) // after an error nobody knows
	line := fmt.Sprintf("%s %d %t ", st.Window, st.Boots, st.Done)
	sum := sha256.Sum256([]byte(line))
	if err := s.replace(filepath.Join(s.dir, machine+suffix), []byte(line+hex.EncodeToString(sum[:])+"\n"), 0o600); err != nil {
		return fmt.Errorf("keep the boots of machine %s: %w", machine, err)
	}
	s.kept[machine] = st
	return nil
}

func read(path string) (State, error) {
	st, err := os.Stat(path)
	if err != nil {
		return State{}, err
	}
	if st.Size() > maxBytes {
		return State{}, errors.New("the file is too large")
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return State{}, err
	}
	return parse(string(data))
}

var form = regexp.MustCompile(`^(([a-zA-Z0-9_-]{1,64}) ([0-9]{1,9}) (true|false) )([0-9a-f]{64})\n$`)

func parse(text string) (State, error) {
	m := form.FindStringSubmatch(text)
	if m == nil {
		return State{}, errors.New("the file is damaged")
	}
	if sum := sha256.Sum256([]byte(m[1])); hex.EncodeToString(sum[:]) != m[5] {
		return State{}, errors.New("the file's checksum does not match")
	}
	st := State{Window: m[2], Done: m[4] == "true"}
	_, _ = fmt.Sscan(m[3], &st.Boots) // the form was checked
	return st, nil
}

var id = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}$`)

func validID(s string) bool { return id.MatchString(s) }
