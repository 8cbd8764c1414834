// Package fleet is machines that boot over one wire, many at a time: what EDK2, iPXE and the ramdisk send, without running any of them.
package fleet

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/bound"
	"github.com/better-compute/site-appliance/pxe/tftp/tftptest"
)

// Wire is the machines' end of a wire. All of them share its interface: each adds
// its address there while it has one.
type Wire struct {
	enter func(func() error) error
	conn  *net.UDPConn
	ether *Ether
	// perSecond is what all machines together read over HTTP; 0: as much as comes
	perSecond float64
	link      netlink.Link

	mu      sync.Mutex
	waiting map[dhcpv4.TransactionID]chan reply
	next    uint32
	ended   chan struct{}
	read    time.Time // when what was read would have come over the link
}

type reply struct {
	data []byte
	at   time.Time // when the kernel had it
}

// Want is what a machine checks of what it boots: the checksums of the files, or
// nothing where they are zero.
type Want struct {
	Loader, Kernel, Initrd uint32
}

// Sum is the checksum that Want has.
func Sum(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Result is how a boot went.
type Result struct {
	// Offers are the times from the first DISCOVER of an exchange to its OFFER, of
	// the firmware and of iPXE.
	Offers []time.Duration
	// Repeats is how many DHCP messages were sent again.
	Repeats int
	Address net.IP
	Bytes   int64
	Took    time.Duration
}

// Open opens the machines' end. enter runs what it is given in the namespace of the
// interface; nil: where it is called.
func Open(iface string, enter func(func() error) error) (*Wire, error) {
	if enter == nil {
		enter = func(f func() error) error { return f() }
	}
	w := &Wire{enter: enter, waiting: make(map[dhcpv4.TransactionID]chan reply), ended: make(chan struct{})}
	err := enter(func() (err error) {
		if w.link, err = netlink.LinkByName(iface); err != nil {
			return err
		}
		if w.ether, err = OpenEther(iface); err != nil {
			return err
		}
		if w.conn, err = bound.ListenPacket(context.Background(), iface, netip.AddrPortFrom(netip.IPv4Unspecified(), dhcpv4.ClientPort)); err != nil {
			return errors.Join(err, w.ether.Close())
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("fleet on %s: %w", iface, err)
	}
	raw, err := w.conn.SyscallConn()
	if err == nil {
		var opt error
		err = raw.Control(func(fd uintptr) {
			opt = errors.Join(unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1),
				unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20))
		})
		err = errors.Join(err, opt)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("fleet on %s: %w", iface, err), w.conn.Close(), w.ether.Close())
	}
	go w.receive()
	return w, nil
}

// Link bounds what the machines read over HTTP to what a link carries, which all of
// them share. It is called before the first boots.
func (w *Wire) Link(bytesPerSecond float64) { w.perSecond = bytesPerSecond }

// pace waits until n bytes more have come over the link.
func (w *Wire) pace(n int) {
	if w.perSecond == 0 {
		return
	}
	w.mu.Lock()
	if now := time.Now(); w.read.Before(now) {
		w.read = now
	}
	w.read = w.read.Add(time.Duration(float64(n) / w.perSecond * 1e9))
	until := w.read
	w.mu.Unlock()
	time.Sleep(time.Until(until))
}

// Close ends the wire; nobody may be booting.
func (w *Wire) Close() error {
	err := errors.Join(w.conn.Close(), w.ether.Close())
	<-w.ended
	return err
}

func (w *Wire) receive() {
	defer close(w.ended)
	buf, oob := make([]byte, 2048), make([]byte, 128)
	for {
		n, oobn, _, _, err := w.conn.ReadMsgUDPAddrPort(buf, oob)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || n < 8 {
			continue
		}
		r := reply{append([]byte(nil), buf[:n]...), stamp(oob[:oobn])}
		w.mu.Lock()
		to := w.waiting[dhcpv4.TransactionID(buf[4:8])]
		w.mu.Unlock()
		select {
		case to <- r:
		default: // for nobody, or more than anybody reads
		}
	}
}

func stamp(oob []byte) time.Time {
	all, _ := unix.ParseSocketControlMessage(oob)
	for _, m := range all {
		if m.Header.Level == unix.SOL_SOCKET && m.Header.Type == unix.SCM_TIMESTAMPNS && len(m.Data) >= 16 {
			return time.Unix(int64(binary.NativeEndian.Uint64(m.Data)), int64(binary.NativeEndian.Uint64(m.Data[8:])))
		}
	}
	return time.Now()
}

