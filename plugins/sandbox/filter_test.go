package sandbox

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/net/bpf"
)

const (
	auditI386 = 0x40000003
	auditARM  = 0x40000028
)

// judge interprets the filter over one call. Its virtual machine reads words in
// network order, whatever the machine that the filter is for.
func judge(t *testing.T, a abi, arch, number, arg0 uint32) uint32 {
	t.Helper()
	vm, err := bpf.NewVM(a.filter())
	if err != nil {
		t.Fatalf("the filter is not valid: %v", err)
	}
	data := make([]byte, 64)
	binary.BigEndian.PutUint32(data[offNumber:], number)
	binary.BigEndian.PutUint32(data[offArch:], arch)
	binary.BigEndian.PutUint32(data[offArg0:], arg0)
	got, err := vm.Run(data)
	if err != nil {
		t.Fatal(err)
	}
	return uint32(got)
}

// kernelNumbers are the system calls of an architecture as x/sys has them.
func kernelNumbers(t *testing.T, goarch string) map[string]uint32 {
	t.Helper()
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "golang.org/x/sys").Output()
	if err != nil {
		t.Fatalf("find golang.org/x/sys: %v", err)
	}
	text, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "unix", "zsysnum_linux_"+goarch+".go"))
	if err != nil {
		t.Fatal(err)
	}
	numbers := map[string]uint32{}
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) < 3 || f[1] != "=" || !strings.HasPrefix(f[0], "SYS_") {
			continue
		}
		n, err := strconv.ParseUint(f[2], 10, 32)
		if err != nil {
			t.Fatal(err)
		}
		numbers[strings.ToLower(strings.TrimPrefix(f[0], "SYS_"))] = uint32(n)
	}
	return numbers
}

// specified is the specification's list in the kernel's names.
var specified = map[string][]string{
	"kexec":                   {"kexec_load", "kexec_file_load"},
	"kernel modules":          {"init_module", "finit_module", "delete_module"},
	"mounts":                  {"mount", "umount2", "pivot_root"},
	"the new mount API":       {"open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr", "open_tree_attr"},
	"namespaces":              {"unshare", "setns"},
	"swap":                    {"swapon", "swapoff"},
	"reboot":                  {"reboot"},
	"bpf":                     {"bpf"},
	"io_uring":                {"io_uring_setup", "io_uring_enter", "io_uring_register"},
	"other processes":         {"ptrace", "process_vm_readv", "process_vm_writev"},
	"the kernel keyring":      {"add_key", "request_key", "keyctl"},
	"perf":                    {"perf_event_open"},
	"page faults":             {"userfaultfd"},
	"handles":                 {"open_by_handle_at"},
	"ports (amd64)":           {"iopl", "ioperm"},
	"setting the clock":       {"settimeofday", "clock_settime", "adjtimex", "clock_adjtime"},
	"accounting and the rest": {"acct", "quotactl", "quotactl_fd", "lookup_dcookie", "syslog"},
}

func TestDeniedIsWhatIsSpecified(t *testing.T) {
	var want, got []string
	for _, names := range specified {
		want = append(want, names...)
	}
	for _, c := range denied {
		got = append(got, c.name)
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("denied = %v, want %v", got, want)
	}
}

// TestFilter interprets the whole filter of each architecture: what is denied,
// what is answered as if the kernel did not have it, what kills, and that each
// other call that the architecture has is allowed.
func TestFilter(t *testing.T) {
	for goarch, a := range abis {
		t.Run(goarch, func(t *testing.T) {
			numbers := kernelNumbers(t, goarch)
			expect := func(what string, got, want uint32) {
				t.Helper()
				if got != want {
					t.Errorf("filter(%s) = %#x, want %#x", what, got, want)
				}
			}
			special := map[string]bool{"clone": true, "clone3": true}
			for _, c := range append(slices.Clone(denied), clone, clone3) {
				nr, has := numbers[c.name]
				// x/sys does not name the newest call everywhere yet.
				if c.name == "open_tree_attr" && !has {
					nr, has = 467, true
				}
				if want := a.number(c); has != (want != none) || has && nr != want {
					t.Errorf("%s is %d, x/sys has %d (%v)", c.name, int32(want), nr, has)
				}
				special[c.name] = true
			}
			for _, c := range denied {
				if nr := a.number(c); nr != none {
					expect(c.name, judge(t, a, a.arch, nr, 0), retErrno|eperm)
				}
			}
			expect("clone3", judge(t, a, a.arch, a.number(clone3), 0), retErrno|enosys)
			for _, flag := range []struct {
				name string
				bit  uint32
			}{
				{"NEWNS", 0x20000}, {"NEWCGROUP", 0x2000000}, {"NEWUTS", 0x4000000}, {"NEWIPC", 0x8000000},
				{"NEWUSER", 0x10000000}, {"NEWPID", 0x20000000}, {"NEWNET", 0x40000000},
			} {
				expect("clone with CLONE_"+flag.name, judge(t, a, a.arch, a.number(clone), flag.bit|17), retErrno|eperm)
			}
			// A thread as libc makes it, a fork, and Go's vfork.
			for _, flags := range []uint32{0x3d0f00, 0x1200011, 0x4111} {
				expect(fmt.Sprintf("clone(%#x)", flags), judge(t, a, a.arch, a.number(clone), flags), retAllow)
			}
			allowed := 0
			for name, nr := range numbers {
				if !special[name] {
					expect(name, judge(t, a, a.arch, nr, namespaces), retAllow)
					allowed++
				}
			}
			if allowed < 250 {
				t.Errorf("only %d allowed calls were tried", allowed)
			}
			for name, other := range map[string]uint32{"i386": auditI386, "arm": auditARM, "nothing": 0, "amd64": abis["amd64"].arch, "arm64": abis["arm64"].arch} {
				if other != a.arch {
					expect("getpid of "+name, judge(t, a, other, numbers["getpid"], 0), retKill)
				}
			}
			if goarch == "amd64" {
				expect("getpid of x32", judge(t, a, a.arch, 0x40000000|numbers["getpid"], 0), retKill)
				expect("number -1", judge(t, a, a.arch, none, 0), retKill)
			}
		})
	}
}

func TestFiltered(t *testing.T) {
	for goarch, want := range map[string]bool{"amd64": true, "arm64": true, "riscv64": false, "386": false} {
		if got := Filtered(goarch); got != want {
			t.Errorf("Filtered(%s) = %v, want %v", goarch, got, want)
		}
	}
}
