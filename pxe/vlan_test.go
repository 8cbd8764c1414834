package pxe

import (
	"bytes"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/pxetest"
)

// addVLAN makes VLAN 7 on a port of the thread's namespace.
func addVLAN(port, name string, address netip.Prefix) error {
	on, err := netlink.LinkByName(port)
	if err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex = name, on.Attrs().Index
	link := &netlink.Vlan{LinkAttrs: attrs, VlanId: 7, VlanProtocol: netlink.VLAN_PROTOCOL_8021Q}
	if err := netlink.LinkAdd(link); err != nil {
		return err
	}
	if address.IsValid() {
		parsed, err := netlink.ParseAddr(address.String())
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(link, parsed); err != nil {
			return err
		}
	}
	return netlink.LinkSetUp(link)
}

// TestRunOnVLAN: on a VLAN of a port machines are answered by DHCP, with a frame made
// by hand too, by TFTP and by HTTP, and what comes without its tag is not.
func TestRunOnVLAN(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	content := bootFiles(t, dir)
	port := pxetest.Join(t, "box0", netip.MustParsePrefix("192.0.2.1/24"), "m0", macRAM)
	err := addVLAN("box0", "box0.7", netip.MustParsePrefix(boxAddr+"/24"))
	if errors.Is(err, unix.EOPNOTSUPP) {
		t.Skip("needs 802.1Q in the kernel")
	}
	if err != nil {
		t.Fatal(err)
	}
	port.Do(func() error { return addVLAN("m0", "m0.7", netip.Prefix{}) })
	tagged := *port
	tagged.Iface = "m0.7"
	b := start(t, "box0.7", dir, nil, ramdisk(macRAM))
	for _, kind := range []dhcpKind{asUEFI, asBIOS} {
		mustDORA(t, &tagged, kind)
	}
	if got, err := fetchTFTP(&tagged, "snponly.efi"); err != nil || !bytes.Equal(got, content[files.UEFILoader]) {
		t.Errorf("TFTP on the VLAN = %d bytes, %v, want the file", len(got), err)
	}
	mustGet(t, &tagged, "http://10.77.0.1/boot/52-54-00-00-00-0a/script.ipxe")
	for _, stage := range []string{"dhcp", "tftp", "script"} {
		b.wait(t, 10*time.Second, "Stage:"+stage+" ")
	}
	if _, err := dora(port, asUEFI); err == nil {
		t.Error("what comes without a tag is answered")
	}
}
