package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent/grants"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/keys"
)

func runGrant(ctx context.Context, args []string, std stdio) error {
	return dispatch(ctx, "better-compute grant", []command{
		{"propose", "ask people to approve destructive work", grantPropose},
		{"list", "list grants", grantList},
		{"show", "print a grant", grantShow},
	}, args, std)
}

// allowed are short words for what --allow takes, and what they mean to a person.
var allowed = []struct{ word, form, means string }{
	{"off", "bmc.power:power.setPower:off", "switch the power off, hard"},
	{"soft", "bmc.power:power.setPower:soft", "ask the system to shut down"},
	{"cycle", "bmc.power:power.setPower:cycle", "cycle the power"},
	{"reset", "bmc.power:power.setPower:reset", "reset the machine"},
	{"nmi", "bmc.power:power.setPower:nmi", "interrupt the machine (NMI)"},
	{"reset-bmc", "bmc.power:management.resetBmc", "restart the BMC"},
	{"bios", "bmc.bios:bios.applySettings", "change BIOS settings"},
	{"bios-reset", "bmc.bios:bios.resetSettings", "reset the BIOS settings"},
	{"raid", "bmc.raid:raid.applyLayout", "change the RAID layout, which can delete what is on the drives"},
	{"rotate", "bmc.rotate:credentials.rotate", "give the BMC's account another password"},
	{"firmware", "bmc.firmware:firmware.update", "write firmware"},
	{"bind", "bmc.bind:bind", "give the BMC's address another credential, pin or driver, and no protection"},
	{"protect", "bmc.bind:bind:protect", "give the BMC's address another credential, pin or driver, and protection"},
	{"forget", "bmc.bind:bind:forget", "forget the BMC's address, with its protection"},
	{"netboot", "pxe.assign:pxe.assign", "boot the machine from the network instead of its disk"},
	{"image", "image.stream:image.stream", "overwrite a disk of the machine with an image"},
	{"wipe", "disk.wipe:disk.wipe", "erase the machine's disks"},
}

// deploy is everything that metal deploy needs, and how often it may switch the
// power off.
const (
	deployWord = "deploy"
	deployUses = 2
)

var deployNeeds = []string{"netboot", "image", "off"}

// parseAllow turns a word, or KIND:OPERATION[:ACTION], into operations.
func parseAllow(text string) ([]*computev1.GrantedOperation, error) {
	if text == deployWord {
		var all []*computev1.GrantedOperation
		for _, word := range deployNeeds {
			one, err := parseAllow(word)
			if err != nil {
				return nil, err
			}
			all = append(all, one...)
		}
		return all, nil
	}
	for _, a := range allowed {
		if a.word == text {
			text = a.form
		}
	}
	parts := strings.Split(text, ":")
	if len(parts) < 2 || len(parts) > 3 || parts[0] == "" || parts[1] == "" {
		words := []string{deployWord}
		for _, a := range allowed {
			words = append(words, a.word)
		}
		return nil, fmt.Errorf("--allow %q: want KIND:OPERATION[:ACTION], or one of %s", text, strings.Join(words, ", "))
	}
	parts = append(parts, "")
	return []*computev1.GrantedOperation{{Kind: parts[0], Operation: parts[1], Action: parts[2]}}, nil
}

func grantPropose(ctx context.Context, args []string, std stdio) error {
	f := newCall("grant propose --allow WHAT [--allow WHAT …] --machine NAME|--pool NAME|--site NAME --bmc DRIVER=ADDRESS --reason TEXT [--uses N] [--for DURATION] [--artifact SHA256 …]", std)
	var what, machines, bmcs, artifacts stringList
	f.Var(&what, "allow", "`what` is allowed: KIND:OPERATION[:ACTION], or a word such as off, cycle, firmware or deploy; may be given several times")
	f.Var(&machines, "machine", "a machine's `name` or id; may be given several times")
	f.Var(&artifacts, "artifact", "hex `SHA-256` of what may be brought along (default: anything); may be given several times")
	pool := f.String("pool", "", "all machines of a pool, by its `name` or id, beside those that are named")
	site := f.String("site", "", "`name` of the site of --bmc")
	f.Var(&bmcs, "bmc", "a BMC that no machine may have any more, as `driver=address`; may be given several times")
	uses := f.Uint("uses", 0, "how `often` for each machine (default 1; 2 with --allow deploy)")
	valid := f.Duration("for", time.Hour, "how long it holds, at most 168h")
	reason := f.String("reason", "", "`why`: approvers read it")
	f.need("allow", "reason")
	_, c, err := f.begin(args, 0, 0)
	if err != nil {
		return err
	}
	if *uses > grants.MaxUses || *valid < time.Second || *valid > grants.MaxLife {
		return fmt.Errorf("grant propose: --uses is at most %d, and --for from 1s to %s", grants.MaxUses, grants.MaxLife)
	}
	if *pool != "" {
		of, err := machinesOf(ctx, c, *pool)
		if err != nil {
			return err
		}
		machines = append(machines, of...)
	}
	if len(machines) == 0 && len(bmcs) == 0 {
		return errors.New("grant propose: --machine, --pool or --bmc says for what")
	}
	req := &computev1.ProposeGrantRequest{
		TenantId: c.tenant, Machines: machines, ArtifactSha256: artifacts, UsesPerTarget: uint32(*uses), ValidS: uint32(valid.Seconds()), Reason: *reason,
	}
	req.Site = *site
	for _, text := range bmcs {
		b, err := parseBMC(text)
		if err != nil {
			return fmt.Errorf("--bmc %w", err)
		}
		req.Bmcs = append(req.Bmcs, b)
	}
	for _, text := range what {
		operations, err := parseAllow(text)
		if err != nil {
			return err
		}
		req.Operations = append(req.Operations, operations...)
		if text == deployWord && *uses == 0 {
			req.UsesPerTarget = deployUses
		}
	}
	res, err := call(ctx, c.grants().Propose, req)
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	fmt.Fprintf(std.err, "%d approvers must agree, each by: better-compute approve %s --key FILE\n", res.Grant.Needed, res.Grant.GrantId)
	_, err = fmt.Fprintln(std.out, res.Grant.GrantId)
	return err
}

