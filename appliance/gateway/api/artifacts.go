package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/artifacts"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

type artifactService struct{ *API }

var (
	artifactName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,127}$`)
	hexDigest    = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// Import takes in an artifact's bytes. Artifacts are every tenant's: a digest
// names the same bytes for all. A name's meaning is for the tenant to change
// that gave it first: another's deploys go by it.
func (s artifactService) Import(ctx context.Context, stream *connect.ClientStream[computev1.ImportArtifactRequest]) (*connect.Response[computev1.ImportArtifactResponse], error) {
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
	switch {
	case !artifactName.MatchString(header.Name) || hexDigest.MatchString(header.Name):
		return nil, apierr.Invalid("name %q: want lower-case letters, digits, '.', '_' and '-', and no digest", header.Name)
	case header.Arch != "amd64" && header.Arch != "arm64":
		return nil, apierr.Invalid("arch %q: want amd64 or arm64", header.Arch)
	case header.Format != artifacts.Packed && header.Format != artifacts.Plain:
		return nil, apierr.Cannot("image-format-unsupported", "format %q: only raw.zst is served, and raw to BMCs", header.Format)
	}
	if err := s.Store.ClaimArtifactName(ctx, header.Name, header.TenantId); errors.Is(err, store.ErrConflict) {
		return nil, apierr.Taken("the artifact name %s is another tenant's", header.Name)
	} else if err != nil {
		return nil, err
	}
	artifact, err := s.Artifacts.Import(ctx, header.Name, header.Arch, header.Format, &streamReader[computev1.ImportArtifactRequest]{what: "artifact", stream: stream, data: func(m *computev1.ImportArtifactRequest) ([]byte, bool) {
		_, ok := m.Part.(*computev1.ImportArtifactRequest_Data)
		return m.GetData(), ok
	}})
	if e := (*errs.Error)(nil); errors.As(err, &e) && e.Code == errs.InvalidArgs {
		return nil, apierr.Invalid("%s", e.Message)
	}
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.ImportArtifactResponse{Artifact: wireArtifact(artifact)}), nil
}

// streamReader is the bytes of the messages after the header.
type streamReader[M any] struct {
	what   string
	stream *connect.ClientStream[M]
	data   func(*M) (data []byte, ok bool)
	rest   []byte
}

func (r *streamReader[M]) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		if !r.stream.Receive() {
			if err := r.stream.Err(); err != nil {
				return 0, fmt.Errorf("receive %s: %w", r.what, err)
			}
			return 0, io.EOF
		}
		var ok bool
		if r.rest, ok = r.data(r.stream.Msg()); !ok {
			return 0, apierr.Invalid("only the first message may be a header")
		}
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// List tells the artifacts by name.
func (s artifactService) List(ctx context.Context, _ *connect.Request[computev1.ListArtifactsRequest]) (*connect.Response[computev1.ListArtifactsResponse], error) {
	artifacts, err := s.Store.Artifacts(ctx)
	if err != nil {
		return nil, err
	}
	res := &computev1.ListArtifactsResponse{}
	for _, artifact := range artifacts {
		if strings.HasPrefix(artifact.Name, isoPrefix) {
			continue // the catalog of its tenant lists it
		}
		res.Items = append(res.Items, wireArtifact(artifact))
	}
	return connect.NewResponse(res), nil
}

func wireArtifact(a store.Artifact) *computev1.Artifact {
	return &computev1.Artifact{Name: a.Name, Arch: a.Arch, Format: a.Format, Sha256: a.SHA256, SizeBytes: a.SizeBytes, UnpackedSha256: a.UnpackedSHA256, UnpackedSizeBytes: a.UnpackedSizeBytes}
}
