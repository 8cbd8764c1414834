package lease

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
)

const (
	// window is how much is read of the file's beginning and of its end. No file of
	// ours is longer; of one that is, what lies between is not read.
	window = 16 << 20
	// maxDormant bounds the leases that are kept though no pool has their address,
	// and forget their time: a range that comes back brings its machines back.
	maxDormant = 1 << 16
	forget     = 30 * 24 * time.Hour
	// maxQueue is how many answers wait for the disk at most.
	maxQueue = 8192
	// spare is how many superseded lines the file holds before it is written anew,
	// beside two for every lease.
	spare = 16384

	// retryDisk is the pause after a disk failed; meanwhile nobody waits for it.
	retryDisk = 5 * time.Second
	// tick is how often the clock is written down while there are leases.
	tick = 5 * time.Minute
)

// The file is a snapshot that grows: lines of text, each
//
//	checksum lease CLOCK LEFT MAC ADDRESS
//	checksum bad CLOCK LEFT MAC ADDRESS
//	checksum time CLOCK
//
// with the CRC-32 of what follows it, times in seconds, CLOCK being how long the
// box ran for and LEFT what is left of the lease or the quarantine then. A later
// line about an address or a machine replaces an earlier one. A line of three
// fields, "MAC ADDRESS END", is of the first edition, which knew the time of day.
type record struct {
	kind        string
	clock, left time.Duration
	mac         string
	ip          netip.Addr
}

const (
	kindLease = "lease"
	kindBad   = "bad"
	kindTime  = "time"
	kindOld   = "old"
)

func (r record) append(b []byte) []byte {
	start := len(b)
	b = append(b, "00000000 "...)
	body := len(b)
	b = append(b, r.kind...)
	b = append(b, ' ')
	b = strconv.AppendInt(b, int64(r.clock/time.Second), 10)
	if r.kind != kindTime {
		b = append(b, ' ')
		b = strconv.AppendInt(b, int64(r.left/time.Second), 10)
		b = append(b, ' ')
		if r.mac == "" {
			b = append(b, '-')
		}
		b = append(b, r.mac...)
		b = append(b, ' ')
		b = r.ip.AppendTo(b)
	}
	const digits = "0123456789abcdef"
	sum := crc32.ChecksumIEEE(b[body:])
	for i := range 8 {
		b[start+i] = digits[sum>>(28-4*i)&15]
	}
	return append(b, '\n')
}

// parseRecord reads a whole line.
func parseRecord(text []byte) (record, bool) {
	text, ok := bytes.CutSuffix(text, []byte("\n"))
	if !ok || len(text) < 10 || text[8] != ' ' || string(text[:8]) != fmt.Sprintf("%08x", crc32.ChecksumIEEE(text[9:])) {
		return record{}, false
	}
	f := bytes.Split(text[9:], []byte(" "))
	kind := string(f[0])
	switch {
	case kind == kindTime && len(f) == 2:
		clock, ok := seconds(f[1])
		return record{kind: kind, clock: clock}, ok && clock >= 0
	case (kind == kindLease || kind == kindBad) && len(f) == 5:
		clock, ok1 := seconds(f[1])
		left, ok2 := seconds(f[2])
		mac, ok3 := parseMAC(f[3])
		if kind == kindBad && string(f[3]) == "-" {
			mac, ok3 = "", true
		}
		ip, ok4 := parseIP(f[4])
		return record{kind: kind, clock: clock, left: left, mac: mac, ip: ip}, ok1 && ok2 && ok3 && ok4 && clock >= 0
	case len(f) == 3:
		mac, ok1 := parseMAC(f[0])
		ip, ok2 := parseIP(f[1])
		return record{kind: kindOld, left: time.Hour, mac: mac, ip: ip}, ok1 && ok2
	}
	return record{}, false
}

// seconds has a bound far past any box's life, so that sums of it fit.
func seconds(text []byte) (time.Duration, bool) {
	n, err := strconv.ParseInt(string(text), 10, 64)
	return time.Duration(n) * time.Second, err == nil && n > -1<<32 && n < 1<<32
}

func parseMAC(text []byte) (string, bool) {
	hw, err := net.ParseMAC(string(text))
	return hw.String(), err == nil && len(hw) == 6
}

func parseIP(text []byte) (netip.Addr, bool) {
	ip, err := netip.ParseAddr(string(text))
	return ip, err == nil && ip.Is4()
}

// leaseLine rounds up what is left, so that no lease ends early.
func (d *Database) leaseLine(s *slot) record {
	return record{kind: kindLease, clock: d.clock, left: s.until - d.clock + time.Second - 1, mac: s.mac, ip: s.ip}
}

func (d *Database) badLine(s *slot) record {
	return record{kind: kindBad, clock: d.clock, left: s.badUntil - d.clock + time.Second - 1, mac: s.found, ip: s.ip}
}

