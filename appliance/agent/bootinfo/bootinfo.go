// Package bootinfo is what a box hands to a machine that it network-boots: how
// to reach the gateway through the box, and the voucher to enrol with. It
// travels as one file of an appended initrd, never on a kernel command line.
package bootinfo

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// Path is where the file lies in the booted machine.
const Path = "/etc/bc/boot.json"

// Info is the file's content. Byte slices are base64 in JSON.
type Info struct {
	MachineID string `json:"machine_id"`
	SiteID    string `json:"site_id"`
	// GatewayURLs are the gateway's own; TLS is verified against them.
	GatewayURLs []string `json:"gateway_urls"`
	// Via is host:port on the box that passes a connection through to the gateway.
	Via string `json:"via"`
	// CASPKI is the SHA-256 of the gateway CA's public key, RootSet the hash of the root set.
	CASPKI  []byte `json:"ca_spki"`
	RootSet []byte `json:"root_set"`
	// Artifacts is the URL prefix under which the box serves artifacts by SHA-256.
	Artifacts string `json:"artifacts"`
	// Report is the URL prefix on the box under which the machine posts "progress"
	// and "done"; empty: nowhere.
	Report string `json:"report,omitempty"`
	// Assignment is an encoded pxev1.SignedAssignment: what the machine was booted
	// for. Without one it does nothing that destroys.
	Assignment []byte `json:"assignment,omitempty"`
	// Voucher is an encoded agentv1.SignedVoucher.
	Voucher []byte `json:"voucher"`
}

// Parse reads the file strictly.
func Parse(data []byte) (Info, error) {
	var info Info
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&info); err != nil {
		return Info{}, fmt.Errorf("parse %s: %w", Path, err)
	}
	switch {
	case info.MachineID == "":
		return Info{}, fmt.Errorf("parse %s: machine_id is missing", Path)
	case len(info.GatewayURLs) == 0:
		return Info{}, fmt.Errorf("parse %s: gateway_urls is empty", Path)
	case len(info.CASPKI) != 32 || len(info.RootSet) != 32:
		return Info{}, fmt.Errorf("parse %s: ca_spki and root_set must be 32 bytes each", Path)
	case len(info.Voucher) == 0:
		return Info{}, fmt.Errorf("parse %s: voucher is missing", Path)
	}
	return info, nil
}
