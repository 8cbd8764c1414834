package lease

import (
	"cmp"
	"container/list"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// MaxTerm is the longest lease; a longer one is cut.
const MaxTerm = 24 * time.Hour

// ErrConflict says that somebody else was found at the address.
var ErrConflict = errors.New("another machine was found at the address")

// ErrQuarantine says that so much of a pool is out of use for conflicts that no
// more of it is taken away.
var ErrQuarantine = errors.New("the pool's share of addresses in conflict is used up")

// WaitError says why a machine does not have the address that is reserved for it yet.
type WaitError struct {
	Address netip.Addr
	// Holder is the MAC that has it; with Conflict, the one that was found at it.
	Holder   string
	Conflict bool
	Left     time.Duration
}

func (e *WaitError) Error() string {
	left := e.Left.Round(time.Second)
	switch {
	case e.Conflict && e.Holder == "":
		return fmt.Sprintf("%s is reserved for this machine, but is in use elsewhere: it is tried again in %s", e.Address, left)
	case e.Conflict:
		return fmt.Sprintf("%s is reserved for this machine, but %s was found at it: it is tried again in %s", e.Address, e.Holder, left)
	}
	return fmt.Sprintf("%s is reserved for this machine, but %s has it for another %s", e.Address, e.Holder, left)
}

// Reservation keeps an address, inside or outside of a range, for one MAC.
type Reservation struct {
	MAC     string
	Address netip.Addr
}

// Lease is an address that a machine has, or is about to have.
type Lease struct {
	MAC     string
	Address netip.Addr
	// Term is what is left of it: not more than 0 for one that ended.
	Term time.Duration
	// Bound is false for an offer.
	Bound bool
}

// Config is what a Database gives out and where it keeps that.
type Config struct {
	// Path is the file; what is beside it under the same name with an ending is its own.
	Path  string
	Pools []Pool
	// Reservations are those of the configuration; SetReservations replaces them.
	Reservations []Reservation
	// Known says whether a MAC belongs to a machine that somebody vouches for. A
	// share of each pool is kept for those, so that a flood of invented MACs never
	// takes the last address. Nil keeps none. It is called with the database
	// locked: it must neither block nor call back.
	Known func(mac string) bool
	// Now is time.Now if nil. Only differences between its answers count, and
	// those of time.Now follow the monotonic clock: a step of the wall clock, or a
	// start in 1970, ends no lease and lengthens none.
	Now func() time.Time
	Log *slog.Logger

	disk medium
}

// Database is the leases of one interface's pools: who has which address, for
// how long, in memory and on disk. It is safe for concurrent use, and no
// method waits for the disk, except for OpenDatabase and Close.
//
// The order of things: Offer holds an address; Bind makes it a lease in memory
// and queues its line for the disk; Commit calls back once everything that was
// bound before is on disk, and that is when an ACK may leave. Many binds share
// one fsync:
//
//	lease, err := db.Bind(pool, mac, ip, time.Hour)
//	…
//	db.Commit(mac, func(error) { send(ack) })
//
// A machine is its MAC, a lower-case one with colons, and has one address in
// each pool, named by Pool.Name. An address goes to one machine at a time,
// offers included, and an offer alone never costs anybody a lease, not even one
// that ended. Memory is bounded by the pools' addresses, whatever comes in.
//
// Time is what the box was running for: the file carries it on from one start
// to the next. While the box is off, leases do not run down; what that costs is
// that an address stays reserved for at most its term longer than its machine
// may use it. The other way round two machines would share it.
type Database struct {
	cfg Config

	mu       sync.Mutex
	pools    map[string]*pool
	order    []*pool
	reserved map[netip.Addr]string
	slots    map[netip.Addr]*slot
	live     queue // leases, by their end
	passing  queue // holds and quarantines, by their end
	origin   time.Time
	base     time.Duration // the clock at origin
	clock    time.Duration

	log writer
}

// pool is a Pool at work.
type pool struct {
	Pool
	size     int
	usable   int // addresses of the range that are no exclusion
	free     offsets
	ended    list.List // slots whose lease ended and that nobody holds, the first ended first
	bad      list.List // slots in quarantine that are not reserved, the oldest first
	leases   map[string]*slot
	offers   map[string]*slot
	reserved map[string]netip.Addr
}

// slot is an address about which there is something to say.
type slot struct {
	ip   netip.Addr
	pool *pool // nil outside of every pool: a pool was changed
	// mac has the lease, or had it last; until is its end.
	mac   string
	until time.Duration
	// holder is who it is offered to.
	holder    string
	holdUntil time.Duration
	// in quarantine, found being the MAC that was found there, if one is known.
	inBad    bool
	found    string
	badUntil time.Duration

	liveAt, passingAt  int // places in the queues, -1 outside
	endedElem, badElem *list.Element
}

// OpenDatabase reads the leases at cfg.Path and starts the writer. An error
// says what is wrong with cfg: a file that is damaged or cannot be read, in
// part or in whole, and a disk that is full, are logged and served with.
func OpenDatabase(cfg Config) (*Database, error) {
	d := &Database{
		cfg: cfg, pools: make(map[string]*pool), reserved: make(map[netip.Addr]string), slots: make(map[netip.Addr]*slot),
		live: liveQueue(), passing: passingQueue(),
	}
	if d.cfg.Now == nil {
		d.cfg.Now = time.Now
	}
	if d.cfg.disk == nil {
		d.cfg.disk = realDisk{}
	}
	if d.cfg.Log == nil {
		d.cfg.Log = slog.New(slog.DiscardHandler)
	}
	d.origin = d.cfg.Now()
	for _, p := range cfg.Pools {
		if err := d.addPool(p); err != nil {
			return nil, err
		}
	}
	if err := d.SetReservations(cfg.Reservations); err != nil {
		return nil, err
	}
	d.load()
	d.log.start(d)
	return d, nil
}

func (d *Database) addPool(p Pool) error {
	ranged := p.First.IsValid() || p.Last.IsValid()
	if n := p.Size(); ranged && (n < 1 || n > maxPool) || !ranged && !p.Subnet.IsValid() {
		return fmt.Errorf("address pool %s %s to %s: want 1 to %d IPv4 addresses", p.Name, p.First, p.Last, maxPool)
	}
	if p.Subnet.IsValid() && (!p.Subnet.Addr().Is4() || ranged && (!p.Subnet.Contains(p.First) || !p.Subnet.Contains(p.Last))) {
		return fmt.Errorf("address pool %s: %s to %s is not inside of %s", p.Name, p.First, p.Last, p.Subnet)
	}
	if _, ok := d.pools[p.Name]; ok {
		return fmt.Errorf("address pool %q is there twice", p.Name)
	}
	for _, other := range d.order {
		if p.overlaps(other.Pool) {
			return fmt.Errorf("address pools %q and %q overlap", other.Name, p.Name)
		}
	}
	made := &pool{Pool: p, leases: make(map[string]*slot), offers: make(map[string]*slot), reserved: make(map[string]netip.Addr)}
	if ranged {
		made.size = p.Size()
	}
	made.free = newOffsets(made.size)
	for i := range made.size {
		if p.holds(made.at(i)) {
			made.free.add(i)
		}
	}
	made.usable = made.free.len()
	d.pools[p.Name] = made
	d.order = append(d.order, made)
	return nil
}

// overlaps is about what a pool spans: its subnet, or without one its range.
func (p Pool) overlaps(other Pool) bool {
	if p.Subnet.IsValid() && other.Subnet.IsValid() {
		return p.Subnet.Overlaps(other.Subnet)
	}
	return p.spans(other.First) || p.spans(other.Last) || other.spans(p.First) || other.spans(p.Last)
}

func (p Pool) spans(ip netip.Addr) bool {
	if p.Subnet.IsValid() {
		return p.Subnet.Contains(ip)
	}
	return ip.IsValid() && p.First.IsValid() && !ip.Less(p.First) && !p.Last.Less(ip)
}

func (p *pool) at(offset int) netip.Addr { return address(number(p.First) + uint32(offset)) }

// inRange says whether the pool gives ip to whoever asks.
func (p *pool) inRange(ip netip.Addr) bool { return p.size > 0 && p.holds(ip) }

// SetReservations replaces the reservations. Leases stay as they are: one on an
// address that is now another's is not made longer, and ends.
func (d *Database) SetReservations(rs []Reservation) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	type in struct {
		pool *pool
		mac  string
	}
	byAddress, byMAC := make(map[netip.Addr]string), make(map[in]netip.Addr)
	for _, r := range rs {
		hw, err := net.ParseMAC(r.MAC)
		if err != nil || len(hw) != 6 {
			return fmt.Errorf("reservation of %s: %q is not a MAC of six bytes", r.Address, r.MAC)
		}
		mac, p := hw.String(), d.poolOf(r.Address)
		if p == nil || slices.Contains(p.Exclude, r.Address) {
			return fmt.Errorf("reservation of %s for %s: the address is in no pool's subnet, or the box's own", r.Address, mac)
		}
		if other, ok := byAddress[r.Address]; ok && other != mac {
			return fmt.Errorf("reservation of %s: both %s and %s have it", r.Address, other, mac)
		}
		if other, ok := byMAC[in{p, mac}]; ok && other != r.Address {
			return fmt.Errorf("reservation for %s: it has both %s and %s", mac, other, r.Address)
		}
		byAddress[r.Address], byMAC[in{p, mac}] = mac, r.Address
	}
	changed := d.reserved
	d.reserved = byAddress
	for _, p := range d.order {
		clear(p.reserved)
	}
	for key, ip := range byMAC {
		key.pool.reserved[key.mac] = ip
	}
	for ip := range changed {
		d.refresh(ip)
	}
	for ip := range byAddress {
		d.refresh(ip)
	}
	return nil
}