// machinesOf are the ids of a pool's machines.
func machinesOf(ctx context.Context, c *client, pool string) ([]string, error) {
	pools, err := call(ctx, c.pools().List, &computev1.ListPoolsRequest{TenantId: c.tenant})
	if err != nil {
		return nil, err
	}
	at := slices.IndexFunc(pools.Items, func(p *computev1.Pool) bool { return p.Id == pool || p.Name == pool })
	if at < 0 {
		return nil, fmt.Errorf("grant propose: there is no pool %q", pool)
	}
	all, err := call(ctx, c.metal().List, &computev1.ListMachinesRequest{TenantId: c.tenant})
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, m := range all.Items {
		if m.PoolId == pools.Items[at].Id {
			ids = append(ids, m.Id)
		}
	}
	return ids, nil
}

// parseBMC reads DRIVER=ADDRESS.
func parseBMC(text string) (*computev1.BmcAddress, error) {
	driver, address, ok := strings.Cut(text, "=")
	if !ok || driver == "" || address == "" {
		return nil, fmt.Errorf("%q: want DRIVER=ADDRESS, such as redfish=10.0.0.5", text)
	}
	return &computev1.BmcAddress{Driver: driver, Address: address}, nil
}

func grantList(ctx context.Context, args []string, std stdio) error {
	f := newCall("grant list", std)
	_, c, err := f.begin(args, 0, 0)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.grants().List, &computev1.ListGrantsRequest{TenantId: c.tenant})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	var rows [][]string
	for _, g := range res.Items {
		terms, err := grants.Parse(g.Payload)
		if err != nil {
			rows = append(rows, []string{g.GrantId, "?", "?", "?", "?", err.Error()})
			continue
		}
		state := fmt.Sprintf("%d of %d", len(g.Approvers), g.Needed)
		var what []string
		for _, o := range terms.Operations {
			what = append(what, formOf(o))
		}
		rows = append(rows, []string{g.GrantId, state, fmt.Sprint(terms.TargetCount), clock(terms.NotAfterMs), strings.Join(what, ","), terms.Reason})
	}
	return printTable(std.out, "GRANT APPROVED TARGETS UNTIL ALLOWS REASON", rows)
}

func grantShow(ctx context.Context, args []string, std stdio) error {
	f := newCall("grant show GRANT", std)
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.grants().Get, &computev1.GetGrantRequest{TenantId: c.tenant, GrantId: rest[0]})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	terms, err := checkRecord(rest[0], res.Grant)
	if err != nil {
		return err
	}
	return describeGrant(std.out, terms, res.Grant, machineNames(ctx, c))
}

// checkRecord reads what is to be signed, and holds what the gateway lists against
// it: the targets that a person reads must be those that the signature covers.
func checkRecord(id string, r *computev1.GrantRecord) (*agentv1.Grant, error) {
	terms, err := grants.Parse(r.GetPayload())
	if err != nil {
		return nil, err
	}
	sorted, err := grants.Sorted(r.GetTargets())
	switch {
	case err != nil:
		return nil, err
	case terms.GetGrantId() != id:
		return nil, errs.New(errs.GrantInvalid, "the gateway answers with grant %s instead of %q: do not sign", terms.GetGrantId(), id)
	case !slices.Equal(sorted, r.GetTargets()) || uint32(len(sorted)) != terms.GetTargetCount() || !bytes.Equal(grants.Root(sorted), terms.GetTargetsRoot()):
		return nil, errs.New(errs.GrantInvalid, "the targets that the gateway lists are not those of the grant %s: do not sign", id)
	}
	return terms, nil
}

