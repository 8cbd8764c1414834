package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
)

func runMetal(ctx context.Context, args []string, std stdio) error {
	return dispatch(ctx, "better-compute metal", append([]command{
		{"enroll", "add a machine to a pool", metalEnroll},
		{"list", "list machines", metalList},
		{"show", "show a machine and its hardware", metalShow},
		{"power", "read or change a machine's power", metalPower},
		{"found", "list machines that asked to boot and that nobody enrolled", metalFound},
		{"confirm-mac", "say that a MAC is a machine's", metalConfirmMAC},
		{"reject-mac", "say that a found machine is none of these", metalRejectMAC},
		{"confirm-power", "say that a machine without a BMC was switched", metalConfirmPower},
		{"boot", "choose a machine's next boot device", metalBoot},
		{"loader", "choose the boot program that a machine's firmware gets", metalLoader},
		{"inspect", "boot the ramdisk and record the hardware", metalInspect},
		{"deploy", "write an image to a machine's disk and boot it", metalDeploy},
		{"console", "open a machine's serial console", metalConsole},
	}, slices.Concat(bootCommands(), bmcCommands())...), args, std)
}

func metalEnroll(ctx context.Context, args []string, std stdio) error {
	f := newCall("metal enroll NAME --pool POOL --driver ID --address HOST[:PORT] [--credentials REF] [--mac MAC …] [--uuid UUID] [--loader LOADER] [--hardware-profile NAME] [--driver KIND=ID[:FILE] …]", std)
	var macs, drivers stringList
	pool := f.String("pool", "", "the `pool`'s name or id")
	f.Var(&drivers, "driver", "`id` of the BMC's driver, such as ipmi or redfish; given again as KIND=ID[:FILE] it binds a kind to another driver, with the JSON object in FILE as its configuration")
	profile := f.String("hardware-profile", "", "`name` of the machine's hardware profile (default: the pool's)")
	address := f.String("address", "", "`host[:port]` of the BMC; without one, the MAC that wakes the machine (driver wol) or the name on its label (driver manual)")
	credentials := f.String("credentials", "", "`reference` of the BMC's credential, secret://TENANT/NAME, or the secret's name; the drivers wol and manual take none")
	pin := f.String("pin", "", "`hex` SHA-256 of the BMC certificate's public key")
	options := f.String("options", "", "driver options, a `JSON` object")
	uuid := f.String("uuid", "", "the machine's product `UUID`, by which its MACs are found; driver ipmi needs it or a --mac")
	loader := f.String("loader", "", loaderHelp)
	f.Var(&macs, "mac", "`MAC` of a port that the machine boots from; may be given several times")
	f.need("pool", "driver", "address")
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	ref := *credentials
	if ref != "" && !strings.Contains(ref, "://") {
		ref = "secret://" + c.tenant + "/" + ref
	}
	driver, bindings, err := parseDrivers(std, drivers)
	if err != nil {
		return err
	}
	if ref == "" && driver != "wol" && driver != "manual" {
		return fmt.Errorf("missing: --credentials, which driver %s logs in with; usage: better-compute %s", driver, f.usage)
	}
	res, err := call(ctx, c.metal().Enroll, &computev1.EnrollMachineRequest{TenantId: c.tenant, Name: rest[0], Pool: *pool, Macs: macs, ProductUuid: *uuid,
		HardwareProfile: *profile, Drivers: bindings, Loader: *loader,
		Bmc: &computev1.Bmc{Driver: driver, Address: *address, CredentialsRef: ref, TlsSpkiSha256: *pin, DriverOptionsJson: *options}})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	return printTable(std.out, machineHead, [][]string{machineRow(res.Machine)})
}

const loaderHelp = "`boot program` of x86-64 UEFI firmware: snponly (the usual one), ipxe (with network drivers of its own), or shim (Secure Boot)"

func metalLoader(ctx context.Context, args []string, std stdio) error {
	f := newCall("metal loader MACHINE snponly|ipxe|shim", std)
	f.about = "Chooses the boot program that x86-64 UEFI firmware gets from the box: snponly, the usual one, is the iPXE that uses the\nfirmware's network driver; ipxe has drivers of its own; shim is Debian's signed shim and GRUB, which Secure Boot starts.\nIt holds from the machine's next inspection, deploy or other network boot on."
	rest, c, err := f.begin(args, 2, 2)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.metal().SetLoader, &computev1.SetLoaderRequest{TenantId: c.tenant, Machine: rest[0], Loader: rest[1]})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	fmt.Fprintf(std.out, "%s gets %s\n", clean(res.GetMachine().GetName()), clean(res.GetMachine().GetLoader()))
	return nil
}

