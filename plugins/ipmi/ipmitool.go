package ipmi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/printable"
	"github.com/better-compute/site-appliance/plugins/driver"
)

const (
	// runTimeout bounds one ipmitool run.
	runTimeout = 30 * time.Second
	// maxOutput bounds what is kept of one run's output.
	maxOutput = 1 << 20
)

// searchPath is where ipmitool is looked for, in this order.
func searchPath() []string {
	return []string{"/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin"}
}

// findTool is ipmitool's absolute path.
func findTool(dirs []string) (string, error) {
	for _, dir := range dirs {
		path := dir + "/ipmitool"
		if st, err := os.Stat(path); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return "", errors.New("ipmitool is not installed in " + strings.Join(dirs, ", "))
}

// once makes ipmitool send a request one time and wait longer than our own
// limit: by itself it repeats, and a slow BMC then cycles a machine three times.
var once = []string{"-R", "1", "-N", "20"}

// patient waits 3 s for each answer, so that with a dead BMC our own limit
// comes first and says so: ipmitool's text is that of a wrong password.
var patient = []string{"-N", "3"}

// toolPath is all of ipmitool's environment.
const toolPath = "PATH=/usr/sbin:/usr/bin:/sbin:/bin"

// tool runs ipmitool against one BMC.
type tool struct {
	dirs    []string
	timeout time.Duration
	config  config
	login   credentials
}

// run answers ipmitool's standard output. A failure has its code: unreachable
// after the timeout, else bmc-error with the first line of what it said.
func (t *tool) run(ctx context.Context, repeat []string, args ...string) (string, error) {
	path, err := findTool(t.dirs)
	if err != nil {
		return "", errs.New(errs.DriverError, "%v", err)
	}
	password, err := passwordPipe(t.login.password.Reveal())
	if err != nil {
		return "", err
	}
	defer password.Close()
	limited, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	cmd := exec.CommandContext(limited, path, append(t.argv(repeat), args...)...)
	cmd.Env = []string{toolPath}
	cmd.Dir = "/"
	cmd.ExtraFiles = []*os.File{password}
	cmd.WaitDelay = 2 * time.Second
	var stdout, stderr bounded
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err = cmd.Run()
	switch {
	case err == nil:
		return stdout.String(), nil
	case ctx.Err() != nil:
		return "", fmt.Errorf("ipmitool: %w", ctx.Err())
	case limited.Err() != nil:
		return "", errs.Retry(errs.Unreachable, "BMC %s did not answer within %v", t.config.host, t.timeout)
	}
	reason := t.firstLine(stderr.String(), stdout.String())
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
			return "", errs.Retry(errs.BmcError, "ipmitool died of %v (cipher suite %d): %s", ws.Signal(), t.config.suite, reason)
		}
		return "", errs.Retry(errs.BmcError, "ipmitool: %s", reason)
	}
	return "", fmt.Errorf("run ipmitool: %w", err)
}

// argv is what every run begins with.
func (t *tool) argv(repeat []string) []string {
	return append([]string{"-I", "lanplus", "-C", strconv.Itoa(t.config.suite), "-H", t.config.host, "-p", strconv.Itoa(t.config.port),
		"-U", t.login.username, "-L", "ADMINISTRATOR", "-f", "/dev/fd/3"}, repeat...)
}

// firstLine is the first line that says something, never with the password.
func (t *tool) firstLine(outputs ...string) string {
	for _, out := range outputs {
		for l := range strings.Lines(out) {
			if l = strings.TrimSpace(l); l != "" {
				// The password first: a cut could leave a part of it.
				l = strings.ReplaceAll(l, string(t.login.password.Reveal()), "[redacted]")
				return printable.Text(l[:min(len(l), 300)], '?')
			}
		}
	}
	return "it failed without a word"
}

// passwordPipe holds the password for one read. It fits in the pipe's buffer.
func passwordPipe(password []byte) (*os.File, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make password pipe: %w", err)
	}
	_, err = w.Write(password)
	if cerr := w.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		r.Close()
		return nil, fmt.Errorf("fill password pipe: %w", err)
	}
	return r, nil
}

// bounded keeps the first maxOutput bytes and swallows the rest.
type bounded struct{ bytes.Buffer }

func (b *bounded) Write(p []byte) (int, error) {
	b.Buffer.Write(p[:min(len(p), maxOutput-b.Len())])
	return len(p), nil
}

// connect reads the credentials and is ready to run.
func (d *options) connect(ctx *driver.Context, c config) (*tool, error) {
	login, err := readCredentials(ctx)
	if err != nil {
		return nil, err
	}
	return &tool{dirs: d.dirs, timeout: d.timeout, config: c, login: login}, nil
}
