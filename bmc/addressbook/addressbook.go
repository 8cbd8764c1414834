// Package addressbook remembers which credential, pin, driver and protection
// belong to each BMC address, so that no address is ever sent another's credential.
package addressbook

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"slices"
	"sort"
	"strings"
	"sync"
	"syscall"

	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// maxBindings bounds the book: more BMCs than a site has.
const maxBindings = 8192

// The versions of the file. The first knows no protection; it is still what is
// written where nothing is protected, so that the program before reads it after
// a box fell back to it.
const (
	plainFormat     = 1
	protectedFormat = 2
)

var errDamaged = errors.New("the file is damaged")

type binding struct {
	Address        string `json:"address"`
	Driver         string `json:"driver"`
	CredentialsRef string `json:"credentials_ref"`
	Pin            string `json:"tls_spki_sha256,omitempty"`
	Protected      bool   `json:"protected,omitempty"`
}

type file struct {
	Version  int       `json:"version"`
	Bindings []binding `json:"bindings"`
}

// Book is the address book. It is safe for concurrent use.
type Book struct {
	path string

	mu       sync.Mutex
	bindings map[string]binding
	hosts    map[string][]string // addresses by host
	shared   map[string]bool     // by address: more than its first use has relied on it
	suspect  bool                // a book before this one was damaged
}

func empty(path string) *Book {
	return &Book{path: path, bindings: map[string]binding{}, hosts: map[string][]string{}, shared: map[string]bool{}}
}

// Open reads the book at path; a missing file is an empty book. With path ""
// the book lives in memory. A damaged file is an error, and the caller decides
// whether to put it aside: an empty book trusts the next signed use again.
func Open(path string) (*Book, error) {
	b := empty(path)
	if path == "" {
		return b, nil
	}
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return b, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open address book: %w", err)
	}
	if err := b.parse(data); err != nil {
		return nil, fmt.Errorf("open address book %s: %w: %w", path, errDamaged, err)
	}
	return b, nil
}

// OpenOrSetAside is Open for a box that nobody visits: a damaged file is
// renamed to path + ".damaged", whose name it returns, and the book starts
// empty, so that the next signed use of each address teaches it again. What was
// protected is lost with the file: while it lies there, the book is suspect.
func OpenOrSetAside(path string) (b *Book, aside string, err error) {
	b, err = Open(path)
	if errors.Is(err, errDamaged) {
		if aside, err = atomicfile.SetAside(path); err != nil {
			return nil, "", err
		}
		b, err = Open(path)
	}
	if err != nil || path == "" {
		return b, aside, err
	}
	if b.suspect, err = atomicfile.WasSetAside(path); err != nil {
		return nil, aside, err
	}
	return b, aside, nil
}

// Suspect reports whether a book before this one was damaged: then every address
// that was not bound anew since counts as protected.
func (b *Book) Suspect() bool { return b.suspect }

func (b *Book) parse(data []byte) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	var f file
	if err := dec.Decode(&f); err != nil {
		return err
	}
	if f.Version < plainFormat || f.Version > protectedFormat {
		return fmt.Errorf("version %d, want %d to %d", f.Version, plainFormat, protectedFormat)
	}
	if len(f.Bindings) > maxBindings {
		return fmt.Errorf("%d bindings, more than %d", len(f.Bindings), maxBindings)
	}
	for _, e := range f.Bindings {
		address, err := Normalise(e.Address, e.Driver)
		if err != nil {
			return err
		}
		if _, twice := b.bindings[address]; twice || address != e.Address {
			return fmt.Errorf("address %q stands twice or is not in its plain form", e.Address)
		}
		b.keep(e)
	}
	return nil
}

// keep and drop change what is in memory; the caller holds mu, or is Open.
func (b *Book) keep(e binding) {
	host := hostOf(e.Address)
	b.bindings[e.Address] = e
	b.hosts[host] = append(b.hosts[host], e.Address)
}

func (b *Book) drop(address string) {
	host := hostOf(address)
	delete(b.bindings, address)
	b.hosts[host] = slices.DeleteFunc(b.hosts[host], func(a string) bool { return a == address })
	if len(b.hosts[host]) == 0 {
		delete(b.hosts, host)
	}
}

// hostOf is the host of an address in its plain form.
func hostOf(address string) string {
	host, _, _ := split(address)
	return host
}

