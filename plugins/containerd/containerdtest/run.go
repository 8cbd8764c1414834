package containerdtest

import (
	"context"

	client "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/oci"
)

func (d *Daemon) run(ctx context.Context, id string, image client.Image, opts []client.NewContainerOpts) error {
	c, err := d.client.NewContainer(ctx, id, append([]client.NewContainerOpts{
		client.WithImage(image), client.WithSnapshotter(d.Snapshotter), client.WithNewSnapshot(id, image),
		client.WithRuntime("io.containerd.runc.v2", nil), client.WithNewSpec(oci.WithImageConfig(image)),
	}, opts...)...)
	if err != nil {
		return err
	}
	task, err := c.NewTask(ctx, cio.NullIO)
	if err != nil {
		return err
	}
	return task.Start(ctx)
}
