package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
)

// rotating is what a rotation's command is called.
const rotating = "rotation"

func metalRotate(ctx context.Context, args []string, std stdio) error {
	f, detach := newOperation("metal rotate NAME", std)
	f.about = "The gateway makes the new password and keeps it beside the old one until a log-in with it has\nproved it. After an unclear end the same command goes on with the same password."
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.metal().RotateCredentials, &computev1.RotateCredentialsRequest{TenantId: c.tenant, Machine: rest[0]})
	if err != nil {
		return err
	}
	return followCommand(ctx, c, f, std, rotating, res.CommandId, *detach)
}

func metalRebind(ctx context.Context, args []string, std stdio) error {
	f, detach := newOperation("metal rebind NAME [--driver ID] [--address HOST[:PORT]] [--credentials REF] [--pin HEX] [--options JSON]", std)
	driver := f.String("driver", "", "`id` of the BMC's driver")
	address := f.String("address", "", "`host[:port]` of the BMC")
	credentials := f.String("credentials", "", "`reference` of the BMC's credential, secret://TENANT/NAME, or the secret's name")
	pin := f.String("pin", "", "`hex` SHA-256 of the BMC certificate's public key; \"none\" takes it away")
	options := f.String("options", "", "driver options, a `JSON` object; \"none\" takes them away")
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	m, err := call(ctx, c.metal().Get, &computev1.GetMachineRequest{TenantId: c.tenant, Machine: rest[0]})
	if err != nil {
		return err
	}
	b := m.GetMachine().GetBmc()
	given := false
	for _, field := range []struct {
		value string
		into  *string
	}{{*driver, &b.Driver}, {*address, &b.Address}, {reference(c, *credentials), &b.CredentialsRef}, {*pin, &b.TlsSpkiSha256}, {*options, &b.DriverOptionsJson}} {
		switch field.value {
		case "":
			continue
		case "none":
			*field.into = ""
		default:
			*field.into = field.value
		}
		given = true
	}
	if !given {
		return fmt.Errorf("nothing is given that would change; usage: better-compute %s", f.usage)
	}
	return rebind(ctx, c, f, std, rest[0], b, m.GetMachine().GetProtected(), *detach)
}

// reference is a secret's reference where its name is given.
func reference(c *client, name string) string {
	if name == "" || name == "none" || strings.Contains(name, "://") {
		return name
	}
	return "secret://" + c.tenant + "/" + name
}

func metalProtect(ctx context.Context, args []string, std stdio, protected bool) error {
	verb := "unprotect"
	if protected {
		verb = "protect"
	}
	f, detach := newOperation("metal "+verb+" NAME", std)
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	return rebind(ctx, c, f, std, rest[0], nil, protected, *detach)
}

// rebind tells the site; b nil leaves the BMC as it is.
func rebind(ctx context.Context, c *client, f *flags, std stdio, machine string, b *computev1.Bmc, protected, detach bool) error {
	res, err := call(ctx, c.metal().RebindBmc, &computev1.RebindBmcRequest{TenantId: c.tenant, Machine: machine, Bmc: b, Protected: protected})
	if err != nil {
		return err
	}
	return followCommand(ctx, c, f, std, "rebinding (protected: "+strconv.FormatBool(protected)+")", res.CommandId, detach)
}

func siteForgetBMC(ctx context.Context, args []string, std stdio) error {
	f := newCall("site forget-bmc SITE DRIVER=ADDRESS", std)
	f.about = "The site's box forgets credential, pin and protection of the address, and learns them anew with its next use.\nWhere approvals are in force it needs a grant: grant propose --allow forget --site SITE --bmc DRIVER=ADDRESS."
	rest, c, err := f.begin(args, 2, 2)
	if err != nil {
		return err
	}
	b, err := parseBMC(rest[1])
	if err != nil {
		return err
	}
	if _, err := call(ctx, c.sites().ForgetBmc, &computev1.ForgetBmcRequest{TenantId: c.tenant, Site: rest[0], Bmc: b}); err != nil {
		return err
	}
	_, err = fmt.Fprintf(std.out, "forgotten: %s\n", clean(rest[1]))
	return err
}
