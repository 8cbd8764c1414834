package dhcp6

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"

	"github.com/better-compute/site-appliance/pxe/limit"
)

// captured are messages of EDK2 2022.11 (Debian's OVMF) and iPXE
// 1.0.0+git-20190125 (Debian's snponly.efi) in QEMU, in the order of one boot; the
// port is the last byte of the machine's MAC.
var captured = []struct {
	name   string
	port   byte
	hex    string
	want   string // ADDR is the machine's address
	client string
}{
	{"EDK2 itself, since the advertisement says so", 1, "01ec5e9c0001001200040403020106050807090a0b0c0d0e0f100008000200000003000c184977f6ffffffffffffffff000600020017",
		"ADVERTISE 1 na246[ADDR/3600] 23 2", "system"},
	{"and its REQUEST", 1, "03ed5e9c0001001200040403020106050807090a0b0c0d0e0f100008000200000002000a00030001beeeccbcc4d000030028184977f60000070800000b4000050018fd00007700000000525400000000060100000e1000000e10000600020017",
		"REPLY 1 na246[ADDR/3600] 23 2", "system"},
	{"EDK2 PXE", 1, "01ee5e9c0001001200040403020106050807090a0b0c0d0e0f100008000200000003000c1f62fd5effffffffffffffff00060008003b003c00170010003e0003010300003d0002000700100026000001570020505845436c69656e743a417263683a30303030373a554e44493a303033303030",
		"ADVERTISE 1 na94[ADDR/3600] 59 23 7=255 2", "pxe uefi-x64"},
	{"and its REQUEST", 1, "03ef5e9c0001001200040403020106050807090a0b0c0d0e0f100008000200000002000a00030001beeeccbcc4d0000300281f62fd5e0000070800000b4000050018fd00007700000000525400000000060100000e1000000e1000060008003b003c00170010003e0003010300003d0002000700100026000001570020505845436c69656e743a417263683a30303030373a554e44493a303033303030",
		"REPLY 1 na94[ADDR/3600] 59 23 2", "pxe uefi-x64"},
	{"EDK2 gives up its own", 1, "08f05e9c0001001200040403020106050807090a0b0c0d0e0f100002000a00030001beeeccbcc4d000080002000000030028184977f6ffffffffffffffff00050018fd00007700000000525400000000060100000e1000000e10",
		"REPLY 1 Success 2", "system"},
	{"EDK2 PXE has loaded", 1, "08f15e9c0001001200040403020106050807090a0b0c0d0e0f100002000a00030001beeeccbcc4d0000800020000000300281f62fd5effffffffffffffff00050018fd00007700000000525400000000060100000e1000000e10",
		"REPLY 1 Success 2", "system"},
	{"iPXE", 1, "015834600001001200040102030405060708090a0b0c0d0e0f100003000cad8857e700000000000000000006000800170018003b003c00100026000001570020505845436c69656e743a417263683a30303030373a554e44493a303033303130003d00020007003e000301030a000f0006000469505845000800020000",
		"ADVERTISE 1 na231[ADDR/3600] 59 23 24 7=255 2", "ipxe uefi-x64"},
	{"and its REQUEST", 1, "035834600001001200040102030405060708090a0b0c0d0e0f100002000a00030001beeeccbcc4d000030028ad8857e7000000000000000000050018fd00007700000000525400000000060100000000000000000006000800170018003b003c00100026000001570020505845436c69656e743a417263683a30303030373a554e44493a303033303130003d00020007003e000301030a000f0006000469505845000800020000",
		"REPLY 1 na231[ADDR/3600] 59 23 24 2", "ipxe uefi-x64"},
	{"EDK2 HTTP boot", 2, "0146659d0001001200040403020106050807090a0b0c0d0e0f100008000200000003000cfcbb1d41ffffffffffffffff00060008003b003c00170010003e0003010300003d000200100010002700000157002148545450436c69656e743a417263683a30303031363a554e44493a303033303030",
		"ADVERTISE 1 na65[ADDR/3600] 59 16 23 7=255 2", "http-boot uefi-x64"},
	{"and its REQUEST", 2, "0347659d0001001200040403020106050807090a0b0c0d0e0f100008000200000002000a00030001beeeccbcc4d000030028fcbb1d410000070800000b4000050018fd00007700000000525400000000060200000e1000000e1000060008003b003c00170010003e0003010300003d000200100010002700000157002148545450436c69656e743a417263683a30303031363a554e44493a303033303030",
		"REPLY 1 na65[ADDR/3600] 59 16 23 2", "http-boot uefi-x64"},
}

