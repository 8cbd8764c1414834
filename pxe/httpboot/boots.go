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

// boot is one boot of one machine, begun by its script.
type boot struct {
	machine, window string
	began           time.Time

	mu      sync.Mutex
	archive []byte
}

// initrd makes the boot's archive once: a client that asks again for the same
// boot gets the same voucher.
func (b *boot) initrd(ctx context.Context, m *pxev1.Machine, mint func(context.Context, *pxev1.Machine) ([]byte, error)) ([]byte, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.archive == nil {
		archive, err := mint(ctx, m)
		if err != nil {
			return nil, err
		}
		b.archive = archive
	}
	return b.archive, nil
}

// boots are those that run, bounded by the machines that the assignment knows.
type boots struct {
	mu      sync.Mutex
	byToken map[string]*boot
}

func (bs *boots) begin(m *pxev1.Machine, now time.Time) (token string) {
	bs.mu.Lock()
	defer bs.mu.Unlock()
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
	token = newToken()
	bs.byToken[token] = &boot{machine: m.MachineId, window: m.WindowId, began: now}
	return token
}

// find is the boot of token if it is this machine's, in this window.
func (bs *boots) find(token string, m *pxev1.Machine) *boot {
	bs.mu.Lock()
	defer bs.mu.Unlock()
	b := bs.byToken[token]
	if b == nil || b.machine != m.MachineId || b.window != m.WindowId {
		return nil
	}
	return b
}
