package pxe

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"

	"github.com/better-compute/site-appliance/pxe/dhcp"
	"github.com/better-compute/site-appliance/pxe/lease"
	"github.com/better-compute/site-appliance/pxe/pxetest"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

func TestReservations(t *testing.T) {
	at := netip.MustParseAddr
	own := []lease.Reservation{{MAC: "52:54:00:00:00:01", Address: at("10.77.0.50")}}
	machine := func(name, address string, macs ...string) *pxev1.Machine {
		return &pxev1.Machine{Name: name, Address: address, Macs: macs}
	}
	pools := []netip.Prefix{netip.MustParsePrefix("10.77.0.0/24"), netip.MustParsePrefix("10.5.0.0/24")}
	for _, tt := range []struct {
		name     string
		machines []*pxev1.Machine
		want     []lease.Reservation
		wrong    string
	}{
		{"none", nil, nil, ""},
		{"no address", []*pxev1.Machine{machine("a", "", "52:54:00:00:00:02")}, nil, ""},
		{"one more, by its first port", []*pxev1.Machine{machine("a", "10.77.0.51", "52:54:00:00:00:0A", "52:54:00:00:00:0b")}, []lease.Reservation{{MAC: "52:54:00:00:00:0a", Address: at("10.77.0.51")}}, ""},
		{"behind a relay", []*pxev1.Machine{machine("a", "10.5.0.7", "52:54:00:00:00:01")}, []lease.Reservation{{MAC: "52:54:00:00:00:01", Address: at("10.5.0.7")}}, ""},
		{"another LAN's", []*pxev1.Machine{machine("a", "192.0.2.7", "52:54:00:00:00:02")}, nil, ""},
		{"the configuration's MAC", []*pxev1.Machine{machine("a", "10.77.0.51", "52:54:00:00:00:01")}, nil, ""},
		{"the configuration's address", []*pxev1.Machine{machine("a", "10.77.0.50", "52:54:00:00:00:02")}, nil, "10.77.0.50 of machine a is reserved for 52:54:00:00:00:01 already"},
		{"the box's", []*pxev1.Machine{machine("a", "10.77.0.1", "52:54:00:00:00:02")}, nil, "10.77.0.1 of machine a is the box's"},
		{"one address for two", []*pxev1.Machine{machine("a", "10.77.0.51", "52:54:00:00:00:02"), machine("b", "10.77.0.51", "52:54:00:00:00:03")},
			[]lease.Reservation{{MAC: "52:54:00:00:00:02", Address: at("10.77.0.51")}}, "of machine b is reserved for 52:54:00:00:00:02"},
	} {
		got, wrong := reservations(own, tt.machines, pools, map[netip.Addr]bool{at("10.77.0.1"): true})
		if want := append(own[:1:1], tt.want...); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v, want %v", tt.name, got, want)
		}
		if err := errors.Join(wrong...); (err != nil) != (tt.wrong != "") || err != nil && !strings.Contains(err.Error(), tt.wrong) {
			t.Errorf("%s: wrong is %v, want %q", tt.name, err, tt.wrong)
		}
	}
}

// TestRunReservations: an assigned machine has the address of its assignment, a
// new assignment another one, and a stranger has silence.
func TestRunReservations(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir)
	h := pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), "m0", macRAM)
	m := ramdisk(macRAM)
	m.Name, m.Address = "node-1", "10.77.0.50"
	b := start(t, "box0", dir, func(c *Config) { c.Mode = dhcp.Reservations; c.RangeStart, c.RangeEnd = netip.Addr{}, netip.Addr{} }, m)
	awaitAddress := func(want string) *dhcpv4.DHCPv4 {
		t.Helper()
		for range 20 {
			if l, err := dora(h, asUEFI, dhcpv4.WithRequestedOptions(dhcpv4.OptionHostName)); err == nil && l.ACK.YourIPAddr.String() == want {
				return l.ACK
			}
			time.Sleep(200 * time.Millisecond)
		}
		t.Fatalf("the machine does not get %s", want)
		return nil
	}
	if ack := awaitAddress("10.77.0.50"); ack.HostName() != "node-1" || ack.BootFileName != "snponly.efi" {
		t.Errorf("ACK = %s, want host name node-1 and snponly.efi", ack.Summary())
	}
	h.SetMAC(macStranger)
	if l, err := dora(h, asUEFI); err == nil {
		t.Errorf("a stranger gets %s", l.ACK.YourIPAddr)
	}
	if strings.Contains(b.told(), "pxe.foreign") {
		t.Errorf("told: %s", b.told())
	}
}

