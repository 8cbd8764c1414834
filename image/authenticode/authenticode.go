// Package authenticode reads the signatures by which UEFI's Secure Boot and shim judge an EFI program.
package authenticode

import (
	"bytes"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"debug/pe"
	"encoding/asn1"
	"encoding/binary"
	"errors"
	"fmt"
	"math/big"
)

// Signature is one that was made over the program that carries it.
type Signature struct {
	// Issuer and Serial name the signer's certificate.
	Issuer string
	Serial *big.Int
	// Signer is that certificate, where the signature brings it along.
	Signer *x509.Certificate
}

// ErrUnsigned says that a program carries no signature.
var ErrUnsigned = errors.New("it is not signed")

// Of are the signatures of a program, each with a digest of these very bytes and
// under its certificate's key, where it brings that along. Whether anybody trusts
// the certificate is not judged.
func Of(image []byte) ([]Signature, error) {
	l, err := read(image)
	if err != nil {
		return nil, err
	}
	if l.certs == len(image) {
		return nil, ErrUnsigned
	}
	digest := l.digest(image)
	var out []Signature
	for rest := image[l.certs:l.end]; len(rest) >= 8; {
		n := int(binary.LittleEndian.Uint32(rest))
		kind := binary.LittleEndian.Uint16(rest[6:])
		if n < 8 || n > len(rest) {
			return nil, errors.New("the table of certificates is torn")
		}
		if kind == pkcs7Kind {
			s, err := parse(rest[8:n], digest)
			if err != nil {
				return nil, fmt.Errorf("signature %d: %w", len(out)+1, err)
			}
			out = append(out, s)
		}
		rest = rest[min((n+7)&^7, len(rest)):]
	}
	if len(out) == 0 {
		return nil, ErrUnsigned
	}
	return out, nil
}

// pkcs7Kind is WIN_CERT_TYPE_PKCS_SIGNED_DATA.
const pkcs7Kind = 2

// layout is where the parts are that no digest holds.
type layout struct {
	checksum, directory int // the header's checksum, and its entry for the certificates
	certs, end          int // the certificates; both are the image's end where there are none
}

const securityDirectory = 4

func read(image []byte) (layout, error) {
	f, err := pe.NewFile(bytes.NewReader(image))
	if err != nil {
		return layout{}, fmt.Errorf("no EFI program: %w", err)
	}
	if len(image) < 0x40 {
		return layout{}, errors.New("no EFI program")
	}
	optional := int(binary.LittleEndian.Uint32(image[0x3c:])) + 4 + binary.Size(pe.FileHeader{})
	l := layout{checksum: optional + 64}
	var dir pe.DataDirectory
	switch h := f.OptionalHeader.(type) {
	case *pe.OptionalHeader64:
		l.directory = optional + 112 + 8*securityDirectory
		dir = h.DataDirectory[securityDirectory]
	case *pe.OptionalHeader32:
		l.directory = optional + 96 + 8*securityDirectory
		dir = h.DataDirectory[securityDirectory]
	default:
		return layout{}, errors.New("no EFI program: the optional header is missing")
	}
	l.certs, l.end = len(image), len(image)
	if dir.Size > 0 {
		l.certs = int(dir.VirtualAddress)
		l.end = l.certs + int(dir.Size)
	}
	if l.checksum < optional || l.directory+8 > l.certs || l.certs > l.end || l.end > len(image) {
		return layout{}, errors.New("the table of certificates lies outside of the program")
	}
	return l, nil
}

// digest is over all but the checksum, the directory's entry and the certificates.
func (l layout) digest(image []byte) []byte {
	h := sha256.New()
	h.Write(image[:l.checksum])
	h.Write(image[l.checksum+4 : l.directory])
	h.Write(image[l.directory+8 : l.certs])
	h.Write(image[l.end:])
	return h.Sum(nil)
}

var (
	oidSignedData    = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 7, 2}
	oidMessageDigest = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 4}
	oidIndirectData  = asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 311, 2, 1, 4}
	oidSHA256        = asn1.ObjectIdentifier{2, 16, 840, 1, 101, 3, 4, 2, 1}
)

type contentInfo struct {
	Type    asn1.ObjectIdentifier
	Content asn1.RawValue `asn1:"explicit,optional,tag:0"`
}

type signedData struct {
	Version      int
	Algorithms   asn1.RawValue // a SET
	Content      contentInfo
	Certificates asn1.RawValue `asn1:"optional,tag:0"`
	CRLs         asn1.RawValue `asn1:"optional,tag:1"`
	Signers      []signerInfo  `asn1:"set"`
}