func (d *Database) poolOf(ip netip.Addr) *pool {
	for _, p := range d.order {
		if p.spans(ip) {
			return p
		}
	}
	return nil
}

// Close writes what is queued and ends the writer.
func (d *Database) Close() error { return d.log.stop() }

// Offer picks the address of the pool for mac and holds it: the reserved one,
// else the one that it has or had, else want if that is free, else a free one,
// else the one whose lease ended first. A *WaitError says why a reserved
// address is not to be had; ErrFull that there is none.
func (d *Database) Offer(pool, mac string, want netip.Addr) (netip.Addr, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.advance()
	p := d.pools[pool]
	if p == nil {
		return netip.Addr{}, fmt.Errorf("no address pool has the name %q", pool)
	}
	if ip, ok := p.reserved[mac]; ok {
		s := d.slot(ip)
		if err := d.waits(s, mac); err != nil {
			d.settle(s)
			return netip.Addr{}, err
		}
		d.hold(s, mac, Hold)
		return ip, nil
	}
	known := d.known(p, mac)
	if s := p.leases[mac]; s != nil && d.blocked(s, mac) == nil {
		d.hold(s, mac, Hold)
		return s.ip, nil
	}
	if s := p.offers[mac]; s != nil && d.blocked(s, mac) == nil {
		d.hold(s, mac, p.patience(known))
		return s.ip, nil
	}
	if !known && p.idle() <= p.share() {
		return netip.Addr{}, p.full()
	}
	s := d.pick(p, mac, want)
	if s == nil {
		return netip.Addr{}, p.full()
	}
	d.hold(s, mac, p.patience(known))
	return s.ip, nil
}

