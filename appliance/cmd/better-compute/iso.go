package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
)

func runISO(ctx context.Context, args []string, std stdio) error {
	return dispatch(ctx, "better-compute iso", []command{
		{"add", "give the catalog a disc image", isoAdd},
		{"list", "list disc images", isoList},
		{"show", "show a disc image, what it needs and who may boot it", isoShow},
		{"remove", "remove a disc image that no machine may boot now", isoRemove},
	}, args, std)
}

// nameOf is a file's own name in the form that the catalog takes.
func nameOf(path string) string {
	return strings.TrimLeft(strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9', r == '.', r == '_', r == '-':
			return r
		}
		return '-'
	}, strings.TrimSuffix(strings.ToLower(filepath.Base(path)), ".iso")), ".-_")
}

func isoAdd(ctx context.Context, args []string, std stdio) error {
	f := newCall("iso add FILE [--name NAME] [--class self-contained|refetches|needs-drive]", std)
	f.about = "The gateway looks at the image: how it boots, and what it needs once its kernel runs and the firmware's disc is gone.\n" +
		"self-contained: all of it is in memory by then. refetches: it fetches itself again if its command line says from where.\nneeds-drive: it looks for a real or a virtual drive."
	name := f.String("name", "", "the image's `name` (default: the file's, without .iso)")
	class := f.String("class", "", "what it `needs`, where you know better than the gateway")
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	if *name == "" {
		*name = nameOf(rest[0])
	}
	if strings.Contains(rest[0], "://") {
		return fmt.Errorf("iso add: %s is a URL: want a file of this computer, fetched from there", rest[0])
	}
	file, err := os.Open(rest[0])
	if err != nil {
		return fmt.Errorf("iso add: %w", err)
	}
	defer file.Close()
	stream := c.isos().Add(ctx)
	err = stream.Send(&computev1.AddIsoRequest{Part: &computev1.AddIsoRequest_Header{Header: &computev1.AddIsoHeader{TenantId: c.tenant, Name: *name, Class: *class}}})
	buf := make([]byte, importChunk)
	for err == nil {
		n, rerr := io.ReadFull(file, buf)
		if n > 0 {
			err = stream.Send(&computev1.AddIsoRequest{Part: &computev1.AddIsoRequest_Data{Data: buf[:n]}})
		}
		if rerr == io.EOF || rerr == io.ErrUnexpectedEOF {
			break
		}
		if rerr != nil {
			return fmt.Errorf("iso add: %w", rerr)
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
	return showISO(std, res.Msg.Iso, nil)
}

func firmwares(i *computev1.Iso) string {
	var by []string
	if i.GetBios() {
		by = append(by, "bios")
	}
	if i.GetUefi() {
		by = append(by, strings.TrimSpace("uefi "+strings.Join(i.GetUefiArchs(), " ")))
	}
	if len(by) == 0 {
		return "nothing"
	}
	return strings.Join(by, ", ")
}

func showISO(std stdio, i *computev1.Iso, machines []string) error {
	class := i.GetClass()
	if i.GetClassGiven() {
		class += " (as you said)"
	}
	lines := [][2]string{
		{"name", i.GetName()}, {"sha256", i.GetSha256()}, {"bytes", fmt.Sprint(i.GetSizeBytes())}, {"label", i.GetLabel()}, {"what it is", i.GetLayout()},
		{"class", class}, {"boots by", firmwares(i)},
	}
	if p := i.GetParameters(); p != "" {
		lines = append(lines, [2]string{"refetches by", p})
	}
	for _, n := range i.GetNotes() {
		lines = append(lines, [2]string{"note", n})
	}
	if len(machines) > 0 {
		lines = append(lines, [2]string{"machines", strings.Join(machines, ", ")})
	}
	for _, line := range lines {
		if _, err := fmt.Fprintf(std.out, "%-12s %s\n", line[0], clean(line[1])); err != nil {
			return err
		}
	}
	return nil
}

func isoList(ctx context.Context, args []string, std stdio) error {
	f := newCall("iso list", std)
	_, c, err := f.begin(args, 0, 0)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.isos().List, &computev1.ListIsosRequest{TenantId: c.tenant})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	var rows [][]string
	for _, i := range res.Items {
		rows = append(rows, []string{i.Name, i.Class, firmwares(i), fmt.Sprint(i.SizeBytes), i.Label, i.Sha256})
	}
	return printTable(std.out, "NAME CLASS BOOTS-BY BYTES LABEL SHA256", rows)
}

func isoShow(ctx context.Context, args []string, std stdio) error {
	f := newCall("iso show NAME", std)
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.isos().Get, &computev1.GetIsoRequest{TenantId: c.tenant, Iso: rest[0]})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	return showISO(std, res.Iso, res.Machines)
}

func isoRemove(ctx context.Context, args []string, std stdio) error {
	f := newCall("iso remove NAME", std)
	f.about = "Refused while a machine may boot the image. A BMC's virtual drive that holds it loses it."
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	_, err = call(ctx, c.isos().Remove, &computev1.RemoveIsoRequest{TenantId: c.tenant, Iso: rest[0]})
	return err
}
