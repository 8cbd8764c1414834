package site

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/base/bound"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/site/config"
	"github.com/better-compute/site-appliance/appliance/site/mediaserver"
	"github.com/better-compute/site-appliance/bmc/relay"
)

// mediaCA is the state event that holds the CA which BMCs need to verify the box.
const mediaCA = "site.media_ca"

// openMedia makes the server of BMCs' media; without a CA there is none, and the
// box goes on.
func (s *site) openMedia(cfg *config.Site) {
	log := s.Log.With("part", "media")
	ca, offers := "", ""
	if s.StateDir != "" {
		ca, offers = filepath.Join(s.StateDir, "media-ca.pem"), filepath.Join(s.StateDir, "media.json")
	} else {
		log.Error("the CA of BMCs' media lasts until the next start: BMCs need the new one then")
	}
	authority, aside, err := mediaserver.OpenAuthority(ca)
	if err != nil {
		log.Error("BMCs are served no media", "err", err)
		return
	}
	if aside != "" {
		log.Error("the CA of BMCs' media was damaged: BMCs need the new one", "kept", aside, "sha256", authority.Fingerprint())
	}
	var lans []netip.Prefix
	for _, l := range cfg.LAN {
		lans = append(lans, l.Address)
	}
	s.media = mediaserver.New(mediaserver.Options{
		Authority: authority, LANs: lans, File: offers, Open: s.openArtifact, Now: s.now, Log: log,
		Locate: func(ctx context.Context, ref string) (mediaserver.Artifact, error) {
			a, err := s.agent.Locate(ctx, ref, "")
			switch connect.CodeOf(err) {
			case connect.CodeNotFound:
				return mediaserver.Artifact{}, errs.New(errs.InvalidArgs, "the gateway has no artifact %s", ref)
			case connect.CodeUnavailable, connect.CodeDeadlineExceeded:
				return mediaserver.Artifact{}, errs.Retry(errs.Unavailable, "the gateway cannot be asked for artifact %s: %v", ref, err)
			}
			if err != nil {
				return mediaserver.Artifact{}, err
			}
			return mediaserver.Artifact{SHA256: a.Sha256, Packed: a.UnpackedSha256 != "" && a.UnpackedSha256 != a.Sha256}, nil
		},
	})
	s.mediaCA = map[string]string{"pem": authority.PEM(), "sha256": authority.Fingerprint()}
}

// tellCAEvery spaces the repeats of the CA's event, since gateways forget old ones.
const tellCAEvery = 24 * time.Hour

// tellCA tells home which CA the site's BMCs need.
func (s *site) tellCA(ctx context.Context) error {
	for {
		if s.media != nil {
			s.emit(mediaCA, "state", "", s.mediaCA)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(tellCAEvery):
		}
	}
}

// forBMCs is the media server as the relay takes it; nil: there is none.
func (s *site) forBMCs() relay.Media {
	if s.media == nil {
		return nil
	}
	return s.media
}

// serveMedia serves BMCs' media on one LAN.
func (s *site) serveMedia(l lan) func(context.Context) error {
	return func(ctx context.Context) error {
		ln, err := bound.Listen(ctx, l.name, netip.AddrPortFrom(l.Address.Addr(), mediaserver.Port))
		if err != nil {
			return err
		}
		return s.media.Serve(ctx, ln, l.Address.Addr())
	}
}

// authorities judge the BMCs without a pin: the system's CAs and the site's own.
// nil stands for the system's alone. What is not there is left out: a BMC that
// needs it is refused, and every other one is served.
func (s *site) authorities(cfg *config.Site) *x509.CertPool {
	text := []byte(cfg.Authorities.PEM)
	if file := cfg.Authorities.File; file != "" {
		data, err := os.ReadFile(file)
		if err != nil {
			s.Log.Error("the site's authorities cannot be read: BMCs that they vouch for are refused", "err", err)
		}
		text = append(append(text, '\n'), data...)
	}
	own, err := parseCertificates(text)
	if err != nil {
		s.Log.Error("an authority of the site is no good: BMCs that it vouches for are refused", "err", err)
	}
	if len(own) == 0 {
		return nil
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	for _, c := range own {
		pool.AddCert(c)
	}
	return pool
}

// parseCertificates gives those that can be read, and the first error.
func parseCertificates(text []byte) (out []*x509.Certificate, first error) {
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		c, err := x509.ParseCertificate(block.Bytes)
		if err == nil && block.Type != "CERTIFICATE" {
			err = fmt.Errorf("%.40q is no certificate", block.Type)
		}
		if err == nil {
			out = append(out, c)
		} else if first == nil {
			first = err
		}
	}
	return out, first
}

// legacyBMCs says which BMCs, by host:port, may use old TLS; nil: none.
func legacyBMCs(cfg *config.Site) func(address string) bool {
	allowed := map[string]bool{}
	for _, b := range cfg.BMC {
		if address, err := b.HostPort(); err == nil && b.LegacyTLS {
			allowed[address] = true
		}
	}
	if len(allowed) == 0 {
		return nil
	}
	return func(address string) bool { return allowed[address] }
}
