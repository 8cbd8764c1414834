// Package signtest signs EFI programs as sbsign does, for tests of Secure Boot.
package signtest

import (
	"bytes"
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"debug/pe"
	"encoding/asn1"
	"encoding/binary"
	"fmt"
	"math/big"
)

type algorithm struct {
	Algorithm pkix.AlgorithmIdentifier
	Digest    []byte
}

type indirectData struct {
	Data   asn1.RawValue
	Digest algorithm
}

type attribute struct {
	Type   asn1.ObjectIdentifier
	Values []asn1.RawValue `asn1:"set"`
}

type issuerAndSerial struct {
	Issuer asn1.RawValue
	Serial *big.Int
}

type signerInfo struct {
	Version   int
	Name      issuerAndSerial
	Digest    pkix.AlgorithmIdentifier
	Attrs     asn1.RawValue
	Algorithm pkix.AlgorithmIdentifier
	Signature []byte
}

type contentInfo struct {
	Type    asn1.ObjectIdentifier
	Content asn1.RawValue
}

type signedData struct {
	Version      int
	Algorithms   []pkix.AlgorithmIdentifier `asn1:"set"`
	Content      contentInfo
	Certificates asn1.RawValue
	Signers      []signerInfo `asn1:"set"`
}

var (
	oidSignedData    = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 7, 2}
	oidContentType   = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 3}
	oidMessageDigest = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 4}
	oidIndirectData  = asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 311, 2, 1, 4}
	oidPEImage       = asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 311, 2, 1, 15}
	sha256ID         = pkix.AlgorithmIdentifier{Algorithm: asn1.ObjectIdentifier{2, 16, 840, 1, 101, 3, 4, 2, 1}, Parameters: asn1.NullRawValue}
	rsaID            = pkix.AlgorithmIdentifier{Algorithm: asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 1}, Parameters: asn1.NullRawValue}
)

// Sign is the program with a signature after its end. It must be an unsigned one of 64 bits.
func Sign(image []byte, cert *x509.Certificate, key *rsa.PrivateKey) ([]byte, error) {
	out := bytes.Clone(image)
	for len(out)%8 != 0 {
		out = append(out, 0)
	}
	optional := int(binary.LittleEndian.Uint32(out[0x3c:])) + 4 + binary.Size(pe.FileHeader{})
	checksum, directory := optional+64, optional+112+8*4
	if binary.LittleEndian.Uint32(out[directory+4:]) != 0 {
		return nil, fmt.Errorf("sign: it is signed already")
	}
	h := sha256.New()
	h.Write(out[:checksum])
	h.Write(out[checksum+4 : directory])
	h.Write(out[directory+8:])
	der, err := pkcs7(h.Sum(nil), cert, key)
	if err != nil {
		return nil, fmt.Errorf("sign: %w", err)
	}
	for len(der)%8 != 0 {
		der = append(der, 0)
	}
	table := binary.LittleEndian.AppendUint32(nil, uint32(8+len(der)))
	table = binary.LittleEndian.AppendUint16(table, 0x0200)
	table = append(binary.LittleEndian.AppendUint16(table, 2), der...)
	binary.LittleEndian.PutUint32(out[directory:], uint32(len(out)))
	binary.LittleEndian.PutUint32(out[directory+4:], uint32(len(table)))
	return append(out, table...), nil
}

func pkcs7(digest []byte, cert *x509.Certificate, key *rsa.PrivateKey) ([]byte, error) {
	// SpcPeImageData: no flags, and a file link whose text, "<<<Obsolete>>>", is of no use to anybody.
	data, err := peImageData()
	if err != nil {
		return nil, err
	}
	content, err := asn1.Marshal(indirectData{Data: data, Digest: algorithm{sha256ID, digest}})
	if err != nil {
		return nil, err
	}
	var value asn1.RawValue
	if _, err := asn1.Unmarshal(content, &value); err != nil {
		return nil, err
	}
	sum := sha256.Sum256(value.Bytes)
	attrs, err := attributes(sum[:])
	if err != nil {
		return nil, err
	}
	set, err := asn1.Marshal(asn1.RawValue{Class: asn1.ClassUniversal, Tag: asn1.TagSet, IsCompound: true, Bytes: attrs})
	if err != nil {
		return nil, err
	}
	toSign := sha256.Sum256(set)
	signature, err := rsa.SignPKCS1v15(rand.Reader, key, crypto.SHA256, toSign[:])
	if err != nil {
		return nil, err
	}
	signed, err := asn1.Marshal(signedData{
		Version: 1, Algorithms: []pkix.AlgorithmIdentifier{sha256ID},
		Content:      contentInfo{oidIndirectData, inside(content)},
		Certificates: asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: 0, IsCompound: true, Bytes: cert.Raw},
		Signers: []signerInfo{{
			Version: 1, Name: issuerAndSerial{asn1.RawValue{FullBytes: cert.RawIssuer}, cert.SerialNumber}, Digest: sha256ID,
			Attrs:     asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: 0, IsCompound: true, Bytes: attrs},
			Algorithm: rsaID, Signature: signature,
		}},
	})
	if err != nil {
		return nil, err
	}
	return asn1.Marshal(contentInfo{oidSignedData, inside(signed)})
}

// inside is [0] EXPLICIT.
func inside(der []byte) asn1.RawValue {
	return asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: 0, IsCompound: true, Bytes: der}
}

func peImageData() (asn1.RawValue, error) {
	const text = "<<<Obsolete>>>"
	var wide []byte
	for _, r := range text {
		wide = append(wide, 0, byte(r))
	}
	tagged := func(tag int, compound bool, b []byte) []byte {
		der, err := asn1.Marshal(asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: tag, IsCompound: compound, Bytes: b})
		if err != nil {
			panic(err) // it is of constants
		}
		return der
	}
	flags, err := asn1.Marshal(asn1.BitString{})
	if err != nil {
		return asn1.RawValue{}, err
	}
	value, err := asn1.Marshal(struct {
		Flags asn1.RawValue
		File  asn1.RawValue
	}{asn1.RawValue{FullBytes: flags}, asn1.RawValue{FullBytes: tagged(0, true, tagged(2, true, tagged(0, false, wide)))}})
	if err != nil {
		return asn1.RawValue{}, err
	}
	der, err := asn1.Marshal(struct {
		Type  asn1.ObjectIdentifier
		Value asn1.RawValue
	}{oidPEImage, asn1.RawValue{FullBytes: value}})
	return asn1.RawValue{FullBytes: der}, err
}

// attributes are DER's SET OF without its head: sorted, which these two are.
func attributes(sum []byte) ([]byte, error) {
	oid, err := asn1.Marshal(oidIndirectData)
	if err != nil {
		return nil, err
	}
	octets, err := asn1.Marshal(sum)
	if err != nil {
		return nil, err
	}
	var out []byte
	for _, a := range []attribute{
		{oidContentType, []asn1.RawValue{{FullBytes: oid}}},
		{oidMessageDigest, []asn1.RawValue{{FullBytes: octets}}},
	} {
		der, err := asn1.Marshal(a)
		if err != nil {
			return nil, err
		}
		out = append(out, der...)
	}
	return out, nil
}