// Bind gives ip to mac for a term, in memory; Commit says when it is on disk.
// An address that nobody holds or had is bound without an offer too, so that a
// lost file costs no machine its boot. A lease on an address that was meanwhile
// reserved for another machine, or whose machine has another reserved for it,
// is confirmed for what is left of it and not made longer.
//
// ErrTaken, ErrConflict and ErrFull are reasons for a NAK: mac cannot have it.
func (d *Database) Bind(pool, mac string, ip netip.Addr, term time.Duration) (Lease, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.advance()
	p := d.pools[pool]
	if p == nil {
		return Lease{}, fmt.Errorf("no address pool has the name %q", pool)
	}
	reserved, has := p.reserved[mac]
	switch own := p.leases[mac]; {
	case !p.inRange(ip) && !(has && reserved == ip), has && reserved != ip, d.reserved[ip] != "" && d.reserved[ip] != mac:
		if own != nil && own.ip == ip && own.until > d.clock && !own.inBad {
			return Lease{MAC: mac, Address: ip, Term: own.until - d.clock, Bound: true}, nil
		}
		return Lease{}, ErrTaken
	case p.offers[mac] != nil && p.offers[mac].ip == ip, own != nil && own.ip == ip, has:
	case !d.known(p, mac) && p.idle() <= p.share():
		return Lease{}, p.full()
	}
	s := d.slot(ip)
	err := d.blocked(s, mac)
	if err == nil && s.mac != "" && s.mac != mac && s.holder != mac && !has {
		// An ended lease goes to whom it was offered, not to whoever asks for it.
		err = ErrTaken
	}
	if err != nil {
		d.settle(s)
		return Lease{}, err
	}
	d.drop(p.offers[mac])
	if old := p.leases[mac]; old != nil && old != s {
		d.disown(old)
		d.settle(old)
	}
	if s.mac != mac {
		d.disown(s)
	}
	term = min(max(term, 0), MaxTerm)
	s.mac, s.until = mac, d.clock+term
	p.leases[mac] = s
	d.settle(s)
	d.log.put(d.leaseLine(s))
	return Lease{MAC: mac, Address: ip, Term: term, Bound: true}, nil
}

