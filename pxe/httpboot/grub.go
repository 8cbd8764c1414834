package httpboot

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"

	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/grub"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// forGRUB resets the connection in place of any refusal: GRUB takes the body of every
// answer for the file that it asked for (grub-core/net/http.c, 2.02 to 2.14), so that
// it would boot without its voucher, or a refusal as its kernel.
type forGRUB struct {
	http.ResponseWriter
	refused bool
}

func (f *forGRUB) WriteHeader(status int) {
	if status < http.StatusBadRequest {
		f.ResponseWriter.WriteHeader(status)
		return
	}
	conn, _, err := http.NewResponseController(f.ResponseWriter).Hijack()
	if err != nil {
		f.ResponseWriter.WriteHeader(status) // not by TCP, as in tests
		return
	}
	f.refused = true
	if c, ok := conn.(*cappedConn); ok {
		// After a mere end it waits for half a minute, and newer ones go on at once after a
		// reset.
		c.breakOff()
	}
	_ = conn.Close()
}

func (f *forGRUB) Write(b []byte) (int, error) {
	if f.refused {
		return len(b), nil
	}
	return f.ResponseWriter.Write(b)
}

// ReadFrom hands the body on as a whole, for the kernel to send.
func (f *forGRUB) ReadFrom(r io.Reader) (int64, error) { return io.Copy(f.ResponseWriter, r) }

func (f *forGRUB) Unwrap() http.ResponseWriter { return f.ResponseWriter }

// Home is how a machine reaches the box over TFTP: by which address, and how URLs begin.
type Home struct {
	Server netip.Addr
	Base   string
}

// grubConfig answers in every case with a configuration: without one, GRUB stops at its prompt.
func (h *Handler) grubConfig(w http.ResponseWriter, r *http.Request, mac, named string) {
	text, tell := h.grubText(mac, named, hostOf(baseOf(r)), portOf(baseOf(r)), true)
	h.text(w, r, text)
	if r.Method == http.MethodGet {
		tell()
	}
}

// grubText is the configuration of a machine's GRUB. Its holder's MAC decides; the
// one that the path names counts where it is the same machine's.
func (h *Handler) grubText(mac, named string, server netip.Addr, port int, overHTTP bool) (text string, tell func()) {
	ask := h.cfg.Request(mac)
	m := ask.Assigned()
	if named != "" && named != mac {
		if other := h.cfg.Request(named); m != nil && other.Assigned().GetMachineId() == m.MachineId {
			mac, ask = named, other
		}
	}
	d := decide.Decide(with(ask, decide.Client{Program: decide.GRUB}))
	tell = func() {
		if m != nil {
			h.tell(mac, m, "script", d.Action.String()+": "+d.Reason)
		}
	}
	if d.Action == decide.LocalDisk {
		return grub.LocalDisk(d.Reason), tell
	}
	if !d.Action.Boots() {
		h.cfg.Log.Debug("GRUB is told that there is nothing to boot", "mac", mac, "reason", d.Reason)
		return grub.Deny(d.Reason), tell
	}
	around := grub.Around{Server: server, HTTPPort: port, HTTP: overHTTP, Again: grub.PathFor(mac)}
	text, err := h.grubBoot(around, mac, m, ask.Client.Arch, d.Action)
	if err != nil {
		h.cfg.Log.Error("GRUB's configuration not made", "mac", mac, "err", err)
		return grub.Deny(err.Error()), tell
	}
	return text, tell
}

func (h *Handler) grubBoot(around grub.Around, mac string, m *pxev1.Machine, arch decide.Arch, a decide.Action) (string, error) {
	at := bootPath(mac, h.boots.same(m, h.cfg.Now(), decide.GRUB))
	switch a {
	case decide.RunAgent:
		return grub.Linux{Around: around, Kernel: at + kernelName, Initrds: []string{at + initrdName, at + bootName}, Cmdline: h.cmdline(arch)}.Config()
	case decide.Kernel:
		l := grub.Linux{Around: around, Kernel: at + otherKernelName, Cmdline: m.GetKernel().GetCmdline()}
		if m.GetKernel().GetInitrdSha256() != "" {
			l.Initrds = []string{at + otherInitrdName}
		}
		return l.Config()
	case decide.UKI:
		return grub.Chain{Around: around, Program: at + ukiName}.Config()
	}
	return "", fmt.Errorf("GRUB cannot do %s", a)
}

func portOf(base string) int {
	_, port, err := net.SplitHostPort(base[len("http://"):])
	if err != nil {
		return 0
	}
	n, _ := strconv.Atoi(port)
	return n
}

// IsGRUB says whether OpenTFTP has an answer for a path, if it be a refusal.
func (h *Handler) IsGRUB(path string) bool {
	parts := split(path)
	_, is := grub.ConfigPath(parts)
	return is || isBoot(parts)
}

func isBoot(parts []string) bool { return len(parts) == 4 && parts[0] == "boot" }

// OpenTFTP opens what a machine's GRUB asks for over TFTP: its configuration and the
// files of its boot, under the paths that they have over HTTP. ok: the path is one of these.
func (h *Handler) OpenTFTP(ctx context.Context, mac string, home Home, path string) (f files.File, ok bool, err error) {
	parts := split(path)
	if named, is := grub.ConfigPath(parts); is {
		text, tell := h.grubText(mac, named, home.Server, portOf(home.Base), false)
		tell()
		return inMemory([]byte(text)), true, nil
	}
	if !isBoot(parts) {
		return nil, false, nil
	}
	named, err := net.ParseMAC(parts[1])
	if err != nil {
		return nil, true, errors.New("no such path")
	}
	ask := h.cfg.Request(mac)
	m := ask.Assigned()
	if named.String() != mac {
		other := h.cfg.Request(named.String())
		if a := other.Assigned(); m == nil || a == nil || a.MachineId != m.MachineId {
			return nil, true, errors.New("the path is another machine's")
		}
		mac, ask = named.String(), other
	}
	if m == nil {
		return nil, true, errors.New("the machine is unknown")
	}
	b, p, _, why := h.find(ask, m, parts[2], parts[3])
	if why != "" {
		return nil, true, errors.New(why)
	}
	if f, err = h.open(ctx, home, mac, m, b, p); err != nil {
		return nil, true, err
	}
	if p.last {
		h.count(b, m)
	}
	h.tell(mac, m, p.stage, "window "+m.WindowId)
	return f, true, nil
}

// open opens an asset of a boot.
func (h *Handler) open(ctx context.Context, home Home, mac string, m *pxev1.Machine, b *boot, p asset) (files.File, error) {
	switch {
	case p.file != "":
		return h.cfg.Files.Open(p.file) // GRUB itself pads initrds
	case p.digest != "":
		r, size, err := h.cfg.Artifacts(ctx, p.digest)
		if err != nil {
			return nil, err
		}
		return sized{r, size}, nil
	}
	data, err := h.mint(ctx, home.Base, mac, m, b)
	if err != nil {
		return nil, err
	}
	return inMemory(data), nil
}

// sized is a stream whose size is known.
type sized struct {
	io.ReadSeekCloser
	size int64
}

func (s sized) Size() int64 { return s.size }

type textFile struct{ *bytes.Reader }

func (textFile) Close() error { return nil }

func inMemory(data []byte) files.File {
	return sized{textFile{bytes.NewReader(data)}, int64(len(data))}
}
