package metal

import (
	"encoding/json"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// ArtifactScheme begins, in the place of a URL, a reference to what a site serves
// its machines itself, by name or SHA-256: the site puts a URL there.
const ArtifactScheme = "artifact://"

// Media is what is in a machine's virtual drive.
type Media struct {
	Inserted bool `json:"inserted"`
	// Image is the URL that was inserted, where the BMC tells it.
	Image string `json:"image,omitempty"`
}

// VirtualMedia is the kind "virtual-media". Inserting what is inserted and
// ejecting nothing are no errors.
type VirtualMedia interface {
	Insert(ctx *driver.Context, iso string) error
	Eject(*driver.Context) error
}

// MediaStatuser is virtual-media's optional status.
type MediaStatuser interface {
	Status(*driver.Context) (Media, error)
}

// VirtualMediaKind is virtual-media {insert, eject; status}.
func VirtualMediaKind() driver.Kind[VirtualMedia] {
	return driver.Kind[VirtualMedia]{
		Name: "virtual-media",
		Operations: map[string]driver.Operation[VirtualMedia]{
			"insert": driver.Set(ParseISO, VirtualMedia.Insert),
			"eject":  driver.Do(VirtualMedia.Eject),
			"status": driver.Optional[VirtualMedia](driver.Get(MediaStatuser.Status)),
		},
		Proxy: func(i *driver.Implementation) VirtualMedia { return mediaProxy{i} },
	}
}

// ParseISO reads insert's argument: the URL of an image that the BMC fetches.
func ParseISO(raw json.RawMessage) (string, error) {
	var iso string
	if json.Unmarshal(raw, &iso) != nil {
		return "", errs.New(errs.InvalidArgs, "image is not a string")
	}
	return iso, checkURL("image", iso, "http", "https", "nfs", "cifs", "smb")
}

type mediaProxy struct{ i *driver.Implementation }

func (p mediaProxy) Insert(ctx *driver.Context, iso string) error { return do(p.i, ctx, "insert", iso) }
func (p mediaProxy) Eject(ctx *driver.Context) error              { return do(p.i, ctx, "eject") }
func (p mediaProxy) Status(ctx *driver.Context) (Media, error) {
	return ask[Media](p.i, ctx, "status")
}