// exchange sends a message, again as often as program does, until accept takes an
// answer. It returns the way of that answer, counted from the first time of sending.
func (w *Wire) exchange(ctx context.Context, res *Result, d *dhcpv4.DHCPv4, accept func(*dhcpv4.DHCPv4) bool) (*dhcpv4.DHCPv4, time.Duration, error) {
	answers := make(chan reply, 8)
	w.mu.Lock()
	w.waiting[d.TransactionID] = answers
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		delete(w.waiting, d.TransactionID)
		w.mu.Unlock()
	}()
	data := d.ToBytes()
	began := time.Now()
	for wait := time.Second; wait <= 32*time.Second; wait *= 2 {
		if wait > time.Second {
			res.Repeats++
		}
		if err := w.ether.Broadcast(d.ClientHWAddr, data); err != nil {
			return nil, 0, err
		}
		timer := time.NewTimer(wait)
	read:
		for {
			select {
			case <-ctx.Done():
				timer.Stop()
				return nil, 0, ctx.Err()
			case <-timer.C:
				break read
			case r := <-answers:
				got, err := dhcpv4.FromBytes(r.data)
				if err == nil && got.OpCode == dhcpv4.OpcodeBootReply && bytes.Equal(got.ClientHWAddr, d.ClientHWAddr) && accept(got) {
					timer.Stop()
					return got, r.at.Sub(began.Round(0)), nil
				}
			}
		}
	}
	return nil, 0, fmt.Errorf("%s: no answer", d.MessageType())
}

// dora gets an address as a program does, and puts it on the interface.
func (w *Wire) dora(ctx context.Context, res *Result, mac net.HardwareAddr, program ...dhcpv4.Modifier) (*dhcpv4.DHCPv4, error) {
	message := func(kind dhcpv4.MessageType, mods ...dhcpv4.Modifier) (*dhcpv4.DHCPv4, error) {
		d, err := dhcpv4.New(append(append([]dhcpv4.Modifier{dhcpv4.WithMessageType(kind), dhcpv4.WithHwAddr(mac), dhcpv4.WithBroadcast(true)}, program...), mods...)...)
		if err == nil {
			// Its own counter: the machines' numbers must never meet.
			w.mu.Lock()
			w.next++
			binary.BigEndian.PutUint32(d.TransactionID[:], w.next)
			w.mu.Unlock()
		}
		return d, err
	}
	discover, err := message(dhcpv4.MessageTypeDiscover)
	if err != nil {
		return nil, err
	}
	offer, took, err := w.exchange(ctx, res, discover, func(d *dhcpv4.DHCPv4) bool { return d.MessageType() == dhcpv4.MessageTypeOffer })
	if err != nil {
		return nil, err
	}
	res.Offers = append(res.Offers, took)
	request, err := message(dhcpv4.MessageTypeRequest, dhcpv4.WithOption(dhcpv4.OptServerIdentifier(offer.ServerIdentifier())),
		dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(offer.YourIPAddr)))
	if err != nil {
		return nil, err
	}
	ack, _, err := w.exchange(ctx, res, request, func(d *dhcpv4.DHCPv4) bool {
		return d.MessageType() == dhcpv4.MessageTypeAck || d.MessageType() == dhcpv4.MessageTypeNak
	})
	if err != nil {
		return nil, err
	}
	if ack.MessageType() != dhcpv4.MessageTypeAck || !ack.YourIPAddr.Equal(offer.YourIPAddr) {
		return nil, fmt.Errorf("offered %s, and then %s of %s", offer.YourIPAddr, ack.MessageType(), ack.YourIPAddr)
	}
	return ack, nil
}

func (w *Wire) address(ip net.IP, there bool) error {
	a := &netlink.Addr{IPNet: &net.IPNet{IP: ip.To4(), Mask: net.CIDRMask(32, 32)}}
	return w.enter(func() error {
		if there {
			return netlink.AddrAdd(w.link, a)
		}
		return netlink.AddrDel(w.link, a)
	})
}

// firmware and asIPXE are what EDK2's PXE and our iPXE say of themselves.
var (
	firmware = []dhcpv4.Modifier{
		dhcpv4.WithOption(dhcpv4.OptMaxMessageSize(1472)),
		dhcpv4.WithRequestedOptions(dhcpv4.OptionSubnetMask, dhcpv4.OptionRouter, dhcpv4.OptionDomainNameServer, dhcpv4.OptionHostName,
			dhcpv4.OptionBootfileName, dhcpv4.OptionTFTPServerName, dhcpv4.OptionVendorSpecificInformation, dhcpv4.OptionClassIdentifier),
		dhcpv4.WithGeneric(dhcpv4.OptionClientMachineIdentifier, make([]byte, 17)),
		dhcpv4.WithGeneric(dhcpv4.OptionClientNetworkInterfaceIdentifier, []byte{1, 3, 0}),
		dhcpv4.WithOption(dhcpv4.OptClientArch(7)),
		dhcpv4.WithOption(dhcpv4.OptClassIdentifier("PXEClient:Arch:00007:UNDI:003000")),
	}
	asIPXE = append(firmware[:len(firmware):len(firmware)], dhcpv4.WithGeneric(dhcpv4.OptionUserClassInformation, []byte("iPXE")),
		dhcpv4.WithGeneric(dhcpv4.GenericOptionCode(175), []byte{0x13, 1, 1, 0x21, 1, 1}))
)