type signerInfo struct {
	Version   int
	Name      issuerAndSerial
	Digest    pkix.AlgorithmIdentifier
	Attrs     asn1.RawValue `asn1:"optional,tag:0"`
	Algorithm pkix.AlgorithmIdentifier
	Signature []byte
	Unsigned  asn1.RawValue `asn1:"optional,tag:1"`
}

type issuerAndSerial struct {
	Issuer asn1.RawValue
	Serial *big.Int
}

type attribute struct {
	Type   asn1.ObjectIdentifier
	Values asn1.RawValue // a SET
}

// indirectData is SpcIndirectDataContent.
type indirectData struct {
	Data   asn1.RawValue
	Digest struct {
		Algorithm pkix.AlgorithmIdentifier
		Digest    []byte
	}
}

func parse(der, digest []byte) (Signature, error) {
	var outer contentInfo
	if _, err := asn1.Unmarshal(der, &outer); err != nil || !outer.Type.Equal(oidSignedData) {
		return Signature{}, fmt.Errorf("no PKCS #7 signature: %w", err)
	}
	var signed signedData
	if _, err := asn1.Unmarshal(outer.Content.Bytes, &signed); err != nil {
		return Signature{}, fmt.Errorf("no PKCS #7 signature: %w", err)
	}
	if !signed.Content.Type.Equal(oidIndirectData) || len(signed.Signers) != 1 {
		return Signature{}, errors.New("it is not over a program, or not of one signer")
	}
	var about indirectData
	if _, err := asn1.Unmarshal(signed.Content.Content.Bytes, &about); err != nil {
		return Signature{}, fmt.Errorf("what it is about: %w", err)
	}
	if !about.Digest.Algorithm.Algorithm.Equal(oidSHA256) || !bytes.Equal(about.Digest.Digest, digest) {
		return Signature{}, errors.New("it is over another program")
	}
	signer := signed.Signers[0]
	var name pkix.RDNSequence
	if _, err := asn1.Unmarshal(signer.Name.Issuer.FullBytes, &name); err != nil {
		return Signature{}, fmt.Errorf("the signer's name: %w", err)
	}
	out := Signature{Issuer: name.String(), Serial: signer.Name.Serial}
	certs, err := x509.ParseCertificates(signed.Certificates.Bytes)
	if err != nil {
		return Signature{}, fmt.Errorf("its certificates: %w", err)
	}
	for _, c := range certs {
		if bytes.Equal(c.RawIssuer, signer.Name.Issuer.FullBytes) && c.SerialNumber.Cmp(out.Serial) == 0 {
			out.Signer = c
		}
	}
	if err := signer.check(signed.Content.Content.Bytes, out.Signer); err != nil {
		return Signature{}, err
	}
	return out, nil
}

// check holds the signed attributes against what is signed, and the signature
// against its certificate.
func (s signerInfo) check(content []byte, cert *x509.Certificate) error {
	var value asn1.RawValue // its tag and length are not signed
	if _, err := asn1.Unmarshal(content, &value); err != nil {
		return fmt.Errorf("what it is about: %w", err)
	}
	sum := sha256.Sum256(value.Bytes)
	found := false
	for rest := s.Attrs.Bytes; len(rest) > 0; {
		var a attribute
		var err error
		if rest, err = asn1.Unmarshal(rest, &a); err != nil {
			return fmt.Errorf("its attributes: %w", err)
		}
		if !a.Type.Equal(oidMessageDigest) {
			continue
		}
		var got []byte
		if _, err := asn1.Unmarshal(a.Values.Bytes, &got); err != nil || !bytes.Equal(got, sum[:]) {
			return errors.New("its attributes are not about what it holds")
		}
		found = true
	}
	if !found || !s.Digest.Algorithm.Equal(oidSHA256) {
		return errors.New("its attributes hold no SHA-256")
	}
	if cert == nil {
		return nil
	}
	if err := cert.CheckSignature(x509.SHA256WithRSA, attributesToSign(s.Attrs.Bytes), s.Signature); err != nil {
		return fmt.Errorf("its certificate's key did not make it: %w", err)
	}
	return nil
}

// attributesToSign are the attributes with the tag that is signed, a SET's.
func attributesToSign(attrs []byte) []byte {
	der, err := asn1.Marshal(asn1.RawValue{Class: asn1.ClassUniversal, Tag: asn1.TagSet, IsCompound: true, Bytes: attrs})
	if err != nil {
		return nil // no signature is over it
	}
	return der
}
