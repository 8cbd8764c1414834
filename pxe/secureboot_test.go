package pxe

import (
	"bytes"
	"context"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/binary"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/better-compute/site-appliance/image/authenticode"
	"github.com/better-compute/site-appliance/image/authenticode/signtest"
	"github.com/better-compute/site-appliance/image/qemutest"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/httpboot"
	"github.com/better-compute/site-appliance/pxe/newc"
	"github.com/better-compute/site-appliance/pxe/pxetest"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

const (
	// What Debian's packages shim-signed and grub-efi-amd64-signed bring.
	shimFile    = "/usr/lib/shim/shimx64.efi.signed"
	netGRUBFile = "/usr/lib/grub/x86_64-efi-signed/grubnetx64.efi.signed"
	// denied is what EDK2 says of a program that it does not start.
	denied = "Access Denied"
)

// missing is the first of files that is not there; empty: none.
func missing(names ...string) string {
	for _, name := range names {
		if _, err := os.Stat(name); err != nil {
			return name
		}
	}
	return ""
}

// noV6 saves a minute of waiting for nobody, and noPXE another one.
var (
	noV6  = []string{"-fw_cfg", "name=opt/org.tianocore/IPv6PXESupport,string=n"}
	noPXE = append([]string{"-fw_cfg", "name=opt/org.tianocore/IPv4PXESupport,string=n"}, noV6...)
)

// TestQEMUSecureBootRefuses: firmware with Secure Boot on and the keys of PCs loads
// the unsigned iPXE from the box and does not start it. The same file starts where
// Secure Boot is off, which TestQEMUFirmware shows.
func TestQEMUSecureBootRefuses(t *testing.T) {
	qemutest.Need(t, true)
	if name := missing(snponlyFile, "/dev/net/tun"); name != "" {
		t.Skipf("needs QEMU: %s is not there", name)
	}
	if !pxetest.InNamespace(t) {
		return
	}
	const mac = "52:54:00:00:01:11"
	dir := t.TempDir()
	bootFiles(t, dir)
	copyFile(t, snponlyFile, filepath.Join(dir, "netboot", files.UEFILoader))
	pxetest.Bridge(t, "br0", netip.MustParsePrefix(boxAddr+"/24"), "tap0")
	b := start(t, "br0", dir, nil, ramdisk(mac))
	vm := runQEMU(t, qemutest.Config{UEFI: true, SecureBoot: "microsoft", Extra: noV6}, qemutest.NIC{MAC: mac, ROM: "none"})
	b.wait(t, 5*quiet, "pxe.stage telemetry "+mac+" {MAC:"+mac+" MachineID:node_a Stage:tftp ")
	if err := vm.WaitMarker(t.Context(), denied, quiet); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(b.told(), "Stage:script") {
		t.Errorf("an unsigned boot program has run:\n%s", b.told())
	}
}

// TestQEMUSecureBootOwnKey: firmware whose db has a key of the user's starts what is
// signed under it, from the box by HTTP, and not the same bytes without the
// signature: that is how a unified kernel image is protected as a whole.
func TestQEMUSecureBootOwnKey(t *testing.T) {
	qemutest.Need(t, true)
	const keyFile, certFile = "/usr/share/ovmf/PkKek-1-snakeoil.key", "/usr/share/ovmf/PkKek-1-snakeoil.pem"
	if name := missing(snponlyFile, "/dev/net/tun", keyFile, certFile, "/usr/bin/openssl"); name != "" {
		t.Skipf("needs QEMU: %s is not there", name)
	}
	if !pxetest.InNamespace(t) {
		return
	}
	cert, key := snakeoil(t, keyFile, certFile)
	program, err := os.ReadFile(snponlyFile)
	if err != nil {
		t.Fatal(err)
	}
	signed, err := signtest.Sign(program, cert, key)
	if err != nil {
		t.Fatal(err)
	}
	const mac = "52:54:00:00:01:12"
	dir := t.TempDir()
	bootFiles(t, dir)
	pxetest.Bridge(t, "br0", netip.MustParsePrefix(boxAddr+"/24"), "tap0")
	stored := map[string][]byte{}
	image := func(version uint64, data []byte) *pxev1.AssignRequest {
		sum := sha256.Sum256(data)
		digest := hex.EncodeToString(sum[:])
		stored[digest] = data
		m := ramdisk(mac)
		m.Action, m.Purpose, m.Artifacts, m.Kernel = pxev1.Action_ACTION_UKI, "boot", nil, &pxev1.Kernel{Sha256: digest}
		return &pxev1.AssignRequest{Version: version, Machines: []*pxev1.Machine{m}}
	}
	unsignedImage, signedImage := image(2, program), image(3, signed)
	b := start(t, "br0", dir, func(c *Config) {
		c.Artifacts = func(_ context.Context, sha string) (io.ReadSeekCloser, int64, error) {
			data, ok := stored[sha]
			if !ok {
				return nil, 0, errors.New("no such artifact")
			}
			return memory{bytes.NewReader(data)}, int64(len(data)), nil
		}
	}, localDisk(mac))
	boot := func(req *pxev1.AssignRequest) *qemutest.VM {
		t.Helper()
		if _, err := b.store.Apply(req); err != nil {
			t.Fatal(err)
		}
		return runQEMU(t, qemutest.Config{UEFI: true, SecureBoot: "snakeoil", Extra: noPXE}, qemutest.NIC{MAC: mac, ROM: "none"})
	}
	const uki = "pxe.stage telemetry " + mac + " {MAC:" + mac + " MachineID:node_a Stage:uki "
	vm := boot(unsignedImage)
	b.wait(t, 5*quiet, uki)
	if err := vm.WaitMarker(t.Context(), denied, quiet); err != nil {
		t.Fatal(err)
	}
	const running = "Client:ipxe "
	if strings.Contains(b.told(), running) {
		t.Fatalf("an unsigned image has run:\n%s", b.told())
	}
	_ = vm.Close()
	boot(signedImage)
	b.wait(t, 5*quiet, running) // it asks for an address of its own once it runs
}

// snakeoil is the key that package ovmf gives away for tests, by its passphrase.
func snakeoil(t *testing.T, keyFile, certFile string) (*x509.Certificate, *rsa.PrivateKey) {
	t.Helper()
	out, err := exec.Command("/usr/bin/openssl", "pkcs8", "-topk8", "-nocrypt", "-in", keyFile, "-passin", "pass:snakeoil", "-outform", "DER").Output()
	if err != nil {
		t.Fatalf("open the key of package ovmf: %v", err)
	}
	parsed, err := x509.ParsePKCS8PrivateKey(out)
	if err != nil {
		t.Fatal(err)
	}
	key, ok := parsed.(*rsa.PrivateKey)
	if !ok {
		t.Fatalf("the key of package ovmf is a %T", parsed)
	}
	data, err := os.ReadFile(certFile)
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(data)
	if block == nil {
		t.Fatal("the certificate of package ovmf is no PEM")
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return cert, key
}

// TestQEMUSecureBoot: firmware with the keys of PCs starts Debian's signed shim from
// the box, that its signed GRUB, and that Debian's signed kernel with our initrds,
// over TFTP. The same kernel without its signature GRUB does not start, nor shim such
// a GRUB.
func TestQEMUSecureBoot(t *testing.T) {
	qemutest.Need(t, true)
	kernel := signedKernel()
	if name := missing(shimFile, netGRUBFile, "/dev/net/tun"); name != "" {
		t.Skipf("needs Debian's signed shim and GRUB: %s is not there", name)
	}
	if kernel == "" {
		t.Skip("needs Debian's signed shim and GRUB: and a signed kernel, in /boot or in the cache of image build")
	}
	if !pxetest.InNamespace(t) {
		return
	}
	const mac = "52:54:00:00:01:13"
	dir := t.TempDir()
	bootFiles(t, dir)
	for name, from := range map[string]string{files.Shim: shimFile, files.ShimSecond: netGRUBFile, files.Kernel: kernel} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, "netboot", name)), 0o755); err != nil {
			t.Fatal(err)
		}
		copyFile(t, from, filepath.Join(dir, "netboot", name))
	}
	if err := os.WriteFile(filepath.Join(dir, "netboot", files.Initrd), initArchive(t, "amd64"), 0o644); err != nil {
		t.Fatal(err)
	}
	pxetest.Bridge(t, "br0", netip.MustParsePrefix(boxAddr+"/24"), "tap0")
	m := ramdisk(mac)
	m.Loader = "shim"
	b := start(t, "br0", dir, func(c *Config) { c.Cmdline = "console=ttyS0 panic=-1" }, m)
	boot := func() *qemutest.VM {
		t.Helper()
		return runQEMU(t, qemutest.Config{UEFI: true, SecureBoot: "microsoft", NoReboot: true, Extra: noV6}, qemutest.NIC{MAC: mac, ROM: "none"})
	}
	vm := boot()
	for _, stage := range []string{"Stage:tftp Client: IP:", "Stage:script ", "Stage:kernel ", "Stage:initrd ", "Stage:boot "} {
		b.wait(t, 5*quiet, "pxe.stage telemetry "+mac+" {MAC:"+mac+" MachineID:node_a "+stage)
	}
	wait := func(markers ...string) {
		t.Helper()
		for _, marker := range markers {
			if err := vm.WaitMarker(t.Context(), marker, quiet); err != nil {
				t.Fatal(err)
			}
		}
	}
	wait("Linux version", "Secure boot enabled", "init: voucher ")
	_ = vm.Close()

	for _, tt := range []struct{ file, from, says string }{
		{files.Kernel, kernel, "bad shim signature"},
		{files.ShimSecond, netGRUBFile, "Security Violation"},
	} {
		path := filepath.Join(dir, "netboot", tt.file)
		if err := os.WriteFile(path, unsigned(t, tt.from), 0o644); err != nil {
			t.Fatal(err)
		}
		vm = boot()
		wait(tt.says)
		if tt.file == files.Kernel {
			wait("Boot failed, asking again in 2 seconds")
		}
		if strings.Contains(vm.Serial(), "Linux version") {
			t.Errorf("%s has started without its signature", tt.file)
		}
		_ = vm.Close()
		copyFile(t, tt.from, path)
	}
}

