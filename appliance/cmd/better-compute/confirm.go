package main

import (
	"context"
	"fmt"
	"time"

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

// askedWithin is how long a box that is online takes at most to ask a person, or to
// say why it does not.
const askedWithin = 10 * time.Second

// askPeople waits until the box has asked a person, and is an error where it does
// not ask. It does not wait for what the person does.
func askPeople(ctx context.Context, c *client, f *flags, std stdio, machine, action, id string) error {
	stopped := time.After(askedWithin)
	for {
		res, err := call(ctx, c.metal().GetCommand, &computev1.GetCommandRequest{TenantId: c.tenant, CommandId: id})
		switch {
		case err != nil:
			_, err = fmt.Fprintf(std.err, "power %s accepted (command %s)\n", action, id)
			return err
		case res.State == "done":
			return ended(std, f, "power "+action, id, res)
		case res.Progress != "":
			_, err = fmt.Fprintf(std.err, "a person is asked: power %s of %s (command %s); who did it says so with better-compute metal confirm-power %s on|off\n", action, machine, id, machine)
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-stopped:
			_, err = fmt.Fprintf(std.err, "the site has not asked anybody yet for power %s of %s; see better-compute metal command %s\n", action, machine, id)
			return err
		case <-time.After(followEvery):
		}
	}
}