// Boot is one machine's whole way into the ramdisk, until that has said that it is
// done: firmware, loader by TFTP, iPXE, script, kernel, ramdisk and its own archive.
func (w *Wire) Boot(ctx context.Context, mac net.HardwareAddr, want Want) (res Result, err error) {
	began := time.Now()
	fail := func(step string, err error) (Result, error) {
		return res, fmt.Errorf("%s: %s after %s: %w", mac, step, time.Since(began).Round(time.Millisecond), err)
	}
	ack, err := w.dora(ctx, &res, mac, firmware...)
	if err != nil {
		return fail("firmware's DHCP", err)
	}
	ip := ack.YourIPAddr
	res.Address = ip
	if err := w.address(ip, true); err != nil {
		return fail("address", err)
	}
	if err := w.load(ctx, ack, want.Loader, &res); err != nil {
		return fail("loader", errors.Join(err, w.address(ip, false)))
	}
	// iPXE begins anew.
	if err := w.address(ip, false); err != nil {
		return fail("address", err)
	}
	if ack, err = w.dora(ctx, &res, mac, asIPXE...); err != nil {
		return fail("iPXE's DHCP", err)
	}
	if !ack.YourIPAddr.Equal(ip) {
		return fail("iPXE's DHCP", fmt.Errorf("the machine had %s, and now has %s", ip, ack.YourIPAddr))
	}
	if err := w.address(ip, true); err != nil {
		return fail("address", err)
	}
	defer func() { err = errors.Join(err, w.address(ip, false)) }()
	if err := w.run(ctx, ack, want, &res); err != nil {
		return fail("iPXE's script", err)
	}
	res.Took = time.Since(began)
	return res, nil
}

// load reads the loader as EDK2 does: its size first, which it breaks off, then all.
func (w *Wire) load(ctx context.Context, ack *dhcpv4.DHCPv4, want uint32, res *Result) error {
	if !strings.HasSuffix(ack.BootFileName, ".efi") || strings.Contains(ack.BootFileName, ":") {
		return fmt.Errorf("DHCP names %q", ack.BootFileName)
	}
	server, _ := netip.AddrFromSlice(ack.ServerIPAddr.To4())
	at := netip.AddrPortFrom(server, 69)
	open := func() (conn *net.UDPConn, err error) {
		err = w.enter(func() (err error) {
			conn, err = net.ListenUDP("udp4", &net.UDPAddr{IP: ack.YourIPAddr})
			return err
		})
		return conn, err
	}
	probe, err := open()
	if err != nil {
		return err
	}
	defer probe.Close()
	if err := askSize(ctx, probe, at, ack.BootFileName); err != nil {
		return fmt.Errorf("size: %w", err)
	}
	conn, err := open()
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	got := crc32.New(castagnoli)
	n, err := tftptest.FetchOn(conn, at, ack.BootFileName, 1468, 4, got)
	res.Bytes += n
	if err != nil {
		return err
	}
	return check(got, want)
}

func check(got hash.Hash32, want uint32) error {
	if want != 0 && got.Sum32() != want {
		return errors.New("other bytes than the file has")
	}
	return nil
}

func askSize(ctx context.Context, conn *net.UDPConn, at netip.AddrPort, name string) error {
	buf := make([]byte, 1500)
	for range 6 {
		if _, err := conn.WriteToUDPAddrPort(tftptest.Request(1, name, "octet", "tsize", "0", "blksize", "1468", "windowsize", "4"), at); err != nil {
			return err
		}
		_ = conn.SetReadDeadline(time.Now().Add(4 * time.Second))
		n, from, err := conn.ReadFromUDPAddrPort(buf)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, os.ErrDeadlineExceeded):
			continue
		case err != nil:
			return err
		case n < 4 || buf[1] != 6:
			return fmt.Errorf("answer %q", buf[:n])
		}
		_, err = conn.WriteToUDPAddrPort(append([]byte{0, 5, 0, 8}, "User aborted the transfer\x00"...), from)
		return err
	}
	return errors.New("no answer")
}

