package httpboot

import (
	"context"
	"crypto/rand"
	"encoding/base32"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

const (
	// perMachine is how many boots of one machine stay fetchable: an iPXE that
	// asked twice, or two ports of it at once, still finds its files.
	perMachine = 4
	// bootLife is after which a boot ends when any other begins.
	bootLife = time.Hour
)

// sameFor is how long who asks again for a boot that has not begun is given the same.
const sameFor = 5 * time.Minute

// boot is one boot of one machine, begun by its script, by GRUB's configuration or by
// a URL in DHCP.
type boot struct {
	machine, window string
	began           time.Time
	// program is what boots: our iPXE, GRUB, or the firmware by a URL in DHCP.
	program decide.Program

	mu      sync.Mutex
	archive []byte
	counted bool
}

// initrd makes the boot's archive once: a client that asks again for the same
// boot gets the same voucher.
func (b *boot) initrd(ctx context.Context, mint func(context.Context) ([]byte, error)) ([]byte, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.archive == nil {
		archive, err := mint(ctx)
		if err != nil {
			return nil, err
		}
		b.archive = archive
	}
	return b.archive, nil
}

// count says whether this is the first time.
func (b *boot) count() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	first := !b.counted
	b.counted = true
	return first
}

func (b *boot) isCounted() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.counted
}

// running are the boots that run.
type running struct {
	mu      sync.Mutex
	byToken map[string]*boot
}

// mostBoots bounds all of them: strangers are as many as they say.
const mostBoots = 16384

func (bs *running) begin(m *pxev1.Machine, now time.Time, by decide.Program) (token string) {
	bs.mu.Lock()
	defer bs.mu.Unlock()
	return bs.add(m, now, by)
}

// same is a boot that is named more than once before it begins: by DHCP, whose every
// packet has its URL, or to GRUB, which opens its configuration several times
// before it reads it. Once it was fetched, it is a new one.
func (bs *running) same(m *pxev1.Machine, now time.Time, by decide.Program) (token string) {
	bs.mu.Lock()
	defer bs.mu.Unlock()
	for token, b := range bs.byToken {
		if b.program == by && b.machine == m.MachineId && b.window == m.WindowId && now.Sub(b.began) < sameFor && !b.isCounted() {
			return token
		}
	}
	return bs.add(m, now, by)
}

func (bs *running) add(m *pxev1.Machine, now time.Time, by decide.Program) (token string) {
	var oldest string
	n := 0
	for token, b := range bs.byToken {
		switch {
		case now.Sub(b.began) > bootLife:
			delete(bs.byToken, token)
		case b.machine == m.MachineId:
			n++
			if oldest == "" || b.began.Before(bs.byToken[oldest].began) {
				oldest = token
			}
		}
	}
	if n >= perMachine {
		delete(bs.byToken, oldest)
	}
	if len(bs.byToken) >= mostBoots {
		bs.giveWay()
	}
	token = newToken()
	bs.byToken[token] = &boot{machine: m.MachineId, window: m.WindowId, began: now, program: by}
	return token
}

// giveWay ends one boot: a stranger's if there is any.
func (bs *running) giveWay() {
	last := ""
	for token, b := range bs.byToken {
		if last = token; decide.IsStranger(b.machine) {
			break
		}
	}
	delete(bs.byToken, last)
}

// find is the boot of token if it is this machine's, in this window.
func (bs *running) find(token string, m *pxev1.Machine) *boot {
	bs.mu.Lock()
	defer bs.mu.Unlock()
	b := bs.byToken[token]
	if b == nil || b.machine != m.MachineId || b.window != m.WindowId {
		return nil
	}
	return b
}

// returnedWithin is how soon a machine asks again that came back from its exit.
const returnedWithin = 5 * time.Minute

// returns are when machines were sent to their disks. Its zero value is ready.
type returns struct {
	mu   sync.Mutex
	macs map[string][]time.Time
}

func (r *returns) add(mac string, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.macs == nil || len(r.macs) >= mostMACs {
		r.macs = make(map[string][]time.Time)
	}
	at := append(r.macs[mac], now)
	r.macs[mac] = at[max(0, len(at)-4):]
}

func (r *returns) recent(mac string, now time.Time) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, at := range r.macs[mac] {
		if d := now.Sub(at); d >= 0 && d < returnedWithin {
			n++
		}
	}
	return n
}

// newToken has 160 random bits in lower-case letters and digits.
func newToken() string {
	var b [20]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand ends the program instead
	return strings.ToLower(base32.StdEncoding.EncodeToString(b[:]))
}
