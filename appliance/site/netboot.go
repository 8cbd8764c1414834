package site

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent"
	"github.com/better-compute/site-appliance/appliance/agent/bootinfo"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/pxe/newc"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// ramdiskCmdline boots the ramdisk. Nothing secret stands on a command line.
const ramdiskCmdline = "console=tty0 console=ttyS0,115200 panic=10 random.trust_cpu=on"

// bootArchive mints a machine's voucher, for one boot, and packs it as an
// initrd. It needs no line home.
func (s *site) bootArchive(l lan) func(context.Context, *pxev1.Machine) ([]byte, error) {
	return func(_ context.Context, m *pxev1.Machine) ([]byte, error) {
		bundle := s.agent.Bundle()
		if bundle == nil {
			return nil, errors.New("the box is not enrolled yet")
		}
		now := s.agent.Clock().Now()
		if end := time.UnixMilli(m.WindowUntilMs); !now.Before(end) {
			return nil, fmt.Errorf("the boot window of %s ended at %s", m.Name, end.UTC().Format(time.RFC3339))
		}
		nonce := make([]byte, 16)
		if _, err := rand.Read(nonce); err != nil {
			return nil, err
		}
		signed, err := s.agent.SignVoucher(&agentv1.Voucher{
			MachineId: m.MachineId, BootNonce: nonce, WindowId: m.WindowId, Purpose: m.Purpose,
			IssuedAtMs: now.UnixMilli(), NotAfterMs: m.WindowUntilMs,
		})
		if err != nil {
			return nil, fmt.Errorf("sign voucher: %w", err)
		}
		voucher, err := proto.Marshal(signed)
		if err != nil {
			return nil, err
		}
		ca, roots := bundle.CASPKI(), bundle.RootSet()
		data, err := json.Marshal(bootinfo.Info{
			MachineID: m.MachineId, SiteID: s.agent.SiteID(), Voucher: voucher,
			GatewayURLs: bundle.URLs(), CASPKI: ca[:], RootSet: roots[:],
			Via:       fmt.Sprintf("%s:%d", l.Address.Addr(), PassthroughPort),
			Artifacts: fmt.Sprintf("http://%s/artifacts/", l.Address.Addr()),
		})
		if err != nil {
			return nil, err
		}
		return newc.BootArchive(bootinfo.Path, data), nil
	}
}

// gatewayAddrs are the only places that the passthrough leads to.
func (s *site) gatewayAddrs() []string {
	bundle := s.agent.Bundle()
	if bundle == nil {
		return nil
	}
	var addrs []string
	for _, text := range bundle.URLs() {
		u, err := url.Parse(text)
		if err != nil {
			continue
		}
		addrs = append(addrs, net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), "443")))
	}
	return addrs
}

func (s *site) openArtifact(ctx context.Context, sha string) (io.ReadSeekCloser, int64, error) {
	r, err := s.cache.Open(ctx, sha)
	if err != nil {
		return nil, 0, err
	}
	return r, r.Size(), nil
}

// source fetches artifacts from the gateway for the cache.
type source struct{ agent *agent.Agent }

func (s source) Locate(ctx context.Context, ref string) (*agentv1.LocateResponse, error) {
	return s.agent.Locate(ctx, ref, "")
}

func (s source) Fetch(ctx context.Context, location string, offset int64) (io.ReadCloser, error) {
	base, err := url.Parse(s.agent.BaseURL())
	if err != nil {
		return nil, err
	}
	target, err := base.Parse(location)
	if err != nil {
		return nil, fmt.Errorf("artifact URL %q: %w", location, err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target.String(), nil)
	if err != nil {
		return nil, err
	}
	want := http.StatusOK
	if offset > 0 {
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-", offset))
		want = http.StatusPartialContent
	}
	resp, err := s.agent.HTTPClient().Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != want {
		resp.Body.Close()
		if resp.StatusCode >= 400 && resp.StatusCode < 500 {
			return nil, errs.New(errs.Unavailable, "GET %s: the gateway answers %s", target.Path, resp.Status)
		}
		return nil, errs.Retry(errs.Unavailable, "GET %s: the gateway answers %s", target.Path, resp.Status)
	}
	return resp.Body, nil
}
