package conformance

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// listensOnly looks for every socket that a process of the plugin's group listens on.
func listensOnly(r *run) error {
	p, err := r.alive()
	if err != nil {
		return err
	}
	pids, err := group(p.cmd.Process.Pid)
	if err != nil {
		return err
	}
	for _, pid := range pids {
		inodes := sockets(pid)
		for _, name := range []string{"tcp", "tcp6", "udp", "udp6", "unix"} {
			f, err := os.Open(filepath.Join("/proc", pid, "net", name))
			if err != nil {
				continue
			}
			lines := bufio.NewScanner(f)
			for lines.Scan() {
				if where, inode := listening(name, strings.Fields(lines.Text())); inodes[inode] && where != p.handshake.Socket {
					f.Close()
					return fmt.Errorf("it listens on %s %s", name, where)
				}
			}
			f.Close()
		}
	}
	return nil
}

// listening reads one row of a table in /proc/net: where it listens and its
// inode, both empty for what does not listen.
func listening(table string, row []string) (where, inode string) {
	switch table {
	case "unix": // Num RefCount Protocol Flags Type St Inode Path
		if len(row) < 7 {
			return "", ""
		}
		const accepts = 0x10000
		if flags, err := strconv.ParseUint(row[3], 16, 64); err != nil || flags&accepts == 0 {
			return "", ""
		}
		if len(row) > 7 {
			where = row[7]
		}
		return where, row[6]
	default: // sl local remote st queues timer retransmits uid timeout inode
		if len(row) < 10 || table[:3] == "tcp" && row[3] != "0A" {
			return "", ""
		}
		return row[1], row[9]
	}
}

// group lists the processes of a process group.
func group(leader int) ([]string, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []string
	for _, e := range entries {
		stat, err := os.ReadFile(filepath.Join("/proc", e.Name(), "stat"))
		if err != nil {
			continue
		}
		// The name in parentheses may hold anything.
		_, rest, _ := strings.Cut(string(stat[strings.LastIndexByte(string(stat), ')')+1:]), " ")
		if f := strings.Fields(rest); len(f) > 2 && f[2] == strconv.Itoa(leader) {
			pids = append(pids, e.Name())
		}
	}
	return pids, nil
}

// sockets are the inodes of a process's open sockets.
func sockets(pid string) map[string]bool {
	dir := filepath.Join("/proc", pid, "fd")
	entries, _ := os.ReadDir(dir)
	inodes := map[string]bool{}
	for _, e := range entries {
		if to, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil {
			if inode, ok := strings.CutPrefix(to, "socket:["); ok {
				inodes[strings.TrimSuffix(inode, "]")] = true
			}
		}
	}
	return inodes
}