// machineNames are what the gateway calls targets: a help to read, and no more.
func machineNames(ctx context.Context, c *client) map[string]string {
	names := map[string]string{}
	res, err := call(ctx, c.metal().List, &computev1.ListMachinesRequest{TenantId: c.tenant})
	if err != nil {
		return names // whoever may approve need not be allowed to list machines
	}
	for _, m := range res.Items {
		names[grants.Machine(m.Id)] = m.Name
		if target := grants.BMC(strings.ToLower(m.GetBmc().GetAddress())); m.GetBmc().GetAddress() != "" {
			names[target] = m.Name
			for _, port := range []string{"443", "623"} {
				names[target+":"+port] = m.Name
			}
		}
	}
	return names
}

func formOf(o *agentv1.GrantOperation) string {
	return strings.TrimSuffix(o.GetKind()+":"+o.GetOperation()+":"+o.GetAction(), ":")
}

// describeGrant prints a grant in words. Everything in it was checked to be
// readable as it is.
func describeGrant(w io.Writer, g *agentv1.Grant, r *computev1.GrantRecord, names map[string]string) error {
	var b strings.Builder
	line := func(head, text string) { fmt.Fprintf(&b, "%-10s %s\n", head, text) }
	line("grant", g.GetGrantId())
	line("reason", g.GetReason())
	for _, o := range g.GetOperations() {
		form, means := formOf(o), "an operation of that name"
		for _, a := range allowed {
			if a.form == form {
				means = a.means
			}
		}
		line("allows", means+"  ("+form+")")
	}
	for _, a := range g.GetArtifactSha256() {
		line("bringing", a)
	}
	if len(g.GetArtifactSha256()) == 0 {
		line("bringing", "any artifact that the operation names")
	}
	line("how often", fmt.Sprintf("%d times for each target", g.GetUsesPerTarget()))
	line("from", clock(g.GetNotBeforeMs()))
	line("until", clock(g.GetNotAfterMs()))
	line("site", g.GetSiteId())
	line("targets", fmt.Sprint(g.GetTargetCount()))
	for _, t := range r.GetTargets() {
		if name := names[t]; name != "" {
			t += "  (the gateway calls it " + clean(name) + ")"
		}
		line("", t)
	}
	line("approved", fmt.Sprintf("by %d of %d", len(r.GetApprovers()), r.GetNeeded()))
	for _, id := range r.GetApprovers() {
		line("", clean(id))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func runApprove(ctx context.Context, args []string, std stdio) error {
	f := newCall("approve GRANT --key FILE [--yes]", std)
	f.about = "Shows a grant, checks that the machines that the gateway lists are those that the signature will cover, and signs it with an approver's key, which stays here."
	path := f.String("key", "", "the approver's key `file`")
	yes := f.Bool("yes", false, "sign without being asked")
	f.need("key")
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	key, err := keys.ReadPrivate(*path)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.grants().Get, &computev1.GetGrantRequest{TenantId: c.tenant, GrantId: rest[0]})
	if err != nil {
		return err
	}
	record := res.Grant
	terms, err := checkRecord(rest[0], record)
	if err != nil {
		return err
	}
	if time.Now().UnixMilli() >= terms.GetNotAfterMs() {
		return errs.New(errs.GrantInvalid, "grant %s ended at %s", rest[0], clock(terms.GetNotAfterMs()))
	}
	if err := describeGrant(std.err, terms, record, machineNames(ctx, c)); err != nil {
		return err
	}
	if !*yes {
		if err := confirm(std, terms.GetTargetCount()); err != nil {
			return err
		}
	}
	signature := grants.Sign(key, record.GetPayload())
	done, err := call(ctx, c.grants().Approve, &computev1.ApproveGrantRequest{
		TenantId: c.tenant, GrantId: rest[0], KeyId: signature.KeyId, Signature: signature.Signature,
	})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, done)
	}
	_, err = fmt.Fprintf(std.out, "signed by %.16s…: %d of %d approvers\n", signature.KeyId, len(done.Grant.Approvers), done.Grant.Needed)
	return err
}

// confirm has a person type how many targets are at stake.
func confirm(std stdio, targets uint32) error {
	fmt.Fprintf(std.err, "Type the number of targets to sign this: ")
	answer, err := bufio.NewReader(io.LimitReader(std.in, 64)).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read the answer: %w", err)
	}
	if strings.TrimSpace(answer) != strconv.FormatUint(uint64(targets), 10) {
		return errors.New("not signed: that is not the number of targets")
	}
	return nil
}
