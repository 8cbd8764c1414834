package relay

import (
	"context"
	"encoding/json"
	"strings"
	"sync"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// mounts holds what BMCs may fetch: an image until it is ejected or replaced,
// since a machine reads it for as long as it is inserted; firmware until its
// update ends.
type mounts struct {
	media Media

	mu       sync.Mutex
	inserted map[string][]func() // by the BMC's address
}

// maxKept bounds the offers to one BMC whose inserts ended unclear.
const maxKept = 8

func newMounts(m Media) *mounts { return &mounts{media: m, inserted: map[string][]func(){}} }

// offer puts a URL in the place of a reference in p's arguments. settle takes
// how the operation ended.
func (m *mounts) offer(ctx context.Context, p *Prepared) (settle func(error), err error) {
	operation := p.Concern + "." + p.Operation
	switch operation {
	case ejectMedia:
		return func(err error) {
			if err == nil {
				m.replace(p.Address, nil)
			}
		}, nil
	case insertMedia, firmwareUpdate:
	default:
		return func(error) {}, nil
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
		return func(err error) {
			if err == nil && operation == insertMedia {
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
	return func(err error) {
		switch {
		case operation == insertMedia && err == nil:
			m.replace(p.Address, release)
		case operation == insertMedia && unclear(err):
			m.keep(p.Address, release)
		default:
			release()
		}
	}, nil
}

// unclear reports whether the BMC may have done, or may yet do, what ended with err.
func unclear(err error) bool {
	e := errs.From(err)
	switch e.Code {
	case errs.Timeout, errs.Interrupted, errs.Cancelled, errs.Unreachable, errs.DriverError, errs.Internal:
		return true
	}
	return e.Retryable && !addressbook.NothingSent(e.Code)
}

// keep holds an offer beside what the BMC had before: which of them is in its drive
// is not known.
func (m *mounts) keep(address string, release func()) {
	m.mu.Lock()
	kept := append(m.inserted[address], release)
	var over []func()
	if n := len(kept) - maxKept; n > 0 {
		// The first may be what is in the drive, the last what comes into it.
		over, kept = kept[1:1+n:1+n], append(kept[:1:1], kept[1+n:]...)
	}
	m.inserted[address] = kept
	m.mu.Unlock()
	for _, release := range over {
		release()
	}
}

// replace takes note of what is in a BMC's drive now, and ends the offer of what
// was there before.
func (m *mounts) replace(address string, release func()) {
	m.mu.Lock()
	before := m.inserted[address]
	delete(m.inserted, address)
	if release != nil {
		m.inserted[address] = []func(){release}
	}
	m.mu.Unlock()
	for _, release := range before {
		release()
	}
	// What was inserted before a restart has nobody else who would end it.
	if m.media != nil {
		m.media.Forget(address)
	}
}
