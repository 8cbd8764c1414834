package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
)

func runSecret(ctx context.Context, args []string, std stdio) error {
	return dispatch(ctx, "better-compute secret", []command{
		{"put", "keep a secret that commands refer to", secretPut},
	}, args, std)
}

// secretPut takes the value from standard input or a file, never from the
// command line, where every user of the machine could read it.
func secretPut(ctx context.Context, args []string, std stdio) error {
	f := newCall("secret put NAME [--file FILE]", std)
	file := f.String("file", "", "`file` with the value (default: standard input); one newline at its end is cut off")
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	value, err := readInput(std, *file, 1<<20)
	if err != nil {
		return fmt.Errorf("read the secret: %w", err)
	}
	defer clear(value)
	value = bytes.TrimSuffix(value, []byte("\n"))
	if len(value) == 0 {
		return errors.New("the secret is empty")
	}
	res, err := call(ctx, c.secrets().Put, &computev1.PutSecretRequest{TenantId: c.tenant, Name: rest[0], Value: value})
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(std.out, res)
	}
	_, err = fmt.Fprintln(std.out, res.Ref)
	return err
}
