package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
)

// bmcCommands are the verbs of a machine's BMC.
func bmcCommands() []command {
	return []command{
		{"inspect-bmc", "print what the BMC says of the hardware", metalInspectBMC},
		{"event-log", "print the BMC's event log", metalEventLog},
		{"media", "insert, eject or show the image in the virtual drive", metalMedia},
		{"bios", "read, change or reset firmware settings", metalBIOS},
		{"raid", "read or change the RAID layout", metalRAID},
		{"firmware", "list or update firmware", metalFirmware},
		{"secure-boot", "read or switch secure boot", metalSecureBoot},
		{"bmc-reset", "restart the BMC", metalResetBMC},
		{"rotate", "give the BMC's account a new password", metalRotate},
		{"rebind", "tell the site another address, credential, pin or driver of the BMC", metalRebind},
		{"protect", "have all that is destructive always approved by people", func(ctx context.Context, args []string, std stdio) error {
			return metalProtect(ctx, args, std, true)
		}},
		{"unprotect", "take the protection away, which people must approve", func(ctx context.Context, args []string, std stdio) error {
			return metalProtect(ctx, args, std, false)
		}},
		{"command", "show or follow a command", metalCommand},
	}
}

// newOperation is newCall for an operation, whose command is followed unless that
// is not wanted.
func newOperation(usage string, std stdio) (f *flags, detach *bool) {
	f = newCall(usage, std)
	return f, f.Bool("no-wait", false, "print the command's id instead of following it to its end")
}

// operate runs one operation and prints a query's answer by show, or follows the
// command of anything else. args are its arguments; nil: it has none.
func operate(ctx context.Context, c *client, f *flags, std stdio, machine, operation string, args any, detach bool, show func(raw json.RawMessage) error) error {
	req := &computev1.OperateRequest{TenantId: c.tenant, Machine: machine, Operation: operation}
	if args != nil {
		raw, err := json.Marshal([]any{args})
		if err != nil {
			return err
		}
		req.ArgsJson = string(raw)
	}
	res, err := call(ctx, c.metal().Operate, req)
	if err != nil {
		return err
	}
	if res.ResultJson == "" {
		return followCommand(ctx, c, f, std, operation, res.CommandId, detach)
	}
	if f.json {
		return printJSON(std.out, res)
	}
	return show(json.RawMessage(res.ResultJson))
}

// plainJSON prints an answer as indented JSON, line by line free of what could
// steer the terminal.
func plainJSON(w io.Writer) func(json.RawMessage) error {
	return func(raw json.RawMessage) error {
		var out bytes.Buffer
		if err := json.Indent(&out, raw, "", "  "); err != nil {
			return fmt.Errorf("the answer is no JSON: %w", err)
		}
		for line := range strings.Lines(out.String()) {
			if _, err := fmt.Fprintln(w, clean(strings.TrimSuffix(line, "\n"))); err != nil {
				return err
			}
		}
		return nil
	}
}

// followCommand prints a command's progress until it has ended, and fails when it
// did. Whoever stops to look on does not stop the command.
func followCommand(ctx context.Context, c *client, f *flags, std stdio, what, id string, detach bool) error {
	if detach {
		_, err := fmt.Fprintln(std.out, id)
		return err
	}
	stopped := fmt.Errorf("stopped watching; the command goes on: better-compute metal command %s --wait", id)
	progress := ""
	var lost time.Time
	fmt.Fprintf(std.err, "%s: command %s\n", what, id)
	for {
		res, err := call(ctx, c.metal().GetCommand, &computev1.GetCommandRequest{TenantId: c.tenant, CommandId: id})
		switch {
		case err != nil && ctx.Err() != nil:
			return stopped
		case err != nil && connect.CodeOf(err) == connect.CodeUnavailable && (lost.IsZero() || time.Since(lost) < gatewayGrace):
			if lost.IsZero() {
				lost = time.Now()
				fmt.Fprintf(std.err, "the gateway does not answer; the command goes on\n")
			}
		case err != nil:
			return err
		default:
			lost = time.Time{}
			if res.Progress != "" && res.Progress != progress {
				progress = res.Progress
				fmt.Fprintf(std.err, "%s  %s\n", time.Now().UTC().Format("15:04:05"), clean(progress))
			}
			if res.State == "done" {
				return ended(std, f, what, id, res)
			}
		}
		select {
		case <-ctx.Done():
			return stopped
		case <-time.After(followEvery):
		}
	}
}

