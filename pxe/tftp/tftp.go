// Package tftp serves the boot programs to firmware, read-only, on one interface and address.
package tftp

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/pin/tftp/v3"

	"github.com/better-compute/site-appliance/appliance/base/bound"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/limit"
)

// Port is TFTP's.
const Port = 69

const (
	defaultTransfers = 1024
	defaultPerClient = 8
	retransmit       = time.Second
	retries          = 6
	// patience is how long a file may have nothing to send: GRUB, which alone reads what
	// still arrives, waits for a block for 33 seconds.
	patience = 40 * time.Second
	// perMinute is how many refusals of one client are logged, and othersPerMinute of
	// all together that are no known machine's.
	perMinute, othersPerMinute = 1, 256
	// overhead of IPv4, UDP and TFTP in a packet of the interface's MTU. IPv6's
	// header is longer.
	overhead = 20 + 8 + 4
	longer6  = 20
)

// Outcome is how a transfer ended.
type Outcome string

const (
	Done Outcome = "done"
	// Probed: the client asked for the size and went away, as firmware does, or closed
	// what it had read enough of, as GRUB does.
	Probed Outcome = "probed"
	Failed Outcome = "failed"
)

// Transfer is one that has ended.
type Transfer struct {
	Client  netip.Addr
	Name    string
	Bytes   int64
	Outcome Outcome
	Err     error
}

// Config is one interface's TFTP.
type Config struct {
	Interface string
	Address   netip.Addr
	// Open opens what client may read under name, a relative path with single slashes.
	// ctx ends with the transfer: reading what has not come yet ends with it too.
	Open func(ctx context.Context, client netip.Addr, name string) (files.File, error)
	// Refuse says, without waiting for anything, that Open would refuse: the one
	// reader of the port asks it. Nil: Open itself is asked.
	Refuse func(client netip.Addr, name string) error
	// CountsFor is whom the caps and what is logged count an address for: the machine that
	// has it, empty for nobody's, and whether somebody vouches for that. Nil: each
	// address counts by itself.
	CountsFor func(netip.Addr) (machine string, known bool)
	// Ended is told of each transfer that Open allowed, but for those whose place another
	// client needed before anybody answered, or whose own port asked again later than
	// a repeat; it must not block.
	Ended func(Transfer)
	Log   *slog.Logger
	// MaxTransfers and MaxPerClient cap what runs at once; 0: 1024 and 8.
	MaxTransfers, MaxPerClient int
}

// Server is the open socket.
type Server struct {
	cfg        Config
	gate       *gate
	mtu        int
	retransmit time.Duration
	patience   time.Duration
	own        sync.WaitGroup
	refusals   limit.Minute // that are logged
	others     limit.Minute
}

// Listen opens the socket.
func Listen(ctx context.Context, cfg Config) (*Server, error) {
	if cfg.MaxTransfers == 0 {
		cfg.MaxTransfers = defaultTransfers
	}
	if cfg.MaxPerClient == 0 {
		cfg.MaxPerClient = defaultPerClient
	}
	iface, err := net.InterfaceByName(cfg.Interface)
	if err != nil {
		return nil, fmt.Errorf("tftp: interface %s: %w", cfg.Interface, err)
	}
	conn, err := bound.ListenPacket(ctx, cfg.Interface, netip.AddrPortFrom(cfg.Address, Port))
	if err != nil {
		return nil, fmt.Errorf("tftp: %w", err)
	}
	s := &Server{cfg: cfg, gate: newGate(conn, cfg.MaxTransfers, cfg.MaxPerClient, time.Now), refusals: limit.Minute{Most: perMinute}, others: limit.Minute{Most: othersPerMinute}, mtu: iface.MTU, retransmit: retransmit, patience: patience}
	if cfg.CountsFor != nil {
		s.gate.counts = cfg.CountsFor
	}
	if cfg.Address.Is6() {
		s.mtu -= longer6
	}
	return s, nil
}