// at are the bindings of a host, of all its ports where port is empty; the caller
// holds mu.
func (b *Book) at(host, port string) []binding {
	var list []binding
	for _, address := range b.hosts[host] {
		if port == "" || address == net.JoinHostPort(host, port) {
			list = append(list, b.bindings[address])
		}
	}
	return list
}

// Check says whether Bind would be refused, without learning anything.
func (b *Book) Check(addr, pin, credRef, driver string) error {
	want, err := bindingOf(addr, pin, credRef, driver)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	_, err = b.find(want, tells(addr, driver))
	return err
}

// Bind ties the address to its credential reference, pin and driver. The first
// use learns, and is on disk before Bind returns; learned says that it was this
// one. Any later use that differs is refused with binding-mismatch. So is, for an
// address without a port and a driver whose own port nobody knows here, another
// credential than that of a known BMC on the same host.
func (b *Book) Bind(addr, pin, credRef, driver string) (learned bool, err error) {
	want, err := bindingOf(addr, pin, credRef, driver)
	if err != nil {
		return false, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	known, err := b.find(want, tells(addr, driver))
	switch {
	case err != nil:
		return false, err
	case known:
		b.shared[want.Address] = true
		return false, nil
	case len(b.bindings) >= maxBindings:
		return false, errs.New(errs.NoSpace, "the address book holds %d BMCs already", maxBindings)
	}
	// A first use of another port must be no way round the protection.
	want.Protected = b.protectedHost(want.Address)
	b.keep(want)
	if err := b.save(); err != nil {
		b.drop(want.Address)
		return false, err
	}
	return true, nil
}

// find looks for the binding of a use, and refuses one that differs; the caller
// holds mu. Where the port is not told it may be that of any BMC of the host.
func (b *Book) find(want binding, told bool) (known bool, err error) {
	if have, known := b.bindings[want.Address]; known {
		return true, have.compare(want)
	}
	if told {
		return false, nil
	}
	for _, have := range b.at(hostOf(want.Address), "") {
		if have.CredentialsRef != want.CredentialsRef {
			return false, errs.New(errs.BindingMismatch, "%s is bound to another credential, and the address tells no port", have.Address)
		}
	}
	return false, nil
}

// Rebind ties the address to these from now on, whatever it was tied to before,
// and is on disk when it returns. An address that nobody knew yet is learned.
// Where the driver's own port is unknown and the address tells none, another BMC of
// the host keeps its credential, as in Bind. Protection reaches what is known by then
// of the ports on which every BMC speaks: of its host those are the same BMC's. It is
// taken away by name.
func (b *Book) Rebind(addr, pin, credRef, driver string, protected bool) error {
	want, err := bindingOf(addr, pin, credRef, driver)
	if err != nil {
		return err
	}
	want.Protected = protected
	b.mu.Lock()
	defer b.mu.Unlock()
	have, known := b.bindings[want.Address]
	if !known {
		if _, err := b.find(want, tells(addr, driver)); err != nil {
			return err
		}
		if len(b.bindings) >= maxBindings {
			return errs.New(errs.NoSpace, "the address book holds %d BMCs already", maxBindings)
		}
	}
	var others []binding // as they were
	if host := hostOf(want.Address); protected && host != "" {
		for _, e := range b.at(host, "") {
			if e.Address != want.Address && !e.Protected && usualPort(e.Address) {
				others = append(others, e)
				e.Protected = true
				b.bindings[e.Address] = e
			}
		}
	}
	b.drop(want.Address)
	b.keep(want)
	if err := b.save(); err != nil {
		b.drop(want.Address)
		if known {
			b.keep(have)
		}
		for _, e := range others {
			b.bindings[e.Address] = e
		}
		return err
	}
	// What was said in so many words is not a first use that could be taken back.
	b.shared[want.Address] = true
	return nil
}

// Remove forgets the address: the next use of it is its first. One that nobody
// knows is no error.
func (b *Book) Remove(addr, driver string) error {
	address, err := Normalise(addr, driver)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	have, known := b.bindings[address]
	if !known {
		return nil
	}
	b.drop(address)
	if err := b.save(); err != nil {
		b.keep(have)
		return err
	}
	delete(b.shared, address)
	return nil
}

// Forget takes back a binding whose first use never reached the BMC, unless
// another use has relied on it meanwhile.
func (b *Book) Forget(addr, driver string) error {
	address, err := Normalise(addr, driver)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	have, known := b.bindings[address]
	if !known || b.shared[address] {
		return nil
	}
	b.drop(address)
	if err := b.save(); err != nil {
		b.keep(have)
		return err
	}
	return nil
}

// NothingSent is true for codes by which a driver refuses before a credential
// goes out. What such a use taught is taken back with Forget, so that a wrong
// enrolment can be mended.
func NothingSent(code errs.Code) bool {
	switch code {
	case errs.UnsupportedDriver, errs.UnsupportedOperation, errs.InvalidConfig, errs.InvalidArgs, errs.InvalidAddress,
		errs.InvalidPayload, errs.PinUnsupported, errs.PinMismatch, errs.TLSUnsupported, errs.CredentialsUnavailable, errs.Unavailable:
		return true
	}
	return false
}

// Guard refuses, as binding-mismatch, a credential or a key pin for an address of
// a known BMC with another one. text is any that a driver may take for an address,
// or for a list of some: a whole URL, and forms that Normalise refuses, too. Without
// a port any port of that host counts. What is no address at all, such as a text
// in which one stands, is nobody's.
func (b *Book) Guard(text, pin, credRef string) error {
	pin = strings.ToLower(pin)
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, one := range strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ';' }) {
		one = strings.TrimSpace(one)
		if err := b.guard(one, pin, credRef); err != nil {
			return err
		}
		// Some parsers take a backslash for a slash, and some for a part of a name.
		if slashed := strings.ReplaceAll(one, `\`, "/"); slashed != one {
			if err := b.guard(slashed, pin, credRef); err != nil {
				return err
			}
		}
	}
	return nil
}

func (b *Book) guard(addr, pin, credRef string) error {
	host, port, ok := lenient(addr)
	if !ok {
		return nil
	}
	for _, have := range b.at(host, port) {
		if have.CredentialsRef != credRef {
			return errs.New(errs.BindingMismatch, "%s is bound to another credential", have.Address)
		}
		if have.Pin != pin {
			return errs.New(errs.BindingMismatch, "%s is bound to another key pin", have.Address)
		}
	}
	return nil
}

// Has reports whether addr, with or without scheme and port, belongs to a known
// BMC. Without a port any port of that host counts. What is not an address at
// all is in no book.
func (b *Book) Has(addr string) bool {
	host, port, err := split(addr[len(scheme.FindString(addr)):])
	if err != nil {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.at(host, port)) > 0
}

// Addresses are all known addresses as host:port, sorted.
func (b *Book) Addresses() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := make([]string, 0, len(b.bindings))
	for address := range b.bindings {
		out = append(out, address)
	}
	sort.Strings(out)
	return out
}

func bindingOf(addr, pin, credRef, driver string) (binding, error) {
	address, err := Normalise(addr, driver)
	if err != nil {
		return binding{}, err
	}
	return binding{Address: address, Driver: kin(driver), CredentialsRef: credRef, Pin: strings.ToLower(pin)}, nil
}

func (have binding) compare(want binding) error {
	what := ""
	switch {
	case have.CredentialsRef != want.CredentialsRef:
		what = "credential"
	case have.Pin != want.Pin:
		what = "key pin"
	case have.Driver != want.Driver:
		what = "driver"
	default:
		return nil
	}
	return errs.New(errs.BindingMismatch, "%s is bound to another %s", have.Address, what)
}

// save writes the whole book; the caller holds mu.
func (b *Book) save() error {
	if b.path == "" {
		return nil
	}
	f := file{Version: plainFormat, Bindings: make([]binding, 0, len(b.bindings))}
	for _, e := range b.bindings {
		f.Bindings = append(f.Bindings, e)
		if e.Protected {
			f.Version = protectedFormat
		}
	}
	sort.Slice(f.Bindings, func(i, j int) bool { return f.Bindings[i].Address < f.Bindings[j].Address })
	data, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		return fmt.Errorf("save address book: %w", err)
	}
	err = atomicfile.Write(b.path, append(data, '\n'), 0o600)
	if errors.Is(err, syscall.ENOSPC) {
		return fmt.Errorf("save address book: %w", errs.Retry(errs.NoSpace, "%v", err))
	}
	if err != nil {
		return fmt.Errorf("save address book: %w", err)
	}
	return nil
}
