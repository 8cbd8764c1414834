package mediaserver

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
)

// Bounds of what is offered.
const (
	// life is how long a BMC may fetch what was never ejected.
	life = 24 * time.Hour
	// perBMC offers hold for one BMC; one more ends its oldest.
	perBMC    = 16
	maxOffers = 4096
	maxFile   = 4 << 20
)

// record is an offer as it is kept over a restart: BMCs go on reading what they
// have inserted. The path's secret is not in it, only its digest.
type record struct {
	Token   string     `json:"token_sha256"`
	BMC     string     `json:"bmc"` // its host:port
	Name    string     `json:"name"`
	SHA256  string     `json:"sha256"`
	Client  netip.Addr `json:"client"`
	LAN     netip.Addr `json:"lan"`
	Begun   int64      `json:"begun_ms"`
	Expires int64      `json:"expires_ms"`
}

// offer is one artifact that one BMC may fetch at one path, until end.
type offer struct {
	record
	ctx  context.Context // ends with the offer
	end  context.CancelFunc
	hold io.Closer // keeps the artifact in the cache; nil: not looked at since the restart
	old  bool      // of an earlier process, so that nobody has its release
}

var digestPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)

// check refuses what no offer of ours is.
func (r record) check() error {
	if !digestPattern.MatchString(r.Token) || !digestPattern.MatchString(r.SHA256) || !r.Client.IsValid() || !r.LAN.IsValid() || r.Name != fileName(r.Name) {
		return errors.New("an offer is not whole")
	}
	return nil
}

func digestOf(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:])
}

// remaining is how much of an offer's life is left, by a clock that may have
// been set back in between.
func (r record) remaining(now time.Time) time.Duration {
	left := time.UnixMilli(r.Expires).Sub(now)
	return min(left, life)
}

// parseOffers reads the file strictly.
func parseOffers(data []byte) ([]record, error) {
	var in struct {
		Offers []record `json:"offers"`
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&in); err != nil {
		return nil, err
	}
	if d.More() || len(in.Offers) > maxOffers {
		return nil, errors.New("too much is in it")
	}
	for _, r := range in.Offers {
		if err := r.check(); err != nil {
			return nil, err
		}
	}
	return in.Offers, nil
}

// load takes up what an earlier process offered on the LANs that are still there.
func (s *Server) load() error {
	if s.File == "" {
		return nil
	}
	data, err := readBounded(s.File, maxFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var records []record
	if err == nil {
		records, err = parseOffers(data)
	}
	if err != nil {
		// What BMCs have inserted is lost to them; what they need is offered anew.
		return fmt.Errorf("read what is offered to BMCs: %w", err)
	}
	now := s.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range records {
		if left := r.remaining(now); left > 0 && slices.ContainsFunc(s.LANs, func(l netip.Prefix) bool { return l.Addr() == r.LAN }) {
			s.add(r, left, nil).old = true
		}
	}
	return nil
}

// add begins an offer; s.mu is held.
func (s *Server) add(r record, left time.Duration, hold io.Closer) *offer {
	o := &offer{record: r, hold: hold}
	o.ctx, o.end = context.WithTimeout(s.ctx, left)
	s.offers[r.Token] = o
	context.AfterFunc(o.ctx, func() { s.remove(o) })
	return o
}

// remove ends an offer, unless the server's own end did: then the file keeps it.
func (s *Server) remove(o *offer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.offers[o.Token] != o {
		return
	}
	s.drop(o)
	if s.ctx.Err() == nil {
		s.keep()
	}
}

// Forget ends what an earlier process offered to the BMC at bmcAddress: its drive
// was emptied, or holds something else now.
func (s *Server) Forget(bmcAddress string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	gone := false
	for _, o := range s.offers {
		if o.old && o.BMC == bmcAddress {
			s.drop(o)
			gone = true
		}
	}
	if gone {
		s.keep()
	}
}

// drop forgets an offer; s.mu is held.
func (s *Server) drop(o *offer) {
	delete(s.offers, o.Token)
	if o.hold != nil {
		_ = o.hold.Close() // a reader that was never read
	}
	o.end()
}

// keep writes the file; s.mu is held. A full disk costs BMCs their media at the
// next restart, and nothing now.
func (s *Server) keep() {
	if s.File == "" {
		return
	}
	out := struct {
		Offers []record `json:"offers"`
	}{Offers: []record{}}
	for _, o := range s.offers {
		out.Offers = append(out.Offers, o.record)
	}
	slices.SortFunc(out.Offers, func(a, b record) int { return bytes.Compare([]byte(a.Token), []byte(b.Token)) })
	data, err := json.Marshal(out)
	if err == nil {
		err = atomicfile.Write(s.File, data, 0o600)
	}
	if err != nil {
		s.Log.Error("what is offered to BMCs is not kept: it ends with this process", "err", err)
	}
}

// surplus is the oldest of a BMC's offers where it has as many as it may; s.mu is held.
func (s *Server) surplus(client netip.Addr) (oldest *offer) {
	n := 0
	for _, o := range s.offers {
		if o.Client == client {
			n++
			if oldest == nil || o.Begun < oldest.Begun {
				oldest = o
			}
		}
	}
	if n < perBMC {
		return nil
	}
	return oldest
}

var (
	endings  = regexp.MustCompile(`\.[A-Za-z][A-Za-z0-9]{1,6}$`)
	unlikely = regexp.MustCompile(`[^A-Za-z0-9._-]`)
)

const maxName = 64

// fileName is the last part of an offer's path: BMCs go by its ending, and many
// take nothing for a disc that does not end in .iso or .img.
func fileName(ref string) string {
	name := unlikely.ReplaceAllString(ref, "-")
	name = name[max(0, len(name)-maxName):] // the ending counts
	name = strings.TrimLeft(name, ".")
	if name == "" || digestPattern.MatchString(name) {
		return "image.iso"
	}
	if !endings.MatchString(name) {
		name = name[:min(len(name), maxName-4)] + ".iso"
	}
	return name
}
