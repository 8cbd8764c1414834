package lab

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Step is one line of the timeline.
type Step struct {
	Name string
	Took time.Duration
}

// Names of the lab's site, machine and image.
const (
	SiteName    = "site-1"
	PoolName    = "rack-1"
	MachineName = "machine-1"
	ImageName   = "small-node"
	sshKey      = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBxkDZ6M1u1yiHnqvK7C2gOWFYQ0D0K0Jm4n3cSsv5m0 demo"
)

// Artifacts of the build, under Config.Out.
func (l *Lab) artifact(name string) string { return filepath.Join(l.Out, "qemu-amd64", name) }

// MainJob takes an empty site to a deployed machine on real parts. It says what
// happens on out, and gives what each step took, up to the first that failed.
func (l *Lab) MainJob(ctx context.Context, out io.Writer) ([]Step, error) {
	var done []Step
	for _, s := range []struct {
		name string
		run  func(context.Context) error
	}{
		{"gateway: keys, store, listening", l.jobGateway},
		{"site added, its join string put into a copy of the image", l.jobCustomize},
		{"box boots from its disk", l.jobBoot},
		{"box dials home", l.WaitSiteOnline},
		{"machine enrolled", l.jobEnroll},
		{"power on, signed, over IPMI", l.jobPower},
		{"power read over Redfish", l.jobRedfish},
		{"machine network-boots and reports its hardware", l.jobInspect},
		{"image imported", l.jobImport},
		{"machine deployed, its node dials home", l.jobDeploy},
		{"disk equals the image outside the seed", l.jobCompare},
	} {
		fmt.Fprintf(out, "\n== %s\n", s.name)
		start := time.Now()
		if err := s.run(ctx); err != nil {
			return done, fmt.Errorf("%s: %w", s.name, err)
		}
		done = append(done, Step{s.name, time.Since(start)})
		fmt.Fprintf(out, "   %.1f s\n", time.Since(start).Seconds())
	}
	return done, nil
}

func (l *Lab) jobGateway(ctx context.Context) error {
	if err := l.Keys(ctx); err != nil {
		return err
	}
	return l.Serve(ctx)
}

// AddSite adds the lab's site and gives its join string.
func (l *Lab) AddSite(ctx context.Context) (string, error) {
	join, err := l.CLI(ctx, nil, "site", "add", SiteName)
	return strings.TrimSpace(join), err
}

func (l *Lab) jobCustomize(ctx context.Context) error {
	join, err := l.AddSite(ctx)
	if err != nil {
		return err
	}
	config := filepath.Join(l.Dir, "box.toml")
	if err := os.WriteFile(config, []byte(BoxConfig()), 0o600); err != nil {
		return err
	}
	_, err = l.CLI(ctx, []byte(join), "image", "customize", "--config", config, "--join-file", "-", l.artifact("site.img"), l.boxImage())
	if err != nil {
		return err
	}
	// The disk that the image is flashed to is larger than the image: data lives on the rest.
	return os.Truncate(l.boxImage(), 4<<30)
}

func (l *Lab) boxImage() string { return filepath.Join(l.Dir, "box.img") }

func (l *Lab) jobBoot(ctx context.Context) error {
	if err := l.UplinkDHCP(); err != nil {
		return err
	}
	if err := l.StartBox(ctx, l.boxImage()); err != nil {
		return err
	}
	return l.Box.WaitMarker(ctx, "bc-init: ready", 60*time.Second)
}

// WaitSiteOnline waits until the gateway lists the site as online.
func (l *Lab) WaitSiteOnline(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	return Poll(ctx, "wait for the site", func() (bool, error) {
		out, err := l.quiet().CLI(ctx, nil, "site", "list")
		return strings.Contains(out, "online"), err
	})
}

// quiet is the lab without its log of CLI calls.
func (l *Lab) quiet() *Lab {
	q := *l
	q.Log = nil
	return &q
}