// maxBinding bounds a binding's configuration.
const maxBinding = 64 << 10

// parseDrivers takes apart what --driver gave: ID once, for the BMC, and
// KIND=ID or KIND=ID:FILE for each kind that is bound otherwise.
func parseDrivers(std stdio, list []string) (bmc string, bindings map[string]*computev1.DriverBinding, err error) {
	bindings = map[string]*computev1.DriverBinding{}
	for _, text := range list {
		kind, rest, bound := strings.Cut(text, "=")
		if !bound {
			if bmc != "" {
				return "", nil, fmt.Errorf("--driver %s: the BMC's driver is %s already; a kind is bound by KIND=ID", text, bmc)
			}
			bmc = text
			continue
		}
		id, file, configured := strings.Cut(rest, ":")
		b := &computev1.DriverBinding{Driver: id}
		if configured {
			data, err := readInput(std, file, maxBinding)
			if err != nil {
				return "", nil, fmt.Errorf("--driver %s: %w", text, err)
			}
			b.ConfigJson = string(data)
		}
		if bindings[kind] != nil {
			return "", nil, fmt.Errorf("--driver %s: %s is bound already", text, kind)
		}
		bindings[kind] = b
	}
	if bmc == "" {
		return "", nil, errors.New("--driver ID, the BMC's driver, is missing")
	}
	return bmc, bindings, nil
}

const machineHead = "NAME ID STATE DRIVER ADDRESS MACS AGENT PROTECTED POWER-ASKED"

func machineRow(m *computev1.Machine) []string {
	agent := ""
	if m.GetAgentId() != "" {
		agent = m.GetAgentRole() + " offline"
		if m.GetAgentOnline() {
			agent = m.GetAgentRole() + " online"
		}
	}
	protected := ""
	if m.GetProtected() {
		protected = "yes"
	}
	return []string{m.GetName(), m.GetId(), m.GetState(), m.GetBmc().GetDriver(), m.GetBmc().GetAddress(), strings.Join(m.GetMacs(), ","), agent, protected, m.GetPowerAsked()}
}

func metalList(ctx context.Context, args []string, std stdio) error {
	f := newCall("metal list", std)
	_, c, err := f.begin(args, 0, 0)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.metal().List, &computev1.ListMachinesRequest{TenantId: c.tenant})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	var rows [][]string
	for _, m := range res.Items {
		rows = append(rows, machineRow(m))
	}
	return printTable(std.out, machineHead, rows)
}

func metalShow(ctx context.Context, args []string, std stdio) error {
	f := newCall("metal show NAME", std)
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.metal().Get, &computev1.GetMachineRequest{TenantId: c.tenant, Machine: rest[0]})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	m := res.Machine
	lines := [][2]string{
		{"name", m.GetName()}, {"id", m.GetId()}, {"state", m.GetState()}, {"pool", m.GetPoolId()}, {"macs", strings.Join(m.GetMacs(), ", ")}, {"product uuid", m.GetProductUuid()},
		{"bmc driver", m.GetBmc().GetDriver()}, {"bmc address", m.GetBmc().GetAddress()}, {"bmc credential", m.GetBmc().GetCredentialsRef()},
		{"bmc key pin", m.GetBmc().GetTlsSpkiSha256()}, {"bmc options", m.GetBmc().GetDriverOptionsJson()},
		{"agent", strings.TrimSpace(m.GetAgentId() + " " + m.GetAgentRole())}, {"agent online", fmt.Sprint(m.GetAgentOnline())}, {"hardware", m.GetHardwareJson()}, {"hw profile", m.GetHardwareProfile()},
	}
	if m.GetProtected() {
		lines = append(lines, [2]string{"protected", "what is destructive always needs people's approval"})
	}
	if loader := m.GetLoader(); loader != "" {
		lines = append(lines, [2]string{"loader", loader})
	}
	if may := m.GetNetboot(); may != "" {
		lines = append(lines, [2]string{"may boot", may})
	}
	if asked := m.GetPowerAsked(); asked != "" {
		lines = append(lines, [2]string{"asked of people", "power " + asked})
	}
	for _, kind := range slices.Sorted(maps.Keys(m.GetDrivers())) {
		b := m.GetDrivers()[kind]
		lines = append(lines, [2]string{"driver", strings.TrimSpace(kind + "=" + b.GetDriver() + " " + b.GetConfigJson())})
	}
	for _, line := range lines {
		if _, err := fmt.Fprintf(std.out, "%-15s %s\n", line[0], clean(line[1])); err != nil {
			return err
		}
	}
	return nil
}

