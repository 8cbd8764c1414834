package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
)

func runArtifact(ctx context.Context, args []string, std stdio) error {
	return dispatch(ctx, "better-compute artifact", []command{
		{"import", "give the gateway an image, a disc or firmware", artifactImport},
		{"list", "list artifacts", artifactList},
	}, args, std)
}

const importChunk = 1 << 20

func artifactImport(ctx context.Context, args []string, std stdio) error {
	f := newCall("artifact import FILE --name NAME [--arch ARCH] [--format raw.zst|raw]", std)
	name := f.String("name", "", "the artifact's `name`")
	arch := f.String("arch", runtime.GOARCH, "the image's `architecture`, amd64 or arm64")
	format := f.String("format", "raw.zst", "the file's `format`: raw.zst, a disk image to deploy, or raw, a disc or firmware for BMCs")
	f.need("name")
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	file, err := os.Open(rest[0])
	if err != nil {
		return fmt.Errorf("import: %w", err)
	}
	defer file.Close()
	stream := c.artifacts().Import(ctx)
	err = stream.Send(&computev1.ImportArtifactRequest{Part: &computev1.ImportArtifactRequest_Header{
		Header: &computev1.ImportHeader{TenantId: c.tenant, Name: *name, Arch: *arch, Format: *format}}})
	buf := make([]byte, importChunk)
	for err == nil {
		n, rerr := io.ReadFull(file, buf)
		if n > 0 {
			err = stream.Send(&computev1.ImportArtifactRequest{Part: &computev1.ImportArtifactRequest_Data{Data: buf[:n]}})
		}
		if rerr == io.EOF || rerr == io.ErrUnexpectedEOF {
			break
		}
		if rerr != nil {
			return fmt.Errorf("import: %w", rerr)
		}
	}
	// A gateway that refuses ends the stream: its reason comes with the answer.
	if err != nil && !errors.Is(err, io.EOF) {
		return plain(err)
	}
	res, err := stream.CloseAndReceive()
	if err != nil {
		return plain(err)
	}
	if f.json {
		return printJSON(std.out, res.Msg)
	}
	return printTable(std.out, artifactHead, [][]string{artifactRow(res.Msg.Artifact)})
}

const artifactHead = "NAME ARCH FORMAT SHA256 BYTES UNPACKED-SHA256 UNPACKED-BYTES"

func artifactRow(a *computev1.Artifact) []string {
	return []string{a.GetName(), a.GetArch(), a.GetFormat(), a.GetSha256(), fmt.Sprint(a.GetSizeBytes()), a.GetUnpackedSha256(), fmt.Sprint(a.GetUnpackedSizeBytes())}
}

func artifactList(ctx context.Context, args []string, std stdio) error {
	f := newCall("artifact list", std)
	_, c, err := f.begin(args, 0, 0)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.artifacts().List, &computev1.ListArtifactsRequest{TenantId: c.tenant})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	var rows [][]string
	for _, a := range res.Items {
		rows = append(rows, artifactRow(a))
	}
	return printTable(std.out, artifactHead, rows)
}
