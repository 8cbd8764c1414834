package httpboot

import (
	"context"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/pxe/pxev1"
)

const (
	// perMachine is how many boots of one machine stay fetchable: an iPXE that
	// asked twice, or two ports of it at once, still finds its files.
	perMachine = 4
	// bootLife bounds a boot from its script to its last file.
	bootLife = time.Hour
)

// directFor is how long firmware that asks DHCP again is given the same URL.
const directFor = 5 * time.Minute

// boot is one boot of one machine, begun by its script or by a URL in DHCP.
type boot struct {
	machine, window string
	began           time.Time
	direct          bool

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

// running are the boots that run, bounded by the machines that the assignment knows.
type running struct {
	mu      sync.Mutex
	byToken map[string]*boot
}

// mostBoots bounds all of them: strangers are as many as they say.
const mostBoots = 16384

func (bs *running) begin(m *pxev1.Machine, now time.Time) (token string) {
	bs.mu.Lock()
	defer bs.mu.Unlock()
	return bs.add(m, now, false)
}

// direct is a boot whose URL stands in DHCP: the same for each packet of one, and
// a new one once it was fetched.
func (bs *running) direct(m *pxev1.Machine, now time.Time) (token string) {
	bs.mu.Lock()
	defer bs.mu.Unlock()
	for token, b := range bs.byToken {
		if b.direct && b.machine == m.MachineId && b.window == m.WindowId && now.Sub(b.began) < directFor && !b.isCounted() {
			return token
		}
	}
	return bs.add(m, now, true)
}

func (bs *running) add(m *pxev1.Machine, now time.Time, direct bool) (token string) {
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
	for token := range bs.byToken {
		if len(bs.byToken) < mostBoots {
			break
		}
		delete(bs.byToken, token)
	}
	token = newToken()
	bs.byToken[token] = &boot{machine: m.MachineId, window: m.WindowId, began: now, direct: direct}
	return token
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