// EnrollMachine puts the machine behind the rig's IPMI BMC into a pool.
func (l *Lab) EnrollMachine(ctx context.Context) error {
	if _, err := l.CLI(ctx, nil, "pool", "add", PoolName, "--site", SiteName); err != nil {
		return err
	}
	credential := fmt.Sprintf(`{"username":%q,"password":%q}`, BMCUser, BMCPassword)
	if _, err := l.CLI(ctx, []byte(credential), "secret", "put", "rig-bmc"); err != nil {
		return err
	}
	_, err := l.CLI(ctx, nil, "metal", "enroll", MachineName, "--pool", PoolName, "--driver", "ipmi",
		"--address", BMCAddr, "--credentials", "secret://default/rig-bmc", "--mac", MachineMAC)
	return err
}

// EnrollRedfish enrols the same hardware a second time, behind its Redfish front.
func (l *Lab) EnrollRedfish(ctx context.Context) error {
	_, err := l.CLI(ctx, nil, "metal", "enroll", MachineName+"-redfish", "--pool", PoolName, "--driver", "redfish",
		"--address", "https://"+BMCAddr, "--credentials", "secret://default/rig-bmc", "--pin", l.Redfish.SPKI())
	return err
}

func (l *Lab) jobEnroll(ctx context.Context) error {
	if err := l.EnrollMachine(ctx); err != nil {
		return err
	}
	return l.EnrollRedfish(ctx)
}

func (l *Lab) jobPower(ctx context.Context) error {
	if _, err := l.CLI(ctx, nil, "metal", "power", MachineName, "on"); err != nil {
		return err
	}
	if !l.Metal.Running() {
		return fmt.Errorf("the command succeeded, but the machine does not run")
	}
	return l.wantPower(ctx, MachineName, "on")
}

func (l *Lab) wantPower(ctx context.Context, machine, want string) error {
	got, err := l.CLI(ctx, nil, "metal", "power", machine)
	if err != nil {
		return err
	}
	if got = strings.TrimSpace(got); got != want {
		return fmt.Errorf("power of %s = %q, want %q", machine, got, want)
	}
	return nil
}

func (l *Lab) jobRedfish(ctx context.Context) error {
	return l.wantPower(ctx, MachineName+"-redfish", "on")
}

// show prints a CLI answer, indented.
func (l *Lab) show(out string) {
	if l.Log != nil {
		for line := range strings.Lines(out) {
			fmt.Fprintf(l.Log, "    %s\n", strings.TrimRight(line, "\n"))
		}
	}
}

func (l *Lab) jobInspect(ctx context.Context) error {
	out, err := l.CLI(ctx, nil, "metal", "inspect", MachineName, "--wait")
	l.show(out)
	if err != nil {
		return l.withSerial(err)
	}
	out, err = l.CLI(ctx, nil, "metal", "show", MachineName)
	l.show(out)
	if err != nil {
		return err
	}
	for _, want := range []string{DiskSerial, MachineMAC} {
		if !strings.Contains(out, want) {
			return fmt.Errorf("the reported hardware lacks %s", want)
		}
	}
	return nil
}

// withSerial adds the machine's last serial lines to an error.
func (l *Lab) withSerial(err error) error {
	if vm := l.Metal.VM(); vm != nil {
		return fmt.Errorf("%w\nthe machine's serial line ends:\n%s", err, vm.Tail(25))
	}
	return err
}

func (l *Lab) jobImport(ctx context.Context) error {
	_, err := l.CLI(ctx, nil, "artifact", "import", l.artifact("node.raw.zst"), "--name", ImageName)
	return err
}

func (l *Lab) jobDeploy(ctx context.Context) error {
	key := filepath.Join(l.Dir, "demo.pub")
	if err := os.WriteFile(key, []byte(sshKey+"\n"), 0o644); err != nil {
		return err
	}
	out, err := l.CLI(ctx, nil, "metal", "deploy", MachineName, "--image", ImageName, "--disk-serial", DiskSerial,
		"--hostname", "node-1", "--ssh-key-file", key, "--wait")
	l.show(out)
	if err != nil {
		return l.withSerial(err)
	}
	out, err = l.quiet().CLI(ctx, nil, "metal", "show", MachineName)
	if err != nil {
		return err
	}
	if !strings.Contains(out, "deployed") || !strings.Contains(out, "node") {
		return fmt.Errorf("the machine is not shown as deployed with a node:\n%s", out)
	}
	return nil
}

func (l *Lab) jobCompare(ctx context.Context) error {
	return CompareDisk(l.artifact("node.raw.zst"), l.Metal.Disk)
}
