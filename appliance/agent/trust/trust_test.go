package trust_test

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"io"
	"math/big"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
)

var now = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func root(n int) ed25519.PrivateKey {
	return ed25519.NewKeyFromSeed([]byte(fmt.Sprintf("%032d", n)))
}

func public(keys ...ed25519.PrivateKey) (out [][]byte) {
	for _, k := range keys {
		out = append(out, k.Public().(ed25519.PublicKey))
	}
	return out
}

type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t testing.TB) authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "gateway CA"},
		NotBefore: now, NotAfter: now.AddDate(10, 0, 0),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return authority{cert, key}
}

func (a authority) leaf(t testing.TB, usage x509.ExtKeyUsage) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "gateway"},
		NotBefore: now.Add(-time.Hour), NotAfter: now.AddDate(1, 0, 0),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"gw.example"},
		ExtKeyUsage: []x509.ExtKeyUsage{usage},
	}, a.cert, key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der, a.cert.Raw}, PrivateKey: key}
}

func bundle(ca authority, version uint64, threshold uint32, roots ...ed25519.PrivateKey) *agentv1.TrustBundle {
	return &agentv1.TrustBundle{
		Version: version, IssuedAtMs: now.UnixMilli(), ValidUntilMs: now.AddDate(1, 0, 0).UnixMilli(),
		Roots: public(roots...), RootThreshold: threshold,
		CommandKeys: public(root(100)),
		GatewayCas:  [][]byte{ca.cert.Raw}, GatewayUrls: []string{"https://127.0.0.1:7443"},
	}
}

func sign(t testing.TB, b *agentv1.TrustBundle, keys ...ed25519.PrivateKey) *agentv1.SignedBundle {
	t.Helper()
	s, err := trust.SignBundle(b, keys...)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestRootSetHash(t *testing.T) {
	a, b := public(root(1))[0], public(root(2))[0]
	if trust.RootSetHash([][]byte{a, b}, 1) != trust.RootSetHash([][]byte{b, a, b}, 1) {
		t.Error("RootSetHash depends on order or repetition")
	}
	if trust.RootSetHash([][]byte{a, b}, 1) == trust.RootSetHash([][]byte{a, b}, 2) {
		t.Error("RootSetHash does not depend on the threshold")
	}
	if trust.RootSetHash([][]byte{a, b}, 1) == trust.RootSetHash([][]byte{a}, 1) {
		t.Error("RootSetHash does not depend on the roots")
	}
}

func TestVerifyFirst(t *testing.T) {
	ca := newAuthority(t)
	r1, r2, r3 := root(1), root(2), root(3)
	pin := trust.RootSetHash(public(r1, r2, r3), 2)
	good := func() *agentv1.TrustBundle { return bundle(ca, 1, 2, r1, r2, r3) }
	for name, test := range map[string]struct {
		signed *agentv1.SignedBundle
		at     time.Time
		want   errs.Code
	}{
		"two of three":           {sign(t, good(), r1, r3), now, ""},
		"all three":              {sign(t, good(), r1, r2, r3), now, ""},
		"one of three":           {sign(t, good(), r1), now, errs.SignatureInvalid},
		"one that signed twice":  {sign(t, good(), r1, r1), now, errs.SignatureInvalid},
		"a stranger":             {sign(t, good(), r1, root(9)), now, errs.SignatureInvalid},
		"other threshold":        {sign(t, bundle(ca, 1, 1, r1, r2, r3), r1), now, errs.KeyUnknown},
		"other roots":            {sign(t, bundle(ca, 1, 2, r1, r2, root(9)), r1, root(9)), now, errs.KeyUnknown},
		"expired":                {sign(t, good(), r1, r2), now.AddDate(1, 0, 0), errs.Expired},
		"clock in the past":      {sign(t, good(), r1, r2), now.AddDate(-5, 0, 0), ""},
		"nothing":                {nil, now, errs.InvalidPayload},
		"signature of no bundle": {&agentv1.SignedBundle{Payload: []byte{1}}, now, errs.InvalidPayload},
	} {
		b, err := trust.VerifyFirst(pin, test.signed, test.at)
		if got := errs.CodeOf(err); got != test.want {
			t.Errorf("%s: VerifyFirst = %v, want code %q", name, err, test.want)
		}
		if (b != nil) != (test.want == "") {
			t.Errorf("%s: VerifyFirst bundle = %v with error %v", name, b, err)
		}
	}
	flipped := sign(t, good(), r1, r2)
	flipped.Signatures[1].Signature[0] ^= 1
	if _, err := trust.VerifyFirst(pin, flipped, now); errs.CodeOf(err) != errs.SignatureInvalid {
		t.Errorf("VerifyFirst(flipped bit) = %v, want signature-invalid", err)
	}
}

func TestVerifyNext(t *testing.T) {
	ca := newAuthority(t)
	r1, r2, r3, r4 := root(1), root(2), root(3), root(4)
	first, err := trust.VerifyFirst(trust.RootSetHash(public(r1, r2), 2), sign(t, bundle(ca, 1, 2, r1, r2), r1, r2), now)
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		signed *agentv1.SignedBundle
		want   errs.Code
	}{
		"same roots":             {sign(t, bundle(ca, 2, 2, r1, r2), r1, r2), ""},
		"rotated, both signed":   {sign(t, bundle(ca, 2, 2, r3, r4), r1, r2, r3, r4), ""},
		"only the new signed":    {sign(t, bundle(ca, 2, 2, r3, r4), r3, r4), errs.SignatureInvalid},
		"only the old signed":    {sign(t, bundle(ca, 2, 2, r3, r4), r1, r2), errs.SignatureInvalid},
		"lower threshold, alone": {sign(t, bundle(ca, 2, 1, r1, r2), r1), errs.SignatureInvalid},
		"same version":           {sign(t, bundle(ca, 1, 2, r1, r2), r1, r2), errs.InvalidPayload},
		"skips a version":        {sign(t, bundle(ca, 3, 2, r1, r2), r1, r2), errs.InvalidPayload},
	} {
		next, err := first.VerifyNext(test.signed, now)
		if got := errs.CodeOf(err); got != test.want {
			t.Errorf("%s: VerifyNext = %v, want code %q", name, err, test.want)
		}
		if (next != nil) != (test.want == "") {
			t.Errorf("%s: VerifyNext bundle = %v with error %v", name, next, err)
		}
	}
}

