package bmctest

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// Redfish is a running Redfish BMC.
type Redfish struct {
	*chassis
	listener net.Listener
	server   *http.Server
	cancel   context.CancelFunc
	stop     func() bool
	done     chan struct{}

	webConsole *webConsole // nil: none
	serial     *Console

	panics atomic.Int32 // of handlers, which would be faults of the rig

	mu       sync.Mutex
	faults   faultSet
	requests []string
	down     int // requests that get no answer after the BMC restarted
	salt     int // changes every entity tag

	certificate *tls.Certificate // nil until the first connection asks
	rsa         *tls.Certificate // for clients of old TLS

	accounts
	boot     bootState
	power    powerState
	second   bool // the second system has power
	bios     biosState
	secure   secureState
	storage  storageState
	firmware map[string]string // component -> version
	tasks    []*task
	slots    map[string]*slot
	cleared  bool // the event log is empty
	slept    time.Duration
}

// StartRedfish serves Redfish over TLS with a self-signed certificate on
// listen (host:port, port 0 for any free one) until Close or the end of ctx.
func StartRedfish(ctx context.Context, listen, user, password string, m Machine, opts ...Option) (*Redfish, error) {
	o := newOptions(opts)
	if o.certificate == nil {
		cert, err := selfSigned(ecdsaKey)
		if err != nil {
			return nil, fmt.Errorf("start Redfish BMC: %w", err)
		}
		o.certificate = &cert
	}
	listener, err := net.Listen("tcp", listen)
	if err != nil {
		return nil, fmt.Errorf("start Redfish BMC: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	r := &Redfish{
		chassis: newChassis(m, o), listener: listener, cancel: cancel, done: make(chan struct{}),
		faults: newFaultSet(o.faults), certificate: o.certificate, accounts: newAccounts(user, password),
	}
	r.chassis.booting = r.applyAtBoot
	r.serial = newConsole()
	if o.console != nil {
		r.webConsole = &webConsole{WebConsole: *o.console, stale: map[string]bool{}, open: map[net.Conn]bool{}}
	}
	r.server = &http.Server{
		Handler:           r,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       time.Minute,
		TLSConfig:         &tls.Config{GetConfigForClient: r.tls},
		TLSNextProto:      map[string]func(*http.Server, *tls.Conn, http.Handler){}, // BMCs speak HTTP/1.1
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ErrorLog:          slog.NewLogLogger(slog.DiscardHandler, slog.LevelError), // clients that refuse the certificate
	}
	go func() {
		defer close(r.done)
		_ = r.server.ServeTLS(listener, "", "") // ends with Close's error only
	}()
	r.stop = context.AfterFunc(ctx, func() { _ = r.server.Close() })
	return r, nil
}

// tls is the configuration for one connection.
func (r *Redfish) tls(*tls.ClientHelloInfo) (*tls.Config, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	cert, err := r.shown()
	if err != nil {
		return nil, err
	}
	c := &tls.Config{Certificates: []tls.Certificate{*cert}, MinVersion: tls.VersionTLS12}
	if r.faults.on(OldTLS) {
		c.MinVersion, c.MaxVersion = tls.VersionTLS10, tls.VersionTLS10
	}
	if r.faults.on(RSAKeyExchange) {
		c.MinVersion, c.MaxVersion = min(c.MinVersion, tls.VersionTLS12), max(c.MaxVersion, tls.VersionTLS12)
		c.CipherSuites = []uint16{tls.TLS_RSA_WITH_AES_128_GCM_SHA256, tls.TLS_RSA_WITH_AES_128_CBC_SHA}
	}
	return c, nil
}

// shown is the certificate that connections get; the caller holds mu.
func (r *Redfish) shown() (*tls.Certificate, error) {
	if !r.faults.on(OldTLS) && !r.faults.on(RSAKeyExchange) {
		return r.certificate, nil
	}
	if r.rsa == nil {
		cert, err := selfSigned(rsaKey)
		if err != nil {
			return nil, err
		}
		r.rsa = &cert
	}
	return r.rsa, nil
}

func ecdsaKey() (crypto.Signer, error) { return ecdsa.GenerateKey(elliptic.P256(), rand.Reader) }
func rsaKey() (crypto.Signer, error)   { return rsa.GenerateKey(rand.Reader, 2048) }

// selfSigned makes a certificate that names no host, as BMCs ship it.
func selfSigned(newKey func() (crypto.Signer, error)) (tls.Certificate, error) {
	key, err := newKey()
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		Subject:      pkix.Name{CommonName: "bmc"},
		NotBefore:    time.Unix(0, 0),
		NotAfter:     time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, nil
}

// Addr is the BMC's host:port.
func (r *Redfish) Addr() string { return r.listener.Addr().String() }

// SPKI is the pin: hex SHA-256 of the public key of the certificate that
// connections get now; OldTLS and RSAKeyExchange have another one.
func (r *Redfish) SPKI() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	cert, err := r.shown()
	if err != nil {
		return ""
	}
	leaf, err := x509.ParseCertificate(cert.Certificate[0])
	if err != nil {
		return ""
	}
	sum := sha256.Sum256(leaf.RawSubjectPublicKeyInfo)
	return hex.EncodeToString(sum[:])
}

// Requests are the requests so far, such as "GET /redfish/v1/Systems".
func (r *Redfish) Requests() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]string(nil), r.requests...)
}

// Slept is the sum of what Latency asked for so far.
func (r *Redfish) Slept() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.slept
}

// SetFaults replaces what the BMC does wrong.
func (r *Redfish) SetFaults(f ...Fault) {
	set := newFaultSet(f)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.faults, r.down, r.changed = set, 0, false
}

// faulty says whether f is on.
func (r *Redfish) faulty(f Fault) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.faults.on(f)
}

// strike is faulty, and takes one of the times of f.
func (r *Redfish) strike(f Fault) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.faults.strike(f)
}

// Close ends the BMC, not the machine, and waits for what it is doing.
func (r *Redfish) Close() error {
	r.stop()
	r.cancel()
	err := r.server.Close()
	<-r.done
	r.quiesce()
	return err
}
