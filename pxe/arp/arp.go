// Package arp finds the machines that use addresses of the DHCP pool without a
// lease, by ARP probes (RFC 5227) in the background, so that no offer waits for
// an answer.
//
// Two kinds of address are probed: those that were just offered, and one after
// the other all those of the pool that nobody has a lease of, so that most
// conflicts are known before anything is offered. An address that answers is
// reported to the leases, which take it out of use for a while and give the
// next offer another. Answers are not proven: one MAC that answers for many
// addresses, as a router with proxy ARP and an attacker do, is disbelieved and
// what it claimed is given back; and what all of them together can take away of a
// range is bounded by the leases.
package arp

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/pxe/inet"
)

// Leases is what is told of conflicts; a lease.Database is one.
type Leases interface {
	// Idle walks the addresses that nobody has a lease of.
	Idle(pool string, after netip.Addr) (next netip.Addr, ok bool)
	// Conflict takes ip out of use because found answered for it. The error says why
	// it did not; neither, that there is nothing wrong.
	Conflict(ip netip.Addr, found string) (taken bool, err error)
	// Acquit takes back what Conflict was told of found.
	Acquit(found string) int
}

// Finding is an answer that counted.
type Finding struct {
	Interface string
	Address   netip.Addr
	// MAC is who answered.
	MAC string
	// Disbelieved says that the MAC answers for so many addresses that it is not
	// believed for the next hour. Address is the one that was too many.
	Disbelieved bool
	// Kept is why the address stays in use all the same, nil if it does not.
	Kept error
}

// Config is one interface's prober.
type Config struct {
	Interface string
	// Pool is the name of the interface's own pool.
	Pool   string
	Leases Leases
	// Found is told of each finding, an address at most once in ten minutes, from
	// the goroutine of Serve. It may be nil: findings are logged in any case.
	Found func(Finding)
	Log   *slog.Logger
}

// Prober probes on one interface.
type Prober struct {
	cfg   Config
	mac   net.HardwareAddr
	sock  *os.File
	offer chan offer

	mu    sync.Mutex
	state machine
	told  map[netip.Addr]time.Time
}

type offer struct {
	ip  netip.Addr
	mac string
}

// Listen opens the socket, which is bound to the interface.
func Listen(cfg Config) (*Prober, error) {
	i, err := net.InterfaceByName(cfg.Interface)
	if err != nil {
		return nil, fmt.Errorf("arp: interface %s: %w", cfg.Interface, err)
	}
	if len(i.HardwareAddr) != 6 {
		return nil, fmt.Errorf("arp: interface %s is no Ethernet", cfg.Interface)
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("arp: open packet socket: %w", os.NewSyscallError("socket", err))
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: inet.HostToNet(unix.ETH_P_ARP), Ifindex: i.Index}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("arp: interface %s: %w", cfg.Interface, os.NewSyscallError("bind", err))
	}
	return &Prober{cfg: cfg, mac: i.HardwareAddr, sock: os.NewFile(uintptr(fd), "arp"), offer: make(chan offer, 256),
		state: newMachine(), told: make(map[netip.Addr]time.Time)}, nil
}

// Close ends Serve.
func (p *Prober) Close() error { return p.sock.Close() }

// Offered has ip probed at once, mac being who may answer there. It never waits:
// while more is offered than is probed, the rest is not.
func (p *Prober) Offered(ip netip.Addr, mac string) {
	select {
	case p.offer <- offer{ip, mac}:
	default:
	}
}

// Serve probes until ctx ends or the socket fails.
func (p *Prober) Serve(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(ctx, func() { p.sock.Close() })
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { cancel(p.receive(ctx)) })
	timer := time.NewTimer(0)
	defer timer.Stop()
	var walk netip.Addr
	for {
		select {
		case <-ctx.Done():
			if err := context.Cause(ctx); !errors.Is(err, context.Canceled) && !errors.Is(err, fs.ErrClosed) {
				return fmt.Errorf("arp on %s: %w", p.cfg.Interface, err)
			}
			return nil
		case o := <-p.offer:
			p.mu.Lock()
			p.state.offered(time.Now(), o.ip, o.mac)
			p.mu.Unlock()
		case <-timer.C:
		}
		now := time.Now()
		p.mu.Lock()
		if p.state.wantsIdle(now) {
			next, ok := p.cfg.Leases.Idle(p.cfg.Pool, walk)
			walk = next
			p.state.idle(now, next, ok)
		}
		var frames [][]byte
		for ip, ok := p.state.due(now); ok; ip, ok = p.state.due(now) {
			frames = append(frames, probe(p.mac, ip))
		}
		wait := p.state.wait(now)
		p.mu.Unlock()
		for _, f := range frames {
			// Such as ENETDOWN while the link flaps: the next probe tries again.
			if _, err := p.sock.Write(f); errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) {
				cancel(err)
			} else if err != nil && !errors.Is(err, fs.ErrClosed) {
				p.cfg.Log.Debug("ARP probe not sent", "err", err)
			}
		}
		timer.Reset(wait)
	}
}

func (p *Prober) receive(ctx context.Context) error {
	buf := make([]byte, 128)
	for {
		n, err := p.sock.Read(buf)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, fs.ErrClosed), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV):
			return err
		case err != nil:
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(time.Second):
			}
			continue
		}
		if ip, mac, ok := parseReply(buf[:n]); ok {
			p.answered(time.Now(), ip, mac)
		}
	}
}

func (p *Prober) answered(now time.Time, ip netip.Addr, mac net.HardwareAddr) {
	if string(mac) == string(p.mac) {
		return
	}
	found := mac.String()
	p.mu.Lock()
	v := p.state.answer(now, ip, found)
	p.mu.Unlock()
	if v == nothing {
		return
	}
	f := Finding{Interface: p.cfg.Interface, Address: ip, MAC: found, Disbelieved: v == disbelieved}
	log := p.cfg.Log.With("ip", ip.String(), "mac", found)
	if v == disbelieved {
		n := p.cfg.Leases.Acquit(found)
		log.Error("a machine answers ARP for so many free addresses of the DHCP pool that it is not believed: look for proxy ARP, or for an attacker", "given_back", n)
	} else if taken, err := p.cfg.Leases.Conflict(ip, found); !taken && err == nil || !p.fresh(ip, now) {
		return
	} else if f.Kept = err; err != nil {
		log.Warn("an address of the DHCP pool answers, and stays in use", "err", err)
	} else {
		log.Warn("an address of the DHCP pool is in use without a lease: it is not given out for a while")
	}
	if p.cfg.Found != nil {
		p.cfg.Found(f)
	}
}

// fresh says whether a conflict at ip is news. Only the receiver calls it.
func (p *Prober) fresh(ip netip.Addr, now time.Time) bool {
	if at, ok := p.told[ip]; ok && now.Sub(at) < memory {
		return false
	}
	if len(p.told) >= maxAsked {
		clear(p.told)
	}
	p.told[ip] = now
	return true
}
