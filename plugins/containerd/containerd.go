// Package containerd is the driver "containerd": instances as containers of the
// containerd on the driver's node, by any runtime handler that it has.
package containerd

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"strconv"
	"time"

	client "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/instance"
	"github.com/better-compute/site-appliance/plugins/sdk"
)

// ID is the driver's id, and Version its version.
const (
	ID      = "containerd"
	Version = "1.0.0"
)

// The labels of a container that is ours. Whatever has none of them is never
// listed, and never touched.
const (
	labelInstance   = "bc.dev/instance"
	labelName       = "bc.dev/name"
	labelGeneration = "bc.dev/generation"
	labelRestart    = "bc.dev/restart"
	labelStop       = "bc.dev/stop-timeout"
	// labelStarted is set before the first start: one that never restarts is not
	// started again after a reboot took its task away.
	labelStarted = "bc.dev/started"
)

const (
	dialWithin = 5 * time.Second
	// killWithin is how long a killed task may take to go.
	killWithin = 10 * time.Second
)

// Main serves the driver as a plugin and returns the exit code.
func Main(pluginVersion string) int {
	d, err := Driver()
	if err != nil {
		panic(err) // a fault in this file's declaration, found by any start
	}
	return sdk.Main(sdk.Options{PluginVersion: pluginVersion}, d)
}

// Driver declares the driver.
func Driver() (*driver.Definition, error) {
	m, err := manifest()
	if err != nil {
		return nil, err
	}
	return driver.Define(driver.Spec[config]{
		ID: ID, Version: Version, RunsOn: "node", Config: m, RetrySafe: instance.RetrySafe(),
		Validate: func(ctx *driver.Context, c config) error {
			return c.with(ctx, func(ctx context.Context, cl *client.Client) error {
				_, err := cl.Version(ctx)
				return err
			})
		},
	}, driver.Implement(instance.RuntimeKind(), func(c config, _ *driver.Context) (instance.Runtime, error) { return runtime{c}, nil }))
}

// runtime is one configuration's containers.
type runtime struct{ config }

// with connects for one call. Its errors have codes.
func (c config) with(ctx context.Context, f func(ctx context.Context, cl *client.Client) error) error {
	// Without a socket there is nothing to wait for.
	if _, err := os.Stat(c.Address); err != nil {
		return errs.Retry(errs.Unreachable, "containerd: %v", err)
	}
	cl, err := client.New(c.Address, client.WithTimeout(dialWithin), client.WithDefaultNamespace(c.Namespace))
	if err != nil {
		return errs.Retry(errs.Unreachable, "containerd at %s: %v", c.Address, err)
	}
	return errors.Join(coded(f(namespaces.WithNamespace(ctx, c.Namespace), cl)), cl.Close())
}

// coded gives containerd's errors codes.
func coded(err error) error {
	var own *errs.Error
	switch {
	case err == nil, errors.As(err, &own), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errdefs.IsUnavailable(err):
		return errs.Retry(errs.Unreachable, "containerd: %v", err)
	case errdefs.IsDeadlineExceeded(err):
		return errs.Retry(errs.Timeout, "containerd: %v", err)
	case errdefs.IsCanceled(err):
		return errs.New(errs.Cancelled, "containerd: %v", err)
	case errdefs.IsAlreadyExists(err), errdefs.IsConflict(err):
		return errs.Retry(errs.DriverError, "containerd: %v", err)
	}
	return errs.New(errs.DriverError, "containerd: %v", err)
}

// List tells the containers that carry our label.
func (r runtime) List(ctx *driver.Context) ([]instance.Status, error) {
	var all []instance.Status
	err := r.with(ctx, func(ctx context.Context, cl *client.Client) error {
		found, err := cl.Containers(ctx, `labels."`+labelInstance+`"`)
		if err != nil {
			return err
		}
		for _, c := range found {
			info, err := c.Info(ctx, client.WithoutRefreshedMetadata)
			if err != nil {
				return err
			}
			if info.Labels[labelInstance] != c.ID() {
				continue
			}
			s, err := status(ctx, c, info.Labels)
			if errdefs.IsNotFound(err) {
				continue // removed meanwhile
			}
			if err != nil {
				return err
			}
			all = append(all, s)
		}
		return nil
	})
	return all, err
}

