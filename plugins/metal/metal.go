// Package metal declares the kinds of bare-metal drivers, from power to deploy.
package metal

import (
	"encoding/hex"
	"encoding/json"
	"net/url"
	"slices"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// retrySafe are the operations that by their nature do no harm when they run
// twice. applySettings and applyLayout are not among them: whether they are is
// for a driver to say.
var retrySafe = []string{
	"bios.getSettings",
	"config.get",
	"firmware.list",
	"inspect.inspect",
	"management.getBootDevice", "management.getEventLog", "management.getSecureBoot", "management.setBootDevice",
	"power.getPower",
	"raid.getLayout",
	"virtual-media.eject", "virtual-media.insert", "virtual-media.status",
}

// RetrySafe lists the operations of these kinds that a driver may mark
// retry-safe without a thought, sorted; of all kinds if none is given. It is a
// default to start from: what a driver knows of its hardware goes before it.
func RetrySafe(kinds ...string) []string {
	var list []string
	for _, op := range retrySafe {
		kind, _, _ := strings.Cut(op, ".")
		if len(kinds) == 0 || slices.Contains(kinds, kind) {
			list = append(list, op)
		}
	}
	return list
}

// Kinds lists the names of all kinds of this package, sorted.
func Kinds() []string {
	return []string{
		"bios", "boot", "config", "console", "credentials", "deploy", "firmware", "inspect", "management", "power", "raid", "virtual-media",
	}
}

// do calls an operation of another process that answers nothing.
func do(i *driver.Implementation, ctx *driver.Context, operation string, args ...any) error {
	_, err := i.On(ctx).Call(operation, args...).Await()
	return err
}

// ask calls an operation of another process and decodes its answer.
func ask[R any](i *driver.Implementation, ctx *driver.Context, operation string, args ...any) (R, error) {
	return driver.Answer[R](i.On(ctx).Call(operation, args...))
}

// strange is an answer of another process that is none of its operation's.
func strange(operation, format string, args ...any) error {
	e := errs.New(errs.DriverError, format, args...)
	e.Message = "the answer of " + operation + ": " + e.Message
	return e
}

// strict decodes an argument that is an object of these fields; another is invalid-args.
func strict(raw json.RawMessage, into any, what string, fields ...string) error {
	if err := driver.StrictJSON(raw, into, fields...); err != nil {
		return errs.New(errs.InvalidArgs, "%s: %v", what, err)
	}
	return nil
}

// checkURL refuses what nothing can be fetched from, and credentials in an
// address: an argument is logged, a secret never.
func checkURL(what, text string, schemes ...string) error {
	want := "want an absolute URL of " + strings.Join(schemes, ", ")
	if len(text) > 2048 {
		return errs.New(errs.InvalidArgs, "%s: %d bytes, limit 2048", what, len(text))
	}
	u, err := url.Parse(text)
	switch {
	case err != nil || u.Host == "" || !slices.Contains(schemes, u.Scheme):
		return errs.New(errs.InvalidArgs, "%s: %s", what, want)
	case u.User != nil:
		return errs.New(errs.InvalidArgs, "%s: a URL holds no user name and no password", what)
	}
	return nil
}

// checkDigest refuses what is no SHA-256 in lower-case hex.
func checkDigest(what, text string) error {
	if raw, err := hex.DecodeString(text); err != nil || len(raw) != 32 || strings.ToLower(text) != text {
		return errs.New(errs.InvalidArgs, "%s: want a SHA-256 of 64 lower-case hex digits", what)
	}
	return nil
}

// checkName refuses an empty, long or unprintable name.
func checkName(what, text string, most int) error {
	if text == "" || len(text) > most || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return errs.New(errs.InvalidArgs, "%s: want 1 to %d printable characters", what, most)
	}
	return nil
}

// atMostOne is an operation whose single argument, an object, can be left out.
func atMostOne[T, A any](decode func(json.RawMessage) (A, error), f func(T, *driver.Context, A) error) driver.Operation[T] {
	set := driver.Set(decode, f)
	return func(ctx *driver.Context, impl T, args driver.Args) (any, error) {
		if len(args) == 0 {
			args = driver.Args{json.RawMessage("{}")}
		}
		return set(ctx, impl, args)
	}
}
