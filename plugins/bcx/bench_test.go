package bcx

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/pprof"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
)

func TestMain(m *testing.M) {
	if os.Getenv(CookieVariable) != "" {
		if err := echoPlugin(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// profileVariable names the file that takes the plugin's CPU profile.
const profileVariable = "BCX_TEST_PROFILE"

// echoPlugin is this program as a plugin. Its stdin's end ends it.
func echoPlugin() error {
	if path := os.Getenv(profileVariable); path != "" {
		f, err := os.Create(path)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := pprof.StartCPUProfile(f); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	go func() { // ends with the process
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	return Serve(ctx, echo{}, os.Stdout)
}

// echo answers what it gets.
type echo struct{ describer }

func (echo) Invoke(_ context.Context, req *connect.Request[driverv1.InvokeRequest], s *connect.ServerStream[driverv1.InvokeResponse]) error {
	return s.Send(&driverv1.InvokeResponse{Event: &driverv1.InvokeResponse_Result{Result: &driverv1.Result{ResultJson: req.Msg.GetArgsJson()}}})
}

func (echo) Stream(_ context.Context, s *connect.BidiStream[driverv1.StreamRequest, driverv1.StreamResponse]) error {
	for {
		m, err := s.Receive()
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := s.Send(&driverv1.StreamResponse{Frame: &driverv1.StreamResponse_Data{Data: m.GetData()}}); err != nil {
			return err
		}
	}
}

// plugin starts this program as a plugin of its own process.
func plugin(t testing.TB) (c *Client, pid int) {
	t.Helper()
	id := identity(t)
	dir, err := os.MkdirTemp("", "bcx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), CookieVariable+"="+Cookie, SocketDirVariable+"="+dir, ClientCertVariable+"="+id.PEM())
	cmd.Stderr = os.Stderr
	life, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		life.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("the plugin ended with %v", err)
		}
	})
	line := make([]byte, MaxHandshake)
	n, err := out.Read(line)
	if err != nil {
		t.Fatalf("read the handshake: %v", err)
	}
	h, err := ParseHandshake(line[:n], dir)
	if err != nil {
		t.Fatal(err)
	}
	c = Dial(id, h)
	t.Cleanup(c.Close)
	return c, cmd.Process.Pid
}

// spent is the processor time of this process and the plugin, which a busy
// machine does not change much.
func spent(t testing.TB, plugin int) (total time.Duration) {
	t.Helper()
	for _, pid := range []int{os.Getpid(), plugin} {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
		if err != nil {
			t.Fatal(err)
		}
		var text []byte
		for _, path := range tasks {
			if more, err := os.ReadFile(path); err == nil {
				text = append(text, more...)
			}
		}
		for line := range strings.Lines(string(text)) {
			var ns int64
			if _, err := fmt.Sscan(line, &ns); err != nil {
				t.Fatal(err)
			}
			total += time.Duration(ns)
		}
	}
	return total
}

func invokeEcho(ctx context.Context, c *Client, args string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := c.Invoke(ctx, connect.NewRequest(&driverv1.InvokeRequest{Driver: "echo", Kind: "echo", Operation: "echo", ArgsJson: args}))
	if err != nil {
		return err
	}
	defer s.Close()
	if !s.Receive() {
		return fmt.Errorf("no answer: %w", s.Err())
	}
	if got := s.Msg().GetResult().GetResultJson(); got != args {
		return fmt.Errorf("the plugin answered %d bytes, want %d", len(got), len(args))
	}
	return nil
}

func BenchmarkInvoke(b *testing.B) {
	for _, n := range []int{1, 16} {
		b.Run(fmt.Sprintf("callers=%d", n), func(b *testing.B) {
			c, pid := plugin(b)
			if err := invokeEcho(b.Context(), c, "[1]"); err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			before := spent(b, pid)
			b.ResetTimer()
			var owned sync.WaitGroup
			for i := range n {
				owned.Go(func() {
					for range (b.N + i) / n {
						if err := invokeEcho(b.Context(), c, `["hello"]`); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			owned.Wait()
			b.ReportMetric(float64((spent(b, pid)-before).Nanoseconds())/float64(b.N), "cpu-ns/op")
		})
	}
}

func BenchmarkStream(b *testing.B) {
	c, pid := plugin(b)
	chunk := bytes.Repeat([]byte("x"), 32<<10)
	b.SetBytes(int64(len(chunk)))
	s := c.Stream(b.Context())
	before := spent(b, pid)
	b.ResetTimer()
	sent := make(chan error, 1)
	go func() {
		for range b.N {
			if err := s.Send(&driverv1.StreamRequest{Frame: &driverv1.StreamRequest_Data{Data: chunk}}); err != nil {
				sent <- err
				return
			}
		}
		sent <- s.CloseRequest()
	}()
	for i := range b.N {
		m, err := s.Receive()
		if err != nil || !bytes.Equal(m.GetData(), chunk) {
			b.Fatalf("Receive %d = %d bytes, %v", i, len(m.GetData()), err)
		}
	}
	if err := errors.Join(<-sent, s.CloseResponse()); err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64((spent(b, pid)-before).Nanoseconds())/float64(b.N), "cpu-ns/op")
}
