package sandbox

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Rights over files, by what they are for.
const (
	mayRead   = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR
	mayRun    = mayRead | unix.LANDLOCK_ACCESS_FS_EXECUTE
	mayChange = mayRead | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_TRUNCATE |
		unix.LANDLOCK_ACCESS_FS_REMOVE_DIR | unix.LANDLOCK_ACCESS_FS_REMOVE_FILE | unix.LANDLOCK_ACCESS_FS_REFER |
		unix.LANDLOCK_ACCESS_FS_MAKE_DIR | unix.LANDLOCK_ACCESS_FS_MAKE_REG | unix.LANDLOCK_ACCESS_FS_MAKE_SOCK |
		unix.LANDLOCK_ACCESS_FS_MAKE_FIFO | unix.LANDLOCK_ACCESS_FS_MAKE_SYM
	mayUse = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE |
		unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	// onFile are the rights that a rule on something other than a folder can give.
	onFile = unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE |
		unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
)

// rule gives rights over a path and what lies below it.
type rule struct {
	path   string
	rights uint64
}

// rules are the files of a confined plugin: the system to read and run, a few
// harmless devices, and its own folder to write in. What it writes there it
// cannot execute. resolver is where /etc/resolv.conf leads to.
func rules(folder, resolver string) []rule {
	list := []rule{
		{"/usr", mayRun}, {"/bin", mayRun}, {"/sbin", mayRun},
		{"/lib", mayRun}, {"/lib32", mayRun}, {"/lib64", mayRun}, {"/libx32", mayRun},
		{"/etc", mayRead}, {"/proc", mayRead}, {"/sys", mayRead},
		{"/dev/null", mayUse}, {"/dev/zero", mayUse}, {"/dev/full", mayUse}, {"/dev/random", mayUse}, {"/dev/urandom", mayUse},
	}
	if r := resolverRule(resolver); r.path != "" {
		list = append(list, r)
	}
	if folder != "" {
		list = append(list, rule{folder, mayChange})
	}
	return list
}

// resolverRule covers a resolv.conf that is a link out of /etc: its folder,
// since such a file is replaced and not rewritten, unless that is a whole tree
// such as /run.
func resolverRule(target string) rule {
	dir := filepath.Dir(target)
	switch {
	case target == "" || strings.HasPrefix(target, "/etc/") || strings.HasPrefix(target, "/usr/"):
		return rule{}
	case strings.Count(dir, "/") < 2:
		return rule{target, unix.LANDLOCK_ACCESS_FS_READ_FILE}
	}
	return rule{dir, mayRead}
}

// handled are the rights that a version of Landlock can withhold.
func handled(version int) uint64 {
	rights := uint64(unix.LANDLOCK_ACCESS_FS_MAKE_SYM<<1 - 1)
	if version >= 2 {
		rights |= unix.LANDLOCK_ACCESS_FS_REFER
	}
	if version >= 3 {
		rights |= unix.LANDLOCK_ACCESS_FS_TRUNCATE
	}
	if version >= 5 {
		rights |= unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	}
	return rights
}

// scoped is what a version of Landlock keeps within the wall beside files: sockets
// with a name that is no file's, which anybody in the network namespace can reach,
// and signals, which else reach every process of the same uid.
func scoped(version int) uint64 {
	if version < 6 {
		return 0
	}
	return unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | unix.LANDLOCK_SCOPE_SIGNAL
}

// FileWall is the version of Landlock that the kernel offers; 0: none, and
// confined plugins are kept from files by their uid alone.
func FileWall() int {
	v, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 {
		return 0
	}
	return int(v)
}

// wallFiles leaves this thread, and what it executes, the files of rules and the
// open binary. no_new_privs is set already. A kernel without Landlock gets no
// wall: the host says so.
func wallFiles(folder string, binary int) error {
	version := FileWall()
	if version == 0 {
		return nil
	}
	all := handled(version)
	attr := unix.LandlockRulesetAttr{Handled_access_fs: all, Scoped: scoped(version)}
	// No more of the struct than is needed: the rest is younger than some kernels.
	size := unsafe.Sizeof(attr.Handled_access_fs)
	if attr.Scoped != 0 {
		size = unsafe.Offsetof(attr.Scoped) + unsafe.Sizeof(attr.Scoped)
	}
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attr)), size, 0)
	if errno != 0 {
		return fmt.Errorf("make rule set: %w", errno)
	}
	set := int(fd)
	defer unix.Close(set)
	resolver, err := filepath.EvalSymlinks("/etc/resolv.conf")
	if err != nil {
		resolver = ""
	}
	for _, r := range rules(folder, resolver) {
		if err := allowPath(set, r, all); err != nil {
			return fmt.Errorf("rule on %s: %w", r.path, err)
		}
	}
	// A copy in memory lies outside of what Landlock judges, and takes no rule.
	if err := allow(set, binary, mayRun&onFile&all); err != nil && !errors.Is(err, unix.EBADFD) {
		return fmt.Errorf("rule on the binary: %w", err)
	}
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, uintptr(set), 0, 0); errno != 0 {
		return fmt.Errorf("restrict: %w", errno)
	}
	return nil
}

// allowPath adds a rule; what this machine does not have needs none.
func allowPath(set int, r rule, all uint64) error {
	fd, err := unix.Open(r.path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	rights := r.rights & all
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		rights &= onFile
	}
	return allow(set, fd, rights)
}

func allow(set, fd int, rights uint64) error {
	attr := unix.LandlockPathBeneathAttr{Allowed_access: rights, Parent_fd: int32(fd)}
	_, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(set), unix.LANDLOCK_RULE_PATH_BENEATH, uintptr(unsafe.Pointer(&attr)), 0, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}
