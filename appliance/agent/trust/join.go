package trust

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/secret"
)

const joinPrefix = "bc1."

// maxJoinBytes bounds a join string: a handful of URLs and five short fields.
const maxJoinBytes = 8 << 10

// Join is what a join string holds: where the gateway is, what to pin, and the
// one-time token to enrol with.
type Join struct {
	URLs []string
	// CASPKI is the SHA-256 of the gateway CA's public key (SubjectPublicKeyInfo).
	CASPKI [32]byte
	// RootSet is the RootSetHash of the roots that sign trust bundles.
	RootSet [32]byte
	SiteID  string
	Token   secret.Value
}

// joinJSON is the form on the wire.
type joinJSON struct {
	URLs    []string `json:"u"`
	CASPKI  []byte   `json:"c"`
	RootSet []byte   `json:"r"`
	SiteID  string   `json:"s"`
	Token   string   `json:"t"`
}

// ParseJoin reads a join string. No error repeats any of its content: the
// token is a secret.
func ParseJoin(s string) (Join, error) {
	s = strings.TrimSpace(s)
	rest, ok := strings.CutPrefix(s, joinPrefix)
	switch {
	case s == "":
		return Join{}, errors.New("join string is empty")
	case !ok:
		return Join{}, fmt.Errorf("join string does not begin with %q", joinPrefix)
	case len(s) > maxJoinBytes:
		return Join{}, fmt.Errorf("join string is longer than %d bytes", maxJoinBytes)
	}
	data, err := base64.RawURLEncoding.Strict().DecodeString(rest)
	if err != nil {
		return Join{}, errors.New("join string is damaged: it is not base64url; was all of it copied?")
	}
	var raw joinJSON
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&raw); err != nil {
		return Join{}, errors.New("join string is damaged: its content is not what this version reads; was all of it copied?")
	}
	if _, err := dec.Token(); err != io.EOF {
		return Join{}, errors.New("join string is damaged: something follows its content")
	}
	switch {
	case len(raw.URLs) == 0:
		return Join{}, errors.New("join string holds no gateway URL")
	case len(raw.CASPKI) != 32:
		return Join{}, errors.New("join string holds no pin of the gateway CA")
	case len(raw.RootSet) != 32:
		return Join{}, errors.New("join string holds no hash of the root set")
	case raw.SiteID == "":
		return Join{}, errors.New("join string holds no site id")
	case raw.Token == "":
		return Join{}, errors.New("join string holds no token")
	}
	for _, u := range raw.URLs {
		if err := CheckURL(u); err != nil {
			return Join{}, fmt.Errorf("join string: %w", err)
		}
	}
	return Join{
		URLs:    raw.URLs,
		CASPKI:  [32]byte(raw.CASPKI),
		RootSet: [32]byte(raw.RootSet),
		SiteID:  raw.SiteID,
		Token:   secret.New([]byte(raw.Token)),
	}, nil
}

// Encode is the join string. It holds the token: treat it as a secret.
func (j Join) Encode() string {
	// A struct of strings and byte slices always encodes.
	data, _ := json.Marshal(joinJSON{j.URLs, j.CASPKI[:], j.RootSet[:], j.SiteID, string(j.Token.Reveal())})
	return joinPrefix + base64.RawURLEncoding.EncodeToString(data)
}

// CheckURL accepts a gateway URL: https, a host, and nothing after the port.
func CheckURL(s string) error {
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return errors.New("gateway URL does not parse")
	case u.Scheme != "https":
		return fmt.Errorf("gateway URL must begin with https://, not %q", u.Scheme)
	case u.Hostname() == "":
		return errors.New("gateway URL has no host")
	case u.User != nil || u.RawQuery != "" || u.Fragment != "" || (u.Path != "" && u.Path != "/"):
		return fmt.Errorf("gateway URL of %s may hold only scheme, host and port", u.Host)
	}
	return nil
}
