// Package wol is the driver "wol": it wakes a machine without a BMC by magic
// packets on the site's LANs. It can switch on, and nothing else.
package wol

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"regexp"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// ID is the driver's id.
const ID = "wol"

const (
	// packets and gap: a datagram can be lost, and a switch port that sleeps with
	// the machine takes a moment to wake.
	packets = 5
	gap     = time.Second
)

// Options are what a site lends the driver.
type Options struct {
	// Broadcast sends one datagram to port 9 of the LAN's broadcast address, from
	// a socket that this LAN alone reaches. lan is what an address says behind its
	// @; empty: every LAN. A LAN that the site does not have is invalid-address.
	Broadcast func(ctx context.Context, lan string, packet []byte) error
}

// New makes the driver.
func New(o Options) (*driver.Definition, error) {
	return driver.Define(driver.Spec[machine]{
		ID: ID, Version: "1.0.0", RunsOn: "site",
		Schema: json.RawMessage(schema),
		Parse: func(raw json.RawMessage) (machine, error) {
			m, err := parseConfig(raw)
			m.broadcast = o.Broadcast
			return m, err
		},
		// A packet to a machine that runs does nothing.
		RetrySafe: []string{"power.getPower", "power.setPower"},
	}, driver.Implement(metal.PowerKind(), func(m machine, _ *driver.Context) (metal.Power, error) { return m, nil }))
}

const schema = `{
  "$schema": "https://json-schema.org/draft/2020-12/schema",
  "type": "object",
  "required": ["address"],
  "additionalProperties": false,
  "properties": {
    "address": {"type": "string", "minLength": 1, "maxLength": 64,
      "description": "MAC of the port that wakes the machine; @ and the name of a LAN's interface, or an IPv4 address in that LAN, keeps the packet to it."},
    "credentials": {"type": "string", "writeOnly": true, "x-bc": {"kind": "secret"}},
    "tlsSpkiSha256": {"type": "string", "maxLength": 0}
  }
}`

type machine struct {
	mac       net.HardwareAddr
	lan       string
	broadcast func(ctx context.Context, lan string, packet []byte) error
}

// form is what the configuration is.
var form = metal.TargetForm{Unpinned: "a magic packet has no TLS, so the key pin cannot be checked: remove the pin"}

func parseConfig(raw json.RawMessage) (machine, error) {
	t, err := form.Parse(raw)
	if err != nil {
		return machine{}, err
	}
	mac, lan, err := split(t.Address)
	return machine{mac: mac, lan: lan}, err
}

// lanForm is an interface's name or an IPv4 address.
var lanForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,14}$`)

// split takes MAC[@LAN] apart.
func split(address string) (mac net.HardwareAddr, lan string, err error) {
	text, lan, named := strings.Cut(address, "@")
	mac, perr := net.ParseMAC(text)
	switch {
	case perr != nil || len(mac) != 6:
		return nil, "", errs.New(errs.InvalidAddress, "address %.80q: want a MAC of six bytes, alone or with @ and a LAN", address)
	case mac[0]&1 != 0 || bytes.Equal(mac, make([]byte, 6)):
		return nil, "", errs.New(errs.InvalidAddress, "address %.80q: this MAC is no single port's", address)
	case named && !lanForm.MatchString(lan):
		return nil, "", errs.New(errs.InvalidAddress, "address %.80q: behind the @ stands neither an interface nor an IPv4 address", address)
	}
	return mac, lan, nil
}

// Normalise is the one spelling of an address, MAC[@LAN]; the MAC alone names
// the machine. Errors have code invalid-address.
func Normalise(address string) (string, error) {
	mac, lan, err := split(address)
	if err != nil {
		return "", err
	}
	if lan != "" {
		return mac.String() + "@" + lan, nil
	}
	return mac.String(), nil
}

// GetPower cannot know: nothing answers a magic packet.
func (m machine) GetPower(*driver.Context) (metal.PowerState, error) { return metal.PowerUnknown, nil }

// SetPower sends the packets. That they left is all that can be said of them.
func (m machine) SetPower(ctx *driver.Context, action metal.PowerAction) error {
	if action != metal.ActionOn {
		return errs.New(errs.UnsupportedOperation, "a magic packet switches on only, not %s", action)
	}
	packet := magic(m.mac)
	for n := range uint64(packets) {
		if n > 0 {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(gap):
			}
		}
		if err := m.broadcast(ctx, m.lan, packet); err != nil {
			return err
		}
		ctx.Emit(driver.Progress{Phase: "waking", Message: "magic packets sent", Done: n + 1, Total: packets})
	}
	return nil
}

// magic is six bytes FFh and the MAC sixteen times.
func magic(mac net.HardwareAddr) []byte {
	return append(bytes.Repeat([]byte{0xff}, 6), bytes.Repeat(mac, 16)...)
}
