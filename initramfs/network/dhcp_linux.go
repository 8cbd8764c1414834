package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"

	"github.com/better-compute/site-appliance/appliance/base/backoff"
)

// DHCP is a Client (RFC 2131) on raw sockets: it needs no address to begin with.
type DHCP struct {
	// Say reports what a person may have to act on.
	Say func(format string, args ...any)
	// Carrier reports whether an interface has a link; asking waits for it.
	Carrier func(name string) bool
	// Retry spaces attempts to get a lease.
	Retry backoff.Policy
}

// perTry bounds one exchange.
const perTry = 4 * time.Second

// Hold implements Client.
func (d DHCP) Hold(ctx context.Context, iface string, got func(Lease) error, lost func()) {
	told := ""
	say := func(text string) {
		if text != told {
			told = text
			d.Say("%s: %s", iface, text)
		}
	}
	for n := 0; ctx.Err() == nil; {
		if !d.Carrier(iface) {
			say("no link")
			sleep(ctx, 500*time.Millisecond)
			continue
		}
		held, err := d.once(ctx, iface, got, lost)
		if ctx.Err() != nil {
			return
		}
		if held {
			n = 0
		}
		if err != nil {
			say(err.Error())
		}
		if d.Retry.Wait(ctx, n, nil) != nil {
			return
		}
		n++
	}
}

// once gets a lease and keeps it until it ends.
func (d DHCP) once(ctx context.Context, iface string, got func(Lease) error, lost func()) (held bool, err error) {
	client, err := nclient4.New(iface, nclient4.WithTimeout(perTry), nclient4.WithRetry(1))
	if err != nil {
		return false, fmt.Errorf("open socket for DHCP: %w", err)
	}
	raw, err := client.Request(ctx)
	client.Close()
	if err != nil {
		return false, fmt.Errorf("no DHCP answer: %w", err)
	}
	began := time.Now()
	lease, err := ParseAck(raw.ACK)
	if err != nil {
		return false, err
	}
	if err := got(lease); err != nil {
		return false, err
	}
	defer func() {
		if ctx.Err() == nil {
			lost()
		}
	}()
	for lease.Ends < never {
		age := time.Since(began)
		switch {
		case age >= lease.Ends:
			return true, errors.New("the lease ended and no server renewed it")
		case age < lease.T1:
			if !sleep(ctx, lease.T1-age) {
				return true, nil
			}
			continue
		}
		next, sent, err := d.renew(ctx, iface, raw, lease, age >= lease.T2)
		var nak *nclient4.ErrNak
		switch {
		case err == nil:
			raw, lease, began = next.raw, next.lease, sent
			if err := got(lease); err != nil {
				return true, err
			}
		case errors.As(err, &nak):
			return true, errors.New("the server took the lease back")
		default:
			// RFC 2131: half of what is left, but at least a minute, or the end.
			edge := lease.T2
			if age >= lease.T2 {
				edge = lease.Ends
			}
			wait := min(max((edge-age)/2, min(time.Minute, lease.Ends/16)), max(lease.Ends-age, time.Second))
			if !sleep(ctx, wait) {
				return true, nil
			}
		}
	}
	<-ctx.Done()
	return true, nil
}

type renewed struct {
	raw   *nclient4.Lease
	lease Lease
}

// renew asks the lease's server, or, from T2 on, every server.
func (d DHCP) renew(ctx context.Context, iface string, old *nclient4.Lease, lease Lease, rebind bool) (renewed, time.Time, error) {
	opts := []nclient4.ClientOpt{nclient4.WithTimeout(perTry), nclient4.WithRetry(1)}
	if !rebind && lease.Server.IsValid() {
		// from our address, to the server alone
		opts = append(opts, nclient4.WithUnicast(&net.UDPAddr{IP: lease.Address.Addr().AsSlice(), Port: nclient4.ClientPort}),
			nclient4.WithServerAddr(&net.UDPAddr{IP: lease.Server.AsSlice(), Port: nclient4.ServerPort}))
	}
	client, err := nclient4.New(iface, opts...)
	if err != nil {
		return renewed{}, time.Time{}, fmt.Errorf("open socket for DHCP: %w", err)
	}
	defer client.Close()
	sent := time.Now()
	if rebind {
		req, err := dhcpv4.NewRenewFromAck(old.ACK, dhcpv4.WithBroadcast(true))
		if err != nil {
			return renewed{}, sent, fmt.Errorf("make DHCP request: %w", err)
		}
		ack, err := client.SendAndRead(ctx, client.RemoteAddr(), req, nclient4.IsMessageType(dhcpv4.MessageTypeAck, dhcpv4.MessageTypeNak))
		if err != nil {
			return renewed{}, sent, fmt.Errorf("no DHCP answer: %w", err)
		}
		if ack.MessageType() == dhcpv4.MessageTypeNak {
			return renewed{}, sent, &nclient4.ErrNak{Offer: old.Offer, Nak: ack}
		}
		return parsed(&nclient4.Lease{Offer: old.Offer, ACK: ack, CreationTime: sent}, sent)
	}
	next, err := client.Renew(ctx, old)
	if err != nil {
		return renewed{}, sent, fmt.Errorf("renew lease: %w", err)
	}
	return parsed(next, sent)
}

func parsed(raw *nclient4.Lease, sent time.Time) (renewed, time.Time, error) {
	lease, err := ParseAck(raw.ACK)
	return renewed{raw, lease}, sent, err
}