func TestSignBundleRefusesBadShapes(t *testing.T) {
	ca := newAuthority(t)
	for name, change := range map[string]func(b *agentv1.TrustBundle){
		"no version":          func(b *agentv1.TrustBundle) { b.Version = 0 },
		"threshold 0":         func(b *agentv1.TrustBundle) { b.RootThreshold = 0 },
		"threshold over keys": func(b *agentv1.TrustBundle) { b.RootThreshold = 2 },
		"root twice":          func(b *agentv1.TrustBundle) { b.Roots = append(b.Roots, b.Roots[0]) },
		"short key":           func(b *agentv1.TrustBundle) { b.CommandKeys[0] = b.CommandKeys[0][:31] },
		"no command key":      func(b *agentv1.TrustBundle) { b.CommandKeys = nil },
		"approvers without k": func(b *agentv1.TrustBundle) { b.ApproverKeys = public(root(5)) },
		"no CA":               func(b *agentv1.TrustBundle) { b.GatewayCas = nil },
		"CA that is no CA": func(b *agentv1.TrustBundle) {
			b.GatewayCas = [][]byte{ca.leaf(t, x509.ExtKeyUsageServerAuth).Certificate[0]}
		},
		"no URL":               func(b *agentv1.TrustBundle) { b.GatewayUrls = nil },
		"plain http":           func(b *agentv1.TrustBundle) { b.GatewayUrls = []string{"http://gw.example"} },
		"ends before it began": func(b *agentv1.TrustBundle) { b.ValidUntilMs = b.IssuedAtMs },
	} {
		b := bundle(ca, 1, 1, root(1))
		change(b)
		if _, err := trust.SignBundle(b, root(1)); errs.CodeOf(err) != errs.InvalidPayload {
			t.Errorf("%s: SignBundle = %v, want invalid-payload", name, err)
		}
	}
}

func TestBundleContent(t *testing.T) {
	ca := newAuthority(t)
	content := bundle(ca, 1, 1, root(1))
	content.ApproverKeys, content.ApproverThreshold = public(root(5)), 1
	signed := sign(t, content, root(1))
	b, err := trust.Restore(signed)
	if err != nil {
		t.Fatal(err)
	}
	if b.QuorumInForce() {
		t.Error("QuorumInForce() with one approver = true, want false")
	}
	content.ApproverKeys = public(root(5), root(6))
	if b, err = trust.Restore(sign(t, content, root(1))); err != nil || !b.QuorumInForce() {
		t.Errorf("QuorumInForce() with two approvers = false (%v), want true", err)
	}
	for i, key := range public(root(5), root(6)) {
		if got, ok := b.ApproverKey(trust.KeyID(key)); !ok || !slices.Equal(got, key) || !slices.Contains(b.Approvers(), trust.KeyID(key)) {
			t.Errorf("ApproverKey(%d) = %x, %v", i, got, ok)
		}
	}
	if _, ok := b.ApproverKey(trust.KeyID(public(root(100))[0])); ok {
		t.Error("ApproverKey(the command key's id) = found, want not: a gateway approves nothing")
	}
	if n := b.ApproverThreshold(); n != 1 {
		t.Errorf("ApproverThreshold() = %d, want 1", n)
	}
	for _, tt := range []struct {
		policy      *agentv1.QuorumPolicy
		short, long int
	}{{nil, 5, 20}, {&agentv1.QuorumPolicy{Targets_10M: 2}, 2, 20}, {&agentv1.QuorumPolicy{Targets_24H: 7}, 5, 7}} {
		content.Quorum = tt.policy
		c, err := trust.Restore(sign(t, content, root(1)))
		if err != nil {
			t.Fatal(err)
		}
		if short, long := c.QuorumTargets(); short != tt.short || long != tt.long {
			t.Errorf("QuorumTargets() of %v = %d, %d, want %d, %d", tt.policy, short, long, tt.short, tt.long)
		}
	}
	key := public(root(100))[0]
	if got, ok := b.CommandKey(trust.KeyID(key)); !ok || !slices.Equal(got, key) {
		t.Errorf("CommandKey(known) = %x, %v", got, ok)
	}
	if _, ok := b.CommandKey(trust.KeyID(public(root(1))[0])); ok {
		t.Error("CommandKey(a root's id) = found, want not: roots sign no commands")
	}
	if _, err := trust.Restore(sign(t, content)); errs.CodeOf(err) != errs.SignatureInvalid {
		t.Errorf("Restore(unsigned) = %v, want signature-invalid", err)
	}
}

