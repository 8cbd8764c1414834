package metal

import (
	"encoding/json"

	"github.com/better-compute/site-appliance/plugins/driver"
)

// Rotation says whose password changes; no user name: that of the account that
// is logged in with. The passwords are no part of it: they come as the secrets
// password and newPassword.
type Rotation struct {
	Username string `json:"username,omitempty"`
}

// NewPassword is the secret under which a rotation's new password is delivered.
const NewPassword driver.Ref = "newPassword"

// Credentials is the kind "credentials".
type Credentials interface {
	Rotate(*driver.Context, Rotation) error
}

// CredentialsKind is credentials {rotate}.
func CredentialsKind() driver.Kind[Credentials] {
	return driver.Kind[Credentials]{
		Name:       "credentials",
		Operations: map[string]driver.Operation[Credentials]{"rotate": atMostOne(ParseRotation, Credentials.Rotate)},
		Proxy:      func(i *driver.Implementation) Credentials { return credentialsProxy{i} },
	}
}

// ParseRotation reads rotate's argument, {username}.
func ParseRotation(raw json.RawMessage) (Rotation, error) {
	var r Rotation
	if err := strict(raw, &r, "rotation", "username"); err != nil {
		return r, err
	}
	if r.Username == "" {
		return r, nil
	}
	return r, checkName("rotation: username", r.Username, 64)
}

type credentialsProxy struct{ i *driver.Implementation }

func (p credentialsProxy) Rotate(ctx *driver.Context, r Rotation) error {
	return do(p.i, ctx, "rotate", r)
}
