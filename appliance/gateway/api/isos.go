package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/artifacts"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/pxe/isoclass"
)

type isoService struct{ *API }

// isoName is what a URL can end in, and no digest.
var isoName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,59}$`)

const (
	isoPrefix = store.ISOPrefix
	isoArch   = "any"
)

// isoFacts is what the store keeps of an image.
type isoFacts struct {
	isoclass.Image
	ClassGiven bool `json:"class_given,omitempty"`
	// Artifact is the name of its bytes.
	Artifact string `json:"artifact"`
}

func factsOf(i store.ISO) (f isoFacts, err error) {
	if err = json.Unmarshal([]byte(i.FactsJSON), &f); err != nil {
		err = fmt.Errorf("read what is known of disc image %s: %w", i.Name, err)
	}
	return f, err
}

// Add takes in an image and looks at what it is.
func (s isoService) Add(ctx context.Context, stream *connect.ClientStream[computev1.AddIsoRequest]) (*connect.Response[computev1.AddIsoResponse], error) {
	if !stream.Receive() {
		if err := stream.Err(); err != nil {
			return nil, err
		}
		return nil, apierr.Invalid("the first message must be the header")
	}
	header := stream.Msg().GetHeader()
	if header == nil {
		return nil, apierr.Invalid("the first message must be the header")
	}
	if err := checkTenant(ctx, header.TenantId); err != nil {
		return nil, err
	}
	if !isoName.MatchString(header.Name) || hexDigest.MatchString(header.Name) {
		return nil, apierr.Invalid("name %.80q: want lower-case letters, digits, '.', '_' and '-', at most 60, and no digest", header.Name)
	}
	var facts isoFacts
	if header.Class != "" {
		class, err := isoclass.ParseClass(header.Class)
		if err != nil {
			return nil, apierr.Invalid("%s", errs.From(err).Message)
		}
		facts.Class, facts.ClassGiven = class, true
	}
	// Before gigabytes come; the catalog itself decides when they have.
	switch have, err := s.Store.ISO(ctx, header.TenantId, header.Name); {
	case err == nil && have.Name == header.Name:
		return nil, apierr.Taken("there is a disc image %s: remove it first, or give another name", header.Name)
	case err != nil && !errors.Is(err, store.ErrNotFound):
		return nil, err
	}
	facts.Artifact = isoPrefix + s.Store.NewID("iso")
	artifact, err := s.Artifacts.Import(ctx, facts.Artifact, isoArch, artifacts.Plain, &streamReader[computev1.AddIsoRequest]{what: "disc image", stream: stream, data: func(m *computev1.AddIsoRequest) ([]byte, bool) {
		_, ok := m.Part.(*computev1.AddIsoRequest_Data)
		return m.GetData(), ok
	}})
	if e := (*errs.Error)(nil); errors.As(err, &e) && e.Code == errs.InvalidArgs {
		return nil, apierr.Invalid("%s: %s", header.Name, e.Message)
	}
	if err != nil {
		return nil, err
	}
	iso, err := s.catalogue(ctx, header, artifact, facts)
	if err != nil {
		if rerr := s.Artifacts.Remove(context.WithoutCancel(ctx), facts.Artifact, isoArch); rerr != nil {
			s.Log.Error("the bytes of a disc image that was refused stay", "artifact", facts.Artifact, "err", rerr)
		}
		return nil, err
	}
	out, err := wireISO(iso)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.AddIsoResponse{Iso: out}), nil
}

// catalogue looks at an image that has come, and keeps it.
func (s isoService) catalogue(ctx context.Context, header *computev1.AddIsoHeader, a store.Artifact, facts isoFacts) (store.ISO, error) {
	f, err := s.Artifacts.Open(a.SHA256)
	if err != nil {
		return store.ISO{}, err
	}
	defer f.Close()
	given := facts.Class
	facts.Image, err = isoclass.Inspect(f, int64(a.SizeBytes))
	if e := (*errs.Error)(nil); errors.As(err, &e) && e.Code == errs.InvalidArgs {
		return store.ISO{}, apierr.Invalid("%s: %s", header.Name, e.Message)
	}
	if err != nil {
		return store.ISO{}, err
	}
	if facts.ClassGiven {
		facts.Class = given
	}
	data, err := json.Marshal(facts)
	if err != nil {
		return store.ISO{}, err
	}
	iso := store.ISO{TenantID: header.TenantId, Name: header.Name, SHA256: a.SHA256, SizeBytes: a.SizeBytes, FactsJSON: string(data), Added: s.Store.Now()}
	return iso, s.Store.AddISO(ctx, iso)
}

func wireISO(i store.ISO) (*computev1.Iso, error) {
	f, err := factsOf(i)
	if err != nil {
		return nil, err
	}
	out := &computev1.Iso{
		Name: i.Name, Sha256: i.SHA256, SizeBytes: i.SizeBytes, Label: f.Label, Class: isoclass.Name(f.Class), ClassGiven: f.ClassGiven,
		Bios: f.BIOS, Uefi: f.UEFI, UefiArchs: f.Archs, Layout: f.Layout, Parameters: f.Parameters, Notes: f.Notes, AddedMs: unixMS(i.Added),
	}
	if f.Signed != nil {
		note := "its UEFI program has no signature: Secure Boot refuses it"
		if *f.Signed {
			note = "its UEFI program has a signature, which firmware with Secure Boot on judges"
		}
		out.Notes = append(out.Notes, note)
	}
	return out, nil
}

// List tells the tenant's images.
func (s isoService) List(ctx context.Context, req *connect.Request[computev1.ListIsosRequest]) (*connect.Response[computev1.ListIsosResponse], error) {
	isos, err := s.Store.ISOs(ctx, req.Msg.TenantId)
	if err != nil {
		return nil, err
	}
	res := &computev1.ListIsosResponse{}
	for _, i := range isos {
		item, err := wireISO(i)
		if err != nil {
			return nil, err
		}
		res.Items = append(res.Items, item)
	}
	return connect.NewResponse(res), nil
}

// Get tells one image.
func (s isoService) Get(ctx context.Context, req *connect.Request[computev1.GetIsoRequest]) (*connect.Response[computev1.GetIsoResponse], error) {
	i, err := s.Store.ISO(ctx, req.Msg.TenantId, req.Msg.Iso)
	if err != nil {
		return nil, err
	}
	out, err := wireISO(i)
	if err != nil {
		return nil, err
	}
	machines, err := s.Store.ISOMachines(ctx, i)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.GetIsoResponse{Iso: out, Machines: machines}), nil
}

// Remove forgets an image and its bytes.
func (s isoService) Remove(ctx context.Context, req *connect.Request[computev1.RemoveIsoRequest]) (*connect.Response[computev1.RemoveIsoResponse], error) {
	i, err := s.Store.ISO(ctx, req.Msg.TenantId, req.Msg.Iso)
	if err != nil {
		return nil, err
	}
	f, err := factsOf(i)
	if err != nil {
		return nil, err
	}
	held, err := s.Store.RemoveISO(ctx, i)
	if err != nil {
		return nil, err
	}
	if len(held) > 0 {
		return nil, apierr.Busy("iso-assigned", "%s may be booted by %s now: better-compute metal boot-disk ends that, or workflow cancel while a workflow runs", i.Name, strings.Join(held, ", "))
	}
	if err := s.Artifacts.Remove(ctx, f.Artifact, isoArch); err != nil && !errors.Is(err, store.ErrNotFound) {
		return nil, err
	}
	return connect.NewResponse(&computev1.RemoveIsoResponse{}), nil
}