// Close releases the socket of a server that does not serve.
func (s *Server) Close() error { return s.gate.UDPConn.Close() }

// Serve answers until ctx ends, and then waits for the running transfers to
// stop, at most a few retransmissions long.
func (s *Server) Serve(ctx context.Context) error {
	srv := tftp.NewServer(func(name string, to io.ReaderFrom) error { return s.read(ctx, name, to) }, nil)
	srv.SetTimeout(s.retransmit)
	srv.SetRetries(retries)
	srv.SetBackoff(func(int) time.Duration { return 0 })
	// The library finds the MTU only on a plain UDP socket, and forgets TFTP's own header.
	srv.SetBlockSizeNegotiation(false)
	srv.SetBlockSize(s.mtu - overhead)
	srv.SetHook(startFailures{s})
	s.gate.own = func(transfer context.Context, r request, slot *slot, from netip.AddrPort) {
		s.own.Go(func() {
			transfer, cancel := context.WithCancel(transfer)
			defer cancel()
			stop := context.AfterFunc(ctx, cancel)
			defer stop()
			s.sendFile(transfer, r, slot, from)
		})
	}
	// Not from port 69: EDK2 hears nothing that comes from there.
	refusals, err := bound.ListenPacket(ctx, s.cfg.Interface, netip.AddrPortFrom(s.cfg.Address, 0))
	if err != nil {
		return fmt.Errorf("tftp: %w", err)
	}
	defer refusals.Close()
	s.gate.refused = func(from netip.AddrPort, name string) bool {
		if err := s.look(ctx, from.Addr(), name); err != nil {
			_, _ = refusals.WriteToUDPAddrPort(errorPacket(codeNotFound, errNotFound.Error()), from)
			return true
		}
		return false
	}
	defer s.own.Wait()
	served := make(chan error, 1)
	go func() { served <- srv.Serve(s.gate) }()
	select {
	case <-ctx.Done():
		// Shutdown closes the gate with the library's lock held, and what the gate
		// passes on meanwhile needs that lock.
		_ = s.gate.Close()
		srv.Shutdown()
		<-served
		return nil
	case err := <-served:
		return fmt.Errorf("tftp: %w", err)
	}
}

// What clients are told: no paths, no system's words.
var (
	errNotFound = errors.New("file not found")
	errRead     = errors.New("read error")
	errStopped  = errors.New("server stops")
)

func (s *Server) read(ctx context.Context, name string, to io.ReaderFrom) error {
	out := to.(tftp.OutgoingTransfer)
	remote := out.RemoteAddr()
	from := remote.AddrPort()
	from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
	slot := s.gate.begun(from)
	if slot == nil {
		return errStopped
	}
	defer s.gate.done(from, slot)
	f, err := s.openFor(ctx, slot, from.Addr(), name)
	if err != nil && ctx.Err() != nil {
		return errStopped
	}
	if err != nil {
		return errNotFound
	}
	defer f.Close()
	out.SetSize(f.Size())
	src := &source{ctx: ctx, r: bufio.NewReaderSize(f, readAhead), second: func() { s.gate.established(slot) }}
	n, err := to.ReadFrom(src)
	t := Transfer{Client: from.Addr(), Name: name, Bytes: n, Outcome: Done, Err: err}
	switch {
	case err == nil:
	// The library words the peer's ERROR so, to its option acknowledgement and to the first block.
	case strings.HasPrefix(err.Error(), "sending block 0: code="), strings.HasPrefix(err.Error(), "sending block 1: code="):
		t.Outcome, t.Err = Probed, nil
	case peerCloses(err):
		t.Outcome, t.Err = Probed, nil
	default:
		t.Outcome = Failed
		if src.err != nil {
			t.Err = src.err
		}
	}
	s.cfg.Ended(t)
	// The transfer has said its last word to the client already.
	return nil
}