func TestJoin(t *testing.T) {
	want := trust.Join{
		URLs: []string{"https://gw.example:7443", "https://10.0.0.1:7443"}, CASPKI: [32]byte{1}, RootSet: [32]byte{2},
		SiteID: "site_1", Token: secret.New([]byte("tok-4711")),
	}
	text := want.Encode()
	got, err := trust.ParseJoin(" " + text + "\n")
	if err != nil {
		t.Fatal(err)
	}
	if got.Encode() != text || string(got.Token.Reveal()) != "tok-4711" || got.SiteID != "site_1" || got.CASPKI != want.CASPKI {
		t.Errorf("ParseJoin(Encode()) = %+v, want %+v", got, want)
	}
	if printed := fmt.Sprintf("%v %+v", got, got); strings.Contains(printed, "4711") {
		t.Errorf("a printed Join shows its token: %s", printed)
	}
	plain := want
	plain.URLs = []string{"http://gw.example"}
	pathed := want
	pathed.URLs = []string{"https://gw.example/x"}
	empty := want
	empty.Token = secret.Value{}
	for _, bad := range []string{
		"", "bc2." + text[4:], text[:len(text)-5], text + "=", text[:20] + "*" + text[21:], "bc1.e30",
		plain.Encode(), pathed.Encode(), empty.Encode(), "bc1." + strings.Repeat("a", 9000),
	} {
		if _, err := trust.ParseJoin(bad); err == nil {
			t.Errorf("ParseJoin(%.40q) = nil, want an error", bad)
		} else if strings.Contains(err.Error(), "4711") {
			t.Errorf("ParseJoin's error shows the token: %v", err)
		}
	}
}

func TestVoucher(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	other, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	want := &agentv1.Voucher{MachineId: "node_1", WindowId: "win_1", Purpose: "deploy", BootNonce: make([]byte, 16), IssuedAtMs: 1, NotAfterMs: 2}
	s, err := trust.SignVoucher(key, "ag_box", want)
	if err != nil {
		t.Fatal(err)
	}
	got, err := trust.VerifyVoucher(&key.PublicKey, s)
	if err != nil || !proto.Equal(got, want) || s.SiteAgentId != "ag_box" {
		t.Errorf("VerifyVoucher(signed) = %v, %v, want %v", got, err, want)
	}
	if _, err := trust.VerifyVoucher(&other.PublicKey, s); errs.CodeOf(err) != errs.SignatureInvalid {
		t.Errorf("VerifyVoucher(other key) = %v, want signature-invalid", err)
	}
	s.Payload[2] ^= 1
	if _, err := trust.VerifyVoucher(&key.PublicKey, s); errs.CodeOf(err) != errs.SignatureInvalid {
		t.Errorf("VerifyVoucher(flipped bit) = %v, want signature-invalid", err)
	}
	want.BootNonce = want.BootNonce[:8]
	if _, err := trust.SignVoucher(key, "ag_box", want); errs.CodeOf(err) != errs.InvalidPayload {
		t.Errorf("SignVoucher(short nonce) = %v, want invalid-payload", err)
	}
}