// TestAssignedAddresses: those of the assignments are reserved before anything is
// answered, and told of once; those of new assignments soon after.
func TestAssignedAddresses(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir)
	h := pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), "m0", macRAM)
	at := func(address string) []*pxev1.Machine {
		m, wrong := ramdisk(macRAM), ramdisk(macStranger)
		wrong.MachineId = "node_wrong"
		m.Address, wrong.Address = address, boxAddr
		return []*pxev1.Machine{m, wrong}
	}
	var logged strings.Builder
	b := start(t, "box0", dir, func(c *Config) { c.Log = slog.New(slog.NewTextHandler(&logged, nil)) }, at("10.77.0.50")...)
	if got := mustDORA(t, h, asUEFI).ACK.YourIPAddr.String(); got != "10.77.0.50" {
		t.Errorf("the machine gets %s first, want the assigned address", got)
	}
	if _, err := b.store.Apply(&pxev1.AssignRequest{Version: b.store.Version() + 1, Machines: at("10.77.0.51")}); err != nil {
		t.Fatal(err)
	}
	got := ""
	for end := time.Now().Add(30 * time.Second); got != "10.77.0.51" && time.Now().Before(end); {
		time.Sleep(100 * time.Millisecond)
		got = mustDORA(t, h, asUEFI).ACK.YourIPAddr.String()
	}
	if got != "10.77.0.51" {
		t.Errorf("the machine gets %s, want the newly assigned address", got)
	}
	if err := b.stop(); err != nil {
		t.Fatal(err)
	}
	before, after, _ := strings.Cut(logged.String(), "network boot is served")
	const wrong = "an assigned address is left out"
	if n, m := strings.Count(before, wrong), strings.Count(after, wrong); n != 1 || m != 1 {
		t.Errorf("before it serves, the log says %d times that an address is left out, and %d times then, want once for each assignment", n, m)
	}
}

// TestRunBMC: addresses and nothing else, and each BMC is told of once.
func TestRunBMC(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	h := pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), "m0", macRAM)
	b := start(t, "box0", dir, func(c *Config) { c.BMC = true }, ramdisk(macRAM))
	var ip string
	for range 3 {
		ack := mustDORA(t, h, asUEFI, dhcpv4.WithOption(dhcpv4.OptHostName("idrac-7"))).ACK
		if ip = ack.YourIPAddr.String(); ack.BootFileName != "" || !ack.ServerIPAddr.IsUnspecified() {
			t.Errorf("file %q of %s, want nothing to boot", ack.BootFileName, ack.ServerIPAddr)
		}
	}
	b.wait(t, 5*time.Second, "bmc.discovered state "+macRAM+" {MAC:"+macRAM+" Interface:box0 IP:"+ip+" Class:PXEClient:Arch:00007:UNDI:003000 Hostname:idrac-7}")
	if n := strings.Count(b.told(), "bmc.discovered"); n != 1 {
		t.Errorf("bmc.discovered %d times, want once:\n%s", n, b.told())
	}
	if _, _, err := get(h, "http://"+boxAddr+"/"); err == nil {
		t.Error("HTTP is served on a BMC network")
	}
}