// unsigned is a program without its signature.
func unsigned(t *testing.T, name string) []byte {
	t.Helper()
	image, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	const table = 24 + 112 + 4*8 // in the header, where the signatures are named
	clear(image[int(binary.LittleEndian.Uint32(image[0x3c:]))+table:][:8])
	if _, err := authenticode.Of(image); !errors.Is(err, authenticode.ErrUnsigned) {
		t.Fatalf("%s without its signature: %v", name, err)
	}
	return image
}

// TestQEMUGRUB lets a real GRUB network image carry out the box's configurations,
// without Secure Boot: it boots a kernel with both initrds in their order, tries again
// after a boot that failed, and starts the local disk's loader when it is told to.
func TestQEMUGRUB(t *testing.T) {
	qemutest.Need(t, true)
	kernel := signedKernel()
	images := strings.Fields(os.Getenv("GRUB_NET_IMAGES"))
	if len(images) == 0 {
		images = []string{"/usr/lib/grub/x86_64-efi/monolithic/grubnetx64.efi"} // package grub-efi-amd64-bin
	}
	if name := missing(append(images, snponlyFile, "/dev/net/tun")...); name != "" {
		t.Skipf("needs a GRUB network image: %s is not there", name)
	}
	if kernel == "" {
		t.Skip("needs a GRUB network image: and a kernel, in /boot or in the cache of image build")
	}
	if !pxetest.InNamespace(t) {
		return
	}
	const mac = "52:54:00:00:01:15"
	dir := t.TempDir()
	bootFiles(t, dir)
	put := func(name string, data []byte) {
		t.Helper()
		path := filepath.Join(dir, "netboot", name)
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		if err == nil {
			err = os.WriteFile(path, data, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	put(files.Initrd, initArchive(t, "amd64"))
	put(files.ShimSecond, nil) // the image stands in shim's place
	copyFile(t, kernel, filepath.Join(dir, "netboot", files.Kernel))
	pxetest.Bridge(t, "br0", netip.MustParsePrefix(boxAddr+"/24"), "tap0")
	var failing atomic.Bool
	b := start(t, "br0", dir, func(c *Config) {
		c.Cmdline = "console=ttyS0 panic=-1 quoted=$x;{y}"
		mint := c.Boot
		c.Boot = func(ctx context.Context, booting httpboot.Booting) ([]byte, error) {
			if failing.Load() {
				return nil, errors.New("refused by the test")
			}
			return mint(ctx, booting)
		}
	})
	for _, image := range images {
		copyFile(t, image, filepath.Join(dir, "netboot", files.Shim))
		boot := func() *qemutest.VM {
			t.Helper()
			b.mu.Lock()
			b.events = nil
			b.mu.Unlock()
			m := ramdisk(mac)
			m.Loader, m.WindowId = "shim", fmt.Sprintf("w%d", b.store.Version())
			if _, err := b.store.Apply(&pxev1.AssignRequest{Version: b.store.Version() + 1, Machines: []*pxev1.Machine{m}}); err != nil {
				t.Fatal(err)
			}
			return runQEMU(t, qemutest.Config{UEFI: true, Extra: noV6}, qemutest.NIC{MAC: mac, ROM: "none"})
		}
		wait := func(vm *qemutest.VM, marker string) {
			t.Helper()
			if err := vm.WaitMarker(t.Context(), marker, quiet); err != nil {
				t.Fatalf("%s: %v", image, err)
			}
		}

		failing.Store(true)
		vm := boot()
		wait(vm, "Boot failed, trying again in 2 seconds")
		failing.Store(false)
		wait(vm, "quoted=$x;{y}")
		wait(vm, "init: voucher ")
		_ = vm.Close()

		if err := os.Remove(filepath.Join(dir, "netboot", files.Kernel)); err != nil {
			t.Fatal(err)
		}
		vm = boot()
		wait(vm, "Boot failed, asking again in 2 seconds")
		local := localDisk(mac)
		local.MachineId = "node_a"
		if _, err := b.store.Apply(&pxev1.AssignRequest{Version: b.store.Version() + 1, Machines: []*pxev1.Machine{local}}); err != nil {
			t.Fatal(err)
		}
		wait(vm, "Booting from the local disk: assigned to its local disk")
		wait(vm, "Press Ctrl-B for the iPXE command line") // that is on the disk
		_ = vm.Close()
		copyFile(t, kernel, filepath.Join(dir, "netboot", files.Kernel))
	}
}

// initArchive is an initrd with a first program.
func initArchive(t *testing.T, arch string) []byte {
	t.Helper()
	program := filepath.Join(t.TempDir(), "init")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", program, "./testdata/init")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOARCH="+arch)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v: %s", err, out)
	}
	data, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	// The archive's files are for reading only; this one is to be run.
	return bytes.Replace(newc.BootArchive("/init", data), []byte("00008180"), []byte("000081ed"), 1)
}

// signedKernel is a kernel with a signature on this machine; empty: none.
func signedKernel() string {
	cache, _ := os.UserCacheDir()
	for _, pattern := range []string{"/boot/vmlinuz-*-amd64", filepath.Join(cache, "better-compute/kernel-*/boot/vmlinuz-*-amd64")} {
		found, _ := filepath.Glob(pattern)
		for _, name := range found {
			if image, err := os.ReadFile(name); err == nil {
				if _, err := authenticode.Of(image); err == nil {
					return name
				}
			}
		}
	}
	return ""
}

// TestQEMUARM64: EDK2 on arm64 starts GRUB's network image from the box, and that the
// kernel, over TFTP.
func TestQEMUARM64(t *testing.T) {
	if err := qemutest.AvailableARM64(); err != nil {
		t.Skipf("needs an arm64 machine: %v", err)
	}
	// These are of another architecture: what an image build has fetched is taken.
	cache, _ := os.UserCacheDir()
	kernels, _ := filepath.Glob(filepath.Join(cache, "better-compute/kernel-*/boot/vmlinuz-*-arm64"))
	debs, _ := filepath.Glob(filepath.Join(cache, "better-compute/debs/grub-efi-arm64-bin_*.deb"))
	if len(kernels) == 0 || len(debs) == 0 {
		t.Skip("needs an arm64 machine: its kernel or GRUB is not in the cache of image build")
	}
	if name := missing(snponlyFile, "/dev/net/tun"); name != "" {
		t.Skipf("needs an arm64 machine: %s is not there", name)
	}
	if !pxetest.InNamespace(t) {
		return
	}
	const mac = "52:54:00:00:01:14"
	dir := t.TempDir()
	grubFiles(t, dir, "")
	unpacked := t.TempDir()
	if out, err := exec.Command("dpkg-deb", "-x", debs[len(debs)-1], unpacked).CombinedOutput(); err != nil {
		t.Fatalf("dpkg-deb: %v: %s", err, out)
	}
	copyFile(t, filepath.Join(unpacked, "usr/lib/grub/arm64-efi/monolithic/grubnetaa64.efi"), filepath.Join(dir, "netboot", files.ARM64Loader))
	copyFile(t, kernels[len(kernels)-1], filepath.Join(dir, "netboot", files.ARM64Kernel))
	if err := os.WriteFile(filepath.Join(dir, "netboot", files.ARM64Initrd), initArchive(t, "arm64"), 0o644); err != nil {
		t.Fatal(err)
	}
	pxetest.Bridge(t, "br0", netip.MustParsePrefix(boxAddr+"/24"), "tap0")
	b := start(t, "br0", dir, func(c *Config) { c.ARM64Cmdline = "console=ttyAMA0 panic=-1" }, ramdisk(mac))
	vm := runQEMU(t, qemutest.Config{UEFI: true, ARM64: true, NoReboot: true}, qemutest.NIC{MAC: mac, ROM: "none"})
	for _, stage := range []string{"Stage:tftp Client: IP:", "Stage:script ", "Stage:kernel ", "Stage:initrd ", "Stage:boot "} {
		b.wait(t, 10*quiet, "pxe.stage telemetry "+mac+" {MAC:"+mac+" MachineID:node_a "+stage)
	}
	if err := vm.WaitMarker(t.Context(), "init: voucher ", 2*quiet); err != nil {
		t.Fatal(err)
	}
}