// Commit calls f once everything that was bound before is on disk, from the
// writer's goroutine, which waits for it: f is short. A non-nil kept says that
// it is in memory only, for that reason, which is logged already: the box
// serves on, and writes all of it as soon as the disk takes it. It reports
// false, and never calls f, when the disk lags so far behind that the queue of
// 8192 is full, or half of it where nobody vouches for mac: the client asks again.
func (d *Database) Commit(mac string, f func(kept error)) bool {
	if d.vouches(mac) {
		return d.log.commit(f, maxQueue)
	}
	return d.log.commit(f, maxQueue/2)
}

// Release ends mac's lease of ip: the address goes to others after those that
// are free, and mac keeps it while nobody needs it.
func (d *Database) Release(mac string, ip netip.Addr) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.advance()
	if s := d.slots[ip]; s != nil {
		d.end(s, mac)
	}
}

// end ends mac's lease of s, and reports whether it had one.
func (d *Database) end(s *slot, mac string) bool {
	if s.mac != mac || s.until <= d.clock {
		return false
	}
	s.until = d.clock
	d.settle(s)
	d.log.put(d.leaseLine(s))
	return true
}

// Withdraw drops an offer to mac that it did not take.
func (d *Database) Withdraw(pool, mac string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.advance()
	if p := d.pools[pool]; p != nil {
		d.drop(p.offers[mac])
	}
}

// Decline takes an address that its own machine found in use out of the pool
// for a while. Where a pool's share of such is used up, the one that was
// declined first comes back; none at which somebody was found does. If asked, what is
// reserved for mac is kept for it: its lease ends, and the caller asks who is there, so
// that Conflict takes the address away and a forged decline does not. declined is
// false where the address was not mac's.
func (d *Database) Decline(mac string, ip netip.Addr, asked bool) (declined, kept bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.advance()
	s := d.slots[ip]
	if s == nil || s.pool == nil || s.mac != mac && s.holder != mac {
		return false, false
	}
	if asked && d.reserved[ip] == mac {
		offered := s.holder == mac
		if offered {
			d.drop(s)
		}
		return d.end(s, mac) || offered, true
	}
	if d.reserved[ip] == "" {
		d.room(s.pool)
	}
	d.quarantine(s, "")
	return true, false
}

// Conflict takes an address at which found was heard out of use for a while; an
// offer of it is void then. It is not taken, and nothing is wrong, where the
// address is found's own or none that is given out. ErrTaken says that another
// machine has a lease of it, which stays; ErrQuarantine that enough of the pool's
// range is out of use. What is reserved is of no use to anybody else and not counted.
func (d *Database) Conflict(ip netip.Addr, found string) (taken bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.advance()
	p := d.poolOf(ip)
	if p == nil || !p.inRange(ip) && d.reserved[ip] == "" {
		return false, nil
	}
	s := d.slot(ip)
	defer d.settle(s)
	switch {
	case s.mac == found || s.holder == found || d.reserved[ip] == found:
		return false, nil
	case s.mac != "" && s.until > d.clock:
		return false, ErrTaken
	case !s.inBad && d.reserved[ip] == "" && (p.bad.Len() > p.badShare() || !d.room(p)):
		return false, ErrQuarantine
	}
	d.quarantine(s, found)
	return true, nil
}

// Acquit ends the quarantines for which found was heard, and says how many.
func (d *Database) Acquit(found string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.advance()
	n := 0
	for _, s := range slices.Clone(d.passing.slots) {
		if s.inBad && s.found == found {
			d.acquit(s)
			n++
		}
	}
	return n
}

// Holder is the MAC that ip was bound to last. An ended lease still counts: the
// address belongs to nobody else until it is given away.
func (d *Database) Holder(ip netip.Addr) (mac string, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if s := d.slots[ip]; s != nil && s.mac != "" {
		return s.mac, true
	}
	return "", false
}

// Reserved is the address of the pool that is reserved for mac.
func (d *Database) Reserved(pool, mac string) (netip.Addr, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if p := d.pools[pool]; p != nil {
		ip, ok := p.reserved[mac]
		return ip, ok
	}
	return netip.Addr{}, false
}

