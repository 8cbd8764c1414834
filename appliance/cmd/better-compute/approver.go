package main

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/gateway/keys"
)

func runApprover(ctx context.Context, args []string, std stdio) error {
	return dispatch(ctx, "better-compute approver", []command{
		{"keygen", "make an approver's key", approverKeygen},
		{"show", "print the public key of an approver's key", approverShow},
	}, args, std)
}

func approverKeygen(_ context.Context, args []string, std stdio) error {
	f := newFlags("approver keygen --out FILE", std)
	f.about = "Makes the key by which a person approves destructive work, on that person's own machine: the file never leaves it. Prints the public key, which gateway bundle add-approver takes."
	out := f.String("out", "", "the `file` to make")
	f.need("out")
	if _, err := f.parse(args, 0, 0); err != nil {
		return err
	}
	public, err := keys.NewApprover(*out)
	if err != nil {
		return err
	}
	return printApprover(std, public)
}

func approverShow(_ context.Context, args []string, std stdio) error {
	rest, err := newFlags("approver show FILE", std).parse(args, 1, 1)
	if err != nil {
		return err
	}
	key, err := keys.ReadPrivate(rest[0])
	if err != nil {
		return err
	}
	return printApprover(std, key.Public().(ed25519.PublicKey))
}

func printApprover(std stdio, public ed25519.PublicKey) error {
	fmt.Fprintf(std.err, "key id %s\n", trust.KeyID(public))
	_, err := fmt.Fprintln(std.out, keys.PublicText(public))
	return err
}

func gatewayBundle(ctx context.Context, args []string, std stdio) error {
	return dispatch(ctx, "better-compute gateway bundle", []command{
		{"show", "print whom boxes obey", bundleShow},
		{"add-approver", "let people approve destructive work", bundleAdd},
		{"remove-approver", "take that right from people", bundleRemove},
		{"set", "say how many must agree, and from how many targets on", bundleSet},
	}, args, std)
}

func bundleShow(_ context.Context, args []string, std stdio) error {
	f := newFlags("gateway bundle show --dir DIR", std)
	dir := f.String("dir", "", "the gateway's `folder`")
	f.need("dir")
	if _, err := f.parse(args, 0, 0); err != nil {
		return err
	}
	b, content, err := keys.Bundle(*dir, time.Now())
	if err != nil {
		return err
	}
	in10m, in24h := b.QuorumTargets()
	fmt.Fprintf(std.out, "version %d, valid until %s\n", b.Version(), clock(content.GetValidUntilMs()))
	for _, id := range b.Approvers() {
		fmt.Fprintf(std.out, "approver %s\n", id)
	}
	if !b.QuorumInForce() {
		_, err = fmt.Fprintf(std.out, "%d approvers: boxes ask for no grants before there are two\n", len(b.Approvers()))
		return err
	}
	_, err = fmt.Fprintf(std.out, "%d approvers must agree from %d targets in 10 minutes or %d in 24 hours on, and always for what cannot be undone\n", b.ApproverThreshold(), in10m, in24h)
	return err
}

// bundleChange has the options of what makes the next trust bundle.
type bundleChange struct {
	*flags
	dir                         *string
	roots                       stringList
	threshold, in10m, in24hours *uint
}

func newBundleChange(usage string, std stdio) *bundleChange {
	c := &bundleChange{flags: newFlags(usage, std)}
	c.about = "Makes and signs the folder's next trust bundle. It needs the bundle-*.pb files and the root key alone: copy them to where the root key is kept, and the new file back. The gateway hands it to its boxes once it is started again."
	c.dir = c.String("dir", "", "the gateway's `folder`, or a copy of its bundle files")
	c.Var(&c.roots, "root", "the root's key `file`; may be given several times")
	c.threshold = c.Uint("threshold", 0, "how `many` approvers must agree (default: as it is, else 2)")
	c.in10m = c.Uint("targets-10m", 0, "from how `many` targets in 10 minutes on a grant is needed (default: as it is, else 5)")
	c.in24hours = c.Uint("targets-24h", 0, "from how `many` targets in 24 hours on a grant is needed (default: as it is, else 20)")
	c.need("dir", "root")
	return c
}

// most bounds the numbers: what is more than a site has would never be reached.
const most = 1 << 20

func (c *bundleChange) make(edit func(*agentv1.TrustBundle) error) error {
	if *c.threshold > most || *c.in10m > most || *c.in24hours > most {
		return errors.New("gateway bundle: a number is too large")
	}
	var roots []ed25519.PrivateKey
	for _, path := range c.roots {
		key, err := keys.ReadPrivate(path)
		if err != nil {
			return err
		}
		roots = append(roots, key)
	}
	path, err := keys.NextBundle(*c.dir, roots, func(b *agentv1.TrustBundle) error {
		if *c.in10m > 0 || *c.in24hours > 0 {
			if b.Quorum == nil {
				b.Quorum = &agentv1.QuorumPolicy{}
			}
			if *c.in10m > 0 {
				b.Quorum.Targets_10M = uint32(*c.in10m)
			}
			if *c.in24hours > 0 {
				b.Quorum.Targets_24H = uint32(*c.in24hours)
			}
		}
		return edit(b)
	}, time.Now())
	if err != nil {
		return err
	}
	fmt.Fprintf(c.std.err, "Made %s. Start the gateway again, so that it hands it to its boxes.\n", path)
	return bundleShow(context.Background(), []string{"--dir", *c.dir}, c.std)
}

func bundleAdd(_ context.Context, args []string, std stdio) error {
	c := newBundleChange("gateway bundle add-approver --dir DIR --root FILE [--threshold N] PUBKEY…", std)
	rest, err := c.parse(args, 1, 64)
	if err != nil {
		return err
	}
	var public []ed25519.PublicKey
	for _, text := range rest {
		if !strings.HasPrefix(text, "bca1.") {
			data, err := os.ReadFile(text)
			if err != nil {
				return fmt.Errorf("read public key: %w", err)
			}
			text = string(data)
		}
		key, err := keys.ParsePublic(text)
		if err != nil {
			return err
		}
		public = append(public, key)
	}
	return c.make(func(b *agentv1.TrustBundle) error { return keys.AddApprovers(b, public, uint32(*c.threshold)) })
}

func bundleRemove(_ context.Context, args []string, std stdio) error {
	c := newBundleChange("gateway bundle remove-approver --dir DIR --root FILE [--threshold N] KEYID…", std)
	rest, err := c.parse(args, 1, 64)
	if err != nil {
		return err
	}
	return c.make(func(b *agentv1.TrustBundle) error { return keys.RemoveApprovers(b, rest, uint32(*c.threshold)) })
}

func bundleSet(_ context.Context, args []string, std stdio) error {
	c := newBundleChange("gateway bundle set --dir DIR --root FILE [--threshold N] [--targets-10m N] [--targets-24h N]", std)
	if _, err := c.parse(args, 0, 0); err != nil {
		return err
	}
	if *c.threshold == 0 && *c.in10m == 0 && *c.in24hours == 0 {
		return fmt.Errorf("nothing is given that would change; usage: better-compute %s", c.usage)
	}
	return c.make(func(b *agentv1.TrustBundle) error { return keys.AddApprovers(b, nil, uint32(*c.threshold)) })
}