// load reads the file as far as it can be read.
func (d *Database) load() {
	f, err := openRegular(d.cfg.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	log := d.cfg.Log.With("file", d.cfg.Path)
	if err != nil {
		log.Error("DHCP leases cannot be read: every machine counts as new", "err", err)
		return
	}
	defer f.Close()
	d.mu.Lock()
	defer d.mu.Unlock()
	l := loader{d: d}
	err = l.all(f)
	d.base, d.clock = l.clock, l.clock
	l.file()
	if l.damaged > 0 || l.dormant > maxDormant || err != nil {
		log.Warn("DHCP leases are read in part", "leases", len(d.slots), "damaged", l.damaged, "outside", l.dormant, "err", err)
	}
}

// openRegular opens a file, and nothing that could keep it waiting.
func openRegular(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		f.Close()
		return nil, errors.Join(err, fmt.Errorf("%s is no regular file", path))
	}
	return f, nil
}

type loader struct {
	d                *Database
	clock, last      time.Duration
	damaged, dormant int
}

func (l *loader) all(f *os.File) error {
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if st.Size() <= 2*window {
		return l.lines(io.NewSectionReader(f, 0, 2*window))
	}
	l.damaged++
	return errors.Join(l.lines(io.NewSectionReader(f, 0, window)), l.lines(io.NewSectionReader(f, st.Size()-window, window)))
}

func (l *loader) lines(r io.Reader) error {
	in := bufio.NewReaderSize(r, 4096)
	for {
		text, err := in.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			continue // no line of ours is that long: its end fails the checksum
		}
		if rec, ok := parseRecord(text); ok {
			l.take(rec)
		} else if rec, ok := parseRecord(lastLine(text)); ok {
			// What stands before it is no text: the good end is not lost with it.
			l.damaged++
			l.take(rec)
		} else if len(text) > 0 {
			l.damaged++
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// lastLine is what follows the last NUL: a power cut may leave a run of them where
// the end of the file was to be.
func lastLine(text []byte) []byte { return text[bytes.LastIndexByte(text, 0)+1:] }

func (l *loader) take(r record) {
	if r.kind != kindOld {
		// A clock that goes back or leaps over a whole term is not believed: the line
		// counts as written when the one before was.
		if step := r.clock - l.last; step > 0 && step <= MaxTerm {
			l.clock += step
		}
		l.last = r.clock
	}
	d := l.d
	switch r.kind {
	case kindLease, kindOld:
		if d.slots[r.ip] == nil && d.dormant(r.ip) {
			if l.dormant++; l.dormant > maxDormant {
				return
			}
		}
		s := d.slot(r.ip)
		if s.mac != "" {
			d.disown(s)
		}
		if s.pool != nil {
			if old := s.pool.leases[r.mac]; old != nil {
				old.mac = ""
			}
			s.pool.leases[r.mac] = s
		}
		s.inBad = false
		s.mac, s.until = r.mac, l.clock+min(r.left, MaxTerm)
	case kindBad:
		if d.poolOf(r.ip) == nil {
			return
		}
		s := d.slot(r.ip)
		d.disown(s)
		s.inBad, s.found, s.badUntil = true, r.mac, l.clock+min(r.left, quarantine)
	}
}

// dormant says that nobody can be given ip any more.
func (d *Database) dormant(ip netip.Addr) bool {
	p := d.poolOf(ip)
	return p == nil || !p.inRange(ip) && d.reserved[ip] == ""
}

// file puts what was read into its places, the leases that ended first before the others.
func (l *loader) file() {
	d := l.d
	all := make([]*slot, 0, len(d.slots))
	for _, s := range d.slots {
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b *slot) int { return int(min(max(a.until-b.until, -1), 1)) })
	for _, s := range all {
		if s.until < d.clock-forget && d.dormant(s.ip) {
			d.disown(s)
		}
		if s.inBad && (s.badUntil <= d.clock || d.reserved[s.ip] == "" && s.pool.bad.Len() >= s.pool.badShare()) {
			s.inBad = false
		}
		d.settle(s)
	}
}

// snapshot is all that is to survive, in the order in which it ends.
func (d *Database) snapshot() []byte {
	all := make([]*slot, 0, len(d.slots))
	for _, s := range d.slots {
		if s.mac != "" || s.inBad {
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b *slot) int {
		if a.until != b.until {
			return int(min(max(a.until-b.until, -1), 1))
		}
		return a.ip.Compare(b.ip)
	})
	b := make([]byte, 0, 80*len(all)+40)
	b = record{kind: kindTime, clock: d.clock}.append(b)
	for _, s := range all {
		if s.mac != "" {
			b = d.leaseLine(s).append(b)
		}
		if s.inBad {
			b = d.badLine(s).append(b)
		}
	}
	return b
}

// medium is the disk as the database uses it. Tests have one that fails.
type medium interface {
	// Replace is whole and lasting, or an error.
	Replace(path string, data []byte) error
	// Append opens what Replace wrote.
	Append(path string) (appender, error)
}

type appender interface {
	io.WriteCloser
	Sync() error
}

type realDisk struct{}

func (realDisk) Replace(path string, data []byte) error { return atomicfile.Write(path, data, 0o600) }

func (realDisk) Append(path string) (appender, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return nil, err
	}
	return logFile{f}, nil
}

type logFile struct{ *os.File }

