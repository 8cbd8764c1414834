package sandbox

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const (
	shimWord = "bcx-shim"
	// connectWord makes the test binary a program that connects to a unix socket.
	connectWord = "connect"
)

func connects(name string) int {
	c, err := net.Dial("unix", name)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	c.Close()
	return 0
}

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == shimWord {
		os.Exit(ShimMain(os.Args[2:]))
	}
	if len(os.Args) == 3 && os.Args[1] == connectWord {
		os.Exit(connects(os.Args[2]))
	}
	os.Exit(m.Run())
}

// shell runs a line of sh as a plugin would be run, but as the test's own user,
// so that nothing but the sandbox is in its way.
func shell(t *testing.T, confine bool, folder, line string) (string, error) {
	t.Helper()
	return shellAs(t, -1, confine, folder, line)
}

func shellAs(t *testing.T, uid int, confine bool, folder, line string) (string, error) {
	t.Helper()
	return run(t, "/bin/sh", uid, confine, folder, "-c", line)
}

// run starts a program through the shim.
func run(t *testing.T, path string, uid int, confine bool, folder string, args ...string) (string, error) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cmd, err := Command(Spec{
		Shim: []string{"/proc/self/exe", shimWord}, Binary: f, Name: filepath.Base(path), UID: uid, GID: uid,
		Confine: confine, Folder: folder, Env: []string{"PATH=/usr/bin:/bin"},
	})
	if err != nil {
		t.Fatal(err)
	}
	cmd.Args = append(cmd.Args, args...)
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

func needsLandlock(t *testing.T) {
	t.Helper()
	if FileWall() == 0 {
		t.Skip("needs Landlock: this kernel has none, or it is not enabled")
	}
}

// TestFileWall tries everything twice: unconfined all of it works.
func TestFileWall(t *testing.T) {
	needsLandlock(t)
	own, other := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(other, "secret"), []byte("s3cret"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		line    string
		allowed bool
	}{
		{"cat /etc/passwd", true},
		{"cat /proc/self/status", true},
		{"ls /sys", true},
		{"ls /usr/lib", true},
		{"/usr/bin/true", true},
		{"echo x >/dev/null", true},
		{"head -c1 /dev/urandom", true},
		{"head -c1 /dev/zero", true},
		{"head -c1 /dev/full", true},
		// How a password reaches ipmitool.
		{"echo password | cat /dev/fd/0", true},
		{"echo password | { cat /dev/fd/3 3<&0; }", true},
		{"echo x >$OWN/a && cat $OWN/a && mkdir $OWN/d && mv $OWN/a $OWN/d/b && rm -r $OWN/d", true},
		{"mkfifo $OWN/fifo && ln -s fifo $OWN/link && rm $OWN/fifo $OWN/link", true},

		{"ls /", false},
		{"cat $OTHER/secret", false},
		{"ls $OTHER", false},
		{"echo x >$OTHER/new", false},
		{"echo x >>$OTHER/secret", false},
		{"mkdir $OTHER/d; rmdir $OTHER/d", false},
		{"ls /root", false},
		{"ls /home", false},
		{"ls /run", false},
		{"ls /var/lib", false},
		{"ls /tmp", false},
		{"ls /dev", false},
		{"true </dev/ptmx", false},
		{": >>/proc/self/comm", false},
		{": >>/etc/passwd", false},
		{"ln -s $OTHER/secret $OWN/l; cat $OWN/l; e=$?; rm $OWN/l; exit $e", false},
		{"ln $OTHER/secret $OWN/h && rm $OWN/h", false},
		{"echo x >$OWN/a; mv $OWN/a $OTHER/a; e=$?; rm -f $OWN/a; exit $e", false},
		// What it writes it cannot run.
		{"cp /bin/true $OWN/t; $OWN/t; e=$?; rm $OWN/t; exit $e", false},
	} {
		line := strings.NewReplacer("$OWN", own, "$OTHER", other).Replace(tt.line)
		out, err := shell(t, true, own, line)
		if (err == nil) != tt.allowed || err != nil && !strings.Contains(out, "ermission denied") && !strings.Contains(out, "cross-device") {
			t.Errorf("confined %q: %v, %q, want allowed %v", line, err, out, tt.allowed)
		}
		if out, err := shell(t, false, own, line); err != nil {
			t.Errorf("unconfined %q: %v, %q, want it to work", line, err, out)
		}
	}
}

func TestNoFolderToWriteIn(t *testing.T) {
	needsLandlock(t)
	if out, err := shell(t, true, "", "echo x >"+t.TempDir()+"/a"); err == nil {
		t.Errorf("a plugin without a folder wrote: %s", out)
	}
}

