// Package tftptest is a TFTP client with windows, and a forwarder that loses packets, for tests and measurements.
package tftptest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Request packs a packet of strings: a read request is op 1.
func Request(op byte, parts ...string) []byte {
	return append([]byte{0, op}, strings.Join(parts, "\x00")+"\x00"...)
}

// Fetch reads name as firmware does: it acknowledges each window, and the last
// block in order where one is missing. window 0 asks for no windowsize.
func Fetch(server netip.AddrPort, name string, blksize, window int, to io.Writer) (int64, error) {
	conn, err := net.ListenUDP("udp4", &net.UDPAddr{})
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	_ = conn.SetReadBuffer(1 << 20)
	return FetchOn(conn, server, name, blksize, window, to)
}

// FetchOn is Fetch from a socket of the caller's.
func FetchOn(conn *net.UDPConn, server netip.AddrPort, name string, blksize, window int, to io.Writer) (int64, error) {
	options := []string{name, "octet", "blksize", strconv.Itoa(blksize)}
	if window > 0 {
		options = append(options, "windowsize", strconv.Itoa(window))
	}
	packet, peer := Request(1, options...), server
	size, ackEvery := 512, int64(1)
	var block, bytes int64
	unacked, gaps := int64(0), false
	buf := make([]byte, 65536)
	tries := 0
	for {
		if packet != nil {
			if _, err := conn.WriteToUDPAddrPort(packet, peer); err != nil {
				return bytes, err
			}
			packet = nil
			_ = conn.SetReadDeadline(time.Now().Add(time.Second))
		}
		n, from, err := conn.ReadFromUDPAddrPort(buf)
		if err != nil {
			if tries++; tries > 10 {
				return bytes, fmt.Errorf("after block %d: %w", block, err)
			}
			if peer == server {
				packet = Request(1, options...)
			} else {
				packet, unacked, gaps = ack(block), 0, false
			}
			continue
		}
		if peer == server {
			peer = from
		}
		if from != peer || n < 4 {
			continue
		}
		switch number := binary.BigEndian.Uint16(buf[2:]); binary.BigEndian.Uint16(buf) {
		case 5:
			return bytes, fmt.Errorf("server's error %d: %s", number, strings.TrimRight(string(buf[4:n]), "\x00"))
		case 6:
			if block > 0 {
				continue
			}
			parts := strings.Split(string(buf[2:n-1]), "\x00")
			for i := 0; i+1 < len(parts); i += 2 {
				v, err := strconv.Atoi(parts[i+1])
				switch {
				case err != nil:
					return bytes, errors.New("an option that is no number")
				case parts[i] == "blksize":
					size = v
				case parts[i] == "windowsize":
					ackEvery = int64(v)
				}
			}
			packet = ack(0)
		case 3:
			if number != uint16(block+1) {
				if !gaps {
					packet, unacked, gaps = ack(block), 0, true
				}
				continue
			}
			block, gaps, tries = block+1, false, 0
			if _, err := to.Write(buf[4:n]); err != nil {
				return bytes, err
			}
			bytes += int64(n - 4)
			unacked++
			if n-4 < size {
				_, err := conn.WriteToUDPAddrPort(ack(block), peer)
				return bytes, err
			}
			if unacked == ackEvery {
				packet, unacked = ack(block), 0
			}
		}
	}
}

func ack(block int64) []byte {
	return binary.BigEndian.AppendUint16([]byte{0, 4}, uint16(block))
}

// Forwarder stands before a server; each client has its way through, and each
// of the server's TIDs a port of its own.
type Forwarder struct {
	Addr   netip.AddrPort
	own    net.IP
	server netip.AddrPort
	delay  time.Duration
	// fate says how often a packet arrives and how much later.
	fate func() []time.Duration
	mu   sync.Mutex
	open []*net.UDPConn
	wg   sync.WaitGroup
	shut bool
}

// Forward opens a forwarder, on the address that faces the server, that keeps each packet for delay,
// in order, and each copy of it as much longer as fate says, out of order. fate
// is asked once for each packet, by one goroutine at a time; nil: one copy.
func Forward(server netip.AddrPort, delay time.Duration, fate func() []time.Duration) (*Forwarder, error) {
	if fate == nil {
		fate = func() []time.Duration { return []time.Duration{0} }
	}
	facing, err := net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(server))
	if err != nil {
		return nil, err
	}
	defer facing.Close()
	f := &Forwarder{own: facing.LocalAddr().(*net.UDPAddr).IP, server: server, delay: delay, fate: fate}
	conn, err := f.listen()
	if err != nil {
		return nil, err
	}
	f.Addr = conn.LocalAddr().(*net.UDPAddr).AddrPort()
	f.wg.Go(func() {
		ways := map[netip.AddrPort]*net.UDPConn{}
		f.pump(conn, func(from netip.AddrPort, p []byte) (*net.UDPConn, netip.AddrPort) {
			if ways[from] == nil {
				way, err := f.listen()
				if err != nil {
					return nil, netip.AddrPort{}
				}
				ways[from] = way
				f.wg.Go(func() { f.back(way, from) })
			}
			return ways[from], f.server
		})
	})
	return f, nil
}

// back forwards the server's packets to client, and the client's to the TID.
func (f *Forwarder) back(way *net.UDPConn, client netip.AddrPort) {
	faces := map[netip.AddrPort]*net.UDPConn{}
	f.pump(way, func(tid netip.AddrPort, p []byte) (*net.UDPConn, netip.AddrPort) {
		if faces[tid] == nil {
			face, err := f.listen()
			if err != nil {
				return nil, netip.AddrPort{}
			}
			faces[tid] = face
			f.wg.Go(func() {
				f.pump(face, func(netip.AddrPort, []byte) (*net.UDPConn, netip.AddrPort) { return way, tid })
			})
		}
		return faces[tid], client
	})
}

type parcel struct {
	at  time.Time
	out *net.UDPConn
	to  netip.AddrPort
	p   []byte
}

func (f *Forwarder) pump(conn *net.UDPConn, route func(netip.AddrPort, []byte) (*net.UDPConn, netip.AddrPort)) {
	queue := make(chan parcel, 1024)
	defer close(queue)
	f.wg.Go(func() {
		for q := range queue {
			time.Sleep(time.Until(q.at))
			_, _ = q.out.WriteToUDPAddrPort(q.p, q.to)
		}
	})
	buf := make([]byte, 65536)
	for {
		n, from, err := conn.ReadFromUDPAddrPort(buf)
		if err != nil {
			return
		}
		out, to := route(from, buf[:n])
		if out == nil {
			continue
		}
		f.mu.Lock()
		times := f.fate()
		f.mu.Unlock()
		for _, d := range times {
			p := append([]byte(nil), buf[:n]...)
			if d == 0 {
				queue <- parcel{time.Now().Add(f.delay), out, to, p}
				continue
			}
			time.AfterFunc(f.delay+d, func() { _, _ = out.WriteToUDPAddrPort(p, to) })
		}
	}
}

func (f *Forwarder) listen() (*net.UDPConn, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.shut {
		return nil, net.ErrClosed
	}
	conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: f.own})
	if err == nil {
		_ = conn.SetReadBuffer(1 << 20)
		f.open = append(f.open, conn)
	}
	return conn, err
}

// Close ends the forwarder and waits for its goroutines.
func (f *Forwarder) Close() {
	f.mu.Lock()
	f.shut = true
	for _, c := range f.open {
		_ = c.Close()
	}
	f.mu.Unlock()
	f.wg.Wait()
}
