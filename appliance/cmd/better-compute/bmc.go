package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/bmc/probe"
)

func runBMC(ctx context.Context, args []string, std stdio) error {
	return dispatch(ctx, "better-compute bmc", []command{
		{"probe", "look at a BMC, without a credential: its key's pin, vendor and services", bmcProbe},
	}, args, std)
}

func bmcProbe(ctx context.Context, args []string, std stdio) error {
	f := newFlags("bmc probe HOST[:PORT] [--ipmi-port PORT] [--json]", std)
	f.about = "Asks over TLS, Redfish and IPMI what a BMC shows to everybody, from this computer. It sends no credential.\nCompare the pin with what the BMC's own console or its maker says, where the network between is not yours."
	asJSON := f.Bool("json", false, "print the answer as JSON")
	port := f.Uint("ipmi-port", 623, "UDP `port` of IPMI")
	rest, err := f.parse(args, 1, 1)
	if err != nil {
		return err
	}
	if *port < 1 || *port > 65535 {
		return fmt.Errorf("--ipmi-port %d: want 1 to 65535", *port)
	}
	r, err := probe.Probe(ctx, rest[0], probe.Options{IPMIPort: uint16(*port)})
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if *asJSON {
		data, err := json.MarshalIndent(struct {
			*probe.Report
			Enrol string `json:"enroll,omitempty"`
		}{r, r.Enrol()}, "", "  ")
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(std.out, "%s\n", data)
		return answered(r, err)
	}
	for _, line := range probeLines(r) {
		if _, err := fmt.Fprintf(std.out, "%-18s %s\n", line[0], clean(line[1])); err != nil {
			return err
		}
	}
	if enrol := r.Enrol(); enrol != "" {
		if _, err := fmt.Fprintf(std.out, "\n%s\n", enrol); err != nil {
			return err
		}
	}
	return answered(r, nil)
}

// answered makes a BMC that said nothing at all an error.
func answered(r *probe.Report, err error) error {
	if err == nil && r.TLS == nil && r.IPMI == nil {
		return fmt.Errorf("%s answers neither by TLS nor by IPMI: %s", r.Address, strings.Join(r.Problems, "; "))
	}
	return err
}

// probeLines is a report for a person.
func probeLines(r *probe.Report) [][2]string {
	lines := [][2]string{{"address", r.Address}}
	if t := r.TLS; t != nil {
		trusted := "yes"
		if !t.Trusted {
			trusted = "no: " + t.Untrusted
		}
		lines = append(lines, [][2]string{
			{"tls", t.Version + ", " + t.Suite}, {"key pin (SPKI)", t.Pin}, {"subject", t.Subject}, {"issuer", t.Issuer}, {"names", strings.Join(t.Names, ", ")},
			{"valid", day(t.NotBefore) + " to " + day(t.NotAfter)}, {"trusted here", trusted},
		}...)
		if t.Legacy != "" {
			lines = append(lines, [2]string{"legacy", t.Legacy + ": the box refuses it until its site.toml has [[bmc]] address = " + strconv.Quote(r.Address) + ", legacy_tls = true"})
		}
	}
	if f := r.Redfish; f != nil {
		lines = append(lines, [][2]string{
			{"redfish", f.Version}, {"vendor", f.Vendor}, {"product", f.Product}, {"uuid", f.UUID}, {"services", strings.Join(f.Services, ", ")},
		}...)
	}
	if i := r.IPMI; i != nil {
		versions := map[bool]string{true: "2.0 (RMCP+)", false: "no IPMI 2.0: driver ipmi cannot use it"}
		lines = append(lines, [2]string{"ipmi", versions[i.Version2]}, [2]string{"presence ping", map[bool]string{true: "answered", false: "no answer"}[i.Ping]})
		if len(i.Suites) > 0 {
			lines = append(lines, [2]string{"cipher suites", strings.Trim(fmt.Sprint(i.Suites), "[]")})
		}
		for _, w := range i.Weak {
			lines = append(lines, [2]string{"weak", w})
		}
	}
	for _, p := range r.Problems {
		lines = append(lines, [2]string{"not learned", p})
	}
	return lines
}

func day(t time.Time) string { return t.UTC().Format(time.DateOnly) }