// Lookup is what mac has in the pool, and changes nothing: its lease or offer,
// false for none. The error says why the reserved address is not to be had.
func (d *Database) Lookup(pool, mac string) (l Lease, ok bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.advance()
	p := d.pools[pool]
	if p == nil {
		return Lease{}, false, fmt.Errorf("no address pool has the name %q", pool)
	}
	if ip, ok := p.reserved[mac]; ok && d.slots[ip] != nil {
		err = d.waits(d.slots[ip], mac)
	}
	if s := p.leases[mac]; s != nil {
		return Lease{MAC: mac, Address: s.ip, Term: s.until - d.clock, Bound: true}, true, err
	}
	if s := p.offers[mac]; s != nil {
		return Lease{MAC: mac, Address: s.ip, Term: s.holdUntil - d.clock}, true, err
	}
	return Lease{}, false, err
}

// Idle walks the pool's range: next is the address to go on with, and ok that
// nobody has a lease of it, so that nothing should answer there.
func (d *Database) Idle(pool string, after netip.Addr) (next netip.Addr, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.advance()
	p := d.pools[pool]
	if p == nil || p.size == 0 {
		return after, false
	}
	i := -1
	if p.Pool.within(after) {
		i = int(number(after) - number(p.First))
	}
	for range min(p.size, 64) {
		i = (i + 1) % p.size
		next = p.at(i)
		if s := d.slots[next]; p.inRange(next) && (s == nil || s.until <= d.clock) {
			return next, true
		}
	}
	return next, false
}

// waits says why mac cannot have the address that is reserved for it.
func (d *Database) waits(s *slot, mac string) error {
	switch {
	case s.inBad:
		return &WaitError{Address: s.ip, Holder: s.found, Conflict: true, Left: s.badUntil - d.clock}
	case s.mac != "" && s.mac != mac && s.until > d.clock:
		return &WaitError{Address: s.ip, Holder: s.mac, Left: s.until - d.clock}
	case s.holder != "" && s.holder != mac:
		return &WaitError{Address: s.ip, Holder: s.holder, Left: s.holdUntil - d.clock}
	}
	return nil
}

// blocked says why mac cannot have the address of s.
func (d *Database) blocked(s *slot, mac string) error {
	switch {
	case s.inBad:
		return ErrConflict
	case s.holder != "" && s.holder != mac, s.mac != "" && s.mac != mac && s.until > d.clock,
		d.reserved[s.ip] != "" && d.reserved[s.ip] != mac, s.pool == nil, !s.pool.inRange(s.ip) && d.reserved[s.ip] != mac:
		return ErrTaken
	}
	return nil
}

// known says whether mac may have of the share that is kept: somebody vouches
// for it, or it had a lease there.
func (d *Database) known(p *pool, mac string) bool {
	return d.vouches(mac) || p.leases[mac] != nil
}

func (d *Database) vouches(mac string) bool { return d.cfg.Known == nil || d.cfg.Known(mac) }

// idle is how many addresses a newcomer could get.
func (p *pool) idle() int { return p.free.len() + p.ended.Len() }

// share is how many addresses are kept for machines that are known.
func (p *pool) share() int {
	if p.usable < 2 {
		return 0
	}
	return max(1, p.usable/8)
}

// badShare is how many addresses that are not reserved may be in quarantine.
func (p *pool) badShare() int { return max(1, p.usable/4) }

// room makes room for one more by giving back what was declined first, and says
// whether there is any. A decline has a place beside those that were found.
func (d *Database) room(p *pool) bool {
	if p.bad.Len() < p.badShare() {
		return true
	}
	for e := p.bad.Front(); e != nil; e = e.Next() {
		if s := e.Value.(*slot); s.found == "" {
			d.acquit(s)
			return true
		}
	}
	return false
}

func (p *pool) full() error {
	if n := p.idle(); n > 0 {
		return fmt.Errorf("%w, but for %d that are kept for machines that are known", ErrFull, n)
	}
	return ErrFull
}

// patience is how long an offer waits for its request. A boot ROM may take its
// time; where what is left to invented MACs runs short, they get as long as EDK2 needs.
func (p *pool) patience(known bool) time.Duration {
	switch n := p.idle() - p.share(); {
	case known, n >= p.usable/2:
		return Hold
	case n >= p.usable/4:
		return Hold / 4
	}
	return Hold / 8
}

