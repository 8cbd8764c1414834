// Package lease gives every MAC one address of a pool and remembers it on disk.
package lease

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"hash/crc32"
	"hash/fnv"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
)

const (
	// Hold is how long an offered address waits for its request.
	Hold = 2 * time.Minute
	// quarantine is how long a declined address stays out of use.
	quarantine = 10 * time.Minute

	maxPool      = 1 << 16
	maxFileBytes = 32 << 20
	// slack is how many superseded lines the file may hold before it is rewritten.
	slack = 4096
)

// ErrFull says that every address of the pool is in use.
var ErrFull = errors.New("the address pool is full")

// ErrTaken says that the address is outside of the pool or another machine's.
var ErrTaken = errors.New("the address is not available")

// Pool is a range of addresses, both ends included.
type Pool struct {
	First, Last netip.Addr
	// Exclude are addresses inside that are never given out, such as the box's own.
	Exclude []netip.Addr
}

// Size is the number of addresses from First to Last, 0 if that is no IPv4 range.
func (p Pool) Size() int {
	if !p.First.Is4() || !p.Last.Is4() || p.Last.Less(p.First) {
		return 0
	}
	return int(number(p.Last)) - int(number(p.First)) + 1
}

func (p Pool) holds(ip netip.Addr) bool {
	return ip.Is4() && !ip.Less(p.First) && !p.Last.Less(ip) && !slices.Contains(p.Exclude, ip)
}

// entry is one address in use. until is when it may go to another MAC.
type entry struct {
	ip    netip.Addr
	mac   string // empty for a declined address
	until time.Time
	bound bool // on disk; an offer is not
}

// Table is the state of one pool. It is safe for concurrent use.
type Table struct {
	path string
	pool Pool

	mu    sync.Mutex
	byIP  map[netip.Addr]*entry
	byMAC map[string]*entry
	file  *os.File
	lines int
}

// Open reads the leases at path. Lines that are torn, damaged or outside of the
// pool are dropped: a changed pool or a bad file never keeps DHCP from
// starting. What cannot be read at all is an error.
func Open(path string, pool Pool) (*Table, error) {
	if n := pool.Size(); n < 1 || n > maxPool {
		return nil, fmt.Errorf("address pool %s to %s: want 1 to %d IPv4 addresses", pool.First, pool.Last, maxPool)
	}
	t := &Table{path: path, pool: pool, byIP: make(map[netip.Addr]*entry), byMAC: make(map[string]*entry)}
	f, err := os.Open(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, fmt.Errorf("read leases: %w", err)
	default:
		err = t.load(io.LimitReader(f, maxFileBytes))
		f.Close()
		if err != nil {
			return nil, fmt.Errorf("read leases: %w", err)
		}
	}
	// A failure here (a full disk) is met again at the first Bind, which says so.
	_ = t.rewrite()
	return t, nil
}

// Close releases the file.
func (t *Table) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.file == nil {
		return nil
	}
	err := t.file.Close()
	t.file = nil
	return err
}

// Offer picks the address for mac and holds it: the one it has or had, else
// want if that is free, else a free one, else the one whose lease ended first.
func (t *Table) Offer(mac string, want netip.Addr, now time.Time) (netip.Addr, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.byMAC[mac]; e != nil {
		if until := now.Add(Hold); until.After(e.until) {
			e.until = until
		}
		return e.ip, nil
	}
	ip, ok := want, t.pool.holds(want) && t.byIP[want] == nil
	if !ok {
		ip, ok = t.free(mac)
	}
	if !ok {
		ip, ok = t.ended(now)
	}
	if !ok {
		return netip.Addr{}, ErrFull
	}
	t.put(&entry{ip: ip, mac: mac, until: now.Add(Hold)})
	return ip, nil
}

// Bind gives ip to mac until the given time. An address that nobody holds can
// be bound without an offer, so that a lost file costs no machine its boot.
// ErrTaken means it cannot have it. A nil kept says that the lease is on disk;
// otherwise it is in memory only, for that reason.
func (t *Table) Bind(mac string, ip netip.Addr, now, until time.Time) (kept, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.byIP[ip]
	if !t.pool.holds(ip) || e != nil && e.mac != mac && e.until.After(now) {
		return nil, ErrTaken
	}
	e = &entry{ip: ip, mac: mac, until: until, bound: true}
	t.put(e)
	return t.keep(e), nil
}

// Release frees the address for others after those never used; mac keeps it
// while nobody needs it.
func (t *Table) Release(mac string, ip netip.Addr, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.byMAC[mac]; e != nil && e.ip == ip && e.until.After(now) {
		e.until = now
		if e.bound {
			_ = t.keep(e)
		}
	}
}

// Withdraw drops an offer to mac that it did not take.
func (t *Table) Withdraw(mac string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.byMAC[mac]; e != nil && !e.bound {
		delete(t.byMAC, mac)
		delete(t.byIP, e.ip)
	}
}

