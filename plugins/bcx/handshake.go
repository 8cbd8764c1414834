package bcx

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
)

// Handshake is what a plugin says first on its stdout.
type Handshake struct {
	// Socket is the absolute path that the plugin listens on.
	Socket string
	// Certificate is the plugin's, in DER.
	Certificate []byte
}

// Line is the handshake line, with its newline.
func (h Handshake) Line() (string, error) {
	if err := CheckSocketPath(h.Socket); err != nil {
		return "", err
	}
	if err := checkCertificate(h.Certificate); err != nil {
		return "", err
	}
	line := fmt.Sprintf("bcx|%d|unix|%s|grpc|%s\n", Protocol, h.Socket, base64.RawStdEncoding.EncodeToString(h.Certificate))
	if len(line) > MaxHandshake {
		return "", fmt.Errorf("handshake line has %d bytes, limit %d", len(line), MaxHandshake)
	}
	return line, nil
}

// ParseHandshake reads a handshake line, with or without its newline, and
// requires the socket to lie directly in dir.
func ParseHandshake(line []byte, dir string) (Handshake, error) {
	var h Handshake
	if len(line) > MaxHandshake {
		return h, fmt.Errorf("handshake line is longer than %d bytes", MaxHandshake)
	}
	fields := strings.Split(string(bytes.TrimSuffix(line, []byte("\n"))), "|")
	if len(fields) < 2 || fields[0] != "bcx" {
		return h, errors.New("first line on stdout is not a bcx handshake")
	}
	if fields[1] != "1" {
		return h, fmt.Errorf("plugin speaks bcx protocol %.20q: want 1", fields[1])
	}
	if len(fields) != 6 {
		return h, fmt.Errorf("handshake line has %d fields: want 6", len(fields))
	}
	if fields[2] != "unix" || fields[4] != "grpc" {
		return h, fmt.Errorf("handshake offers %.20q over %.20q: want grpc over unix", fields[4], fields[2])
	}
	h.Socket = fields[3]
	if err := CheckSocketPath(h.Socket); err != nil {
		return h, err
	}
	if filepath.Dir(h.Socket) != filepath.Clean(dir) {
		return h, fmt.Errorf("socket %s does not lie in %s", h.Socket, dir)
	}
	der, err := base64.RawStdEncoding.Strict().DecodeString(fields[5])
	if err != nil {
		return h, fmt.Errorf("certificate in the handshake line: %w", err)
	}
	if err := checkCertificate(der); err != nil {
		return h, err
	}
	h.Certificate = der
	return h, nil
}

// CheckSocketPath refuses a path that no unix socket can have, or that the
// handshake line cannot carry.
func CheckSocketPath(path string) error {
	if len(path) > MaxSocketPath {
		return fmt.Errorf("socket path %s has %d bytes, limit %d", path, len(path), MaxSocketPath)
	}
	if !filepath.IsAbs(path) || filepath.Clean(path) != path || strings.ContainsAny(path, "|\r\n\x00") {
		return fmt.Errorf("socket path %q: want an absolute, clean path without | and line breaks", path)
	}
	return nil
}

func checkCertificate(der []byte) error {
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return fmt.Errorf("plugin's certificate: %w", err)
	}
	key, ok := cert.PublicKey.(*ecdsa.PublicKey)
	if !ok || key.Curve != elliptic.P256() {
		return errors.New("plugin's certificate has no P-256 key")
	}
	return nil
}