// pick finds an address that nobody has. It starts at places that the MAC picks,
// so that a lost file mostly gives every machine the address that it had.
func (d *Database) pick(p *pool, mac string, want netip.Addr) *slot {
	if p.within(want) && p.free.has(int(number(want)-number(p.First))) {
		return d.slot(want)
	}
	if n := p.free.len(); n > 0 {
		h := fnv.New32a()
		h.Write([]byte(mac))
		place := h.Sum32()
		for i := range 4 {
			if offset := int((place + uint32(i)) % uint32(p.size)); p.free.has(offset) {
				return d.slot(p.at(offset))
			}
		}
		return d.slot(p.at(p.free.get(int(place % uint32(n)))))
	}
	if first := p.ended.Front(); first != nil {
		return first.Value.(*slot)
	}
	return nil
}

// slot is the place of ip. One that is new must be settled.
func (d *Database) slot(ip netip.Addr) *slot {
	s := d.slots[ip]
	if s == nil {
		s = &slot{ip: ip, pool: d.poolOf(ip), liveAt: -1, passingAt: -1}
		d.slots[ip] = s
	}
	return s
}

func (d *Database) hold(s *slot, mac string, wait time.Duration) {
	if old := s.pool.offers[mac]; old != s {
		d.drop(old)
	}
	s.holder, s.holdUntil = mac, d.clock+wait
	s.pool.offers[mac] = s
	d.settle(s)
}

// drop ends the offer of s.
func (d *Database) drop(s *slot) {
	if s == nil || s.holder == "" {
		return
	}
	delete(s.pool.offers, s.holder)
	s.holder = ""
	d.settle(s)
}

// disown takes the lease of s from its machine.
func (d *Database) disown(s *slot) {
	if s.pool != nil && s.pool.leases[s.mac] == s {
		delete(s.pool.leases, s.mac)
	}
	s.mac = ""
}

// quarantine takes s out of use, and its lease and offer from whoever had them.
func (d *Database) quarantine(s *slot, found string) {
	d.drop(s)
	if s.mac != "" {
		d.disown(s)
	}
	s.inBad, s.found, s.badUntil = true, found, d.clock+quarantine
	d.settle(s)
	d.log.put(d.badLine(s))
}

func (d *Database) acquit(s *slot) {
	s.inBad = false
	d.settle(s)
}

// advance carries the clock on and ends what is over.
func (d *Database) advance() {
	d.clock = max(d.clock, d.base+d.cfg.Now().Sub(d.origin))
	for s := d.passing.first(); s != nil && s.passes() <= d.clock; s = d.passing.first() {
		if s.inBad && s.badUntil <= d.clock {
			s.inBad = false
		}
		if s.holder != "" && s.holdUntil <= d.clock {
			delete(s.pool.offers, s.holder)
			s.holder = ""
		}
		d.settle(s)
	}
	for s := d.live.first(); s != nil && s.until <= d.clock; s = d.live.first() {
		d.settle(s)
	}
}

// refresh files ip anew after a change of what is reserved.
func (d *Database) refresh(ip netip.Addr) {
	d.settle(d.slot(ip))
}

// settle files s where its state belongs: the queues, the pool's free and ended
// addresses, or nowhere.
func (d *Database) settle(s *slot) {
	passing, leased := s.holder != "" || s.inBad, s.mac != ""
	d.passing.set(s, passing)
	d.live.set(s, leased && s.until > d.clock)
	if p := s.pool; p != nil {
		common := p.inRange(s.ip) && d.reserved[s.ip] == ""
		placeIn(&p.ended, &s.endedElem, s, common && leased && !passing && s.until <= d.clock)
		placeIn(&p.bad, &s.badElem, s, s.inBad && d.reserved[s.ip] == "")
		if p.inRange(s.ip) {
			p.free.set(int(number(s.ip)-number(p.First)), common && !leased && !passing)
		}
	}
	if passing || leased {
		d.slots[s.ip] = s
	} else {
		delete(d.slots, s.ip)
	}
}

// placeIn puts s into a list that is in the order of leases' ends, or out of it.
func placeIn(l *list.List, elem **list.Element, s *slot, in bool) {
	switch {
	case in && *elem == nil:
		if first := l.Front(); first != nil && cmp.Less(s.until, first.Value.(*slot).until) {
			*elem = l.PushFront(s)
		} else {
			*elem = l.PushBack(s)
		}
	case !in && *elem != nil:
		l.Remove(*elem)
		*elem = nil
	}
}