func generation(labels map[string]string) uint64 {
	n, err := strconv.ParseUint(labels[labelGeneration], 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// status is what a container's task says of an instance.
func status(ctx context.Context, c client.Container, labels map[string]string) (instance.Status, error) {
	s := instance.Status{ID: c.ID(), Generation: generation(labels), State: instance.Failed}
	task, err := c.Task(ctx, nil)
	if errdefs.IsNotFound(err) {
		s.State, s.Message = judge(labels, nil)
		return s, nil
	}
	if err != nil {
		return s, err
	}
	st, err := task.Status(ctx)
	if errdefs.IsNotFound(err) {
		s.State, s.Message = judge(labels, nil)
		return s, nil
	}
	if err != nil {
		return s, err
	}
	switch st.Status {
	case client.Running, client.Pausing:
		s.State = instance.Running
	case client.Paused:
		s.State, s.Message = instance.Running, "it is paused"
	case client.Stopped:
		s.State, s.Message = judge(labels, &st.ExitStatus)
	default:
		s.Message = "it was made and not started"
	}
	return s, nil
}

// judge says what the end of a task means under the restart policy: failed asks
// for another start. exit is nil where the task is gone.
func judge(labels map[string]string, exit *uint32) (state, message string) {
	message = "its task is gone"
	if exit != nil {
		message = fmt.Sprintf("it ended with exit code %d", *exit)
	}
	switch restart := labels[labelRestart]; {
	case labels[labelStarted] == "":
		return instance.Failed, "it was made and not started"
	case restart == never, restart == onFailure && exit != nil && *exit == 0:
		return instance.Stopped, message
	}
	return instance.Failed, message
}

// find loads a container of ours: nil where there is none. One of that name that
// is not ours is an error, whatever is asked of it.
func find(ctx context.Context, cl *client.Client, id string) (client.Container, map[string]string, error) {
	c, err := cl.LoadContainer(ctx, id)
	if errdefs.IsNotFound(err) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	labels, err := c.Labels(ctx)
	if err != nil {
		return nil, nil, err
	}
	if labels[labelInstance] != id {
		return nil, nil, errs.New(errs.OperationNotAllowed, "container %s was not made by this driver", id)
	}
	return c, labels, nil
}

// Apply makes one generation run: it starts what does not run, replaces an older
// generation, and does nothing where all is as it should be.
func (r runtime) Apply(ctx *driver.Context, in instance.Spec) error {
	s, err := parseSpec(in.Config)
	if err != nil {
		return err
	}
	if in.Generation == 0 {
		return errs.New(errs.InvalidArgs, "instance %s has no generation", in.ID)
	}
	emit := func(phase, message string) { ctx.Emit(driver.Progress{Phase: phase, Message: message}) }
	return r.with(ctx, func(ctx context.Context, cl *client.Client) error {
		c, labels, err := find(ctx, cl, in.ID)
		if err != nil {
			return err
		}
		if c != nil {
			switch have := generation(labels); {
			case have > in.Generation:
				return errs.New(errs.OperationNotAllowed, "generation %d of instance %s is older than %d, which is here", in.Generation, in.ID, have)
			case have == in.Generation:
				return r.start(ctx, c, labels)
			}
		}
		// The image first: the older generation runs until the newer one can.
		emit("image", s.Image)
		image, err := r.image(ctx, cl, s.Image)
		if err != nil {
			return err
		}
		if c != nil {
			emit("replace", "the older generation is removed")
			if err := r.remove(ctx, c, labels); err != nil {
				return err
			}
		}
		emit("start", in.ID)
		if c, err = r.create(ctx, cl, in, s, image); err != nil {
			return err
		}
		if labels, err = c.Labels(ctx); err != nil {
			return err
		}
		return r.start(ctx, c, labels)
	})
}

// image gives the image, unpacked for the snapshotter.
func (r runtime) image(ctx context.Context, cl *client.Client, ref string) (client.Image, error) {
	image, err := cl.GetImage(ctx, ref)
	switch {
	case errdefs.IsNotFound(err) && r.Pull == pullNever:
		return nil, errs.New(errs.DriverError, "image %s is not here, and none is pulled", ref)
	case errdefs.IsNotFound(err):
		if image, err = cl.Pull(ctx, ref, client.WithPullUnpack, client.WithPullSnapshotter(r.Snapshotter)); err != nil {
			return nil, errs.Retry(errs.DriverError, "pull %s: %v", ref, err)
		}
		return image, nil
	case err != nil:
		return nil, err
	}
	unpacked, err := image.IsUnpacked(ctx, r.Snapshotter)
	if err == nil && !unpacked {
		err = image.Unpack(ctx, r.Snapshotter)
	}
	if err != nil {
		return nil, fmt.Errorf("unpack %s: %w", ref, err)
	}
	return image, nil
}

func (r runtime) create(ctx context.Context, cl *client.Client, in instance.Spec, s spec, image client.Image) (client.Container, error) {
	if err := r.clear(ctx, cl, in.ID); err != nil {
		return nil, err
	}
	stop, err := parseStop(s.StopTimeout)
	if err != nil {
		return nil, err
	}
	opts := []oci.SpecOpts{oci.WithImageConfigArgs(image, s.Args), oci.WithEnv(s.environment())}
	if s.HostNetwork {
		opts = append(opts, oci.WithHostNamespace(specs.NetworkNamespace), oci.WithHostHostsFile, oci.WithHostResolvconf)
	}
	if s.MemoryMaxBytes > 0 {
		opts = append(opts, oci.WithMemoryLimit(uint64(s.MemoryMaxBytes)))
	}
	if s.PidsMax > 0 {
		opts = append(opts, oci.WithPidsLimit(s.PidsMax))
	}
	if s.CPUMax > 0 {
		opts = append(opts, oci.WithCPUCFS(int64(s.CPUMax*cpuPeriod), cpuPeriod))
	}
	return cl.NewContainer(ctx, in.ID,
		client.WithImage(image),
		client.WithSnapshotter(r.Snapshotter),
		client.WithNewSnapshot(in.ID, image, snapshots.WithLabels(map[string]string{labelInstance: in.ID})),
		client.WithRuntime(r.Handler, nil),
		client.WithNewSpec(opts...),
		client.WithContainerLabels(map[string]string{
			labelInstance: in.ID, labelName: in.Name, labelGeneration: strconv.FormatUint(in.Generation, 10),
			labelRestart: s.Restart, labelStop: stop.String(),
		}),
	)
}

// clear removes the snapshot that is left of a start that was cut off. One of
// that name that is not ours is an error.
func (r runtime) clear(ctx context.Context, cl *client.Client, id string) error {
	service := cl.SnapshotService(r.Snapshotter)
	info, err := service.Stat(ctx, id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Labels[labelInstance] != id {
		return errs.New(errs.OperationNotAllowed, "snapshot %s was not made by this driver", id)
	}
	if err := service.Remove(ctx, id); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	return nil
}

// start runs a container's task, unless it runs or ended as it should have.
func (r runtime) start(ctx context.Context, c client.Container, labels map[string]string) error {
	s, err := status(ctx, c, labels)
	if err != nil {
		return err
	}
	if s.State != instance.Failed {
		return nil
	}
	// What is left of the last task goes first.
	if err := end(ctx, c, 0); err != nil {
		return err
	}
	output := cio.NullIO
	if path := r.output(c.ID()); path != "" {
		output = cio.LogFile(path)
	}
	task, err := c.NewTask(ctx, output)
	if err != nil {
		return err
	}
	started := maps.Clone(labels)
	started[labelStarted] = "true"
	if _, err = c.SetLabels(ctx, started); err == nil {
		err = task.Start(ctx)
	}
	if err != nil {
		_, derr := task.Delete(context.WithoutCancel(ctx), client.WithProcessKill)
		return errors.Join(err, derr)
	}
	return nil
}

// end stops and deletes a container's task, if it has one: SIGTERM, its time
// for that, SIGKILL.
func end(ctx context.Context, c client.Container, grace time.Duration) error {
	task, err := c.Task(ctx, nil)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	exited, err := task.Wait(ctx)
	if err != nil {
		return err
	}
	for _, try := range []struct {
		signal unix.Signal
		wait   time.Duration
		opts   []client.KillOpts
	}{{unix.SIGTERM, grace, nil}, {unix.SIGKILL, killWithin, []client.KillOpts{client.WithKillAll}}} {
		if try.wait == 0 {
			continue
		}
		if err := task.Kill(ctx, try.signal, try.opts...); err != nil && !errdefs.IsNotFound(err) && !errdefs.IsFailedPrecondition(err) {
			return err
		}
		timer := time.NewTimer(try.wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-exited:
			timer.Stop()
			if _, err := task.Delete(ctx); err != nil && !errdefs.IsNotFound(err) {
				return err
			}
			return nil
		case <-timer.C:
		}
	}
	return errs.Retry(errs.Timeout, "the task of %s does not end, not even when it is killed", c.ID())
}

// remove ends and deletes a container with its snapshot.
func (r runtime) remove(ctx context.Context, c client.Container, labels map[string]string) error {
	grace, err := parseStop(labels[labelStop])
	if err != nil {
		grace = defaultStop
	}
	if err := end(ctx, c, grace); err != nil {
		return err
	}
	if err := c.Delete(ctx, client.WithSnapshotCleanup); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	return nil
}

// Remove ends an instance and deletes its container and snapshot.
func (r runtime) Remove(ctx *driver.Context, id string) error {
	return r.with(ctx, func(ctx context.Context, cl *client.Client) error {
		c, labels, err := find(ctx, cl, id)
		if err != nil || c == nil {
			return err
		}
		return r.remove(ctx, c, labels)
	})
}