// TestTLS makes real handshakes with the pin and with the bundle.
func TestTLS(t *testing.T) {
	ca, other := newAuthority(t), newAuthority(t)
	pin := trust.SPKI(ca.cert)
	b, err := trust.Restore(sign(t, bundle(ca, 1, 1, root(1)), root(1)))
	if err != nil {
		t.Fatal(err)
	}
	at := func(when time.Time) trust.Judge {
		return func(notBefore time.Time) time.Time {
			if notBefore.After(when) {
				return notBefore
			}
			return when
		}
	}
	good := ca.leaf(t, x509.ExtKeyUsageServerAuth)
	mixed := other.leaf(t, x509.ExtKeyUsageServerAuth)
	mixed.Certificate[1] = ca.cert.Raw // shows the pinned CA without being signed by it
	bare := good
	bare.Certificate = good.Certificate[:1]
	for name, test := range map[string]struct {
		server tls.Certificate
		client *tls.Config
		ok     bool
	}{
		"pinned, by address":             {good, trust.PinnedTLS(pin, "127.0.0.1", at(now)), true},
		"pinned, by name":                {good, trust.PinnedTLS(pin, "gw.example", at(now)), true},
		"pinned, clock in 1970":          {good, trust.PinnedTLS(pin, "127.0.0.1", at(time.Unix(0, 0))), true},
		"pinned, other address":          {good, trust.PinnedTLS(pin, "127.0.0.2", at(now)), false},
		"pinned, other name":             {good, trust.PinnedTLS(pin, "evil.example", at(now)), false},
		"pinned, leaf is over":           {good, trust.PinnedTLS(pin, "127.0.0.1", at(now.AddDate(2, 0, 0))), false},
		"pinned, other CA":               {other.leaf(t, x509.ExtKeyUsageServerAuth), trust.PinnedTLS(pin, "127.0.0.1", at(now)), false},
		"pinned, other CA's leaf":        {mixed, trust.PinnedTLS(pin, "127.0.0.1", at(now)), false},
		"pinned, an agent's certificate": {ca.leaf(t, x509.ExtKeyUsageClientAuth), trust.PinnedTLS(pin, "127.0.0.1", at(now)), false},
		"pinned, no CA shown":            {bare, trust.PinnedTLS(pin, "127.0.0.1", at(now)), false},
		"bundle":                         {good, b.TLS("127.0.0.1", at(now)), true},
		"bundle, other address":          {good, b.TLS("127.0.0.2", at(now)), false},
		"bundle, other CA":               {other.leaf(t, x509.ExtKeyUsageServerAuth), b.TLS("127.0.0.1", at(now)), false},
	} {
		err := handshake(test.server, test.client)
		if (err == nil) != test.ok {
			t.Errorf("%s: handshake = %v, want ok %v", name, err, test.ok)
		}
	}
}

// handshake goes over a real socket: a pipe without a buffer would block both
// ends when each has an alert to send.
func handshake(server tls.Certificate, client *tls.Config) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer l.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		raw, err := l.Accept()
		if err != nil {
			return
		}
		defer raw.Close()
		raw.SetDeadline(time.Now().Add(10 * time.Second))
		s := tls.Server(raw, &tls.Config{Certificates: []tls.Certificate{server}, NextProtos: []string{"h2"}})
		if s.Handshake() == nil {
			s.Write([]byte("x"))
		}
	}()
	raw, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return err
	}
	raw.SetDeadline(time.Now().Add(10 * time.Second))
	c := tls.Client(raw, client)
	if err = c.Handshake(); err == nil {
		_, err = io.ReadFull(c, make([]byte, 1))
	}
	raw.Close()
	<-done
	return err
}

func FuzzParseJoin(f *testing.F) {
	f.Add(trust.Join{URLs: []string{"https://gw.example"}, SiteID: "s", Token: secret.New([]byte("t"))}.Encode())
	f.Add("bc1.")
	f.Fuzz(func(t *testing.T, s string) {
		j, err := trust.ParseJoin(s)
		if err != nil {
			return
		}
		again, err := trust.ParseJoin(j.Encode())
		if err != nil || again.Encode() != j.Encode() {
			t.Errorf("ParseJoin(Encode(%q)) = %v, %v", s, again, err)
		}
	})
}

func FuzzRestore(f *testing.F) {
	data, err := proto.Marshal(sign(f, bundle(newAuthority(f), 1, 1, root(1)), root(1)))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Fuzz(func(t *testing.T, data []byte) {
		s := new(agentv1.SignedBundle)
		if proto.Unmarshal(data, s) != nil {
			return
		}
		if b, err := trust.Restore(s); (b == nil) == (err == nil) {
			t.Errorf("Restore = %v, %v", b, err)
		}
	})
}

func FuzzVerifyVoucher(f *testing.F) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		f.Fatal(err)
	}
	f.Add([]byte{1}, []byte{2})
	f.Fuzz(func(t *testing.T, payload, signature []byte) {
		if v, err := trust.VerifyVoucher(&key.PublicKey, &agentv1.SignedVoucher{Payload: payload, Signature: signature}); err == nil {
			t.Errorf("VerifyVoucher(%x) = %v, want an error", payload, v)
		}
	})
}
