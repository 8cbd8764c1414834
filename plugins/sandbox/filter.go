package sandbox

import "golang.org/x/net/bpf"

// none stands for a call that an architecture does not have.
const none = ^uint32(0)

// call is a system call with its numbers.
type call struct {
	name         string
	amd64, arm64 uint32
}

// denied is what no driver needs and a compromised one could abuse.
var denied = []call{
	{"kexec_load", 246, 104},
	{"kexec_file_load", 320, 294},
	{"init_module", 175, 105},
	{"finit_module", 313, 273},
	{"delete_module", 176, 106},
	{"mount", 165, 40},
	{"umount2", 166, 39},
	{"pivot_root", 155, 41},
	{"open_tree", 428, 428},
	{"move_mount", 429, 429},
	{"fsopen", 430, 430},
	{"fsconfig", 431, 431},
	{"fsmount", 432, 432},
	{"fspick", 433, 433},
	{"mount_setattr", 442, 442},
	{"open_tree_attr", 467, 467},
	{"unshare", 272, 97},
	{"setns", 308, 268},
	{"swapon", 167, 224},
	{"swapoff", 168, 225},
	{"reboot", 169, 142},
	{"bpf", 321, 280},
	{"io_uring_setup", 425, 425},
	{"io_uring_enter", 426, 426},
	{"io_uring_register", 427, 427},
	{"ptrace", 101, 117},
	{"process_vm_readv", 310, 270},
	{"process_vm_writev", 311, 271},
	{"add_key", 248, 217},
	{"request_key", 249, 218},
	{"keyctl", 250, 219},
	{"perf_event_open", 298, 241},
	{"userfaultfd", 323, 282},
	{"open_by_handle_at", 304, 265},
	{"iopl", 172, none},
	{"ioperm", 173, none},
	{"settimeofday", 164, 170},
	{"clock_settime", 227, 112},
	{"adjtimex", 159, 171},
	{"clock_adjtime", 305, 266},
	{"acct", 163, 89},
	{"quotactl", 179, 60},
	{"quotactl_fd", 443, 443},
	{"lookup_dcookie", 212, 18},
	{"syslog", 103, 116},
}

var (
	clone  = call{"clone", 56, 220}
	clone3 = call{"clone3", 435, 435}
)

// namespaces are the flags of clone(2) that make a namespace: NEWNS, NEWCGROUP,
// NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET. NEWTIME lies in the bits of the exit
// signal: clone(2) cannot take it.
const namespaces = 0x7e020000

// abi is what the filter has to know of an architecture.
type abi struct {
	// arch is its number in a call's description (AUDIT_ARCH_*).
	arch uint32
	// x32 marks the calls of another ABI that share arch; 0: there is none.
	x32    uint32
	number func(call) uint32
}

// abis are the architectures that have a filter, by Go's name.
var abis = map[string]abi{
	"amd64": {arch: 0xc000003e, x32: 0x40000000, number: func(c call) uint32 { return c.amd64 }},
	"arm64": {arch: 0xc00000b7, number: func(c call) uint32 { return c.arm64 }},
}

// Filtered says whether plugins are filtered on an architecture.
func Filtered(goarch string) bool {
	_, ok := abis[goarch]
	return ok
}

// Denied lists the system calls that a filtered plugin is refused with EPERM on
// an architecture, by name; with clone, only where it makes a namespace.
func Denied(goarch string) []string {
	a, ok := abis[goarch]
	if !ok {
		return nil
	}
	var names []string
	for _, c := range denied {
		if a.number(c) != none {
			names = append(names, c.name)
		}
	}
	return names
}

// What the filter answers.
const (
	retKill  = 0x80000000
	retErrno = 0x00050000
	retAllow = 0x7fff0000
	eperm    = 1
	enosys   = 38
)

// The layout of struct seccomp_data on a little-endian machine.
const (
	offNumber = 0
	offArch   = 4
	offArg0   = 16 // low half
)

// filter is the program: a call from another ABI kills the process, what is
// denied is EPERM, clone3 is ENOSYS (its flags lie in memory, out of a filter's
// reach, and libc and Go fall back to clone), and the rest is allowed.
func (a abi) filter() []bpf.Instruction {
	kill := bpf.RetConstant{Val: retKill}
	p := []bpf.Instruction{
		bpf.LoadAbsolute{Off: offArch, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: a.arch, SkipTrue: 1},
		kill,
		bpf.LoadAbsolute{Off: offNumber, Size: 4},
	}
	if a.x32 != 0 {
		p = append(p, bpf.JumpIf{Cond: bpf.JumpLessThan, Val: a.x32, SkipTrue: 1}, kill)
	}
	for _, c := range denied {
		if nr := a.number(c); nr != none {
			p = append(p, bpf.JumpIf{Cond: bpf.JumpEqual, Val: nr, SkipFalse: 1}, bpf.RetConstant{Val: retErrno | eperm})
		}
	}
	return append(p,
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: a.number(clone3), SkipFalse: 1}, bpf.RetConstant{Val: retErrno | enosys},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: a.number(clone), SkipFalse: 3},
		bpf.LoadAbsolute{Off: offArg0, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: namespaces, SkipFalse: 1}, bpf.RetConstant{Val: retErrno | eperm},
		bpf.RetConstant{Val: retAllow})
}
