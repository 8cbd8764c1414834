package metal

import (
	"encoding/json"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// DeployImage is what goes onto a disk. The digests are lower-case hex.
type DeployImage struct {
	// Format is raw or raw.zst.
	Format string `json:"format"`
	// URL is where the bytes are; empty: the driver knows by the digest.
	URL               string `json:"url,omitempty"`
	SHA256            string `json:"sha256"`
	SizeBytes         uint64 `json:"sizeBytes"`
	UnpackedSHA256    string `json:"unpackedSha256,omitempty"`
	UnpackedSizeBytes uint64 `json:"unpackedSizeBytes,omitempty"`
}

// DeployDisk names exactly one disk, by its serial number.
type DeployDisk struct {
	Serial string `json:"serial"`
}

// DeploySpec is deploy's argument.
type DeploySpec struct {
	Image DeployImage `json:"image"`
	Disk  DeployDisk  `json:"disk"`
	// UserData becomes the machine's first-boot configuration; it holds no secret.
	UserData string `json:"userData,omitempty"`
}

// Deployed is what deploy answers.
type Deployed struct {
	Disk         string `json:"disk"`
	SHA256       string `json:"sha256"`
	BytesWritten uint64 `json:"bytesWritten"`
}

// Deployer is the kind "deploy". Progress counts bytes.
type Deployer interface {
	Deploy(*driver.Context, DeploySpec) (Deployed, error)
}

// DeployKind is deploy {deploy}.
func DeployKind() driver.Kind[Deployer] {
	return driver.Kind[Deployer]{
		Name:       "deploy",
		Operations: map[string]driver.Operation[Deployer]{"deploy": driver.Ask(ParseDeploySpec, Deployer.Deploy)},
		Proxy:      func(i *driver.Implementation) Deployer { return deployProxy{i} },
	}
}

// ParseDeploySpec reads deploy's argument, {image, disk; userData}.
func ParseDeploySpec(raw json.RawMessage) (DeploySpec, error) {
	var s DeploySpec
	if err := strict(raw, &s, "deploy", "image", "disk", "userData"); err != nil {
		return s, err
	}
	m := s.Image
	if err := checkDigest("deploy: image: sha256", m.SHA256); err != nil {
		return s, err
	}
	switch {
	case m.Format != "raw" && m.Format != "raw.zst":
		return s, errs.New(errs.InvalidArgs, "deploy: image: format %.40q: want raw or raw.zst", m.Format)
	case m.SizeBytes == 0:
		return s, errs.New(errs.InvalidArgs, "deploy: image: sizeBytes: want at least 1")
	case m.Format == "raw.zst" && (m.UnpackedSHA256 == "" || m.UnpackedSizeBytes == 0):
		return s, errs.New(errs.InvalidArgs, "deploy: image: format raw.zst wants unpackedSha256 and unpackedSizeBytes")
	case len(s.UserData) > 64<<10:
		return s, errs.New(errs.InvalidArgs, "deploy: userData: %d bytes, limit %d", len(s.UserData), 64<<10)
	}
	if m.UnpackedSHA256 != "" {
		if err := checkDigest("deploy: image: unpackedSha256", m.UnpackedSHA256); err != nil {
			return s, err
		}
	}
	if m.URL != "" {
		if err := checkURL("deploy: image: url", m.URL, "http", "https"); err != nil {
			return s, err
		}
	}
	return s, checkName("deploy: disk: serial", s.Disk.Serial, 128)
}

type deployProxy struct{ i *driver.Implementation }

func (p deployProxy) Deploy(ctx *driver.Context, s DeploySpec) (Deployed, error) {
	return ask[Deployed](p.i, ctx, "deploy", s)
}
