// Package containerdtest runs a containerd of a test's own, with an image that
// the test makes.
package containerdtest

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	client "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"

	"github.com/better-compute/site-appliance/plugins/host/hosttest"
)

// Image is the reference of the image that Start puts in: its program waits for
// SIGTERM, or ends at once with the exit code that its argument names.
const Image = "localhost/idle:1"

// Namespace is where the image lies. It is this process's own: a container's
// cgroup is named by namespace and id alone, whichever containerd made it.
func Namespace() string { return fmt.Sprintf("bc-test-%d", os.Getpid()) }

// Daemon is a running containerd.
type Daemon struct {
	Address     string
	Snapshotter string
	t           testing.TB
	client      *client.Client
}

// Start runs containerd until the test ends. It skips the test where there is
// no root, no containerd or no runc.
func Start(t testing.TB) *Daemon {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: containerd makes containers")
	}
	program, err := exec.LookPath("containerd")
	if err != nil {
		t.Skip("needs containerd: the package is not installed (scripts/deps)")
	}
	if _, err := exec.LookPath("runc"); err != nil {
		t.Skip("needs runc: the package is not installed (scripts/deps)")
	}
	// A test's own folder has a name too long for a socket.
	dir, err := os.MkdirTemp("", "ctd")
	if err != nil {
		t.Fatal(err)
	}
	d := &Daemon{Address: filepath.Join(dir, "c.sock"), Snapshotter: "overlayfs", t: t}
	config := filepath.Join(dir, "config.toml")
	text := fmt.Sprintf(`version = 2
root = %q
state = %q
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = %q
[ttrpc]
  address = %q
`, filepath.Join(dir, "root"), filepath.Join(dir, "state"), d.Address, d.Address+".ttrpc")
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(program, "-c", config)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		d.clear()
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Errorf("stop containerd: %v", err)
		}
		cmd.Wait()
		if t.Failed() {
			if out, err := os.ReadFile(log.Name()); err == nil {
				t.Logf("containerd's log:\n%s", out[max(0, len(out)-8<<10):])
			}
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("containerd left something: %v", err)
		}
		// runc makes a cgroup for the namespace and leaves it; one in use stays.
		for _, pattern := range []string{"/sys/fs/cgroup/" + Namespace(), "/sys/fs/cgroup/*/" + Namespace()} {
			groups, err := filepath.Glob(pattern)
			if err != nil {
				t.Error(err)
			}
			for _, g := range groups {
				_ = os.Remove(g)
			}
		}
	})
	d.await()
	d.load()
	return d
}

func (d *Daemon) await() {
	d.t.Helper()
	var err error
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if _, err = os.Stat(d.Address); err != nil {
			continue
		}
		if d.client, err = client.New(d.Address, client.WithTimeout(5*time.Second), client.WithDefaultNamespace(Namespace())); err != nil {
			continue
		}
		if _, err = d.client.Version(d.t.Context()); err == nil {
			return
		}
	}
	d.t.Fatalf("containerd does not answer: %v", err)
}

// Context is ctx in the test's namespace.
func Context(ctx context.Context) context.Context { return namespaces.WithNamespace(ctx, Namespace()) }

// Client is connected in the test's namespace.
func (d *Daemon) Client() *client.Client { return d.client }

// load imports the image, and takes the plain snapshotter where overlays do not work.
func (d *Daemon) load() {
	d.t.Helper()
	ctx := Context(d.t.Context())
	archive, err := archive(hosttest.Build(d.t, "github.com/better-compute/site-appliance/plugins/containerd/testdata/idle"))
	if err != nil {
		d.t.Fatal(err)
	}
	found, err := d.client.Import(ctx, bytes.NewReader(archive))
	if err != nil || len(found) != 1 {
		d.t.Fatalf("import image: %v, %d images", err, len(found))
	}
	if _, err := d.client.SnapshotService(d.Snapshotter).Stat(ctx, "none"); err != nil && strings.Contains(err.Error(), "not loaded") {
		d.Snapshotter = "native"
	}
}

