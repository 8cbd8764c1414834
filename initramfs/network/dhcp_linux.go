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
	// checks is how often a server is asked soon after the link came back: what
	// came back has no address, and may be on another network.
	checks := 0
	var gone time.Time // when the link was missed; zero while it is there
	rest := func(wait time.Duration) error {
		back, err := d.rest(ctx, iface, wait, &gone)
		if err == nil && back {
			checks = 5
			err = got(lease)
		}
		return err
	}
	for {
		age := time.Since(began)
		if lease.Ends < never && age >= lease.Ends {
			return true, errors.New("the lease ended and no server renewed it")
		}
		if checks == 0 && (lease.Ends == never || age < lease.T1) {
			wait := lease.T1 - age
			if lease.Ends == never {
				wait = never
			}
			if err := rest(wait); err != nil {
				return true, err
			}
			continue
		}
		next, sent, err := d.renew(ctx, iface, raw, lease, checks > 0 || age >= lease.T2)
		var nak *nclient4.ErrNak
		switch {
		case err == nil:
			raw, lease, began, checks = next.raw, next.lease, sent, 0
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
			if checks > 0 {
				checks--
				wait = min(wait, 10*time.Second) // a switch may still be learning
			}
			if err := rest(wait); err != nil {
				return true, err
			}
		}
	}
}

// unlinked is how long a lease outlives its link: longer than a switch takes to
// start again, and shorter than another interface should be kept waiting.
const unlinked = 2 * time.Minute

// rest waits, and ends early where the link was gone and is back: back is true
// then. Its error says that the link stays away, or is ctx's.
func (d DHCP) rest(ctx context.Context, iface string, wait time.Duration, gone *time.Time) (back bool, err error) {
	const look = 500 * time.Millisecond
	began := time.Now()
	for {
		left := wait - time.Since(began)
		if left <= 0 {
			return false, nil
		}
		if !sleep(ctx, min(left, look)) {
			return false, ctx.Err()
		}
		switch there := d.Carrier(iface); {
		case there && !gone.IsZero():
			*gone = time.Time{}
			return true, nil
		case there:
		case gone.IsZero():
			*gone = time.Now()
		case time.Since(*gone) >= unlinked:
			return false, errors.New("the link is gone")
		}
	}
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
