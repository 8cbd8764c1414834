package trust

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

const voucherDomain = "bettercompute.voucher.v1\x00"

// maxVoucherBytes bounds a voucher's payload.
const maxVoucherBytes = 4 << 10

// SignVoucher signs a boot window's voucher with the site agent's own key.
func SignVoucher(key *ecdsa.PrivateKey, siteAgentID string, v *agentv1.Voucher) (*agentv1.SignedVoucher, error) {
	if err := checkVoucher(v); err != nil {
		return nil, err
	}
	payload, err := proto.MarshalOptions{Deterministic: true}.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode voucher: %w", err)
	}
	digest := voucherDigest(payload)
	signature, err := ecdsa.SignASN1(rand.Reader, key, digest[:])
	if err != nil {
		return nil, fmt.Errorf("sign voucher: %w", err)
	}
	return &agentv1.SignedVoucher{Payload: payload, SiteAgentId: siteAgentID, Signature: signature}, nil
}

// VerifyVoucher checks a voucher with the key of the site agent that it names.
// Box, window, nonce and time are the caller's to judge.
func VerifyVoucher(key *ecdsa.PublicKey, s *agentv1.SignedVoucher) (*agentv1.Voucher, error) {
	if n := len(s.GetPayload()); n == 0 || n > maxVoucherBytes {
		return nil, errs.New(errs.InvalidPayload, "voucher of %d bytes; 1 to %d are allowed", n, maxVoucherBytes)
	}
	if key == nil || key.Curve != elliptic.P256() {
		return nil, errs.New(errs.KeyUnknown, "vouchers are signed with P-256 keys")
	}
	digest := voucherDigest(s.GetPayload())
	if !ecdsa.VerifyASN1(key, digest[:], s.GetSignature()) {
		return nil, errs.New(errs.SignatureInvalid, "the voucher's signature is not its site agent's")
	}
	v := new(agentv1.Voucher)
	if err := envelope.StrictUnmarshal(s.GetPayload(), v); err != nil {
		return nil, fmt.Errorf("voucher: %w", err)
	}
	if err := checkVoucher(v); err != nil {
		return nil, err
	}
	return v, nil
}

func checkVoucher(v *agentv1.Voucher) error {
	switch {
	case v.GetMachineId() == "":
		return errs.New(errs.InvalidPayload, "voucher: machine_id is missing")
	case v.GetWindowId() == "":
		return errs.New(errs.InvalidPayload, "voucher: window_id is missing")
	case len(v.GetBootNonce()) < 16 || len(v.GetBootNonce()) > 64:
		return errs.New(errs.InvalidPayload, "voucher: boot_nonce must be 16 to 64 bytes")
	case v.GetNotAfterMs() <= v.GetIssuedAtMs():
		return errs.New(errs.InvalidPayload, "voucher: not_after must lie after issued_at")
	}
	return nil
}

func voucherDigest(payload []byte) [32]byte {
	return sha256.Sum256(append([]byte(voucherDomain), payload...))
}
