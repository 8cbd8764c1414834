package tftp

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"time"

	"golang.org/x/net/ipv4"

	"github.com/better-compute/site-appliance/appliance/base/bound"
	"github.com/better-compute/site-appliance/pxe/files"
)

// agreement is what the options of a request come to.
type agreement struct {
	blksize, window int
	timeout         time.Duration
	oack            []byte // nil: no option was taken
}

// agree takes the options that are in their RFC's range, none above what the
// MTU and the server's bounds allow.
func agree(r request, mtu int, size int64, timeout time.Duration) agreement {
	a := agreement{blksize: 512, window: 1, timeout: timeout}
	oack := []byte{0, opOptions}
	take := func(name string, value int64) {
		oack = append(append(oack, name...), 0)
		oack = append(strconv.AppendInt(oack, value, 10), 0)
	}
	if n, ok := within(r.blksize, 8, 65464); ok {
		a.blksize = int(min(n, int64(max(mtu-overhead, 8))))
		take("blksize", int64(a.blksize))
	}
	if r.tsize != "" {
		take("tsize", size)
	}
	if n, ok := within(r.timeout, 1, 255); ok {
		a.timeout = time.Duration(n) * time.Second
		take("timeout", n)
	}
	if n, ok := within(r.windowsize, 1, 65535); ok {
		a.window = int(min(n, maxWindow, int64(max(maxWindowBytes/a.blksize, 1))))
		take("windowsize", int64(a.window))
	}
	if len(oack) > 2 {
		a.oack = oack
	}
	return a
}

func within(s string, least, most int64) (int64, bool) {
	n, err := strconv.ParseInt(s, 10, 64)
	return n, err == nil && n >= least && n <= most
}

// sender is one transfer with its own socket, whose port is its TID.
type sender struct {
	conn   *net.UDPConn
	client netip.AddrPort
	agreement
	w     window
	src   io.Reader
	read  int64    // blocks read from src
	ring  [][]byte // the window's packets, by block number
	batch *ipv4.PacketConn
	out   []ipv4.Message
}

// errPeer is the client's own ERROR.
type errPeer struct{ code uint16 }

func (e errPeer) Error() string { return fmt.Sprintf("the client ended it: code %d", e.code) }

var errGone = errors.New("the client answers no more")

// sendFile opens the transfer's socket and runs it to its end.
func (s *Server) sendFile(ctx context.Context, r request, slot *slot, from netip.AddrPort) {
	defer s.gate.done(from, slot)
	conn, err := bound.ListenPacket(ctx, s.cfg.Interface, netip.AddrPortFrom(s.cfg.Address, 0))
	if err != nil {
		s.cfg.Log.Warn("TFTP transfer not started", "err", err)
		return
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	f, err := s.open(from.Addr(), r.name)
	if err != nil {
		_, _ = conn.WriteToUDPAddrPort(errorPacket(codeNotFound, errNotFound.Error()), from)
		return
	}
	defer f.Close()
	t := newSender(conn, from, f, agree(r, s.mtu, f.Size(), s.retransmit))
	err = t.run(ctx, func() { s.gate.established(slot) })
	end := Transfer{Client: from.Addr(), Name: r.name, Bytes: min(max(t.w.acked, 0)*int64(t.blksize), f.Size()), Outcome: Done}
	var peer errPeer
	switch {
	case err == nil:
	case errors.As(err, &peer) && t.w.acked <= 0:
		end.Outcome = Probed
	default:
		end.Outcome, end.Err = Failed, err
		if !errors.As(err, &peer) {
			text := errRead
			if ctx.Err() != nil {
				text = errStopped
			}
			_, _ = conn.WriteToUDPAddrPort(errorPacket(codeUndefined, text.Error()), from)
		}
	}
	s.cfg.Ended(end)
}

func newSender(conn *net.UDPConn, client netip.AddrPort, f files.File, a agreement) *sender {
	s := &sender{conn: conn, client: client, agreement: a, src: bufio.NewReaderSize(f, 64<<10), batch: ipv4.NewPacketConn(conn),
		w:    newWindow(f.Size()/int64(a.blksize)+1, a.window, a.oack != nil, a.timeout),
		ring: make([][]byte, a.window), out: make([]ipv4.Message, a.window)}
	to := net.UDPAddrFromAddrPort(client)
	buf := make([]byte, a.window*(a.blksize+4))
	for i := range s.ring {
		s.ring[i] = buf[i*(a.blksize+4):][: 0 : a.blksize+4]
		s.out[i] = ipv4.Message{Addr: to, Buffers: make([][]byte, 1)}
	}
	return s
}

// run sends until all is acknowledged. established is told of the first answer.
func (s *sender) run(ctx context.Context, established func()) error {
	began := time.Now()
	buf := make([]byte, 1024)
	answered := false
	for !s.w.done() {
		from, to, wait := s.w.send(time.Since(began))
		if err := s.write(from, to); err != nil {
			return err
		}
		_ = s.conn.SetReadDeadline(time.Now().Add(wait))
		for again := false; !again; {
			if ctx.Err() != nil {
				return errStopped
			}
			n, peer, err := s.conn.ReadFromUDPAddrPort(buf)
			if errors.Is(err, net.ErrClosed) {
				return errStopped
			}
			if err != nil {
				if !s.w.expire() {
					return errGone
				}
				break
			}
			if peer = netip.AddrPortFrom(peer.Addr().Unmap(), peer.Port()); peer != s.client {
				if n >= 2 && binary.BigEndian.Uint16(buf) != opError {
					_, _ = s.conn.WriteToUDPAddrPort(errorPacket(codeTID, "unknown transfer ID"), peer)
				}
				continue
			}
			if n < 4 {
				continue
			}
			number := binary.BigEndian.Uint16(buf[2:])
			switch binary.BigEndian.Uint16(buf) {
			case opError:
				return errPeer{number}
			case opAck:
				again = s.w.ack(number, time.Since(began))
				if again && !answered {
					answered = true
					established()
				}
			}
		}
	}
	return nil
}

// write sends the blocks in one call where there are several.
func (s *sender) write(from, to int64) error {
	if from == 0 {
		_, _ = s.conn.WriteToUDPAddrPort(s.oack, s.client)
		return nil
	}
	for i := from; i < to; i++ {
		p, err := s.block(i)
		if err != nil {
			return err
		}
		s.out[i-from].Buffers[0] = p
	}
	if to-from == 1 {
		_, _ = s.conn.WriteToUDPAddrPort(s.out[0].Buffers[0], s.client)
		return nil
	}
	for left := s.out[:to-from]; len(left) > 0; {
		n, err := s.batch.WriteBatch(left, 0)
		if err != nil || n < 1 {
			return nil // a full queue or a link that is down is a loss
		}
		left = left[n:]
	}
	return nil
}

// block is the packet of block i, which is in the window or follows what was read.
func (s *sender) block(i int64) ([]byte, error) {
	at := i % int64(len(s.ring))
	for ; s.read < i; s.read++ {
		slot := (s.read + 1) % int64(len(s.ring))
		p := s.ring[slot][:s.blksize+4]
		n, err := io.ReadFull(s.src, p[4:])
		if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF || n < s.blksize && s.read+1 != s.w.last {
			return nil, fmt.Errorf("read the file: %w", err)
		}
		binary.BigEndian.PutUint16(p, opData)
		// The number wraps to 0.
		binary.BigEndian.PutUint16(p[2:], uint16(s.read+1))
		s.ring[slot] = p[:4+n]
	}
	return s.ring[at], nil
}
