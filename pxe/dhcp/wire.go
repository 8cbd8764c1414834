package dhcp

import (
	"github.com/insomniacslk/dhcp/dhcpv4"
)

const (
	// bootpHeader is everything before the options, the magic cookie included.
	bootpHeader = 240
	// bootpLeast is the least that relays and old ROMs take for a message (RFC 951).
	bootpLeast = 300
	// ipUDP is what option 57 counts beside the message (RFC 2132, 9.10).
	ipUDP = 28
	// leastSize is what every client must take (RFC 2131, 2), and mostSize what a
	// frame carries: EDK2 claims 65280.
	leastSize, mostSize = 576, 1500
)

// order is what goes into a reply first. What does not fit in the end is left out.
var order = []uint8{
	53, 54, // what this is, and whose
	51, 1, // the address
	60, 43, 97, 67, optionIPXE, // what boots
	3, 61, 58, 59, 6, 121, 26, 12, 119, 42, 28,
}

// room is how long a reply to req may be, without the headers of IP and UDP.
func room(req *dhcpv4.DHCPv4) int {
	size, err := req.MaxMessageSize()
	if err != nil {
		size = leastSize
	}
	return min(max(int(size), leastSize), mostSize) - ipUDP
}

// encode writes a reply of at most the given length. Option 82, which the relay
// needs back as it was, stands last (RFC 3046, 2.2) and always.
func encode(d *dhcpv4.DHCPv4, most int) []byte {
	bare := *d
	bare.Options = nil
	b := append(make([]byte, 0, mostSize), bare.ToBytes()[:bootpHeader]...)
	relay, relayed := d.Options[relayOption]
	most--
	if relayed {
		most = max(most-encodedLen(relay), len(b))
	}
	for _, code := range order {
		if v, ok := d.Options[code]; ok && len(b)+encodedLen(v) <= most {
			b = appendOption(b, code, v)
		}
	}
	if relayed {
		b = appendOption(b, relayOption, relay)
	}
	b = append(b, dhcpv4.OptionEnd.Code())
	for len(b) < bootpLeast {
		b = append(b, 0)
	}
	return b
}

// encodedLen counts the headers of each part of at most 255 bytes (RFC 3396).
func encodedLen(v []byte) int { return len(v) + 2*max(1, (len(v)+254)/255) }

func appendOption(b []byte, code uint8, v []byte) []byte {
	for {
		n := min(len(v), 255)
		b = append(append(b, code, byte(n)), v[:n]...)
		if v = v[n:]; len(v) == 0 {
			return b
		}
	}
}
