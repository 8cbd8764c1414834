package builder

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"

	diskfs "github.com/diskfs/go-diskfs"
	"github.com/diskfs/go-diskfs/partition/gpt"
	"github.com/klauspost/compress/zstd"

	"github.com/better-compute/site-appliance/image/fat"
	"github.com/better-compute/site-appliance/image/layout"
	"github.com/better-compute/site-appliance/image/manifest"
)

// sampleConfig is what BCCONFIG holds before somebody customises the image.
const sampleConfig = `# Configuration of this box. Edit it on any computer; it is read at each start.
# A mistake does not stop the box: it says so on its console and goes on with
# the last good configuration.

# The join string that "better-compute site add" printed.
# join = "bc1.…"

# [uplink]
# interface = "eth0"       # or mac = "…"; without either, the first wired one that gets a lease
# address = "dhcp"         # or "192.0.2.10/24", with gateway and dns

# [[lan]]
# mac = "52:54:00:12:34:56"
# address = "10.0.0.1/24"
# dhcp = "authoritative"
# range = ["10.0.0.100", "10.0.0.199"]
`

// siteDisk writes the box's disk.
func (b *build) siteDisk(image []byte) error {
	l := layout.Site()
	entry, err := layout.EntryName(b.Version, 0)
	if err != nil {
		return err
	}
	loader, err := os.ReadFile(b.board.Boot.Loader)
	if err != nil {
		return fmt.Errorf("read boot loader: %w", err)
	}
	b.source(b.board.Boot.Loader)
	esp := []fat.File{
		{Path: fmt.Sprintf(layout.RemovablePath, b.board.EFI), Content: loader},
		{Path: fmt.Sprintf(layout.LoaderPath, map[string]string{"X64": "x64", "AA64": "aa64"}[b.board.EFI]), Content: loader},
		{Path: layout.LoaderConfPath, Content: []byte(layout.LoaderConf)},
		{Path: layout.EntryDir + "/" + entry, Content: image},
	}
	if !b.Release {
		esp = append(esp, fat.File{Path: layout.RescuePath, Content: []byte(fmt.Sprintf(
			"title Rescue shell\nversion %s\nefi /%s/%s\noptions %s bc.rescue\n", b.Version, layout.EntryDir, entry, b.board.Kernel.Cmdline))})
	}
	return b.writeDisk(filepath.Join(b.Out, SiteImage), l, map[string][]fat.File{
		layout.ESPName:    esp,
		layout.ConfigName: {{Path: layout.ConfigFile, Content: []byte(sampleConfig)}},
	})
}

// nodeDisk writes a node's disk, compressed.
func (b *build) nodeDisk(ctx context.Context, image []byte) error {
	raw := filepath.Join(b.work, "node.raw")
	err := b.writeDisk(raw, layout.Node(), map[string][]fat.File{
		layout.ESPName: {{Path: fmt.Sprintf(layout.RemovablePath, b.board.EFI), Content: image}},
	})
	if err != nil {
		return err
	}
	in, err := os.Open(raw)
	if err != nil {
		return fmt.Errorf("read node image: %w", err)
	}
	defer in.Close()
	to := filepath.Join(b.Out, NodeImage)
	out, err := os.Create(to + ".tmp")
	if err != nil {
		return fmt.Errorf("write node image: %w", err)
	}
	defer os.Remove(out.Name())
	defer out.Close()
	buffered := bufio.NewWriterSize(out, 1<<20)
	enc, err := zstd.NewWriter(buffered, zstd.WithEncoderLevel(zstd.SpeedDefault), zstd.WithEncoderConcurrency(1))
	if err != nil {
		return fmt.Errorf("set up zstd: %w", err)
	}
	h := sha256.New()
	n, err := io.Copy(io.MultiWriter(enc, h), contextReader{ctx, in})
	if err == nil {
		err = enc.Close()
	}
	if err == nil {
		err = buffered.Flush()
	}
	if err == nil {
		err = out.Sync()
	}
	if err == nil {
		err = os.Rename(out.Name(), to)
	}
	if err != nil {
		return fmt.Errorf("pack node image: %w", err)
	}
	st, err := os.Stat(to)
	if err != nil {
		return fmt.Errorf("pack node image: %w", err)
	}
	b.put(manifest.File{Name: NodeImage, UnpackedSize: n, UnpackedSHA256: hex.EncodeToString(h.Sum(nil))})
	return budget("node image", st.Size(), b.board.Budget.NodeImage)
}

// contextReader ends a copy when its context does.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c contextReader) Read(b []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(b)
}

// writeDisk makes a sparse file with the layout's table and file systems, and
// puts it in place when it is complete.
func (b *build) writeDisk(to string, l layout.Disk, files map[string][]fat.File) error {
	tmp := to + ".tmp"
	if err := os.RemoveAll(tmp); err != nil {
		return fmt.Errorf("make disk: %w", err)
	}
	defer os.Remove(tmp)
	if err := partition(tmp, l); err != nil {
		return err
	}
	f, err := os.OpenFile(tmp, os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("make disk: %w", err)
	}
	defer f.Close()
	for _, p := range l.Partitions {
		if p.Label == "" {
			continue
		}
		err := fat.Create(f, fat.Spec{
			Start: p.Start, Size: p.Size, Label: p.Label, Time: b.Built, Files: files[p.Name],
			Serial: p.Serial(),
		})
		if err != nil {
			return err
		}
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync disk: %w", err)
	}
	if err := os.Rename(tmp, to); err != nil {
		return fmt.Errorf("make disk: %w", err)
	}
	return nil
}

// partition makes the file at path with the layout's partition table. A fresh
// file needs none of image/gpt's care for a table that is in use.
func partition(path string, l layout.Disk) error {
	d, err := diskfs.Create(path, l.Size, diskfs.SectorSize512)
	if err != nil {
		return fmt.Errorf("make disk: %w", err)
	}
	table := &gpt.Table{GUID: l.ID.String(), ProtectiveMBR: true, LogicalSectorSize: layout.Sector, PhysicalSectorSize: layout.Sector}
	for i, p := range l.Partitions {
		table.Partitions = append(table.Partitions, &gpt.Partition{
			Index: i + 1, Start: uint64(p.Start / layout.Sector), Size: uint64(p.Size), Type: gpt.Type(p.Type.String()), Name: p.Name, GUID: p.ID.String(),
		})
	}
	err = d.Partition(table)
	if cerr := d.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("write partition table: %w", err)
	}
	return nil
}
