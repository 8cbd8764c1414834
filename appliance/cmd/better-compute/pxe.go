package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
)

func runPxe(ctx context.Context, args []string, std stdio) error {
	return dispatch(ctx, "better-compute pxe", []command{
		{"explain", "say what a machine would get from network boot, and what it did", pxeExplain},
	}, args, std)
}

func pxeExplain(ctx context.Context, args []string, std stdio) error {
	f := newCall("pxe explain MAC [--site SITE]", std)
	f.about = "Asks the site's box what each kind of firmware with this MAC would get now, and why; and what the machine did\nin the last hour. A line home is needed; the box answers from what it has."
	site := f.String("site", "", "`site`, by name or id (default: that of the machine with the MAC, or whose box has found it, or the only one)")
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.pxe().Explain, &computev1.ExplainBootRequest{TenantId: c.tenant, Mac: rest[0], Site: *site})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	return printExplained(std.out, res)
}

func printExplained(w io.Writer, res *computev1.ExplainBootResponse) error {
	machine := "no machine that the box knows"
	if res.MachineId != "" {
		machine = strings.TrimSpace(res.Machine + " " + res.MachineId)
	}
	fmt.Fprintf(w, "%s at site %s: %s\n", clean(res.Mac), clean(res.Site), clean(machine))
	fmt.Fprintf(w, "waits for: %s\n\n", clean(res.WaitsFor))
	var rows [][]string
	for _, a := range res.Answers {
		rows = append(rows, []string{a.GetClient(), a.GetProtocol(), a.GetAction(), a.GetFile(), a.GetReason()})
	}
	if err := printTable(w, "CLIENT BY ACTION FILE WHY", rows); err != nil {
		return err
	}
	for i, attempt := range res.Attempts {
		fmt.Fprintf(w, "\nattempt %d, %s on %s\n", i+1, clock(attempt.GetBeganMs()), clean(attempt.GetInterface()))
		rows = nil
		for _, s := range attempt.GetSteps() {
			rows = append(rows, []string{clock(s.GetAtMs()), s.GetStage(), s.GetClient(), s.GetDetail()})
		}
		if err := printTable(w, "AT STAGE CLIENT DETAIL", rows); err != nil {
			return err
		}
	}
	if len(res.Attempts) == 0 {
		fmt.Fprintf(w, "\nno attempt in the last hour\n")
	}
	if len(res.Syslog) > 0 {
		fmt.Fprintf(w, "\nsyslog\n")
	}
	for _, line := range res.Syslog {
		fmt.Fprintf(w, "  %s\n", clean(line))
	}
	return nil
}

// maxExpectFile bounds a list of expected machines.
const maxExpectFile = 1 << 20

func siteUnknown(ctx context.Context, args []string, std stdio) error {
	f := newCall("site unknown SITE [--leave | --inspect [--expect FILE]]", std)
	f.about = "What the site does with machines that boot from the network and that nobody enrolled. Without --leave or\n--inspect it is shown."
	leave := f.Bool("leave", false, "leave them alone")
	inspect := f.Bool("inspect", false, "boot them into the ramdisk, which reports their hardware and does no more")
	expect := f.String("expect", "", "`file` with a MAC or product UUID a line (- for standard input): inspect only these")
	rest, c, err := f.begin(args, 1, 1)
	switch {
	case err != nil:
		return err
	case *leave && *inspect:
		return errors.New("--leave and --inspect exclude each other")
	case *expect != "" && !*inspect:
		return errors.New("--expect goes with --inspect")
	case !*leave && !*inspect:
		res, err := call(ctx, c.sites().GetUnknown, &computev1.GetUnknownRequest{TenantId: c.tenant, Site: rest[0]})
		if err != nil {
			return err
		}
		if f.json {
			return printJSON(std.out, res)
		}
		return printPolicy(std.out, res.Policy)
	}
	policy := &computev1.UnknownPolicy{Inspect: *inspect}
	if *expect != "" {
		data, err := readInput(std, *expect, maxExpectFile)
		if err != nil {
			return fmt.Errorf("read expected machines: %w", err)
		}
		if policy.Expected = expectedOf(string(data)); len(policy.Expected) == 0 {
			return fmt.Errorf("read expected machines: %s names none; without --expect every unknown machine is inspected", *expect)
		}
	}
	res, err := call(ctx, c.sites().SetUnknown, &computev1.SetUnknownRequest{TenantId: c.tenant, Site: rest[0], Policy: policy})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	return printPolicy(std.out, res.Policy)
}

// expectedOf is a file's lines without blank ones and what follows a #.
func expectedOf(text string) []string {
	var out []string
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		if line = strings.TrimSpace(line); line != "" {
			out = append(out, line)
		}
	}
	return out
}

