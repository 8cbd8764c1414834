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
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"

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
func agree(r request, mtu, windowBytes int, size int64, timeout time.Duration) agreement {
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
		a.window = int(min(n, maxWindow, int64(max(windowBytes/a.blksize, 1))))
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
	w       window
	file    io.Reader
	src     io.Reader // file, buffered; nil: nothing was sent yet
	size    int64     // bytes in file
	read    int64     // blocks read from it
	ring    []byte    // the window's packets, one after the other
	segment []byte    // the control message of a run of packets; nil: the kernel splits none
	batch   *ipv4.PacketConn
	out     []ipv4.Message
}

// errPeer is the client's own ERROR.
type errPeer struct {
	code uint16
	text string
}

func (e errPeer) Error() string { return fmt.Sprintf("the client ended it: code %d", e.code) }

// closes says that a client's ERROR is GRUB's, which ends so what it does not read to its end.
func closes(code uint16, text string) bool {
	return code == codeUndefined && strings.TrimRight(text, "\x00") == "closed"
}

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
	f, err := s.openFor(ctx, slot, from.Addr(), r.name)
	if err != nil {
		switch {
		case errors.Is(context.Cause(ctx), errDropped): // as below
		case ctx.Err() != nil:
			_, _ = conn.WriteToUDPAddrPort(errorPacket(codeUndefined, errStopped.Error()), from)
		default:
			_, _ = conn.WriteToUDPAddrPort(errorPacket(codeNotFound, errNotFound.Error()), from)
		}
		return
	}
	defer f.Close()
	t := newSender(conn, from, f, agree(r, s.mtu, s.gate.windowBytes(), f.Size(), s.retransmit))
	err = t.serve(ctx, func() { s.gate.established(slot) })
	end := Transfer{Client: from.Addr(), Name: r.name, Bytes: min(max(t.w.acked, 0)*int64(t.blksize), f.Size()), Outcome: Done}
	var peer errPeer
	switch {
	case err == nil:
	case errors.As(err, &peer) && (t.w.acked <= 0 || closes(peer.code, peer.text)):
		end.Outcome = Probed
	case errors.Is(context.Cause(ctx), errDropped):
		// Who asked may be somebody who is slow: he asks again, unless he is told an error.
		s.cfg.Log.Debug("TFTP transfer dropped", "client", from.String(), "file", r.name, "err", errDropped)
		return
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
	return &sender{conn: conn, client: client, agreement: a, file: f, size: f.Size(), segment: segmentOf(a.blksize + 4),
		w: newWindow(f.Size()/int64(a.blksize)+1, a.window, a.oack != nil, a.timeout)}
}

// begin makes the buffers: who asks from a forged address never has them made.
func (s *sender) begin() {
	s.src = bufio.NewReaderSize(s.file, readAhead)
	s.ring = make([]byte, s.window*(s.blksize+4))
	s.batch, s.out = ipv4.NewPacketConn(s.conn), make([]ipv4.Message, s.window)
	to := net.UDPAddrFromAddrPort(s.client)
	for i := range s.out {
		s.out[i] = ipv4.Message{Addr: to, Buffers: make([][]byte, 1)}
	}
}

const (
	readAhead   = 16 << 10
	maxSegments = 64    // in one call, of the older kernels
	maxRun      = 65000 // bytes in one call
)

// segmentOf is the control message by which the kernel splits what is sent into
// datagrams of n bytes, the last shorter (UDP_SEGMENT, Linux 4.18).
func segmentOf(n int) []byte {
	h := unix.Cmsghdr{Level: unix.SOL_UDP, Type: unix.UDP_SEGMENT}
	h.SetLen(unix.CmsgLen(2))
	b, err := binary.Append(make([]byte, 0, unix.CmsgSpace(2)), binary.NativeEndian, h)
	if err != nil {
		return nil
	}
	return binary.NativeEndian.AppendUint16(b, uint16(n))[:cap(b)]
}

// serve sends until all is acknowledged. established is told of the first answer.
func (s *sender) serve(ctx context.Context, established func()) error {
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
				return errPeer{number, string(buf[4:n])}
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

// write sends the blocks in as few calls as there can be.
func (s *sender) write(from, to int64) error {
	if from == 0 {
		_, _ = s.conn.WriteToUDPAddrPort(s.oack, s.client)
		return nil
	}
	if err := s.fill(to - 1); err != nil {
		return err
	}
	for s.segment != nil && to-from > 1 {
		run, n := s.run(from, to)
		if n == 1 {
			_, _ = s.conn.WriteToUDPAddrPort(run, s.client)
			from++
			continue
		}
		_, _, err := s.conn.WriteMsgUDPAddrPort(run, s.segment, s.client)
		switch {
		case err == nil:
			from += n
		case unsplit(err):
			s.segment = nil
		default:
			return nil // a full queue or a link that is down is a loss
		}
	}
	if to-from == 1 {
		_, _ = s.conn.WriteToUDPAddrPort(s.packet(from), s.client)
		return nil
	}
	for i := from; i < to; i++ {
		s.out[i-from].Buffers[0] = s.packet(i)
	}
	for left := s.out[:to-from]; len(left) > 0; {
		n, err := s.batch.WriteBatch(left, 0)
		if err != nil || n < 1 {
			return nil
		}
		left = left[n:]
	}
	return nil
}

// unsplit says that the kernel, the route or its device splits no packets.
func unsplit(err error) bool {
	return slices.ContainsFunc([]error{unix.EIO, unix.EINVAL, unix.EMSGSIZE, unix.EOPNOTSUPP, unix.ENOPROTOOPT},
		func(code error) bool { return errors.Is(err, code) })
}

// at is where the packet of block i is in the ring.
func (s *sender) at(i int64) int64 { return (i - 1) % int64(s.window) * int64(s.blksize+4) }

// packet is the packet of block i, which is in the ring.
func (s *sender) packet(i int64) []byte {
	return s.ring[s.at(i):][:4+min(int64(s.blksize), s.size-(i-1)*int64(s.blksize))]
}

// run is the packets from from on that go in one call, and how many they are.
func (s *sender) run(from, to int64) ([]byte, int64) {
	stride := int64(s.blksize + 4)
	n := min(to-from, maxSegments, max(maxRun/stride, 1), (int64(len(s.ring))-s.at(from))/stride)
	return s.ring[s.at(from):][:(n-1)*stride+int64(len(s.packet(from+n-1)))], n
}

// fill reads up to block i, which is in the window or follows what was read.
func (s *sender) fill(i int64) error {
	if s.src == nil {
		s.begin()
	}
	for ; s.read < i; s.read++ {
		p := s.packet(s.read + 1)
		if _, err := io.ReadFull(s.src, p[4:]); err != nil {
			return fmt.Errorf("read the file: %w", err)
		}
		binary.BigEndian.PutUint16(p, opData)
		// The number wraps to 0.
		binary.BigEndian.PutUint16(p[2:], uint16(s.read+1))
	}
	return nil
}