// archive is an OCI image of one static program, as a tar.
func archive(program []byte) ([]byte, error) {
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	if err := add(w, "idle", 0o755, program); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	files := map[string][]byte{"oci-layout": []byte(`{"imageLayoutVersion":"1.0.0"}`)}
	blob := func(kind string, content []byte) map[string]any {
		sum := sha256.Sum256(content)
		name := hex.EncodeToString(sum[:])
		files["blobs/sha256/"+name] = content
		return map[string]any{"mediaType": "application/vnd.oci.image." + kind, "digest": "sha256:" + name, "size": len(content)}
	}
	encode := func(v any) []byte {
		data, _ := json.Marshal(v) // maps of strings and numbers always encode
		return data
	}
	first := blob("layer.v1.tar", layer.Bytes())
	config := blob("config.v1+json", encode(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "config": map[string]any{"Entrypoint": []string{"/idle"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []any{first["digest"]}},
	}))
	image := blob("manifest.v1+json", encode(map[string]any{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config, "layers": []any{first},
	}))
	image["annotations"] = map[string]string{"io.containerd.image.name": Image}
	files["index.json"] = encode(map[string]any{"schemaVersion": 2, "manifests": []any{image}})
	var out bytes.Buffer
	w = tar.NewWriter(&out)
	for name, content := range files {
		if err := add(w, name, 0o644, content); err != nil {
			return nil, err
		}
	}
	return out.Bytes(), w.Close()
}

func add(w *tar.Writer, name string, mode int64, content []byte) error {
	if err := w.WriteHeader(&tar.Header{Name: name, Mode: mode, Size: int64(len(content))}); err != nil {
		return err
	}
	_, err := w.Write(content)
	return err
}

// Kill ends a container's task from outside.
func (d *Daemon) Kill(id string) {
	d.t.Helper()
	ctx := Context(d.t.Context())
	task := d.task(ctx, id)
	if task == nil {
		d.t.Fatalf("container %s has no task", id)
	}
	exited, err := task.Wait(ctx)
	if err == nil {
		err = task.Kill(ctx, syscall.SIGKILL)
	}
	if err != nil {
		d.t.Fatal(err)
	}
	<-exited
}

// DropTask ends and deletes a container's task, as a reboot does.
func (d *Daemon) DropTask(id string) {
	d.t.Helper()
	ctx := Context(d.t.Context())
	task := d.task(ctx, id)
	if task == nil {
		d.t.Fatalf("container %s has no task", id)
	}
	if _, err := task.Delete(ctx, client.WithProcessKill); err != nil {
		d.t.Fatal(err)
	}
}

// PID is the process of a container's task; 0 where it has none that runs.
func (d *Daemon) PID(id string) uint32 {
	d.t.Helper()
	ctx := Context(d.t.Context())
	task := d.task(ctx, id)
	if task == nil {
		return 0
	}
	st, err := task.Status(ctx)
	if err != nil || st.Status != client.Running {
		return 0
	}
	return task.Pid()
}

func (d *Daemon) task(ctx context.Context, id string) client.Task {
	c, err := d.client.LoadContainer(ctx, id)
	if err != nil {
		return nil
	}
	task, err := c.Task(ctx, nil)
	if err != nil {
		return nil
	}
	return task
}

// Plain makes and runs a container that is nobody's instance.
func (d *Daemon) Plain(id string, opts ...client.NewContainerOpts) {
	d.t.Helper()
	ctx := Context(d.t.Context())
	image, err := d.client.GetImage(ctx, Image)
	if err == nil {
		err = image.Unpack(ctx, d.Snapshotter)
	}
	if err != nil {
		d.t.Fatal(err)
	}
	if err := d.run(ctx, id, image, opts); err != nil {
		d.t.Fatal(err)
	}
}

// Left lists the containers that there are.
func (d *Daemon) Left() []string {
	d.t.Helper()
	ctx := Context(d.t.Context())
	var names []string
	all, err := d.client.Containers(ctx)
	if err != nil {
		d.t.Fatal(err)
	}
	for _, c := range all {
		names = append(names, c.ID())
	}
	return names
}

// clear removes what a failed test left.
func (d *Daemon) clear() {
	if d.client == nil {
		return
	}
	ctx, cancel := context.WithTimeout(Context(context.Background()), 20*time.Second)
	defer cancel()
	all, err := d.client.Containers(ctx)
	if err != nil {
		d.t.Errorf("list containers: %v", err)
	}
	for _, c := range all {
		if task, err := c.Task(ctx, nil); err == nil {
			task.Delete(ctx, client.WithProcessKill)
		}
		c.Delete(ctx, client.WithSnapshotCleanup)
	}
	d.client.Close()
}