var (
	fetched = regexp.MustCompile(`(?m)^(kernel|initrd --name ramdisk.img|initrd --name boot.img) (http://\S+)`)
	reports = regexp.MustCompile(`http://[0-9.:]+/boot/[0-9a-f-]+/[a-z0-9]+/`)
)

// run fetches the script and what it names on one connection, as iPXE does, and
// then reports as the ramdisk does.
func (w *Wire) run(ctx context.Context, ack *dhcpv4.DHCPv4, want Want, res *Result) error {
	url := ack.BootFileName
	host, _, ok := strings.Cut(strings.TrimPrefix(url, "http://"), "/")
	if !ok || !strings.HasPrefix(url, "http://") {
		return fmt.Errorf("DHCP names %q", url)
	}
	if !strings.Contains(host, ":") {
		host += ":80"
	}
	var conn net.Conn
	err := w.enter(func() (err error) {
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: ack.YourIPAddr}, Timeout: time.Minute, Control: func(_, _ string, c syscall.RawConn) (err error) {
			// As much as iPXE's window is: the buffers of hundreds of machines are one kernel's here.
			cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 128<<10) })
			return errors.Join(cerr, err)
		}}
		conn, err = dialer.DialContext(ctx, "tcp4", host)
		return err
	})
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	c := connection{conn, bufio.NewReaderSize(conn, 64<<10), host, w.pace}
	var script, archive bytes.Buffer
	if err := c.do("GET", url, "", &script); err != nil {
		return err
	}
	files := map[string]string{}
	for _, m := range fetched.FindAllStringSubmatch(script.String(), -1) {
		files[m[1]] = m[2]
	}
	for _, f := range []struct {
		name string
		sum  uint32
	}{{"kernel", want.Kernel}, {"initrd --name ramdisk.img", want.Initrd}} {
		got := crc32.New(castagnoli)
		n := &count{w: got}
		if err := c.do("GET", files[f.name], "", n); err != nil {
			return fmt.Errorf("%s: %w", f.name, err)
		}
		res.Bytes += n.n
		if err := check(got, f.sum); err != nil {
			return fmt.Errorf("%s: %w", f.name, err)
		}
	}
	if err := c.do("GET", files["initrd --name boot.img"], "", &archive); err != nil {
		return fmt.Errorf("boot.img: %w", err)
	}
	report := reports.FindString(archive.String())
	if report == "" {
		return errors.New("boot.img says nowhere to report")
	}
	if err := c.do("POST", report+"progress", "half of it", io.Discard); err != nil {
		return fmt.Errorf("progress: %w", err)
	}
	if err := c.do("POST", report+"done", "", io.Discard); err != nil {
		return fmt.Errorf("done: %w", err)
	}
	return nil
}

type count struct {
	w io.Writer
	n int64
}

func (c *count) Write(b []byte) (int, error) {
	c.n += int64(len(b))
	return c.w.Write(b)
}

// connection is a kept connection on which one request follows the other.
type connection struct {
	net.Conn
	in   *bufio.Reader
	host string
	pace func(n int)
}

// do has a minute for each piece that comes.
func (c connection) do(method, url, body string, to io.Writer) error {
	path, ok := strings.CutPrefix(url, "http://"+strings.TrimSuffix(c.host, ":80"))
	if !ok {
		return fmt.Errorf("%q is not of %s", url, c.host)
	}
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	_, err := fmt.Fprintf(c, "%s %s HTTP/1.1\r\nHost: %s\r\nUser-Agent: iPXE/1.21.1\r\nContent-Length: %d\r\n\r\n%s", method, path, strings.TrimSuffix(c.host, ":80"), len(body), body)
	if err != nil {
		return err
	}
	resp, err := http.ReadResponse(c.in, &http.Request{Method: method})
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 300 {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 200))
		return fmt.Errorf("%s %s: %d %s", method, path, resp.StatusCode, strings.TrimSpace(string(text)))
	}
	buf := make([]byte, 64<<10)
	for {
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		n, err := resp.Body.Read(buf)
		c.pace(n)
		if _, werr := to.Write(buf[:n]); werr != nil {
			return werr
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// Neighbours tells the kernel where iface is that n addresses from first on are at
// mac. The table of those that it finds by itself is one for the whole host, and
// other namespaces may have filled it.
func Neighbours(iface string, first netip.Addr, n int, mac net.HardwareAddr) error {
	link, err := netlink.LinkByName(iface)
	if err != nil {
		return err
	}
	for ip := first; n > 0; ip, n = ip.Next(), n-1 {
		if err := netlink.NeighSet(&netlink.Neigh{LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT, IP: ip.AsSlice(), HardwareAddr: mac}); err != nil {
			return fmt.Errorf("neighbour %s: %w", ip, err)
		}
	}
	return nil
}