func printPolicy(w io.Writer, p *computev1.UnknownPolicy) error {
	switch {
	case !p.GetInspect():
		fmt.Fprintln(w, "unknown machines are left alone")
	case len(p.GetExpected()) == 0:
		fmt.Fprintln(w, "unknown machines are inspected")
	default:
		fmt.Fprintf(w, "unknown machines are inspected if they are one of %d:\n", len(p.GetExpected()))
		for _, who := range p.GetExpected() {
			fmt.Fprintf(w, "  %s\n", clean(who))
		}
	}
	if p.GetInspect() && p.GetWindowUntilMs() != 0 {
		fmt.Fprintf(w, "a box without a line goes on until %s\n", clock(p.GetWindowUntilMs()))
	}
	if !p.GetTold() {
		_, err := fmt.Fprintln(w, "the site's box does not know yet")
		return err
	}
	return nil
}

func metalFound(ctx context.Context, args []string, std stdio) error {
	f := newCall("metal found [MAC] [--site SITE] [--rejected]", std)
	f.about = "Machines that asked to boot and that nobody enrolled, and the enrolled ones that they seem to be. All of it is the\nmachines' own word. With a MAC, all that is known of that one."
	site := f.String("site", "", "only of this `site`, by name or id")
	rejected := f.Bool("rejected", false, "those too that were rejected")
	rest, c, err := f.begin(args, 0, 1)
	if err != nil {
		return err
	}
	req := &computev1.ListFoundRequest{TenantId: c.tenant, Site: *site, Rejected: *rejected}
	if len(rest) == 1 {
		req.Mac = rest[0]
	}
	res, err := call(ctx, c.metal().ListFound, req)
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	return printFound(std.out, res.Items)
}

func printFound(w io.Writer, items []*computev1.FoundMachine) error {
	var rows [][]string
	for _, m := range items {
		memory, inspected, proposal := "", "", ""
		if n := m.GetMemoryBytes(); n > 0 {
			memory = fmt.Sprintf("%d GiB", (n+1<<29)>>30)
		}
		if at := m.GetInspectedMs(); at != 0 {
			inspected = clock(at)
		}
		for _, p := range m.GetProposals() {
			proposal = p.GetMachine()
		}
		rows = append(rows, []string{m.GetSite(), m.GetMac(), strings.Join(m.GetMacs(), ","), m.GetProductUuid(), strings.TrimSpace(m.GetManufacturer() + " " + m.GetModel()), m.GetSerial(),
			m.GetProcessors(), memory, m.GetIp(), clock(m.GetLastSeenMs()), inspected, proposal})
	}
	if err := printTable(w, "SITE MAC MACS PRODUCT-UUID MAKER SERIAL PROCESSORS MEMORY IP SEEN INSPECTED SEEMS-TO-BE", rows); err != nil {
		return err
	}
	for _, m := range items {
		for _, p := range m.GetProposals() {
			fmt.Fprintf(w, "\n%s seems to be %s: %s. If it is: better-compute metal confirm-mac %s %s\n", clean(m.GetMac()), clean(p.GetMachine()), clean(p.GetReason()), clean(p.GetMachine()), clean(m.GetMac()))
		}
		for _, note := range m.GetNotes() {
			fmt.Fprintf(w, "\n%s: %s\n", clean(m.GetMac()), clean(note))
		}
		if m.GetHardwareJson() != "" {
			fmt.Fprintf(w, "\n%s\n", clean(m.GetHardwareJson()))
		}
	}
	return nil
}

func metalConfirmMAC(ctx context.Context, args []string, std stdio) error {
	f := newCall("metal confirm-mac MACHINE MAC [--unseen]", std)
	f.about = "Says that a MAC is the machine's: it network-boots by it from now on. What claims to be a machine can get what\nthat machine boots: compare serial number and ports where the LAN is not yours alone."
	unseen := f.Bool("unseen", false, "take a MAC that the site's box has not seen")
	rest, c, err := f.begin(args, 2, 2)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.metal().ConfirmMac, &computev1.ConfirmMacRequest{TenantId: c.tenant, Machine: rest[0], Mac: rest[1], Unseen: *unseen})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	_, err = fmt.Fprintf(std.err, "%s boots by %s\n", clean(res.Machine.GetName()), clean(strings.Join(res.Machine.GetMacs(), ", ")))
	return err
}

func metalRejectMAC(ctx context.Context, args []string, std stdio) error {
	f := newCall("metal reject-mac MAC [--site SITE]", std)
	f.about = "Keeps a found machine out of the list: it is none of yours."
	site := f.String("site", "", "`site` that has found it, by name or id, where several have")
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.metal().RejectMac, &computev1.RejectMacRequest{TenantId: c.tenant, Site: *site, Mac: rest[0]})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	_, err = fmt.Fprintf(std.err, "%s is not listed any more\n", clean(rest[0]))
	return err
}
