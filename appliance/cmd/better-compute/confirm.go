package main

import (
	"context"
	"fmt"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
)

func metalConfirmPower(ctx context.Context, args []string, std stdio) error {
	f := newCall("metal confirm-power NAME on|off", std)
	rest, c, err := f.begin(args, 2, 2)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.metal().ConfirmPower, &computev1.ConfirmPowerRequest{TenantId: c.tenant, Machine: rest[0], Power: rest[1]})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	_, err = fmt.Fprintf(std.err, "%s is %s\n", rest[0], rest[1])
	return err
}

// asksPeople reports whether a power command of the machine is done by people:
// then it was asked for, and is not done.
func asksPeople(ctx context.Context, c *client, machine string) (bool, error) {
	res, err := call(ctx, c.metal().Get, &computev1.GetMachineRequest{TenantId: c.tenant, Machine: machine})
	return res.GetMachine().GetBmc().GetDriver() == "manual", err
}