// Decline keeps an address that mac found in use out of the pool for a while.
func (t *Table) Decline(mac string, ip netip.Addr, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.byMAC[mac]; e != nil && e.ip == ip {
		delete(t.byMAC, mac)
		t.byIP[ip] = &entry{ip: ip, until: now.Add(quarantine)}
	}
}

// Holder is the MAC that ip was bound to last. An ended lease still counts:
// the address belongs to nobody else until it is given away.
func (t *Table) Holder(ip netip.Addr) (mac string, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.byIP[ip]; e != nil && e.bound {
		return e.mac, true
	}
	return "", false
}

// put installs e and ends what stood in its way.
func (t *Table) put(e *entry) {
	if old := t.byIP[e.ip]; old != nil && old.mac != e.mac {
		delete(t.byMAC, old.mac)
	}
	if old := t.byMAC[e.mac]; old != nil && old.ip != e.ip {
		delete(t.byIP, old.ip)
	}
	t.byIP[e.ip], t.byMAC[e.mac] = e, e
}

// free starts at a place that the MAC picks, so that a lost file mostly gives
// every machine the address that it had.
func (t *Table) free(mac string) (netip.Addr, bool) {
	h := fnv.New32a()
	h.Write([]byte(mac))
	n := t.pool.Size()
	first := number(t.pool.First)
	start := int(h.Sum32() % uint32(n))
	for i := range n {
		ip := address(first + uint32((start+i)%n))
		if t.pool.holds(ip) && t.byIP[ip] == nil {
			return ip, true
		}
	}
	return netip.Addr{}, false
}

func (t *Table) ended(now time.Time) (netip.Addr, bool) {
	var oldest *entry
	for _, e := range t.byIP {
		if !e.until.After(now) && (oldest == nil || e.until.Before(oldest.until)) {
			oldest = e
		}
	}
	if oldest == nil {
		return netip.Addr{}, false
	}
	return oldest.ip, true
}

// keep appends e to the file and syncs it.
func (t *Table) keep(e *entry) error {
	if t.file == nil || t.lines > len(t.byIP)+slack {
		return t.rewrite()
	}
	_, err := t.file.Write(line(e))
	if err == nil {
		err = t.file.Sync()
	}
	if err != nil {
		// A torn line may stand there now: the next one starts a new file.
		t.file.Close()
		t.file = nil
		return fmt.Errorf("keep lease: %w", err)
	}
	t.lines++
	return nil
}

// rewrite puts the bound leases into a new file and goes on appending to it.
func (t *Table) rewrite() error {
	if t.file != nil {
		t.file.Close()
		t.file = nil
	}
	var bound []*entry
	for _, e := range t.byIP {
		if e.bound {
			bound = append(bound, e)
		}
	}
	slices.SortFunc(bound, func(a, b *entry) int { return a.ip.Compare(b.ip) })
	var b bytes.Buffer
	for _, e := range bound {
		b.Write(line(e))
	}
	if err := atomicfile.Write(t.path, b.Bytes(), 0o600); err != nil {
		return fmt.Errorf("keep leases: %w", err)
	}
	f, err := os.OpenFile(t.path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return fmt.Errorf("keep leases: %w", err)
	}
	t.file, t.lines = f, len(bound)
	return nil
}

func (t *Table) load(r io.Reader) error {
	in := bufio.NewReaderSize(r, 4096)
	for {
		text, err := in.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			continue // no line of ours is that long: its end fails the checksum
		}
		if e, ok := parse(text); ok && t.pool.holds(e.ip) {
			t.put(e)
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// line is "checksum mac address end\n", the checksum over what follows it and
// the end in seconds since 1970.
func line(e *entry) []byte {
	body := fmt.Sprintf("%s %s %d", e.mac, e.ip, e.until.Unix())
	return fmt.Appendf(nil, "%08x %s\n", crc32.ChecksumIEEE([]byte(body)), body)
}

func parse(text []byte) (*entry, bool) {
	s, ok := strings.CutSuffix(string(text), "\n")
	if !ok {
		return nil, false
	}
	sum, body, ok := strings.Cut(s, " ")
	if !ok || sum != fmt.Sprintf("%08x", crc32.ChecksumIEEE([]byte(body))) {
		return nil, false
	}
	fields := strings.Split(body, " ")
	if len(fields) != 3 {
		return nil, false
	}
	hw, err := net.ParseMAC(fields[0])
	if err != nil || len(hw) != 6 {
		return nil, false
	}
	ip, err1 := netip.ParseAddr(fields[1])
	end, err2 := strconv.ParseInt(fields[2], 10, 64)
	if cmp.Or(err1, err2) != nil || !ip.Is4() {
		return nil, false
	}
	return &entry{ip: ip, mac: hw.String(), until: time.Unix(end, 0), bound: true}, true
}

func number(ip netip.Addr) uint32 {
	b := ip.As4()
	return uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
}

func address(n uint32) netip.Addr {
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
}
