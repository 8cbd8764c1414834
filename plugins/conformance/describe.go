package conformance

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/schema"
)

// describeRules are about what a plugin says of itself.
func describeRules() []Rule {
	return []Rule{
		{ID: "describe.protocol", Statement: "Describe says protocol 1", check: described(func(d *driverv1.DescribeResponse) error {
			if d.GetProtocol() != bcx.Protocol {
				return fmt.Errorf("it says %d", d.GetProtocol())
			}
			return nil
		})},
		{ID: "describe.drivers", Statement: "it serves at least one driver", check: described(func(d *driverv1.DescribeResponse) error {
			if len(d.GetDrivers()) == 0 {
				return errors.New("it serves none")
			}
			return nil
		})},
		{ID: "describe.once", Statement: "it serves no driver id twice", check: described(func(d *driverv1.DescribeResponse) error {
			seen := map[string]bool{}
			for _, x := range d.GetDrivers() {
				id := x.GetManifest().GetId()
				if seen[id] {
					return fmt.Errorf("driver %.80q is described twice", id)
				}
				seen[id] = true
			}
			return nil
		})},
		{ID: "describe.stable", Statement: "Describe answers the same while it runs", check: func(r *run) error {
			p, err := r.plugin()
			if err != nil {
				return err
			}
			ctx, cancel := r.wait()
			defer cancel()
			a, err := p.conn.describe(ctx)
			if err != nil {
				return err
			}
			b, err := p.conn.describe(ctx)
			if err != nil {
				return err
			}
			if !proto.Equal(a, b) {
				return errors.New("two answers differ")
			}
			return nil
		}},
		{ID: "manifest.form", Statement: "id, version, kinds, runs_on and capabilities are well-formed", check: each(func(d *driverv1.DescribedDriver) error {
			d = proto.Clone(d).(*driverv1.DescribedDriver)
			d.StreamOperations, d.Manifest.RetrySafeOperations, d.Manifest.ConfigSchemaJson = nil, nil, ""
			_, err := bcx.Manifest(d)
			return err
		})},
		{ID: "manifest.operations", Statement: "retry-safe and stream operations are <kind>.<operation> of kinds that it serves", check: each(func(d *driverv1.DescribedDriver) error {
			for _, op := range slices.Concat(d.GetStreamOperations(), d.GetManifest().GetRetrySafeOperations()) {
				kind, name, ok := strings.Cut(op, ".")
				if !ok || name == "" || !slices.Contains(d.GetManifest().GetKinds(), kind) {
					return fmt.Errorf("driver %s: operation %.80q", d.GetManifest().GetId(), op)
				}
			}
			return nil
		})},
		{ID: "manifest.schema", Statement: "the configuration's schema is JSON Schema 2020-12 without remote references", check: each(func(d *driverv1.DescribedDriver) error {
			if text := d.GetManifest().GetConfigSchemaJson(); text != "" {
				if _, err := schema.Read([]byte(text)); err != nil {
					return fmt.Errorf("driver %s: %w", d.GetManifest().GetId(), err)
				}
			}
			return nil
		})},
		{ID: "manifest.builtin", Statement: "no driver takes the id of a built-in one", check: each(func(d *driverv1.DescribedDriver) error {
			if id := d.GetManifest().GetId(); slices.Contains(driver.BuiltIn(), id) {
				return fmt.Errorf("driver %s is built in", id)
			}
			return nil
		})},
		{ID: "health.answer", Statement: "Health answers serving, or not serving and why", check: func(r *run) error {
			p, err := r.plugin()
			if err != nil {
				return err
			}
			ctx, cancel := r.wait()
			defer cancel()
			h, err := p.conn.Health(ctx, connect.NewRequest(&driverv1.HealthRequest{}))
			if err != nil {
				return fmt.Errorf("call Health: %w", err)
			}
			switch h.Msg.GetStatus() {
			case driverv1.HealthResponse_STATUS_SERVING:
				return nil
			case driverv1.HealthResponse_STATUS_NOT_SERVING:
				if h.Msg.GetMessage() != "" {
					return nil
				}
			}
			return fmt.Errorf("it answers %v, message %.80q", h.Msg.GetStatus(), h.Msg.GetMessage())
		}},
	}
}

func described(check func(*driverv1.DescribeResponse) error) func(*run) error {
	return func(r *run) error {
		p, err := r.plugin()
		if err != nil {
			return err
		}
		ctx, cancel := r.wait()
		defer cancel()
		d, err := p.conn.describe(ctx)
		if err != nil {
			return err
		}
		return check(d)
	}
}

func each(check func(*driverv1.DescribedDriver) error) func(*run) error {
	return described(func(d *driverv1.DescribeResponse) error {
		for _, x := range d.GetDrivers() {
			if x.GetManifest() == nil {
				return errors.New("a driver has no manifest")
			}
			if err := check(x); err != nil {
				return err
			}
		}
		return nil
	})
}