func metalPower(ctx context.Context, args []string, std stdio) error {
	f := newCall("metal power NAME [on|off|soft|cycle|reset|nmi]", std)
	rest, c, err := f.begin(args, 1, 2)
	if err != nil {
		return err
	}
	if len(rest) == 1 {
		res, err := call(ctx, c.metal().GetPower, &computev1.GetPowerRequest{TenantId: c.tenant, Machine: rest[0]})
		if err != nil {
			return err
		}
		if f.json {
			return printJSON(std.out, res)
		}
		_, err = fmt.Fprintln(std.out, clean(res.Power))
		return err
	}
	res, err := call(ctx, c.metal().SetPower, &computev1.SetPowerRequest{TenantId: c.tenant, Machine: rest[0], Action: rest[1]})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	switch people, err := asksPeople(ctx, c, rest[0]); {
	case err != nil:
		_, err = fmt.Fprintf(std.err, "power %s accepted (command %s)\n", rest[1], res.CommandId)
		return err
	case people:
		return askPeople(ctx, c, f, std, rest[0], rest[1], res.CommandId)
	}
	_, err = fmt.Fprintf(std.err, "power %s done (command %s)\n", rest[1], res.CommandId)
	return err
}

func metalBoot(ctx context.Context, args []string, std stdio) error {
	f := newCall("metal boot NAME [none|pxe|disk|cdrom|bios] [--efi] [--persistent]", std)
	efi := f.Bool("efi", false, "boot under UEFI")
	persistent := f.Bool("persistent", false, "for every boot, not only the next")
	rest, c, err := f.begin(args, 1, 2)
	if err != nil {
		return err
	}
	if len(rest) == 1 {
		if *efi || *persistent {
			return fmt.Errorf("the device is missing; usage: better-compute %s", f.usage)
		}
		return bootGet(ctx, c, f, std, rest[0])
	}
	res, err := call(ctx, c.metal().SetBootDevice, &computev1.SetBootDeviceRequest{TenantId: c.tenant, Machine: rest[0], Device: rest[1], Efi: *efi, Persistent: *persistent})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	_, err = fmt.Fprintf(std.err, "boot device %s set (command %s)\n", rest[1], res.CommandId)
	return err
}

func metalInspect(ctx context.Context, args []string, std stdio) error {
	f := newCall("metal inspect NAME [--wait]", std)
	wait := f.Bool("wait", false, "follow the steps to the end")
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	res, err := call(ctx, c.metal().Inspect, &computev1.InspectRequest{TenantId: c.tenant, Machine: rest[0]})
	if err != nil {
		return err
	}
	return started(ctx, c, f, std, res.WorkflowId, *wait)
}

func metalDeploy(ctx context.Context, args []string, std stdio) error {
	f := newCall("metal deploy NAME --image NAME|SHA256 --disk-serial SERIAL [--hostname NAME] [--ssh-key-file FILE …] [--wait]", std)
	var keyFiles stringList
	image := f.String("image", "", "the artifact's `name` or SHA-256")
	serial := f.String("disk-serial", "", "`serial` number of the disk that is overwritten")
	hostname := f.String("hostname", "", "the deployed machine's host `name` (default: the machine's name)")
	wait := f.Bool("wait", false, "follow the steps to the end")
	f.Var(&keyFiles, "ssh-key-file", "`file` of SSH public keys, one a line; may be given several times")
	f.need("image", "disk-serial")
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	var keys []string
	for _, path := range keyFiles {
		data, err := readInput(std, path, 1<<20)
		if err != nil {
			return fmt.Errorf("read ssh keys: %w", err)
		}
		for line := range strings.Lines(string(data)) {
			if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
				keys = append(keys, line)
			}
		}
	}
	res, err := call(ctx, c.metal().Deploy, &computev1.DeployRequest{TenantId: c.tenant, Machine: rest[0], Image: *image, DiskSerial: *serial, Hostname: *hostname, SshAuthorizedKeys: keys})
	if err != nil {
		return err
	}
	return started(ctx, c, f, std, res.WorkflowId, *wait)
}

// started prints the workflow's id, and follows it where that was asked for.
func started(ctx context.Context, c *client, f *flags, std stdio, id string, wait bool) error {
	if wait && !f.json {
		fmt.Fprintf(std.err, "workflow %s\n", id)
		return follow(ctx, c, std, id)
	}
	if wait {
		if err := follow(ctx, c, stdio{std.in, std.err, std.err}, id); err != nil {
			return err
		}
		return showWorkflow(ctx, c, std, id, true)
	}
	_, err := fmt.Fprintln(std.out, id)
	return err
}