// peerCloses is closes of what the library makes of the peer's ERROR.
func peerCloses(err error) bool {
	var block, code uint16
	_, text, ok := strings.Cut(err.Error(), ", error: ")
	n, _ := fmt.Sscanf(err.Error(), "sending block %d: code=%d, error: ", &block, &code)
	return ok && n == 2 && closes(code, text)
}

// look says whether open would refuse.
func (s *Server) look(ctx context.Context, client netip.Addr, name string) error {
	if s.cfg.Refuse != nil {
		err := s.cfg.Refuse(client, name)
		if err != nil {
			s.refused(client, name, err)
		}
		return err
	}
	f, err := s.open(ctx, client, name)
	if err == nil {
		_ = f.Close() // it was only looked at
	}
	return err
}

// openFor opens the file of a transfer.
func (s *Server) openFor(ctx context.Context, slot *slot, client netip.Addr, name string) (files.File, error) {
	s.gate.opens(slot, name)
	defer s.gate.opens(slot, "")
	return s.open(ctx, client, name)
}

// open opens a file whose opening and reading end with ctx, and as soon as they
// have taken longer than the client waits.
func (s *Server) open(ctx context.Context, client netip.Addr, name string) (files.File, error) {
	reading, end := context.WithCancel(ctx)
	late := time.AfterFunc(s.patience, end)
	f, err := s.cfg.Open(reading, client, name)
	late.Stop()
	if err != nil {
		end()
		if ctx.Err() == nil { // or nobody refused it
			s.refused(client, name, err)
		}
		return nil, err
	}
	// A file of the box's own does not wait, and a timer for each block has its price.
	if files.Plain(f) != nil {
		return &opened{f, end}, nil
	}
	return &timely{opened{f, end}, s.patience}, nil
}

// opened is a file whose context ends with it.
type opened struct {
	files.File
	end context.CancelFunc
}

func (f *opened) Close() error {
	f.end()
	return f.File.Close()
}

// timely is one that ends its own context when it has nothing for so long.
type timely struct {
	opened
	limit time.Duration
}

func (f *timely) Read(b []byte) (int, error) {
	late := time.AfterFunc(f.limit, f.end)
	n, err := f.File.Read(b)
	if !late.Stop() && err != nil && err != io.EOF {
		err = fmt.Errorf("nothing came for %v, and the client waits no longer: %w", f.limit, err)
	}
	return n, err
}

func (s *Server) refused(client netip.Addr, name string, reason error) {
	if name == files.Autoexec {
		return
	}
	// Firmware that finds nothing may ask without end.
	more, withheld := s.refusals.Count(client.String(), s.gate.now())
	if _, known := s.gate.counts(client); more && (known || s.others.More("", s.gate.now())) {
		s.cfg.Log.Info("TFTP request refused", "client", client.String(), "file", name, "reason", reason, "untold", withheld)
	}
}

// source hides reading's errors from the wire and ends with the server.
type source struct {
	ctx context.Context
	r   io.Reader
	err error
	// second is told of the second reading, when the client has acknowledged the first block.
	second func()
	reads  int
}

func (s *source) Read(p []byte) (int, error) {
	if s.ctx.Err() != nil {
		return 0, errStopped
	}
	if s.reads++; s.reads == 2 {
		s.second()
	}
	n, err := s.r.Read(p)
	if err != nil && err != io.EOF {
		s.err, err = err, errRead
	}
	return n, err
}

// startFailures hears of requests for which the library could open no socket.
type startFailures struct{ s *Server }

func (startFailures) OnSuccess(tftp.TransferStats) {}

func (h startFailures) OnFailure(stats tftp.TransferStats, err error) {
	if stats.RemoteAddr == nil && !strings.Contains(err.Error(), net.ErrClosed.Error()) {
		h.s.gate.failed()
		h.s.cfg.Log.Warn("TFTP transfer not started", "err", err)
	}
}
