package e2e

import (
	"bytes"
	"context"
	"fmt"
	"math/rand"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"github.com/klauspost/compress/zstd"

	"github.com/better-compute/site-appliance/scripts/lab"
)

// bootsAs boots the machine's namespace as one kind of firmware and then as iPXE, if it
// was told to load that, and gives where the ramdisk reports: empty where the machine
// was sent to its disk by each of DHCP and HTTP.
func (b *bench) bootsAs(class string, arch uint16) (report string) {
	b.t.Helper()
	var ack *dhcpv4.DHCPv4
	b.must(b.InNetns("mach", func() error {
		client, err := nclient4.New("eth0")
		if err != nil {
			return err
		}
		defer client.Close()
		lease, err := client.Request(b.ctx, dhcpv4.WithOption(dhcpv4.OptClassIdentifier(class)),
			dhcpv4.WithGeneric(dhcpv4.OptionClientSystemArchitectureType, []byte{byte(arch >> 8), byte(arch)}))
		if err != nil {
			return err
		}
		ack = lease.ACK
		size, _ := ack.SubnetMask().Size()
		_, err = b.Exec(b.ctx, "mach", "ip", "addr", "replace", fmt.Sprintf("%s/%d", ack.YourIPAddr, size), "dev", "eth0")
		return err
	}))
	script, err := b.get("mach", "/boot/"+strings.ReplaceAll(lab.MachineMAC, ":", "-")+"/script.ipxe")
	b.must(err)
	match := regexp.MustCompile(`http://[^/]+(/boot/\S+/boot\.img)`).FindSubmatch(script)
	if (ack.BootFileName == "") != (match == nil) {
		b.t.Fatalf("DHCP names %q, and the script is\n%s", ack.BootFileName, script)
	}
	if match == nil {
		if !bytes.Contains(script, []byte("local disk")) {
			b.t.Errorf("the script is\n%s\nwant one that leaves", script)
		}
		return ""
	}
	archive, err := b.get("mach", string(match[1]))
	b.must(err)
	told := regexp.MustCompile(`"report":"http://[^/]+(/boot/[^"]+/)"`).FindSubmatch(archive)
	if told == nil {
		b.t.Fatal("boot.img does not say where to report")
	}
	return string(told[1])
}

// post reports as the ramdisk does, and gives the status.
func (b *bench) post(path, body string) (status int) {
	b.t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		err = b.InNetns("mach", func() error {
			conn, err = new(net.Dialer).DialContext(ctx, network, address)
			return err
		})
		return conn, err
	}}}
	resp, err := client.Post("http://"+lab.SiteLAN+path, "text/plain", strings.NewReader(body))
	b.must(err)
	defer resp.Body.Close()
	return resp.StatusCode
}

// powerCut kills the box and starts it again; the gateway need not be there.
func (b *bench) powerCut() {
	b.t.Helper()
	b.Site.Kill()
	b.must(b.StartSite(b.ctx, "", lab.SiteOptions{}))
	b.boots()
}

// TestBoxAloneEndsADeploy: with the gateway killed, the box sends a machine to its disk
// for good by the bound on boots, where its ramdisk never says a word, and by the
// ramdisk's word, where that comes with the machine's own token; power cuts of the box
// change nothing, and neither does the gateway's return, which learns of the word once.
func TestBoxAloneEndsADeploy(t *testing.T) {
	b := ready(t, lab.SiteOptions{})
	b.boots()
	noise := make([]byte, 1<<20)
	rand.New(rand.NewSource(1)).Read(noise)
	enc, err := zstd.NewWriter(nil)
	b.must(err)
	path := filepath.Join(b.Dir, "image.raw.zst")
	b.must(os.WriteFile(path, enc.EncodeAll(noise, nil), 0o644))
	b.cli("artifact", "import", path, "--name", lab.ImageName)
	b.must(b.PlugMachine())

	kinds := []struct {
		class string
		arch  uint16
	}{{"PXEClient:Arch:00007:UNDI:003016", 7}, {"PXEClient:Arch:00000:UNDI:002001", 0}, {"PXEClient:Arch:00009:UNDI:003016", 9}}
	boot := func() string { t.Helper(); return b.bootsAs(kinds[0].class, kinds[0].arch) }
	// offline has a new window in force, and then no gateway.
	offline := func() (id string) {
		t.Helper()
		id = b.cli("metal", "deploy", lab.MachineName, "--image", lab.ImageName, "--disk-serial", lab.DiskSerial, "--hostname", "node-1")
		b.workflow(id, "waiting for the machine's ramdisk")
		b.Gateway.Kill()
		return id
	}
	disk := func(when string) {
		t.Helper()
		for range 2 {
			for _, k := range kinds {
				if report := b.bootsAs(k.class, k.arch); report != "" {
					t.Fatalf("%s, %s boots the ramdisk again", when, k.class)
				}
			}
		}
	}
	back := func(id, why string) {
		t.Helper()
		b.must(b.Serve(b.ctx))
		b.must(b.Site.WaitFor(b.ctx, "session is up"))
		b.must(b.WaitSiteOnline(b.ctx))
		disk("after the gateway's return")
		if out := b.cli("pxe", "explain", lab.MachineMAC); !strings.Contains(out, why) || !strings.Contains(out, "attempt 1") {
			t.Errorf("pxe explain = %s\nwant attempts, and %q", out, why)
		}
		b.cli("workflow", "cancel", id)
		b.workflow(id, "cancelled")
		disk("after the workflow's end")
	}

	// A ramdisk that never says a word.
	id := offline()
	const most = 8
	for n := range most {
		if boot() == "" {
			t.Fatalf("boot %d of %d goes to the disk", n+1, most)
		}
		if n == most/2 {
			b.powerCut()
		}
	}
	disk("after as many boots as are allowed")
	b.powerCut()
	disk("after a power cut of the box")
	back(id, fmt.Sprintf("it has booted %d times in the boot window", most))

	// One that says that it is done.
	id = offline()
	report := boot()
	if report == "" {
		t.Fatal("a new window goes to the disk")
	}
	wrong := regexp.MustCompile(`/[^/]+/$`).ReplaceAllString(report, "/"+strings.Repeat("a", 32)+"/")
	for _, tt := range []struct {
		path string
		want int
	}{{report + "progress", http.StatusNoContent}, {wrong + "done", http.StatusForbidden}} {
		if got := b.post(tt.path, "x"); got != tt.want {
			t.Errorf("POST %s = %d, want %d", tt.path, got, tt.want)
		}
		if boot() == "" {
			t.Errorf("after POST %s the machine goes to its disk", tt.path)
		}
	}
	if got := b.post(report+"done", "image written to vda"); got != http.StatusNoContent {
		t.Errorf("POST done = %d, want %d", got, http.StatusNoContent)
	}
	b.powerCut()
	disk("after the ramdisk's word")
	back(id, " was for is done")
	events := func() string { return b.cli("events", "--site", lab.SiteName, "--limit", "1000") }
	b.must(lab.Poll(b.ctx, "wait for the gateway to learn of it", func() (bool, error) {
		return strings.Contains(events(), "image written to vda"), nil
	}))
	if n := strings.Count(events(), `"stage":"done"`); n != 1 {
		t.Errorf("the gateway learnt %d times that the machine is done, want once", n)
	}
	if got, want := strings.Count(strings.Join(b.IPMI.Log(), "\n"), "bootdev pxe"), 2; got != want {
		t.Errorf("the BMC was told %d times to boot from the network, want once for each of %d deployments: %q", got, want, b.IPMI.Log())
	}
}
