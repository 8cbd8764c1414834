package main

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
)

func runSite(ctx context.Context, args []string, std stdio) error {
	return dispatch(ctx, "better-compute site", []command{
		{"add", "add a site and print its box's join string", siteAdd},
		{"list", "list sites and their boxes", siteList},
		{"unknown", "say what happens to machines that nobody enrolled", siteUnknown},
		{"ca", "print the CA that a site's BMCs need for media from its box", siteCA},
		{"forget-bmc", "have a site's box forget a BMC's address", siteForgetBMC},
		{"http", "make one HTTP request from a site's box", siteHTTP},
	}, args, std)
}

// siteAdd prints nothing but the join string on standard output, so that it
// can go straight into a file.
func siteAdd(ctx context.Context, args []string, std stdio) error {
	f := newCall("site add NAME", std)
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.sites().Add, &computev1.AddSiteRequest{TenantId: c.tenant, Name: rest[0]})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	fmt.Fprintf(std.err, "site %s (%s) added; its join string holds a one-time token: keep it in a file of mode 0600 until the box has enrolled\n", res.Site.GetName(), res.Site.GetId())
	_, err = fmt.Fprintln(std.out, res.JoinString)
	return err
}

func siteList(ctx context.Context, args []string, std stdio) error {
	f := newCall("site list", std)
	_, c, err := f.begin(args, 0, 0)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.sites().List, &computev1.ListSitesRequest{TenantId: c.tenant})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	var rows [][]string
	for _, s := range res.Items {
		rows = append(rows, []string{s.Name, s.Id, s.State, s.AgentId, s.Version, clock(s.LastSeenMs), strings.Join(s.Drivers, ",")})
	}
	return printTable(std.out, "NAME ID STATE AGENT VERSION LAST-SEEN DRIVERS", rows)
}

// caEvent is how a box tells its CA, at each start and every day; searched is how
// many of a site's events are looked through for it.
const (
	caEvent  = "site.media_ca"
	searched = 1000
)

func siteCA(ctx context.Context, args []string, std stdio) error {
	f := newCall("site ca NAME", std)
	f.about = "Prints a certificate in PEM, to be loaded into the BMCs of the site: with it they verify the box that\nserves them discs and firmware (artifact://NAME)."
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.events().List, &computev1.ListEventsRequest{TenantId: c.tenant, Site: rest[0], Limit: searched})
	if err != nil {
		return err
	}
	text, err := latestCA(res.Items)
	if err != nil {
		return fmt.Errorf("site %s: %w", rest[0], err)
	}
	if f.json {
		return printJSON(std.out, &computev1.EventRecord{Name: caEvent, BodyJson: text})
	}
	_, err = fmt.Fprint(std.out, text)
	return err
}

// latestCA is the newest CA among events, as this program writes PEM: what a box
// put around it is not repeated.
func latestCA(events []*computev1.EventRecord) (string, error) {
	for _, e := range slices.Backward(events) {
		var body struct {
			PEM string `json:"pem"`
		}
		if e.Name != caEvent || json.Unmarshal([]byte(e.BodyJson), &body) != nil {
			continue
		}
		block, _ := pem.Decode([]byte(body.PEM))
		if block == nil || block.Type != "CERTIFICATE" {
			return "", errors.New("what its box told as its CA is no certificate")
		}
		if _, err := x509.ParseCertificate(block.Bytes); err != nil {
			return "", fmt.Errorf("what its box told as its CA is no certificate: %w", err)
		}
		return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: block.Bytes})), nil
	}
	return "", fmt.Errorf("its box has not told its CA in the last %d events; it does so at each start and every day", searched)
}