// Sync leaves out the time of change, which nobody reads.
func (f logFile) Sync() error {
	return os.NewSyscallError("fdatasync", syscall.Fdatasync(int(f.Fd())))
}

// writer takes lines to the disk, as many at once as came in since the last time.
type writer struct {
	d    *Database
	kick chan struct{}
	quit chan struct{}
	done chan struct{}
	once sync.Once

	// Under the database's lock.
	lines []byte
	n     int
	calls []func(error)
	// behind says that lines were dropped: a snapshot must make up for them.
	behind bool
	lived  bool // when the clock was last written
	ended  bool

	// The writer's own.
	file   appender
	filed  int // lines in file
	failed error
	retry  time.Time
}

// start writes the first snapshot, so that what was read is in one piece again.
func (w *writer) start(d *Database) {
	w.d, w.lived = d, true
	w.kick, w.quit, w.done = make(chan struct{}, 1), make(chan struct{}), make(chan struct{})
	w.flush(true)
	go w.run()
}

func (w *writer) stop() error {
	w.once.Do(func() { close(w.quit) })
	<-w.done
	return w.failed
}

func (w *writer) run() {
	defer close(w.done)
	beat := time.NewTicker(retryDisk)
	defer beat.Stop()
	ticked := time.Now()
	for {
		select {
		case <-w.kick:
			w.flush(false)
		case <-beat.C:
			if time.Since(ticked) >= tick {
				ticked = time.Now()
				w.writeClock()
			}
			w.flush(false)
		case <-w.quit:
			w.writeClock()
			w.end()
			w.flush(true)
			if w.file != nil {
				w.failed = errors.Join(w.failed, w.file.Close())
			}
			return
		}
	}
}

// end lets no more in.
func (w *writer) end() {
	w.d.mu.Lock()
	defer w.d.mu.Unlock()
	w.ended = true
}

// writeClock notes how long the box ran for, while a lease is there that must
// end, and once when the last did.
func (w *writer) writeClock() {
	w.d.mu.Lock()
	defer w.d.mu.Unlock()
	w.d.advance()
	lives := w.d.live.first() != nil || w.d.passing.first() != nil
	if lives || w.lived {
		w.put(record{kind: kindTime, clock: w.d.clock})
	}
	w.lived = lives
}

// put queues a line; the database is locked.
func (w *writer) put(r record) {
	if w.ended {
		return
	}
	if w.n >= 2*maxQueue {
		// The disk lags: what is in memory says it all.
		w.lines, w.n, w.behind = w.lines[:0], 0, true
	}
	w.lines = r.append(w.lines)
	w.n++
	w.wake()
}

func (w *writer) wake() {
	select {
	case w.kick <- struct{}{}:
	default:
	}
}

func (w *writer) commit(f func(error), most int) bool {
	w.d.mu.Lock()
	defer w.d.mu.Unlock()
	if w.ended || len(w.calls) >= most {
		return false
	}
	w.calls = append(w.calls, f)
	w.wake()
	return true
}

// flush takes what is queued to the disk and calls those back that wait for it.
// A disk that failed is left alone for a while, unless now.
func (w *writer) flush(now bool) {
	d := w.d
	d.mu.Lock()
	lines, n, calls := w.lines, w.n, w.calls
	w.lines, w.n, w.calls = nil, 0, nil
	resting := w.failed != nil && !now && time.Now().Before(w.retry)
	var whole []byte
	if !resting && (w.file == nil || w.behind || w.filed+n > 2*len(d.slots)+spare) {
		whole, w.behind = d.snapshot(), false
		n = bytes.Count(whole, []byte("\n"))
	}
	d.mu.Unlock()
	if !resting {
		w.settle(w.write(lines, n, whole))
	}
	for _, f := range calls {
		f(w.failed)
	}
}

func (w *writer) write(lines []byte, n int, whole []byte) (err error) {
	switch {
	case whole != nil:
		if w.file != nil {
			w.file.Close()
			w.file = nil
		}
		if err := w.d.cfg.disk.Replace(w.d.cfg.Path, whole); err != nil {
			return err
		}
		if w.file, err = w.d.cfg.disk.Append(w.d.cfg.Path); err != nil {
			return err
		}
		w.filed = n
	case n > 0:
		_, err = w.file.Write(lines)
		if err == nil {
			err = w.file.Sync()
		}
		if err != nil {
			// A torn line may stand there now, and what was not flushed may be gone for
			// good: the next attempt starts a new file.
			w.file.Close()
			w.file = nil
			return err
		}
		w.filed += n
	}
	return nil
}

// settle tells when the disk stops and starts working.
func (w *writer) settle(err error) {
	switch {
	case err != nil && w.failed == nil:
		w.d.cfg.Log.Error("DHCP leases are in memory only", "file", w.d.cfg.Path, "err", err)
	case err == nil && w.failed != nil:
		w.d.cfg.Log.Info("DHCP leases are kept on disk again", "file", w.d.cfg.Path)
	}
	w.failed = nil
	if err != nil {
		w.failed = fmt.Errorf("keep leases: %w", err)
		w.retry = time.Now().Add(retryDisk)
	}
}
