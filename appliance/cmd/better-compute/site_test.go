package main

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
)

func TestLatestCA(t *testing.T) {
	var pems []string
	for n := range int64(2) {
		public, key, err := ed25519.GenerateKey(nil)
		if err != nil {
			t.Fatal(err)
		}
		template := &x509.Certificate{SerialNumber: big.NewInt(n + 1), IsCA: true, BasicConstraintsValid: true}
		der, err := x509.CreateCertificate(rand.Reader, template, template, public, key)
		if err != nil {
			t.Fatal(err)
		}
		pems = append(pems, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})))
	}
	event := func(name, pem string) *computev1.EventRecord {
		return &computev1.EventRecord{Name: name, BodyJson: `{"pem":"` + strings.ReplaceAll(pem, "\n", `\n`) + `"}`}
	}
	for name, tt := range map[string]struct {
		events []*computev1.EventRecord
		want   string // empty: an error
	}{
		"the newest":         {[]*computev1.EventRecord{event(caEvent, pems[0]), event("other", "x"), event(caEvent, pems[1]), event("other", "x")}, pems[1]},
		"with more around":   {[]*computev1.EventRecord{event(caEvent, `\u001b[2J`+"\n"+pems[0]+`\u001b[2J`)}, pems[0]},
		"none":               {[]*computev1.EventRecord{event("other", pems[0])}, ""},
		"no certificate":     {[]*computev1.EventRecord{event(caEvent, "hello")}, ""},
		"a key":              {[]*computev1.EventRecord{event(caEvent, "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")}, ""},
		"a damaged one last": {[]*computev1.EventRecord{event(caEvent, pems[0]), event(caEvent, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")}, ""},
	} {
		got, err := latestCA(tt.events)
		if got != tt.want || (err == nil) != (tt.want != "") {
			t.Errorf("%s: latestCA = %q, %v, want %q", name, got, err, tt.want)
		}
	}
}
