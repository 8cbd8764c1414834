package e2e

import (
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/plugins/host"
	"github.com/better-compute/site-appliance/scripts/lab"
)

// reach dials from the site's namespace by a socket of the uid's.
func (b *bench) reach(uid int, address string) error {
	return b.InNetns("site", func() error {
		// A socket belongs to the file system uid of the thread that opens it.
		_, _, _ = unix.RawSyscall(unix.SYS_SETFSUID, uintptr(uid), 0, 0)
		defer unix.RawSyscall(unix.SYS_SETFSUID, 0, 0, 0)
		c, err := net.DialTimeout("tcp", address, 2*time.Second)
		if err == nil {
			err = c.Close()
		}
		return err
	})
}

// While no call runs a plugin reaches nothing; its call reaches its BMC.
func TestPluginsAreHeldBack(t *testing.T) {
	b := ready(t, lab.SiteOptions{})
	b.boots()
	first, last, err := host.UIDs("")
	b.must(err)
	for name, address := range map[string]string{
		"the gateway": lab.GatewayAddr + ":7443", "a BMC": lab.BMCAddr + ":443", "the box itself": lab.SiteLAN + ":80",
	} {
		if err := b.reach(0, address); err != nil {
			t.Errorf("the agent to %s: %v", name, err)
		}
		for _, uid := range []int{first, last} {
			if err := b.reach(uid, address); err == nil {
				t.Errorf("plugin uid %d reaches %s while no call runs", uid, name)
			}
		}
		if err := b.reach(last+1, address); err != nil {
			t.Errorf("a uid that is no plugin's, to %s: %v", name, err)
		}
	}
	if got := b.cli("metal", "power", lab.MachineName); got != "off" {
		t.Errorf("power by the plugin = %q, want off", got)
	}
}