var capturedBox = &dhcpv6.DUIDLL{HWType: iana.HWTypeEthernet, LinkLayerAddr: net.HardwareAddr{0xbe, 0xee, 0xcc, 0xbc, 0xc4, 0xd0}}

func bytesOf(t testing.TB, text string) []byte {
	t.Helper()
	b, err := hex.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestCaptured answers what real firmware sent.
func TestCaptured(t *testing.T) {
	for _, tt := range captured {
		client := "system"
		s := testServer(t, func(c *Config) {
			c.Boot = func(a Ask) string { client = a.Client.String(); return bootURL }
			c.Known = func(string) bool { return false }
		})
		s.duid = capturedBox
		mac := [6]byte{0x52, 0x54, 0, 0, 6, tt.port}
		data := s.respond(packetIn{bytesOf(t, tt.hex), source{mac: mac, addr: netip.MustParseAddr("fe80::1"), group: true}})
		if data == nil {
			t.Errorf("%s: no answer", tt.name)
			continue
		}
		reply, err := dhcpv6.MessageFromBytes(data)
		if err != nil {
			t.Fatal(err)
		}
		if want := strings.ReplaceAll(tt.want, "ADDR", AddressOf(own, mac, 0).String()); show(reply) != want || client != tt.client {
			t.Errorf("%s: %s to %s, want %s to %s", tt.name, show(reply), client, want, tt.client)
		}
	}
}

// FuzzDHCPv6 sends anything to a server that knows the sender, and to one that
// does not.
func FuzzDHCPv6(f *testing.F) {
	for _, c := range captured {
		f.Add(bytesOf(f, c.hex), true)
	}
	for _, m := range []*dhcpv6.Message{
		with(dhcpv6.MessageTypeDecline, idLL, idBox, ia(1, addrA)), with(dhcpv6.MessageTypeConfirm, idLL, ia(1, addrA)), with(dhcpv6.MessageTypeRebind, idLL, ia(1, nextA), ia(2)),
		with(dhcpv6.MessageTypeInformationRequest, asHTTP...), with(dhcpv6.MessageTypeSolicit, idOther, &dhcpv6.OptIATA{}, &dhcpv6.OptIAPD{}, rapid),
	} {
		f.Add(m.ToBytes(), true)
		f.Add(m.ToBytes(), false)
	}
	servers := []*Server{testServer(f), testServer(f, func(c *Config) { c.Known = func(string) bool { return false } })}
	servers[1].duid = capturedBox
	f.Fuzz(func(t *testing.T, raw []byte, group bool) {
		from := fromA
		from.group = group
		for _, s := range servers {
			s.cfg.Bindings = new(Bindings)
			if !s.sort(limit.NewApart(), raw, from, t0) {
				continue
			}
			p, _ := s.in.Next(t.Context())
			data := s.respond(p)
			if data == nil {
				continue
			}
			reply, err := dhcpv6.MessageFromBytes(data)
			if err != nil || len(data) > maxReply || !bytes.Equal(data[1:4], raw[1:4]) {
				t.Fatalf("answer of %d bytes: %v, %x", len(data), err, data)
			}
			if got, want := option(data[4:], dhcpv6.OptionClientID), option(raw[4:], dhcpv6.OptionClientID); !bytes.Equal(got, want) {
				t.Errorf("client identifier %x comes back as %x", want, got)
			}
			for _, ia := range reply.Options.IANA() {
				for _, a := range ia.Options.Addresses() {
					if ip, _ := netip.AddrFromSlice(a.IPv6Addr); a.ValidLifetime > 0 && !s.owns(macA, ip) {
						t.Errorf("%s is given to another machine", ip)
					}
				}
			}
		}
	})
}

// option is the first of a code.
func option(b []byte, code dhcpv6.OptionCode) []byte {
	for len(b) >= 4 {
		n := int(binary.BigEndian.Uint16(b[2:]))
		if len(b) < 4+n {
			return nil
		}
		if dhcpv6.OptionCode(binary.BigEndian.Uint16(b)) == code {
			return b[4 : 4+n]
		}
		b = b[4+n:]
	}
	return nil
}