// ended prints how a command ended, and is an error where it failed.
func ended(std stdio, f *flags, what, id string, res *computev1.GetCommandResponse) error {
	if f.json {
		if err := printJSON(std.out, res); err != nil {
			return err
		}
	}
	if res.ErrorCode != "" {
		hint := ""
		switch res.ErrorCode {
		case "binding-mismatch":
			hint = "; better-compute metal rebind tells the site what belongs to this BMC"
		case "interrupted", "timeout", "unreachable", "bmc-error":
			if what == rotating {
				hint = "; the new password stays pending: the gateway tries again for a while, and metal rotate goes on with the same password"
			}
		}
		return errors.New(clean(res.ErrorCode) + ": " + clean(res.ErrorMessage) + hint + " (command " + id + ")")
	}
	var applied struct{ AlreadyInstalled bool }
	if json.Unmarshal([]byte(res.ResultJson), &applied) == nil && applied.AlreadyInstalled {
		fmt.Fprintf(std.err, "%s: this version is installed already; nothing was written\n", what)
	}
	if f.json {
		return nil
	}
	if res.ResultJson != "" && res.ResultJson != "null" {
		if err := plainJSON(std.out)(json.RawMessage(res.ResultJson)); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(std.err, "%s: done\n", what)
	return err
}

func metalCommand(ctx context.Context, args []string, std stdio) error {
	f := newCall("metal command ID [--wait]", std)
	wait := f.Bool("wait", false, "follow the command to its end")
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	if *wait {
		return followCommand(ctx, c, f, std, "command", rest[0], false)
	}
	res, err := call(ctx, c.metal().GetCommand, &computev1.GetCommandRequest{TenantId: c.tenant, CommandId: rest[0]})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	for _, line := range [][2]string{{"state", res.State}, {"progress", res.Progress}, {"result", res.ResultJson}, {"error", strings.TrimSpace(res.ErrorCode + " " + res.ErrorMessage)}} {
		if _, err := fmt.Fprintf(std.out, "%-9s %s\n", line[0], clean(line[1])); err != nil {
			return err
		}
	}
	return nil
}

func metalInspectBMC(ctx context.Context, args []string, std stdio) error {
	f := newCall("metal inspect-bmc NAME", std)
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	return operate(ctx, c, f, std, rest[0], "inspect.inspect", nil, false, plainJSON(std.out))
}

func metalEventLog(ctx context.Context, args []string, std stdio) error {
	f := newCall("metal event-log NAME", std)
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	return operate(ctx, c, f, std, rest[0], "management.getEventLog", nil, false, func(raw json.RawMessage) error {
		var log []struct{ ID, Time, Severity, Sensor, Message string }
		if err := json.Unmarshal(raw, &log); err != nil {
			return fmt.Errorf("the answer is no event log: %w", err)
		}
		var rows [][]string
		for _, e := range log {
			rows = append(rows, []string{e.ID, e.Time, e.Severity, e.Sensor, e.Message})
		}
		return printTable(std.out, "ID TIME SEVERITY SENSOR MESSAGE", rows)
	})
}

// action takes the machine's name and one of the words off a verb's arguments; the
// first word is what is done without one.
func action(f *flags, rest []string, words ...string) (machine, word string, more []string, err error) {
	word = words[0]
	if len(rest) > 1 {
		word = rest[1]
		more = rest[2:]
	}
	for _, known := range words {
		if word == known {
			return rest[0], word, more, nil
		}
	}
	return "", "", nil, fmt.Errorf("%q: want %s; usage: better-compute %s", word, strings.Join(words, ", "), f.usage)
}

// none refuses arguments where a word takes none.
func (f *flags) none(more []string) error {
	if len(more) > 0 {
		return fmt.Errorf("%q is one argument too many; usage: better-compute %s", more[0], f.usage)
	}
	return nil
}

func metalMedia(ctx context.Context, args []string, std stdio) error {
	f, detach := newOperation("metal media NAME [status | insert URL|artifact://NAME | eject]", std)
	rest, c, err := f.begin(args, 1, 3)
	if err != nil {
		return err
	}
	machine, word, more, err := action(f, rest, "status", "insert", "eject")
	if err != nil {
		return err
	}
	if word == "insert" {
		if len(more) != 1 {
			return fmt.Errorf("the image is missing; usage: better-compute %s", f.usage)
		}
		return operate(ctx, c, f, std, machine, "virtual-media.insert", more[0], *detach, nil)
	}
	if err := f.none(more); err != nil {
		return err
	}
	return operate(ctx, c, f, std, machine, "virtual-media."+word, nil, *detach, plainJSON(std.out))
}

// maxDocument bounds settings and layouts that are read from files.
const maxDocument = 1 << 20

// document reads a JSON document from a file, or from standard input for "-".
func document(std stdio, path string) (json.RawMessage, error) {
	data, err := readInput(std, path, maxDocument)
	if err != nil {
		return nil, err
	}
	if data = bytes.TrimSpace(data); !json.Valid(data) {
		return nil, fmt.Errorf("%s holds no JSON", path)
	}
	return data, nil
}

// settingsOf reads KEY=VALUE words. A value that is a JSON number, true or false is
// one, and any other is text; quotes make text of what looks like something else.
func settingsOf(words []string) (map[string]any, error) {
	settings := map[string]any{}
	for _, word := range words {
		key, text, ok := strings.Cut(word, "=")
		if !ok || key == "" {
			return nil, fmt.Errorf("%q: want KEY=VALUE", word)
		}
		if _, twice := settings[key]; twice {
			return nil, fmt.Errorf("setting %s is given twice", key)
		}
		settings[key] = text
		var value any
		dec := json.NewDecoder(strings.NewReader(text))
		dec.UseNumber()
		if dec.Decode(&value) == nil && !dec.More() {
			switch value.(type) {
			case bool, json.Number, string:
				settings[key] = value
			}
		}
	}
	return settings, nil
}

func metalBIOS(ctx context.Context, args []string, std stdio) error {
	f, detach := newOperation("metal bios NAME [get | apply KEY=VALUE … | apply --file FILE | reset]", std)
	file := f.String("file", "", "`file` with the settings, a JSON object (- for standard input)")
	rest, c, err := f.begin(args, 1, 1<<10)
	if err != nil {
		return err
	}
	machine, word, more, err := action(f, rest, "get", "apply", "reset")
	if err != nil {
		return err
	}
	if word != "apply" {
		if err := f.none(more); err != nil {
			return err
		}
		return operate(ctx, c, f, std, machine, "bios."+word+"Settings", nil, *detach, plainJSON(std.out))
	}
	var settings any
	switch {
	case *file != "" && len(more) > 0:
		return fmt.Errorf("settings are given by --file or as KEY=VALUE, not both; usage: better-compute %s", f.usage)
	case *file != "":
		settings, err = document(std, *file)
	case len(more) == 0:
		return fmt.Errorf("no setting is given; usage: better-compute %s", f.usage)
	default:
		settings, err = settingsOf(more)
	}
	if err != nil {
		return err
	}
	return operate(ctx, c, f, std, machine, "bios.applySettings", settings, *detach, nil)
}

func metalRAID(ctx context.Context, args []string, std stdio) error {
	f, detach := newOperation("metal raid NAME [get | apply FILE]", std)
	rest, c, err := f.begin(args, 1, 3)
	if err != nil {
		return err
	}
	machine, word, more, err := action(f, rest, "get", "apply")
	if err != nil {
		return err
	}
	if word == "get" {
		if err := f.none(more); err != nil {
			return err
		}
		return operate(ctx, c, f, std, machine, "raid.getLayout", nil, false, plainJSON(std.out))
	}
	if len(more) != 1 {
		return fmt.Errorf("the file with the layout is missing: volumes that are not in it are deleted; usage: better-compute %s", f.usage)
	}
	layout, err := document(std, more[0])
	if err != nil {
		return err
	}
	return operate(ctx, c, f, std, machine, "raid.applyLayout", layout, *detach, nil)
}

func metalFirmware(ctx context.Context, args []string, std stdio) error {
	f, detach := newOperation("metal firmware NAME [list | update --component NAME --url URL|artifact://NAME --sha256 HEX [--version VERSION]]", std)
	component := f.String("component", "", "`name` of the component, as list prints it")
	url := f.String("url", "", "`URL` of the file, or artifact://NAME")
	digest := f.String("sha256", "", "`hex` SHA-256 of the file")
	version := f.String("version", "", "`version` that the component must have afterwards")
	rest, c, err := f.begin(args, 1, 2)
	if err != nil {
		return err
	}
	machine, word, _, err := action(f, rest, "list", "update")
	if err != nil {
		return err
	}
	if word == "update" {
		if *component == "" || *url == "" || *digest == "" {
			return fmt.Errorf("--component, --url and --sha256 are needed; usage: better-compute %s", f.usage)
		}
		update := map[string]string{"component": *component, "url": *url, "sha256": strings.ToLower(*digest)}
		if *version != "" {
			update["version"] = *version
		}
		return operate(ctx, c, f, std, machine, "firmware.update", update, *detach, nil)
	}
	return operate(ctx, c, f, std, machine, "firmware.list", nil, false, func(raw json.RawMessage) error {
		var list []struct{ Component, Version string }
		if err := json.Unmarshal(raw, &list); err != nil {
			return fmt.Errorf("the answer is no list of firmware: %w", err)
		}
		var rows [][]string
		for _, one := range list {
			rows = append(rows, []string{one.Component, one.Version})
		}
		return printTable(std.out, "COMPONENT VERSION", rows)
	})
}

func metalSecureBoot(ctx context.Context, args []string, std stdio) error {
	f, detach := newOperation("metal secure-boot NAME [get | on | off]", std)
	rest, c, err := f.begin(args, 1, 2)
	if err != nil {
		return err
	}
	machine, word, _, err := action(f, rest, "get", "on", "off")
	if err != nil {
		return err
	}
	if word == "get" {
		return operate(ctx, c, f, std, machine, "management.getSecureBoot", nil, false, plainJSON(std.out))
	}
	return operate(ctx, c, f, std, machine, "management.setSecureBoot", map[string]bool{"enabled": word == "on"}, *detach, nil)
}

func metalResetBMC(ctx context.Context, args []string, std stdio) error {
	f, detach := newOperation("metal bmc-reset NAME", std)
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	return operate(ctx, c, f, std, rest[0], "management.resetBmc", nil, *detach, nil)
}

// bootGet prints what the machine boots next.
func bootGet(ctx context.Context, c *client, f *flags, std stdio, machine string) error {
	return operate(ctx, c, f, std, machine, "management.getBootDevice", nil, false, func(raw json.RawMessage) error {
		var d struct {
			Device          string
			Persistent, EFI bool
		}
		if err := json.Unmarshal(raw, &d); err != nil {
			return fmt.Errorf("the answer is no boot device: %w", err)
		}
		words := []string{clean(d.Device)}
		if d.EFI {
			words = append(words, "efi")
		}
		if d.Persistent {
			words = append(words, "persistent")
		}
		_, err := fmt.Fprintln(std.out, strings.Join(words, " "))
		return err
	})
}
