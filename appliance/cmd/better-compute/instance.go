package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/api/computev1/computev1connect"
	"github.com/better-compute/site-appliance/appliance/gateway/instances"
)

func runInstance(ctx context.Context, args []string, std stdio) error {
	return dispatch(ctx, "better-compute instance", []command{
		{"apply", "say what a machine is to run", instanceApply},
		{"list", "list what machines are to run, and how it fares", instanceList},
		{"remove", "have an instance removed", instanceRemove},
	}, args, std)
}

func (c *client) instances() computev1connect.InstanceServiceClient {
	return computev1connect.NewInstanceServiceClient(c.http, c.url, c.options...)
}

func instanceApply(ctx context.Context, args []string, std stdio) error {
	f := newCall("instance apply NAME --machine MACHINE --runtime RUNTIME --spec FILE", std)
	f.about = "Stores what the machine is to run and hands it to the machine's agent. The same again changes nothing."
	machine := f.String("machine", "", "the `machine`, by id or name")
	runtime := f.String("runtime", "", "the `runtime` of the machine's agent, such as process or containerd")
	spec := f.String("spec", "", "`file` with the runtime's own description, a JSON object; - is standard input")
	f.need("machine", "runtime", "spec")
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	data, err := readInput(std, *spec, instances.MaxSpec)
	if err != nil {
		return fmt.Errorf("instance apply: read --spec: %w", err)
	}
	res, err := call(ctx, c.instances().Apply, &computev1.ApplyInstanceRequest{TenantId: c.tenant, Name: rest[0], Machine: *machine, Runtime: *runtime, SpecJson: string(data)})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	return printInstances(std, []*computev1.Instance{res.Instance})
}

func instanceList(ctx context.Context, args []string, std stdio) error {
	f := newCall("instance list [--machine MACHINE]", std)
	machine := f.String("machine", "", "only this `machine`'s, by id or name")
	_, c, err := f.begin(args, 0, 0)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.instances().List, &computev1.ListInstancesRequest{TenantId: c.tenant, Machine: *machine})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	return printInstances(std, res.Items)
}

func printInstances(std stdio, all []*computev1.Instance) error {
	var rows [][]string
	for _, i := range all {
		rows = append(rows, []string{i.GetId(), i.GetName(), i.GetMachineId(), i.GetRuntime(), strconv.FormatUint(i.GetGeneration(), 10), i.GetState(), i.GetMessage()})
	}
	return printTable(std.out, "ID NAME MACHINE RUNTIME GENERATION STATE MESSAGE", rows)
}

func instanceRemove(ctx context.Context, args []string, std stdio) error {
	f := newCall("instance remove INSTANCE [--machine MACHINE]", std)
	f.about = "INSTANCE is an id, or with --machine a name. It is listed until its machine says that nothing of it is left."
	machine := f.String("machine", "", "the `machine`, by id or name")
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	if rest[0] == "" {
		return errors.New("instance remove: INSTANCE is empty")
	}
	_, err = call(ctx, c.instances().Remove, &computev1.RemoveInstanceRequest{TenantId: c.tenant, Instance: rest[0], Machine: *machine})
	return err
}
