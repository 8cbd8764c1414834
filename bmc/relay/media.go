package relay

import (
	"context"
	"encoding/json"
	"strings"
	"sync"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// mounts holds what BMCs may fetch: an image until it is ejected or replaced,
// since a machine reads it for as long as it is inserted; firmware until its
// update ends.
type mounts struct {
	media Media

	mu       sync.Mutex
	inserted map[string]func() // by the BMC's address
}

func newMounts(m Media) *mounts { return &mounts{media: m, inserted: map[string]func(){}} }

// offer puts a URL in the place of a reference in p's arguments. settle takes
// whether the operation succeeded.
func (m *mounts) offer(ctx context.Context, p *Prepared) (settle func(bool), err error) {
	operation := p.Concern + "." + p.Operation
	switch operation {
	case ejectMedia:
		return func(ok bool) {
			if ok {
				m.replace(p.Address, nil)
			}
		}, nil
	case insertMedia, firmwareUpdate:
	default:
		return func(bool) {}, nil
	}
	args, err := arguments(string(p.Args))
	if err != nil {
		return nil, err
	}
	ref := ""
	if len(args) == 1 {
		if operation == firmwareUpdate {
			ref = urlOf(args[0])
		} else if json.Unmarshal(args[0], &ref) != nil {
			ref = ""
		}
	}
	if !strings.HasPrefix(ref, metal.ArtifactScheme) {
		return func(ok bool) {
			if ok && operation == insertMedia {
				m.replace(p.Address, nil)
			}
		}, nil
	}
	if m.media == nil {
		return nil, errs.New(errs.InvalidArgs, "this site serves no artifacts to BMCs: name a URL that the BMC can fetch")
	}
	url, release, err := m.media.Offer(ctx, p.Address, ref)
	if err != nil {
		return nil, err
	}
	if operation == firmwareUpdate {
		args[0] = withURL(args[0], url)
	} else if args[0], err = json.Marshal(url); err != nil {
		release()
		return nil, err
	}
	if p.Args, err = json.Marshal(args); err != nil {
		release()
		return nil, err
	}
	return func(ok bool) {
		if ok && operation == insertMedia {
			m.replace(p.Address, release)
			return
		}
		release()
	}, nil
}

// replace takes note of what is in a BMC's drive now, and ends the offer of what
// was there before.
func (m *mounts) replace(address string, release func()) {
	m.mu.Lock()
	before := m.inserted[address]
	delete(m.inserted, address)
	if release != nil {
		m.inserted[address] = release
	}
	m.mu.Unlock()
	if before != nil {
		before()
	}
	// What was inserted before a restart has nobody else who would end it.
	if m.media != nil {
		m.media.Forget(address)
	}
}