// TestShimHandsOnThreeDescriptors leaks one on purpose.
func TestShimHandsOnThreeDescriptors(t *testing.T) {
	fd, err := unix.Open("/etc/passwd", unix.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	// ls itself opens the folder that it lists: that one is 3.
	if out, err := shell(t, true, "", "ls /proc/self/fd | tr '\\n' ' '"); err != nil || out != "0 1 2 3" {
		t.Errorf("descriptors of a plugin = %q, %v, want 0 1 2, and 3 of ls", out, err)
	}
	out, err := exec.Command("/bin/sh", "-c", "ls /proc/self/fd").Output()
	if err != nil || !strings.Contains(string(out), fmt.Sprintf("\n%d\n", fd)) {
		t.Errorf("without the shim descriptor %d is not handed on: %q, %v", fd, out, err)
	}
}

// Without the shim, too, the binary's own descriptor does not outlive the exec.
func TestWithoutShimTheBinaryIsClosed(t *testing.T) {
	f, err := os.Open("/bin/sh")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cmd, err := Command(Spec{Binary: f, Name: "sh", UID: -1, GID: -1, Env: []string{"PATH=/usr/bin:/bin"}})
	if err != nil {
		t.Fatal(err)
	}
	name, err := filepath.EvalSymlinks("/bin/sh")
	if err != nil {
		t.Fatal(err)
	}
	cmd.Args = append(cmd.Args, "-c", "readlink /proc/$$/exe; ls -l /proc/$$/fd")
	out, err := cmd.CombinedOutput()
	exe, list, _ := strings.Cut(string(out), "\n")
	if err != nil || exe != name || strings.Contains(list, name) {
		t.Errorf("runs %s, %v, with\n%s\nwant %s, and no descriptor of it", exe, err, list, name)
	}
}

func TestHandled(t *testing.T) {
	for version, want := range map[int]uint64{1: 0x1fff, 2: 0x3fff, 3: 0x7fff, 4: 0x7fff, 5: 0xffff, 7: 0xffff, 9: 0xffff} {
		if got := handled(version); got != want {
			t.Errorf("handled(%d) = %#x, want %#x", version, got, want)
		}
	}
}

func TestResolverRule(t *testing.T) {
	for target, want := range map[string]string{
		"": "", "/etc/resolv.conf": "", "/usr/lib/resolv.conf": "", "/run/resolv.conf": "/run/resolv.conf",
		"/run/systemd/resolve/stub-resolv.conf": "/run/systemd/resolve",
	} {
		if got := resolverRule(target); got.path != want || got.rights&^mayRead != 0 {
			t.Errorf("resolverRule(%q) = %+v, want %q to read", target, got, want)
		}
	}
}

// A confined process cannot look into one of another sandbox, even of one user:
// plugins that share a user keep their secrets from each other.
func TestNeighbourOfOneUser(t *testing.T) {
	needsLandlock(t)
	if os.Geteuid() != 0 {
		t.Skip("needs root: the processes get a user of their own")
	}
	const uid = 61990
	neighbour := exec.Command("/bin/sleep", "60")
	neighbour.Env = []string{"TOKEN=s3cret"}
	neighbour.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	if err := neighbour.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = neighbour.Process.Kill()
		_ = neighbour.Wait()
	}()
	line := fmt.Sprintf("cat /proc/%d/environ", neighbour.Process.Pid)
	if out, err := shellAs(t, uid, true, "", line); err == nil || strings.Contains(out, "s3cret") {
		t.Errorf("confined, environment of another process: %q, %v", out, err)
	}
	if out, err := shellAs(t, uid, false, "", line); err != nil || !strings.Contains(out, "s3cret") {
		t.Errorf("unconfined: %q, %v, want it to work", out, err)
	}
	if FileWall() < 6 {
		t.Skip("needs Landlock 6: this kernel's cannot hold back signals")
	}
	line = fmt.Sprintf("kill -0 %d", neighbour.Process.Pid)
	if out, err := shellAs(t, uid, true, "", line); err == nil {
		t.Errorf("confined, a signal to another process: %q", out)
	}
	if out, err := shellAs(t, uid, true, "", "sleep 60 & kill -0 $! && kill $!"); err != nil {
		t.Errorf("confined, a signal to its own child: %q, %v, want it to work", out, err)
	}
	if out, err := shellAs(t, uid, false, "", line); err != nil {
		t.Errorf("unconfined, a signal to another process: %q, %v, want it to work", out, err)
	}
}

// A socket with a name that is no file's has no permissions: only the wall keeps
// a plugin from it.
func TestAbstractSocketOfAnother(t *testing.T) {
	if FileWall() < 6 {
		t.Skip("needs Landlock 6: this kernel's cannot hold back abstract sockets")
	}
	name := fmt.Sprintf("@bcx-test-%d", os.Getpid())
	l, err := net.Listen("unix", name)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if out, err := run(t, self, -1, true, "", connectWord, name); err == nil || !strings.Contains(out, "not permitted") {
		t.Errorf("confined: %q, %v, want that it is not permitted", out, err)
	}
	if out, err := run(t, self, -1, false, "", connectWord, name); err != nil {
		t.Errorf("unconfined: %q, %v, want it to work", out, err)
	}
}

// One byte forbids a core file, and that the kernel pipes one to a program.
func TestNoCore(t *testing.T) {
	out, err := shell(t, true, "", "grep core /proc/self/limits")
	if f := strings.Fields(out); err != nil || len(f) != 7 || f[4] != "1" || f[5] != "1" {
		t.Errorf("limit of core files = %q, %v, want 1 byte", out, err)
	}
}

// Node.js starts behind the wall and the filter, serves a socket in its folder,
// starts a program, and is kept from other files.
func TestNodeRunsConfined(t *testing.T) {
	needsLandlock(t)
	const node = "/usr/bin/node"
	if _, err := os.Stat(node); err != nil {
		t.Skip("needs Node.js: " + err.Error())
	}
	other := t.TempDir()
	script := `
const fs = require('fs'), net = require('net'), path = process.argv[1] + '/s.sock';
require('tls').createSecureContext();
require('child_process').execFileSync('/bin/true');
let files = '';
for (const f of ['/etc/passwd', process.argv[2]]) {
  try { fs.openSync(f); files += ' open'; } catch (e) { files += ' ' + e.code; }
}
const server = net.createServer(c => c.end('hello')).listen(path, () => {
  net.connect(path).on('data', d => console.log(String(d) + files)).on('end', () => server.close());
});`
	for confine, want := range map[bool]string{true: "hello open EACCES", false: "hello open open"} {
		own := t.TempDir()
		out, err := run(t, node, -1, confine, own, "-e", script, own, other)
		if err != nil || out != want {
			t.Errorf("node, confined %v: %q, %v, want %q", confine, out, err, want)
		}
	}
}