// TestRunRefusesBesideAnother: beside another box none serves, and the same
// configuration does once the other is gone.
func TestRunRefusesBesideAnother(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir)
	h := pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), "m0", macRAM)
	var cfg Config
	stop := start(t, "box0", dir, func(c *Config) { cfg = *c }, ramdisk(macRAM)).stop
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	cfg.Takeover = false

	at := netip.MustParseAddr
	h.SetAddress(netip.MustParsePrefix("10.77.0.2/24"), netip.Addr{})
	pool := lease.Pool{Name: "lan", Subnet: netip.MustParsePrefix("10.77.0.0/24"), First: at("10.77.0.20"), Last: at("10.77.0.29")}
	db, err := lease.OpenDatabase(lease.Config{Path: filepath.Join(t.TempDir(), "leases"), Pools: []lease.Pool{pool}, Log: cfg.Log})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var other *dhcp.Server
	h.Do(func() (err error) {
		other, err = dhcp.Listen(t.Context(), dhcp.Config{Interface: "m0", Takeover: true, Leases: db, Now: time.Now, Log: cfg.Log,
			Local: dhcp.Subnet{Pool: "lan", Network: pool.Subnet, Server: at("10.77.0.2")}})
		return err
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- other.Serve(ctx) }()
	err = Run(t.Context(), cfg)
	if foreign := new(dhcp.ForeignError); !errors.As(err, &foreign) || foreign.Foreign.Server != at("10.77.0.2") {
		t.Errorf("Run beside another box = %v, want a *dhcp.ForeignError that names 10.77.0.2", err)
	}
	cancel()
	<-done
	other.Close()

	ctx, cancel = context.WithCancel(t.Context())
	go func() { done <- Run(ctx, cfg) }()
	var got string
	for range 20 {
		if l, err := dora(h, asUEFI); err == nil {
			got = l.ACK.ServerIdentifier().String()
			break
		}
	}
	if got != boxAddr {
		t.Errorf("after the other box has gone %q answers, want %s", got, boxAddr)
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run = %v, want nil", err)
	}
}

// TestConflictsAreTold: an address of the pool that answers without a lease, and
// one that its machine declines, are events.
func TestConflictsAreTold(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir)
	h := pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), "m0", macRAM)
	b := start(t, "box0", dir, nil)

	const squatted = "10.77.0.150"
	h.SetAddress(netip.MustParsePrefix(squatted+"/24"), netip.Addr{})
	own, err := net.ParseMAC(macRAM)
	if err != nil {
		t.Fatal(err)
	}
	other, err := net.ParseMAC(macDisk)
	if err != nil {
		t.Fatal(err)
	}
	h.Do(func() error {
		c, err := nclient4.New(h.Iface, nclient4.WithHWAddr(other), nclient4.WithTimeout(time.Second), nclient4.WithRetry(5))
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.DiscoverOffer(t.Context(), dhcpv4.WithBroadcast(true), dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(net.ParseIP(squatted))))
		return err
	})
	b.wait(t, 20*time.Second, "pxe.conflict state box0 "+squatted+" {Interface:box0 IP:"+squatted+" MAC:"+macRAM+" DeclinedBy: Outcome:withheld}")

	ack := mustDORA(t, h, asUEFI).ACK
	had := ack.YourIPAddr.String()
	h.Do(func() error {
		m, err := dhcpv4.New(dhcpv4.WithHwAddr(own), dhcpv4.WithMessageType(dhcpv4.MessageTypeDecline),
			dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(ack.YourIPAddr)), dhcpv4.WithOption(dhcpv4.OptServerIdentifier(ack.ServerIdentifier())))
		if err != nil {
			return err
		}
		c, err := net.Dial("udp4", boxAddr+":67")
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write(m.ToBytes())
		return err
	})
	b.wait(t, 20*time.Second, "pxe.conflict state box0 "+had+" {Interface:box0 IP:"+had+" MAC: DeclinedBy:"+macRAM+" Outcome:withheld}")
	if again := mustDORA(t, h, asUEFI).ACK.YourIPAddr.String(); again == had {
		t.Errorf("after declining %s the machine got it again", had)
	}
}
