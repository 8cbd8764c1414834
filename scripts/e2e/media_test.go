package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/scripts/lab"
)

// mediaCA is the CA that the site says BMCs need.
func (b *bench) mediaCA() (ca string) {
	b.t.Helper()
	b.must(lab.Poll(b.ctx, "wait for the CA", func() (bool, error) {
		out, err := b.CLI(b.ctx, nil, "site", "ca", lab.SiteName)
		ca = out
		return err == nil, nil
	}))
	return ca
}

// fetchMedia reads a URL as a BMC in a namespace would, with the site's CA alone.
func (b *bench) fetchMedia(netns, url string, roots *x509.CertPool, header ...string) (status int, got []byte, err error) {
	var conn net.Conn
	err = b.InNetns(netns, func() (err error) {
		conn, err = net.DialTimeout("tcp", lab.SiteLAN+":7444", time.Second)
		return err
	})
	if err != nil {
		return 0, nil, err
	}
	defer conn.Close()
	client := &http.Client{Timeout: time.Minute, Transport: &http.Transport{
		DialContext: func(context.Context, string, string) (net.Conn, error) { return conn, nil }, TLSClientConfig: &tls.Config{RootCAs: roots}, DisableKeepAlives: true,
	}}
	req, err := http.NewRequestWithContext(b.ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, nil, err
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	got, err = io.ReadAll(resp.Body)
	return resp.StatusCode, got, err
}

// A disc goes from the gateway through the box into the BMC's drive, over TLS that
// the BMC verifies with the site's CA; a restart of the box leaves it there, an
// eject ends it, and nobody but this BMC can have it.
func TestMediaFromTheBox(t *testing.T) {
	roots := x509.NewCertPool()
	b := begin(t, bmctest.MediaRoots(roots))
	b.must(b.StartSite(b.ctx, b.join, lab.SiteOptions{}))
	b.must(b.WaitSiteOnline(b.ctx))
	b.must(b.EnrollMachine(b.ctx))
	b.must(b.EnrollRedfish(b.ctx))
	const machine = lab.MachineName + "-redfish"

	iso := make([]byte, 3<<20)
	_, _ = rand.Read(iso)
	path := filepath.Join(b.Dir, "rescue.iso")
	b.must(os.WriteFile(path, iso, 0o600))
	b.cli("artifact", "import", path, "--name", "rescue.iso", "--format", "raw")

	// Without the CA the BMC refuses, and says why.
	b.refused([]string{"media-untrusted"}, "metal", "media", machine, "insert", "artifact://rescue.iso")
	if !roots.AppendCertsFromPEM([]byte(b.mediaCA())) {
		t.Fatal("the site's CA is no certificate")
	}
	b.refused([]string{"INVALID_INPUT", "invalid-args"}, "metal", "media", machine, "insert", "artifact://no-such")
	b.cli("metal", "media", machine, "insert", "artifact://rescue.iso")
	url := b.Redfish.Media()
	if !strings.HasPrefix(url, "https://"+lab.SiteLAN+":7444/m/") || !strings.HasSuffix(url, "/rescue.iso") {
		t.Fatalf("the drive holds %q, want the box's URL", url)
	}
	look := func(when string, want int) {
		t.Helper()
		status, got, err := b.fetchMedia("bmc", url, roots)
		if err != nil || status != want || want == http.StatusOK && !bytes.Equal(got, iso) {
			t.Errorf("%s: the BMC gets %d and %d bytes, %v, want %d", when, status, len(got), err, want)
		}
	}
	look("inserted", http.StatusOK)
	if status, got, err := b.fetchMedia("bmc", url, roots, "Range", fmt.Sprintf("bytes=%d-%d", 1<<20, 1<<20+2047)); err != nil || status != http.StatusPartialContent || !bytes.Equal(got, iso[1<<20:][:2048]) {
		t.Errorf("a range: %d, %d bytes, %v", status, len(got), err)
	}

	// Another machine on the LAN has the path, and not the address.
	b.must(b.PlugMachine())
	b.lease()
	if status, _, err := b.fetchMedia("mach", url, roots); err != nil || status != http.StatusNotFound {
		t.Errorf("another machine gets %d, %v, want 404", status, err)
	}
	_, err := b.Exec(b.ctx, "nb", "ip", "route", "add", "10.77.0.0/24", "via", lab.SiteUplink)
	b.must(err)
	b.must(b.Silent("nb", []string{lab.SiteUplink, lab.SiteLAN}, []string{"7444"}))

	b.Site.Kill()
	b.must(b.StartSite(b.ctx, "", lab.SiteOptions{}))
	b.must(b.Site.WaitFor(b.ctx, "session is up"))
	look("after a restart", http.StatusOK)
	for _, name := range []string{"media-ca.pem", "media.json"} {
		st, err := os.Stat(filepath.Join(b.Dir, "site", "state", name))
		if err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v, want mode 0600", name, st, err)
		}
	}
	b.cli("metal", "media", machine, "insert", "artifact://rescue.iso")
	old := url
	if url = b.Redfish.Media(); url == old {
		t.Error("a second insert has the first one's path")
	}
	if status, _, err := b.fetchMedia("bmc", old, roots); err != nil || status != http.StatusNotFound {
		t.Errorf("the path of before the restart: %d, %v, want 404", status, err)
	}
	look("inserted again", http.StatusOK)
	b.cli("metal", "media", machine, "eject")
	look("ejected", http.StatusNotFound)

	// Firmware goes the same way: the box pushes it, or has the BMC fetch it.
	for version, faults := range map[string][]bmctest.Fault{"2.0": nil, "2.1": {bmctest.NoFirmwarePush}} {
		b.Redfish.SetFaults(faults...)
		image := bmctest.FirmwareImage("BIOS", version)
		path, sum := filepath.Join(b.Dir, "bios-"+version+".bin"), fmt.Sprintf("%x", sha256.Sum256(image))
		b.must(os.WriteFile(path, image, 0o600))
		b.cli("artifact", "import", path, "--name", filepath.Base(path), "--format", "raw")
		b.cli("metal", "firmware", machine, "update", "--component", "BIOS", "--url", "artifact://"+filepath.Base(path), "--sha256", sum, "--version", version)
		if log := b.Redfish.Log(); !slices.Contains(log, "firmware BIOS "+version) {
			t.Errorf("the BMC's log after the update to %s is %q", version, log)
		}
	}
	b.Redfish.SetFaults()
	b.refused([]string{"the box itself"}, "metal", "firmware", machine, "update", "--component", "BIOS", "--url", "https://127.0.0.1:7444/m/x/y.bin", "--sha256", strings.Repeat("0", 64))
	b.refused([]string{"the box itself"}, "metal", "firmware", machine, "update", "--component", "BIOS", "--url", "http://"+lab.SiteLAN+"/y.bin", "--sha256", strings.Repeat("0", 64))
}
