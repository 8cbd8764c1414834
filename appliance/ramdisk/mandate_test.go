package ramdisk

import (
	"crypto/ed25519"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/agenttest"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/pxe/mandate"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

type signer struct{ key ed25519.PrivateKey }

func (s signer) KeyID() string                   { return trust.KeyID(s.key.Public().(ed25519.PublicKey)) }
func (s signer) Sign(msg []byte) ([]byte, error) { return ed25519.Sign(s.key, msg), nil }

// TestOrders: what the gateway signed for this machine and this window is allowed,
// and nothing beside it.
func TestOrders(t *testing.T) {
	a, stranger := agenttest.NewAuthority(t), agenttest.NewAuthority(t)
	bundle := a.Bundle(t, nil)
	voucherOf := func(machine, window string) []byte {
		payload, err := proto.Marshal(&agentv1.Voucher{MachineId: machine, WindowId: window})
		if err != nil {
			t.Fatal(err)
		}
		data, err := proto.Marshal(&agentv1.SignedVoucher{Payload: payload})
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	sign := func(key ed25519.PrivateKey, machine, purpose, window string) []byte {
		data, err := mandate.Sign(signer{key}, &pxev1.Assignment{MachineId: machine, Purpose: purpose, WindowId: window})
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	widened := func() []byte { // another payload under the signature of the first
		var one, two pxev1.SignedAssignment
		if proto.Unmarshal(sign(a.Command, "m", "inspect", "w1"), &one) != nil || proto.Unmarshal(sign(a.Command, "m", "deploy", "w1"), &two) != nil {
			t.Fatal("not decoded")
		}
		one.Payload = two.Payload
		data, _ := proto.Marshal(&one)
		return data
	}()
	for name, tt := range map[string]struct {
		assignment []byte
		kind       string
		want       errs.Code // empty: allowed
	}{
		"deploy streams":      {sign(a.Command, "m", "deploy", "w1"), "image.stream", ""},
		"deploy wipes":        {sign(a.Command, "m", "deploy", "w1"), "disk.wipe", ""},
		"wipe wipes":          {sign(a.Command, "m", "wipe", "w1"), "disk.wipe", ""},
		"wipe streams":        {sign(a.Command, "m", "wipe", "w1"), "image.stream", errs.OperationNotAllowed},
		"inspect streams":     {sign(a.Command, "m", "inspect", "w1"), "image.stream", errs.OperationNotAllowed},
		"inspect wipes":       {sign(a.Command, "m", "inspect", "w1"), "disk.wipe", errs.OperationNotAllowed},
		"another purpose":     {sign(a.Command, "m", "later", "w1"), "image.stream", errs.OperationNotAllowed},
		"none":                {nil, "image.stream", errs.OperationNotAllowed},
		"another machine's":   {sign(a.Command, "n", "deploy", "w1"), "image.stream", errs.OperationNotAllowed},
		"another window's":    {sign(a.Command, "m", "deploy", "w2"), "image.stream", errs.OperationNotAllowed},
		"a stranger's key":    {sign(stranger.Command, "m", "deploy", "w1"), "image.stream", errs.KeyUnknown},
		"a root's key":        {sign(a.Root, "m", "deploy", "w1"), "image.stream", errs.KeyUnknown},
		"widened by its host": {widened, "image.stream", errs.SignatureInvalid},
		"noise":               {[]byte("noise"), "image.stream", errs.InvalidPayload},
	} {
		o := &orders{assignment: tt.assignment, voucher: voucherOf("m", "w1"), bundle: func() *trust.Bundle { return bundle }}
		if err := o.allow(tt.kind, "m"); errs.CodeOf(err) != tt.want || (err == nil) != (tt.want == "") {
			t.Errorf("%s: allow = %v, want %q", name, err, tt.want)
		}
	}
	early := &orders{bundle: func() *trust.Bundle { return nil }}
	if err := early.allow("image.stream", "m"); errs.CodeOf(err) != errs.NotEnrolled {
		t.Errorf("before enrolment: allow = %v, want %s", err, errs.NotEnrolled)
	}
}

// TestPurposeHoldsOnTheWire: a machine that was booted to be inspected is not
// written to, even by a command that the gateway signed; one for a deploy is, and
// then tells the box.
func TestPurposeHoldsOnTheWire(t *testing.T) {
	l := newLab(t, func(l *lab) { l.purpose = "inspect" })
	req := l.request()
	req.Seed = nil
	if r := l.command(t, "cmd_1", req); r.GetError().GetCode() != string(errs.OperationNotAllowed) {
		t.Errorf("image.stream for inspect = %v, want %s", r, errs.OperationNotAllowed)
	}
	l = newLab(t)
	req = l.request()
	req.Seed = nil
	if r := l.command(t, "cmd_1", req); r.GetError() != nil {
		t.Fatalf("image.stream for deploy = %v", r)
	}
	var told []string
	for len(l.posts) > 0 {
		told = append(told, <-l.posts)
	}
	if len(told) != 2*postTries || told[0] != "progress" || told[len(told)-1] != "done" {
		t.Errorf("the box was told %q, want progress and then done, %d times each as it fails", told, postTries)
	}
}
